"""Submit jobs, wait for them, and report how each of them ended.

Every job goes through `Launcher.submit`: it cuts them into arrays as large as Slurm takes
(`_submit_in_pieces`), and an executor starts each array: `launch/slurm_executor.py` by sbatch,
`launch/local_executor.py` on this machine. `describe_states` puts the states of its jobs into
words, such as "1 running".
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tula_hpc.config import ClusterSpec, WorkloadSpec
from tula_hpc.containers import NO_FOLDERS, Folders, folders_of
from tula_hpc.env import SECRET_FILE, held_allocation, slurm_job_id, unix_time
from tula_hpc.errors import (
    LaunchError,
    RefusedError,
    RunDirectoryError,
    StorageError,
    SubmitLimitError,
)
from tula_hpc.failure_kinds import Failure
from tula_hpc.files import full_disk, in_words, make_private
from tula_hpc.formatting import MINUTE_S, format_duration, in_short_lines
from tula_hpc.launch.diagnosis import (
    classify,
    complaining_nodes,
    ends,
    explain,
    read_logs,
    setup_failure,
    waits,
)
from tula_hpc.launch.job_files import Notice, Request, Submitted
from tula_hpc.launch.local_executor import LocalJobs
from tula_hpc.launch.slurm import JobState, StepState, accounted_runs, named
from tula_hpc.launch.slurm_executor import SlurmJobs
from tula_hpc.records import RunDirectory, read_document, write_atomically
from tula_hpc.records.broken_hosts import BrokenHost, broken_hosts, list_hosts
from tula_hpc.records.events import CONTROL

LOG_TAIL_LINES = 15
# last lines of each log in which the reason of an end is looked for: tracebacks may be long
LOG_READ_LINES = 100
# seconds between attempts to submit while a limit on submitted jobs is reached
ROOM_PAUSE_S = 30.0
# longest wait for accounting, whose answer nothing depends on
ACCOUNTING_S = 8.0
NOTICE = "submission.json"
REFUSED = "never_submitted.json"
NOT_KNOWN: Mapping[str, float] = {}
Executor = LocalJobs | SlurmJobs
EXECUTORS: Mapping[str, Callable[[ClusterSpec, Folders], Executor]] = {
    "local": LocalJobs,
    "slurm": SlurmJobs,
}

# a job's callable, and further fields of its "submitted" event
Task = tuple[Callable[[], Any], Mapping[str, Any]]


class Ended(NamedTuple):
    """A job's end as the scheduler reports it; its own records say whether its work is done."""

    job: Submitted
    # meaningful only if the records are missing
    failure: Failure
    log_tail: str
    log_file: Path | None
    # hosts on which a device failed, as far as known
    hosts: tuple[str, ...] = ()


class JobsNow(NamedTuple):
    """Jobs that are not over: how many of them run, all of them in words, and how many wait."""

    running: int
    text: str
    waiting: int = 0


def lost(run: RunDirectory) -> list[tuple[Path, Notice, set[str]]]:
    """Return submissions with jobs that no event names: path and content of the notice, known ids.

    Raises:
        RunDirectoryError: A notice is damaged.
    """
    known: dict[str, set[str]] = {}
    for job in run.history().submissions():
        known.setdefault(job.folder, set()).add(job.job_id)
    found = []
    for path in sorted(run.slurm.glob(f"*/{NOTICE}")):
        notice = read_document(Notice, path)
        ids = known.get(str(path.parent.relative_to(run.root)), set())
        # some ids are known if the command was killed between two events of an array
        if len(ids) < len(notice.tasks):
            found.append((path, notice, ids))
    return found


class StillRunningError(Exception):
    """Jobs run, and this process is not to wait for them; see `Launcher.detached`."""

    def __init__(self, jobs: Sequence[Submitted]) -> None:
        super().__init__(f"{len(jobs)} jobs are on their way")
        self.jobs = list(jobs)


class Launcher:
    """Submits callables as jobs of one cluster and waits for them.

    Logs and pickles go to the slurm/ folder of `run`. `name` is the base of the jobs' names, unique
    to the sweep. If `detached`, it raises `StillRunningError` instead of waiting. The folders of
    the workload `work` are mounted if jobs run in a container. `partition` is the name of `cluster`
    if it is one partition of a larger cluster.
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        run: RunDirectory,
        name: str,
        *,
        detached: bool = False,
        work: WorkloadSpec | None = None,
        partition: str = "",
    ) -> None:
        self.cluster = cluster
        self.run = run
        self.name = name
        self.detached = detached
        self.partition = partition
        folders = folders_of(work) if cluster.container and work else NO_FOLDERS
        self.executor = EXECUTORS[cluster.executor](cluster, folders)
        # what was said about the limit that the present submission waits for
        self.waits_for_room = ""

    def submit(
        self,
        jobs: Sequence[Callable[[], Any]],
        *,
        stage: str,
        nodes: int,
        minutes: int,
        data: Sequence[Mapping[str, Any]] = (),
        after: Sequence[str] = (),
        patient: bool = True,
    ) -> list[Submitted]:
        """Submit one array, or as few as the site allows, of which `array_parallelism` jobs run.

        Every array has a folder and a name of its own, so that no old result looks new if the
        scheduler counts its job ids from 1 again.

        `data` are further fields of each job's "submitted" event; `after` are ids of jobs that must
        be over before these start. If not `patient`, a site's limit is not waited for, and a
        refusal is not recorded. Returned are the accepted jobs, at least one: the first ones, if
        the site limits their number.

        Raises:
            LaunchError: The scheduler refused, or there is no room and waiting would not help.
        """
        todo = list(zip(jobs, data or [{}] * len(jobs), strict=True))
        request = Request(stage, nodes, minutes, tuple(after))
        try:
            return self._submit_in_pieces(todo, request, patient)
        except RefusedError as refusal:
            where = f"partition {self.partition}: " if self.partition else ""
            error = type(refusal)(f"{where}{self._with_avoided(refusal, stage)}")
            if patient:
                self.run.log_event("failed", stage, detail=f"{stage}: {error}"[:2000])
            raise error from None

    def _with_avoided(self, error: RefusedError, stage: str) -> str:
        """Add to a refusal the hosts that were left out, which may be the reason."""
        avoided = self.avoided(stage)
        if not avoided or isinstance(error, SubmitLimitError):
            return str(error)
        again = time.strftime("%Y-%m-%d %H:%M", time.localtime(min(each.until for each in avoided)))
        excluded = f"nodes with broken devices are left out: {list_hosts(avoided)}"
        return f"{error}; {excluded}; the first is tried again from {again} on"

    def avoided(self, stage: str) -> list[BrokenHost]:
        """Return the hosts that jobs of this stage must avoid because a device failed there."""
        # controllers need no device, and one machine has no other hosts
        if not self.executor.limits.several_hosts or stage == CONTROL:
            return []
        return broken_hosts(self.run.events(), unix_time())

    def _submit_in_pieces(
        self, todo: Sequence[Task], request: Request, patient: bool
    ) -> list[Submitted]:
        most = self.executor.most_together(len(todo))
        submitted: list[Submitted] = []
        arrays: list[str] = []
        self.waits_for_room = ""
        while todo:
            try:
                accepted = self._submit_array(todo[:most], request)
            except SubmitLimitError as error:
                if submitted:
                    break
                if not patient:
                    raise
                most = self._fewer(min(most, len(todo)), error, len(todo))
                continue
            except RefusedError as error:
                if min(most, len(todo)) == 1:
                    raise
                # a site may take no arrays; for any other reason a single job is refused, too
                sys.stderr.write(f"{error}; submitting jobs one by one\n")
                most = 1
                continue
            submitted += accepted
            todo = todo[most:]
            arrays.append(accepted[0].array_id)
            # with more arrays side by side, more jobs would run than array_parallelism allows
            together = max(1, self.cluster.array_parallelism // most)
            if len(arrays) >= together:
                request = request._replace(after=(arrays[-together],))
        return submitted

    def _fewer(self, most: int, error: SubmitLimitError, wanted: int) -> int:
        """Return how many of the `wanted` jobs to try after a site's limit refused `most` of them.

        To make room for a single job, guards are cancelled. If there are none, it waits for other
        jobs of this user, after which there may be room for all.

        Raises:
            SubmitLimitError: The user has no other jobs.
        """
        if most > 1:
            return (most + 1) // 2
        if self.dismiss_guards():
            sys.stderr.write(f"{error}; going on without a guard\n")
            return 1
        if self.executor.other_jobs() <= 0:
            raise error
        words = f"{error}; trying again every {ROOM_PAUSE_S:g} s"
        # once, as a limit may be reached for days
        if words != self.waits_for_room:
            sys.stderr.write(f"{words}\n")
        self.waits_for_room = words
        time.sleep(ROOM_PAUSE_S)
        return self.executor.most_together(wanted)

    def dismiss_guards(self) -> bool:
        """Cancel this run's guards, except the job that asks; return whether there were any."""
        idle = [job for job in self.run.history().guards() if job.job_id != slurm_job_id()]
        for job in idle:
            # a guard that cannot be cancelled is over, or will find nothing to do
            with contextlib.suppress(LaunchError):
                self.executor.cancel([Submitted(job.job_id, self.run.root / job.folder)])
            self.run.log_event("ended", CONTROL, job_id=job.job_id)
        return bool(idle)

    def _submit_array(self, tasks: Sequence[Task], request: Request) -> list[Submitted]:
        self.executor.check()
        key = uuid.uuid4().hex[:6]
        folder = self.run.slurm / f"{request.stage}-{time.strftime('%Y%m%d-%H%M%S')}-{key}"
        make_private(folder)
        avoided = tuple(each.host for each in self.avoided(request.stage))
        request = request._replace(name=f"{self.name}-{request.stage}-{key}", avoided=avoided)
        notice = Notice(
            name=request.name,
            stage=request.stage,
            tasks=[{"nodes": request.nodes, **data} for _, data in tasks],
        )
        write_atomically(folder / SECRET_FILE, secrets.token_hex(32))
        write_atomically(folder / NOTICE, notice.model_dump_json())
        try:
            ids = self.executor.submit([job for job, _ in tasks], request, folder)
        except RefusedError:
            (folder / NOTICE).rename(folder / REFUSED)
            raise
        except OSError as error:
            words = f"{folder}: the job cannot be written: {in_words(error)}"
            raise StorageError(words) from error
        return self._log_submitted(folder, notice, ids)

    def _log_submitted(
        self, folder: Path, notice: Notice, ids: Sequence[str], known: Collection[str] = ()
    ) -> list[Submitted]:
        """Record the jobs of a submission that are not on record yet; return them."""
        new = []
        for job_id, data in zip(ids, notice.tasks, strict=True):
            if job_id not in known:
                place = str(folder.relative_to(self.run.root))
                fields = {"run": str(self.run.root), "folder": place, **data}
                self.run.log_event("submitted", notice.stage, job_id=job_id, data=fields)
                new.append(Submitted(job_id, folder))
        return new

    def find_lost(self) -> list[Submitted]:
        """Record jobs that a command submitted and was killed before it recorded them; return them.

        Raises:
            LaunchError: The controller has not answered for an hour.
        """
        found = []
        for path, notice, known in lost(self.run):
            ids = self.executor.find_lost(path, notice, known)
            if any(ids):
                found += self._log_submitted(path.parent, notice, ids, {*known, ""})
                # the others never begin: with all jobs on record, the submission is not lost
                begun = [task for task, job_id in zip(notice.tasks, ids, strict=True) if job_id]
                whole = notice.model_copy(update={"tasks": begun})
                write_atomically(path, whole.model_dump_json())
                continue
            # without pickles, an sbatch that is still at work cannot start the jobs later
            for pickled in path.parent.glob("task-*.pkl"):
                pickled.unlink(missing_ok=True)
            path.rename(path.with_name(REFUSED))
        return found

    def wait(
        self, jobs: Sequence[Submitted], tick: Callable[[JobsNow], None] = lambda _: None
    ) -> list[Ended]:
        """Wait until all jobs are over; `tick` is called with a summary of their states."""
        ended: dict[str, Ended] = {}
        while left := [job for job in jobs if job.job_id not in ended]:
            ended |= {end.job.job_id: end for end in self.wait_for_some(left, tick)}
        return [ended[job.job_id] for job in jobs]

    def wait_for_some(
        self, jobs: Sequence[Submitted], tick: Callable[[JobsNow], None] = lambda _: None
    ) -> list[Ended]:
        """Wait until any of these jobs is over; return those that are.

        Raises:
            StillRunningError: No job is over, and the launcher is detached.
        """
        limits = self.executor.limits
        missing = dict.fromkeys((job.job_id for job in jobs), 0)
        ran_at: dict[str, float] = {}
        started = time.monotonic()
        looked = 0
        while True:
            looked += 1
            active = self.executor.states(jobs)
            for job_id in missing:
                missing[job_id] = 0 if job_id in active else missing[job_id] + 1
            over = [job for job in jobs if missing[job.job_id] >= limits.gone_polls]
            if over:
                return self._ended(over)
            running = (job_id for job_id, state in active.items() if not waits(state))
            ran_at |= dict.fromkeys(running, unix_time())
            tick(self._described(active, ran_at))
            if self.detached and looked >= limits.gone_polls:
                raise StillRunningError(jobs)
            waited_s = time.monotonic() - started
            time.sleep(limits.pause_s(waited_s, missed=any(missing.values())))

    def jobs_now(self, jobs: Sequence[Submitted]) -> JobsNow:
        """Return the states of these jobs, in words."""
        active = self.executor.states(jobs)
        return self._described(active) if active else JobsNow(0, "no job")

    def _described(
        self, active: Mapping[str, JobState], ran_at: Mapping[str, float] = NOT_KNOWN
    ) -> JobsNow:
        waiting = [job_id for job_id, state in active.items() if waits(state)]
        waited_s: dict[str, float] = {}
        if waiting:
            now = unix_time()
            jobs = {job.job_id: job for job in self.run.history().submissions()}
            # a requeued job waits from its last sign of life on, or since it was last seen to run
            signs = {key: jobs[key].last_sign_at for key in waiting if key in jobs}
            waited_s = {key: now - max(at, ran_at.get(key, at)) for key, at in signs.items()}
        running = len(active) - len(waiting)
        return JobsNow(running, describe_states(active, waited_s), len(waiting))

    def note_accounts(self) -> bool:
        """Write down the accounting records of all jobs so far, which reports cannot ask for.

        Return False if accounting knows no job, does not answer in seconds, or does not exist.
        """
        jobs = self.run.history().submissions()
        if self.cluster.executor != "slurm" or not jobs:
            return False
        try:
            known = accounted_runs(
                {job.job_id: job.stage for job in jobs},
                name_prefix=f"{self.name}-",
                since=min(job.submitted_at for job in jobs),
                timeout_s=ACCOUNTING_S,
            )
        except LaunchError:
            return False
        lines = [f"{run.model_dump_json()}\n" for runs in known.values() for run in runs]
        if lines:
            write_atomically(self.run.accounting_file, "".join(lines))
        return bool(lines)

    def _ended(self, jobs: Sequence[Submitted]) -> list[Ended]:
        rows = self.executor.ended(jobs)
        ended = []
        full: str | None = None
        for job in jobs:
            log_file, logs = read_logs(job.log_files())
            states = rows.get(job.job_id, [])
            if not states and log_file is None and self._has_left_its_array(job):
                states = [StepState(job.job_id, "CANCELLED", "0:0")]
            failure = classify(states, ends(logs, LOG_READ_LINES))
            tail = in_short_lines(ends(logs, LOG_TAIL_LINES))
            before = setup_failure("\n".join(logs))
            if before and before not in tail:
                tail = f"{before}\n{tail}"
            # perhaps the job could not even log that there was no space
            if failure is Failure.BUG:
                full = full_disk(self.run.root) if full is None else full
                if full:
                    failure = Failure.NO_SPACE
                    tail = f"{tail}\n{full}".strip()
            hosts = self._broken_hosts(job) if failure is Failure.DEVICE_FAILED else ()
            ended.append(Ended(job, failure, tail, log_file, hosts))
        return ended

    def _has_left_its_array(self, job: Submitted) -> bool:
        """Tell whether Slurm knows the array of a task, though not the task itself.

        A waiting task has no record of its own, and so leaves none if it is cancelled.
        """
        if job.array_id == job.job_id:
            return False
        try:
            return job.array_id in named(read_document(Notice, job.folder / NOTICE).name)
        except (FileNotFoundError, RunDirectoryError, LaunchError):
            return False

    def _broken_hosts(self, job: Submitted) -> tuple[str, ...]:
        """Return the hosts on which a device failed, by the workers' events, else by the logs."""
        own = self.run.history().job(job.job_id).hosts
        if own or not self.executor.limits.several_hosts:
            return tuple(dict.fromkeys(own))
        numbers = complaining_nodes(job.log_files())
        hosts = self.executor.hosts(job) if numbers else []
        return tuple(hosts[number] for number in numbers if number < len(hosts))

    def script(self, *, stage: str, nodes: int, minutes: int, tasks: int) -> str:
        """Return the batch script that `submit` would hand in, for --dry-run; "" without Slurm."""
        avoided = tuple(each.host for each in self.avoided(stage))
        request = Request(stage, nodes, minutes, name=f"{self.name}-{stage}", avoided=avoided)
        return self.executor.script(request, self.run.slurm / f"{stage}-…", tasks)


def describe_states(
    active: Mapping[str, JobState], waited_s: Mapping[str, float] = NOT_KNOWN
) -> str:
    """Summarize states, for example `3 running, 1 waiting for 12 min (other jobs go first)`."""
    groups: dict[tuple[str, str], list[str]] = {}
    for job_id, state in active.items():
        groups.setdefault(_in_words(state), []).append(job_id)
    parts = []
    for (state_text, why), job_ids in groups.items():
        longest_s = max(waited_s.get(job_id, 0.0) for job_id in job_ids)
        # in whole minutes, so that a log gets one line a minute, not one a second
        minutes = max(0, int(longest_s / MINUTE_S))
        how_long = f" for {format_duration(float(MINUTE_S * minutes))}" if minutes else ""
        reason = why.replace("JOB", job_ids[0]) if len(job_ids) == 1 else why
        parts.append(f"{len(job_ids)} {state_text}{how_long}{reason}")
    return ", ".join(parts) or "ending"


def _in_words(state: JobState) -> tuple[str, str]:
    """Return a job's state and why it waits, with a warning if waiting will not help."""
    if not waits(state):
        return state.state.lower().replace("_", " "), ""
    wait = explain(state)
    why = wait.words or state.reason
    if not why:
        return "waiting", ""
    if wait.stuck:
        why += "; this does not go away by itself"
    if state.reason.strip("()") == "Resources" and (job_id := held_allocation()):
        why += f"; job {job_id}, in which this command runs, keeps its own nodes"
    return "waiting", f" ({why})"
