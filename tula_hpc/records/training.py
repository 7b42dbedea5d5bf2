"""result.json of a training.

drift.json of a training.

study_rates.json of a study.
"""

from __future__ import annotations

from tula_hpc.records.base import Batch, Configuration, Nodes, Record, WorkersPerNode


class TrainResult(Record):
    """result.json: how training ended."""

    label: str
    nodes: Nodes
    workers_per_node: WorkersPerNode
    local_batch: Batch
    global_batch: Batch
    method: str
    epochs: int
    steps: int
    samples_seen: int
    final_loss: float
    test_accuracy: float | None  # None: of targets that know no right and wrong
    test_top5_accuracy: float | None
    train_time_s: float  # sum of epoch_time_s
    wall_time_s: float  # from the first start to the end, with queueing between restarts
    restarts: int
    test_loss: float | None = None
    diverged: bool = False  # of a study: the loss was not finite, which ended it; its accuracies are 0
    train_accuracy: float | None = None  # of a study: on a fixed choice of training samples, not augmented
    train_top5_accuracy: float | None = None


class StepParts(Record):
    """Seconds of the parts of a step that are timed apart, the slowest worker's; None where one is not known."""

    data_time_s: float | None = None  # waiting for the loader
    compute_time_s: float | None = None  # forward and backward without synchronization
    allreduce_time_s: float | None = None  # bare all-reduce of the gradient's bytes


class Drift(Record):
    """drift.json: a training whose step times lie beyond the plan's prediction, and which part it is."""

    nodes: Nodes
    workers_per_node: WorkersPerNode
    local_batch: Batch
    measured_s: float
    predicted_s: float
    part: str  # compute, network, loader or unknown
    partition: str = ""
    measured: StepParts
    expected: StepParts

    @property
    def configuration(self) -> Configuration:
        """What was trained with."""
        return Configuration(self.nodes, self.workers_per_node, self.local_batch)


class RateTrial(Record):
    """One rate that was tried for a study, on training samples held out for that."""

    family: str  # of optimizers, see `TunedRates.rates`
    lr: float
    accuracy: float | None  # None: it diverged, or there is none


class TunedRates(Record):
    """study_rates.json: workload.lr as chosen for a study at its small batch, and from what."""

    rates: dict[str, float]  # by family: the base optimizer, or the method where that changes its step (lars, lamb)
    trials: list[RateTrial]
