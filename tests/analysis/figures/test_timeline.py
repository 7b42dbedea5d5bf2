"""Waits, runs and interruptions of jobs, as told by events, notes of jobs and accounting."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.run_factory import make_run
from tula_hpc.analysis.figures.drawing import Drawing, Missing
from tula_hpc.analysis.figures.timeline import MOST_ROWS, Stretch, draw_timeline, stretches
from tula_hpc.analysis.run_contents import RunContents, read_run
from tula_hpc.failure_kinds import Failure
from tula_hpc.formatting import format_duration
from tula_hpc.records import Event, JobAccount, JobNote


def event(at: float, name: str, stage: str = "train", job_id: str = "2", **data: object) -> Event:
    return Event.model_validate({"time": at, "event": name, "stage": stage, "job_id": job_id, "data": data})


def account(job_id: str, elapsed_s: float, stage: str = "train") -> JobAccount:
    fields = {"job_id": job_id, "stage": stage, "state": "COMPLETED", "over": True, "nodes": 2}
    return JobAccount.model_validate({**fields, "elapsed_s": elapsed_s})


# job 1 profiles; job 2 trains, is preempted and continues
EVENTS = [
    event(0.0, "submitted", "profile", "1"),
    event(40.0, "ended", "profile", "1"),
    event(50.0, "submitted", label="main"),
    event(130.0, "preempted"),
    event(131.0, "requeued"),
    event(170.0, "resumed"),
    event(250.0, "finished"),
    event(255.0, "ended", label="main"),
]
ACCOUNTS = [account("1", 30.0, "profile"), account("2", 71.0), account("2", 90.0)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> RunContents:
    contents = read_run(make_run(tmp_path_factory.mktemp("timeline") / "run", stage="plan"))
    return contents._replace(measurements=[], job_notes=[], events=EVENTS, accounts=ACCOUNTS)


def test_a_preempted_training_waits_runs_waits_and_runs(base: RunContents) -> None:
    assert stretches(base) == [
        Stretch("profile 1", "1", "waiting", 0.0, 10.0),
        Stretch("profile 1", "1", "profiling", 10.0, 40.0),
        Stretch("training", "2", "waiting", 50.0, 60.0),
        Stretch("training", "2", "training", 60.0, 130.0, "preempted"),
        Stretch("training", "2", "waiting", 131.0, 160.0),
        Stretch("training", "2", "training", 160.0, 250.0, "finished"),
    ]


def test_a_run_that_was_killed_ends_when_accounting_says(base: RunContents) -> None:
    killed = [*EVENTS[:5], event(170.0, "resumed", began_at=160.0), event(300.0, "resumed", began_at=290.0)]
    events = [*killed, event(350.0, "finished"), event(355.0, "ended", label="main")]
    lengths = {"as signs": [71.0, 60.0, 60.0], "not as signs": [71.0, 60.0], "none": []}
    ends = {"as signs": [130.0, 220.0, 350.0], "not as signs": [130.0, 350.0], "none": [130.0, 350.0]}
    for case, elapsed in lengths.items():
        accounts = [account("2", seconds) for seconds in elapsed]
        found = [one for one in stretches(base._replace(events=events, accounts=accounts)) if one.kind == "training"]
        assert [one.end for one in found] == ends[case]
        assert [one.is_interrupted for one in found] == [True] * (len(found) - 1) + [False]


def test_without_accounting_a_run_begins_at_its_first_sign(base: RunContents) -> None:
    found = [one for one in stretches(base._replace(accounts=[])) if one.kind == "training"]
    assert [(one.begin, one.end) for one in found] == [(50.0, 130.0), (170.0, 250.0)]


@pytest.mark.parametrize(
    ("events", "row", "since"),
    [
        ([event(50.0, "submitted", label="main")], "training", 50.0),
        ([event(50.0, "submitted", "profile", "2")], "profile 2", 50.0),
        (EVENTS[2:5], "training", 131.0),
    ],
)
def test_a_job_that_still_waits_has_a_bar(events: list[Event], row: str, since: float, base: RunContents) -> None:
    waiting = base._replace(events=events, accounts=[], seen_at=200.0)
    # without a command at work nothing tells how long the job has waited
    for contents, until in ((waiting, 200.0), (waiting._replace(seen_at=0.0), since)):
        assert stretches(contents)[-1] == Stretch(row, "2", "waiting", since, until)
        drawing = draw_timeline(contents)
        assert isinstance(drawing, Drawing)
        assert "given no sign yet" in drawing.caption
        waited_s = until - since
        title = "No job has run yet" + (f" in {format_duration(waited_s)} of waiting" if waited_s else "")
        has_run = any(one.kind != "waiting" for one in stretches(contents))
        assert (drawing.title == title) != has_run
        assert min(bar.get_extents().width for bar in drawing.figure.axes[0].patches) > 0


@pytest.mark.parametrize(
    ("later", "ends", "ended_by"),
    [
        ([event(90.0, "checkpoint")], 90.0, ""),
        ([event(90.0, "ended", label="main")], 90.0, ""),
        ([event(60.0, "preempted"), event(70.0, "resumed"), event(90.0, "checkpoint")], 90.0, ""),
        ([Event(time=90.0, event="ended", stage="train", job_id="2", failure=Failure.TIMED_OUT)], 90.0, "timed_out"),
    ],
)
def test_a_training_is_drawn_as_far_as_it_is_known(
    later: list[Event], ends: float, ended_by: str, base: RunContents
) -> None:
    events = [event(50.0, "submitted", label="main"), *later]
    last = stretches(base._replace(events=events, accounts=[]))[-1]
    assert (last.kind, last.end, last.ended_by) == ("training", ends, ended_by)
    assert last.begin < last.end


def test_a_run_began_when_its_end_says(base: RunContents) -> None:
    """The command notes the end of a cancelled job some seconds late."""
    events = [
        event(50.0, "submitted", label="main"),
        event(66.0, "preempted", began_at=60.0),
        event(73.0, "ended", label="main"),
    ]
    (waited, trained) = stretches(base._replace(events=events, accounts=[account("2", 7.0)]))
    assert (waited.begin, waited.end, trained.begin, trained.end) == (50.0, 60.0, 60.0, 66.0)


def test_notes_of_profile_jobs_go_before_their_events(base: RunContents) -> None:
    notes = [
        JobNote.model_validate({"note": note, "time": at, "job_id": "1", "submitted_at": 5.0, "began_at": 25.0})
        for note, at in (("began", 26.0), ("ready", 30.0), ("ended", 39.0))
    ]
    found = [one for one in stretches(base._replace(job_notes=notes)) if one.row == "profile 1"]
    assert [(one.kind, one.begin, one.end) for one in found] == [("waiting", 5.0, 25.0), ("profiling", 25.0, 39.0)]


def test_the_figure_shows_waiting_and_interruptions(base: RunContents) -> None:
    drawing = draw_timeline(base)
    assert isinstance(drawing, Drawing)
    # the profile job waits for 10 s, the training for 10 s and then 29 s; between the two jobs nothing waits
    assert drawing.title == (
        "4 min 10 s from the first job to the last, 49.0 s of it only waiting for nodes, 11.0 s without a job, "
        "1 interruption of the training"
    )
    assert len(drawing.table.rows) == len(stretches(base))
    assert "given no sign yet" not in drawing.caption
    crosses = [line for line in drawing.figure.axes[0].get_lines() if line.get_marker() == "X"]
    assert [np.asarray(line.get_xdata()).tolist() for line in crosses] == [[130.0]]


@pytest.mark.parametrize("jobs", [3 * MOST_ROWS, MOST_ROWS + 1])
def test_very_many_jobs_are_drawn_and_no_job_is_none(base: RunContents, jobs: int) -> None:
    events = []
    for number in range(jobs):
        job_id = str(100 + number)
        events += [
            event(float(number), "submitted", "profile", job_id),
            event(number + 9.0, "ended", "profile", job_id),
        ]
    drawing = draw_timeline(base._replace(events=events, accounts=[]))
    assert isinstance(drawing, Drawing)
    assert f"Of {jobs} rows {MOST_ROWS} are drawn, evenly spread." in drawing.caption
    assert isinstance(draw_timeline(base._replace(events=[])), Missing)


def test_a_run_on_file_has_its_timeline(tmp_path: Path) -> None:
    assert isinstance(draw_timeline(read_run(make_run(tmp_path / "run", epochs_done=2))), Drawing)
