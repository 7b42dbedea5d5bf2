"""The only reader of SLURM_*, SUBMITIT_*, MASTER_PORT and *_SOCKET_IFNAME: who this process is among its peers.

Unix time for stamps whose differences are durations: within a process it neither jumps nor goes
back.
"""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import os
import shlex
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from signal import SIGKILL
from typing import NamedTuple

# unlike CLOCK_MONOTONIC it goes on while the machine sleeps
_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_began_at = time.time() - time.clock_gettime(_STEADY)


def unix_time() -> float:
    """Return the seconds since 1970 as this process's first look at the clock has them, whatever was set since."""
    return _began_at + time.clock_gettime(_STEADY)


# begins what each run of a requeued job appends to its logs
RUN_MARK = "--- restart "
# number of the process that starts a local job's workers
CONTROLLER = "TULA_CONTROLLER"
PR_SET_PDEATHSIG = 1
LONGEST_START_S = 3600.0
# in a submission's folder: workers show each other that they know it before they meet
SECRET_FILE = "secret"  # noqa: S105 - the file's name
USERS_DEFAULTS = ("account", "clusters", "constraint", "partition", "qos", "reservation", "wckey")


class WorkerEnvironment(NamedTuple):
    """Place of this process in its job."""

    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    job_id: str
    # how often Slurm requeued this job
    restart_count: int
    hosts: tuple[str, ...]
    on_slurm: bool
    # the folder of the job's pickle; containers that share a network may also share job ids
    submission: str = ""
    # that the user or the site gives; without one there is a choice
    master_port: str = ""


def begin_process() -> None:
    """Let nobody else write to what this process and its jobs write; name a user without a passwd entry.

    A run directory may be opened to others later, and its pickles are executed. torch asks for the
    user's name.
    """
    os.umask(os.umask(0o077) | 0o022)
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["LOGNAME"] = f"uid{os.getuid()}"


def join_job() -> WorkerEnvironment:
    """Who this process is, in a job that submitit started.

    RANK, LOCAL_RANK and WORLD_SIZE are exported, as torchrun does, for users' own models.
    MASTER_PORT is not: what this job submits would inherit it. CUDA_VISIBLE_DEVICES is left as the
    scheduler set it: the local rank picks the device.
    """
    from submitit import JobEnvironment

    begin_process()
    job = JobEnvironment()
    _end_with_controller()
    # rank 0's log begins with what the batch script says
    if _started_by_slurm() and job.global_rank > 0:
        sys.stderr.write(f"{RUN_MARK}{restart_count()}\n")
        sys.stderr.flush()
    if not _started_by_slurm():
        # the sockets of gloo and NCCL ask nobody who he is; workers on one machine need no network
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
    os.environ |= {
        "RANK": str(job.global_rank),
        "LOCAL_RANK": str(job.local_rank),
        "WORLD_SIZE": str(job.num_tasks),
    }
    return WorkerEnvironment(
        rank=job.global_rank,
        world_size=job.num_tasks,
        local_rank=job.local_rank,
        node_rank=job.node,
        job_id=str(job.job_id),
        restart_count=restart_count(),
        hosts=tuple(job.hostnames),
        on_slurm=_started_by_slurm(),
        submission=str(job.paths.folder),
        master_port=os.environ.get("MASTER_PORT", ""),
    )


def enter_submission(folder: str) -> None:
    """Tell submitit, in the process of a worker, in which folder its job's files are."""
    os.environ["SUBMITIT_FOLDER"] = folder


def has_peers() -> bool:
    """Whether the job that this process has joined has other workers."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def be_controller() -> None:
    """Tell the workers that this process will start, on this machine, that it is their job's controller."""
    os.environ[CONTROLLER] = str(os.getpid())


def _end_with_controller() -> None:
    """Be killed where the controller of a local job is: the job would be over, and the next one train beside this."""
    if sys.platform == "linux" and os.environ.get(CONTROLLER) == str(os.getppid()):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(SIGKILL), 0, 0, 0)


def job_started_at() -> float:
    """Unix time at which Slurm started this job, where it says so (since 22.05); else when this process started."""
    started_at = _process_started_at()
    if _started_by_slurm() and (told := os.environ.get("SLURM_JOB_START_TIME")):
        # prologs and the user's set-up take minutes; what is further off is another clock than this
        # node's
        return float(told) if 0.0 <= started_at - float(told) <= LONGEST_START_S else started_at
    return started_at


def _process_started_at() -> float:
    """Since the kernel's boot in clock ticks: the 22nd field of /proc/self/stat; the 2nd may hold blanks."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    since_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    return unix_time() - (since_boot_s - ticks / os.sysconf("SC_CLK_TCK"))


def restart_count() -> int:
    """How often Slurm has requeued this job; 0 outside Slurm."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0")) if _started_by_slurm() else 0


def node_name() -> str:
    """Return this node's name as the scheduler has it, else the machine's."""
    name = os.environ.get("SLURMD_NODENAME") if _started_by_slurm() else None
    return name or os.uname().nodename


def submitted_job_id() -> str:
    """Return this job's id as the events have it: a task of an array is `12_3`."""
    from submitit import JobEnvironment

    return str(JobEnvironment().job_id)


def array_job_id() -> str | None:
    """Return the id of the array that this job is a task of, or None."""
    return os.environ.get("SLURM_ARRAY_JOB_ID") if _started_by_slurm() else None


def visible_gpus() -> tuple[str, ...]:
    """Return Slurm's names of the GPUs that this process should see, in CUDA's order; none where that is not said."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "") if _started_by_slurm() else ""
    return () if visible in ("", "NoDevFiles") else tuple(visible.split(","))


def granted_gpus() -> int:
    """Count the GPUs that this process should see in a job of Slurm; 0 where that is not said."""
    visible = visible_gpus()
    # CUDA shows a process one part of a divided GPU, however many it has been given
    return 1 if any("MIG-" in name for name in visible) else len(visible)


def slurm_job_id() -> str | None:
    """The raw job id that scontrol takes (an array task has its own), or None outside Slurm."""
    return os.environ.get("SLURM_JOB_ID") if _started_by_slurm() else None


@contextlib.contextmanager
def outside_of_job(given: Collection[str] = ()) -> Iterator[None]:
    """Hide the Slurm job that this process is in, if it is in one, from what it submits meanwhile.

    sbatch hands its environment on, and srun in the new job would take the old one's memory or CPUs
    for its own. Where SBATCH_* says something else than the script does, sbatch follows the former:
    of these only a user's account, partition and the like stay, as far as they are not `given`.

    Args:
        given: Names of sbatch's options that the script sets.
    """
    wanted = {f"SBATCH_{name.upper()}" for name in USERS_DEFAULTS if name not in given}
    kept = {"SLURM_CONF", "SLURM_CLUSTERS", *wanted}
    hidden = {
        key: value
        for key, value in os.environ.items()
        if key.startswith(("SLURM_", "SUBMITIT_", "SBATCH_")) and key not in kept
    }
    for key in hidden:
        del os.environ[key]
    try:
        yield
    finally:
        os.environ.update(hidden)


def gpus_as_here() -> str:
    """A shell line that shows a job on this machine the GPUs that this process sees; submitit would count from 0."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return "unset CUDA_VISIBLE_DEVICES"
    return f"export CUDA_VISIBLE_DEVICES={shlex.quote(visible)}"


def socket_interface(backend: str) -> str:
    """Return the interfaces that this process's environment names for a collective library; "" for none."""
    return os.environ.get(f"{backend.upper()}_SOCKET_IFNAME", "")


def without_filters() -> dict[str, str]:
    """The environment without what would have squeue and its like leave out jobs, ask back, or print in another way."""
    filters = ("SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_", "SLURM_TIME_FORMAT")
    return {key: value for key, value in os.environ.items() if not key.startswith(filters)}


def _started_by_slurm() -> bool:
    """Whether Slurm runs this job; inside a user's own allocation the local executor must not touch that allocation."""
    return os.environ.get("SUBMITIT_EXECUTOR") == "slurm"
