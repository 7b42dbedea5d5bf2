"""result.json of a training."""

from __future__ import annotations

from tula_hpc.records.record import Batch, Nodes, Record, WorkersPerNode


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
