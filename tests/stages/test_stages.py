"""Decisions between the stages, from records alone."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.run_factory import candidate, make_run, plan, sweep_of
from tula_hpc.analysis.plan import main as plan_command
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.errors import StageError
from tula_hpc.failure_kinds import Failure
from tula_hpc.formatting import format_left
from tula_hpc.launch.job_files import Submitted
from tula_hpc.launch.launcher import Ended, JobsNow
from tula_hpc.records import (
    Configuration,
    EpochMetrics,
    JobNote,
    Measurement,
    RunDirectory,
    StepMetrics,
    append_record,
    rank_file,
    write_atomically,
)
from tula_hpc.records.events import JobFailure, StopReason, SubmissionData, setup_failures
from tula_hpc.stages.context import StageProgress, Sweep, describe_failures, profiling_left_s
from tula_hpc.stages.plan import AS_BEGUN, plan_stage
from tula_hpc.stages.train import next_candidate, time_limit_advice, training_tick
from tula_hpc.status.run_files import read_facts

LARGE, *SMALLER = (
    candidate(Configuration(4, 1, local_batch)).model_copy(update={"feasible": True}) for local_batch in (64, 32, 16, 8)
)
PLAN = plan([LARGE, *SMALLER], chosen=LARGE, fallbacks=SMALLER)


def oom(local_batch: int, stage: str = "train") -> Measurement:
    fields = {"status": "oom", "failure": Failure.HOST_OOM, "nodes": 4, "workers_per_node": 1, "stage": stage}
    return Measurement.model_validate({**fields, "local_batch": local_batch})


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run").create()


def test_without_trouble_the_chosen_configuration_is_trained(run: RunDirectory) -> None:
    # a limit from a profile is considered by the plan
    append_record(run.profile / "n4-b64-0.jsonl", oom(64, "profile"))
    assert next_candidate(PLAN, run, max_fallbacks=3) == LARGE


def test_an_oom_that_every_rank_reports_counts_once(run: RunDirectory) -> None:
    for rank in range(8):
        append_record(rank_file(run.profile / "train-main.jsonl", rank), oom(64))
    assert len(list(run.profile.iterdir())) == 8
    assert next_candidate(PLAN, run, max_fallbacks=1).local_batch == 32


def test_fallbacks_shrink_and_end(run: RunDirectory) -> None:
    seen = []
    for _ in range(3):
        append_record(run.profile / "train-main.jsonl", oom(next_candidate(PLAN, run, 9).local_batch))
        seen.append(next_candidate(PLAN, run, 9).local_batch)
    assert seen == [32, 16, 8]
    append_record(run.profile / "train-main.jsonl", oom(8))
    with pytest.raises(StageError, match="no smaller fallback; use nodes with more memory"):
        next_candidate(PLAN, run, 9)
    with pytest.raises(StageError, match="max_fallbacks"):
        next_candidate(PLAN, run, 3)


def test_batches_that_ran_out_of_memory_on_another_partition_do_not_count(run: RunDirectory) -> None:
    for batch in (64, 32, 16, 8):
        elsewhere = oom(batch).model_copy(update={"partition": "small"})
        append_record(run.profile / "train-main.jsonl", elsewhere)
    assert next_candidate(PLAN, run, max_fallbacks=3) == LARGE


@pytest.mark.parametrize("last_epoch", [3.0, 3.2])
def test_a_training_that_timed_out_in_its_last_evaluation_names_the_key_to_raise(
    run: RunDirectory, last_epoch: float
) -> None:
    """The last epoch on record is the one before it, because the last one is not evaluated yet."""
    common = {"samples_seen": 64, "loss": 1.0, "lr": 0.1, "step_time_s": 0.5}
    scores = dict.fromkeys(("train_loss", "test_loss", "test_accuracy", "test_top5_accuracy"))
    file = run.make_train().metrics_file
    append_record(file, StepMetrics(step=20, epoch=2.0, **common))
    done = {"epoch": 2, "step": 20, "samples_seen": 64, "global_batch": 64, "epoch_time_s": 5.0, "steps": 10}
    append_record(file, EpochMetrics.model_validate(done | scores | {"evaluation_time_s": 600.0}))
    append_record(file, StepMetrics(step=30, epoch=last_epoch, **{**common, "samples_seen": 96}))
    sweep = Sweep(SweepSpec.model_validate({"name": "x", "workload": {"epochs": 3}}), ClusterSpec(), run)
    advice = time_limit_advice(sweep, "main", JobFailure(Failure.TIMED_OUT))
    assert advice == f"raise train_minutes in the cluster file (now {ClusterSpec().train_minutes})"


@pytest.mark.parametrize(("executor", "left"), [("slurm", ", of which signal_delay_s leaves 90 s"), ("local", "")])
def test_the_time_for_stopping_is_named_where_a_key_sets_it(run: RunDirectory, executor: str, left: str) -> None:
    sweep = Sweep(SweepSpec(name="x"), ClusterSpec.model_validate({"executor": executor}), run)
    advice = time_limit_advice(sweep, "main", JobFailure(Failure.TIMED_OUT, stop=StopReason.LIMIT_IN_VAIN))
    for_stopping = f"{left} for stopping" if left else ""
    assert advice == f"raise train_minutes in the cluster file (now 1440{for_stopping})"


def test_a_plan_is_kept_once_training_began(run: RunDirectory) -> None:
    sweep = Sweep(SweepSpec(name="x"), ClusterSpec(), run)
    write_atomically(run.plan_file, PLAN.model_dump_json(by_alias=True))
    run.log_event("submitted", "train", job_id="1")
    time.sleep(0.01)
    append_record(run.profile / "train-main.jsonl", oom(64))
    assert plan_stage(sweep) == PLAN


def test_an_objective_that_was_written_into_the_plan_stays_when_more_is_measured(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", stage="plan")
    assert plan_command([str(run.root), "--objective", "cost", "--write"]) == 0
    # as a failed configuration that the next command tries once more is measured after the plan
    os.utime(run.plan_file, (1, 1))
    made = plan_stage(sweep_of(run))
    assert (made.objective, made.other_objective) == ("cost", ['objective.kind = "cost"'])
    assert run.read_plan() == made


def test_a_training_that_left_nothing_does_not_count(run: RunDirectory) -> None:
    """Otherwise no other inputs could be measured after a training that failed at once or was moved away."""
    assert not run.has_trained()
    run.log_event("submitted", "train", job_id="1")
    assert run.has_trained()
    run.log_event("ended", "train", job_id="1")
    assert not run.has_trained()
    run.train().checkpoints.mkdir(parents=True)
    assert run.has_trained()


def test_a_lost_plan_of_a_training_is_made_again_which_status_and_the_command_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", stage="train", epochs_done=2)
    run.plan_file.unlink()
    words = f"{run.plan_file}: is missing: it is made again from the measurements"
    assert read_facts(run).doubts == [words]
    made = plan_stage(sweep_of(run))
    assert capsys.readouterr().err == f"{words}\n"
    assert run.read_plan() == made
    assert read_facts(run).doubts == []
    other = next(each for each in made.candidates if each != made.chosen)
    run.events_file.write_text("")
    began = SubmissionData(configuration=other.configuration)
    run.log_event("submitted", "train", job_id="1", data=began.model_dump(mode="json", exclude_defaults=True))
    run.plan_file.unlink()
    made = plan_stage(sweep_of(run))
    assert (made.chosen, made.reason) == (other, AS_BEGUN), "the running training keeps its configuration"


def test_a_training_that_went_on_is_reported_with_where_it_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(tmp_path / "run").create()
    tick = training_tick(Sweep(SweepSpec(name="x"), ClusterSpec(), run), StageProgress("training"))
    place = {"samples_seen": 5120, "step": 40}
    for data in ({}, place, {**place, "epochs_seen": 3.125}):
        run.log_event("resumed", "train", job_id="2", data={"label": "main", **data})
        tick(JobsNow(1, "1 running"))
    before, after = capsys.readouterr().err.splitlines()
    assert before == "training: 0 of 10 epochs done, 1 running", "older versions did not note the place"
    assert after == f"{before}; went on from the checkpoint of epoch 3.125, step 40"


def test_progress_says_what_is_left_at_the_pace_of_what_was_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the steps are left, of 12 s each, and 5 evaluations of a minute; without a job nothing is said."""
    run = RunDirectory(tmp_path / "run").create()
    metrics = run.make_train().metrics_file
    for step in range(1, 51):
        row = StepMetrics(step=step, samples_seen=64 * step, epoch=step / 10, loss=1.0, lr=0.1, step_time_s=12.0)
        append_record(metrics, row)
    epoch = {"epoch": 5, "step": 50, "samples_seen": 3200, "global_batch": 64, "epoch_time_s": 120.0, "steps": 10}
    scores = {"train_loss": 1.0, "test_loss": 1.0, "test_accuracy": 0.645, "test_top5_accuracy": None}
    append_record(metrics, EpochMetrics.model_validate({**epoch, **scores, "evaluation_time_s": 60.0}))
    tick = training_tick(Sweep(SweepSpec(name="x"), ClusterSpec(), run), StageProgress("training"))
    tick(JobsNow(1, "1 running"))
    bad = "checkpoint-r0000-000000000128.tula: is truncated"
    run.log_event("resumed", "train", data={"label": "main", "passed_over": bad})
    for _ in range(2):
        tick(JobsNow(0, "1 waiting for 3 min (other jobs go first)"))
    runs, damage, waits = capsys.readouterr().err.splitlines()
    assert damage == f"warning: a checkpoint cannot be used, and its work is done again: {bad}"
    assert runs == "training: 5 of 10 epochs done, 1 running, 64.5 % test accuracy, about 15 min left"
    assert waits == ("training: 5 of 10 epochs done, 1 waiting for 3 min (other jobs go first), 64.5 % test accuracy")


def test_a_command_that_cannot_read_the_metrics_waits_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As when they have become longer than any command reads: the training goes on, and may need another job."""
    monkeypatch.setattr("tula_hpc.records.metrics.MAX_LINES", 1)
    run = RunDirectory(tmp_path / "run").create()
    path = run.make_train().metrics_file
    for step in (1, 2):
        row = StepMetrics(step=step, samples_seen=64 * step, epoch=1.0, loss=1.0, lr=0.1, step_time_s=12.0)
        append_record(path, row)
    training_tick(Sweep(SweepSpec(name="x"), ClusterSpec(), run), StageProgress("training"))(JobsNow(1, "1 running"))
    assert f"1 running; the progress is not up to date: {path}: has" in capsys.readouterr().err


def test_a_log_has_no_line_more_often_than_an_epoch_and_a_minute_and_keeps_the_last_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [1000.0]
    monkeypatch.setattr("tula_hpc.stages.context.time.monotonic", lambda: clock[0])
    run = RunDirectory(tmp_path / "run").create()
    metrics = run.make_train().metrics_file
    tick = training_tick(Sweep(SweepSpec(name="x"), ClusterSpec(), run), StageProgress("training"))
    epoch = {"samples_seen": 3200, "global_batch": 64, "epoch_time_s": 120.0, "steps": 10, "train_loss": 1.0}

    def log_lines(epochs: float, after_s: float, *, running: int = 1, samples: int = 64) -> list[str]:
        """Return the log lines after this many epochs, where only the first one has a score."""
        row = StepMetrics(step=1, samples_seen=samples, epoch=epochs, loss=1.0, lr=0.1, step_time_s=12.0)
        append_record(metrics, row)
        if epochs == int(epochs) > 0:
            scores = {"test_accuracy": 0.645 if epochs == 1 else None, "test_loss": None, "test_top5_accuracy": None}
            append_record(metrics, EpochMetrics.model_validate({"epoch": int(epochs), "step": 1, **epoch, **scores}))
        clock[0] += after_s
        tick(JobsNow(running, f"{running} running"))
        return capsys.readouterr().err.splitlines()

    assert len(log_lines(0.1, 1.0)) == 1
    assert log_lines(0.5, 90.0) == [], "a minute without the end of an epoch is no line"
    assert len(log_lines(1, 90.0)) == 1
    assert log_lines(2, 10.0) == [], "an epoch within a minute is no line"
    (line,) = log_lines(3, 60.0)
    assert "3 of 10 epochs done, 1 running, 64.5 % test accuracy" in line
    (line,) = log_lines(11.5, 60.0)
    many = "; the script goes on after workload.epochs epochs of workload.samples samples: one of the two"
    assert many in line
    # an epoch that was trained again after a restart is not one too many
    run.log_event("resumed", "train", data={"label": "main"})
    (*_, line) = log_lines(12, 90.0)
    assert "12 of 10 epochs done" in line
    assert many not in line
    assert len(log_lines(3.1, 1.0, running=0)) == 1, "a change of the jobs is a line at once"
    (line,) = log_lines(4, 90.0, samples=128)
    assert line.endswith("now than in its profile: the plan is made for steps of 64 samples")


def test_the_time_that_profiling_takes_follows_from_what_was_measured() -> None:
    """Two run at a time: three in 100 s are 33 s each, however long a single one takes; and time goes on."""
    one = Measurement(status="ok", nodes=1, workers_per_node=1, local_batch=8, finished_at=50.0, elapsed_s=50.0)
    rows = [one, one, one.model_copy(update={"finished_at": 100.0})]
    assert profiling_left_s([], 3, 100.0) is None
    assert profiling_left_s(rows, 3, 100.0) == pytest.approx(100.0)
    assert profiling_left_s(rows, 3, 130.0) == pytest.approx(70.0)
    assert profiling_left_s(rows, 3, 900.0) == pytest.approx(2 * 900.0 / 4), "a slow one slows the pace while it runs"
    assert profiling_left_s(rows, 1, 900.0) == 0.0
    assert [format_left(seconds) for seconds in (0.0, 250.0, 7_790.0)] == [
        "less than a minute left",
        "about 4 min left",
        "about 2 h 10 min left",
    ]


def test_a_loss_that_is_not_finite_gives_one_line(tmp_path: Path) -> None:
    words = "the loss is not finite at step 8; lower workload.lr or warm up longer, unless samples hold inf or nan"
    frame = 'Traceback (most recent call last):\n  File "trainer.py", line 1, in run\n    raise DivergedError(words)\n'
    job = Submitted("7", tmp_path)
    end = Ended(job, Failure.DIVERGED, f"{frame}tula_hpc.errors.DivergedError: {words}", tmp_path / "7_0_log.err")
    assert describe_failures([end]) == f"{words}\nlog: {tmp_path / '7_0_log.err'}"


def test_a_failure_of_setup_in_a_job_that_went_on_is_reported_once() -> None:
    began = JobNote(note="began", time=1.0, job_id="7", detail="`module …` in setup ended with exit code 127")
    notes = [began, began.model_copy(update={"detail": ""}), began, JobNote(note="ended", time=2.0, detail="why")]
    (words,) = setup_failures(notes)
    assert words.startswith("job 7 went on although `module …` in setup ended with exit code 127; correct it there")
