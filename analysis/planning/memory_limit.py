"""Memory limit of a worker, and what a training needs in addition to what was profiled.

The limit follows from the cluster file and the devices that profiles saw:

    limit = min(device_memory_gb, least memory of any worker's device)
            − most memory outside of torch's allocator

Memory models predict the memory that torch's allocator reserves in the worker's own process.
Outside of it lie the CUDA context, the buffers of NCCL, cuBLAS and cuDNN, and the memory of other
processes on the device, which may be there in training as well. On CPUs and in older records none
of this is measured: there the cluster file alone gives the limit.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tula_hpc.analysis.models.profiles import Summary, update_time
from tula_hpc.analysis.models.regression import Array
from tula_hpc.config import ClusterSpec, TrainingSpec
from tula_hpc.formatting import format_bytes
from tula_hpc.records import MemoryUse


def memory_limit_bytes(cluster: ClusterSpec, uses: Iterable[MemoryUse]) -> int | None:
    """Return the limit of a worker by the module's equation; None if unknown."""
    stated = cluster.memory_limit_bytes
    seen = _seen(cluster, uses)
    if seen is None:
        return stated
    total, other = seen
    available = total if stated is None else min(total, stated)
    return max(1, available - other)


def describe_limit(cluster: ClusterSpec, uses: Iterable[MemoryUse]) -> list[str]:
    """Return a sentence on how the limit comes about; none if no device's memory was measured."""
    uses = list(uses)
    stated = cluster.memory_limit_bytes
    seen = _seen(cluster, uses)
    if seen is None:
        return []
    total, other = seen
    limit = format_bytes(memory_limit_bytes(cluster, uses))
    whole = f"the {format_bytes(total)} that a GPU has"
    if stated is not None and stated < total:
        whole = f"the {format_bytes(stated)} of device_memory_gb"
    return [
        f"the memory limit is {limit}: {whole}, less {format_bytes(other)} outside of torch's "
        "allocator (CUDA context, NCCL, cuDNN, other processes) in profiles"
    ]


def on_top_bytes(
    summary: Summary, cluster: ClusterSpec, training: TrainingSpec, workers: Array
) -> Array:
    """Return the bytes per worker that a training needs in addition to a profiled step.

    These are AGS's copies of gradients, and on CPUs the copy that a checkpoint is written from.
    """
    # with `free_reference` only a single worker takes an extra pass, and only if it was timed
    passes = (workers == 1) & (update_time(summary).predict(workers) > 0)
    copies = np.where(training.free_reference, passes, training.gradient_copies).astype(np.float64)
    scaling = copies * max(row.memory.gradient_bytes for row in summary.profiles)
    copied = checkpoint_copy_bytes(summary) if cluster.device == "cpu" else 0
    # one worker of a node holds the copy, but all its workers share the memory
    return scaling + -(-copied // cluster.workers_per_node)


def checkpoint_copy_bytes(summary: Summary) -> int:
    """Return the host memory of the copy that a checkpoint is written from in the background.

        parameters + optimizer states of its own + 2 × states that are divided over the workers

    since divided states (ZeRO) are first gathered on the first node and then copied. Only that node
    holds the copy. On CPUs it comes on top of a step's peak, on GPUs it is memory of the host.
    """
    largest = 0
    for row in summary.profiles:
        use = row.memory
        whole = use.parameter_bytes + use.optimizer_bytes - use.sharded_bytes
        largest = max(largest, whole + 2 * use.sharded_bytes * row.configuration.world_size)
    return largest


def allowed_bytes(cluster: ClusterSpec, uses: Iterable[MemoryUse]) -> float | None:
    """Return the limit of a worker less its margin; None if unknown."""
    limit = memory_limit_bytes(cluster, uses)
    return None if limit is None else limit * (1.0 - cluster.memory_margin)


def _seen(cluster: ClusterSpec, uses: Iterable[MemoryUse]) -> tuple[int, int] | None:
    """Return the smallest device's memory, and the most outside of torch's allocator; or None."""
    pairs = [(use.total_bytes, use.other_bytes or 0) for use in uses if use.total_bytes]
    if cluster.device == "cpu" or not pairs:
        return None
    totals, others = zip(*pairs, strict=True)
    return min(totals), max(others)
