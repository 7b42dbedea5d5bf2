"""plan.json."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from tula_hpc.records.base import Batch, Configuration, Nodes, Record, WorkersPerNode


class Candidate(Record):
    """One configuration with what the models say of it."""

    partition: str = ""  # which of [[partitions]]; empty where the cluster has none
    nodes: Nodes
    workers_per_node: WorkersPerNode = 1
    local_batch: Batch
    global_batch: Batch
    step_time_s: float
    epoch_time_s: float
    train_time_s: float  # steps alone
    wall_time_s: float | None = (
        None  # expected, with starts, checkpoints and what restarts repeat; not the queue. This is paid for
    )
    cost: float
    currency: Literal["USD", "SU"] = "USD"  # SU: service units, that is billing units times hours
    energy_kwh: float | None = None  # of the site, its overhead included; None where no power is known
    checkpoint_minutes: float | None = None  # between two checkpoints, as time and cost reckon; training measures anew
    # of wall_time_s: steps, evaluation, checkpoints, starts, repeated (what restarts do again)
    wall_parts_s: dict[str, float] = Field(default={})
    peak_memory_bytes: int
    interval_90: dict[str, tuple[float, float]] = Field(default={})
    feasible: bool = True
    measured: bool = False
    why: str = ""  # why it is not feasible
    pareto: bool = False  # no feasible candidate is both faster and cheaper

    @property
    def configuration(self) -> Configuration:
        """The configuration alone."""
        return Configuration(self.nodes, self.workers_per_node, self.local_batch)

    @property
    def expected_time_s(self) -> float:
        """Expected wall time; in plans that do not tell it, the time of the steps."""
        return self.train_time_s if self.wall_time_s is None else self.wall_time_s


class Knee(Record):
    """The knee of the curve of training time against global batch, and how sure the measurements make it."""

    global_batch: float | None  # None: the curve has no knee
    interval_90: tuple[float, float] | None = None  # over curves drawn from the fit's uncertainty, of those with a knee
    share_without_knee: float = 0.0  # of those curves


class Plan(Record):
    """plan.json: the chosen configuration, every candidate, and what to fall back to."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    objective: str
    chosen: Candidate
    reason: str  # one sentence: why this one
    candidates: list[Candidate]
    fallbacks: list[Candidate]  # ranked smaller batches for OOM, first to be tried first
    candidates_total: int | None = None  # where candidates holds only the best of so many
    runners_up: list[Candidate] = Field(default=[])  # what would have been chosen next, best first
    binding: list[str] = Field(default=[])  # constraints that rule out a better candidate
    knee: Knee | None = None
    critical_batch: float | None = None  # samples; gradient noise scale, weighted mean of tr(Σ) over that of |G|²
    critical_batch_source: Literal["training", "profile"] | None = None  # the training's metrics, or the first weights
    notes: list[str] = Field(default=[])  # what prices and times assume
    models: dict[str, Any]
    warnings: list[str] = Field(default=[])
    dataset_samples: int
    epochs: int
    memory_limit_bytes: int | None = None

    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)

    @property
    def pareto(self) -> list[Candidate]:
        """The Pareto front of expected wall time and cost, fastest first; without a wall time that of the steps."""
        front = (candidate for candidate in self.candidates if candidate.pareto)
        return sorted(front, key=lambda candidate: (candidate.expected_time_s, candidate.cost))
