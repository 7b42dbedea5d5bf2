"""result.json and drift.json of a training; study_rates.json of a study."""

from __future__ import annotations

from tula_hpc.records.base import Batch, Configuration, Nodes, Record, WorkersPerNode

# of a script that has a workload.metric
WITHOUT_SCORES = "workload.metric has matched no line of the script's output: scores are unknown"
# of a training with a loss of the user's own
NOT_FINITE = (
    "the loss on the test set is inf or nan: look for such values in its samples, and in what the "
    "model makes of them"
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
    # None: of a script that does not tell
    final_loss: float | None
    # None: of targets that know no right and wrong
    test_accuracy: float | None
    test_top5_accuracy: float | None
    # sum of epoch_time_s
    train_time_s: float
    # from the first start to the end, with queueing between restarts
    wall_time_s: float
    restarts: int
    test_loss: float | None = None
    # of a study: the loss was not finite, which ended it; its accuracies are 0
    diverged: bool = False
    # of a study: on a fixed choice of training samples, not augmented
    train_accuracy: float | None = None
    train_top5_accuracy: float | None = None
    # beside train_time_s, over all runs as far as checkpoints remember them: from the start of a job
    # to that of its training loop
    starts_s: float
    # None: of a script
    evaluation_s: float | None = None
    # for which steps stood still while a checkpoint was copied, or waited for
    saving_s: float
    # of a script's other optimizers after the last step, as in further trainings
    further_steps: int = 0

    @property
    def is_test_finite(self) -> bool:
        """True unless the loss on the test set, which is always known then, was inf or nan."""
        return self.test_loss is not None or self.diverged

    @property
    def is_scored(self) -> bool:
        """True if accuracy or loss on the test set are known."""
        return (self.test_accuracy, self.test_loss) != (None, None)


class StepParts(Record):
    """Seconds of the separately timed parts of a step, of the slowest worker; None if unknown."""

    # waiting for the loader
    data_time_s: float | None = None
    # forward and backward without synchronization
    compute_time_s: float | None = None
    # bare all-reduce of the gradient's bytes
    allreduce_time_s: float | None = None


class Drift(Record):
    """drift.json: step times of a training beyond the plan's prediction, and the part at fault."""

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
    """Learning rate that was tried for a study on held-out training samples."""

    # of optimizers, see `TunedRates.rates`
    family: str
    lr: float
    # None: it diverged, or there is none
    accuracy: float | None


class TunedRates(Record):
    """study_rates.json: workload.lr as chosen for a study at its small batch, with the trials."""

    # by family: the base optimizer, or the method where that changes its step (lars, lamb)
    rates: dict[str, float]
    trials: list[RateTrial]
