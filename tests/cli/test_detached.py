"""Controller jobs: one at a time, a guard after it, and an end that is noted before another one looks."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.run_factory import CLUSTER_TOML, SWEEP_TOML, sweep_of
from tula_hpc import env
from tula_hpc.cli import detached
from tula_hpc.cli.open_run import work
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.env import unix_time
from tula_hpc.errors import (
    LaunchError,
    RefusedError,
    RunDirectoryError,
    StageError,
    SubmitLimitError,
)
from tula_hpc.failure_kinds import Failure
from tula_hpc.formatting import command_line
from tula_hpc.launch import slurm
from tula_hpc.launch.job_files import Submitted
from tula_hpc.launch.job_specs import ControlJob
from tula_hpc.launch.launcher import Launcher, StillRunningError
from tula_hpc.launch.slurm import JobState
from tula_hpc.records import RunDirectory
from tula_hpc.records.events import CONTROL, EventName
from tula_hpc.records.run_directory import holder_of
from tula_hpc.stages.context import Sweep


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    run = RunDirectory(tmp_path / "run").create()
    run.sweep_file.write_text(SWEEP_TOML.replace("/nowhere/cifar100", str(tmp_path)))
    run.cluster_file.write_text(CLUSTER_TOML)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    return run


def is_locked(run: RunDirectory) -> bool:
    try:
        with run.locked():
            return False
    except RunDirectoryError:
        return True


def test_a_controller_waits_until_another_has_left_the_run_directory(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that is requeued after it has submitted another one meets that one."""
    began, over = threading.Event(), threading.Event()
    seen = []
    monkeypatch.setattr(detached, "_step", lambda *_: seen.append(over.is_set()))
    looks = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: time.sleep(0.01))
    monkeypatch.setattr(detached, "time", looks)

    def hold() -> None:
        with run.locked():
            began.set()
            time.sleep(0.3)
            over.set()

    other = threading.Thread(target=hold)
    other.start()
    began.wait()
    detached.run_controller(ControlJob(run.root, "report", 0.0))
    other.join()
    assert seen == [True]


def test_a_controllers_end_is_noted_before_another_looks_who_is_left(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked_then = []
    note = RunDirectory.log_event

    def log(self: RunDirectory, event: EventName, stage: str, **fields: object) -> None:
        locked_then.append(is_locked(self))
        note(self, event, stage, **fields)

    monkeypatch.setattr(detached, "_step", lambda *_: None)
    monkeypatch.setattr(RunDirectory, "log_event", log)
    detached.run_controller(ControlJob(run.root, "report", 0.0))
    assert locked_then == [True]
    assert [(event.event, event.job_id, event.failure) for event in run.events()] == [("ended", "17", None)]


def test_a_controller_records_nothing_that_is_older_than_its_sweep(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of its node may be behind that of the machine where the sweep was started."""
    monkeypatch.setattr(env, "_EPOCH_OF_STEADY", env._EPOCH_OF_STEADY)
    monkeypatch.setattr(detached, "_step", lambda *_: None)
    for ahead_s in (600.0, 0.0, -600.0):
        clock = env._EPOCH_OF_STEADY
        started_at = unix_time() + ahead_s
        detached.run_controller(ControlJob(run.root, "report", started_at))
        assert run.events()[-1].time >= started_at
        assert 0.0 <= env._EPOCH_OF_STEADY - clock <= max(0.0, ahead_s)


def test_a_controller_whose_inputs_are_gone_says_so(run: RunDirectory) -> None:
    run.sweep_file.unlink()
    with pytest.raises(SystemExit, match=r"sweep\.toml"):
        detached.run_controller(ControlJob(run.root, "report", 0.0))
    (event,) = run.events()
    assert (event.event, event.failure) == ("ended", Failure.BUG)
    assert "sweep.toml" in event.detail


def test_the_reason_for_a_controllers_end_is_reported(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise StageError("plan: too little data")

    monkeypatch.setattr(detached, "_step", fail)
    with pytest.raises(SystemExit, match="plan: too little data\nFix the cause and run the same command again"):
        detached.run_controller(ControlJob(run.root, "report", 0.0))
    monkeypatch.setattr(detached, "TURN_S", 0.0)
    with run.locked(), pytest.raises(SystemExit, match="is in use by process"):
        detached.run_controller(ControlJob(run.root, "report", 0.0))
    assert [event.failure for event in run.events()] == [Failure.BUG, Failure.BUG]


class Cluster:
    """A model of Slurm as controllers use it: the jobs that exist, and the job whose end each of them waits for."""

    def __init__(self, run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.monkeypatch = run, monkeypatch
        self.jobs: dict[str, str] = {}
        self.submitted = 0
        self.room = 9
        monkeypatch.setattr(Launcher, "submit", lambda _, *jobs, **described: self.submit(**described))
        monkeypatch.setattr(slurm, "queue", self.queue)
        monkeypatch.setattr(slurm, "cancel", self.cancel)
        monkeypatch.setattr(slurm, "let_follow", self.let_follow)

    def submit(
        self, *, after: Sequence[str], data: Sequence[dict[str, str]], patient: bool, **_: Any
    ) -> list[Submitted]:
        if len(self.jobs) >= self.room:
            assert not patient, "a controller would wait for ever"
            raise SubmitLimitError("a limit of the cluster on submitted jobs is reached")
        self.submitted += 1
        job_id = str(self.submitted)
        self.jobs[job_id] = ",".join(after)
        self.run.log_event("submitted", CONTROL, job_id=job_id, data=data[0] if data else {})
        return [Submitted(job_id, self.run.slurm)]

    def queue(
        self, job_ids: Iterable[str], timeout_s: float = 0.0, keys: Mapping[str, str] = slurm.NO_KEYS
    ) -> dict[str, JobState]:
        return {job_id: JobState("PENDING", "Dependency") for job_id in job_ids if job_id in self.jobs}

    def cancel(self, job_ids: Iterable[str]) -> None:
        for job_id in job_ids:
            if self.jobs.pop(job_id, None) is None:
                raise LaunchError("scancel failed: Invalid job id specified")

    def let_follow(self, job_id: str, after: str) -> None:
        assert job_id in self.jobs
        self.jobs[job_id] = after

    def step(self, job_id: str, outcome: Callable[[], int], *, dies: bool = False) -> None:
        """Run the part of a controller job in which the run directory is locked; job "" is the command itself."""
        with self.monkeypatch.context() as patch:
            patch.setattr(detached, "carry_out", lambda *_: outcome())
            patch.setattr(detached, "slurm_job_id", lambda: job_id or None)
            patch.setattr("tula_hpc.launch.launcher.slurm_job_id", lambda: job_id or None)
            detached._step(Sweep(SweepSpec.model_validate({"name": "x"}), SLURM, self.run, detached=True), "report")
        if job_id and not dies:
            self.run.log_event("ended", CONTROL, job_id=job_id)
            del self.jobs[job_id]


SLURM = ClusterSpec.model_validate({"executor": "slurm"})


@pytest.fixture
def cluster(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(run, monkeypatch)


def left(stage_job: str) -> Callable[[], int]:
    """Return a step that leaves a job behind."""

    def step() -> int:
        raise StillRunningError([Submitted(stage_job, Path())])

    return step


def failed() -> int:
    raise StageError("plan: too little data")


def test_one_guard_moves_along_behind_the_controllers_and_goes_with_the_last(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.step("", left("a"))
    assert cluster.jobs == {"1": "a", "2": "1"}
    assert "to stop all of it: scancel a 1 2\n" in capsys.readouterr().out
    cluster.step("1", left("b"))
    assert cluster.jobs == {"2": "3", "3": "b"}
    cluster.step("3", left("c"))
    assert cluster.jobs == {"2": "4", "4": "c"}
    cluster.step("4", lambda: 0)
    assert cluster.jobs == {}


def test_a_sweep_that_fails_for_good_leaves_no_guard(cluster: Cluster) -> None:
    cluster.step("", left("a"))
    with pytest.raises(StageError):
        cluster.step("1", failed)
    assert cluster.jobs == {"1": "a"}


def test_a_guard_takes_the_place_of_a_controller_that_died_and_has_a_guard_itself(cluster: Cluster) -> None:
    cluster.step("", left("a"))
    del cluster.jobs["1"]
    cluster.step("2", left("b"))
    assert cluster.jobs == {"3": "b", "4": "3"}


def test_whenever_a_controller_dies_one_controller_and_one_guard_remain(cluster: Cluster) -> None:
    """If it died after it had submitted another one, its guard starts besides that one."""
    cluster.step("", left("a"))
    cluster.step("1", left("b"), dies=True)
    # as if it had died before it moved the guard
    cluster.jobs["2"] = "1"
    del cluster.jobs["1"]
    cluster.step("2", left("b"))
    assert cluster.jobs == {"3": "b", "4": "3"}


def test_a_controller_that_is_requeued_finds_its_successor_and_the_guard(cluster: Cluster) -> None:
    cluster.step("", left("a"))
    cluster.step("1", left("b"), dies=True)
    cluster.step("1", left("b"))
    assert cluster.jobs == {"2": "3", "3": "b"}


def test_a_step_that_no_guard_tries_again_is_told(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RefusedError("the scheduler refused the job: the account's hours are used up")

    told: list[str] = []
    monkeypatch.setattr(detached, "notify", lambda _, *words: told.append(": ".join(words)))
    cluster.step("", left("a"))
    sweep = Sweep(SweepSpec.model_validate({"name": "x"}), SLURM, cluster.run, detached=True)
    monkeypatch.setattr(detached, "_step", refuse)
    monkeypatch.setattr(detached, "_refuse_if_cancelled", lambda: None)
    for job_id in ("1", "2"):
        monkeypatch.setattr(detached, "slurm_job_id", lambda job_id=job_id: job_id)
        assert told == [], "job 2 is the guard of job 1, and has none itself"
        assert detached._try_step(sweep, "report")
    assert told == ["sweep_failed: the scheduler refused the job: the account's hours are used up"]


def test_without_room_for_a_guard_a_controller_has_none(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.room = 1
    cluster.step("", left("a"))
    assert cluster.jobs == {"1": "a"}
    output = capsys.readouterr().out
    assert "there is no guard, which would carry on if that job is killed: a limit" in output
    assert output.endswith("to stop all of it: scancel a 1\n")


def test_detaching_again_to_another_stage_is_followed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = Sweep(SweepSpec.model_validate({"name": "x"}), SLURM, cluster.run)
    monkeypatch.setattr(detached, "carry_out", lambda *_: left("a")())
    for until, jobs in (("plan", {"1", "2"}), ("plan", {"1", "2"}), ("report", {"3", "4"})):
        assert detached.carry_on_detached(sweep, until) == 0
        assert set(cluster.jobs) == jobs
    output = capsys.readouterr().out
    assert "controller job 1 is cancelled: another one carries on, until report" in output
    assert "no longer goes on unattended" not in output


def test_detaching_again_names_the_controller_and_staying_takes_over_from_both(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = Sweep(SweepSpec.model_validate({"name": "x"}), SLURM, cluster.run)
    cluster.step("", left("a"))
    capsys.readouterr()
    cluster.run.log_event("detached", CONTROL, data={"until": "report"})
    assert detached.carry_on_detached(sweep, "report") == 0
    assert "already detached: job 1 carries on" in capsys.readouterr().out
    detached.take_over(sweep)
    output = capsys.readouterr().out
    assert "controller job 1 is cancelled: this command carries on instead" in output
    assert "the sweep no longer goes on unattended" in output
    assert cluster.jobs == {}
    assert detached.controllers(sweep) == []
    assert cluster.run.history().is_taken_over()
    detached.take_over(sweep)
    assert capsys.readouterr().out == ""


class Clock:
    """A clock for a command that waits: at each pause the next of these events happens."""

    def __init__(self, *happens: Callable[[], object]) -> None:
        self.left = list(happens)

    def monotonic(self) -> float:
        return 0.0

    def sleep(self, _: float) -> None:
        if self.left:
            self.left.pop(0)()


def interrupt() -> None:
    raise KeyboardInterrupt


def on_its_way(cluster: Cluster) -> Sweep:
    """A detached sweep with a training in the queue."""
    cluster.step("", left("a"))
    cluster.run.log_event("detached", CONTROL, data={"until": "report"})
    cluster.run.log_event("submitted", "train", job_id="50", data={"label": "main"})
    cluster.jobs["50"] = ""
    return sweep_of(cluster.run)


def test_a_plain_command_on_a_detached_sweep_waits_and_leaves_it_alone(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = on_its_way(cluster)
    jobs: dict[str, str] = {}
    acts = [
        lambda: cluster.step("1", left("b")),
        lambda: jobs.update(cluster.jobs),
        lambda: cluster.step("3", lambda: 0),
    ]
    monkeypatch.setattr(detached, "time", Clock(*acts))
    detached.look_on(sweep)
    assert jobs == {"2": "3", "3": "b", "50": ""}, "nothing was cancelled"
    output = capsys.readouterr()
    assert "controller job 1 carries this sweep on, and this command waits for the end; --take-over" in output.out
    assert "1 waiting (the job that it follows is not over); controller job 1 is next" in output.err
    assert "controller job 3 is next" in output.err
    assert "is cancelled" not in output.out
    detached.look_on(sweep)
    assert "detached" not in capsys.readouterr().out, "the sweep is no longer detached, because this command carries on"


def test_a_waiting_command_warns_once_of_a_checkpoint_that_cannot_be_used(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = on_its_way(cluster)
    data = {"samples_seen": 64, "passed_over": "b.tula: is damaged"}
    cluster.run.log_event("resumed", "train", job_id="50", data=data)
    monkeypatch.setattr(detached, "time", Clock(lambda: None, lambda: None, lambda: cluster.step("1", lambda: 0)))
    detached.look_on(sweep)
    assert capsys.readouterr().err.count("its work is done again: b.tula: is damaged") == 1


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda cluster: cluster.jobs.clear(), "controller job 2 is gone: nothing carries the sweep on"),
        (
            lambda cluster: cluster.run.log_event(
                "ended", CONTROL, job_id="1", failure=Failure.BUG, detail="plan: why"
            ),
            "",
        ),
    ],
)
def test_a_waiting_command_reports_that_nobody_carries_on(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, end: Callable[[Cluster], None], words: str
) -> None:
    sweep = on_its_way(cluster)

    def fail() -> None:
        if not words:
            cluster.run.log_event("ended", CONTROL, job_id="2")
        end(cluster)

    monkeypatch.setattr(detached, "time", Clock(fail))
    with pytest.raises(StageError, match=f"^{words or 'plan: why'}$"):
        detached.look_on(sweep)


@pytest.mark.parametrize("answer", ["y", "n", ""])
def test_a_command_at_a_terminal_asks_who_carries_on(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str
) -> None:
    job = detached.controllers(on_its_way(cluster))[0]
    # closed by the shell, as by <&-
    monkeypatch.setattr("sys.stdin", None)
    assert not detached._is_wanted_here(job)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{answer}\n"))
    assert not detached._is_wanted_here(job)
    assert capsys.readouterr().err == ""
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    assert detached._is_wanted_here(job) == (answer == "y")
    assert capsys.readouterr().err == "Controller job 1 carries this sweep on. Cancel it, and carry on here? [y/N] "


def test_an_interrupted_command_says_what_goes_on_without_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = on_its_way(cluster)
    monkeypatch.setattr(detached, "time", Clock(interrupt))
    assert work(sweep, "report") == 130
    first, jobs = capsys.readouterr().err.splitlines()[-2:]
    here = sweep.command("--take-over")
    assert first == f"interrupted; the sweep goes on unattended, by controller job 1. To carry on here: {here}"
    waits = "1 waiting (the job that it follows is not over)"
    assert jobs == f"jobs are left as they are ({waits}); to cancel them: scancel 1 2 50"
    assert set(cluster.jobs) == {"1", "2", "50"}
    monkeypatch.setattr("tula_hpc.cli.pipeline.carry_out", lambda *_: interrupt())
    assert work(sweep, "train", here=True) == 130
    output = capsys.readouterr().err.splitlines()
    assert output[-3:] == [
        f"interrupted. To continue, run the same command again, or from anywhere: {sweep.command('--until', 'train')}",
        "no controller job is left: nothing goes on unattended",
        "jobs are left as they are (1 waiting (the job that it follows is not over)); to cancel them: scancel 50",
    ]
    cluster.jobs.clear()
    assert work(sweep, "report") == 130
    assert capsys.readouterr().err.splitlines()[-1] == "no job is left"


def test_a_command_during_a_controllers_work_says_that_it_goes_on_unattended(run: RunDirectory) -> None:
    with detached._in_turn(run), pytest.raises(RunDirectoryError) as refused, run.locked():
        pass
    message = str(refused.value)
    assert f"is in use by process {os.getpid()} on " in message
    assert "(controller job 17 of this sweep, which goes on unattended)" in message
    assert command_line("status", str(run.root)) in message
    assert holder_of(run.root / ".lock").process == os.getpid()
