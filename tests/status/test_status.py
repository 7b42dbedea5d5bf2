"""What `status` says about runs of every stage and age, with and without a scheduler that answers."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.known import known
from tests.run_factory import CLUSTER_TOML, SWEEP_TOML, late_plan, make_run, measurement, oom, write_plan
from tests.study_factory import SWEEP, make_study
from tula_hpc.analysis.plan import main as plan_command
from tula_hpc.analysis.report.bill_text import bill_of
from tula_hpc.analysis.run_contents import read_run
from tula_hpc.cli.open_run import open_run
from tula_hpc.config import ClusterSpec, SweepSpec, load_cluster, load_frozen_sweep
from tula_hpc.errors import LaunchError
from tula_hpc.failure_kinds import Failure
from tula_hpc.files import MEASUREMENTS_GONE
from tula_hpc.launch import slurm
from tula_hpc.launch.diagnosis import explain, read_logs
from tula_hpc.launch.job_files import Submitted
from tula_hpc.launch.launcher import NOTICE
from tula_hpc.launch.slurm import JobState
from tula_hpc.records import (
    Configuration,
    EpochMetrics,
    Event,
    JobAccount,
    JobNote,
    RunDirectory,
    StepMetrics,
    append_record,
    read_metrics,
    write_atomically,
)
from tula_hpc.records.run_directory import holder_of
from tula_hpc.retry_policy import STUDY_ATTEMPTS
from tula_hpc.stages.plan import obstacle
from tula_hpc.status import __main__ as status
from tula_hpc.status import run_files as run_facts
from tula_hpc.status.cost import describe_price, node_hour_price
from tula_hpc.status.jobs import Answer, JobPhase, job_statuses
from tula_hpc.status.run_files import read_facts, read_tail
from tula_hpc.status.run_status import RunStatus
from tula_hpc.status.state import describe
from tula_hpc.status.text import short_ids, status_text

Script = Callable[[Sequence[str]], str]


class FakeSlurm:
    """Slurm's commands as far as `status` uses them; any other call fails the test."""

    def __init__(self) -> None:
        self.jobs: dict[str, tuple[str, str]] = {}
        # lines of sacct; None: there is no accounting
        self.accounted: list[str] | None = []
        self.dead = False

    def run(self, arguments: Sequence[str], timeout_s: float = 60.0) -> str:
        assert timeout_s <= 10, "a status must not take minutes"
        if self.dead:
            raise LaunchError(f"{arguments[0]} did not answer within {timeout_s:g} s")
        if arguments[0] == "squeue":
            rows = [f"{job}|{state}|{reason}|x\n" for job, (state, reason) in self.jobs.items()]
            columns = arguments[arguments.index("-o") + 1].count("|") + 1
            return "".join(["|".join(["JOBID", "STATE", "REASON", "NAME_COMMAND"][:columns]) + "\n", *rows])
        assert arguments[0] == "sacct"
        assert "-D" in arguments, "without this option requeued runs are left out"
        if self.accounted is None:
            raise LaunchError("sacct failed: Slurm accounting storage is disabled")
        return "\n".join(self.accounted)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm()
    monkeypatch.setattr(slurm, "run_command", fake.run)
    monkeypatch.setattr("tula_hpc.launch.slurm.run_command", fake.run)
    return fake


@pytest.fixture
def no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def new_run(root: Path, *, executor: str = "slurm") -> RunDirectory:
    """Make a run as it is directly after the command began."""
    run = RunDirectory(root).create()
    write_atomically(run.sweep_file, SWEEP_TOML)
    write_atomically(run.cluster_file, CLUSTER_TOML.replace('"slurm"', f'"{executor}"'))
    return run


def submit(run: RunDirectory, job_id: str, stage: str = "profile", **data: object) -> None:
    folder = run.slurm / f"{stage}-{job_id.partition('_')[0]}"
    folder.mkdir(exist_ok=True)
    fields = {"folder": str(folder.relative_to(run.root)), "nodes": 2, **data}
    run.log_event("submitted", stage, job_id=job_id, data=fields)


def phases(run_status: RunStatus) -> dict[str, JobPhase]:
    return {job.job_id: job.phase for job in run_status.jobs}


def text_of(run_status: RunStatus) -> str:
    """Return the text without line breaks."""
    return " ".join(status_text(run_status).split())


# ---- stages


@pytest.mark.parametrize(
    ("stage", "epochs", "state"),
    [("profile", 0, "unknown"), ("plan", 0, "stopped"), ("train", 5, "unknown"), ("train", 20, "finished")],
)
@pytest.mark.usefixtures("no_slurm")
def test_a_run_of_every_stage_is_shown_from_its_files_alone(
    tmp_path: Path, stage: str, epochs: int, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """These files are from before there were "ended" events, job notes, or labels of trainings."""
    run = make_run(tmp_path / "run", stage=stage, epochs_done=epochs)
    assert status.main([str(run.root)]) == {"stopped": 3, "unknown": 4}.get(state, 0)
    text = capsys.readouterr().out
    assert f"state      {state}" in text
    assert "36 configurations measured" in text or "measured" in text
    assert "cost" in text
    assert len(text.splitlines()) < 40
    assert ("predicted" in text) == (stage != "profile")
    assert ("epoch" in text.partition("\ntrain ")[2]) == (stage == "train")


def test_a_fresh_run_directory_has_nothing_to_show_and_says_so(tmp_path: Path, cluster: FakeSlurm) -> None:
    run_status = status.status_of(new_run(tmp_path / "run").root)
    assert (run_status.state, run_status.exit_code, run_status.jobs) == ("stopped", 3, [])
    assert "nothing is measured" in run_status.words
    assert "nothing is known yet" in text_of(run_status)


def test_a_single_profile_is_in_the_singular(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = new_run(tmp_path / "run")
    append_record(run.profile / "a.jsonl", measurement(Configuration(1, 1, 32)))
    run_status = status.status_of(run.root)
    assert run_status.words.startswith("1 configuration measured; ")
    run.log_event("ended", "profile")
    assert " 1 configuration measured; 0 jobs" in text_of(status.status_of(run.root))


def test_a_folder_whose_events_are_a_pipe_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "events.jsonl")
    assert status.main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path) in error
    assert len(error.splitlines()) == 1


def test_damaged_files_are_named_and_the_rest_is_shown(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = make_run(tmp_path / "run")
    run.plan_file.write_text("{")
    run.sweep_file.write_text("name = ")
    run.train().result_file.write_text("[]")
    run_status = status.status_of(run.root)
    assert sorted(Path(doubt.partition(":")[0]).name for doubt in run_status.doubts) == [
        "plan.json",
        "result.json",
        "sweep.toml",
    ]
    assert known(run_status.profile).measured > 0


@pytest.mark.parametrize("name", ["plan.json", "footprint.json"])
def test_damaged_files_are_reported_alike_by_status_and_plan_with_what_to_do(
    tmp_path: Path, cluster: FakeSlurm, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", stage="plan")
    (run.root / name).write_text('{"schema_version": 7}')
    (doubt,) = status.status_of(run.root).doubts
    assert doubt.startswith(f"{run.root / name}: is damaged")
    assert "delete it, and" in doubt
    assert plan_command([str(run.root)]) == 0
    assert f"warning: {doubt}\n" in capsys.readouterr().err
    assert run.damage() == ([doubt] if name == "footprint.json" else [])
    if name == "plan.json":
        assert obstacle(run, run.measurements().records) == doubt, "the sweep ends with the same message"


def test_a_plan_that_was_edited_is_refused_alike_by_status_plan_and_sweep_until_it_is_made_again(
    tmp_path: Path, cluster: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", stage="plan")
    assert plan_command([str(run.root), "--write"]) == 0
    assert obstacle(run, run.measurements().records) == ""
    assert status.status_of(run.root).doubts == []
    epochs = run.read_plan().epochs
    text = run.plan_file.read_text()
    run.plan_file.write_text(text.replace(f'"epochs": {epochs}', f'"epochs": {epochs + 1}'))
    (doubt,) = status.status_of(run.root).doubts
    assert doubt.startswith(f"{run.plan_file}: was changed since it was written, perhaps by hand; delete it, and the")
    assert obstacle(run, run.measurements().records) == doubt, "the sweep ends with the same message"
    capsys.readouterr()
    assert plan_command([str(run.root)]) == 0
    assert f"warning: {doubt}\n" in capsys.readouterr().err
    assert plan_command([str(run.root), "--set", "objective.kind=time", "--write"]) == 0
    assert obstacle(run, run.measurements().records) == ""
    # changed by an editor that ends files with a newline
    run.plan_file.write_text(f"{run.plan_file.read_text()}\n")
    assert run.read_plan().objective == "time"


def test_a_damaged_sweep_file_is_reported_alike_by_status_and_plan_with_what_to_do(
    tmp_path: Path, cluster: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", stage="plan")
    run.sweep_file.write_text("name = ")
    assert plan_command([str(run.root)]) == 2
    output = capsys.readouterr().err.strip()
    assert "put it back as it was" in output
    assert output == obstacle(run, run.measurements().records)
    assert output in status.status_of(run.root).words


@pytest.mark.parametrize("has_files", [True, False])
def test_a_study_without_its_sweep_file_is_not_called_a_sweep(
    tmp_path: Path, cluster: FakeSlurm, has_files: bool
) -> None:
    run = make_study(tmp_path / "run")
    if not has_files:
        shutil.rmtree(run.root / "train")
    run.log_event("submitted", "train", job_id="1", data={"label": "study/ags-b512-s1"})
    run.sweep_file.unlink()
    run_status = status.status_of(run.root)
    assert (run_status.state, run_status.exit_code, run_status.profile) == ("failed", 1, None)
    assert run_status.words.startswith(f"{run.sweep_file}: is missing; ")
    text = text_of(run_status)
    assert not [word for word in ("plan", "profile", "measurements") if word in text]


def test_a_lost_cluster_file_is_reported_by_status_and_written_anew_by_the_command(
    tmp_path: Path, cluster: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    run = profiled(tmp_path / "run")
    inputs = load_frozen_sweep(run.sweep_file), load_cluster(run.cluster_file)
    run.cluster_file.unlink()
    scheduler = status.status_of(run.root).scheduler
    words = f"{run.cluster_file} is missing (the same command writes it anew)"
    assert plan_command([str(run.root)]) == 2
    remedy = "run the command of the sweep again, which writes it anew"
    assert capsys.readouterr().err == f"{run.cluster_file}: is missing; {remedy}\n"
    assert (scheduler.answered, scheduler.words.partition(",")[0]) == (False, words)
    open_run(*inputs, run.root)
    assert f"{run.cluster_file}: is missing, and is written anew: " in capsys.readouterr().err
    assert load_cluster(run.cluster_file) == inputs[1]
    run.sweep_file.unlink()
    text = text_of(status.status_of(run.root))
    assert text.count(f"{run.sweep_file}: ") == 1


def test_a_training_with_an_old_report_or_without_its_model_is_not_everything_done(
    tmp_path: Path, cluster: FakeSlurm
) -> None:
    run = make_run(tmp_path / "run")
    writes = f"tula report {run.root} writes it"
    words = status.status_of(run.root).words
    # not the same command: with `--until train` it would write no report
    assert words.startswith("everything is trained; there is no report yet: ")
    assert words.endswith(writes)
    run.report.mkdir()
    (run.report / "report.html").touch()
    run_status = status.status_of(run.root)
    assert (run_status.words, run_status.report_stale) == ("everything is done", False)
    assert f"\nreport     {run.report / 'report.html'}\n" in status_text(run_status, 60)
    later = time.time() + 60
    os.utime(run.plan_file, (later, later))
    run_status = status.status_of(run.root)
    assert run_status.report_stale
    assert run_status.words.startswith("everything is trained; the report is older than its data: ")
    assert run_status.words.endswith(f"{writes} again")
    assert "report older than the measurements, the plan or the training; to write it again: " in text_of(run_status)
    # the model is gone, and the report is old as well: the model matters more
    shutil.rmtree(run.train().checkpoints)
    run_status = status.status_of(run.root)
    assert (run_status.state, run_status.exit_code) == ("failed", 1)
    assert run_status.words.startswith(f"the trained model is gone: {run.train().checkpoints} has no checkpoint")
    assert f"move {run.root / 'train'} away" in run_status.words


# ---- jobs and the scheduler


def test_a_jobs_state_is_shown_in_slurms_word_and_in_plain_words(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = new_run(tmp_path / "run")
    for job in ("7_0", "7_1", "8"):
        submit(run, job)
    cluster.jobs = {"7_0": ("RUNNING", "None"), "7_1": ("PENDING", "JobArrayTaskLimit"), "8": ("PENDING", "Priority")}
    run_status = status.status_of(run.root)
    assert phases(run_status) == {"7_0": JobPhase.RUNNING, "7_1": JobPhase.WAITING, "8": JobPhase.WAITING}
    assert run_status.state == "running"
    assert "Priority: other jobs go first" in text_of(run_status)
    cluster.jobs.pop("7_0")
    cluster.accounted = ["7_0|tula-cifar100-vgg11-profile-abc|FAILED|10|2"]
    run_status = status.status_of(run.root)
    assert phases(run_status)["7_0"] is JobPhase.OVER
    assert "over (failed), not yet acted on: run the same command again" in text_of(run_status)
    assert run_status.state == "waiting"


PASSING = [
    "None", "Priority", "Resources", "Dependency", "BeginTime", "PartitionDown", "JobArrayTaskLimit", "Licenses",
    "Reservation", "QOSMaxJobsPerUserLimit", "QOSGrpNodeLimit", "MaxGRESPerAccount", "AssocGrpCpuLimit",
    "AssocMaxJobsLimit", "AssocGrpCPURunMinutesLimit", "ReqNodeNotAvail, UnavailableNodes:n[1-2]",
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
]  # fmt: skip
STAYING = [
    "DependencyNeverSatisfied", "JobHeldUser", "JobHeldAdmin", "launch failed requeued held", "PartitionTimeLimit",
    "PartitionNodeLimit", "PartitionConfig", "BadConstraints", "InvalidAccount", "InvalidQOS",
    "AssocGrpCPUMinutesLimit", "QOSMaxWallDurationPerJobLimit", "QOSMaxGRESPerNode", "AssocMaxNodePerJobLimit",
]  # fmt: skip


@pytest.mark.parametrize("reason", [*PASSING, *STAYING])
def test_reasons_are_explained_and_those_that_stay_are_marked(reason: str) -> None:
    wait = explain(JobState("PENDING", reason))
    assert wait.words
    assert wait.stuck is (reason in STAYING)


def test_a_reason_of_another_release_is_passed_on_as_it_is(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = new_run(tmp_path / "run")
    submit(run, "7")
    cluster.jobs = {"7": ("PENDING", "SomethingNew")}
    assert "waiting for SomethingNew;" in text_of(status.status_of(run.root))
    # Slurm has no reason for a job that it has just taken
    cluster.jobs = {"7": ("PENDING", "None")}
    assert "waiting: not looked at by the scheduler yet;" in text_of(status.status_of(run.root))


def test_a_job_that_can_never_start_is_not_going_well(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = new_run(tmp_path / "run")
    submit(run, "7")
    cluster.jobs = {"7": ("PENDING", "PartitionTimeLimit")}
    run_status = status.status_of(run.root)
    assert (run_status.state, run_status.exit_code) == ("stuck", 1)
    assert "THIS DOES NOT GO AWAY BY ITSELF" in status_text(run_status)


@pytest.mark.parametrize("how", ["dead", "missing"])
def test_without_an_answer_only_the_files_count(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch, cluster: FakeSlurm
) -> None:
    run = new_run(tmp_path / "run")
    submit(run, "7")
    if how == "dead":
        cluster.dead = True
    else:
        monkeypatch.undo()
        monkeypatch.setenv("PATH", str(tmp_path))
    run_status = status.status_of(run.root)
    assert (run_status.state, run_status.exit_code) == ("unknown", 4)
    assert phases(run_status) == {"7": JobPhase.UNKNOWN}
    assert not run_status.scheduler.answered
    assert {"dead": "did not answer", "missing": "not on PATH"}[how] in run_status.scheduler.words


def test_a_hanging_squeue_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(tmp_path / "run")
    submit(run, "7")
    for name in ("squeue", "sacct"):
        (tmp_path / name).write_text("#!/bin/sh\nexec /bin/sleep 600\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(status, "QUEUE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(status, "ACCOUNTING_TIMEOUT_S", 0.2)
    assert "squeue did not answer within 0.2 s" in status.status_of(run.root).scheduler.words


def test_the_complaint_of_a_command_of_slurm_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(tmp_path / "run")
    submit(run, "7")
    (tmp_path / "squeue").write_text(
        "#!/bin/sh\necho 'squeue: error: no such host' >&2; echo 'squeue: fatal: lost' >&2; exit 1\n"
    )
    (tmp_path / "squeue").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_CONF", raising=False)
    assert status.status_of(run.root).scheduler.words == "squeue failed: squeue: fatal: lost; SLURM_CONF is not set"


def test_a_submission_that_was_cut_off_is_noted(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = new_run(tmp_path / "run")
    submit(run, "7")
    cluster.jobs = {"7": ("RUNNING", "None")}
    (run.slurm / "profile-7" / NOTICE).touch()
    assert status.status_of(run.root).doubts == []
    (run.slurm / "train-lost").mkdir()
    (run.slurm / "train-lost" / NOTICE).touch()
    (doubt,) = status.status_of(run.root).doubts
    assert doubt.startswith("train-lost: ")


def test_whether_a_submission_was_cut_off_before_its_job_is_not_known_without_an_answer(
    tmp_path: Path, cluster: FakeSlurm
) -> None:
    run = new_run(tmp_path / "run")
    (run.slurm / "profile-lost").mkdir()
    (run.slurm / "profile-lost" / NOTICE).touch()
    run_status = status.status_of(run.root)
    assert (run_status.state, run_status.exit_code, run_status.scheduler.answered) == ("stopped", 3, True)
    assert "nothing is at work, unless a submission that was cut off succeeded" in run_status.words
    cluster.dead = True
    run_status = status.status_of(run.root)
    assert (run_status.state, run_status.exit_code, run_status.scheduler.answered) == ("unknown", 4, False)
    with run.locked():
        assert status.status_of(run.root).state == "running"


def test_another_clusters_slurm_is_not_believed(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = new_run(tmp_path / "run")
    submit(run, "7")
    run_status = status.status_of(run.root)
    assert run_status.state == "unknown"
    assert "another cluster's" in run_status.scheduler.words
    # without accounting a finished job leaves no trace
    cluster.accounted = None
    assert status.status_of(run.root).state == "over"


def test_a_number_that_was_another_users_job_before_is_not_charged(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = new_run(tmp_path / "run")
    submit(run, "7", "train")
    cluster.accounted = ["7|somebody-elses|COMPLETED|5000|9", "7|tula-cifar100-vgg11-train-abcdef|COMPLETED|1800|2"]
    cost = status.status_of(run.root).cost
    assert known(cost.train).node_hours == pytest.approx(1.0)


# ---- how jobs ended


def test_a_failure_is_shown_with_its_kind_its_last_line_and_its_log(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = new_run(tmp_path / "run")
    submit(run, "7", "train", label="main")
    log = run.slurm / "train-7" / "7_0_log.err"
    log.write_text("Traceback (most recent call last):\n  File x\nKeyError: 'the bug'\n")
    (run.slurm / "train-7" / "7_0_log.out").write_text("quiet\n")
    run.log_event("ended", "train", job_id="7", failure=Failure.BUG)
    run_status = status.status_of(run.root)
    assert (run_status.state, run_status.exit_code) == ("failed", 1)
    (failure,) = run_status.failures
    assert (failure.failure, failure.detail, failure.log_file) == (Failure.BUG, "KeyError: 'the bug'", str(log))
    assert "KeyError: 'the bug'" in text_of(run_status)
    assert str(log) in status_text(run_status)


def test_hosts_that_jobs_are_kept_off_are_shown_with_the_error_there(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = new_run(tmp_path / "run")
    submit(run, "7", "train", label="main")
    fields = {"failure": Failure.DEVICE_FAILED, "job_id": "7", "data": {"hosts": ["n2"]}}
    run.log_event("failed", "train", detail="CUDA error: an ECC error", **fields)
    run.log_event("ended", "train", **fields)
    run_status = status.status_of(run.root)
    assert [each.host for each in run_status.avoided] == ["n2"]
    assert "failed 7 train main: device failed: CUDA error: an ECC error" in text_of(run_status)
    assert "avoids n2 for 1 d more, where a device failed: CUDA error: an ECC error" in text_of(run_status)


CHATTER = "submitit INFO (2026-11-22 11:09:13,479) - Loading pickle: /run/7_submitted.pkl\n"
RAISED = "Traceback (most recent call last):\n  File x\n"


@pytest.mark.parametrize(
    ("logs", "named", "detail"),
    [
        ({"0_log.err": "", "0_log.out": CHATTER}, "0_log.err", "its log does not say why"),
        ({"0_log.err": "", "0_log.out": CHATTER, "1_log.err": "task 1: Killed\n"}, "1_log.err", "task 1: Killed"),
        ({"0_log.err": f"{RAISED}E: Broken pipe\n", "1_log.err": f"{RAISED}KeyError: 1\n"}, "1_log.err", "KeyError: 1"),
        ({"0_log.err": f"{RAISED}KeyError: 0\n", "1_log.err": f"{RAISED}KeyError: 1\n"}, "0_log.err", "KeyError: 0"),
        ({"0_log.err": "a warning\n", "0_log.out": CHATTER, "shell.out": "Killed\n"}, "shell.out", "Killed"),
    ],
)
def test_status_and_command_name_the_log_with_the_cause(
    tmp_path: Path, cluster: FakeSlurm, logs: dict[str, str], named: str, detail: str
) -> None:
    run = new_run(tmp_path / "run")
    submit(run, "7", "train", label="main")
    folder = run.slurm / "train-7"
    for name, text in logs.items():
        (folder / f"7_{name}").write_text(text)
    run.log_event("ended", "train", job_id="7", failure=Failure.KILLED)
    (failure,) = status.status_of(run.root).failures
    assert (Path(failure.log_file).name, failure.detail) == (f"7_{named}", detail)
    assert read_logs(Submitted("7", folder).log_files())[0] == Path(failure.log_file)


def test_a_jobs_own_report_of_its_end_goes_before_the_schedulers(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = new_run(tmp_path / "run")
    submit(run, "7", "train", label="main")
    run.log_event("oom", "train", job_id="7", failure=Failure.DEVICE_OOM, detail="N=2 b=64 (B=128)")
    run.log_event("ended", "train", job_id="7", failure=Failure.BUG)
    run.log_event("fell_back", "train", detail="out of memory at N=2 b=64 (B=128)")
    run_status = status.status_of(run.root)
    assert run_status.jobs[0].failure is Failure.DEVICE_OOM
    assert (run_status.state, run_status.exit_code) == ("stopped", 3), "the same command goes on with a smaller batch"
    submit(run, "8", "train", label="main")
    cluster.jobs = {"8": ("RUNNING", "None")}
    run_status = status.status_of(run.root)
    assert run_status.state == "running"
    assert run_status.training is not None
    assert (run_status.training.fallbacks, run_status.training.jobs) == (1, 2)
    assert run_status.failures == [], "a smaller batch made up for it"


def test_a_job_asks_for_a_requeue_in_vain_and_the_next_one_goes_on(tmp_path: Path, cluster: FakeSlurm) -> None:
    """Its own "failed" names no failure, because only the command decides about that."""
    run = new_run(tmp_path / "run")
    submit(run, "7", "train", label="main")
    run.log_event("failed", "train", job_id="7", detail="requeue refused: Requeue is disabled")
    cluster.accounted = None
    assert status.status_of(run.root).state == "over"
    submit(run, "8", "train", label="main")
    run_status = status.status_of(run.root)
    assert phases(run_status) == {"7": JobPhase.FAILED, "8": JobPhase.OVER}
    assert run_status.state == "over"


def test_profile_jobs_end_by_their_notes_events_or_records(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = new_run(tmp_path / "run")
    for job in ("1", "2", "3", "4", "5", "6"):
        submit(run, job)
    small, large = Configuration(1, 1, 32), Configuration(1, 1, 4096)
    died = measurement(Configuration(2, 1, 32), job_id="1", status="failed", failure=Failure.NODE_FAILED, detail="gone")
    append_record(run.profile / "a.jsonl", died)
    append_record(run.profile / "b.jsonl", measurement(small, job_id="2"))
    append_record(run.profile / "c.jsonl", oom(large).model_copy(update={"job_id": "3"}))
    for word in ("began", "ended"):
        append_record(run.profile / "d.notes", JobNote.model_validate({"note": word, "time": 5.0, "job_id": "4"}))
    append_record(run.profile / "b.notes", JobNote(note="ended", time=5.0, job_id="2"))
    append_record(run.profile / "e.notes", JobNote(note="began", time=5.0, job_id="5"))
    run.log_event("ended", "profile", job_id="6")
    cluster.jobs = {"5": ("RUNNING", "None"), "2": ("RUNNING", "None")}
    run_status = status.status_of(run.root)
    assert phases(run_status) == dict.fromkeys("2346", JobPhase.FINISHED) | {
        "1": JobPhase.FAILED,
        "5": JobPhase.RUNNING,
    }
    assert [job.job_id for job in run_status.failures] == ["1"]
    assert run_status.profile is not None
    assert (run_status.profile.measured, run_status.profile.out_of_memory, run_status.profile.failed) == (1, 1, 1)
    # a script takes too few steps of that batch
    left_out = measurement(Configuration(2, 1, 64), job_id="2", status="failed", steps=9, times=None)
    append_record(run.profile / "b.jsonl", left_out)
    after = status.status_of(run.root)
    assert (phases(after), after.profile) == (phases(run_status), run_status.profile)
    append_record(run.profile / "f.jsonl", measurement(Configuration(2, 1, 32), job_id="5"))
    assert status.status_of(run.root).failures == [], "it was measured after all"


def test_nothing_could_be_measured(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = new_run(tmp_path / "run")
    submit(run, "1")
    bad = measurement(Configuration(1, 1, 32), job_id="1", status="failed", failure=Failure.BUG, times=None)
    append_record(run.profile / "a.jsonl", bad)
    run.log_event("ended", "profile", job_id="1", failure=Failure.BUG)
    run_status = status.status_of(run.root)
    assert (run_status.state, run_status.exit_code) == ("failed", 1)


def test_a_search_that_was_narrowed_is_not_said_to_measure_more_than_the_most(
    tmp_path: Path, cluster: FakeSlurm
) -> None:
    run = new_run(tmp_path / "run")
    submit(run, "1")
    cluster.jobs = {"1": ("RUNNING", "")}
    append_record(run.profile / "a.jsonl", measurement(Configuration(1, 1, 32), job_id="1"))
    assert "1 of at most " in text_of(status.status_of(run.root))
    for batch in range(1, 31):
        append_record(run.profile / "a.jsonl", measurement(Configuration(1, 1, batch), job_id="1"))
    assert ": 31 configurations measured" in text_of(status.status_of(run.root))


# ---- detached sweeps


def detached(root: Path, cluster: FakeSlurm, alive: dict[str, tuple[str, str]]) -> RunDirectory:
    """Make a detached sweep with the profile job 7 and the controller 8."""
    run = new_run(root)
    cluster.accounted = None
    run.log_event("detached", "control", data={"until": "report"})
    submit(run, "7")
    submit(run, "8", "control", nodes=1)
    cluster.jobs = dict(alive)
    return run


def test_a_controller_will_act_on_what_is_over(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = detached(tmp_path / "run", cluster, {"8": ("PENDING", "Dependency")})
    # of the controller before it
    (run.root / ".lock").write_text("process 5 on another-host")
    run_status = status.status_of(run.root)
    assert (run_status.state, run_status.exit_code) == ("waiting", 0)
    assert "cannot be seen" not in text_of(run_status)
    assert "over, not yet acted on: controller job 8 will" in text_of(run_status)
    assert run_status.detached is not None
    assert (run_status.detached.job_id, run_status.detached.until) == ("8", "report")
    run.log_event("ended", "control", job_id="8", data={"taken_over": True})
    assert status.status_of(run.root).detached is None
    run.log_event("detached", "control", data={"until": "plan"})
    assert status.status_of(run.root).detached is not None


def test_where_the_controllers_are_over_the_jobs_that_run_need_the_command(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = detached(tmp_path / "run", cluster, {"7": ("RUNNING", "")})
    (run.root / ".lock").write_text("process 5 on another-host")
    run_status = status.status_of(run.root)
    assert run_status.state == "running"
    assert "whether it is at work cannot be seen from this machine" in text_of(run_status)
    assert "its controller jobs are over, and no command waits for its end: run the same command" in run_status.words


def test_a_controller_that_vanished_leaves_a_sweep_that_must_be_started_again(
    tmp_path: Path, cluster: FakeSlurm
) -> None:
    run = new_run(tmp_path / "run")
    cluster.accounted = None
    run.log_event("detached", "control", data={"until": "report"})
    submit(run, "8", "control", nodes=1)
    run_status = status.status_of(run.root)
    assert (run_status.state, run_status.exit_code) == ("over", 3)
    assert "run the same command again" in run_status.words


@pytest.mark.parametrize(
    ("controller", "acting", "words"),
    [
        (("PENDING", "Dependency"), "8", "waiting in case the controller job is killed"),
        (("RUNNING", ""), "8", "waiting in case the controller job is killed"),
        (None, "9", "over, not yet acted on: controller job 9 will"),
    ],
)
def test_a_guard_is_distinguished_and_counts_where_its_controller_is_gone(
    tmp_path: Path, cluster: FakeSlurm, controller: tuple[str, str] | None, acting: str, words: str
) -> None:
    run = new_run(tmp_path / "run")
    cluster.accounted = None
    run.log_event("detached", "control", data={"until": "report"})
    submit(run, "7")
    submit(run, "8", "control", nodes=1)
    submit(run, "9", "control", nodes=1, role="guard")
    cluster.jobs = {"9": ("PENDING", "Dependency"), **({"8": controller} if controller else {})}
    run_status = status.status_of(run.root)
    assert run_status.state in ("waiting", "running")
    assert known(run_status.detached).job_id == acting
    assert words in text_of(run_status)
    assert re.search(r"^\S*\s+9 +guard +1 node", status_text(run_status), re.MULTILINE)


def test_a_controller_that_failed_says_why_and_its_guard_does_not_hide_it(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = new_run(tmp_path / "run")
    run.log_event("detached", "control", data={"until": "report"})
    submit(run, "8", "control", nodes=1)
    submit(run, "9", "control", nodes=1, role="guard")
    run.log_event("ended", "control", job_id="9")
    run.log_event("ended", "control", job_id="8", failure=Failure.BUG, detail="plan: too little data")
    run_status = status.status_of(run.root)
    assert (run_status.state, run_status.exit_code) == ("failed", 1)
    assert "too little data" in run_status.words


# ---- commands that ended


def profiled(root: Path) -> RunDirectory:
    """Make a run whose profile job has measured something and is over."""
    run = new_run(root)
    submit(run, "7")
    append_record(run.profile / "a.jsonl", measurement(Configuration(1, 1, 32), job_id="7"))
    run.log_event("ended", "profile", job_id="7")
    return run


def test_the_failure_of_planning_is_shown_until_there_is_a_plan(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = profiled(tmp_path / "run")
    run.log_event("failed", "plan", detail="plan: no candidate satisfies objective.budget\nmore")
    run_status = status.status_of(run.root)
    assert " jobs 1 job, over " in text_of(run_status)
    assert (run_status.state, run_status.exit_code) == ("failed", 1)
    assert "failed: plan: no candidate satisfies objective.budget; fix" in text_of(run_status)
    assert known(run_status.profile).stand == "done"
    write_plan(run, late_plan())
    assert status.status_of(run.root).state == "stopped"


@pytest.mark.parametrize("stage", ["profile", "train", "control"])
def test_a_refusal_of_the_scheduler_is_shown_where_no_earlier_job_goes_on(
    tmp_path: Path, cluster: FakeSlurm, stage: str
) -> None:
    run = new_run(tmp_path / "run")
    refusal = f"{stage}: the scheduler refused the job: sbatch: error: Invalid feature specification"
    run.log_event("failed", stage, detail=refusal)
    run_status = status.status_of(run.root)
    assert (run_status.state, run_status.exit_code) == ("failed", 1)
    assert run_status.words == f"{refusal}; fix the cause and run the same command again"
    submit(run, "7")
    run.log_event("failed", stage, detail=refusal)
    cluster.jobs = {"7": ("RUNNING", "None")}
    assert status.status_of(run.root).state == "running"
    cluster.dead = True
    assert status.status_of(run.root).state == "unknown"
    cluster.dead, cluster.jobs, cluster.accounted = False, {}, None
    assert status.status_of(run.root).state == "failed"


def test_a_full_disk_is_shown_before_what_to_run_again(
    tmp_path: Path, cluster: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = profiled(tmp_path / "run")
    submit(run, "8")
    cluster.accounted = None
    assert status.status_of(run.root).state == "over"
    monkeypatch.setattr(run_facts, "has_no_room", lambda _: True)
    run_status = status.status_of(run.root)
    assert (run_status.state, run_status.exit_code) == ("failed", 1)
    assert run_status.words == f"{run.root}: no space is left; make space there and run the same command again"


def test_a_failure_that_a_later_job_made_up_for_is_not_shown(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = profiled(tmp_path / "run")
    run.log_event("failed", "plan", detail="too little data")
    submit(run, "8")
    run.log_event("ended", "profile", job_id="8")
    assert "too little data" not in text_of(status.status_of(run.root))


@pytest.mark.parametrize("stage", ["profile", "plan"])
def test_a_command_that_was_not_to_go_further_is_shown_as_ended(
    tmp_path: Path, cluster: FakeSlurm, stage: Literal["profile", "plan"]
) -> None:
    run = profiled(tmp_path / "run")
    if stage == "plan":
        write_plan(run, late_plan())
    assert status.status_of(run.root).state == "stopped"
    run.log_event("ended", stage)
    run_status = status.status_of(run.root)
    assert (run_status.state, run_status.exit_code) == ("finished", 0)
    assert "which was to be the last stage" in run_status.words
    assert "not going on" not in text_of(run_status)
    submit(run, "9", "train", nodes=1)
    assert status.status_of(run.root).state != "finished"


# ---- the command, and local runs

HOLD = """
import sys, time
from pathlib import Path
from tula_hpc.records import RunDirectory
with RunDirectory(Path(sys.argv[1])).locked():
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_measurement_that_is_damaged_later_is_named_and_nothing_is_finished(
    tmp_path: Path, cluster: FakeSlurm
) -> None:
    run = profiled(tmp_path / "run")
    file = run.profile / "a.jsonl"
    with file.open("a") as lines:
        lines.write("{torn\n")
    # the clock of events is not changed by corrections of the system's clock
    earlier = time.time() - 60
    os.utime(file, (earlier, earlier))
    run.log_event("ended", "profile")
    run_status = status.status_of(run.root)
    damage = "is damaged (Invalid JSON: key must be a string at line 1 column 2) and was skipped"
    assert (run_status.state, run_status.doubts) == ("finished", [f"{file}, line 2: {damage}"])
    later = time.time() + 60
    file.write_text("{torn\n")
    os.utime(file, (later, later))
    run_status = status.status_of(run.root)
    assert (run_status.state, run_status.exit_code) == ("stopped", 3)
    assert run_status.words == f"{file}, line 1: {damage}: run the same command again to measure it again"


def test_events_that_are_damaged_are_reported(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = profiled(tmp_path / "run")
    run.events_file.write_text("garbage\n" * 5)
    *named, others = status.status_of(run.root).doubts
    assert [words.partition(": is damaged (")[0] for words in named] == [
        f"{run.events_file}, line {n}" for n in (1, 2, 3)
    ]
    assert others == f"{run.events_file}: 2 more damaged lines were skipped"


@contextmanager
def another_command(run: RunDirectory) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLD, str(run.root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert known(process.stdout).readline() == "locked\n"
        yield process
        process.communicate()


def test_the_command_at_work_is_named_while_it_is_and_nobody_is_ever_refused_for_the_asking(
    tmp_path: Path, cluster: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(tmp_path / "run")
    monkeypatch.setattr(fcntl, "flock", lambda *_: pytest.fail("a probe that locks may get in a command's way"))
    with another_command(run) as process:
        run_status = status.status_of(run.root)
        assert (run_status.command.process, run_status.command.alive, run_status.state) == (
            process.pid,
            True,
            "running",
        )
        assert f"a command is at work: process {process.pid} on {os.uname().nodename}" in text_of(run_status)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        stopped = status.status_of(run.root)
        assert stopped.words.startswith("a command holds the run but is stopped, as by Ctrl-Z: nothing goes on")
        assert f"is stopped, as by Ctrl-Z: continue it with fg in its terminal, or with kill -CONT {process.pid}" in (
            " ".join(text_of(stopped).split())
        )
        process.send_signal(signal.SIGCONT)
    run_status = status.status_of(run.root)
    assert (run_status.command.process, run_status.command.alive) == (process.pid, False)


def test_a_lock_that_only_the_file_server_knows_of_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS turns flock into such a lock, which F_GETLK of another client sees; here a process holds one."""
    path = tmp_path / ".lock"
    path.write_text("process 17 on elsewhere")
    hold = "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, 2); print(1, flush=True); sys.stdin.read()"
    unlisted = tmp_path / "locks"
    unlisted.touch()
    monkeypatch.setattr("tula_hpc.records.run_directory.KERNELS_LIST", unlisted)
    assert holder_of(path).alive is None, "another machine's process cannot be seen"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        known(process.stdout).readline()
        assert holder_of(path).alive is True
        process.communicate()


def test_a_local_job_is_alive_as_long_as_its_own_process_is(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", executor="local")
    folder = "train-20250101-000000-abcdef"
    process = subprocess.Popen([sys.executable, "-c", "input()", "local_controller", folder], stdin=subprocess.PIPE)
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    for each, name in ((process, folder), (stranger, "train-other")):
        data = {"folder": f"slurm/{name}", "nodes": 1, "label": name}
        run.log_event("submitted", "train", job_id=str(each.pid), data=data)
    run_status = status.status_of(run.root)
    for each in (process, stranger):
        each.communicate()
    assert phases(run_status) == {str(process.pid): JobPhase.RUNNING, str(stranger.pid): JobPhase.OVER}
    assert "no command waits for its end" in run_status.words
    assert phases(status.status_of(run.root))[str(process.pid)] is JobPhase.OVER


def test_jobs_of_another_machine_cannot_be_seen(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", executor="local")
    submit(run, str(os.getpid()), "train")
    (run.root / ".lock").write_text("process 5 on another-host")
    run_status = status.status_of(run.root)
    assert run_status.state == "unknown"
    assert "another-host" in run_status.scheduler.words
    assert run_status.command.alive is None


def test_a_command_that_another_machine_may_have_is_not_said_to_be_none(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = make_run(tmp_path / "run", epochs_done=5)
    submit(run, "30", "train")
    cluster.jobs = {"30": ("RUNNING", "None")}
    assert "no command waits for its end" in status.status_of(run.root).words
    (run.root / ".lock").write_text("process 5 on another-host")
    words = status.status_of(run.root).words
    assert "process 5 on another-host, which is not seen from here, may wait for its end; if not, run the" in words


def test_nothing_is_written_and_no_right_to_write_is_needed(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = make_run(tmp_path / "run", epochs_done=5)
    submit(run, "30", "train")
    (run.root / ".lock").write_text("process 5 on another-host")
    paths = [run.root, *run.root.rglob("*")]
    for path in paths:
        path.chmod(0o500 if path.is_dir() else 0o400)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in [run.root, *run.root.rglob("*")]}
    status_text(status.status_of(run.root))
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in [run.root, *run.root.rglob("*")]} == before
    for path in paths:
        path.chmod(0o700)


# ---- trainings


def log_steps(run: RunDirectory, steps: int, *, batch: int = 100, step_time_s: float = 0.5) -> None:
    """Log steps of a data set of a thousand samples."""
    path = run.train().metrics_file
    path.parent.mkdir(parents=True, exist_ok=True)
    for step in range(1, steps + 1):
        seen = step * batch
        line = StepMetrics(step=step, samples_seen=seen, epoch=seen / 1000, loss=1.0, lr=0.1, step_time_s=step_time_s)
        append_record(path, line, durable=False)


def test_a_training_whose_files_were_moved_away_is_to_begin_anew(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = make_run(tmp_path / "run")
    submit(run, "30", "train", label="main")
    run.log_event("finished", "train", job_id="30", data={"label": "main"})
    run.log_event("ended", "train", job_id="30")
    assert status.status_of(run.root).training is not None
    (run.root / "train").rename(run.root / "trained before")
    run_status = status.status_of(run.root)
    assert (run_status.state, run_status.training) == ("stopped", None)
    assert run_status.words == "planned; nothing is at work: run the same command again to go on"


def test_no_time_is_told_for_a_training_without_steps_left(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = new_run(tmp_path / "run")
    submit(run, "30", "train")
    log_steps(run, 10 * 20)
    training = known(status.status_of(run.root).training)
    assert training.left_s == 0
    assert "of steps left" not in text_of(status.status_of(run.root))


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_training_that_failed_is_shown_with_what_is_left_of_it(
    tmp_path: Path, cluster: FakeSlurm, is_saved: bool
) -> None:
    run = make_run(tmp_path / "run", epochs_done=5)
    submit(run, "30", "train")
    if is_saved:
        run.train().checkpoints.mkdir()
        (run.train().checkpoints / "checkpoint-r0000-000000000001.tula").touch()
    run.log_event("ended", "train", job_id="30", failure=Failure.CANCELLED)
    run_status = status.status_of(run.root)
    assert run_status.training is not None
    assert run_status.training.starts_over is not is_saved
    assert (run_status.training.left_s is None) is not is_saved
    how = " to go on from the last save" if is_saved else ", which trains from the start"
    assert run_status.words.endswith(f"; run the same command again{how}")
    submit(run, "31", "train")
    cluster.jobs = {"31": ("PENDING", "Priority")}
    waits = known(status.status_of(run.root).training)
    assert (waits.stand, waits.epoch > 0) == ("waiting", is_saved)


def test_work_that_was_lost_at_a_kill_is_not_shown_as_done(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = new_run(tmp_path / "run")
    log_steps(run, 20, batch=100)
    run.train().checkpoints.mkdir()
    (run.train().checkpoints / "checkpoint-r0000-000000001500.tula").touch()
    submit(run, "30", "train", label="main")

    def progress(state: str) -> tuple[float, int, int, float | None]:
        cluster.jobs = {"30": (state, "None")}
        training = known(status.status_of(run.root).training)
        return training.epoch, training.step, training.samples_seen, training.left_s

    # the sweep trains 20 epochs of a thousand samples
    as_logged = (2.0, 20, 2000, 180 * 0.5)
    as_saved = (1.5, 15, 1500, 185 * 0.5)
    assert progress("RUNNING") == as_logged
    assert progress("PENDING") == as_saved
    data = {"label": "main", "samples_seen": 1500, "step": 15, "began_at": time.time() + 1.0}
    run.log_event("resumed", "train", job_id="30", data=data)
    assert progress("RUNNING") == as_saved
    log_steps(run, 1)
    os.utime(run.train().metrics_file, (time.time() + 2.0,) * 2)
    assert progress("RUNNING")[1] == 1


@pytest.mark.parametrize(("accuracy", "notes"), [(0.5, 0), (None, 1)])
def test_a_score_that_was_asked_for_and_never_came_is_noted(tmp_path: Path, accuracy: float | None, notes: int) -> None:
    run = make_run(tmp_path / "run")
    script = {"script": "/gone/train.py", "arguments": ["{local_batch}"], "samples": 640, "epochs": 3}
    workload = SweepSpec.model_validate({"name": "x"}).workload.model_copy(
        update={**script, "script": Path("/gone/train.py"), "metric": "acc (?P<test_accuracy>.*)"}
    )
    facts = read_facts(run)
    spec = known(facts.spec).model_copy(update={"workload": workload})
    training = facts.trainings["main"]
    result = known(training.result).model_copy(update={"test_accuracy": accuracy, "test_loss": None})
    assert len(run_facts._without_scores(spec, training._replace(result=result))) == notes


def test_a_score_that_comes_late_is_that_of_the_epoch_before(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", epochs_done=5)
    last = read_metrics(run.train().metrics_file).epochs[-1]
    late = last.model_copy(update={"epoch": 6, "test_accuracy": None, "test_loss": None})
    append_record(run.train().metrics_file, late)
    training = known(describe(read_facts(run), Answer({})).training)
    assert (training.test_epoch, training.test_accuracy) == (5, last.test_accuracy)
    assert "no score" not in text_of(describe(read_facts(run), Answer({})))


@settings(max_examples=12)
@given(steps=st.integers(1, 25), batch=st.sampled_from([10, 100]), step_time_s=st.floats(0.01, 10))
def test_the_time_left_is_that_of_the_samples_left_at_the_present_pace(
    tmp_path_factory: pytest.TempPathFactory, steps: int, batch: int, step_time_s: float
) -> None:
    run = new_run(tmp_path_factory.mktemp("run"))
    log_steps(run, steps, batch=batch, step_time_s=step_time_s)
    training = known(describe(read_facts(run), Answer({})).training)
    assert training.global_batch == batch
    # the sweep trains 20 epochs
    left = 20 * 1000 - steps * batch
    assert training.left_s == pytest.approx(max(0, left) / batch * step_time_s)
    assert training.share == pytest.approx(min(1.0, steps * batch / 20_000))


def test_after_a_fallback_the_pace_is_that_of_the_smaller_batch(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    log_steps(run, 5, batch=200)
    for step, seen in ((6, 1050), (7, 1100)):
        line = StepMetrics(step=step, samples_seen=seen, epoch=seen / 1000, loss=1.0, lr=0.1, step_time_s=0.5)
        append_record(run.train().metrics_file, line)
    training = known(describe(read_facts(run), Answer({})).training)
    assert training.global_batch == 50


@pytest.mark.parametrize(("seen", "batch"), [(1180, 100), (1090, 45)])
def test_an_epochs_shorter_last_batch_is_no_smaller_batch(tmp_path: Path, seen: int, batch: int) -> None:
    run = make_run(tmp_path / "run", epochs_done=1)
    last = read_metrics(run.train().metrics_file)
    row = last.epochs[-1].model_copy(update={"global_batch": 100})
    append_record(run.train().metrics_file, row)
    for step, samples in ((10, 1000), (12, seen)):
        line = last.steps[-1].model_copy(update={"step": step, "samples_seen": samples})
        append_record(run.train().metrics_file, line)
    training = known(describe(read_facts(run), Answer({})).training)
    assert training.global_batch == batch


def test_a_training_under_way_is_shown_with_all_its_marks(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = make_run(tmp_path / "run", epochs_done=5)
    submit(run, "30", "train")
    cluster.jobs = {"30": ("RUNNING", "None")}
    checkpoints = run.train().checkpoints
    checkpoints.mkdir()
    for name, age_s in (("checkpoint-r0000-000000000001.tula", 600), ("checkpoint-r0000-000000000002.tula", 120)):
        (checkpoints / name).touch()
        os.utime(checkpoints / name, (time.time() - age_s,) * 2)
    run.log_event("resumed", "train", job_id="30", data={"passed_over": "x.tula: is truncated"})
    run.log_event("drifted", "train", job_id="30", data={"ratio": 1.31, "part": "network"})
    run_status = status.status_of(run.root)
    training = known(run_status.training)
    assert (training.stand, training.restarts, training.test_epoch) == ("running", 2, 5)
    assert training.checkpoint_age_s == pytest.approx(120, abs=30)
    assert 0 < (training.share or 0) < 0.25
    cluster.jobs = {"30": ("PENDING", "Priority")}
    assert known(status.status_of(run.root).training).drift == "", "a job that waits takes no steps"
    cluster.jobs = {"30": ("RUNNING", "None")}
    run.log_event("drifted", "train", job_id="30", data={"of": "another release"})
    assert status.status_of(run.root).training is not None
    text = text_of(run_status)
    marks = (
        "2 restarts",
        "2 min",
        "test accuracy",
        "after epoch 5",
        "1.31 × the prediction (network)",
        "left",
        "x.tula: is",
    )
    assert [words for words in marks if words not in text] == []


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(0, 60), max_size=30), block=st.integers(1, 200), torn=st.booleans())
def test_the_tail_of_the_metrics_is_that_of_the_whole_file(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], block: int, torn: bool
) -> None:
    path = tmp_path_factory.mktemp("tail") / "metrics.jsonl"
    lines = [b"x" * size for size in sizes]
    path.write_bytes(b"\n".join(lines) + (b"" if torn else b"\n"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_facts, "BLOCK_BYTES", block)
        assert [line for line in run_facts._lines_from_end(path) if line] == [line for line in lines[::-1] if line]


def test_the_tail_holds_the_last_lines_of_each_kind_and_skips_torn_ones(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    log_steps(run, 30)
    path = run.train().metrics_file
    common = {"train_loss": 1.0, "test_loss": 1.0, "test_top5_accuracy": 1.0, "epoch_time_s": 1.0, "steps": 10}
    for epoch in (1, 2):
        line = EpochMetrics(epoch=epoch, step=30, samples_seen=1, global_batch=100, test_accuracy=epoch / 10, **common)
        append_record(path, line)
    with path.open("a") as file:
        file.write('{"kind":"step","step":3')
    tail = read_tail(path)
    assert [row.step for row in tail.steps] == list(range(11, 31))
    assert known(tail.epoch).epoch == 2
    # as of a script, whose scores are read some epochs later
    for epoch in (3, 3, 4, 4, 5, 5):
        unscored = {**common, "epoch": epoch, "train_loss": None, "test_loss": None, "test_top5_accuracy": None}
        append_record(path, EpochMetrics(step=30, samples_seen=1, global_batch=100, test_accuracy=None, **unscored))
    assert known(read_tail(path).epoch).epoch == 2


# ---- studies


@settings(max_examples=8)
@given(st.lists(st.sampled_from(["none", "finished", "running", "waiting", "failed", "over"]), min_size=4, max_size=4))
def test_every_cell_of_a_study_is_counted_once(tmp_path_factory: pytest.TempPathFactory, stands: list[str]) -> None:
    tables: dict[str, object] = {
        "name": "s",
        "study": {"methods": ["lbt"], "batches": [256, 512], "seeds": [0, 1], "small_batch": 0},
    }
    spec = SweepSpec.model_validate(tables)
    run = make_study(tmp_path_factory.mktemp("study"), tables, lambda cell: None)
    write_atomically(run.cluster_file, CLUSTER_TOML)
    active: dict[str, JobState] = {}
    for number, (cell, stand) in enumerate(zip(known(spec.study).cells(), stands, strict=True)):
        if stand != "finished":
            run.train(cell.label).result_file.unlink()
        if stand != "none":
            submit(run, str(number), "train", label=cell.label)
        if stand == "failed":
            run.log_event("failed", "train", job_id=str(number), failure=Failure.HOST_OOM, detail="oom-kill")
        if stand in ("running", "waiting"):
            active[str(number)] = JobState("RUNNING" if stand == "running" else "PENDING", "Priority")
    message = describe(read_facts(run), Answer(active))
    study = known(message.study)
    counted = (study.diverged, study.running, study.waiting, study.failed, study.left)
    expected = [stands.count(stand) for stand in ("finished", "running", "waiting", "failed")]
    assert counted == (*expected, stands.count("none") + stands.count("over"))
    assert sum(counted) == study.cells == 4
    assert (message.exit_code == 1) == (study.failed > 0)
    assert (message.state == "finished") == (stands.count("finished") == 4)
    assert len(study.failures) == study.failed
    assert message.doubts == []


@pytest.mark.parametrize(
    ("failure", "allowed"),
    [(Failure.BUG, STUDY_ATTEMPTS), (Failure.KILLED, STUDY_ATTEMPTS), (Failure.PREEMPTED, 2), (Failure.HOST_OOM, 1)],
)
def test_a_training_that_is_tried_again_has_not_failed_for_good(
    tmp_path: Path, cluster: FakeSlurm, failure: Failure, allowed: int
) -> None:
    run = make_study(tmp_path / "run", {**SWEEP, "training": {"max_requeues": 1}}, lambda cell: None)
    write_atomically(run.cluster_file, CLUSTER_TOML)
    label = "study/lbt-b256-s0"
    run.train(label).result_file.unlink()

    def fail(job_id: str) -> None:
        submit(run, job_id, "train", label=label)
        run.log_event("failed", "train", job_id=job_id, failure=failure, detail="x", data={"label": label})

    # from an earlier command
    fail("9")
    time.sleep(0.05)
    with run.locked():
        for attempt in range(1, allowed + 1):
            fail(str(attempt))
            study = known(status.status_of(run.root).study)
            assert study.failed == int(attempt == allowed)
    assert status.main([str(run.root)]) == 1


# ---- cost

PART = "[[partitions]]\npartition = '{}'\npricing = {{tres_weights = 'CPU={},GRES/gpu=100'}}\n"


def test_every_run_of_a_requeued_job_is_paid_for(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = new_run(tmp_path / "run")
    submit(run, "7", "train")
    cluster.jobs = {"7": ("RUNNING", "None")}
    name = "tula-cifar100-vgg11-train-abcdef"
    cluster.accounted = [f"7|{name}|PREEMPTED|3600|2", f"7|{name}|RUNNING|1800|2"]
    cost = status.status_of(run.root).cost
    assert cost.train is not None
    assert cost.train.source == "sacct"
    assert cost.train.node_hours == pytest.approx(3.0)
    assert cost.cost == pytest.approx(3.0 * 2.48), "the cluster file's price"
    assert cost.node_hours == pytest.approx(3.0)


def test_accounting_that_lacks_a_job_of_the_training_is_not_the_whole_cost(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = new_run(tmp_path / "run")
    for job_id in ("7", "8"):
        submit(run, job_id, "train")
        run.log_event("ended", "train", job_id=job_id, failure=Failure.PREEMPTED)
    run.make_train()
    step = StepMetrics(step=9, samples_seen=9, epoch=0.1, loss=1.0, lr=0.1, step_time_s=99.0)
    append_record(run.train("main").metrics_file, step)
    told = ["7|tula-cifar100-vgg11-train-abcdef|PREEMPTED|3600|2", "8|tula-cifar100-vgg11-train-abcdef|PREEMPTED|60|2"]
    for accounted, source in ((told, "sacct"), (told[1:], "steps")):
        cluster.accounted = accounted
        cost = known(status.status_of(run.root).cost.train)
        assert cost.source == source


def test_profiling_is_paid_until_now_while_it_runs(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = new_run(tmp_path / "run")
    now = time.time()
    submit(run, "7")
    for note, at in (("began", now - 900), ("ready", now - 750)):
        fields = {"note": note, "time": at, "job_id": "7", "allocated_nodes": 4, "began_at": now - 900}
        append_record(run.profile / "a.notes", JobNote.model_validate(fields))
    cluster.jobs = {"7": ("RUNNING", "None")}
    running = known(status.status_of(run.root).cost.profile)
    assert running.source == "notes"
    assert running.node_hours == pytest.approx(1.0, rel=0.02)
    cluster.jobs, cluster.accounted = {}, None
    over = known(status.status_of(run.root).cost.profile)
    assert over.node_hours == pytest.approx(4 * 150 / 3600, rel=0.02), "the job counts until its last note"


def test_profiling_costs_what_accounting_says_where_it_has_every_job(tmp_path: Path, cluster: FakeSlurm) -> None:
    """It also counts the seconds in which a job ends, which no job can note itself."""
    run = new_run(tmp_path / "run")
    for job in ("7", "8"):
        submit(run, job)
        for note, at in (("began", 1000.0), ("ready", 1010.0), ("ended", 1900.0)):
            fields = {"note": note, "time": at, "job_id": job, "allocated_nodes": 1, "began_at": 1000.0}
            append_record(run.profile / f"{job}.notes", JobNote.model_validate(fields))
    cluster.accounted = ["7|tula-cifar100-vgg11-profile-abc|COMPLETED|1000|1"]
    part = known(status.status_of(run.root).cost.profile)
    assert part.source == "notes"
    assert part.node_hours == pytest.approx(0.5)
    cluster.accounted.append("8|tula-cifar100-vgg11-profile-def|COMPLETED|800|1")
    whole = known(status.status_of(run.root).cost.profile)
    assert whole.source == "sacct"
    assert whole.node_hours == pytest.approx(0.5)
    assert whole.queue_s is not None
    cluster.accounted[1] = cluster.accounted[1].replace("800", "1200")
    more = known(status.status_of(run.root).cost.profile)
    assert more.node_hours == pytest.approx(2200 / 3600)


def test_a_clock_that_was_set_makes_no_job_longer_than_its_limit(tmp_path: Path) -> None:
    """The command and its job are two processes, whose clocks may differ by years."""
    run = new_run(tmp_path / "run", executor="local")
    submit(run, "7", "train", nodes=2)
    years_later = {"time": time.time() + 1e8, "event": "finished", "stage": "train", "job_id": "7"}
    append_record(run.events_file, Event.model_validate(years_later))
    cost = status.status_of(run.root).cost
    assert cost.train is not None
    cluster = load_cluster(run.cluster_file)
    assert cost.train.node_hours == pytest.approx(2 * cluster.train_minutes / 60)
    assert cost.cost == pytest.approx(cost.train.node_hours * cluster.pricing.usd_per_node_hour)


def test_a_training_on_this_machine_that_its_limit_has_ended_costs_all_of_its_runs(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", executor="local")
    limit_s = 60 * load_cluster(run.cluster_file).train_minutes
    data = {"label": "main", "nodes": 2}
    ends = [("submitted", 0.0, data), ("preempted", limit_s, {}), ("resumed", limit_s + 60, {"samples_seen": 64})]
    for event, at, fields in [*ends, ("finished", 1.5 * limit_s, {})]:
        place = {"event": event, "stage": "train", "job_id": "7", "data": fields}
        append_record(run.events_file, Event.model_validate({"time": 1e9 + at, **place}))
    cost = status.status_of(run.root).cost
    assert known(cost.train).node_hours == pytest.approx(2 * 1.5 * limit_s / 3600)


def test_without_accounting_training_is_estimated_and_called_so(tmp_path: Path, cluster: FakeSlurm) -> None:
    cluster.accounted = None
    run = new_run(tmp_path / "run")
    submit(run, "7", "train", nodes=3)
    log_steps(run, 100, step_time_s=2.0)
    run_status = status.status_of(run.root)
    assert known(run_status.cost.train).node_hours == pytest.approx(3 * 100 * 2.0 / 3600)
    assert "an estimate" in text_of(run_status)


@pytest.mark.parametrize(
    ("partitions", "there", "price"),
    [
        ("", "partition = 'gpu'\ncontroller_partition = 'cpu'", 1.0),
        ("", "partition = 'gpu'\nmemory_gb = 64.0\ncontroller_memory_gb = 2.0", 1.0 + 2 * 0.5),
        (f"{PART.format('gpu', 3)}{PART.format('cpu', 2)}", "", 3.0),
        (f"{PART.format('gpu', 3)}{PART.format('cpu', 2)}", "controller_partition = 'cpu'", 2.0),
    ],
)
def test_a_controller_costs_what_its_one_core_does_and_no_whole_node(
    tmp_path: Path, cluster: FakeSlurm, partitions: str, there: str, price: float
) -> None:
    run = new_run(tmp_path / "run")
    prices = "[pricing]\nbasis = 'tres'\ntres_weights = 'CPU=1,Mem=0.5G,GRES/gpu=100'\nnode_gpus = 8\nnode_cpus = 64\n"
    node = "name = 'g'\nexecutor = 'slurm'\ndevice = 'cuda'\ngres = 'gpu:8'\nworkers_per_node = 8\n"
    write_atomically(run.cluster_file, f"{node}{there}\n{prices}{partitions}")
    submit(run, "8", "control", nodes=1)
    cluster.accounted = ["8|tula-cifar100-vgg11-control|COMPLETED|3600|1"]
    control = known(status.status_of(run.root).cost.control)
    assert control.node_hours == pytest.approx(1.0)
    assert control.cost == pytest.approx(price)


def run_on_this_machine(root: Path) -> RunDirectory:
    run = make_run(root)
    write_atomically(run.cluster_file, CLUSTER_TOML.replace('"slurm"', '"local"'))
    return run


def test_a_training_on_this_machine_has_one_cost_whenever_its_end_is_noticed(tmp_path: Path) -> None:
    run = run_on_this_machine(tmp_path / "run")
    common = {"stage": "train", "job_id": "7", "data": {"label": "main"}}
    begun = time.time() - 86_400.0
    events = [Event(time=begun, event="submitted", **common), Event(time=begun + 1800, event="finished", **common)]
    write_events(run, [*events, Event(time=begun + 80_000, event="ended", **common)])
    shown = status.status_of(run.root)
    assert shown.promise is not None
    assert shown.cost.train is not None
    assert shown.cost.train.source == shown.promise.told_by == "notes"
    nodes = run.read_plan().chosen.nodes
    assert train_hours(run) == pytest.approx(nodes * shown.promise.actual_s / 3600)
    # as for a training of a study
    run.plan_file.unlink()
    assert train_hours(run) == pytest.approx(1800 / 3600)


def test_the_age_of_a_copy_costs_nothing(tmp_path: Path) -> None:
    run = run_on_this_machine(tmp_path / "run")
    # without it there is only an estimate
    run.plan_file.unlink()
    day_s = 86_400.0
    begun = time.time() - 3 * day_s
    common = {"stage": "train", "job_id": "7"}
    events = [Event(time=begun, event="submitted", data={"nodes": 2}, **common)]
    write_events(run, events)
    result = known(read_facts(run).trainings["main"].result)
    assert train_hours(run) == pytest.approx(2 * result.wall_time_s / 3600), "only the result shows it"
    events += [Event(time=begun + 1800, event="finished", **common), Event(time=begun + 1810, event="ended", **common)]
    write_events(run, events)
    assert train_hours(run) == pytest.approx(2 * 1800 / 3600)
    shutil.copytree(run.root, tmp_path / "copy")
    os.utime(RunDirectory(tmp_path / "copy").train().metrics_file)
    assert train_hours(RunDirectory(tmp_path / "copy")) == pytest.approx(2 * 1800 / 3600)


def write_events(run: RunDirectory, events: Sequence[Event]) -> None:
    run.events_file.write_text("".join(f"{event.model_dump_json()}\n" for event in events))


def train_hours(run: RunDirectory) -> float:
    cost = known(status.status_of(run.root).cost.train)
    return cost.node_hours


def test_the_time_shown_with_the_planned_cost_is_the_whole_time(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = make_run(tmp_path / "run", stage="plan")
    made = run.read_plan()
    write_plan(run, made.model_copy(update={"chosen": made.chosen.model_copy(update={"wall_time_s": 36_000.0})}))
    assert "10 h and " in text_of(status.status_of(run.root))


def test_a_training_that_ended_is_compared_with_its_plan(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = make_run(tmp_path / "run")
    made = run.read_plan()
    interval = {"wall_time_s": (3_400.0, 3_800.0), "cost": (4.0, 12.0)}
    chosen = made.chosen.model_copy(update={"wall_time_s": 3_600.0, "cost": 8.0, "interval_90": interval})
    write_plan(run, made.model_copy(update={"chosen": chosen, "candidates": [chosen]}))
    by_notes = known(status.status_of(run.root).promise)
    assert (by_notes.told_by, by_notes.expected_s) == ("notes", 3_600.0)
    run.log_event("submitted", "train", job_id="21", data={"label": "main"})
    ids = [job.job_id for job in run.history().submissions("train") if job.label == "main"]
    for job_id, seconds in zip(ids, [5_400.0, *[0.0] * len(ids)], strict=False):
        fields = {"job_id": job_id, "stage": "train", "state": "COMPLETED", "over": True, "nodes": chosen.nodes}
        append_record(run.accounting_file, JobAccount.model_validate({**fields, "elapsed_s": seconds}))
    run_status = status.status_of(run.root)
    assert run_status.promise is not None
    assert (run_status.promise.actual_s, run_status.promise.verdict, run_status.promise.paid) == (5_400.0, "more", 12.0)
    text = re.sub(r"\s+", " ", text_of(run_status))
    assert "actual took 1 h 30 min, longer than the predicted 57 min to 1 h 3 min (90 %; expected 1 h)" in text
    assert "cost 12.00 USD (predicted: 8.0 USD); by accounting" in text
    assert "and 8.0 USD in all" in text, "one prediction has the same digits on both lines"


PRICES: dict[str, dict[str, object]] = {
    "node-hour": {"usd_per_node_hour": 3.0},
    "spot": {"usd_per_spot_node_hour": 3.0},
    # 2 GiB
    "memory": {"usd_per_gib_hour": 1.5},
    "tres": {"tres_weights": "CPU=1.5", "usd_per_unit": 1.0, "node_cpus": 2},
    "energy": {"watts_per_node": 1000, "pue": 1.5, "usd_per_kwh": 2.0},
}


@pytest.mark.parametrize("basis", PRICES)
def test_a_node_hour_has_its_price_on_every_basis(basis: str) -> None:
    part = ClusterSpec.model_validate({"pricing": {"basis": basis, **PRICES[basis]}})
    assert node_hour_price(part, 2 * 1024**3, None) == pytest.approx(3.0)
    message = describe_price(part, None)
    assert message
    assert "the default of" not in message


def test_a_price_that_nobody_set_is_said_to_be_the_default() -> None:
    assert describe_price(ClusterSpec(), None) == "1.00 USD per node and hour, the default of pricing.usd_per_node_hour"


def test_an_unknown_part_of_a_price_is_not_made_up() -> None:
    memory = ClusterSpec.model_validate({"pricing": {"basis": "memory"}})
    energy = ClusterSpec.model_validate({"pricing": {"basis": "energy"}})
    assert node_hour_price(memory, None, None) is None
    assert node_hour_price(energy, None, None) is None
    assert node_hour_price(energy, None, 100.0) == pytest.approx(0.1 * 1.2 * 0.15)


# ---- the form


def test_json_is_one_object(tmp_path: Path, cluster: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", epochs_done=5)
    submit(run, "30", "train")
    code = status.main([str(run.root), "--json"])
    output = json.loads(capsys.readouterr().out)
    assert (output["state"], output["exit_code"], code) == ("unknown", 4, 4)
    assert RunStatus.model_validate(output).jobs[-1].job_id == "30"


def test_a_thousand_jobs_fit_a_screen(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = new_run(tmp_path / "run")
    common = {"time": time.time(), "stage": "profile"}
    events = [Event(event="submitted", job_id=f"7_{number}", **common) for number in range(1000)]
    cluster.jobs = {event.job_id: ("PENDING", f"Reason{number % 20}") for number, event in enumerate(events)}
    for number in range(100):
        bad = {"failure": Failure.BUG, "detail": "\x1b[31m" + "word " * 50}
        events.append(Event(event="submitted", job_id=f"8_{number}", **common))
        events.append(Event(event="ended", job_id=f"8_{number}", **common, **bad))
    run.events_file.write_text("".join(f"{event.model_dump_json()}\n" for event in events))
    run_status = status.status_of(run.root)
    text = status_text(run_status, 100)
    assert len(text.splitlines()) <= 45
    assert all(len(line) <= 100 for line in text.splitlines() if "log:" not in line)
    assert "\x1b" not in text
    assert len(run_status.jobs) == 1100


@pytest.mark.parametrize(
    ("ids", "shown"),
    [
        (["7"], "7"),
        (["7_0"], "7_0"),
        (["7_2", "7_0", "7_1", "7_5"], "7_[0-2,5]"),
        (["7", "8", "9", "10"], "7 8 9 and 1 more"),
        (["7_0", "7_2", "7_4", "7_6"], "7_[0,2,4,…]"),
    ],
)
def test_tasks_of_an_array_are_shown_together(ids: list[str], shown: str) -> None:
    assert short_ids(ids) == shown


@settings(max_examples=12)
@given(
    states=st.dictionaries(
        st.sampled_from(["7", "8"]), st.sampled_from(["PENDING", "RUNNING", "COMPLETED", "SUSPENDED", "REQUEUED"])
    )
)
def test_a_job_is_in_one_phase_whatever_slurm_says(
    tmp_path_factory: pytest.TempPathFactory, states: Mapping[str, str]
) -> None:
    run = new_run(tmp_path_factory.mktemp("run"))
    for job in ("7", "8"):
        submit(run, job)
    facts = read_facts(run)
    active = {job: JobState(state, "") for job, state in states.items()}
    for job_status in job_statuses(facts, Answer(active)):
        state = states.get(job_status.job_id, "COMPLETED")
        running, waiting = state == "RUNNING", state in ("PENDING", "SUSPENDED", "REQUEUED")
        expected = JobPhase.RUNNING if running else JobPhase.WAITING if waiting else JobPhase.OVER
        assert job_status.phase is expected
    assert {job.phase for job in job_statuses(facts, Answer(None))} == {JobPhase.UNKNOWN}


def test_measurements_that_are_gone_are_reported(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = make_run(tmp_path / "run", stage="plan")
    for path in run.profile.glob("*.jsonl"):
        path.unlink()
    (doubt,) = status.status_of(run.root).doubts
    assert doubt.startswith("the measurements that plan.json rests on are gone: put profile/ back, or ")
    finished = make_run(tmp_path / "finished")
    for path in finished.profile.glob("*.jsonl"):
        path.unlink()
    run_status = status.status_of(finished.root)
    assert run_status.doubts == [MEASUREMENTS_GONE]
    assert "over, but no measurements are left; " in text_of(run_status)
    finished.plan_file.write_text("{")
    run_status = status.status_of(finished.root)
    assert (run_status.state, run_status.words.partition(f"{finished.plan_file}: ")[0]) == (
        "finished",
        "everything is trained; ",
    )
    finished.plan_file.unlink()
    assert MEASUREMENTS_GONE in status.status_of(finished.root).doubts


def test_a_training_that_fell_back_is_compared_with_the_choice_as_in_the_report(
    tmp_path: Path, cluster: FakeSlurm
) -> None:
    run = make_run(tmp_path / "run")
    chosen, result = run.read_plan().chosen, known(run.train().read_result())
    smaller = {"local_batch": result.local_batch // 2, "global_batch": result.global_batch // 2}
    write_atomically(run.train().result_file, result.model_copy(update=smaller).model_dump_json())
    # every logged epoch has the smaller batch, as if memory ran out in the first step
    rows = run.train().metrics_file.read_text()
    rows = rows.replace(f'"global_batch":{chosen.global_batch}', f'"global_batch":{chosen.global_batch // 2}')
    run.train().metrics_file.write_text(rows)
    promise = known(status.status_of(run.root).promise)
    contents = read_run(run)
    bill = known(bill_of(contents.plan, contents.events, contents.trainings[0]))
    assert promise.expected_s == bill.whole.expected == chosen.wall_time_s
