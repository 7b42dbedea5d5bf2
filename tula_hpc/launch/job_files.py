"""Define what executors submit, and write the files from which a job starts: pickle and setup.

`_script` of `launch/slurm_executor.py` makes the batch script itself.

A job loads its pickle only if its bytes have the SHA-256 that the submitter noted. The folder's
owner proves nothing: somebody who may write to a folder above the run directory can put another
folder in its place while a job waits. The hash is in the batch script, which Slurm keeps from the
submission on, or in the environment of a local job. Whoever can change the script or the job's
Python can still run any code.

When submitit requeues a job, it pickles the job again on the node, and no script knows the new
hash. Here it writes only the number of time-outs left, as text, and a job never gets more of them
than its pickle says: at worst a forged number ends its requeues early.

Setup lines may hold passwords, and others can see command lines and scripts. So the lines are in a
file that only the owner can read, whose SHA-256 the job's shell knows. The file begins with a
random number, so that short passwords cannot be found by trying hashes.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import secrets
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
from submitit.core.utils import DelayedSubmission, JobPaths

from tula_hpc.config import ClusterSpec
from tula_hpc.env import SETUP_FAILED, SETUP_WORDS
from tula_hpc.errors import LaunchError
from tula_hpc.files import in_words, open_regular, read_bounded
from tula_hpc.formatting import plural
from tula_hpc.python_path import is_found_elsewhere
from tula_hpc.records import Record, write_atomically
from tula_hpc.retry_policy import TIME_OUTS


class Submitted(NamedTuple):
    """A submitted job: its id and the folder of its logs."""

    job_id: str
    folder: Path

    def log_files(self) -> list[Path]:
        """Return standard error, then standard output, of every task so far."""
        return [
            *sorted(self.folder.glob(f"{self.job_id}_*.err")),
            *sorted(self.folder.glob(f"{self.job_id}_*.out")),
        ]

    @property
    def array_id(self) -> str:
        """Return the id of the array to which the job belongs; its own id for a plain job."""
        return self.job_id.partition("_")[0]


class Request(NamedTuple):
    """Shape of a submission, the same for all of its jobs."""

    stage: str
    nodes: int
    # time limit of each job
    minutes: int
    # ids of jobs that must be over before these start
    after: tuple[str, ...] = ()
    # name of the job or array, unique to the submission
    name: str = ""
    # hosts on which the jobs must not run
    avoided: tuple[str, ...] = ()


class Notice(Record):
    """Content of submission.json, written before the submission is made.

    Jobs that a killed command could not record are found by its name.
    """

    # unique name of the job or array
    name: str
    stage: str
    # fields of each task's event "submitted", see `Event.data`
    tasks: list[dict[str, Any]]


# seconds between the looks that decide whether a job is over
MISSED_PAUSE_S = 1.0


class Limits(NamedTuple):
    """Pace at which an executor is asked for states, and whether its jobs run on several hosts."""

    # number of looks in a row without a job after which the job is over
    gone_polls: int
    # seconds between looks, at the start of a wait and after half an hour
    poll_s: float
    longest_poll_s: float
    several_hosts: bool

    def pause_s(self, waited_s: float, *, missed: bool) -> float:
        """Return the pause before the next look: long waits ask less often.

        If a job was missing at the last look, a few more decide whether it is over.
        """
        if missed:
            return min(self.poll_s, MISSED_PAUSE_S)
        return min(self.longest_poll_s, max(self.poll_s, waited_s / 60))


WHAT_TO_DO = (
    "nothing of it is executed; look at who may write to the folders above it, "
    "and submit the job again"
)
SETUP_FILE = "setup.sh"
# Only the first word of a failing command is shown: others may be secrets. A failure within a file
# that setup sources is not shown.
_WATCH_SETUP = rf"""trap 'tula_code=$? tula_said="${{{SETUP_FAILED}-}}"
if [ ${{#tula_said}} -lt 300 ] && [ "${{#BASH_SOURCE[@]}}" -le 1 ]; then
  if [ $tula_code = 127 ]; then tula_code="127: no such command in the shell of a job"; fi
  tula_now="\`${{BASH_COMMAND%%[ =]*}} …\` {SETUP_WORDS} $tula_code"
  if [ -n "$tula_said" ]; then tula_now="\`${{BASH_COMMAND%%[ =]*}} …\` with $tula_code"; fi
  export {SETUP_FAILED}="${{tula_said:+$tula_said, }}$tula_now"
  echo "$tula_now" >&2
fi' ERR"""


def write_setup(folder: Path, cluster: ClusterSpec) -> str:
    """Write the setup file; return its SHA-256.

    Raises:
        StorageError: The file cannot be written.
    """
    text = setup_text(cluster)
    write_atomically(folder / SETUP_FILE, text)
    return hashlib.sha256(text.encode()).hexdigest()


def setup_text(cluster: ClusterSpec) -> str:
    """Return the setup lines, of which the last sets `$tula_setup` to `done`.

    On this machine a line that fails ends the job. On Slurm the job goes on unless the lines say
    otherwise, and `$TULA_SETUP_FAILED` says what failed.
    """
    exports = [
        f"export {name}={shlex.quote(value)}" for name, value in variables_of(cluster).items()
    ]
    setup = list(cluster.setup)
    local = cluster.executor == "local"
    if setup and not local:
        setup = [_WATCH_SETUP, *setup, "trap - ERR"]
    lines = [*setup, *exports, "tula_setup=done"]
    between = " && " if local else "\n"
    # sbatch exports this variable from the job that submits this one
    own = f"unset {SETUP_FAILED}"
    return f"# {secrets.token_hex(32)}\n{own}\n{between.join(lines)}"


def variables_of(cluster: ClusterSpec) -> dict[str, str]:
    """Return the variables that the setup file sets."""
    # a job starts in the command's folder, and would import modules named submitit or torch there
    path = {"PYTHONSAFEPATH": "1"} if is_found_elsewhere() else {}
    own = {
        "OMP_NUM_THREADS": str(cluster.cpus_per_worker),
        # labels that the user's code numbers in a set's order would differ from worker to worker
        "PYTHONHASHSEED": "0",
    }
    return {**own, **path, **cluster.environment}


def run_setup(folder: Path, sha256: str) -> list[str]:
    """Return shell lines that run the setup file, and end the job if it is changed or fails."""
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
            '[ "$tula_setup" = done ]', f"{path}: setup of the cluster file did not run to its end"
        ),
    ]


def _or_end(condition: str, words: str) -> str:
    return f"{{ {condition} || {{ echo {shlex.quote(words)} >&2; exit 1; }}; }}"


def describe_setup(cluster: ClusterSpec) -> str:
    """Return a comment for the script that names the variables and counts the setup lines."""
    count = f"{plural(len(cluster.setup), 'line')} of setup"
    return f"# {SETUP_FILE}, for you alone: {count}; variables {', '.join(variables_of(cluster))}"


# far more than any job's pickle has
MOST_BYTES = 2**28


def write_pickles(
    folder: Path, tasks: Sequence[Callable[[], Any]], minutes: int, time_outs: int
) -> list[str]:
    """Write `task-<index>.pkl` of every task, for its owner alone; return each SHA-256.

    Raises:
        OSError: A file cannot be written, or exists already.
    """
    hashes = []
    for index, task in enumerate(tasks):
        job = DelayedSubmission(task)
        job.set_timeout(minutes, time_outs)
        content = cloudpickle.dumps(job, pickle.HIGHEST_PROTOCOL)
        path = folder / f"task-{index}.pkl"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
        hashes.append(hashlib.sha256(content).hexdigest())
    return hashes


def job_command(python: str, folder: Path, index: int | str, sha256: str) -> str:
    """Return the command of a job's worker, as shell words.

    Index and hash may be shell expressions.
    """
    return f"{python} -u -m tula_hpc.launch.job_start {shlex.quote(str(folder))} {index} {sha256}"


def load_pickle(path: Path, sha256: str) -> DelayedSubmission:
    """Load a job from a pickle, once its very bytes have proved to have this hash.

    Raises:
        LaunchError: The file has another hash, or cannot be read.
    """
    try:
        with open_regular(path, follow=False) as file:
            content = file.read(MOST_BYTES)
    except OSError as error:
        raise LaunchError(f"{path}: cannot be read: {in_words(error)}; {WHAT_TO_DO}") from None
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        words = (
            f"expected the pickle that was submitted, with SHA-256 {sha256}, found one with {found}"
        )
        raise LaunchError(f"{path}: {words}; {WHAT_TO_DO}")
    # safe, since these bytes are the submitter's own
    job: DelayedSubmission = pickle.loads(content)  # noqa: S301
    return job


class TimeOutsLeft(DelayedSubmission):
    """A job's remaining time-outs: all that submitit writes at a requeue, see the module."""

    def dump(self, filepath: str | Path) -> None:
        """Write the number of time-outs left."""
        write_atomically(Path(filepath), f"{self._timeout_countdown}\n")


class RequeuePaths(JobPaths):
    """Paths of a job, with a text file in place of the pickle that submitit writes at a requeue."""

    @property
    def submitted_pickle(self) -> Path:
        """Return the file with the remaining time-outs."""
        return self.folder / f"{self.job_id}_time_outs_left.txt"


def with_time_outs_left(job: DelayedSubmission, paths: JobPaths) -> DelayedSubmission:
    """Give a requeued job its remaining time-outs, never more than it was submitted with."""
    left = _noted(paths.submitted_pickle)
    if left is not None:
        job.set_timeout(job._timeout_min, min(job._timeout_countdown, left))
    return job


def times_out(job: Submitted) -> int:
    """Return how often a job was requeued at its time limit."""
    left = _noted(job.folder / f"{job.job_id}_time_outs_left.txt")
    return 0 if left is None or left < 0 else max(0, TIME_OUTS - left)


def _noted(path: Path) -> int | None:
    """Return the number of time-outs in a file; None if there is no file, or no number in it."""
    try:
        noted = read_bounded(path, 100)
    except OSError:
        return None
    return int(noted) if re.fullmatch(rb"-?\d{1,9}\n", noted) else None
