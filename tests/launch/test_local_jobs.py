"""If a command is killed while it submits jobs on this machine, each job runs once, and none is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest

from tests import planning_data
from tests.run_factory import measurement
from tula_hpc.cli.pipeline import carry_out
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.env import SECRET_FILE, unix_time
from tula_hpc.errors import StageError
from tula_hpc.failure_kinds import Failure
from tula_hpc.launch import local_executor
from tula_hpc.launch.job_files import SETUP_FILE
from tula_hpc.launch.job_specs import ProfileJob
from tula_hpc.launch.launcher import REFUSED, Launcher, lost
from tula_hpc.launch.local_executor import begun, run_controller, take_pickle
from tula_hpc.records import Configuration, RunDirectory, append_record
from tula_hpc.records.events import EventName
from tula_hpc.stages import profile as profile_stage
from tula_hpc.stages.context import Sweep, submitted_job

SWEEP = SweepSpec.model_validate(
    {
        "name": "killed",
        "workload": {"dataset": "digits", "samples": 512},
        "search": {
            "cluster_sizes": [1],
            "min_batch": 32,
            "max_batch": 32,
            "mode": "full",
            "pack": "never",
            "estimate": False,
        },
    }
)


def note(path: Path) -> Callable[[], None]:
    """Make a job that adds a line to a file; an inner function, because those are pickled by value."""

    def job() -> None:
        with path.open("a") as file:
            file.write("ran\n")

    return job


def records(job: ProfileJob) -> Callable[[], None]:
    """Make a job that writes a made-up measurement."""
    (configuration,) = job.configurations
    made_up = measurement(configuration, memory=planning_data.memory(configuration.local_batch))
    line, output = made_up.model_dump_json() + "\n", job.output

    def task() -> None:
        with output.open("a") as file:
            file.write(line)

    return task


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), SIGKILL)


def before_any_process() -> None:
    # each job runs in a process of its own
    vars(local_executor)["start_controller"] = die


def after_the_first_process() -> None:
    start = vars(local_executor)["start_controller"]

    def start_once(folder: Path, *arguments: Any, **options: Any) -> None:
        start(folder, *arguments, **options)
        deadline = time.monotonic() + 20
        while not list(folder.glob("[01]-*.pkl")) and time.monotonic() < deadline:
            time.sleep(0.01)
        die()

    # each job runs in a process of its own
    vars(local_executor)["start_controller"] = start_once


def before_the_first_event() -> None:
    Launcher._log_submitted = die  # type: ignore[assignment,method-assign] # in a process of its own


def after_the_first_event() -> None:
    log = RunDirectory.log_event

    def log_once(self: RunDirectory, event: EventName, stage: str, **fields: Any) -> None:
        log(self, event, stage, **fields)
        die()

    RunDirectory.log_event = log_once  # type: ignore[method-assign] # in a process of its own


def kill(at: Callable[[], None], work: Callable[[], object]) -> None:
    """Run `work` in a forked process that is killed at the point that `at` prepares."""
    child = os.fork()
    if not child:
        try:
            at()
            work()
        finally:
            os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -SIGKILL


class Command:
    """A command that submits jobs to its own run directory."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, RunDirectory(folder / "run").create()
        self.launcher = Launcher(ClusterSpec(), self.run, "tula-killed")

    def submit(self, labels: Iterable[str]) -> None:
        jobs, data = [note(self.folder / label) for label in labels], [{"label": label} for label in labels]
        self.launcher.submit(jobs, stage="train", nodes=1, minutes=1, data=data)

    def wait_until_begun(self, count: int) -> None:
        """Wait until the processes of `count` jobs have taken their pickles."""
        while len(list(self.run.slurm.glob("*/[01]-*.pkl"))) < count:
            time.sleep(0.01)

    def labels(self) -> list[str]:
        return [str(event.data["label"]) for event in self.run.events()]


@pytest.mark.processes
def test_what_a_killed_command_has_started_is_found_and_the_rest_never_begins(tmp_path: Path) -> None:
    expected = {after_the_first_process: "0", after_the_first_event: "01"}
    commands = {at: Command(tmp_path / at.__name__) for at in expected}
    for at, command in commands.items():
        kill(at, partial(command.submit, "01"))
        # jobs that are refused before never begin, which is also correct
        command.wait_until_begun(len(expected[at]))
        command.launcher.find_lost()
        assert command.labels() == list(expected[at])
        assert lost(command.run) == []
        command.submit(sorted({"0", "1"} - set(expected[at])))
    for at, command in commands.items():
        command.launcher.wait([submitted_job(command.run, job) for job in command.run.history().submissions()])
        assert [(command.folder / label).read_text() for label in "01"] == ["ran\n"] * 2, at
        assert command.launcher.find_lost() == []


def test_where_no_process_was_started_there_is_nothing_to_find_later(tmp_path: Path) -> None:
    command = Command(tmp_path)
    kill(before_any_process, partial(command.submit, "01"))
    assert command.launcher.find_lost() == []
    (folder,) = command.run.slurm.iterdir()
    assert {path.name for path in folder.iterdir()} == {REFUSED, SECRET_FILE, SETUP_FILE}


@pytest.mark.processes
@pytest.mark.parametrize("at", [after_the_first_process, before_the_first_event])
def test_the_same_command_measures_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: Callable[[], None]
) -> None:
    run = RunDirectory(tmp_path / "run").create()
    monkeypatch.setattr(profile_stage, "ProfileJob", lambda *of_job, **more: records(ProfileJob(*of_job, **more)))

    def command() -> None:
        carry_out(Sweep(SWEEP, ClusterSpec(), run, unix_time()), "profile")

    kill(at, command)
    command()
    assert len(run.measurements().records) == 1
    assert [event.event for event in run.events() if event.job_id] == ["submitted", "ended"]


def complains(job: ProfileJob) -> Callable[[], None]:
    """Make a job that finds a mistake in the user's model."""

    def task() -> None:
        from tula_hpc.errors import InputError

        raise InputError("cannot be called with (classes, image_size)", key="workload.model")

    return task


@pytest.mark.processes
def test_a_users_mistake_is_reported_after_one_job_and_is_no_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Failures of an earlier try are not counted in the progress of this one."""
    run = RunDirectory(tmp_path / "run").create()
    earlier = measurement(Configuration(1, 1, 32), status="failed", failure=Failure.BAD_INPUT, finished_at=1.0)
    append_record(run.profile / "earlier.jsonl", earlier)
    monkeypatch.setattr(profile_stage, "ProfileJob", lambda *of_job, **more: complains(ProfileJob(*of_job, **more)))
    with pytest.raises(StageError) as caught:
        carry_out(Sweep(SWEEP, ClusterSpec(), run, unix_time()), "profile")
    sentence, log = str(caught.value).splitlines()
    assert sentence == (
        "profile: nothing could be measured; workload.model: cannot be called with (classes, image_size)"
    )
    assert log.startswith(f"log: {run.slurm}")
    assert [(event.event, event.failure) for event in run.events()] == [
        ("submitted", None),
        ("ended", Failure.BAD_INPUT),
        ("failed", None),
    ]
    progress = [line for line in capsys.readouterr().err.splitlines() if line.startswith("profiling: ")]
    assert progress[0].startswith("profiling: 0 of 1 done, 1 running")
    assert progress[-1] == "profiling: nothing was measured"


def test_a_pickle_is_taken_once_by_its_job_or_by_whoever_gives_the_job_up(tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    for index in range(2):
        (folder / f"task-{index}.pkl").write_text(str(index))

    def start(index: int) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(["sh", "-c", " && ".join([*take_pickle(folder, index), "true"])])
        process.wait(60)
        return process

    first = start(1)
    assert first.returncode == 0
    assert (folder / f"1-{first.pid}.pkl").read_text() == "1"
    assert begun(folder, 2) == ["", str(first.pid)]
    late = start(0)
    assert late.returncode != 0
    assert not (folder / f"0-{late.pid}.pkl").exists()


def test_a_job_is_told_to_stop_by_its_own_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    controller = tmp_path / "controller"
    controller.write_text(
        f"#!/bin/sh\ntrap 'stop=1' TERM\ntouch {tmp_path}/begun\n"
        f"until [ $stop ]; do sleep 0.02; done\nsleep 0.2\ntouch {tmp_path}/saved\nexit 5\n"
    )
    controller.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(controller))
    process = subprocess.Popen(["sh", "-c", run_controller(tmp_path)], start_new_session=True)
    lock = tmp_path / f"{process.pid}.lock"
    lock.touch()
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    process.terminate()
    assert (process.wait(60), (tmp_path / "saved").exists(), lock.exists()) == (5, True, False)
