"""What profiling cost: laws of the sum, and the sentence about it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.run_factory import configurations, measurement
from tula_hpc.analysis.costs.usage import describe_profiling, job_runs, only_waiting_s
from tula_hpc.config import ClusterSpec
from tula_hpc.records import Configuration, JobNote, Measurement

TIMES = st.lists(st.floats(0, 1e4), min_size=4, max_size=4).map(sorted)


def notes_of_run(
    submitted: float, began: float, ready: float, ended: float, *, nodes: int = 1, job: str = "1", end: bool = True
) -> list[JobNote]:
    """Return the notes that a job leaves in one run."""
    words = [("began", began + 0.5), ("ready", ready), ("measuring", ready)] + ([("ended", ended)] if end else [])
    common = {"job_id": job, "allocated_nodes": nodes, "submitted_at": submitted, "began_at": began}
    return [JobNote.model_validate({"note": note, "time": at, **common}) for note, at in words]


def row(configuration: Configuration, elapsed_s: float, **fields: object) -> Measurement:
    node_seconds = elapsed_s * configuration.nodes
    return measurement(configuration, 0, elapsed_s=elapsed_s, node_seconds=node_seconds, **fields)


def test_node_seconds_and_waiting_are_distinguished() -> None:
    notes = notes_of_run(1000, 1100, 1130, 1200, nodes=4)
    (run,) = job_runs(notes, [row(Configuration(4, 1, 8), 60.0)])
    assert (run.node_seconds, run.startup_s, only_waiting_s([run])) == (400.0, 30.0, 100.0)


def test_a_job_costs_no_more_than_its_limit_whatever_a_clock_says() -> None:
    cluster = ClusterSpec(profile_minutes=10)
    notes = notes_of_run(1000, 1100, 1130, 60_000_000, nodes=4)
    (run,) = job_runs(notes, [], cluster)
    assert run.node_seconds == 4 * 600.0


def test_tasks_of_an_array_that_wait_for_each_other_are_in_no_queue() -> None:
    notes = [*notes_of_run(1000, 1010, 1020, 1100, job="5_0"), *notes_of_run(1000, 1105, 1110, 1200, job="5_1")]
    # the wait before the first task and the one between the two
    assert only_waiting_s(job_runs(notes)) == 15.0


def test_a_requeued_job_waits_from_the_end_of_its_first_run() -> None:
    first = notes_of_run(1000, 1010, 1020, 0, end=False)
    second = notes_of_run(1000, 1300, 1310, 1400)
    inside = row(Configuration(1, 1, 32), 30.0, job_id="1", finished_at=1050.0)
    after = row(Configuration(1, 1, 64), 30.0, job_id="1", finished_at=1390.0)
    runs = job_runs([*first, *second], [inside, after])
    assert [(run.waited_from, run.began_at, run.ended_at) for run in runs] == [(1000, 1010, 1050), (1050, 1300, 1400)]
    assert "2 configurations in 1 job: " in describe_profiling(runs, [inside, after])


def test_a_job_that_was_killed_lived_until_someone_recorded_it() -> None:
    killed = measurement(Configuration(1, 1, 64), status="oom", job_id="1", finished_at=1500.0)
    (run,) = job_runs(notes_of_run(1000, 1010, 1020, 0, end=False), [killed])
    assert run.node_seconds == 490.0


@given(st.lists(st.tuples(TIMES, st.integers(1, 8)), max_size=6))
def test_parts_never_exceed_the_whole(jobs: list[tuple[list[float], int]]) -> None:
    notes = [
        note
        for index, ((submitted, began, ready, ended), nodes) in enumerate(jobs)
        for note in notes_of_run(
            submitted, began, max(ready, began + 0.5), max(ended, began + 0.5), nodes=nodes, job=str(index)
        )
    ]
    runs = job_runs(notes)
    assert all(0 <= run.nodes * run.startup_s <= run.node_seconds + 1e-6 for run in runs)
    assert -1e-6 <= only_waiting_s(runs) <= sum(times[1] - times[0] for times, _ in jobs) + 1e-6


def test_the_sentence_says_what_was_paid() -> None:
    rows = [row(c, 10.0) for c in configurations([1], [32, 2048])]
    text = describe_profiling(job_runs(notes_of_run(1000, 4600, 4620, 4640)), rows)
    assert "2 configurations in 1 job: 40 node-seconds (50.0 % of them starting up)" in text
    assert "1 h waiting for nodes" in text


def test_without_notes_nothing_is_made_up() -> None:
    assert describe_profiling([], [row(Configuration(1, 1, 32), 10.0)]) == ""
