"""Describe a worker for a measurement, and record that memory ran out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tula_hpc.config import ClusterSpec
from tula_hpc.ddp.process_group import backend_of, describe_versions
from tula_hpc.env import WorkerEnvironment
from tula_hpc.errors import DeviceError
from tula_hpc.failure_kinds import Failure
from tula_hpc.formatting import format_bytes
from tula_hpc.launch.job_specs import ProfileJob
from tula_hpc.records import Configuration, Measurement, RunDirectory, append_record, rank_file
from tula_hpc.records.broken_hosts import profiled_in_vain
from tula_hpc.retry_policy import DEVICE_RETRIES

# share of a device's memory that the CUDA context, NCCL and cuDNN do not reach together
UNUSUAL_SHARE = 0.2


def record_oom(
    output: Path,
    cluster: ClusterSpec,
    configuration: Configuration,
    env: WorkerEnvironment,
    failure: Failure,
    **of_job: Any,
) -> None:
    """Record that a configuration does not fit into memory; for what follows see `profile_loop`.

    The record goes into this worker's own file beside `output`, the file of the job. `of_job` has
    further fields of the `Measurement`: its partition, passes, identity.
    """
    facts = describe(configuration, cluster, env)
    detail = f"rank {env.rank}"
    if failure is Failure.DEVICE_OOM and (held := memory_held_elsewhere()):
        detail += f"; {held}"
    record = Measurement(status="oom", failure=failure, detail=detail, **facts)
    append_record(rank_file(output, env.rank), record.model_copy(update=of_job))


def refuse_shared_device(held: str, configuration: Configuration, tried: int) -> None:
    """Leave a configuration to a job on other hosts if other jobs held the memory.

    `held` is what `held_by_others` says. `tried` jobs were ended so far by a broken device at this
    configuration; the last one that may try it is not refused.

    Raises:
        DeviceError: Processes outside of this job held much of the device.
    """
    if held and tried < DEVICE_RETRIES:
        raise DeviceError(f"memory ran out at {configuration}, but {held}")


def broken_devices(job: ProfileJob, configuration: Configuration) -> int:
    """Count the command's jobs so far that a broken device has ended at this configuration."""
    events = RunDirectory(job.output.parent.parent).events()
    return profiled_in_vain(events, configuration, job.partition, job.since)


def memory_held_elsewhere() -> str:
    """Say how much of this worker's device torch's allocator does not hold; "" if that is usual."""
    # a worker whose script has a process of its own has not used the device itself
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ""
    free, total = torch.cuda.mem_get_info()
    held = total - free - torch.cuda.memory_reserved()
    if held < UNUSUAL_SHARE * total:
        return ""
    return (
        f"of the device's {format_bytes(total)}, {format_bytes(held)} were held outside of this "
        "worker's torch, as by another process (nvidia-smi on the node names it)"
    )


def describe(
    configuration: Configuration, cluster: ClusterSpec, env: WorkerEnvironment
) -> dict[str, Any]:
    """Return the fields of a measurement that describe where it was taken."""
    return {
        **configuration._asdict(),
        "exclusive": cluster.exclusive or cluster.executor == "local",
        "emulated": cluster.executor == "local" and configuration.nodes > 1,
        "device": _device_name(cluster),
        "backend": backend_of(cluster) if env.world_size > 1 else "none",
        "hosts": env.hosts,
        "versions": describe_versions(),
        "job_id": env.job_id,
    }


def _device_name(cluster: ClusterSpec) -> str:
    if cluster.device == "cuda":
        return torch.cuda.get_device_name()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':', 1)[1].strip()}, {cluster.cpus_per_worker} thread(s)"
    return "cpu"
