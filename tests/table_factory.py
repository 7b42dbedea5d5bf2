"""Tables of made-up candidates, for tests of what ranks them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from tula_hpc.analysis.models.regression import Array
from tula_hpc.analysis.planning.candidates import CandidateTable
from tula_hpc.analysis.planning.knee import TrainTime


class Row(NamedTuple):
    """One candidate, with the fields that the ranking uses."""

    nodes: int
    local_batch: int
    time_s: float
    cost: float = 1.0
    why: int = 0
    part: int = 0

    @property
    def global_batch(self) -> int:
        return self.nodes * self.local_batch


def table_of(rows: Iterable[Row]) -> CandidateTable:
    nodes, batch, time, cost, why, part = (np.array(column) for column in zip(*rows, strict=True))
    time, cost, nothing = time.astype(np.float64), cost.astype(np.float64), np.zeros(len(nodes))
    return CandidateTable(
        part=part,
        nodes=nodes,
        workers_per_node=np.ones_like(nodes),
        local_batch=batch,
        global_batch=nodes * batch,
        accumulation=np.ones_like(nodes),
        step_time_s=time,
        epoch_time_s=time,
        train_time_s=time,
        wall_time_s=time,
        requeues=nothing,
        cost=cost,
        energy_kwh=nothing,
        checkpoint_s=nothing,
        evaluation_s=nothing,
        saving_s=nothing,
        progress_time_s=time,
        peak_bytes=nothing,
        why=why,
        measured=np.zeros(len(nodes), dtype=bool),
    )


def hyperbola(fixed: float, per_sample: float = 0.0) -> TrainTime:
    """Return the training time per sample of a model whose step takes `fixed + per_sample × b`."""

    def train_time_s(_: int, nodes: Array, workers_per_node: Array, local_batch: Array) -> Array:
        return (fixed + per_sample * local_batch) / (nodes * workers_per_node * local_batch)

    return train_time_s


def rows_of(train_time_s: TrainTime, nodes: int, batches: list[int]) -> list[Row]:
    count, batch = np.full(len(batches), float(nodes)), np.array(batches, dtype=float)
    times = train_time_s(0, count, np.ones_like(count), batch)
    return [Row(nodes, b, float(t)) for b, t in zip(batches, times, strict=True)]
