"""Estimate of a worker's memory before any step was run, counted on fake tensors.

`tula footprint SWEEP.toml [--cluster CLUSTER.toml] [--set SECTION.KEY=VALUE ...] [--partition NAME]
[--json]`

The workload's model is built without memory, and forward pass, backward pass and optimizer run on
tensors that have shapes but no contents, at three local batches. The storages alive at each moment
give

    peak(b) = max(activations per sample × b + fixed, end of the backward pass, optimizer's step)

which is exact as far as tensors go. A model that needs values to run (own code that branches on
them) is counted on real tensors at small batches instead. Memory that a library takes inside an
operator cannot be seen; it is estimated:

- CPU: convolutions and the C library's heap. Blocks below 32 MiB come from the heap, and its holes
  stay resident: `HEAP_HOLES` of the bytes in such blocks, and `LIBRARIES_BYTES` for code and
  buffers of the first real step. Both were measured with
  `python -m tests.benchmarks.memory_estimate`.
- CUDA: `DEVICE_OVERHEAD` of the tensors' bytes, for workspaces and segments of the caching
  allocator. On an H100 transformers reserved that much, and convolutions more, up to 2.4 times the
  tensors' bytes: cuDNN's trials of its kernels take the room that is left ("On one H100" in
  tests/benchmarks/README.md). The CUDA context (some 0.5 GB) is not part of it; the cluster's
  `memory_margin` has to hold it.

torch is imported late, so that the command answers at once to --help and to wrong arguments.
Loader processes, the library of collectives and other users of a node are not counted either.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tula_hpc.command_errors import CommandParser, add_overrides, exit_code_of
from tula_hpc.config import (
    GIB,
    ClusterSpec,
    SweepSpec,
    WorkloadSpec,
    exposure_warning,
    load_together,
    local_batches,
    sweep_for,
)
from tula_hpc.config.workload import DATASETS
from tula_hpc.errors import InputError, StageError
from tula_hpc.files import write_out
from tula_hpc.formatting import plural, printable_output
from tula_hpc.records import Footprint

if TYPE_CHECKING:
    from tula_hpc.data.datasets import Data
    from tula_hpc.workloads.fake_steps import Counts, Shapes

# local batches at which to count: so large that activations make the peak; fake ones cost nothing
FAKE_BATCHES = (128, 512)
REAL_BATCHES = (4, 8)
MIB = 1024**2
HEAP_HOLES = 0.5
LIBRARIES_BYTES = 35 * MIB
DEVICE_OVERHEAD = 0.1


def host_baseline(sweep: SweepSpec, cluster: ClusterSpec) -> int:
    """Return this process's bytes with all that a worker imports, but no model; 0 for a GPU."""
    # import what a worker imports, whether or not this process has needed it so far
    from tula_hpc import process_memory
    from tula_hpc.data import datasets, images  # noqa: F401
    from tula_hpc.workloads import fake_steps  # noqa: F401
    from tula_hpc.workloads.optimizers import layer_wise_kinds

    if sweep.training.has_trust_ratios:
        # imports a library, which takes memory
        layer_wise_kinds()
    return process_memory.resident_bytes() if cluster.device == "cpu" else 0


def estimate_footprint(
    sweep: SweepSpec,
    cluster: ClusterSpec,
    *,
    host_bytes: int | None = None,
    data: Data | None = None,
) -> Footprint:
    """Count one worker's memory; see the module.

    `host_bytes` is an earlier `host_baseline`; None: that of this process now. `data` are those of
    the workload if they are loaded already.

    Raises:
        InputError: The model or data set is not as expected.
        RuntimeError: The model can be counted neither on fake tensors nor on real ones.
    """
    here = host_baseline(sweep, cluster)
    started = time.monotonic()
    host = here if host_bytes is None else min(here, host_bytes)
    world = min(sweep.search.cluster_sizes) * cluster.workers_per_node
    counts, method = _count(sweep.workload, world, cluster.device, data)
    counts = counts.with_step_copies(sweep.step_copies)
    found = Footprint(
        parameter_bytes=counts.parameters,
        gradient_bytes=counts.gradients,
        optimizer_bytes=counts.optimizer,
        activation_bytes_per_sample=round(counts.per_sample),
        fixed_bytes=round(counts.fixed),
        host_baseline_bytes=host,
        scaling_bytes=_scaling_bytes(sweep, world, counts),
        checkpoint_bytes=_checkpoint_bytes(sweep, world, counts),
        peaks=_peaks(sweep, cluster, counts, host),
        world_size=world,
        counted_at=counts.batches,
        method=method,
        assumptions=_assumptions(cluster.device, method),
        seconds=time.monotonic() - started,
    )
    return _with_limit(found, cluster)


def _scaling_bytes(sweep: SweepSpec, world: int, counts: Counts) -> int:
    # a single worker runs reference passes even with free_reference if its model turns out to have
    # BatchNorm
    copies = sweep.training.gradient_copies or int(sweep.training.free_reference and world == 1)
    return counts.gradients * copies


def _checkpoint_bytes(sweep: SweepSpec, world: int, counts: Counts) -> int:
    from tula_hpc.workloads.optimizers import shards

    # the same as in `analysis.planning.memory_limit.checkpoint_copy_bytes`; under ZeRO the counted
    # states are this worker's share
    state_copies = 2 * world if shards(sweep.workload, world) else 1
    return counts.parameters + counts.optimizer * state_copies


def _with_limit(found: Footprint, cluster: ClusterSpec) -> Footprint:
    limit = cluster.memory_limit_bytes
    if limit is None:
        return found
    allowed = int(limit * (1.0 - cluster.memory_margin))
    additional = found.scaling_bytes
    if cluster.device == "cpu":
        additional += -(-found.checkpoint_bytes // cluster.workers_per_node)
    fitting = [batch for batch, peak in found.peaks.items() if peak + additional <= allowed]
    return found.model_copy(
        update={
            "beside_bytes": additional,
            "limit_bytes": allowed,
            "largest_local_batch": max(fitting, default=0),
        }
    )


def _count(
    workload: WorkloadSpec, world: int, device: str, data: Data | None
) -> tuple[Counts, Literal["fake", "real"]]:
    """Count on fake tensors, or on real ones if the model needs values."""
    from tula_hpc.workloads.fake_steps import count

    shapes = _find_shapes(workload, data)
    try:
        return count(workload, shapes, world, device, FAKE_BATCHES, fake=True), "fake"
    except Exception:  # noqa: BLE001 # own code may raise anything where values are missing
        return count(workload, shapes, world, device, REAL_BATCHES, fake=False), "real"


def _find_shapes(workload: WorkloadSpec, data: Data | None) -> Shapes:
    """Return the shapes of a sample, from the catalog if it knows them, else from the data."""
    from torch.utils.data import default_collate

    from tula_hpc.data.datasets import build_data
    from tula_hpc.data.images import prepared
    from tula_hpc.workloads.fake_steps import Shapes

    facts = DATASETS.get(workload.dataset)
    if facts is not None and facts.classes is not None:
        size = workload.image_size or facts.image_size
        return Shapes.of_images(size, workload.classes or facts.classes)
    data = data or build_data(workload)
    loaded, targets = default_collate([data.test[0]])
    return Shapes(prepared(data.test, loaded), targets, data.classes, data.image_size, loaded)


def _peaks(sweep: SweepSpec, cluster: ClusterSpec, counts: Counts, host: int) -> dict[int, int]:
    """Return the bytes that count towards the limit by local batch of the search."""
    batches: set[int] = set()
    for nodes in sweep.search.cluster_sizes:
        batches.update(local_batches(sweep.search, nodes, cluster.workers_per_node))
    peaks = {}
    for batch in sorted(batches):
        tensors = counts.peak(batch)
        if cluster.device == "cuda":
            peaks[batch] = round(tensors * (1.0 + DEVICE_OVERHEAD))
        else:
            holes = HEAP_HOLES * counts.heap_bytes(batch)
            peaks[batch] = round(host + LIBRARIES_BYTES + tensors + holes)
    return peaks


def _assumptions(device: str, method: str) -> tuple[str, ...]:
    if device == "cuda":
        assumed = [
            "workspaces and the allocator's segments take "
            f"{100 * DEVICE_OVERHEAD:.0f} % of tensors' bytes",
            "the memory margin holds the CUDA context and the collectives' buffers",
        ]
    else:
        assumed = [
            f"holes in the heap take {100 * HEAP_HOLES:.0f} % of the bytes in blocks below 32 MiB",
            "interpreter and libraries take as much as in the process of this estimate",
        ]
    if method == "real":
        assumed.append("counted on real tensors: the model cannot run on fake ones")
    return tuple(assumed)


def _describe(footprint: Footprint) -> Iterator[str]:
    parts = {
        "parameters": footprint.parameter_bytes,
        "gradients": footprint.gradient_bytes,
        "optimizer states": footprint.optimizer_bytes,
        "activations of a sample": footprint.activation_bytes_per_sample,
        "gradient copies of the method": footprint.scaling_bytes,
        "copy for a checkpoint, on the host": footprint.checkpoint_bytes,
        "interpreter and libraries": footprint.host_baseline_bytes,
    }
    workers = plural(footprint.world_size, "worker")
    yield f"Memory of one worker in a training with {workers}, estimated before any profile, MiB:"
    yield from (f"  {name:<34}{size / MIB:>12,.1f}" for name, size in parts.items() if size)
    limit = ""
    if footprint.limit_bytes is not None:
        limit = f" (limit less margin: {footprint.limit_bytes / GIB:.2f} GiB)"
    yield f"Peak by local batch, GiB{limit}:"
    for batch, peak in footprint.peaks.items():
        fits = footprint.largest_local_batch is None or batch <= footprint.largest_local_batch
        yield f"  {batch:>8,}{peak / GIB:>12.2f}{'' if fits else '   too large'}"
    yield from (f"Assumed: {text}." for text in footprint.assumptions)


@printable_output()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 done, 1 cannot be estimated, 2 wrong input."""
    return exit_code_of(_run, _parser().parse_args(arguments), again=False)


def _run(options: argparse.Namespace) -> int:
    if warning := exposure_warning(options.set):
        print(f"warning: {warning}", file=sys.stderr)
    try:
        # a data set that is known by its name need not be on this machine
        sweep, cluster = load_together(
            options.sweep, options.cluster, options.set, check_paths=False
        )
        if sweep.workload.is_script:
            message = "only the built-in loop's memory can be estimated; for scripts it is measured"
            raise InputError(message, source=options.sweep, key="workload.script")
        names = _partition_names(options, sweep, cluster)
        parts = {name: cluster.part(name) for name in names}
        # measured before any is counted, which leaves further libraries in memory
        host_bytes = {name: host_baseline(sweep, part) for name, part in parts.items()}
        footprints = {
            name: estimate_footprint(sweep, part, host_bytes=host_bytes[name])
            for name, part in parts.items()
        }
    except InputError:
        raise
    # the user's code may raise anything
    except Exception as error:
        from tula_hpc.user_code import describe_error

        raise StageError(f"cannot be estimated: {describe_error(error)}") from error
    lines: list[str] = []
    for name, footprint in footprints.items():
        if options.json:
            lines.append(footprint.model_dump_json())
            continue
        if name:
            lines.append(f"Partition {name}:")
        lines += _describe(footprint)
    write_out("\n".join(lines) + "\n")
    return 0


def _partition_names(
    options: argparse.Namespace, sweep: SweepSpec, cluster: ClusterSpec
) -> list[str]:
    """Return the partition that the user names, else all with enough nodes for the sweep.

    Raises:
        InputError: There are several partitions, but JSON is for one alone.
    """
    if options.partition:
        return [options.partition]
    names = [name for name, part in cluster.by_name().items() if sweep_for(sweep, part) is not None]
    if options.json and len(names) > 1:
        expected = f"give {' or '.join(names)}"
        raise InputError(f"--json prints one of [[partitions]]; {expected}", source="--partition")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="tula footprint",
        description="Estimate a worker's memory without running a step and without a GPU.",
    )
    parser.add_argument("sweep", type=Path, metavar="SWEEP.toml", help="what to train")
    parser.add_argument(
        "--cluster", type=Path, metavar="CLUSTER.toml", help="device and memory limit"
    )
    add_overrides(parser)
    parser.add_argument(
        "--partition",
        default="",
        metavar="NAME",
        help="which of the cluster's [[partitions]] (default: each)",
    )
    parser.add_argument("--json", action="store_true", help="print the record as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
