"""Jobs through submitit: submit, wait, and say how each ended. On Slurm as arrays, on one machine one after another."""

from __future__ import annotations

import contextlib
import math
import secrets
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tula_hpc.config import ClusterSpec
from tula_hpc.env import RUN_MARK, SECRET_FILE, gpus_as_here, slurm_job_id, unix_time
from tula_hpc.errors import (
    Failure,
    InputError,
    LaunchError,
    RefusedError,
    StorageError,
    SubmitLimitError,
)
from tula_hpc.files import full_disk, in_words, make_private
from tula_hpc.formatting import in_short_lines
from tula_hpc.launch import slurm
from tula_hpc.launch.job_files import describe_setup, run_setup, write_setup
from tula_hpc.launch.local_executor import is_alive, was_killed
from tula_hpc.launch.reasons import classify, complaining_nodes, ends, explain, read_logs
from tula_hpc.records import Record, RunDirectory, read_document, write_atomically
from tula_hpc.records.broken_hosts import BrokenHost, broken_hosts, list_hosts
from tula_hpc.records.events import CONTROL

POLL_S = 2.0
# a requeued job is missing from squeue for a moment: believe its end only when seen so often
GONE_POLLS = 3
LOG_TAIL_LINES = 15
# of each log, for the reason of an end: before the last lines there may be a long traceback
LOG_READ_LINES = 100
# tasks, where the site would allow more
LARGEST_ARRAY = 1000
# between attempts while a limit on submitted jobs holds
ROOM_PAUSE_S = 30.0
# so long after its start an sbatch whose caller was killed may still be at work
SBATCH_S = 20.0
# so long one may wait for room below a limit, requeued at each time limit of its own
CONTROL_MINUTES = 30 * 24 * 60
# after which other jobs that leave that to submitit are not requeued any more
TIME_OUTS = 3
# in a dry run, for a hash of what is written at the submission
MADE_LATER = "…"
NOTICE = "submission.json"
REFUSED = "never_submitted.json"
# of a job on this machine, in Slurm's words
KILLED_HERE = slurm.StepState("", "", "0:9")

# what to run, and what the event of its submission says besides
Task = tuple[Callable[[], Any], Mapping[str, Any]]


class Submitted(NamedTuple):
    """A job on its way: its id and where its logs are."""

    job_id: str
    folder: Path

    def log_files(self) -> list[Path]:
        """Standard error, then standard output, of every task so far."""
        return [
            *sorted(self.folder.glob(f"{self.job_id}_*.err")),
            *sorted(self.folder.glob(f"{self.job_id}_*.out")),
        ]

    @property
    def array_id(self) -> str:
        """Of the array that the job is a task of; its own id for a plain job."""
        return self.job_id.partition("_")[0]


class Request(NamedTuple):
    """What all jobs of a submission have in common."""

    stage: str
    nodes: int
    minutes: int
    after: tuple[str, ...] = ()


class Notice(Record):
    """submission.json of a submission's folder, written before sbatch is called: what to look for if nobody heard."""

    # of the job or array; unique
    name: str
    stage: str
    # see `SubmissionData`
    tasks: list[dict[str, Any]]


class Ended(NamedTuple):
    """How a job ended as far as the scheduler tells; whether it did its work is told by the records it left."""

    job: Submitted
    # meaningful only where the records are missing
    failure: Failure
    log_tail: str
    log_file: Path | None
    # in which a device failed, as far as known
    hosts: tuple[str, ...] = ()


def lost(run: RunDirectory) -> list[tuple[Path, Notice, set[str]]]:
    """Submissions of which not every job is in the events: the notice, what it says, and the ids of those that are.

    Raises:
        RunDirectoryError: A notice is damaged.
    """
    known: dict[str, list[str]] = {}
    for job in run.history().submissions():
        known.setdefault(job.folder, []).append(job.job_id)
    found = []
    for path in sorted(run.slurm.glob(f"*/{NOTICE}")):
        notice, ids = (
            read_document(Notice, path),
            known.get(str(path.parent.relative_to(run.root)), []),
        )
        # fewer, but not none: killed between two events of an array
        if len(ids) < len(notice.tasks):
            found.append((path, notice, set(ids)))
    return found


class StillRunningError(Exception):
    """Jobs are on their way, and nobody is to wait for them here; see `Launcher.detached`."""

    def __init__(self, jobs: Sequence[Submitted]) -> None:
        super().__init__(f"{len(jobs)} jobs are on their way")
        self.jobs = list(jobs)


class Launcher:
    """Submits callables as jobs of one cluster and waits for them.

    Args:
        cluster: Where and how.
        run: The run directory; logs and pickles go to its slurm/ folder.
        name: Base of the job names, unique to the sweep.
        detached: Whether to raise `StillRunningError` instead of waiting.
    """

    def __init__(
        self, cluster: ClusterSpec, run: RunDirectory, name: str, *, detached: bool = False
    ) -> None:
        self.cluster, self.run, self.name, self.detached = cluster, run, name, detached

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
        """Submit as one array, or as few as the site's MaxArraySize allows, one after another.

        Every array has a folder and a name of its own: a scheduler that counts its job ids from 1
        again thus cannot make an old result look new.

        Args: jobs: What to run. stage: Names the folder and the jobs. nodes: Of each job. minutes:
            Time limit of each job. data: What the event of each submission says besides. after: Ids
            of jobs that must be over before. patient: Whether to wait for room below a limit of the
            site; and a refusal is noted as the stage's failure.

        Returns: Those that were accepted, at least one: the first ones, where the site limits how
            many a user may submit.

        Raises:
            LaunchError: The scheduler refused, or, for want of room, could not wait.
        """
        todo = list(zip(jobs, data or [{}] * len(jobs), strict=True))
        request = Request(stage, nodes, minutes, tuple(after))
        try:
            return self._submit_in_pieces(todo, request, patient)
        except RefusedError as refusal:
            error = self._with_avoided(refusal, stage)
            if patient:
                self.run.log_event("failed", stage, detail=str(error)[:2000])
            raise error from None

    def _with_avoided(self, error: RefusedError, stage: str) -> RefusedError:
        """Add to a refusal which hosts were left out of the request, since that may be the reason."""
        avoided = self.avoided(stage)
        if not avoided or isinstance(error, SubmitLimitError):
            return error
        again = time.strftime("%Y-%m-%d %H:%M", time.localtime(min(each.until for each in avoided)))
        told = f"nodes with broken devices are left out: {list_hosts(avoided)}"
        return RefusedError(f"{error}; {told}; the first of them is tried again from {again} on")

    def avoided(self, stage: str) -> list[BrokenHost]:
        """Return the hosts that jobs of this stage are kept off because a device failed there."""
        # controllers need no device, and one machine has no other hosts
        if self.cluster.executor == "local" or stage == CONTROL:
            return []
        return broken_hosts(self.run.events(), unix_time())

    def _submit_in_pieces(
        self, todo: Sequence[Task], request: Request, patient: bool
    ) -> list[Submitted]:
        most = self._largest_array(len(todo))
        submitted: list[Submitted] = []
        while todo:
            try:
                accepted = self._submit_array(todo[:most], request)
            except SubmitLimitError as error:
                if submitted:
                    break
                if not patient:
                    raise
                most = self._fewer(min(most, len(todo)), error)
                continue
            submitted += accepted
            todo = todo[most:]
            # side by side they would be more at once than array_parallelism
            request = request._replace(after=(accepted[0].array_id,))
        return submitted

    def _largest_array(self, count: int) -> int:
        if self.cluster.executor == "local" or count == 1:
            return count
        return min(count, LARGEST_ARRAY, slurm.largest_array())

    def _fewer(self, most: int, error: SubmitLimitError) -> int:
        """How many to try next after a site's limit refused so many; a single one waits for others of this user.

        A guard gives way first: it may be what there is no room for.

        Raises:
            SubmitLimitError: There are no others.
        """
        if most > 1:
            return (most + 1) // 2
        if self.dismiss_guards():
            sys.stderr.write(f"{error}; going on without a guard\n")
            return 1
        # a controller job is one of them itself
        if slurm.patiently(slurm.own_jobs) <= (slurm_job_id() is not None):
            raise error
        sys.stderr.write(f"{error}; trying again in {ROOM_PAUSE_S:g} s\n")
        time.sleep(ROOM_PAUSE_S)
        return 1

    def dismiss_guards(self) -> bool:
        """Cancel the guards of this run, but not the job that asks; returns whether there were any."""
        idle = [job_id for job_id in self.run.history().guards() if job_id != slurm_job_id()]
        for job_id in idle:
            # it is over, or starts in vain
            with contextlib.suppress(LaunchError):
                slurm.cancel([job_id])
            self.run.log_event("ended", CONTROL, job_id=job_id)
        return bool(idle)

    def _submit_array(self, tasks: Sequence[Task], request: Request) -> list[Submitted]:
        key = uuid.uuid4().hex[:6]
        folder = self.run.slurm / f"{request.stage}-{time.strftime('%Y%m%d-%H%M%S')}-{key}"
        make_private(folder)
        notice = Notice(
            name=f"{self.name}-{request.stage}-{key}",
            stage=request.stage,
            tasks=[{"nodes": request.nodes, **data} for _, data in tasks],
        )
        executor = self._executor(folder, request)
        write_atomically(folder / SECRET_FILE, secrets.token_hex(32))
        setup = run_setup(folder, write_setup(folder, self.cluster))
        write_atomically(folder / NOTICE, notice.model_dump_json())
        executor.update_parameters(**self._own(notice.name, folder, request, setup))
        try:
            ids = [str(job.job_id) for job in _submit(executor, [job for job, _ in tasks])]
        except RefusedError:
            (folder / NOTICE).rename(folder / REFUSED)
            raise
        return self._log_submitted(folder, notice, ids)

    def _own(
        self, name: str, folder: Path, request: Request, setup: Sequence[str]
    ) -> dict[str, Any]:
        """The parameters of one submission, with what belongs to it alone."""
        parameters = self.parameters(
            stage=request.stage, nodes=request.nodes, minutes=request.minutes
        )
        if self.cluster.executor == "local":
            return {**parameters, "local_setup": [*parameters["local_setup"], *setup]}
        from tula_hpc.launch.slurm_executor import come_again, trust_folder

        more = dict(parameters["slurm_additional_parameters"])
        if request.after:
            more["dependency"] = "afterany:" + ":".join(request.after)
        own = {"slurm_setup": [*trust_folder(folder), *parameters["slurm_setup"], *setup]}
        if request.stage == CONTROL:
            own["slurm_teardown"] = come_again(folder)
        return {**parameters, "name": name, **own, "slurm_additional_parameters": more}

    def _log_submitted(
        self, folder: Path, notice: Notice, ids: Sequence[str], known: Collection[str] = ()
    ) -> list[Submitted]:
        """Enter those of a submission's jobs into the events that are not known there; returns them."""
        new = [
            (job_id, data)
            for job_id, data in zip(ids, notice.tasks, strict=True)
            if job_id not in known
        ]
        for job_id, data in new:
            said = {"folder": str(folder.relative_to(self.run.root)), **data}
            self.run.log_event("submitted", notice.stage, job_id=job_id, data=said)
        return [Submitted(job_id, folder) for job_id, _ in new]

    def find_lost(self) -> list[Submitted]:
        """Enter into the events what was submitted by a process that was killed before it could do so.

        Raises:
            LaunchError: The controller has not answered for minutes.
        """
        return [
            job for path, notice, known in lost(self.run) for job in self._find(path, notice, known)
        ]

    def _find(self, path: Path, notice: Notice, known: Collection[str]) -> list[Submitted]:
        ids = (
            _begun(path, notice)
            if self.cluster.executor == "local"
            else _accepted(path, notice, known)
        )
        if not any(ids):
            # an sbatch that is still at work must not start them later
            for pickled in path.parent.glob("task-*.pkl"):
                pickled.unlink(missing_ok=True)
            path.rename(path.with_name(REFUSED))
            return []
        return self._log_submitted(path.parent, notice, ids, {*known, ""})

    def wait(
        self, jobs: Sequence[Submitted], tick: Callable[[str], None] = lambda _: None
    ) -> list[Ended]:
        """Wait until all are over; `tick` hears now and then what they are doing."""
        ended: dict[str, Ended] = {}
        while left := [job for job in jobs if job.job_id not in ended]:
            ended |= {end.job.job_id: end for end in self.wait_for_some(left, tick)}
        return [ended[job.job_id] for job in jobs]

    def wait_for_some(
        self, jobs: Sequence[Submitted], tick: Callable[[str], None] = lambda _: None
    ) -> list[Ended]:
        """Wait until any of these is over; returns those that are.

        Raises:
            StillRunningError: None is over, and the launcher is detached.
        """
        missing = dict.fromkeys((job.job_id for job in jobs), 0)
        started, looked = time.monotonic(), 0
        while True:
            looked += 1
            active = self.active(jobs)
            for job_id in missing:
                missing[job_id] = 0 if job_id in active else missing[job_id] + 1
            over = [job for job in jobs if missing[job.job_id] >= self._gone_polls]
            if over:
                return self._ended(over)
            tick(_describe(active))
            if self.detached and looked >= self._gone_polls:
                raise StillRunningError(jobs)
            time.sleep(self._pause_s(time.monotonic() - started))

    def _pause_s(self, waited_s: float) -> float:
        """Long waits ask the controller less often: every 2 s at first, every 30 s after half an hour."""
        return min(30.0, max(POLL_S, waited_s / 60)) if self.cluster.executor == "slurm" else 0.2

    @property
    def _gone_polls(self) -> int:
        return GONE_POLLS if self.cluster.executor == "slurm" else 1

    def active(
        self, jobs: Sequence[Submitted], timeout_s: float | None = None
    ) -> dict[str, slurm.JobState]:
        """Those of the jobs that are not over.

        Args: jobs: Which ones. timeout_s: For one answer; None: a controller that does not answer
            for a while is waited out.

        Raises:
            LaunchError: It has not answered.
        """
        if self.cluster.executor == "local":
            return {
                job.job_id: slurm.JobState("RUNNING", "")
                for job in jobs
                if is_alive(job.folder, job.job_id)
            }
        ids = [job.job_id for job in jobs]
        states = (
            slurm.patiently(lambda: slurm.queue(ids))
            if timeout_s is None
            else slurm.queue(ids, timeout_s)
        )
        return {job_id: state for job_id, state in states.items() if not state.is_over}

    def cancel_command(self, jobs: Sequence[Submitted]) -> str:
        """What a user types to cancel these jobs. Locally KILL: on TERM a training saves and is started again."""
        if self.cluster.executor == "slurm":
            return "scancel " + " ".join(job.job_id for job in jobs)
        return "; ".join(dict.fromkeys(shlex.join(_kill(job)) for job in jobs))

    def cancel(self, jobs: Sequence[Submitted]) -> None:
        """Cancel these jobs, as a user would; those that are over do not matter.

        Raises:
            LaunchError: Slurm does not answer.
        """
        if self.cluster.executor == "slurm":
            slurm.cancel(job.job_id for job in jobs)
            return
        for job in jobs:
            with contextlib.suppress(FileNotFoundError):
                subprocess.run(_kill(job), check=False)

    def _ended(self, jobs: Sequence[Submitted]) -> list[Ended]:
        rows = self._steps(jobs)
        ended, full = [], None
        for job in jobs:
            log_file, logs = read_logs(job.log_files())
            failure = classify(rows.get(job.job_id, []), ends(logs, LOG_READ_LINES))
            tail = in_short_lines(ends(logs, LOG_TAIL_LINES))
            # or it could not even write down that there is no space
            if failure is Failure.BUG:
                full = full_disk(self.run.root) if full is None else full
                failure, tail = (
                    (Failure.NO_SPACE, f"{tail}\n{full}".strip()) if full else (failure, tail)
                )
            hosts = self._broken_hosts(job) if failure is Failure.DEVICE_FAILED else ()
            ended.append(Ended(job, failure, tail, log_file, hosts))
        return ended

    def _broken_hosts(self, job: Submitted) -> tuple[str, ...]:
        """Return the hosts whose workers say that a device failed, or whose logs do where no worker could."""
        own = self.run.history().job(job.job_id).hosts
        if own or self.cluster.executor == "local":
            return tuple(dict.fromkeys(own))
        numbers = complaining_nodes(job.log_files())
        hosts = slurm.hosts_of(job.job_id) if numbers else []
        return tuple(hosts[number] for number in numbers if number < len(hosts))

    def _steps(self, jobs: Sequence[Submitted]) -> Mapping[str, Sequence[slurm.StepState]]:
        """What is known of their ends. Accounting is asked once for all of them: thousands may end together."""
        if self.cluster.executor == "slurm":
            return slurm.steps([job.job_id for job in jobs])
        return {job.job_id: [KILLED_HERE] for job in jobs if was_killed(job.folder, job.job_id)}

    def _executor(self, folder: Path, request: Request) -> Any:
        import submitit

        # submitit looks for srun
        missing = next((name for name in ("sbatch", "srun") if shutil.which(name) is None), None)
        if self.cluster.executor == "slurm" and missing:
            raise LaunchError(
                f"{missing} is not on PATH: run this on a Slurm login node, or with a local cluster file"
            )
        executor = submitit.AutoExecutor(folder=folder, cluster=self.cluster.executor)
        # AutoExecutor still translates the parameters
        if self.cluster.executor == "slurm":
            from tula_hpc.launch.slurm_executor import PatientExecutor

            starts = (
                math.ceil(CONTROL_MINUTES / request.minutes)
                if request.stage == CONTROL
                else TIME_OUTS
            )
            executor._executor = PatientExecutor(folder, max_num_timeout=starts)
        else:
            from tula_hpc.launch.local_executor import TakingExecutor

            executor._executor = TakingExecutor(folder)
        return executor

    def parameters(self, *, stage: str, nodes: int, minutes: int) -> dict[str, Any]:
        """Parameters of the submitit executor for one submission."""
        if self.cluster.executor == "local":
            return self._local_parameters(nodes, minutes)
        return self._slurm_parameters(stage, nodes, minutes)

    def _local_parameters(self, nodes: int, minutes: int) -> dict[str, Any]:
        # the nodes are emulated: one machine runs all workers
        workers = nodes * self.cluster.workers_per_node
        gpus = [gpus_as_here()] if self.cluster.device == "cuda" else []
        return {
            "nodes": 1,
            "tasks_per_node": workers,
            "gpus_per_node": workers if self.cluster.device == "cuda" else 0,
            "timeout_min": minutes,
            # EXIT: keeps bash, where it is /bin/sh, from becoming its last command: submitit counts
            # on a parent shell. INT: a terminal sends Ctrl-C to the jobs too, which are in the same
            # process group; they are to go on
            "local_setup": ["trap : EXIT", "trap '' INT", *gpus],
        }

    def _slurm_parameters(self, stage: str, nodes: int, minutes: int) -> dict[str, Any]:
        cluster = self.cluster
        optional = {
            key: getattr(cluster, key)
            for key in ("partition", "account", "qos", "gres", "constraint")
        }
        # a preempted job is lost without it where the site's default is JobRequeue=0
        requeue = (
            {"requeue": True}
            if cluster.sbatch.keys().isdisjoint({"no-requeue", "no_requeue"})
            else {}
        )
        return {
            "name": f"{self.name}-{stage}",
            "nodes": nodes,
            "tasks_per_node": cluster.workers_per_node,
            "cpus_per_task": cluster.cpus_per_worker,
            "timeout_min": minutes,
            **({"mem_gb": cluster.memory_gb} if cluster.memory_gb else {}),
            **{f"slurm_{key}": value for key, value in optional.items() if value is not None},
            **({"slurm_exclusive": True} if cluster.exclusive else {}),
            "slurm_array_parallelism": cluster.array_parallelism,
            "slurm_signal_delay_s": cluster.signal_delay_s,
            # since Slurm 22.05 srun does not inherit --cpus-per-task from sbatch
            "slurm_srun_args": [f"--cpus-per-task={cluster.cpus_per_worker}", *cluster.srun_args],
            "slurm_setup": [
                f'echo "{RUN_MARK}${{SLURM_RESTART_COUNT:-0}}" >&2',
                describe_setup(cluster),
            ],
            "slurm_additional_parameters": _without_false(
                {**requeue, **cluster.sbatch, **self._exclude(stage)}
            ),
        }

    def _exclude(self, stage: str) -> dict[str, str]:
        """Return sbatch's option with the hosts to avoid, and those that the user excludes."""
        avoided = [each.host for each in self.avoided(stage)]
        if not avoided:
            return {}
        own = str(self.cluster.sbatch.get("exclude", ""))
        if "/" in own:
            # sbatch takes that for a file with the names
            try:
                own = ",".join(Path(own).read_text().split())
            except OSError as error:
                raise InputError(f"{own}: {in_words(error)}", key="sbatch.exclude") from None
        return {"exclude": ",".join(filter(None, [own, *avoided]))}

    def script(self, *, stage: str, nodes: int, minutes: int, tasks: int) -> str:
        """The sbatch script that `submit` would hand in; for --dry-run, without Slurm."""
        from submitit.slurm import slurm as submitit_slurm

        from tula_hpc.launch.slurm_executor import (
            DEFAULTS,
            know_pickles,
            start_command,
            trust_folder,
        )

        plain = {"name": "job_name", "timeout_min": "time", "tasks_per_node": "ntasks_per_node"}
        parameters = dict(DEFAULTS)
        for key, value in self.parameters(stage=stage, nodes=nodes, minutes=minutes).items():
            parameters[plain.get(key, key.removeprefix("slurm_"))] = value
        if "mem_gb" in parameters:
            parameters["mem"] = submitit_slurm._convert_mem(parameters.pop("mem_gb"))
        folder = self.run.slurm / f"{stage}-…"
        setup = [*run_setup(folder, MADE_LATER), know_pickles([MADE_LATER])]
        parameters["setup"] = [*trust_folder(folder), *parameters["setup"], *setup]
        parameters["map_count"] = tasks if tasks > 1 else None
        return str(
            submitit_slurm._make_sbatch_string(
                command=start_command("python", folder), folder=folder, **parameters
            )
        )


def _begun(path: Path, notice: Notice) -> list[str]:
    """Ids of the jobs of a submission on this machine; "" for those that never began."""
    from tula_hpc.launch.local_executor import begun

    return begun(path.parent, len(notice.tasks))


def _accepted(path: Path, notice: Notice, known: Collection[str]) -> list[str]:
    """Ids of the tasks of an array that Slurm has; none where it has none of that name."""
    from tula_hpc.launch.slurm_executor import submissions_named

    # by two clocks, where a server keeps the file
    submitted_s = max(0.0, time.time() - path.stat().st_mtime)
    # its sbatch may still be at work
    time.sleep(max(0.0, SBATCH_S - submitted_s))
    ids = sorted({job_id.partition("_")[0] for job_id in known}) or submissions_named(notice.name)
    if len(ids) > 1:
        slurm.cancel(ids[1:])
    return slurm.task_ids(ids[0], len(notice.tasks)) if ids else []


def _kill(job: Submitted) -> list[str]:
    """Return the command that kills a local submission's processes, each of which ends with the folder as an argument.

    The folder's name alone is unique, and nothing in it means anything to a regular expression, as
    its path may.
    """
    return ["pkill", "-KILL", "-f", f"/{job.folder.name}( |$)"]


def _without_false(options: Mapping[str, str | int | bool]) -> dict[str, str | int | bool]:
    """Switches that are off are left out: submitit would write `--requeue=False`, which sbatch refuses."""
    return {name: value for name, value in options.items() if value is not False}


def _submit(executor: Any, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    try:
        with executor.batch():
            submitted = [executor.submit(job) for job in jobs]
    except (FailedJobError, FailedSubmissionError) as error:
        words = str(error).strip().splitlines()
        raise LaunchError(
            f"the scheduler refused the job: {words[-1] if words else error!r}"
        ) from None
    except OSError as error:
        raise StorageError(
            f"{executor.folder}: the job cannot be written: {in_words(error)}"
        ) from error
    return submitted


def _describe(active: Mapping[str, slurm.JobState]) -> str:
    """For example `3 running, 1 pending (Priority)`."""
    words = Counter(state.state.lower() + _reason(state) for state in active.values())
    return ", ".join(f"{count} {word}" for word, count in words.items()) or "ending"


def _reason(state: slurm.JobState) -> str:
    """Why a job waits, in Slurm's word; more where waiting will not help."""
    if state.state != "PENDING" or state.reason in ("", "None"):
        return ""
    wait = explain(state)
    return (
        f" ({state.reason}: {wait.words}; this does not go away by itself)"
        if wait.stuck
        else f" ({state.reason})"
    )
