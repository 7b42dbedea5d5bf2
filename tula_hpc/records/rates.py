"""study_rates.json of a study."""

from __future__ import annotations

from tula_hpc.records.record import Record


class RateTrial(Record):
    """One rate that was tried for a study, on training samples held out for that."""

    family: str  # of optimizers, see `TunedRates.rates`
    lr: float
    accuracy: float | None  # None: it diverged, or there is none


class TunedRates(Record):
    """study_rates.json: workload.lr as chosen for a study at its small batch, and from what."""

    rates: dict[str, float]  # by family: the base optimizer, or the method where that changes its step (lars, lamb)
    trials: list[RateTrial]
