"""An estimate of memory before any step was run: what tensors hold in a training step, counted on fake tensors.

`tula footprint SWEEP.toml [--cluster CLUSTER.toml] [--set section.key=value ...] [--partition NAME]
[--json]`

The workload's model is built without memory, and forward pass, backward pass and optimizer are gone
through with tensors that have shapes but no contents, at three local batches. From the storages
alive at each moment follow

    peak(b) = max(activations per sample × b + fixed, end of the backward pass, optimizer's step)

exactly as far as tensors go. A model that needs values to run (own code that branches on them) is
counted on real tensors at small batches instead. What a library takes inside of an operator cannot
be seen; it is allowed for:

- CPU: convolutions and the C library's heap. Blocks below 32 MiB come from the heap, whose holes
  stay resident: `HEAP_HOLES` of what such blocks hold, and `LIBRARIES_BYTES` for code and buffers
  of the first real step. Both were measured with `python -m tests.benchmarks.memory_estimate`.
- CUDA: `DEVICE_OVERHEAD` of what tensors hold, for workspaces and the caching allocator's segments:
  an assumption. The CUDA context (some 0.5 GB) is not part of it; the cluster's `memory_margin` has
  to hold it.

Loader processes, the library of collectives and other users of a node are not counted either.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from torch.utils.data import default_collate

from tula_hpc import process_memory as resident
from tula_hpc.config import (
    GIB,
    ClusterSpec,
    SweepSpec,
    WorkloadSpec,
    load_together,
    local_batches,
    sweep_for,
    told_by_set,
)
from tula_hpc.config.workload import DATASETS
from tula_hpc.data.datasets import build_data
from tula_hpc.data.images import prepared
from tula_hpc.env import begin_process
from tula_hpc.errors import InputError
from tula_hpc.files import write_out
from tula_hpc.formatting import printable_output
from tula_hpc.records import Footprint
from tula_hpc.user_code import told
from tula_hpc.workloads.fake_steps import Counts, Shapes, count
from tula_hpc.workloads.optimizers import layer_wise_kinds, shards

# counted at: so large that activations make the peak; without contents they cost nothing
FAKE_BATCHES = (128, 512)
REAL_BATCHES = (4, 8)
MIB = 1024**2
HEAP_HOLES = 0.5
LIBRARIES_BYTES = 35 * MIB
DEVICE_OVERHEAD = 0.1


def estimate_footprint(sweep: SweepSpec, cluster: ClusterSpec) -> Footprint:
    """Count one worker's memory; see the module.

    Raises:
        InputError: The model or data set is not as expected.
        RuntimeError: The model can be counted neither on fake tensors nor on real ones.
    """
    started = time.monotonic()
    if sweep.training.has_trust_ratios:
        # for what their library takes in memory
        layer_wise_kinds()
    host = resident.resident_bytes() if cluster.device == "cpu" else 0
    world = min(sweep.search.cluster_sizes) * cluster.workers_per_node
    shapes = find_shapes(sweep.workload)
    counts, method = _count_somehow(sweep.workload, shapes, world, cluster.device)
    counts = counts.with_step_copies(sweep.step_copies)
    batches = _local_batches(sweep, cluster)
    peaks = {batch: round(_limit_counts(counts, batch, cluster.device, host)) for batch in batches}
    # a single worker takes passes though norms are wanted for free, where its model turns out to
    # have BatchNorm
    copies = sweep.training.gradient_copies or int(sweep.training.free_reference and world == 1)
    scaling = counts.gradients * copies
    limit = cluster.memory_limit_bytes
    allowed = None if limit is None else int(limit * (1.0 - cluster.memory_margin))
    copied = _checkpoint_copy(counts, sweep.workload, world)
    beside = scaling + (-(-copied // cluster.workers_per_node) if cluster.device == "cpu" else 0)
    fitting = [
        batch for batch, peak in peaks.items() if allowed is not None and peak + beside <= allowed
    ]
    return Footprint(
        parameter_bytes=counts.parameters,
        gradient_bytes=counts.gradients,
        optimizer_bytes=counts.optimizer,
        activation_bytes_per_sample=round(counts.per_sample),
        fixed_bytes=round(counts.fixed),
        host_baseline_bytes=host,
        scaling_bytes=scaling,
        checkpoint_bytes=copied,
        peaks=peaks,
        limit_bytes=allowed,
        largest_local_batch=None if allowed is None else max(fitting, default=0),
        world_size=world,
        counted_at=counts.batches,
        method=method,
        assumptions=_assumptions(cluster.device, method),
        seconds=time.monotonic() - started,
    )


def find_shapes(workload: WorkloadSpec) -> Shapes:
    """Of a sample, from the catalog where it knows them, else from the data.

    Raises:
        InputError: The data is not as expected.
    """
    facts = DATASETS.get(workload.dataset)
    if facts is not None and facts.classes is not None:
        size = workload.image_size or facts.image_size
        return Shapes.of_images(size, workload.classes or facts.classes)
    data = build_data(workload)
    loaded, targets = default_collate([data.test[0]])
    return Shapes(prepared(data.test, loaded), targets, data.classes, data.image_size, loaded)


def _local_batches(sweep: SweepSpec, cluster: ClusterSpec) -> list[int]:
    """Every local batch of the search, ascending."""
    sizes = sweep.search.cluster_sizes
    return sorted(
        {b for nodes in sizes for b in local_batches(sweep.search, nodes, cluster.workers_per_node)}
    )


def _checkpoint_copy(counts: Counts, workload: WorkloadSpec, world: int) -> int:
    """As `analysis.memory.checkpoint_copy_bytes` has it; `counts.optimizer` is this worker's share under ZeRO."""
    return counts.parameters + counts.optimizer * (2 * world if shards(workload, world) else 1)


def _limit_counts(counts: Counts, local_batch: int, device: str, host: int) -> float:
    """What the limit counts at a local batch, bytes."""
    peak = counts.peak(local_batch)
    if device == "cuda":
        return peak * (1.0 + DEVICE_OVERHEAD)
    return host + LIBRARIES_BYTES + peak + HEAP_HOLES * counts.heap_bytes(local_batch)


def _assumptions(device: str, method: str) -> tuple[str, ...]:
    said = []
    if device == "cuda":
        said.append(
            f"workspaces and the allocator's segments take {DEVICE_OVERHEAD:.0%} of what tensors hold"
        )
        said.append("the CUDA context and the collectives' buffers are left to the margin")
    else:
        said.append(f"holes in the heap take {HEAP_HOLES:.0%} of what blocks below 32 MiB hold")
        said.append("interpreter and libraries need what they need in the process that estimates")
    if method == "real":
        said.append("counted on real tensors: the model cannot run on fake ones")
    return tuple(said)


def _count_somehow(
    workload: WorkloadSpec, shapes: Shapes, world: int, device: str
) -> tuple[Counts, Literal["fake", "real"]]:
    """On fake tensors, or on real ones where the model needs values."""
    try:
        return count(workload, shapes, world, device, FAKE_BATCHES, fake=True), "fake"
    except Exception:  # noqa: BLE001 # whatever own code does with missing values
        return count(workload, shapes, world, device, REAL_BATCHES, fake=False), "real"


def describe(footprint: Footprint) -> Iterator[str]:
    """The estimate for a person, line by line."""
    parts = {
        "parameters": footprint.parameter_bytes,
        "gradients": footprint.gradient_bytes,
        "optimizer states": footprint.optimizer_bytes,
        "activations of a sample": footprint.activation_bytes_per_sample,
        "gradient copies of the method": footprint.scaling_bytes,
        "copy for a checkpoint, on the host": footprint.checkpoint_bytes,
        "interpreter and libraries": footprint.host_baseline_bytes,
    }
    yield f"One of {footprint.world_size} worker(s), before any profile, MiB:"
    yield from (f"  {name:<34}{size / MIB:>12,.1f}" for name, size in parts.items() if size)
    limit = (
        ""
        if footprint.limit_bytes is None
        else f" (limit less margin: {footprint.limit_bytes / GIB:.2f} GiB)"
    )
    yield f"Peak by local batch, GiB{limit}:"
    for batch, peak in footprint.peaks.items():
        fits = footprint.largest_local_batch is None or batch <= footprint.largest_local_batch
        yield f"  {batch:>8,}{peak / GIB:>12.2f}{'' if fits else '   too large'}"
    yield from (f"Assumed: {text}." for text in footprint.assumptions)


@printable_output()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 done, 1 cannot be estimated, 2 bad input."""
    options = _parser().parse_args(arguments)
    begin_process()
    if warning := told_by_set(options.set):
        print(f"warning: {warning}", file=sys.stderr)
    try:
        # data that is known by its name need not be here
        sweep, cluster = load_together(
            options.sweep, options.cluster, options.set, check_paths=False
        )
        footprints = {
            name: estimate_footprint(sweep, cluster.part(name))
            for name in _wanted(options, sweep, cluster)
        }
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    except Exception as error:  # noqa: BLE001 # the user's code may raise anything
        print(f"cannot be estimated: {told(error)}", file=sys.stderr)
        return 1
    write_out("\n".join(_answer(options, footprints)) + "\n")
    return 0


def _wanted(options: argparse.Namespace, sweep: SweepSpec, cluster: ClusterSpec) -> list[str]:
    """The partitions to estimate for: the one that is named, else all that have nodes enough.

    Raises:
        InputError: A record can be of one alone.
    """
    if options.partition:
        return [options.partition]
    names = [
        name for name in cluster.part_names() if sweep_for(sweep, cluster.part(name)) is not None
    ]
    if options.json and len(names) > 1:
        raise InputError(
            f"a record is of one of [[partitions]]; give {' or '.join(names)}", source="--partition"
        )
    return names


def _answer(options: argparse.Namespace, footprints: Mapping[str, Footprint]) -> Iterator[str]:
    """What the command prints, line by line."""
    for name, footprint in footprints.items():
        if options.json:
            yield footprint.model_dump_json()
            continue
        if name:
            yield f"Partition {name}:"
        yield from describe(footprint)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tula footprint",
        description="Estimate a worker's memory without running a step and without a GPU.",
    )
    parser.add_argument("sweep", type=Path, metavar="SWEEP.toml")
    parser.add_argument(
        "--cluster", type=Path, metavar="CLUSTER.toml", help="device and memory limit"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="section.key=value",
        help="override a key of the sweep, or of the cluster as cluster.key=value, and of one of its partitions as "
        "cluster.partitions.NAME.key=value; repeatable",
    )
    parser.add_argument(
        "--partition", default="", help="which of the cluster's [[partitions]] (default: each)"
    )
    parser.add_argument("--json", action="store_true", help="print the record as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
