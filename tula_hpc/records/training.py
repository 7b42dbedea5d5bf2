"""result.json and drift.json of a training; study_rates.json of a study."""

from __future__ import annotations

from tula_hpc.records.base import Batch, Configuration, Nodes, Record, WorkersPerNode

# note on a script's training whose sweep file has workload.metric
WITHOUT_SCORES = "workload.metric has matched no line of the script's output: scores are unknown"
# note on a training whose loss is the user's own function
NOT_FINITE = (
    "the loss on the test set is inf or nan: look for such values in its samples, and in the "
    "model's outputs for them"
)


class TrainResult(Record):
    """result.json: the end of a training."""

    label: str
    nodes: Nodes
    workers_per_node: WorkersPerNode
    local_batch: Batch
    global_batch: Batch
    method: str
    epochs: int
    steps: int
    samples_seen: int
    # None: the script does not report it
    final_loss: float | None
    # from 0 to 1; None: the targets are not right or wrong, as in a regression
    test_accuracy: float | None
    test_top5_accuracy: float | None
    # seconds of steps alone: the sum of epoch_time_s
    train_time_s: float
    # from the first start to the end, with queueing between restarts
    wall_time_s: float
    restarts: int
    test_loss: float | None = None
    # in a study: the loss was not finite, which ended the training; its accuracies are 0
    diverged: bool = False
    # in a study: accuracy on fixed training samples, not augmented
    train_accuracy: float | None = None
    train_top5_accuracy: float | None = None
    # Seconds from the start of a job to the start of its training loop. Like the next two fields, a
    # sum over all runs as far as checkpoints remember them, and not part of train_time_s.
    starts_s: float
    # None: a script's training
    evaluation_s: float | None = None
    # seconds in which steps waited for a checkpoint to be copied or written
    saving_s: float
    # steps of a script's other optimizers after its last step, as if it trained something else
    further_steps: int = 0

    @property
    def is_test_finite(self) -> bool:
        """False if the loss on the test set was inf or nan; only for trainings that compute it."""
        return self.test_loss is not None or self.diverged

    @property
    def is_scored(self) -> bool:
        """True if accuracy or loss on the test set is known."""
        return (self.test_accuracy, self.test_loss) != (None, None)


class StepParts(Record):
    """Seconds of a step's separately timed parts, by the slowest worker; None: unknown."""

    # waiting for the loader
    data_time_s: float | None = None
    # forward and backward without synchronization
    compute_time_s: float | None = None
    # bare all-reduce of the gradient's bytes
    allreduce_time_s: float | None = None


class Drift(Record):
    """drift.json: step time of a training beyond the plan's prediction, and the part at fault."""

    nodes: Nodes
    workers_per_node: WorkersPerNode
    local_batch: Batch
    measured_s: float
    predicted_s: float
    # compute, network, loader or unknown
    part: str
    partition: str = ""
    measured: StepParts
    expected: StepParts

    @property
    def configuration(self) -> Configuration:
        """Return the configuration of the training."""
        return Configuration(self.nodes, self.workers_per_node, self.local_batch)


class RateTrial(Record):
    """A learning rate that a study tried, scored on held-out training samples."""

    # key of `TunedRates.rates`
    family: str
    lr: float
    # None: the trial diverged, or targets have no accuracy
    accuracy: float | None


class TunedRates(Record):
    """study_rates.json: the workload.lr that a study chose at its small batch, with the trials."""

    # by family: the base optimizer, or the method where that changes its step (lars, lamb)
    rates: dict[str, float]
    trials: list[RateTrial]
