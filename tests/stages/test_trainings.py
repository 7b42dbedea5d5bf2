"""Many trainings through a made-up scheduler: each once, bounded, none delayed by another."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.study_factory import result
from tula_hpc.config import ClusterSpec, StudyCell, SweepSpec
from tula_hpc.errors import StageError
from tula_hpc.failure_kinds import Failure
from tula_hpc.launch.job_files import Submitted
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.launch.launcher import Ended
from tula_hpc.records import Configuration, RunDirectory, write_atomically
from tula_hpc.stages.context import Sweep
from tula_hpc.stages.train_many import Trainings

SPEC = SweepSpec.model_validate({"name": "s", "training": {"max_requeues": 4}})
# failure of a label's n-th job; None: the job finishes
EndOfJob = Callable[[str, int], Failure | None]


class Scheduler:
    """A scheduler that ends the oldest job first, in the way that `end_of_job` gives."""

    def __init__(self, run: RunDirectory, end_of_job: EndOfJob) -> None:
        self.run, self.end_of_job = run, end_of_job
        self.arrays: list[list[str]] = []
        self.alive: dict[str, str] = {}
        self.most_alive = 0
        self.jobs = 0

    def submit(self, jobs: Sequence[TrainJob], *, data: Sequence[dict[str, str]], **_: Any) -> list[Submitted]:
        labels = [item["label"] for item in data]
        assert [job.label for job in jobs] == list(labels)
        assert [job.jobs_before for job in jobs] == list(map(self.submissions, labels))
        self.arrays.append(list(labels))
        submitted = []
        for label in labels:
            self.jobs += 1
            self.alive[str(self.jobs)] = label
            fields = {"folder": "slurm", "label": label}
            self.run.log_event("submitted", "train", job_id=str(self.jobs), data=fields)
            submitted.append(Submitted(str(self.jobs), self.run.slurm))
        self.most_alive = max(self.most_alive, len(self.alive))
        return submitted

    def active(self, job_ids: Sequence[str]) -> dict[str, object]:
        return {job_id: None for job_id in job_ids if job_id in self.alive}

    def wait_for_some(self, jobs: Sequence[Submitted], _tick: object) -> list[Ended]:
        job = jobs[0]
        label = self.alive.pop(job.job_id)
        failure = self.end_of_job(label, self.submissions(label))
        if failure is None:
            finish(self.run, label)
        return [Ended(job, failure or Failure.BUG, "Traceback\nKeyError: 'x'", None)]

    def submissions(self, label: str) -> int:
        return sum(array.count(label) for array in self.arrays)


class Silent:
    """A progress display without output."""

    def update(
        self, done: float, total: float, text: str, left_s: float | None = None, notes: Sequence[str] = (), **_: object
    ) -> None:
        pass


def finish(run: RunDirectory, label: str) -> None:
    write_atomically(run.train(label).result_file, result(SPEC, StudyCell("lbt", 64, 0), 0.5).model_dump_json())
    run.train(label).metrics_file.touch()


def trainings(
    tmp_path: Path, end_of_job: EndOfJob, labels: str, most: int = 2, executor: str = "local"
) -> tuple[Trainings, Scheduler]:
    run = RunDirectory(tmp_path / "run").create()
    cluster = ClusterSpec.model_validate({"executor": executor})
    jobs = [TrainJob(SPEC, cluster, Configuration(1, 1, 64), run.root, label) for label in labels]
    made, scheduler = Trainings(Sweep(SPEC, ClusterSpec(), run), jobs), Scheduler(run, end_of_job)
    made.sweep, made.launcher, made.most = Sweep(SPEC, cluster, run), scheduler, most  # type: ignore[assignment] # a stand-in
    return made, scheduler


def run_all(made: Trainings) -> dict[str, str]:
    return made.run(Silent())  # type: ignore[arg-type] # only `update` is used


def always_finish(_label: str, _number: int) -> None:
    return None


def test_each_training_is_submitted_once_and_a_limited_number_at_a_time(tmp_path: Path) -> None:
    made, scheduler = trainings(tmp_path, always_finish, "abcde")
    assert run_all(made) == {}
    assert sorted(label for array in scheduler.arrays for label in array) == list("abcde")
    assert scheduler.most_alive == 2
    # two jobs together, then another one whenever one is over
    assert len(scheduler.arrays) == 4


def test_on_slurm_the_next_array_waits_for_the_end_of_the_last(tmp_path: Path) -> None:
    made, scheduler = trainings(tmp_path, always_finish, "abcde", executor="slurm")
    run_all(made)
    assert scheduler.arrays == [["a", "b"], ["c", "d"], ["e"]]
    assert scheduler.most_alive == 2


def test_a_training_with_a_result_is_not_submitted_and_a_running_one_is_waited_for(tmp_path: Path) -> None:
    made, scheduler = trainings(tmp_path, always_finish, "abc")
    made.run_directory.train("a").root.mkdir(parents=True)
    scheduler.submit([made.jobs["a"]], data=[{"label": "a"}])
    finish(made.run_directory, "a")
    made.run_directory.train("b").root.mkdir(parents=True)
    scheduler.submit([made.jobs["b"]], data=[{"label": "b"}])
    assert run_all(made) == {}
    assert scheduler.arrays == [["a"], ["b"], ["c"]]
    assert made.run_directory.history().unsettled("train") == []


@pytest.mark.parametrize(
    ("failure", "submissions"),
    [
        (Failure.BUG, 3),
        (Failure.CANCELLED, 1),
        # max_requeues + 1
        (Failure.PREEMPTED, 5),
    ],
)
def test_a_failure_is_tried_again_as_often_as_it_may_help_and_holds_up_none(
    tmp_path: Path, failure: Failure, submissions: int
) -> None:
    made, scheduler = trainings(tmp_path, lambda label, _: failure if label == "a" else None, "abc")
    failures = run_all(made)
    assert list(failures) == ["a"]
    message = "by scancel or an operator" if failure is Failure.CANCELLED else "KeyError: 'x'"
    assert message in failures["a"]
    assert scheduler.submissions("a") == submissions
    assert made.run_directory.train("c").result_file.exists()
    events = [event for event in made.run_directory.events() if event.event == "failed"]
    assert [(event.data["label"], event.failure) for event in events] == [("a", failure)] * submissions


def test_a_job_that_dies_once_costs_nothing_but_another_job(tmp_path: Path) -> None:
    made, scheduler = trainings(tmp_path, lambda label, n: Failure.BUG if (label, n) == ("b", 1) else None, "abc")
    assert run_all(made) == {}
    assert [scheduler.submissions(label) for label in "abc"] == [1, 2, 1]


def test_where_every_training_meets_broken_devices_the_others_are_not_tried(tmp_path: Path) -> None:
    made, scheduler = trainings(tmp_path, lambda *_: Failure.DEVICE_FAILED, "abcdefgh", most=1)
    with pytest.raises(StageError, match=r"^train: a device failed once more"):
        run_all(made)
    assert max(scheduler.submissions(label) for label in "abcdefgh") == 3


def test_where_no_training_gets_further_the_others_are_not_tried(tmp_path: Path) -> None:
    made, scheduler = trainings(tmp_path, lambda *_: Failure.BUG, "abcdefgh")
    with pytest.raises(StageError, match="no training reaches its first logged step"):
        run_all(made)
    assert scheduler.jobs <= 5


def test_a_training_whose_folder_is_deleted_by_hand_begins_anew_and_the_others_do_not_notice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is deleted before its end is handled, or after that while others run."""

    def end_of_job(label: str, number: int) -> Failure | None:
        if (label, number) == ("b", 1):
            (submitted,) = (event for event in run.events() if event.data.get("label") == "b")
            run.log_event("finished", "train", job_id=submitted.job_id)
            shutil.rmtree(run.train("b").root)
            return Failure.BUG
        if label == "c":
            shutil.rmtree(run.train("a").root)
        return None

    made, scheduler = trainings(tmp_path, end_of_job, "abc", most=1)
    run = made.run_directory
    assert run_all(made) == {}
    assert [scheduler.submissions(label) for label in "abc"] == [2, 2, 1]
    assert all(run.train(label).result_file.exists() for label in "abc")
    output = capsys.readouterr().err.splitlines()
    assert output == [f"{run.train(label).root} was deleted: this training starts from the beginning" for label in "ba"]
    assert [event.detail for event in run.events() if event.event == "failed"] == output[:1]


def test_another_process_of_the_same_command_does_not_try_again_what_failed_for_good(tmp_path: Path) -> None:
    made, scheduler = trainings(tmp_path, lambda label, _: Failure.BUG if label == "a" else None, "ab")
    assert list(run_all(made)) == ["a"]
    submitted = scheduler.jobs
    again = Trainings(made.sweep, list(made.jobs.values()))
    again.launcher = scheduler  # type: ignore[assignment] # a stand-in
    assert list(run_all(again)) == ["a"]
    assert scheduler.jobs == submitted
    # what failed may have been corrected
    later = Trainings(made.sweep._replace(started_at=time.time()), list(made.jobs.values()))
    later.launcher = scheduler  # type: ignore[assignment] # a stand-in
    scheduler.end_of_job = always_finish
    assert run_all(later) == {}
    assert scheduler.jobs == submitted + 1
