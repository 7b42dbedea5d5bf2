"""Which ends of a training's job lead to another one, with a scheduler that ends jobs as a test says."""

from __future__ import annotations

import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.known import known
from tests.run_factory import candidate, plan, script_spec
from tests.study_factory import result
from tula_hpc.command_errors import exit_code_of
from tula_hpc.config import ClusterSpec, StudyCell, SweepSpec
from tula_hpc.env import unix_time
from tula_hpc.errors import LaunchError, StageError
from tula_hpc.failure_kinds import Failure
from tula_hpc.launch.job_files import Submitted
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.launch.launcher import Ended, JobsNow
from tula_hpc.records import (
    Configuration,
    EpochMetrics,
    JobAccount,
    Metrics,
    RunDirectory,
    StepMetrics,
    StopReason,
    append_record,
    write_atomically,
)
from tula_hpc.stages import train as stages
from tula_hpc.stages.context import StageProgress, Sweep, stage_progress
from tula_hpc.stages.train import keep_accounting, train_stage, training_tick, unmatched_metric
from tula_hpc.stages.train_many import Trainings

CHOSEN = candidate(Configuration(4, 1, 64)).model_copy(update={"feasible": True})
STEP = StepMetrics(step=10, samples_seen=640, epoch=1.0, loss=1.0, lr=0.1, step_time_s=1.0)
PLAN = plan([CHOSEN] * 4, chosen=CHOSEN, fallbacks=[])
SPEC = SweepSpec.model_validate({"name": "x", "training": {"max_requeues": 6}})


class Scheduler:
    """A scheduler whose n-th job, from 1, ends with `end_of(n)`."""

    def __init__(self, run: RunDirectory, end_of: Callable[[int], Failure]) -> None:
        self.run, self.end_of = run, end_of
        self.jobs = 0
        # for each job, its run numbers without restarts and with 20
        self.runs: list[int] = []

    def note_accounts(self) -> bool:
        return False

    def submit(
        self, jobs: Sequence[TrainJob], *, stage: str, nodes: int, minutes: int, data: Sequence[Mapping[str, object]]
    ) -> list[Submitted]:
        self.jobs += 1
        self.runs += [jobs[0].run_number(restarts) for restarts in (0, 20)]
        self.run.log_event("submitted", stage, job_id=str(self.jobs), data=dict(data[0]))
        return [Submitted(str(self.jobs), self.run.slurm)]

    def wait(self, jobs: Sequence[Submitted], tick: Callable[[str], None]) -> list[Ended]:
        return [Ended(jobs[0], self.end_of(self.jobs), "the log", None)]

    def wait_for_some(self, jobs: Sequence[Submitted], tick: Callable[[str], None]) -> list[Ended]:
        return self.wait(jobs[:1], tick)


def train(monkeypatch: pytest.MonkeyPatch, folder: Path, end_of: Callable[[int], Failure]) -> tuple[Scheduler, str]:
    """Run the stage with jobs that never finish; return the scheduler and the error's text."""
    run = RunDirectory(folder / "run").create()
    scheduler = Scheduler(run, end_of)
    monkeypatch.setattr(Sweep, "launcher", property(lambda _: scheduler))
    with pytest.raises(StageError) as caught:
        train_stage(Sweep(SPEC, ClusterSpec(), run, unix_time()), PLAN)
    return scheduler, str(caught.value)


def test_out_of_memory_without_a_smaller_batch_fails_on_record_and_is_no_fallback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = candidate(Configuration(4, 1, 32)).model_copy(update={"feasible": True})
    smaller = plan([CHOSEN, half], chosen=CHOSEN, fallbacks=[half])
    monkeypatch.setattr(sys.modules[__name__], "PLAN", smaller)
    scheduler, error = train(monkeypatch, tmp_path, lambda _: Failure.DEVICE_OOM)
    assert scheduler.jobs == 2
    assert error.startswith("train: out of memory at local batch 32, and plan.json has no smaller fallback")
    history = scheduler.run.history()
    failure = known(history.stage_failure())
    assert failure.detail == error
    assert history.fallbacks("main") == 1
    goes_on = "another job goes on at N=4 b=32 (B=128)"
    assert [each.text for each in history.news(0)] == [f"out of memory at N=4 b=64 (B=256); {goes_on}"]
    printed = capsys.readouterr().err
    assert printed.count("another job goes on") == printed.count(goes_on) == 1


def test_each_job_fences_those_before_it_before_it_has_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An earlier job may still run on a node that Slurm has lost."""
    scheduler, _ = train(monkeypatch, tmp_path, lambda _: Failure.PREEMPTED)
    assert len(scheduler.runs) == 14
    assert scheduler.runs == sorted(set(scheduler.runs))


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (Failure.BUG, ("the log", "Fix the cause and run the same command again; finished work is kept.")),
        (
            Failure.CANCELLED,
            (
                "job 1 was cancelled, by scancel or an operator",
                "Run the same command again to go on; finished work is kept.",
            ),
        ),
    ],
)
def test_a_bug_or_a_cancellation_ends_a_training(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    failure: Failure,
    words: tuple[str, str],
) -> None:
    message, follows = words
    scheduler, error = train(monkeypatch, tmp_path, lambda _: failure)
    assert scheduler.jobs == 1
    assert message in error
    assert "from the start" not in error
    sweep = Sweep(SPEC, ClusterSpec(), RunDirectory(tmp_path / "run"), unix_time())

    def train_again(_: Namespace) -> int:
        return train_stage(sweep, PLAN).epochs

    assert exit_code_of(train_again, Namespace(run_dir=sweep.run.root)) == 1
    assert capsys.readouterr().err.rstrip().split("\n")[-1].startswith(follows)


def test_a_training_whose_files_were_moved_away_is_another_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run").create()
    # a job that leaves nothing is part of the training that follows it
    train(monkeypatch, tmp_path, lambda _: Failure.CANCELLED)
    append_record(run.make_train().metrics_file, STEP)
    run.log_event("checkpoint", "train")
    train(monkeypatch, tmp_path, lambda _: Failure.CANCELLED)
    assert [job.anew for job in run.history().submissions("train")] == [False, False]
    (run.root / "train").rename(tmp_path / "train")
    train(monkeypatch, tmp_path, lambda _: Failure.CANCELLED)
    assert [job.anew for job in run.history().submissions("train")] == [False, False, True]
    assert run.history().attempts("main") == 3
    assert len({event.event for event in run.history().of_training("main")} & {"checkpoint"}) == 0


@pytest.mark.parametrize(
    ("more", "is_kept", "is_lost"),
    [({}, False, True), ({"resume_arguments": ["--resume"]}, False, False), ({}, True, False)],
)
def test_a_script_that_goes_on_from_nothing_is_said_to_begin_from_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, more: dict[str, object], is_kept: bool, is_lost: bool
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SPEC", script_spec(tmp_path, **more))
    files = RunDirectory(tmp_path / "run").create().make_train()
    append_record(files.metrics_file, STEP)
    if is_kept:
        files.checkpoints.mkdir()
        (files.checkpoints / f"checkpoint-r0000-{STEP.samples_seen // 4}.tula").touch()
    recorded: list[float] = []
    monkeypatch.setattr(StageProgress, "update", lambda _, done, *__, **___: recorded.append(done))
    _, error = train(monkeypatch, tmp_path, lambda _: Failure.CANCELLED)
    assert ("This training then begins from the start" in error) == is_lost
    assert recorded == [0.0 if is_lost else STEP.epoch]
    assert (files.root / "metrics-1.jsonl").exists() == is_lost


def test_a_training_whose_checkpoints_are_gone_is_said_to_begin_from_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(tmp_path / "run").create()
    files = run.make_train()
    append_record(files.metrics_file, STEP)
    train(monkeypatch, tmp_path, lambda _: Failure.CANCELLED)
    assert "warning" not in capsys.readouterr().err
    run.log_event("checkpoint", "train")
    train(monkeypatch, tmp_path, lambda _: Failure.CANCELLED)
    message = f"warning: what the training had saved in {files.checkpoints} is gone; the training begins from the start"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("states", "is_script", "samples", "why"),
    [
        (["REQUEUED", "NODE_FAIL", "RUNNING"], False, 64, " again, as a node failed (NODE_FAIL)"),
        (["NODE_FAIL", "REQUEUED", "RUNNING"], True, 64, ""),
        (["REQUEUED"], False, 0, ""),
        (["NODE_FAIL", "REQUEUED"], False, 64, None),
    ],
    ids=["node", "script", "begins anew", "built-in loop"],
)
def test_a_job_that_runs_again_is_reported_with_the_last_reason_and_where_it_resumed(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    *,
    states: list[str],
    is_script: bool,
    samples: int,
    why: str | None,
) -> None:
    run = RunDirectory(tmp_path / "run").create()
    sweep = Sweep(script_spec(tmp_path) if is_script else SweepSpec(name="x"), ClusterSpec(), run)
    run.log_event("submitted", "train", job_id="7")
    tick = training_tick(sweep, stage_progress("training"))
    for state in states:
        over = state != "RUNNING"
        account = JobAccount(job_id="7", stage="train", state=state, over=over, nodes=1, elapsed_s=3.0)
        append_record(run.accounting_file, account)
    run.log_event("resumed", "train", job_id="7", detail="from a.tula at step 3", data={"samples_seen": samples})
    for _ in range(2):
        tick(JobsNow(1, "1 running"))
    reported = capsys.readouterr().err
    assert reported.count(f"training: job 7 runs{why or ''}: from a.tula at step 3\n") == (why is not None)
    assert reported.count(" runs") == (why is not None)


@pytest.mark.parametrize("is_kept", [False, True])
def test_while_a_script_waits_only_what_is_kept_counts_as_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    sweep = Sweep(script_spec(tmp_path), ClusterSpec(), RunDirectory(tmp_path / "run").create())
    files = sweep.run.make_train()
    append_record(files.metrics_file, STEP)
    if is_kept:
        files.checkpoints.mkdir()
        (files.checkpoints / f"checkpoint-r0000-{STEP.samples_seen // 4}.tula").touch()
    recorded: list[tuple[float, list[str]]] = []
    progress = stage_progress("training")
    monkeypatch.setattr(progress, "update", lambda *given, **_: recorded.append((given[0], given[4])))
    tick = training_tick(sweep, progress)
    tick(JobsNow(1, "1 running"))
    tick(JobsNow(0, "1 waiting", 1))
    # its job has begun, its script has not
    tick(JobsNow(1, "1 running"))
    lost = [] if is_kept else ["nothing trained so far is kept (1 of 3 epochs)"]
    assert recorded == [(STEP.epoch, []), *2 * [(STEP.epoch / 4 if is_kept else 0.0, lost)]]


def test_a_diverged_training_is_reported_with_the_way_to_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path / "run")

    def end_of(n: int) -> Failure:
        append_record(run.make_train().metrics_file, STEP)
        run.log_event("failed", "train", job_id=str(n), detail="lower workload.lr", failure=Failure.DIVERGED)
        return Failure.DIVERGED

    _, error = train(monkeypatch, tmp_path, end_of)
    assert error.startswith(f"train: lower workload.lr; then move {run.root / 'train'} away, the diverged training")


def test_a_metric_of_a_script_that_matches_nothing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path / "run").create()
    files = run.make_train()
    sweep = Sweep(script_spec(tmp_path, metric=r"acc (?P<test_accuracy>[\d.]+)"), ClusterSpec(), run)
    updates: list[list[str]] = []
    progress = stage_progress("training")
    monkeypatch.setattr(progress, "update", lambda *given, **_: updates.append(given[4]))
    tick = training_tick(sweep, progress)
    unknown = dict.fromkeys(("train_loss", "test_loss", "test_accuracy", "test_top5_accuracy"))
    seen = {"epoch": 1, "step": 10, "samples_seen": 640, "global_batch": 64, "epoch_time_s": 1.0, "steps": 10}
    row = EpochMetrics.model_validate(unknown | seen)
    # the score of the last epoch may still come
    for epoch, accuracy in [(1, None), (2, None), (3, 0.5)]:
        append_record(files.metrics_file, row.model_copy(update={"epoch": epoch, "test_accuracy": accuracy}))
        tick(JobsNow(1, "1 running"))
    assert [len(notes) for notes in updates] == [0, 1, 0]
    assert updates[1][0].startswith("no line of the script's output matches workload.metric so far (")


def test_a_score_that_is_printed_and_not_yet_written_is_no_missing_one(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run").create()
    sweep = Sweep(script_spec(tmp_path, metric=r"acc (?P<test_accuracy>[\d.]+)"), ClusterSpec(), run)
    output = run.make_train().root / "script" / "rank-0.log"
    output.parent.mkdir()
    output.write_text("loss 1.0\n")
    assert unmatched_metric(sweep, Metrics([], [], 0)).startswith("workload.metric matches no line")
    output.write_text("loss 1.0\nacc 0.5\n")
    assert unmatched_metric(sweep, Metrics([], [], 0)) == ""


def test_a_training_that_stops_early_is_reported_among_the_epochs_that_were_planned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(tmp_path / "run").create()
    scheduler = Scheduler(run, lambda _: Failure.BUG)
    monkeypatch.setattr(Sweep, "launcher", property(lambda _: scheduler))
    ended = result(SPEC, StudyCell("lbt", 64, 0), 0.5).model_copy(update={"epochs": 4})
    write_atomically(run.make_train().result_file, ended.model_dump_json())
    train_stage(Sweep(SPEC, ClusterSpec(), run, unix_time()), PLAN)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"training: 4 of {SPEC.workload.epochs} epochs done")


def test_a_training_that_ended_while_nobody_waited_is_reported_and_on_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A detached sweep's training always does: its controller begins when the job is over."""
    run = RunDirectory(tmp_path / "run").create()
    scheduler = Scheduler(run, lambda _: Failure.BUG)
    monkeypatch.setattr(Sweep, "launcher", property(lambda _: scheduler))
    began_at = unix_time()
    run.log_event("submitted", "train", job_id="7", data={"label": "main"})
    ended = result(SPEC, StudyCell("lbt", 64, 0), 0.5)
    write_atomically(run.make_train().result_file, ended.model_dump_json())
    run.log_event("finished", "train", job_id="7", detail="50 %")
    cluster = ClusterSpec(on_event=f'echo "$TULA_EVENT $TULA_MESSAGE" >>{tmp_path}/notifications')
    for _ in range(2):
        train_stage(Sweep(SPEC, cluster, run, began_at), PLAN)
    assert (tmp_path / "notifications").read_text() == "training_finished x: 50 %\n"
    assert [(event.event, event.job_id) for event in run.events()][2:] == [("ended", "7")]


def test_a_training_killed_again_and_again_at_the_same_place_is_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler, error = train(monkeypatch, tmp_path, lambda _: Failure.KILLED)
    assert scheduler.jobs == 3
    output = [line for line in capsys.readouterr().err.splitlines() if "ended without a result" in line]
    assert [line.partition(" (")[0] for line in output] == [
        f"training: job {job} ended without a result" for job in (1, 2)
    ]
    assert all("; another job goes on from the start; to stop for good, end this command" in s for s in output)
    assert error.startswith("train: killed in job 3")


def test_a_training_that_meets_broken_devices_is_submitted_twice_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path / "run")

    def end_of(n: int) -> Failure:
        where = {"failure": Failure.DEVICE_FAILED, "data": {"hosts": [f"node{n}"]}}
        run.log_event("failed", "train", job_id=str(n), detail="an ECC error", **where)
        return Failure.BUG

    scheduler, error = train(monkeypatch, tmp_path, end_of)
    assert scheduler.jobs == 3
    hosts = "node1, node2 and node3 reported 'an ECC error'"
    assert error == f"train: a device failed once more, in job 3: {hosts}; have these nodes repaired"


def test_other_ends_between_kills_count_as_progress(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scheduler, _ = train(monkeypatch, tmp_path, lambda n: Failure.PREEMPTED if n == 2 else Failure.KILLED)
    assert scheduler.jobs == 5


@pytest.mark.parametrize("is_made_again", [False, True], ids=["", "and made again by a command"])
def test_a_training_whose_folder_is_deleted_by_hand_begins_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], is_made_again: bool
) -> None:
    """The result of a job that had finished before is not waited for."""
    run = RunDirectory(tmp_path / "run")
    monkeypatch.setattr(time, "sleep", pytest.fail)

    def end_of(n: int) -> Failure:
        if n == 1:
            run.log_event("finished", "train", job_id="1")
            shutil.rmtree(run.train().root)
            if is_made_again:
                run.make_train()
        return Failure.BUG

    scheduler, error = train(monkeypatch, tmp_path, end_of)
    assert scheduler.jobs == 2
    assert error.startswith("train: bug in job 2")
    output = capsys.readouterr().err
    assert f"{run.train().root} was deleted: this training starts from the beginning" in output
    assert "from its last checkpoint" not in output


class KilledError(BaseException):
    """An exception that ends the command as SIGKILL would."""


@pytest.mark.parametrize("write", [1, 2, 3, 4])
def test_a_command_that_is_killed_while_it_notes_lack_of_memory_does_not_try_that_batch_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, write: int
) -> None:
    """It may be killed before any write: the record, its event, the job's end, the fall-back."""
    run = RunDirectory(tmp_path / "run").create()
    smaller = CHOSEN.model_copy(update={"local_batch": 32})
    made = plan([CHOSEN] * 4, chosen=CHOSEN, fallbacks=[smaller])
    scheduler = Scheduler(run, lambda n: Failure.HOST_OOM if n == 1 else Failure.BUG)
    monkeypatch.setattr(Sweep, "launcher", property(lambda _: scheduler))
    writes = iter(range(1, 5))

    def before(real: Callable[..., None]) -> Callable[..., None]:
        def counted(*arguments: object, **fields: object) -> None:
            if "submitted" not in arguments and next(writes) == write:
                raise KilledError
            real(*arguments, **fields)

        return counted

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "log_event", before(RunDirectory.log_event))
        patch.setattr(stages, "append_record", before(append_record))
        with pytest.raises(KilledError):
            train_stage(Sweep(SPEC, ClusterSpec(), run, unix_time()), made)
    with pytest.raises(StageError, match="bug in job 2"):
        train_stage(Sweep(SPEC, ClusterSpec(), run, unix_time()), made)
    batches = [event.data["configuration"][2] for event in run.events() if event.event == "submitted"]
    assert batches == [64, 32]


SENTENCE = "restarted 6 times, as training.max_requeues allows"


@pytest.fixture
def used_up(tmp_path: Path) -> Callable[[int], Failure]:
    """Return ends of jobs whose requeues are used up."""
    run = RunDirectory(tmp_path / "run")
    data = {"stop": StopReason.REQUEUES_EXHAUSTED}

    def end_of(n: int) -> Failure:
        run.log_event("failed", "train", job_id=str(n), detail=SENTENCE, data=data)
        return Failure.BUG

    return end_of


def test_the_end_of_requeues_has_the_trainings_own_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, used_up: Callable[[int], Failure]
) -> None:
    scheduler, error = train(monkeypatch, tmp_path, used_up)
    assert scheduler.jobs == 1
    message = f"train: {SENTENCE}, the last time in job 1; all work is saved, and the same command continues it"
    assert error == f"{message}; a larger train_minutes in the cluster file (now 1440) needs fewer restarts"
    ended = next(event for event in scheduler.run.events() if event.event == "ended")
    assert ended.failure is Failure.PREEMPTED


def test_the_end_of_requeues_of_a_script_that_keeps_nothing_does_not_say_that_work_is_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, used_up: Callable[[int], Failure]
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SPEC", script_spec(tmp_path))
    _, error = train(monkeypatch, tmp_path, used_up)
    assert error.startswith(f"train: {SENTENCE}, the last time in job 1; a larger train_minutes")


def test_a_script_that_would_begin_anew_after_its_time_limit_is_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path / "run")

    def end_of(n: int) -> Failure:
        run.log_event("failed", "train", job_id=str(n), detail="why", data={"stop": StopReason.LIMIT_IN_VAIN})
        return Failure.BUG

    scheduler, error = train(monkeypatch, tmp_path, end_of)
    assert scheduler.jobs == 1
    advice = "raise train_minutes in the cluster file (now 1440), or let it go on where it stopped"
    assert error.startswith(f"train: why; {advice}: set workload.resume_arguments, or have the script keep its state")
    assert [event.failure for event in scheduler.run.events() if event.event == "ended"] == [Failure.TIMED_OUT]


def test_jobs_that_end_at_their_time_limit_name_its_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, error = train(monkeypatch, tmp_path, lambda _: Failure.TIMED_OUT)
    assert error.startswith("train: raise train_minutes in the cluster file (now 1440); timed out in job ")


def test_a_study_does_not_try_again_after_its_time_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, used_up: Callable[[int], Failure]
) -> None:
    run = RunDirectory(tmp_path / "run").create()
    scheduler = Scheduler(run, used_up)
    monkeypatch.setattr(Sweep, "launcher", property(lambda _: scheduler))
    job = TrainJob(SPEC, ClusterSpec(), CHOSEN.configuration, run.root, "a")
    failures = Trainings(Sweep(SPEC, ClusterSpec(), run, unix_time()), [job]).run(stage_progress("train"))
    assert scheduler.jobs == 1
    advice = "a larger train_minutes in the cluster file (now 1440) needs fewer restarts"
    assert failures == {"a": f"preempted: {SENTENCE}; {advice}"}


@pytest.mark.parametrize("failure", [Failure.TIMED_OUT, Failure.BUG])
def test_a_study_names_the_key_of_a_time_limit_as_a_sweep_does_with_what_would_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failure: Failure
) -> None:
    run = RunDirectory(tmp_path / "run").create()
    scheduler = Scheduler(run, lambda _: failure)
    monkeypatch.setattr(Sweep, "launcher", property(lambda _: scheduler))
    for step in (10, 20):
        line = StepMetrics(step=step, samples_seen=64 * step, epoch=step / 20, loss=1.0, lr=0.1, step_time_s=6.0)
        append_record(run.make_train("a").metrics_file, line)
    job = TrainJob(SPEC, ClusterSpec(), CHOSEN.configuration, run.root, "a")
    (output,) = Trainings(Sweep(SPEC, ClusterSpec(), run, unix_time()), [job]).run(stage_progress("train")).values()
    # 20 steps of 6 s an epoch
    key = "raise train_minutes in the cluster file (now 1440; 10 epochs take 20 min at this pace)"
    assert output == (f"timed out: the log; {key}" if failure is Failure.TIMED_OUT else "bug: the log")


def accounted(run: RunDirectory, *answers: list[JobAccount], executor: str = "slurm") -> tuple[JobAccount, ...]:
    """Return what is kept of a training by two jobs, with these answers of accounting in turn."""
    for job_id in ("7", "8"):
        run.log_event("submitted", "train", job_id=job_id, data={"label": "main"})
    run.make_train()
    asked = iter(answers)

    def ask(job_ids: set[str], **_: object) -> dict[str, list[JobAccount]]:
        assert set(job_ids) == {"7", "8"}
        if (rows := next(asked, None)) is None:
            raise LaunchError("Slurm accounting storage is disabled")
        return {job_id: [row for row in rows if row.job_id == job_id] for job_id in {row.job_id for row in rows}}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tula_hpc.launch.launcher.accounted_runs", ask)
        patch.setattr("time.sleep", lambda _: None)
        keep_accounting(Sweep(SPEC, ClusterSpec.model_validate({"executor": executor}), run))
    return run.history().accounted("main", run.accounts())


def account(job_id: str, state: str, elapsed_s: float, nodes: int) -> JobAccount:
    over = state != "RUNNING"
    return JobAccount(job_id=job_id, stage="train", state=state, over=over, elapsed_s=elapsed_s, nodes=nodes)


FIRST = [account("7", "REQUEUED", 60.0, 4), account("7", "TIMEOUT", 100.0, 4)]
ENDED = account("8", "COMPLETED", 40.0, 2)


def test_what_accounting_knows_of_a_training_is_kept_once_all_its_jobs_are_over(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run").create()
    found = accounted(run, [*FIRST, account("8", "RUNNING", 39.0, 2)], [*FIRST, ENDED])
    assert len(found) == 3
    assert sum(account.node_seconds for account in found) == 4 * 160.0 + 2 * 40.0
    assert accounted(run) == found, "accounting is not asked again"


def test_without_accounting_or_with_a_part_of_it_nothing_is_kept(tmp_path: Path) -> None:
    for number, answers in enumerate(([], [FIRST], [[*FIRST, account("8", "RUNNING", 40.0, 0)], FIRST])):
        assert accounted(RunDirectory(tmp_path / str(number)).create(), *answers) == ()
    assert accounted(RunDirectory(tmp_path / "here").create(), [*FIRST, ENDED], executor="local") == ()
