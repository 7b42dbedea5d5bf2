"""What a profile job measures next, and what it leaves for the command that finds it dead."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.run_factory import measurement
from tula_hpc.config import ClusterSpec, SearchSpec, SweepSpec
from tula_hpc.env import WorkerEnvironment
from tula_hpc.errors import StageError
from tula_hpc.failure_kinds import Failure
from tula_hpc.launch.job_specs import ProfileJob
from tula_hpc.profiling.work_queue import WorkQueue, ask_search
from tula_hpc.records import Configuration, JobNote, append_record, notes_file, rank_file, read_records
from tula_hpc.stages.profile import blamed_configuration

LIST = (Configuration(2, 1, 8), Configuration(2, 1, 64))
MORE = [Configuration(1, 1, 16), Configuration(2, 1, 16), Configuration(4, 1, 16)]
RANK_0 = WorkerEnvironment(0, 2, 0, 0, "7", 0, ("here",), on_slurm=False)
STARTUP_S = 10.0
Ask = Callable[[ProfileJob], list[Configuration]]


@pytest.fixture(autouse=True)
def started_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tula_hpc.profiling.work_queue.job_started_at", lambda: time.time() - STARTUP_S)


def job(
    folder: Path,
    *,
    asks: bool = True,
    smaller: bool = True,
    minutes: int = 20,
    signal_delay_s: int = 1,
    **search: object,
) -> ProfileJob:
    spec = SweepSpec(name="x", search=SearchSpec.model_validate(search))
    cluster = ClusterSpec(profile_minutes=minutes, signal_delay_s=signal_delay_s)
    return ProfileJob(spec, cluster, LIST, folder / "n2-0.jsonl", 2, asks=asks, smaller=smaller, submitted_at=1.0)


def finish(of: ProfileJob, configuration: Configuration, **fields: object) -> None:
    append_record(of.output, measurement(configuration, 0, finished_at=time.time(), **fields))


def work_off(of: ProfileJob, ask: Ask, **fields: object) -> list[Configuration]:
    queue, seen = WorkQueue(of, RANK_0), []
    fields = {"elapsed_s": 2 * STARTUP_S, **fields}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tula_hpc.profiling.work_queue.ask_search", ask)
        while (configuration := queue.next()) is not None:
            seen.append(configuration)
            finish(of, configuration, **fields)
    return seen


def answers(*rounds: list[Configuration]) -> Ask:
    left = iter([*rounds, []])
    return lambda _: next(left)


def notes(of: ProfileJob) -> list[JobNote]:
    return read_records(JobNote, [notes_file(of.output)]).records


def test_after_its_list_a_job_goes_on_with_what_its_nodes_can_measure(tmp_path: Path) -> None:
    assert work_off(job(tmp_path), answers(MORE)) == [*LIST, MORE[1]]


def test_in_one_allocation_for_all_sizes_it_measures_smaller_ones_too(tmp_path: Path) -> None:
    assert work_off(job(tmp_path, nest=True), answers(MORE)) == [*LIST, *MORE[:2]]


def test_a_smaller_size_is_measured_while_nodes_are_idle_where_that_costs_less_than_its_own_job(tmp_path: Path) -> None:
    """2 nodes for e seconds are compared with 1 node for a start and e seconds, so the quicker ones stay in the job."""
    for elapsed_s, stays in ((0.9 * STARTUP_S, True), (1.2 * STARTUP_S, False)):
        folder = tmp_path / str(stays)
        folder.mkdir()
        seen = work_off(job(folder), answers(MORE), elapsed_s=elapsed_s)
        assert (MORE[0] in seen) == stays
        assert MORE[1] in seen
        # more nodes than there are
        assert MORE[2] not in seen


def test_where_other_jobs_run_a_job_keeps_to_its_size(tmp_path: Path) -> None:
    assert work_off(job(tmp_path, smaller=False), answers(MORE), elapsed_s=0.1) == [*LIST, MORE[1]]


def test_without_asking_only_the_list_is_measured(tmp_path: Path) -> None:
    assert work_off(job(tmp_path, asks=False), answers(MORE)) == list(LIST)


def test_what_is_on_record_is_not_measured_again_whoever_proposes_it(tmp_path: Path) -> None:
    of = job(tmp_path)
    finish(of, LIST[0])
    # nothing new was proposed, so that it must not ask for ever
    assert work_off(of, answers(list(LIST), MORE)) == [LIST[1]]


def test_a_failing_search_ends_the_job_but_not_what_it_measured(tmp_path: Path) -> None:
    def fail(_: ProfileJob) -> list[Configuration]:
        raise StageError("no")

    of = job(tmp_path)
    assert work_off(of, fail) == list(LIST)
    assert (notes(of)[-1].note, notes(of)[-1].detail) == ("ended", "no")


def test_a_job_that_cannot_ask_for_a_scripts_passes_fails_by_its_first_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StageError("no")

    monkeypatch.setattr("tula_hpc.profiling.work_queue.ask_passes", fail)
    of = job(tmp_path)
    with pytest.raises(StageError, match="no"):
        work_off(of, answers())
    assert blamed_configuration(LIST, of.output) == LIST[0]


def test_nothing_is_begun_that_the_time_limit_would_cut(tmp_path: Path) -> None:
    assert work_off(job(tmp_path, minutes=1), answers(MORE), elapsed_s=40.0) == [LIST[0]]
    # the rest is proposed again, and does not count against the job
    assert blamed_configuration(LIST, tmp_path / "n2-0.jsonl") is None
    (tmp_path / "long").mkdir()
    assert work_off(job(tmp_path / "long", minutes=1), answers(MORE), elapsed_s=30.0) == [*LIST, MORE[1]]


def test_only_rank_0_writes(tmp_path: Path) -> None:
    of = job(tmp_path)
    WorkQueue(of, RANK_0._replace(rank=1))
    assert not notes_file(of.output).exists()


def killed_after(of: ProfileJob, steps: int) -> Configuration | None:
    """Return the configuration that counts as the cause, if the job is killed while it measures its n-th one."""
    queue = WorkQueue(of, RANK_0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tula_hpc.profiling.work_queue.ask_search", answers(MORE))
        for step in range(steps):
            configuration = queue.next()
            if configuration is not None and step < steps - 1:
                finish(of, configuration)
    return blamed_configuration(LIST, of.output)


@pytest.mark.parametrize(("steps", "blamed"), [(0, LIST[0]), (1, LIST[0]), (2, LIST[1]), (3, MORE[1]), (4, None)])
def test_a_kill_counts_against_the_configuration_that_was_being_measured(
    tmp_path: Path, steps: int, blamed: Configuration | None
) -> None:
    assert killed_after(job(tmp_path), steps) == blamed


def test_a_job_that_left_no_notes_counts_against_the_first_of_its_list(tmp_path: Path) -> None:
    assert blamed_configuration(LIST, tmp_path / "none.jsonl") == LIST[0]


def test_an_out_of_memory_that_a_worker_recorded_needs_no_second_record(tmp_path: Path) -> None:
    of = job(tmp_path)
    WorkQueue(of, RANK_0).next()
    append_record(rank_file(of.output, 1), measurement(LIST[0], status="oom"))
    assert blamed_configuration(LIST, of.output) is None


def test_a_death_that_is_on_record_counts_against_nothing_else(tmp_path: Path) -> None:
    """The command that recorded it was killed before it noted that the job's end had been handled."""
    of = job(tmp_path)
    append_record(of.output, measurement(LIST[0], status="failed", failure=Failure.BUG))
    assert blamed_configuration(LIST, of.output) is None


def test_a_requeued_job_goes_on_where_it_was(tmp_path: Path) -> None:
    of = job(tmp_path)
    killed_after(of, 2)
    assert work_off(of, answers(MORE)) == [LIST[1], MORE[1]]
    assert [note.note for note in notes(of)].count("began") == 2


@pytest.mark.processes
def test_the_search_is_asked_in_a_process_of_its_own_and_sees_all_of_the_run(tmp_path: Path) -> None:
    """The search runs in a real process and answers as here, from this job's file and those of others."""
    of = job(tmp_path, mode="full", cluster_sizes=[1, 2], min_batch=32, max_batch=64)
    finish(of, Configuration(2, 1, 16))
    append_record(tmp_path / "other.jsonl", measurement(Configuration(1, 1, 64)))
    append_record(tmp_path / "part.jsonl", measurement(Configuration(1, 1, 32), partition="gpu"))
    assert ask_search(of) == [Configuration(1, 1, 32), Configuration(2, 1, 32)]


@pytest.mark.processes
def test_a_search_that_breaks_says_why(tmp_path: Path) -> None:
    broken = job(tmp_path).sweep.model_copy(update={"name": "not a name"})
    with pytest.raises(StageError, match="the search failed in the job"):
        ask_search(ProfileJob(broken, ClusterSpec(), LIST, tmp_path / "x.jsonl", nodes=2))


def test_a_job_that_was_killed_between_two_configurations_counts_against_neither(tmp_path: Path) -> None:
    of = job(tmp_path)
    assert WorkQueue(of, RANK_0).next() == LIST[0]
    finish(of, LIST[0])
    assert blamed_configuration(LIST, of.output) is None


def test_on_this_machine_no_warning_before_the_time_limit_is_waited_for(tmp_path: Path) -> None:
    of = job(tmp_path, minutes=1, signal_delay_s=90)
    assert work_off(of, answers(), elapsed_s=1.0) == list(LIST)
