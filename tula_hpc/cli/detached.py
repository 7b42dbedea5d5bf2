"""A sweep that carries on by itself: nothing has to stay alive on the login node.

The command does all that can be done at once and submits the first jobs and a small controller job.
Slurm starts the controller when these jobs are over (`afterany`: also when they failed). It handles
their results, and submits the next jobs and the next controller. A controller may be killed at any
moment: whatever it did is on disk. If its process is killed, its batch script requeues it. If the
whole job is killed, a guard takes over: another controller job that waits for the end of the next
controller, and is moved behind each new one as long as all goes well.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING

from tula_hpc.cli.pipeline import carry_out
from tula_hpc.command_errors import TRY_AGAIN_ON_A_RUN
from tula_hpc.config import load_frozen_cluster, load_frozen_sweep, load_sweep
from tula_hpc.env import keep_up_with, slurm_job_id
from tula_hpc.errors import (
    CancelledJobError,
    LaunchError,
    RunDirectoryError,
    StageError,
    StorageError,
    TulaError,
)
from tula_hpc.failure_kinds import Failure
from tula_hpc.formatting import plural
from tula_hpc.launch import slurm
from tula_hpc.launch.diagnosis import BY_HAND
from tula_hpc.launch.job_files import Submitted
from tula_hpc.launch.job_specs import ControlJob
from tula_hpc.launch.launcher import JobsNow, StillRunningError
from tula_hpc.records import RunDirectory
from tula_hpc.records.events import CONTROL, GUARD
from tula_hpc.stages.context import StageProgress, Sweep, jobs_left, jobs_on_record, stage_progress
from tula_hpc.stages.notify import notify
from tula_hpc.stages.train import training_tick

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


# seconds that a controller waits for another command to release the run directory
TURN_S = 300.0


def carry_on_detached(sweep: Sweep, until: str) -> int:
    """Begin a detached sweep on the login node; return the exit code.

    Raises:
        StageError: Work that could be done at once failed.
    """
    # there may be a controller from a command that was killed before recording it
    sweep.launcher.find_lost()
    waiting = controllers(sweep)
    before = sweep.run.history().detached()
    if waiting and before and before.until == until:
        print(
            f"already detached: job {waiting[0].job_id} carries on; see {sweep.run.status_command}"
        )
        return 0
    if cancelled := _relieve_controllers(sweep):
        print(
            f"controller job {cancelled[0].job_id} is cancelled: another one carries on, until {until}"
        )
    sweep.run.log_event("detached", CONTROL, data={"until": until})
    return _step(sweep._replace(detached=True), until)


def _step(sweep: Sweep, until: str) -> int:
    """Do all that can be done now; if jobs are not over yet, submit a controller behind them."""
    try:
        code = carry_out(sweep, until)
    except StillRunningError as left:
        _hand_over(sweep, left.jobs, until)
        return 0
    except TulaError:
        sweep.launcher.dismiss_guards()
        raise
    sweep.launcher.dismiss_guards()
    return code


def _refuse_if_cancelled() -> None:
    """Keep a cancelled controller from submitting jobs in the half minute that Slurm leaves it.

    Raises:
        CancelledJobError: This job is such a controller.
    """
    own = slurm_job_id()
    if own and slurm.leaving(own) is slurm.Leaving.CANCELLED:
        raise CancelledJobError(f"controller job {own} was cancelled, {BY_HAND}")


def _hand_over(sweep: Sweep, jobs: Sequence[Submitted], until: str) -> None:
    _refuse_if_cancelled()
    # there is one if Slurm requeued this controller after it had submitted the next one
    active, _ = _on_duty(sweep)
    controller = active[0] if active else _submit_controller(sweep, jobs, until)
    what = f"{len(jobs)} jobs are" if len(jobs) > 1 else f"job {jobs[0].job_id} is"
    print(
        f"detached: job {controller.job_id} carries on when {what} over; see {sweep.run.status_command}"
    )
    ids = [*sorted({job.array_id for job in jobs}), controller.job_id]
    try:
        guard = _post_guard(sweep, controller, until)
        print(f"if that job is killed, or cancelled alone, job {guard} carries on")
        ids.append(guard)
    except LaunchError as error:
        print(f"there is no guard, which would carry on if that job is killed: {error}")
    print(f"to stop all of it: scancel {' '.join(ids)}")


def _submit_controller(
    sweep: Sweep, jobs: Sequence[Submitted], until: str, role: str = ""
) -> Submitted:
    job = ControlJob(sweep.run.root, until, sweep.started_at)
    launcher = sweep._replace(cluster=sweep.cluster.controller(), detached=False).launcher
    data, after = [{"role": role}] if role else [], sorted({job.array_id for job in jobs})
    minutes, patient = sweep.cluster.controller_minutes, role != GUARD
    return launcher.submit(
        [job], stage=CONTROL, nodes=1, minutes=minutes, data=data, after=after, patient=patient
    )[0]


def _post_guard(sweep: Sweep, controller: Submitted, until: str) -> str:
    """Let a guard wait for the end of this controller; return the guard's job id.

    Raises:
        LaunchError: The scheduler refuses. A guard that waits for an earlier controller then starts
            when that is over, and puts things right.
    """
    _, guards = _on_duty(sweep)
    if not guards:
        return _submit_controller(sweep, [controller], until, GUARD).job_id
    slurm.let_follow(guards[0].job_id, controller.job_id)
    return guards[0].job_id


def controllers(sweep: Sweep) -> list[Submitted]:
    """Return the controller jobs that are not over, except the present job; guards last."""
    active, guards = _on_duty(sweep)
    return [*active, *guards]


def _on_duty(sweep: Sweep) -> tuple[list[Submitted], list[Submitted]]:
    """Return the controllers and the guards that are not over, except the present job."""
    ids = [job.job_id for job in sweep.run.history().guards()]
    left = [job for job in jobs_left(sweep, CONTROL) if job.job_id != slurm_job_id()]
    return [job for job in left if job.job_id not in ids], [
        job for job in left if job.job_id in ids
    ]


def run_controller(job: ControlJob) -> None:
    """Run a controller job; an error ends it and is recorded in the events.

    Raises:
        SystemExit: The controller could not go on.
    """
    # else failures in jobs of this sweep would seem to be older than the sweep, and not count
    keep_up_with(job.started_at)
    run = RunDirectory(job.root)
    try:
        spec = load_frozen_sweep(run.sweep_file)
        if spec.search.estimate:
            spec = load_sweep(run.sweep_file)
        sweep = Sweep(
            spec, load_frozen_cluster(run.cluster_file), run, job.started_at, detached=True
        )
        with _in_turn(run):
            words = _try_step(sweep, job.until)
            # still locked, before another controller looks for controllers that are left
            _log_end(run, words)
    except (TulaError, OSError) as error:
        # another command holds the run, the disk is full, or a folder was deleted
        words = str(error)
        with contextlib.suppress(StorageError):
            _log_end(run, words)
    if words:
        sys.exit(f"{words}\n{TRY_AGAIN_ON_A_RUN}")


@contextlib.contextmanager
def _in_turn(run: RunDirectory) -> Iterator[None]:
    """Lock the run directory; wait, since a requeued controller may meet the next one.

    Raises:
        RunDirectoryError: Another command still holds it after `TURN_S`.
    """
    deadline = time.monotonic() + TURN_S
    role = f"controller job {slurm_job_id()} of this sweep, which goes on unattended"
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(run.locked(role))
                break
            except RunDirectoryError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1.0)
        yield


def _try_step(sweep: Sweep, until: str) -> str:
    try:
        _refuse_if_cancelled()
        _step(sweep, until)
    except (TulaError, OSError) as error:
        words = str(error) or type(error).__name__
        # a guard tries again; else nothing carries on, as when the account's hours are used up
        if all(guard.job_id == slurm_job_id() for guard in sweep.run.history().guards()):
            notify(sweep, "sweep_failed", words)
        return words
    return ""


def _log_end(run: RunDirectory, words: str) -> None:
    failure = Failure.BUG if words else None
    run.log_event(
        "ended", CONTROL, job_id=slurm_job_id() or "", failure=failure, detail=words[:2000]
    )


def look_on(sweep: Sweep) -> None:
    """Show a detached sweep's progress as long as controllers carry it on; submit nothing.

    Return at once if the sweep is not detached, or if the user wants this command to carry on.

    Raises:
        StageError: The controllers failed, or are gone.
    """
    active = controllers(sweep) if sweep.run.history().unsettled(CONTROL) else []
    if not active or _is_wanted_here(active[0]):
        return
    print(
        f"detached: controller job {active[0].job_id} carries this sweep on, and this command waits "
        "for the end; --take-over carries on here instead",
        flush=True,
    )
    _wait_for_controllers(sweep)
    history = sweep.run.history()
    if left := history.unsettled(CONTROL):
        raise StageError(f"controller job {left[-1].job_id} is gone: nothing carries the sweep on")
    if words := history.control_failure():
        raise StageError(words)


def _is_wanted_here(job: Submitted) -> bool:
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    sys.stderr.write(
        f"Controller job {job.job_id} carries this sweep on. Cancel it, and carry on here? [y/N] "
    )
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _wait_for_controllers(sweep: Sweep) -> None:
    limits = sweep.launcher.executor.limits
    started = time.monotonic()
    missed = 0
    with stage_progress("detached") as progress:
        # one for all looks, since it remembers what it has read and said
        show_training = training_tick(sweep, progress)
        while missed < limits.gone_polls:
            active = controllers(sweep)
            missed = 0 if active else missed + 1
            if active:
                now = sweep.launcher.jobs_now(jobs_on_record(sweep.run, "profile", "train"))
                now = now._replace(text=f"{now.text}; controller job {active[0].job_id} is next")
                _show(sweep, progress, now, show_training)
            time.sleep(limits.pause_s(time.monotonic() - started, missed=missed > 0))


def _show(
    sweep: Sweep, progress: StageProgress, now: JobsNow, show_training: Callable[[JobsNow], None]
) -> None:
    if sweep.spec.study is not None:
        cells = sweep.spec.study.cells()
        done = sum(sweep.run.train(cell.label).result_file.exists() for cell in cells)
        shown = f"{done} of {plural(len(cells), 'training')} done"
        progress.update(done, len(cells), f"{shown}, {now.text}")
    elif sweep.run.history().submissions("train"):
        show_training(now)
    else:
        measured = sum(m.status == "ok" for m in sweep.run.measurements().records)
        shown = f"{plural(measured, 'configuration')} measured"
        progress.update(measured, measured, f"{shown}, {now.text}")


def take_over(sweep: Sweep) -> None:
    """Let this command act in place of the controllers; cancel those that are left."""
    if sweep.cluster.executor != "slurm":
        return
    # there may be a controller from a command that was killed before recording it
    sweep.launcher.find_lost()
    if cancelled := _relieve_controllers(sweep, taken_over=True):
        print(f"controller job {cancelled[0].job_id} is cancelled: this command carries on instead")
        print(
            "the sweep no longer goes on unattended; to change that, end this command and add --detach",
            flush=True,
        )


def _relieve_controllers(sweep: Sweep, *, taken_over: bool = False) -> list[Submitted]:
    """Cancel the controllers that are not over, and record their ends; return the cancelled."""
    left = sweep.run.history().unsettled(CONTROL)
    waiting = controllers(sweep) if left else []
    if waiting:
        slurm.cancel([job.job_id for job in waiting])
    noted = {"taken_over": True} if taken_over else {}
    for job in left:
        sweep.run.log_event("ended", CONTROL, job_id=job.job_id, data=noted)
    return waiting
