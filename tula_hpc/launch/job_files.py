"""The pickle of a job: written by who submits it, with its SHA-256, and loaded by the job only if it is that one.

Whoever may write to a folder above the run directory can put another folder in its place while a
job waits, one of the job's owner too, which then holds a link to, or a file of, a stranger. So the
folder's owner proves nothing. The hash travels in the batch script, which Slurm keeps from the time
of the submission on, or in the environment of a local job.

submitit writes the pickle of a job that it requeues anew, on the node, where no script knows its
hash. All that differs is how many time-outs the job may still have. Here only this number is
written, as text, and a job may never have more of them than its pickle says: whoever forges it ends
a job's requeues early, or keeps them at their first number.

What remains: who can change the script (its owner, the site's administrators; or a stranger who
exchanges the folder in the moment in which sbatch reads it) or the job's Python and its modules
runs what he likes, and whoever can exchange the folder can keep the job from running.

What the shell of a job does first, `setup` and `[environment]` of the cluster file, without anybody
seeing it.

Both may hold keys and passwords. A command line is shown to everybody on the machine, and a script
to whoever it is mailed to. So the lines travel in a file of the submission's folder, for its owner
alone. The shell of the job knows the file's SHA-256 and evaluates the very text that has it, for
the reason that `job_pickle` gives; the file begins with a random number, so that nobody can find a
short password by trying hashes.
"""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
import re
import secrets
import shlex
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
from submitit.core.utils import DelayedSubmission, JobPaths

from tula_hpc.config import ClusterSpec
from tula_hpc.errors import LaunchError
from tula_hpc.files import in_words, read_bounded
from tula_hpc.records import write_atomically
from tula_hpc.search_path import is_found_elsewhere

WHAT_TO_DO = "nothing of it is executed; look at who may write to the folders above it, and submit the job again"
SETUP_FILE = "setup.sh"


def write_setup(folder: Path, cluster: ClusterSpec) -> str:
    """Write the file; returns its SHA-256.

    Raises:
        StorageError: It cannot be written.
    """
    text = setup_text(cluster)
    write_atomically(folder / SETUP_FILE, text)
    return hashlib.sha256(text.encode()).hexdigest()


def setup_text(cluster: ClusterSpec) -> str:
    """Return the lines, so that `$tula_setup` is `done` behind them.

    On this machine a line that fails ends the job, on Slurm it is up to the lines what they do
    then.
    """
    exports = [f"export {name}={shlex.quote(value)}" for name, value in _variables(cluster).items()]
    lines = [*cluster.setup, *exports, "tula_setup=done"]
    between = " && " if cluster.executor == "local" else "\n"
    return f"# {secrets.token_hex(32)}\n{between.join(lines)}"


def _variables(cluster: ClusterSpec) -> dict[str, str]:
    # a job starts where the command did, and would import submitit and torch from there
    path = {"PYTHONSAFEPATH": "1"} if is_found_elsewhere() else {}
    return {"OMP_NUM_THREADS": str(cluster.cpus_per_worker), **path, **cluster.environment}


def run_setup(folder: Path, sha256: str) -> list[str]:
    """Shell lines that run the file, if it is still the same; what ends early or is no shell ends the job."""
    path = folder / SETUP_FILE
    return [
        f"tula_setup=$(cat {shlex.quote(str(path))})",
        'tula_found=$(printf %s "$tula_setup" | sha256sum)',
        _or_end(
            f'[ "${{tula_found%% *}}" = {sha256} ]',
            f"{path}: is not what was submitted; {WHAT_TO_DO}",
        ),
        'eval "$tula_setup"',
        _or_end(
            '[ "$tula_setup" = done ]', f"{path}: setup of the cluster file did not come to its end"
        ),
    ]


def _or_end(condition: str, words: str) -> str:
    return f"{{ {condition} || {{ echo {shlex.quote(words)} >&2; exit 1; }}; }}"


def describe_setup(cluster: ClusterSpec) -> str:
    """Return a comment for the script, which names the variables and counts the lines."""
    count = f"{len(cluster.setup)} line{'' if len(cluster.setup) == 1 else 's'} of setup"
    return f"# {SETUP_FILE}, for you alone: {count}; variables {', '.join(_variables(cluster))}"


# far more than any job's
MOST_BYTES = 2**28


def write_pickle(folder: Path, index: int, job: DelayedSubmission) -> str:
    """Write `task-<index>.pkl`, for its owner alone; returns its SHA-256, of what was to be written.

    Raises:
        OSError: It cannot be written, or is there already.
    """
    content = cloudpickle.dumps(job, pickle.HIGHEST_PROTOCOL)
    descriptor = os.open(folder / f"task-{index}.pkl", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    return hashlib.sha256(content).hexdigest()


def write_pickles(
    folder: Path, tasks: Sequence[Callable[[], Any]], minutes: int, time_outs: int
) -> list[str]:
    """Write the pickle of every task; return their SHA-256.

    Raises:
        OSError: One cannot be written, or is there already.
    """
    hashes = []
    for index, task in enumerate(tasks):
        job = DelayedSubmission(task)
        job.set_timeout(minutes, time_outs)
        hashes.append(write_pickle(folder, index, job))
    return hashes


def job_command(python: str, folder: Path, index: int | str, sha256: str) -> str:
    """Return what a worker of a job runs, as shell words; an index and a hash may be what the shell makes of them."""
    return f"{python} -u -m tula_hpc.launch.job_start {shlex.quote(str(folder))} {index} {sha256}"


def load_pickle(path: Path, sha256: str) -> DelayedSubmission:
    """Load a job, from the very bytes that were found to have this hash.

    Raises:
        LaunchError: It is another one, or cannot be read.
    """
    try:
        content = _read_unlinked(path)
    except OSError as error:
        raise LaunchError(f"{path}: cannot be read: {in_words(error)}; {WHAT_TO_DO}") from None
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        words = (
            f"expected the pickle that was submitted, with SHA-256 {sha256}, found one with {found}"
        )
        raise LaunchError(f"{path}: {words}; {WHAT_TO_DO}")
    job: DelayedSubmission = pickle.loads(content)  # noqa: S301 - these bytes are the submitter's own
    return job


def _read_unlinked(path: Path) -> bytes:
    """Read a regular file that is not behind a link.

    Raises:
        OSError: It is something else, or cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "expected a file, found a pipe or a device", str(path))
        return file.read(MOST_BYTES)


class TimeOutsLeft(DelayedSubmission):
    """What submitit writes down of a job when it requeues it: the number alone, see the module."""

    def dump(self, filepath: str | Path) -> None:
        """Write the number."""
        write_atomically(Path(filepath), f"{self._timeout_countdown}\n")


class RequeuePaths(JobPaths):
    """Where submitit writes that."""

    @property
    def submitted_pickle(self) -> Path:
        """A text file in the place of a pickle."""
        return self.folder / f"{self.job_id}_time_outs_left.txt"


def with_time_outs_left(job: DelayedSubmission, paths: JobPaths) -> DelayedSubmission:
    """Give a job that was requeued the number of time-outs that it has left, never more than it was submitted with."""
    try:
        noted = read_bounded(paths.submitted_pickle, 100)
    except OSError:
        return job
    if re.fullmatch(rb"-?\d{1,9}\n", noted):
        job.set_timeout(job._timeout_min, min(job._timeout_countdown, int(noted)))
    return job
