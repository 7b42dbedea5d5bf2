"""Estimate before the first profile which batches fit into memory, and say why if none does.

The estimate is made in a process of its own, since it needs torch. `profiling/profile_loop.py`
handles a profile that runs out of memory; `next_candidate` of `stages/train.py` finds the smaller
batch for a training that does.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from tula_hpc.failure_kinds import Failure
from tula_hpc.formatting import format_bytes, last_line
from tula_hpc.python_path import start_of_python
from tula_hpc.records import Footprint, RunDirectory, is_usable
from tula_hpc.stages.context import Sweep

# time limit of the estimate; on a busy login node most of the time goes into importing torch
TIMEOUT_S = 300.0


class Estimate(NamedTuple):
    """Estimate of memory, or the reason why there is none."""

    footprint: Footprint | None
    reason: str = ""

    @property
    def trusted_batch(self) -> int | None:
        """Return the largest local batch that fits, 0 if none does, None if unknown."""
        return None if self.footprint is None else self.footprint.largest_local_batch

    def describe(self) -> str:
        """Describe in a sentence which local batches fit, or why that is unknown."""
        if self.footprint is None:
            return f"no estimate of memory ({self.reason}): the search begins with all batches"
        if self.trusted_batch == 0:
            return "by an estimate, no local batch fits into memory"
        return f"by an estimate, local batches up to {self.trusted_batch} fit into memory"


def run_apart(
    command: list[str], timeout_s: float, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str] | str:
    """Run the user's code in a process; return the ended process, or the reason why there is none.

    `variables` is its environment; None means that of this process.
    """
    try:
        # no input: a debugger in the code would ask a question that is not shown, and wait
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=variables,
        )
    except subprocess.TimeoutExpired:
        return f"took more than {timeout_s:.0f} s"
    except OSError as error:
        return f"could not be started: {error.strerror or error}"


def estimate(sweep_file: Path, cluster_file: Path, *, partition: str = "") -> Estimate:
    """Run `tula footprint`; return the reason instead of raising if that fails."""
    inputs = [str(sweep_file), "--cluster", str(cluster_file), "--partition", partition, "--json"]
    command = [*start_of_python(), "-m", "tula_hpc.workloads.footprint", *inputs]
    done = run_apart(command, TIMEOUT_S)
    if isinstance(done, str):
        return Estimate(None, f"the estimate {done}")
    if done.returncode != 0:
        return Estimate(
            None, last_line(done.stderr) or f"the estimate ended with exit code {done.returncode}"
        )
    try:
        return Estimate(Footprint.model_validate_json(last_line(done.stdout)))
    except ValidationError as error:
        return Estimate(None, f"the estimate is damaged: {error.errors()[0]['msg']}")


def none_fits(part: Sweep, footprint: Footprint | None) -> str:
    """Say why no batch fits on a partition by the estimate; "" if one may, or if it is not used."""
    wanted = part.spec.search.estimate and not measured_anything(part)
    if footprint is None or footprint.largest_local_batch != 0 or not wanted:
        return ""
    return _why_none_fits(part, footprint)


def _why_none_fits(part: Sweep, footprint: Footprint) -> str:
    from tula_hpc.analysis.models.fitted import MORE_MEMORY

    limit, before = footprint.limit_bytes or 0, footprint.before_batch_bytes
    smallest = min(footprint.peaks)
    needed = footprint.peaks[smallest] + footprint.beside_bytes
    advice = MORE_MEMORY
    key = "device_memory_gb" if part.cluster.device == "cuda" else "memory_gb"
    if before > limit:
        advice = f"raise {key} if the machine has more, or use a larger machine or a smaller model"
        if footprint.world_size > 1 and part.spec.workload.zero_stage == 0:
            states = format_bytes(footprint.optimizer_bytes)
            advice += f", or share the {states} of optimizer states by workload.zero_stage = 1"
    where = f" of partition {part.partition!r}" if part.partition else ""
    host = footprint.host_baseline_bytes
    libraries = f" ({format_bytes(host)} of it interpreter and libraries)" if host else ""
    value = getattr(part.cluster, key)
    source = "the limit" if value is None else f"{key} = {value:g} of the cluster file"
    return (
        f"no batch fits into memory{where}: by an estimate a worker uses {format_bytes(before)} "
        f"before any batch{libraries} and {format_bytes(needed)} with the smallest local batch, {smallest}, "
        f"but only {format_bytes(limit)} are allowed ({source}, less memory_margin); {advice}; "
        "search.estimate = false tries it all the same"
    )


def only_out_of_memory(sweep: Sweep) -> str:
    """Say in a sentence that all profiles ran out of memory; "" if one ended in another way."""
    from tula_hpc.analysis.models.fitted import MORE_MEMORY
    from tula_hpc.analysis.models.profiles import is_out_of_memory

    rows = sweep.run.measurements().records
    if not rows or not all(map(is_out_of_memory, rows)):
        return ""
    smallest = min(rows, key=lambda row: (row.local_batch, row.nodes))
    cluster = sweep.cluster.part(smallest.partition)
    limit = cluster.memory_limit_bytes
    allowed = f" of {format_bytes(limit)} for a worker" if limit else ""
    advice = MORE_MEMORY
    if smallest.failure is Failure.HOST_OOM and cluster.memory_gb is not None:
        allowed += f" (memory_gb = {cluster.memory_gb:g} of the cluster file)"
        advice = f"raise memory_gb if nodes have more; else {MORE_MEMORY}"
    where = f" on {smallest.partition}" if smallest.partition else ""
    return (
        f"no batch fits into memory: {smallest.configuration}{where}, the smallest that was tried, "
        f"exceeded its limit{allowed}; {advice}"
    )


def out_of_memory(run: RunDirectory) -> list[str]:
    """Name the profiled configurations that ran out of memory and were never measured."""
    from tula_hpc.analysis.models.profiles import is_out_of_memory

    rows = [row for row in run.measurements().records if row.stage == "profile"]
    good = {(row.partition, row.configuration) for row in rows if is_usable(row)}
    out = {(row.partition, row.configuration) for row in rows if is_out_of_memory(row)}
    named = sorted(out - good)
    return [f"{at} on {partition}" if partition else str(at) for partition, at in named]


def measured_anything(part: Sweep) -> bool:
    """Tell whether a configuration was measured on this partition."""
    return any(
        m.status == "ok" and m.partition == part.partition for m in part.run.measurements().records
    )
