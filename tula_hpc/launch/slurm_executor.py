"""Run jobs on Slurm: call sbatch so that each array is submitted exactly once.

`Launcher.submit` in `launcher.py` decides which jobs form an array.

submitit takes any error of sbatch for a refusal. But with a paused or overloaded controller sbatch
fails although the job may have been accepted. So every submission has a name of its own, which is
looked up before another attempt. Jobs find their pickles by array index, so nothing is lost if the
submitter is killed once it has called sbatch.

submitit's template of a batch script is private (`_make_sbatch_string`, `_convert_mem`); only this
module uses it.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from submitit.core.utils import JobPaths
from submitit.slurm.slurm import _convert_mem, _make_sbatch_string

from tula_hpc.config import ClusterSpec
from tula_hpc.config.gpus import NO_GRES
from tula_hpc.containers import NO_FOLDERS, Folders, export_lines, python_of, srun_options
from tula_hpc.env import RUN_MARK, outside_of_job, slurm_job_id, users_default
from tula_hpc.errors import InputError, LaunchError, NotStartedError, RefusedError, SubmitLimitError
from tula_hpc.files import in_words, now_of_files
from tula_hpc.launch import slurm
from tula_hpc.launch.bounded_command import Done, no_answer, run
from tula_hpc.launch.job_files import (
    Limits,
    Notice,
    Request,
    Submitted,
    describe_setup,
    job_command,
    run_setup,
    variables_of,
    write_pickles,
    write_setup,
)
from tula_hpc.launch.slurm import JobState, StepState
from tula_hpc.records import write_atomically
from tula_hpc.records.events import CONTROL
from tula_hpc.retry_policy import REVIVALS, TIME_OUTS, controller_time_outs

# most tasks of an array, even if the site allows more
LARGEST_ARRAY = 1000
# seconds from its start during which sbatch may still be at work after its caller was killed
SBATCH_S = 20.0
# shown in a dry run in place of a hash of what only a submission writes
MADE_LATER = "…"
# pauses after failed attempts to submit, about 8 minutes in all
PAUSES_S = (2, 5, 10, 20, 40, 60, 120, 120, 120)
# limit of these pauses and the calls of sbatch together
LONGEST_WAIT_S = 600.0
# time limit of one sbatch, which itself tries again while the controller does not answer
SUBMIT_S = 300.0
# time limit of sbatch --test-only, which submits nothing
TEST_S = 30.0
NO: dict[type[RefusedError], str] = {
    RefusedError: "the scheduler refused the job",
    SubmitLimitError: "a limit of the cluster on submitted jobs is reached",
}
# keys of the cluster file, by the nouns in sbatch's complaints about them
REFUSED_KEYS = {
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "feature": "constraint",
    "generic resource": "gres",
    "reservation": "reservation",
    "time limit": "profile_minutes and train_minutes",
    "node count": "max_nodes",
    "processors": "workers_per_node and cpus_per_worker",
    "memory specification": "memory_gb",
}
NO_SUCH_NODE = "Requested node configuration is not available"
# explanation of a job that is too large for the nodes that are up
WHAT_NODES_HAVE = (
    "nodes are down or drained (sinfo -R), or have less than the jobs ask for by max_nodes, "
    "workers_per_node, cpus_per_worker, memory_gb, gres, constraint and [sbatch] of the cluster file "
    "and search.cluster_sizes"
)
_COULD_START = re.compile(r"\bJob [0-9]+ to start at\b")
_PREFIX = re.compile(r"^((sbatch|error|fatal|allocation failure): )*")
# pauses after failed attempts to requeue
REQUEUE_PAUSES_S = (2, 5, 10, 30)
# may go on with "on cluster a"
_SUBMITTED = re.compile(r"^Submitted batch job ([0-9]+)\b", re.MULTILINE)
# the whole output if a site's sbatch adds --parsable
_ID_ALONE = re.compile(r"\s*([0-9]+)(?:;\S+)?\s*")
# pause for a controller that has just come back and may still work off old requests
SETTLE_S = 5.0


def trust_folder(folder: Path) -> list[str]:
    """Return shell lines that end a job if its folder belongs to somebody else by now."""
    place = shlex.quote(str(folder))
    message = "': is not yours; nothing in it is executed'"
    return [f"[ -O {place} ] || {{ echo {place}{message} >&2; exit 1; }}"]


def know_pickles(hashes: Sequence[str]) -> str:
    """Return a line of bash with the SHA-256 of each task's pickle."""
    return f"tula_pickles=({' '.join(hashes)})"


def start_command(python: str, folder: Path) -> str:
    """Return the command of a task's workers, with the hash that the script knows."""
    index = "${SLURM_ARRAY_TASK_ID:-0}"
    return job_command(python, folder, f'"{index}"', f'"${{tula_pickles[{index}]}}"')


def requeue_if_killed(folder: Path) -> list[str]:
    """Return shell lines that requeue a job a few times if it was killed and not cancelled.

    A job that ended by itself, with code 0 or 1, has given its reason and is not requeued.
    """
    killed = shlex.quote(str(folder / "killed"))
    pauses = " ".join(map(str, REQUEUE_PAUSES_S))
    return [
        "tula_code=$?",
        'if [ "$tula_code" -gt 1 ] && '
        'scontrol show job --oneliner "$SLURM_JOB_ID" | grep -q JobState=RUNNING; then',
        f'  echo "$tula_code" >>{killed}',
        # a controller that does not answer for a moment must not be the end of the sweep
        f'  [ "$(wc -l <{killed})" -gt {REVIVALS} ] || for pause in {pauses}; do',
        '    scontrol requeue "$SLURM_JOB_ID" && break',
        '    sleep "$pause"',
        "  done",
        "fi",
        'exit "$tula_code"',
    ]


def option_of(cluster: ClusterSpec, name: str) -> str:
    """Return the partition, account or qos that jobs name, by file or user; "" for the site's."""
    return str(getattr(cluster, name) or cluster.sbatch.get(name) or users_default(name))


def origin_of(cluster: ClusterSpec, name: str) -> str:
    """Return which variable sets the value of `option_of`, in brackets; "" if the file does."""
    is_of_file = getattr(cluster, name) or cluster.sbatch.get(name)
    is_of_shell = not is_of_file and users_default(name)
    return f" (SBATCH_{name.upper()} of your shell)" if is_of_shell else ""


def partitions_of(cluster: ClusterSpec) -> list[str]:
    """Return the partitions that jobs may go to: sbatch takes several and uses any that is free."""
    wanted = option_of(cluster, "partition")
    return wanted.split(",") if wanted else []


class SlurmJobs:
    """Executor of jobs on Slurm: each submission is a job or an array, made exactly once."""

    limits = Limits(gone_polls=3, poll_s=2.0, longest_poll_s=30.0, several_hosts=True)

    def __init__(self, cluster: ClusterSpec, folders: Folders = NO_FOLDERS) -> None:
        self.cluster = cluster
        self.folders = folders

    def check(self) -> None:
        """Raise `LaunchError` if there is no sbatch, or no srun, which the script calls."""
        for name in ("sbatch", "srun"):
            if shutil.which(name) is None:
                where = "run this on a Slurm login node, or with a local cluster file"
                raise LaunchError(f"{name} is not on PATH: {where}")

    def most_together(self, count: int) -> int:
        """Return how many tasks an array may have, also by the site's MaxArraySize."""
        return 1 if count == 1 else min(count, LARGEST_ARRAY, slurm.largest_array())

    def other_jobs(self) -> int:
        """Count this user's jobs, tasks of arrays one by one."""
        # without this job itself, if a controller job asks
        return slurm.retry_until_answered(slurm.own_jobs) - (slurm_job_id() is not None)

    def submit(
        self, tasks: Sequence[Callable[[], Any]], request: Request, folder: Path
    ) -> list[str]:
        """Submit a job or an array exactly once, see `submit_once`; return the jobs' ids.

        Raises:
            SubmitLimitError: Fewer at a time, or later, may be accepted.
            RefusedError: The scheduler refused for another reason.
            LaunchError: The scheduler did not answer; it may have accepted the job or not.
            OSError: A job cannot be written.
        """
        sha256 = write_setup(folder, self.cluster)
        hashes = write_pickles(folder, tasks, request.minutes, time_outs(request))
        setup = [*run_setup(folder, sha256), know_pickles(hashes)]
        text = self._script(request, folder, setup, len(tasks))
        script = folder / ".submission.sh"
        write_atomically(script, text)
        job_id = submit_once(script, request.name)
        paths = JobPaths(folder, job_id=job_id)
        # the job is accepted by now, and its script is only kept for people to read
        with contextlib.suppress(OSError):
            paths.move_temporary_file(script, "submission_file", keep_as_symlink=True)
        return slurm.task_ids(job_id, len(tasks))

    def states(
        self, jobs: Sequence[Submitted], timeout_s: float | None = None
    ) -> dict[str, JobState]:
        """Return squeue's states, without the jobs that are over.

        With `timeout_s` Slurm is asked once; else again and again if it does not answer.

        Raises:
            LaunchError: Slurm has not answered.
        """
        keys = _keys(jobs)
        if timeout_s is not None:
            return _active(slurm.queue(keys, timeout_s, keys))
        return _active(slurm.retry_until_answered(lambda: slurm.queue(keys, keys=keys)))

    def ended(self, jobs: Sequence[Submitted]) -> Mapping[str, Sequence[StepState]]:
        """Return the states in accounting."""
        return slurm.steps([job.job_id for job in jobs], _keys(jobs))

    def hosts(self, job: Submitted) -> list[str]:
        """Return the nodes of a job's last run."""
        return slurm.hosts_of(job.job_id)

    def cancel_command(self, jobs: Sequence[Submitted]) -> str:
        """Return a call of scancel."""
        return "scancel " + " ".join(job.job_id for job in jobs)

    def cancel(self, jobs: Sequence[Submitted]) -> None:
        """Cancel jobs, as a user would; jobs that are over do not matter.

        Raises:
            LaunchError: Slurm does not answer.
        """
        keys = _keys(jobs)
        if there := slurm.queue(keys, keys=keys):
            slurm.cancel(there)

    def parameters(self, request: Request) -> dict[str, Any]:
        """Return the arguments of submitit's `_make_sbatch_string`."""
        cluster = self.cluster
        parameters: dict[str, Any] = {
            # else submitit writes --wckey=submitit, which is refused where wckeys are enforced
            "wckey": None,
            "job_name": request.name,
            "nodes": request.nodes,
            "ntasks_per_node": cluster.workers_per_node,
            "cpus_per_task": cluster.cpus_per_worker,
            "time": request.minutes,
            "array_parallelism": cluster.array_parallelism,
            # since Slurm 22.05 srun does not inherit --cpus-per-task from sbatch
            "srun_args": [f"--cpus-per-task={cluster.cpus_per_worker}", *cluster.srun_args],
            "setup": [
                f'echo "{RUN_MARK}${{SLURM_RESTART_COUNT:-0}}" >&2',
                describe_setup(cluster),
                # srun must export everything even if sbatch does not, as with `export = "NONE"`
                "export SLURM_EXPORT_ENV=ALL",
            ],
            "additional_parameters": self._options(request),
        }
        for key in ("partition", "account", "qos", "gres", "constraint"):
            value = getattr(cluster, key)
            # nothing is asked for
            if value is not None and (key, value) != ("gres", NO_GRES):
                parameters[key] = value
        if cluster.memory_gb:
            parameters["mem"] = _convert_mem(cluster.memory_gb)
        if cluster.exclusive:
            parameters["exclusive"] = True
        return parameters

    def _options(self, request: Request) -> dict[str, str | int | bool]:
        # what jobs handle, even if SUBMITIT_PREEMPT_SIGNAL has submitit ask for another signal
        options: dict[str, str | int | bool] = {"signal": f"USR2@{self.cluster.signal_delay_s}"}
        if self.cluster.sbatch.keys().isdisjoint({"no-requeue", "no_requeue"}):
            # without it a preempted job is lost if the site's default is JobRequeue=0
            options["requeue"] = True
        options |= self.cluster.sbatch
        if request.avoided:
            options["exclude"] = ",".join([*self._excluded(), *request.avoided])
        if request.after:
            options["dependency"] = "afterany:" + ":".join(request.after)
        # submitit would write `--requeue=False`, which sbatch refuses
        return {name: value for name, value in options.items() if value is not False}

    def _excluded(self) -> list[str]:
        own = str(self.cluster.sbatch.get("exclude", ""))
        if "/" not in own:
            return [own] if own else []
        # sbatch takes a value with a slash for a file with the names
        try:
            return Path(own).read_text().split()
        except OSError as error:
            raise InputError(f"{own}: {in_words(error)}", key="sbatch.exclude") from None

    def _script(self, request: Request, folder: Path, setup: Sequence[str], tasks: int) -> str:
        parameters = self.parameters(request)
        # the folder is RUN/slurm/<submission>
        run, names = folder.parents[1], list(variables_of(self.cluster))
        exports = export_lines(self.cluster, self.folders, names)
        parameters["setup"] = [*trust_folder(folder), *parameters["setup"], *setup, *exports]
        parameters["srun_args"] += srun_options(self.cluster, self.folders, run, names)
        if request.stage == CONTROL:
            parameters["teardown"] = requeue_if_killed(folder)
        if tasks > 1:
            parameters["map_count"] = tasks
        inside = python_of(self.cluster, self.folders, run, sys.executable)
        command = start_command(inside, folder)
        return str(_make_sbatch_string(command=command, folder=folder, **parameters))

    def script(self, request: Request, folder: Path, tasks: int) -> str:
        """Return the script that `submit` would hand in, without the hashes; needs no Slurm."""
        setup = [*run_setup(folder, MADE_LATER), know_pickles([MADE_LATER])]
        return self._script(request, folder, setup, tasks)

    def find_lost(self, path: Path, notice: Notice, known: Collection[str]) -> list[str]:
        """Return the ids of the array's tasks; [] if Slurm has no array of that name.

        `notice` is that of a command that was killed while it submitted them; `known` ids are on
        record.
        """
        # the file server's clock may differ from this machine's
        submitted_s = max(0.0, now_of_files(path.parent) - path.stat().st_mtime)
        # its sbatch may still be at work
        time.sleep(max(0.0, SBATCH_S - submitted_s))
        ids = sorted({job_id.partition("_")[0] for job_id in known})
        ids = ids or submissions_named(notice.name)
        if len(ids) > 1:
            slurm.cancel(ids[1:])
        return slurm.task_ids(ids[0], len(notice.tasks)) if ids else []


def _keys(jobs: Sequence[Submitted]) -> dict[str, str]:
    return {job.job_id: slurm.key_of(job.folder.name) for job in jobs}


def _active(states: Mapping[str, JobState]) -> dict[str, JobState]:
    return {job_id: state for job_id, state in states.items() if not state.is_over}


def time_outs(request: Request) -> int:
    """Return how often a job may be requeued after its time limit."""
    return controller_time_outs(request.minutes) if request.stage == CONTROL else TIME_OUTS


def options_of(script: str) -> list[str]:
    """Return the names of sbatch's options that a script sets."""
    return re.findall(r"^#SBATCH --([\w-]+)", script, re.MULTILINE)


def submit_once(script: Path, name: str) -> str:
    """Submit one job or array under this name, which must be unique; return its id.

    Raises:
        SubmitLimitError: A limit on submitted jobs is reached; fewer, or later, may be accepted.
        RefusedError: The scheduler refused for another reason.
        LaunchError: The scheduler did not answer for minutes; it may have accepted the job or not.
    """
    options = options_of(script.read_text())
    ends = time.monotonic() + LONGEST_WAIT_S
    for attempt, pause_s in enumerate(PAUSES_S, start=1):
        try:
            with outside_of_job(options):
                done = run(["sbatch", str(script)], SUBMIT_S)
        except NotStartedError:
            raise
        except LaunchError as error:
            done = Done(-1, "", str(error))
        if done.code == 0:
            return _only(_accepted(done.stdout, name), name, attempts=attempt)
        words = _PREFIX.sub("", _last_line(done.complaint))
        # if sbatch was killed, the scheduler has not refused anything
        refusal = _refusal(done.complaint) if done.code > 0 else None
        if refusal is not None:
            # perhaps this is a second job, refused because the first was accepted late
            if attempt > 1 and (found := submissions_named(name)):
                return _only(found[0], name, attempts=attempt - 1)
            raise refusal(f"{NO[refusal]}: {_explained(words, done.complaint)}")
        sys.stderr.write(f"sbatch: {words}; looking for the job, then trying again\n")
        time.sleep(pause_s)
        if found := submissions_named(name):
            return _only(found[0], name, attempts=attempt)
        if time.monotonic() >= ends:
            break
    silence = slurm.unreached(LaunchError(f"sbatch: {words}"))
    raise LaunchError(f"the Slurm controller accepts no job; {silence}; try again later")


def _accepted(printed: str, name: str) -> str:
    job_id = id_in(printed)
    if not job_id and (found := submissions_named(name)):
        return found[0]
    if not job_id:
        raise LaunchError(f"sbatch does not say which job it submitted: {_last_line(printed)}")
    return job_id


def _only(job_id: str, name: str, *, attempts: int) -> str:
    """Return the id of the one job that stays, after this number of calls of sbatch.

    Other jobs of the name are cancelled: a call that seemed to fail may have been accepted late.
    """
    if attempts > 1:
        time.sleep(SBATCH_S)
        others = [other for other in submissions_named(name, settled=True) if other != job_id]
        if others:
            slurm.cancel(others)
    return job_id


def id_in(printed: str) -> str:
    """Return the id in sbatch's words; a site's own words around them may mention jobs, too."""
    if found := _SUBMITTED.findall(printed):
        return str(found[-1])
    alone = _ID_ALONE.fullmatch(printed)
    return alone[1] if alone else ""


def _refusal(words: str) -> type[RefusedError] | None:
    """Return the kind of refusal in sbatch's words, or None if the scheduler did not answer."""
    if slurm.is_unanswered(words):
        return None
    return SubmitLimitError if slurm.is_submit_limit(words) else RefusedError


def submissions_named(name: str, *, settled: bool = False) -> list[str]:
    """Return the ids of the jobs or arrays of this name, oldest first.

    Wait for a controller that does not answer; ask once more if there are none, unless `settled`.

    Raises:
        LaunchError: The controller has not answered for an hour.
    """
    found = slurm.retry_until_answered(lambda: slurm.named(name))
    if not found and not settled:
        time.sleep(SETTLE_S)
        found = slurm.retry_until_answered(lambda: slurm.named(name))
    return found


def could_start(script: str) -> str:
    """Return sbatch's words on when and where a script's job could start; nothing is submitted.

    Raises:
        SubmitLimitError: The scheduler would not take it while there are so many jobs.
        RefusedError: It would not take it for another reason.
        LaunchError: The scheduler did not answer.
    """
    try:
        with outside_of_job(options_of(script)):
            done = run(["sbatch", "--test-only"], TEST_S, stdin=script)
    except LaunchError as error:
        raise LaunchError(f"sbatch gives no answer: {slurm.unreached(error)}") from None
    if done.code == 0:
        lines = [*done.stderr.splitlines(), *done.stdout.splitlines()]
        if answer := next((line for line in lines if _COULD_START.search(line)), ""):
            return _PREFIX.sub("", answer)
        raise no_answer("sbatch --test-only", "\n".join(lines))
    words = _PREFIX.sub("", _last_line(done.complaint))
    if done.code < 0 or (refusal := _refusal(done.complaint)) is None:
        raise LaunchError(f"sbatch gives no answer: {slurm.unreached(LaunchError(words))}")
    raise refusal(_explained(words, done.complaint))


def _explained(line: str, words: str) -> str:
    """Add the limits that were reached, or else the keys of the cluster file that are refused.

    Limits are named before the last line, which is the same for all of them.
    """
    if limits := dict.fromkeys(slurm.limits_named(words)):
        return ": ".join([line, *(name for name in limits if name not in line)])
    keys = [key for noun, key in REFUSED_KEYS.items() if re.search(rf"\b{noun}\b", line, re.I)]
    keys += re.findall(r"--([a-z-]+)", line)
    if NO_SUCH_NODE in line:
        return f"{line}: {WHAT_NODES_HAVE}"
    if not keys:
        return line
    return f"{line} (see {' and '.join(keys)} in the cluster file)"


def _last_line(words: str) -> str:
    """Return the last line of sbatch's own, without lines that a site adds after it."""
    lines: Sequence[str] = words.strip().splitlines()
    own = [line for line in lines if line.startswith("sbatch: ")]
    return [*lines, *own][-1] if lines else "no reason was given"
