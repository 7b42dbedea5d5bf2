"""Environment of this process: its rank and peers, its Slurm job, and its clock.

This is the only module that reads SLURM_*, SUBMITIT_*, MASTER_PORT and *_SOCKET_IFNAME. Time stamps
come from `unix_time`, whose differences are durations: within a process it neither jumps nor goes
back when the system's clock is set.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import getpass
import os
import shlex
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from signal import SIGKILL
from typing import NamedTuple, TextIO

# CLOCK_BOOTTIME, unlike CLOCK_MONOTONIC, goes on while the machine sleeps
_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_EPOCH_OF_STEADY = time.time() - time.clock_gettime(_STEADY)

# start of the line that each run of a requeued job first writes to its logs
RUN_MARK = "--- restart "
# variable with the error message of a failed `setup` command of a job
SETUP_FAILED = "TULA_SETUP_FAILED"
# part of that message, by which it is found in a log
SETUP_WORDS = "in setup of the cluster file ended with exit code"
# the numbers of users inside and outside of this process's user namespace, see user_namespaces(7)
_UID_MAP = Path("/proc/self/uid_map")
# variable with the id of the process that starts a local job's workers
CONTROLLER = "TULA_CONTROLLER"
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LONGEST_START_S = 3600.0
# file in a submission's folder; workers prove that they know its content before they meet
SECRET_FILE = "secret"  # noqa: S105 - the file's name
# Options whose SBATCH_* default of the user is kept. SBATCH_CLUSTERS is not: squeue and the other
# commands read SLURM_CLUSTERS alone, and would look for the jobs on another cluster.
USERS_DEFAULTS = ("account", "constraint", "partition", "qos", "reservation", "wckey")


def unix_time() -> float:
    """Return the seconds since 1970, by the system's clock as it was when this process began."""
    return _EPOCH_OF_STEADY + time.clock_gettime(_STEADY)


def keep_up_with(moment: float) -> None:
    """Set this process's clock forward to a moment that has passed by another machine's clock."""
    global _EPOCH_OF_STEADY  # noqa: PLW0603 - a process has one clock
    _EPOCH_OF_STEADY += max(0.0, moment - unix_time())


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
    # folder of the job's pickle; job ids are not unique between containers that share a network
    submission: str = ""
    # port set by the user or the site; if it is empty, a port is chosen
    master_port: str = ""


def begin_process() -> None:
    """Keep other users from writing to this process's files; name a user without a passwd entry.

    A run directory may be opened to others later, and its pickles are executed. torch asks for the
    name of the user.
    """
    os.umask(os.umask(0o077) | 0o022)
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["LOGNAME"] = f"uid{os.getuid()}"


def own_uids() -> set[str]:
    """Return this user's number, inside and outside of a container that numbers users anew."""
    own = os.getuid()
    numbers = {own}
    # systems other than Linux have no such file
    with contextlib.suppress(OSError):
        for line in _UID_MAP.read_text().splitlines():
            inside, outside, count = map(int, line.split())
            if inside <= own < inside + count:
                numbers.add(outside + own - inside)
    return set(map(str, numbers))


@contextlib.contextmanager
def loading_libraries() -> Iterator[None]:
    """Pause garbage collection while libraries are imported, and exempt their objects for good.

    Objects of torch stay alive, and searching them again and again takes a sixth of a start.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


def join_job() -> WorkerEnvironment:
    """Return the rank and peers of this process, in a job that submitit started.

    RANK, LOCAL_RANK and WORLD_SIZE are exported, as torchrun does, for users' own models.
    MASTER_PORT is not: jobs that this one submits would inherit it. CUDA_VISIBLE_DEVICES is left as
    the scheduler set it: the local rank picks the device.
    """
    from submitit import JobEnvironment

    begin_process()
    job = JobEnvironment()
    if not _started_by_slurm():
        stay_on_loopback()
    # rank 0's log begins with the batch script's own mark
    elif job.global_rank > 0:
        sys.stderr.write(f"{RUN_MARK}{restart_count()}\n")
        sys.stderr.flush()
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


def stay_on_loopback() -> None:
    """Have collective libraries listen on this machine alone, unless the user has said where.

    Their sockets have no authentication, and workers on one machine need no network.
    """
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")


def enter_submission(folder: str) -> None:
    """Pass the folder of the job's files to submitit, in a worker's process."""
    os.environ["SUBMITIT_FOLDER"] = folder


def has_peers() -> bool:
    """Tell whether the job that this process has joined has other workers."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def be_controller() -> None:
    """Become the controller of the workers that this process will start on this machine."""
    os.environ[CONTROLLER] = str(os.getpid())


def end_with_controller() -> None:
    """Make this worker end with the controller of its local job, if it is a worker of one.

    A worker that outlived the controller would train alongside the workers of the next job.

    Raises:
        SystemExit: The controller is gone already.
    """
    controller = os.environ.get(CONTROLLER)
    if controller is None:
        return
    # in a container the parent is the runtime, not the controller
    if controller == str(os.getppid()):
        _end_with_parent()
    try:
        os.kill(int(controller), 0)
    except ProcessLookupError:
        raise SystemExit("the controller of this job is gone") from None


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(SIGKILL), 0, 0, 0)


def be_child_of(process: int) -> None:
    """Make this process end with the one that started it, for whatever reason that one ends.

    Raises:
        SystemExit: The process that started this one is gone already.
    """
    _end_with_parent()
    if os.getppid() != process:
        raise SystemExit("the process that started this one is gone")


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that they can be ended too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


# prefixes of variables from which a script could take a rank other than the one it is given
HIDDEN_FROM_SCRIPTS = ("SLURM_", "SUBMITIT_", "PMI_", "PMIX_", "OMPI_", "PALS_")


def environment_of_script(place: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment for a script, with `place` as the only rank and peers."""
    # PYTHONSAFEPATH is for the job alone: programs that a script starts must find their modules
    hidden = (*HIDDEN_FROM_SCRIPTS, CONTROLLER, "PYTHONSAFEPATH")
    shown = (
        "SLURM_CONF",
        "SLURM_CPUS_PER_TASK",
        "SLURM_CPUS_ON_NODE",
        "SLURM_GPUS_ON_NODE",
        # a folder on the node that some sites make for each job
        "SLURM_TMPDIR",
    )
    kept = {
        key: value
        for key, value in os.environ.items()
        if key in shown or not key.startswith(hidden)
    }
    return {**kept, **place}


def job_started_at() -> float:
    """Return the Unix time at which Slurm (since 22.05) started this job, else this process."""
    # the 22nd field, in clock ticks since boot
    ticks = int(process_fields("self")[19])
    since_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    started_at = unix_time() - (since_boot_s - ticks / os.sysconf("SC_CLK_TCK"))
    reported = os.environ.get("SLURM_JOB_START_TIME") if _started_by_slurm() else None
    # prologs and the user's set-up take minutes; a longer time means that Slurm's clock differs
    if reported and 0.0 <= started_at - float(reported) <= LONGEST_START_S:
        return float(reported)
    return started_at


def process_fields(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat (man 5 proc), from the third on; none if it has ended."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    # the second field, the command's name, may hold blanks and brackets
    return line.rpartition(")")[2].split()


def restart_count() -> int:
    """Return how often Slurm has requeued this job; 0 outside Slurm."""
    if not _started_by_slurm():
        return 0
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def node_name() -> str:
    """Return this node's name in Slurm, else the machine's."""
    name = os.environ.get("SLURMD_NODENAME") if _started_by_slurm() else None
    return name or os.uname().nodename


def submitted_job_id() -> str:
    """Return this job's id as events name it: a task of an array is `12_3`."""
    from submitit import JobEnvironment

    return str(JobEnvironment().job_id)


def array_job_id() -> str | None:
    """Return the id of the array that this job is a task of, or None."""
    return os.environ.get("SLURM_ARRAY_JOB_ID") if _started_by_slurm() else None


def visible_gpus() -> tuple[str, ...]:
    """Return Slurm's names of this process's GPUs in CUDA's order; none if Slurm names none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not _started_by_slurm() or visible in ("", "NoDevFiles"):
        return ()
    return tuple(visible.split(","))


def granted_gpus() -> int:
    """Count the GPUs that this process should see in a job of Slurm; 0 if unknown."""
    visible = visible_gpus()
    # CUDA shows a process one MIG device, however many it has been given
    return 1 if any("MIG-" in name for name in visible) else len(visible)


def slurm_job_id() -> str | None:
    """Return the raw job id that scontrol takes (an array task has its own); None outside Slurm."""
    return os.environ.get("SLURM_JOB_ID") if _started_by_slurm() else None


def is_of_this_slurm_job(pid: str) -> bool:
    """Tell whether a process of this node was started by the same Slurm job as this process."""
    job_id = slurm_job_id()
    # other users' variables cannot be read
    with contextlib.suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return job_id is not None and f"SLURM_JOB_ID={job_id}".encode() in variables
    return False


def meeting_variables() -> dict[str, str]:
    """Return the set variables that name the address and port where a script's processes meet."""
    names = ("MASTER_ADDR", "MASTER_PORT")
    return {name: os.environ[name] for name in names if name in os.environ}


def set_back(variables: Mapping[str, str]) -> dict[str, str | None]:
    """Set variables back to these values; return the former values of those that differed."""
    changed = {name: os.environ.get(name) for name in variables}
    changed = {name: value for name, value in changed.items() if value != variables[name]}
    os.environ.update({name: variables[name] for name in changed})
    return changed


def held_allocation() -> str | None:
    """Return the id of the user's own Slurm job in which a command runs; None outside of one."""
    return None if _started_by_slurm() else os.environ.get("SLURM_JOB_ID")


def slurm_conf() -> str:
    """Return the configuration file that SLURM_CONF names for Slurm's commands; "" if unset."""
    return os.environ.get("SLURM_CONF", "")


@contextlib.contextmanager
def outside_of_job(given: Collection[str] = ()) -> Iterator[None]:
    """Hide the Slurm job that this process is in, if any, from the jobs that it submits meanwhile.

    sbatch exports its environment. So srun in the new job would take the old job's memory or CPUs
    for its own, or hide the workers' variables, as SRUN_EXPORT_ENV may say. If an SBATCH_* variable
    contradicts the script, sbatch follows the variable. So only the user's account, partition and
    the like stay, and only where the script does not set them (`given`).
    """
    wanted = {f"SBATCH_{name.upper()}" for name in USERS_DEFAULTS if name not in given}
    kept = {"SLURM_CONF", "SLURM_CLUSTERS", *wanted}
    hidden = {
        key: value
        for key, value in os.environ.items()
        if key.startswith(("SLURM_", "SRUN_", "SUBMITIT_", "SBATCH_")) and key not in kept
    }
    for key in hidden:
        del os.environ[key]
    try:
        yield
    finally:
        os.environ.update(hidden)


def users_default(option: str) -> str:
    """Return the value of one of `USERS_DEFAULTS`, which jobs are submitted with; "" if not set."""
    return os.environ.get(f"SBATCH_{option.upper()}", "")


def gpus_as_here() -> str:
    """Return a shell line that gives a job here this process's GPUs: submitit counts from 0."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return "unset CUDA_VISIBLE_DEVICES"
    return f"export CUDA_VISIBLE_DEVICES={shlex.quote(visible)}"


def socket_interface(backend: str) -> str:
    """Return the interfaces that the environment names for a collective library; "" for none."""
    return os.environ.get(f"{backend.upper()}_SOCKET_IFNAME", "")


def failed_setup() -> str:
    """Return the error message of the job's failed `setup` command; "" if none failed."""
    return os.environ.get(SETUP_FAILED, "")


def loaded_modules() -> list[str]:
    """Return the environment modules that are loaded in this shell, in order."""
    return [name for name in os.environ.get("LOADEDMODULES", "").split(":") if name]


def can_redraw(stream: TextIO) -> bool:
    """Tell whether what a stream has shown can be redrawn: not in a file, nor where TERM=dumb."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def without_filters() -> dict[str, str]:
    """Return the environment without variables that filter or reformat Slurm's answers."""
    filters = ("SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_", "SLURM_TIME_FORMAT")
    return {key: value for key, value in os.environ.items() if not key.startswith(filters)}


def with_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with these variables, as a job has them."""
    return {**os.environ, **variables}


def _started_by_slurm() -> bool:
    # SLURM_JOB_ID does not show it: the local executor may run inside a user's own allocation
    return os.environ.get("SUBMITIT_EXECUTOR") == "slurm"
