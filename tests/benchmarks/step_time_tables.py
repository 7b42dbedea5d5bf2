"""Public step times of clusters as one kind of table; the README next to the data names the sources."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.benchmarks.traces import WORKLOADS, folder, read_trace
from tula_hpc.analysis.models.regression import Array

FILES = {"K80": "gavel_k80", "2080Ti": "sia_rtx2080ti", "Quadro": "sia_quadro"}


class Table(NamedTuple):
    """Columns of equal length."""

    nodes: Array
    per_node: Array
    local_batch: Array
    step_s: Array
    # step time of one GPU at that local batch; NaN where it was not measured
    compute_s: Array

    def only(self, rows: NDArray[np.bool_]) -> Table:
        """Return some of the rows."""
        return Table(*(column[rows] for column in self))

    def joined(self, other: Table) -> Table:
        """Return the rows of both tables."""
        return Table(*(np.concatenate(pair) for pair in zip(self, other, strict=True)))

    def computation(self) -> Table:
        """Return the rows as if only their computation had been timed."""
        return self._replace(step_s=np.full_like(self.step_s, np.nan))


def read_tables() -> Iterator[tuple[str, str, Table]]:
    """Yield cluster, workload and rows; only placements whose mean number of GPUs per node is whole."""
    for workload in WORKLOADS:
        trace = read_trace(workload)
        rows = np.stack([trace.nodes, trace.per_node, trace.local_batch, trace.step_s], axis=1)
        yield "T4", workload, _table(rows[rows[:, 1] == np.round(rows[:, 1])])
    for cluster, name in FILES.items():
        by_workload: dict[str, list[tuple[float, ...]]] = {}
        with (folder().parent / "traces_more" / f"{name}.csv").open() as file:
            for row in csv.DictReader(file):
                values = tuple(float(row[key]) for key in ("nodes", "gpus_per_node", "local_batch", "step_time_s"))
                # rows with several K80 on a node come from other machines
                if cluster != "K80" or values[1] == 1.0:
                    by_workload.setdefault(row["workload"], []).append(values)
        for workload, found in by_workload.items():
            if len({values[:2] for values in found}) > 1:
                yield cluster, workload, _table(np.array(found))


def _table(rows: Array) -> Table:
    """Make a table from rows, with the step time of one GPU as the computation."""
    alone = {row[2]: row[3] for row in rows if row[0] * row[1] == 1.0}
    compute_s = np.array([alone.get(batch, np.nan) for batch in rows[:, 2]])
    nodes, per_node, batch, step_s = rows.T
    return Table(nodes, per_node, batch, step_s, compute_s)
