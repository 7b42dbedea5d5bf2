"""Public step times of six workloads on a 16-node GPU cluster, as columns; see `trace_errors`."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tula_hpc.analysis.models.regression import Array

WORKLOADS = ("imagenet", "cifar10", "yolov3", "deepspeech2", "bert", "ncf")


class Trace(NamedTuple):
    """Columns of equal length."""

    nodes: Array
    # over all nodes
    workers: Array
    local_batch: Array
    step_s: Array
    # part of step_s in which the computation waited for the all-reduce
    sync_s: Array

    @property
    def per_node(self) -> Array:
        """Workers per node; the mean if nodes differ."""
        return self.workers / self.nodes

    @property
    def compute_s(self) -> Array:
        """Step time without synchronization."""
        return self.step_s - self.sync_s

    def only(self, chosen: NDArray[np.bool_] | NDArray[np.intp]) -> Trace:
        """Return some of the rows."""
        return Trace(*(column[chosen] for column in self))


def folder() -> Path:
    """Return the folder of the traces, below TULA_SHARED_DATA or below `shared/data` next to the project."""
    root = os.environ.get("TULA_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data")
    return Path(root) / "traces"


def read_trace(workload: str) -> Trace:
    """Read all rows of one workload.

    Raises:
        FileNotFoundError: The traces are not on this machine.
    """
    rows = [*_placements(folder() / workload), *_scalability(folder() / workload)]
    return Trace(*np.array(rows, dtype=np.float64).T)


def single_workers(trace: Trace) -> Trace:
    """Return the rows with one worker on each of two or more nodes."""
    return trace.only((trace.workers == trace.nodes) & (trace.nodes > 1))


def _placements(path: Path) -> Iterator[tuple[float, ...]]:
    with (path / "placements.csv").open() as file:
        for row in csv.DictReader(file):
            workers = [int(digit) for digit in row["placement"]]
            yield len(workers), sum(workers), *_times(row)


def _scalability(path: Path) -> Iterator[tuple[float, ...]]:
    with (path / "scalability.csv").open() as file:
        for row in csv.DictReader(file):
            yield float(row["num_nodes"]), float(row["num_replicas"]), *_times(row)


def _times(row: dict[str, str]) -> tuple[float, float, float]:
    return float(row["local_bsz"]), float(row["step_time"]), float(row["sync_time"])
