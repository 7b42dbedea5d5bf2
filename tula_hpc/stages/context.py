"""Define `Sweep`, on which every stage works, and what else the stages share.

They share the progress of a stage, on a terminal or in a log, and words for why jobs ended or wait.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tula_hpc.config import ClusterSpec, SweepSpec, local_batches
from tula_hpc.env import can_redraw, unix_time
from tula_hpc.errors import RefusedError, StageError, StorageError
from tula_hpc.failure_kinds import Failure
from tula_hpc.formatting import (
    command_line,
    format_left,
    printable,
    printable_output,
    with_own_escapes,
)
from tula_hpc.launch.diagnosis import BY_HAND, informative_line, is_own_sentence, without_chatter
from tula_hpc.launch.job_files import Submitted
from tula_hpc.launch.launcher import Ended, Launcher
from tula_hpc.records import Configuration, Measurement, RunDirectory, Submission
from tula_hpc.records.events import Stage

# why a job was interrupted, by the state in which Slurm says that its earlier run ended
INTERRUPTED_BY = {
    "NODE_FAIL": "as a node failed (NODE_FAIL)",
    "PREEMPTED": "as another job took its nodes (PREEMPTED)",
}
# how often accounting is asked why a run ended: it knows some seconds later than the queue
TIMES_ASKED = 5
# seconds after which a log repeats an unchanged state, as a sign of life
LOG_EVERY_S = 60.0


class StageProgress:
    """Progress of one stage, a line on standard error whenever something changes."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.last: tuple[str, ...] = ()
        self.printed_at = 0.0
        self.done = 0.0

    def __enter__(self) -> StageProgress:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(
        self,
        done: float,
        total: float,
        text: str,
        left_s: float | None = None,
        notes: Sequence[str] = (),
        *,
        is_most: bool = False,
        state: str | None = None,
    ) -> None:
        """Show that `done` of `total` is done, and the same in words: `text`, and `notes` on events.

        `left_s` is the estimated time until the end, with `is_most` the longest that it can take.
        With the states of the jobs, `state`, a log shows changes of states and notes at once, and
        others at most once a minute, when `done` has reached another whole number.
        """
        left = [] if left_s is None else [format_left(left_s, is_most=is_most)]
        shown = "; ".join([", ".join([text, *left]), *notes])
        # without the time left, which always changes
        compared = (text if state is None else state, *notes)
        self._show(shown, compared, done, total, is_by_count=state is not None)

    def _show(
        self, shown: str, compared: tuple[str, ...], done: float, total: float, *, is_by_count: bool
    ) -> None:
        """Print a line if `compared` has changed since the last one, or after a long silence."""
        is_due = time.monotonic() - self.printed_at >= LOG_EVERY_S
        if is_by_count:
            is_due = is_due and math.floor(done) > math.floor(self.done)
        if compared == self.last and not is_due:
            return
        self.last = compared
        self.printed_at = time.monotonic()
        self.done = done
        sys.stderr.write(f"{self.stage}: {shown}\n")
        sys.stderr.flush()


class BarProgress(StageProgress):
    """Progress bar on standard error, by rich."""

    def __init__(self, stage: str) -> None:
        super().__init__(stage)
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("[bold]{task.fields[stage]:<9}"),
            BarColumn(bar_width=30),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
        )
        self.bar = Progress(*columns, console=Console(file=with_own_escapes(sys.stderr)))
        self.cleaning = contextlib.ExitStack()
        self.task = self.bar.add_task("", stage=stage, total=None)

    def __enter__(self) -> BarProgress:
        self.bar.start()
        # rich has replaced both streams, and would interpret escape sequences in other output
        self.cleaning.enter_context(printable_output())
        return self

    def __exit__(self, *_: object) -> None:
        self.cleaning.close()
        self.bar.stop()

    def _show(
        self, shown: str, compared: tuple[str, ...], done: float, total: float, *, is_by_count: bool
    ) -> None:
        self.bar.update(self.task, completed=done, total=total, description=printable(shown))


def stage_progress(stage: str) -> StageProgress:
    """Return a bar on a terminal that can redraw it, lines elsewhere."""
    return BarProgress(stage) if can_redraw(sys.stderr) else StageProgress(stage)


def most_profiled(sweep: SweepSpec, workers_per_node: int) -> int | None:
    """Return the largest number of profiles on a partition; None if the search has no bound.

    It is an upper bound: batches that do not fit into memory are not measured.
    """
    search = sweep.search
    if search.mode == "partial":
        return None
    sizes = search.cluster_sizes
    count = sum(len(local_batches(search, nodes, workers_per_node)) for nodes in sizes)
    return min(count, search.max_profiles) if search.mode == "adaptive" else count


def profiling_left_s(measured: Sequence[Measurement], left: int, now: float) -> float | None:
    """Estimate the seconds until `left` more profiles are measured; None before the first one.

    The pace is that of `measured`, the profiles of this command; `now` is Unix time. A profile that
    takes longer than those before it slows the pace while it still runs, so that the estimate does
    not fall until the profile ends and then jump.
    """
    if not measured:
        return None
    ended_at = max(row.finished_at for row in measured)
    took_s = ended_at - min(row.finished_at - row.elapsed_s for row in measured)
    running_s = max(0.0, now - ended_at)
    pace_s = max(took_s / len(measured), (took_s + running_s) / (len(measured) + 1))
    return max(0.0, (left - 1) * pace_s, left * pace_s - running_s)


class Sweep(NamedTuple):
    """One sweep: its frozen inputs and its run directory."""

    spec: SweepSpec
    cluster: ClusterSpec
    run: RunDirectory
    # Unix time of the command's start: the user may have removed the causes of earlier failures
    started_at: float = 0.0
    # whether controller jobs, not this process, wait for the jobs
    detached: bool = False
    # name of `cluster` if it is one partition of a larger cluster; see `Measurement.partition`
    partition: str = ""

    @property
    def launcher(self) -> Launcher:
        """Return the launcher of this sweep; its job names are unique among the user's sweeps."""
        return Launcher(
            self.cluster,
            self.run,
            self.spec.job_name,
            detached=self.detached,
            work=self.spec.workload,
            partition=self.partition,
        )

    def command(self, *options: str) -> str:
        """Return the shell line that continues this run, with the run's own copies of the inputs.

        The line works in any folder: it first changes to the current one, for the user's modules.
        """
        run = self.run
        inputs = (str(run.sweep_file), "--cluster", str(run.cluster_file))
        line = command_line("sweep", *inputs, "--run-dir", str(run.root), *options)
        # the current folder may have been deleted
        with contextlib.suppress(OSError):
            line = f"cd {shlex.quote(str(Path.cwd()))} && {line}"
        return line

    def on(self, partition: str) -> Sweep:
        """Return the sweep on one partition of the cluster; see `ClusterSpec.part`."""
        return self._replace(cluster=self.cluster.part(partition), partition=partition)


def failed_measurement(
    cluster: ClusterSpec, configuration: Configuration, end: Ended, partition: str
) -> Measurement:
    """Return the record of a configuration that ended its job before the job could write one."""
    return Measurement(
        status="oom" if end.failure.is_oom else "failed",
        failure=end.failure,
        detail=why_ended(end),
        **configuration._asdict(),
        exclusive=cluster.exclusive or cluster.executor == "local",
        job_id=end.job.job_id,
        finished_at=unix_time(),
        partition=partition,
    )


def why_ended(end: Ended) -> str:
    """Return why a job ended without a result; a log does not mention a cancellation."""
    return BY_HAND if end.failure is Failure.CANCELLED else informative_line(end.log_tail)


def ends_by_accounting(sweep: Sweep) -> dict[str, list[str]]:
    """Return why each run of each job ended, oldest first; "" if accounting does not say why."""
    found: dict[str, list[str]] = {}
    for each in sweep.run.accounts():
        if each.over:
            found.setdefault(each.job_id, []).append(INTERRUPTED_BY.get(each.state, ""))
    return found


@contextlib.contextmanager
def recording_failure(run: RunDirectory, stage: Stage) -> Iterator[None]:
    """Record an error that ends a stage in this block, for `status` to show.

    `Launcher.submit` has recorded a refusal itself.
    """
    try:
        yield
    except RefusedError:
        raise
    except StageError as error:
        # a full disk may not take it
        with contextlib.suppress(StorageError):
            run.log_event("failed", stage, detail=str(error)[:2000])
        raise


class InterruptionNews:
    """Reports why jobs that have run before wait again, while a command waits for them."""

    def __init__(self, sweep: Sweep, stage: str) -> None:
        self.sweep = sweep
        self.stage = stage
        self.waiting: int | None = None
        self.to_ask = 0
        self.known = ends_by_accounting(sweep)

    def tell(self, waiting: int) -> None:
        """Report why jobs wait again if more jobs wait now than at the last call."""
        if self.waiting is not None and waiting > self.waiting:
            self.to_ask = TIMES_ASKED
        self.waiting = waiting
        if not self.to_ask:
            return
        self.to_ask -= 1
        self.sweep.launcher.note_accounts()
        before = self.known
        self.known = ends_by_accounting(self.sweep)
        news = {
            job_id: causes[-1]
            for job_id, causes in self.known.items()
            if causes != before.get(job_id) and causes[-1]
        }
        if not news:
            return
        self.to_ask = 0
        for job in self.sweep.run.history().unsettled("profile", "train"):
            if words := news.get(job.job_id):
                sys.stderr.write(f"{self.stage}: job {job.job_id} waits to run again, {words}\n")


def submitted_job(run: RunDirectory, job: Submission) -> Submitted:
    """Return a job on record in the launcher's form."""
    return Submitted(job.job_id, run.root / job.folder)


def jobs_on_record(run: RunDirectory, *stages: str) -> list[Submitted]:
    """Return the jobs of these stages whose end no command has seen."""
    return [submitted_job(run, job) for job in run.history().unsettled(*stages)]


def note_unseen_ends(run: RunDirectory, done: Collection[str]) -> None:
    """Record the ends of jobs for which no command waited: trainings in `done` have results."""
    for job in run.history().unsettled("train"):
        if job.label in done:
            run.log_event("ended", "train", job_id=job.job_id, data={"label": job.label})


def jobs_of_original(run: RunDirectory) -> dict[str, Path]:
    """Return unfinished jobs of the run directory from which this one was copied, with its path."""
    found = {}
    for job in run.history().unsettled("profile", "train", "control"):
        home = RunDirectory(Path(job.run))
        # also false if the folder is another user's and cannot be read
        is_there = bool(job.run) and os.path.exists(home.events_file)  # noqa: PTH110
        is_here = not is_there or run.root.samefile(home.root)
        # if this directory was moved, not copied, no other directory knows its jobs
        if not is_here and any(job.job_id == its.job_id for its in home.history().submissions()):
            found[job.job_id] = home.root
    return found


def jobs_left(sweep: Sweep, *stages: str) -> list[Submitted]:
    """Return those of `jobs_on_record` that are not over; see `SlurmJobs.states`."""
    jobs = jobs_on_record(sweep.run, *stages)
    active = sweep.launcher.executor.states(jobs)
    return [job for job in jobs if job.job_id in active]


def describe_failures(failures: Sequence[Ended]) -> str:
    """Describe why the first of these jobs failed, with the end of its log."""
    if not failures:
        return "see profile/*.jsonl for the reasons"
    first = failures[0]
    log = f"\nlog: {first.log_file}" if first.log_file else ""
    line = informative_line(first.log_tail)
    # in these cases the line is a sentence that says what to do
    if first.failure.is_the_users or first.failure is Failure.NO_SPACE:
        return f"{line}{log}"
    if is_own_sentence(first.log_tail):
        return f"job {first.job.job_id}: {line}{log}"
    if first.failure is Failure.CANCELLED:
        return f"job {first.job.job_id} was cancelled, {BY_HAND}{log}"
    name = first.failure.value.replace("_", " ")
    return f"{name} in job {first.job.job_id}\n{without_chatter(first.log_tail) or line}{log}"
