"""`status --watch`: what it shows on a terminal and in a log, and when it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.run_factory import CLUSTER_TOML, SWEEP_TOML, make_run, measurement
from tula_hpc.env import can_redraw
from tula_hpc.errors import RunDirectoryError
from tula_hpc.launch.slurm import JobState
from tula_hpc.records import Configuration, JobNote, RunDirectory, append_record, write_atomically
from tula_hpc.stages.context import BarProgress, stage_progress
from tula_hpc.status.jobs import Answer
from tula_hpc.status.run_files import read_facts
from tula_hpc.status.run_status import RunStatus
from tula_hpc.status.state import describe
from tula_hpc.status.watch import LogDisplay, ScreenDisplay, state_line, watch

CONFIGURATIONS = [Configuration(1, 1, batch) for batch in (32, 64, 128, 256)]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run with four profiles submitted in two jobs."""
    run = RunDirectory(tmp_path / "run").create()
    write_atomically(run.sweep_file, SWEEP_TOML)
    write_atomically(run.cluster_file, CLUSTER_TOML)
    for job_id, mine in (("7", CONFIGURATIONS[:2]), ("8", CONFIGURATIONS[2:])):
        data = {"folder": "slurm/profile-7", "nodes": 1, "configurations": [list(each) for each in mine]}
        run.log_event("submitted", "profile", job_id=job_id, data=data)
    return run


def status_with(run: RunDirectory, **states: tuple[str, str]) -> RunStatus:
    """Return the status if Slurm answers so; j7="RUNNING" is job 7."""
    active = {name[1:]: JobState(*state) for name, state in states.items()}
    return describe(read_facts(run), Answer(active))


def looks(*statuses: RunStatus) -> Callable[[], RunStatus]:
    each: Iterator[RunStatus] = iter(statuses)
    return lambda: next(each)


def test_a_log_has_a_line_for_each_change_and_says_what_is_waited_for(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = status_with(run, j7=("PENDING", "Priority"), j8=("PENDING", "Priority"))
    held = status_with(run, j7=("PENDING", "JobHeldUser"))
    gone = status_with(run)
    assert (waits.state, gone.state) == ("waiting", "over")
    paused: list[float] = []
    assert watch(looks(waits, waits, held, gone, waits, gone, gone), paused.append) == gone.exit_code == 3
    assert len(paused) == 6, "one status without work may fall between two jobs"
    first, second, third, *_ = (line[9:] for line in capsys.readouterr().out.splitlines())
    assert first == f"waiting: {waits.words}, 0 configurations measured, 2 jobs waiting (other jobs go first)"
    assert second.endswith("1 job waiting (held; `scontrol release 7` lets it go; this does not go away by itself)")
    assert third == f"over: {gone.words}, 0 configurations measured"


def test_a_run_that_cannot_be_read_for_a_moment_is_still_watched(run: RunDirectory) -> None:
    waits = status_with(run, j7=("PENDING", "Priority"), j8=("PENDING", "Priority"))
    gone = status_with(run)
    # a look of None finds a file server that does not answer
    answers = iter([waits, None, None, waits, gone, gone])

    def look() -> RunStatus:
        status = next(answers, None)
        if status is None:
            raise RunDirectoryError("cannot be read: Stale file handle", source=run.root)
        return status

    paused: list[float] = []
    assert watch(look, paused.append) == 3
    assert len(paused) == 5
    answers = iter([waits])
    with pytest.raises(RunDirectoryError, match="Stale file handle"):
        watch(look, paused.append)
    count = len(paused)
    with pytest.raises(RunDirectoryError):
        watch(look, paused.append)
    assert len(paused) == count, "a first look that fails is reported at once"


def test_time_left_is_shown_and_makes_no_line_of_its_own(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    now = read_facts(run).now
    append_record(
        run.profile / "a.jsonl", measurement(CONFIGURATIONS[0], job_id="7", finished_at=now + 1, elapsed_s=80.0)
    )
    append_record(run.profile / "a.notes", JobNote(note="ended", time=now + 1, job_id="7"))
    runs = status_with(run, j7=("RUNNING", ""), j8=("RUNNING", ""))
    assert runs.profile is not None
    assert runs.profile.left_s == pytest.approx(2 * 80.0, abs=5.0), (
        "of the other job: this one has measured what it was to"
    )
    later = runs.model_copy(update={"profile": runs.profile.model_copy(update={"left_s": 60.0})})
    display = LogDisplay()
    for each in (runs, later):
        display.show(each)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("1 configuration measured, up to about 3 min left")


def test_a_training_says_its_epochs(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", stage="train", epochs_done=5)
    assert "4.8 of 20 epochs done" in state_line(status_with(run))


def test_a_screen_is_drawn_in_place_and_its_last_state_stays(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    with ScreenDisplay() as display:
        for reason in ("Priority", "Resources"):
            display.show(status_with(run, j7=("PENDING", reason)))
    drawn = capsys.readouterr().out
    assert "\x1b[1A\x1b[2K" in drawn, "the first screen is erased"
    last = drawn.rpartition("\x1b[2K")[2]
    assert "waiting for Resources: enough nodes have to become free" in last
    assert "Priority" not in last


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_a_terminal_that_cannot_redraw_gets_lines_as_a_log_does(monkeypatch: pytest.MonkeyPatch, term: str) -> None:
    monkeypatch.setenv("TERM", term)
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    assert can_redraw(sys.stdout) == (term == "xterm")
    assert isinstance(stage_progress("train"), BarProgress) == (term == "xterm")


def test_watching_ends_with_its_reader(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe such as `tula status RUN --watch | head -1` closes its output."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        with pytest.raises(BrokenPipeError):
            watch(looks(status_with(run, j7=("PENDING", "Priority"))), lambda _: None)
        monkeypatch.undo()
        # otherwise its end would write the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), nobody.fileno())


def test_ctrl_c_ends_watching_quietly(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    assert watch(looks(status_with(run, j7=("PENDING", "Priority"))), interrupt) == 0
    output = capsys.readouterr()
    assert (len(output.out.splitlines()), output.err) == (1, "")
