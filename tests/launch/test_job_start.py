"""A job runs what was submitted, whatever its folder contains when it starts."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from submitit.core.utils import DelayedSubmission, UncompletedJobError

from tests.batch_scripts import FewLines
from tests.forked_jobs import forking_jobs
from tula_hpc.config import ClusterSpec
from tula_hpc.env import CONTROLLER, SETUP_FAILED, SETUP_WORDS
from tula_hpc.errors import LaunchError, PreemptedError
from tula_hpc.launch.diagnosis import informative_line
from tula_hpc.launch.job_files import (
    SETUP_FILE,
    WHAT_TO_DO,
    RequeuePaths,
    load_pickle,
    with_time_outs_left,
    write_pickles,
)
from tula_hpc.launch.job_specs import Requeueable
from tula_hpc.launch.job_start import main, requeue
from tula_hpc.launch.launcher import Launcher
from tula_hpc.records import RunDirectory


def leave(path: Path) -> Callable[[], None]:
    """Make a job that adds a line to a file; an inner function, because those are pickled by value."""

    def job() -> None:
        with path.open("a") as file:
            file.write("ran\n")

    return job


def keep(path: Path, variable: str) -> Callable[[], None]:
    """Make a job that writes a variable of its environment to a file."""

    def job() -> None:
        path.write_text(os.environ[variable])

    return job


class Hostile:
    """An object that runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch '{self.path}'",)


def exchange(folder: Path, entry: str, content: bytes) -> None:
    """Replace the folder by another one of the same owner, with foreign content in the entry."""
    folder.rename(folder.with_name("moved"))
    folder.mkdir(mode=0o700)
    for path in folder.with_name("moved").iterdir():
        if path.name != entry:
            path.rename(folder / path.name)
    (folder / entry).write_bytes(content)


def with_a_link(folder: Path, entry: str, content: bytes) -> None:
    exchange(folder, entry, b"")
    theirs = folder.with_name("theirs")
    theirs.write_bytes(content)
    (folder / entry).unlink()
    (folder / entry).symlink_to(theirs)


def with_a_link_to_its_own(folder: Path, entry: str, _: bytes) -> None:
    """Replace the entry by a link: its target could be exchanged between two checks."""
    (folder / entry).rename(folder / "own")
    (folder / entry).symlink_to("own")


def with_a_pipe(folder: Path, entry: str, _: bytes) -> None:
    (folder / entry).unlink()
    os.mkfifo(folder / entry)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert path.exists()


@pytest.mark.parametrize("attack", [with_a_link, with_a_link_to_its_own, with_a_pipe])
def test_a_pickle_is_read_from_a_file_alone(tmp_path: Path, attack: Callable[[Path, str, bytes], None]) -> None:
    folder = tmp_path / "train-1"
    folder.mkdir()
    (sha256,) = write_pickles(folder, [leave(tmp_path / "ran")], 5, 3)
    load_pickle(folder / "task-0.pkl", sha256)
    attack(folder, "task-0.pkl", pickle.dumps(Hostile(tmp_path / "hostile")))
    with pytest.raises(LaunchError) as refused:
        load_pickle(folder / "task-0.pkl", sha256)
    assert str(refused.value).startswith(f"{folder / 'task-0.pkl'}: ")
    assert str(refused.value).endswith(WHAT_TO_DO)
    assert not (tmp_path / "hostile").exists()


@pytest.mark.processes
def test_a_batch_script_refuses_a_pickle_that_was_not_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = FewLines(tmp_path, monkeypatch)
    folder = there.submit(leave(tmp_path / "ran"))
    exchange(folder, "task-0.pkl", pickle.dumps(Hostile(tmp_path / "hostile")))
    code, output = there.run()
    assert code != 0
    assert f"{folder / 'task-0.pkl'}: " in output.splitlines()[-1]
    assert output.splitlines()[-1].endswith(WHAT_TO_DO)
    assert "Traceback" not in output
    assert not (tmp_path / "hostile").exists()
    assert not (tmp_path / "ran").exists()


@pytest.mark.processes
def test_each_task_of_an_array_knows_its_own_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = FewLines(tmp_path, monkeypatch)
    folder = there.submit(*(leave(tmp_path / f"ran-{index}") for index in range(3)))
    assert there.run(index=2)[0] == 0
    (folder / "task-1.pkl").write_bytes((folder / "task-0.pkl").read_bytes())
    code, output = there.run(index=1)
    assert (code != 0, "found one with" in output) == (True, True)
    assert [path.name for path in tmp_path.glob("ran-*")] == ["ran-2"]


def test_a_job_on_this_machine_refuses_a_pickle_that_was_not_submitted(tmp_path: Path) -> None:
    run, begun, go = RunDirectory(tmp_path / "run").create(), tmp_path / "begun", tmp_path / "go"
    waits = f"touch '{begun}'; while [ ! -e '{go}' ]; do sleep 0.02; done"
    launcher = Launcher(ClusterSpec(setup=(waits,)), run, "tula-x")
    with forking_jobs():
        (job,) = launcher.submit([leave(tmp_path / "ran")], stage="train", nodes=1, minutes=1)
        wait_for(begun)
        exchange(job.folder, f"0-{job.job_id}.pkl", pickle.dumps(Hostile(tmp_path / "hostile")))
        go.touch()
        (ended,) = launcher.wait([job])
    output = informative_line(ended.log_tail)
    assert output.startswith(f"{job.folder / f'0-{job.job_id}.pkl'}: ")
    assert WHAT_TO_DO in output or "SHA-256" in output
    assert not (tmp_path / "hostile").exists()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("attack", [exchange, with_a_link])
def test_a_batch_script_refuses_a_setup_that_was_not_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: Callable[[Path, str, bytes], None]
) -> None:
    there = FewLines(tmp_path, monkeypatch, environment={"TOKEN": "x"})
    folder = there.submit(leave(tmp_path / "ran"))
    attack(folder, SETUP_FILE, f"touch '{tmp_path / 'hostile'}'; tula_setup=done".encode())
    code, output = there.run()
    assert code != 0
    assert output.splitlines()[-1] == f"{folder / SETUP_FILE}: is not what was submitted; {WHAT_TO_DO}"
    assert not (tmp_path / "hostile").exists()
    assert not (tmp_path / "ran").exists()


def test_a_worker_whose_controller_was_killed_while_it_started_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait(60)
    monkeypatch.setenv(CONTROLLER, str(gone.pid))
    with pytest.raises(SystemExit, match="the controller of this job is gone"):
        main([str(tmp_path), "0", "x"])


@pytest.mark.processes
def test_a_setup_command_that_fails_is_named_in_the_log_without_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harmless = ["[ -e /nowhere ] && echo there", "if false; then echo no; fi", "f() { false; true; }; f"]
    setup = [*harmless, "no-conda activate --token=x", "false"]
    there = FewLines(tmp_path, monkeypatch, setup=setup)
    # left by a job that submits this one
    monkeypatch.setenv(SETUP_FAILED, "`module …` is not of this job")
    there.submit(keep(tmp_path / "kept", SETUP_FAILED))
    code, output = there.run()
    assert code == 0
    code_127 = "127: no such command in the shell of a job"
    sentence = f"`no-conda …` in setup of the cluster file ended with exit code {code_127}"
    assert [line for line in output.splitlines() if SETUP_WORDS in line] == [sentence]
    assert (tmp_path / "kept").read_text() == f"{sentence}, `false …` with 1"
    assert (
        informative_line(f"{output}\nTraceback:\n  File\nImportError: no libx")
        == f"ImportError: no libx; before that, {sentence}"
    )


def waits(path: Path) -> Requeueable:
    """Make a job that submitit requeues; an inner class, because jobs cannot import this module."""

    class Waits(Requeueable):
        def __call__(self) -> None:
            path.touch()
            time.sleep(60)

    return Waits()


def time_out(there: FewLines, begun: Path) -> str:
    """Start the job and send its time limit's signal; return its output."""
    begun.unlink(missing_ok=True)
    with there.start() as process:
        wait_for(begun)
        # the script's child: srun and bash have replaced themselves by the worker, or wait for it
        workers = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
        os.kill(int(workers.stdout.split()[0]), signal.SIGUSR2)
        output, _ = process.communicate(timeout=60)
    return output


@pytest.mark.processes
def test_a_job_that_submitit_requeues_starts_from_the_same_pickle_as_often_as_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, begun = FewLines(tmp_path, monkeypatch), tmp_path / "begun"
    monkeypatch.setattr("tula_hpc.launch.slurm_executor.time_outs", lambda _: 1)
    folder = there.submit(waits(begun))
    before = (folder / "task-0.pkl").read_bytes()
    assert "Requeued job 7 (0 remaining timeouts)" in time_out(there, begun)
    assert (folder / "7_time_outs_left.txt").read_text() == "0\n"
    assert "timed-out too many times" in time_out(there, begun)
    assert (tmp_path / "scontrol.log").read_text() == "requeue 7\n"
    assert (folder / "task-0.pkl").read_bytes() == before
    assert [path.name for path in folder.glob("*.pkl")] == ["task-0.pkl"]


@pytest.mark.parametrize(("content", "left"), [(b"1\n", 1), (b"99\n", 3), (b"9" * 5000, 3)])
def test_nobody_gives_a_job_more_time_outs_than_it_was_submitted_with(
    tmp_path: Path, content: bytes, left: int
) -> None:
    job = DelayedSubmission(leave(tmp_path / "ran"))
    job.set_timeout(5, 3)
    (tmp_path / "7_time_outs_left.txt").write_bytes(content)
    assert with_time_outs_left(job, RequeuePaths(tmp_path, job_id="7", task_id=0))._timeout_countdown == left


@pytest.mark.processes
def test_a_job_on_this_machine_that_is_requeued_starts_from_the_same_pickle(tmp_path: Path) -> None:
    counts = tmp_path / "counts"

    class StopsOnce(Requeueable):
        def __call__(self) -> None:
            with counts.open("a") as file:
                file.write("ran\n")
            if counts.read_text() == "ran\n":
                os.kill(os.getpid(), signal.SIGUSR2)
                time.sleep(60)

    launcher = Launcher(ClusterSpec(), RunDirectory(tmp_path / "run").create(), "tula-x")
    with forking_jobs():
        (job,) = launcher.submit([StopsOnce()], stage="train", nodes=1, minutes=1)
        (ended,) = launcher.wait([job])
    assert counts.read_text() == "ran\n" * 2
    assert ended.log_tail.splitlines()[-1].endswith("Job completed successfully")
    assert [path.name for path in job.folder.glob("*.pkl")] == [f"0-{job.job_id}.pkl"]


def test_a_refused_requeue_is_a_preemption_or_a_time_out_and_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([None, "Requested operation is presently disabled", "Requested operation is presently disabled"])
    monkeypatch.setattr("tula_hpc.launch.slurm.requeue", lambda _: next(answers))
    requeue("7", 3, 3)
    with pytest.raises(PreemptedError, match="requeue refused: Requested operation"):
        requeue("7", 3, 3)
    with pytest.raises(UncompletedJobError, match="because: timed-out, and requeue refused: Requested operation"):
        requeue("7", 3, 2)
