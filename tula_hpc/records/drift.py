"""drift.json of a training."""

from __future__ import annotations

from tula_hpc.records.record import Batch, Configuration, Nodes, Record, WorkersPerNode


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
