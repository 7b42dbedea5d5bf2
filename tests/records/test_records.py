from __future__ import annotations

import fcntl
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from pydantic import ValidationError

from tula_hpc.errors import RunDirectoryError, StorageError
from tula_hpc.failure_kinds import Failure
from tula_hpc.records import (
    Configuration,
    EpochMetrics,
    Event,
    JobAccount,
    Measurement,
    Metrics,
    RunDirectory,
    RunHistory,
    StepMetrics,
    append_record,
    read_metrics,
    read_records,
    storage,
    write_atomically,
)
from tula_hpc.records import metrics as metrics_module


def oom(local_batch: int) -> Measurement:
    return Measurement(status="oom", nodes=1, workers_per_node=1, local_batch=local_batch)


def test_global_batch_counts_every_worker() -> None:
    assert Configuration(nodes=4, workers_per_node=2, local_batch=32).global_batch == 256


@pytest.mark.parametrize(
    "row", [(64, 0.1), (2**44, 0.1), (8, 1e300), (8, float("nan")), (8, 0.0), (8, 1e-300), (0, 1.0)]
)
def test_a_computation_of_what_is_no_smaller_batch_was_not_written_by_this_program(row: tuple[int, float]) -> None:
    with pytest.raises(ValidationError):
        Measurement(status="ok", nodes=1, workers_per_node=1, local_batch=64, smaller_computes=(row,))


def test_a_torn_last_line_is_skipped_counted_and_spoils_no_later_one(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    append_record(path, oom(8))
    with path.open("a") as file:
        # the writer was killed here
        file.write('{"status": "ok", "nodes": 1, "wor')
    append_record(path, oom(16))
    records, skipped, _ = read_records(Measurement, [path])
    assert [record.local_batch for record in records] == [8, 16]
    assert skipped == 1


def test_lines_of_concurrent_writers_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"

    def write() -> None:
        for _ in range(20):
            append_record(path, oom(8))

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(read_records(Measurement, [path]).records), read_records(Measurement, [path]).skipped) == (80, 0)


def test_a_writer_waits_for_another_one_but_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, on NFS it would write over the line that another node appends."""
    path = tmp_path / "m.jsonl"
    append_record(path, oom(8))
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        waiting = threading.Thread(target=append_record, args=(path, oom(16)))
        waiting.start()
        waiting.join(0.1)
        assert path.read_bytes().count(b"\n") == 1
        fcntl.flock(other, fcntl.LOCK_UN)
        waiting.join(5.0)
        assert path.read_bytes().count(b"\n") == 2
        # a suspended process keeps its lock like this
        fcntl.flock(other, fcntl.LOCK_EX)
        monkeypatch.setattr(storage, "LOCK_S", 0.02)
        append_record(path, oom(32))
    assert path.read_bytes().count(b"\n") == 3


def test_a_link_in_place_of_a_file_of_records_is_not_followed(tmp_path: Path) -> None:
    """A copy of another user's run may hold links to any file of this user's."""
    (tmp_path / "profile.sh").write_text("# mine\n")
    (tmp_path / "x.jsonl").symlink_to(tmp_path / "profile.sh")
    with pytest.raises(StorageError, match=r"x\.jsonl: is a symbolic link; replace it by"):
        append_record(tmp_path / "x.jsonl", oom(32))
    assert (tmp_path / "profile.sh").read_text() == "# mine\n"


def test_a_failed_atomic_write_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        # it cannot be encoded, and so fails in the middle
        write_atomically(path, "\ud800")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_metrics_after_a_rollback_supersede_those_before(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    # the second run repeats the step that the first one took after its last checkpoint
    for loss in (3.0, 2.0):
        append_record(path, StepMetrics(step=10, samples_seen=640, epoch=0.5, loss=loss, lr=0.1, step_time_s=0.1))
    fields = {"train_loss": 1.0, "test_loss": 1.0, "test_accuracy": 0.5, "test_top5_accuracy": 0.9, "epoch_time_s": 1.0}
    append_record(path, EpochMetrics(epoch=1, step=20, samples_seen=1280, global_batch=64, steps=20, **fields))
    metrics = read_metrics(path)
    assert [step.loss for step in metrics.steps] == [2.0]
    assert [epoch.epoch for epoch in metrics.epochs] == [1]


def test_after_a_rollback_to_another_batch_nothing_of_the_former_one_is_ahead(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    common = {"epoch": 0.5, "loss": 1.0, "lr": 0.1, "step_time_s": 0.1}
    before = [(step, 64 * step) for step in range(10, 101, 10)]
    after = [(50 + step, 3200 + 48 * step) for step in range(10, 41, 10)]
    for step, seen in (*before, *after):
        append_record(path, StepMetrics(step=step, samples_seen=seen, **common))
    expected = [*before[:5], *after]
    assert [(row.step, row.samples_seen) for row in read_metrics(path).steps] == expected


def step_at(number: int) -> StepMetrics:
    return StepMetrics(step=number, samples_seen=64 * number, epoch=0.5, loss=1.0, lr=0.1, step_time_s=0.1)


# the file of a week takes seconds to read
READING_S = 2.0
# a command on one machine looks five times a second
LOOK_EVERY_S = 0.2


class Looks(NamedTuple):
    """What a command saw that looked at a growing file."""

    # by how many steps each look was behind the file
    behind: list[int]
    readings: int
    elapsed_s: float


def look_often(path: Path, monkeypatch: pytest.MonkeyPatch, large_bytes: int, looks: int) -> Looks:
    """Look at a file that grows by a step between two looks; more than `large_bytes` are a large file."""
    clock = SimpleNamespace(now_s=0.0)
    readings: list[Path] = []

    def slow(path: Path) -> Metrics:
        clock.now_s += READING_S
        readings.append(path)
        return read_metrics(path)

    monkeypatch.setattr(metrics_module, "read_metrics", slow)
    monkeypatch.setattr(metrics_module, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    monkeypatch.setattr(metrics_module, "LARGE_BYTES", large_bytes)
    reader = metrics_module.MetricsReader(path)
    behind = []
    for number in range(1, looks + 1):
        append_record(path, step_at(number), durable=False)
        behind.append(number - reader.read().steps[-1].step)
        clock.now_s += LOOK_EVERY_S
    return Looks(behind, len(readings), clock.now_s)


def test_a_small_file_is_read_at_each_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = look_often(tmp_path / "metrics.jsonl", monkeypatch, large_bytes=10**9, looks=50)
    assert seen.behind == [0] * 50
    assert seen.readings == 50


def test_a_large_file_is_read_for_a_tenth_of_the_time_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = look_often(tmp_path / "metrics.jsonl", monkeypatch, large_bytes=0, looks=300)
    assert READING_S * seen.readings <= 0.1 * seen.elapsed_s
    pause_s = metrics_module.PAUSE_TIMES * READING_S
    assert max(seen.behind) <= pause_s / LOOK_EVERY_S


def test_metrics_that_cannot_be_read_remain_as_they_were_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = metrics_module.MetricsReader(path)
    assert reader.read().steps == []
    append_record(path, step_at(1))
    assert len(reader.read().steps) == 1
    append_record(path, step_at(2))
    with monkeypatch.context() as patch:
        patch.setattr(metrics_module, "MAX_LINES", 1)
        assert len(reader.read().steps) == 1
        (note,) = reader.notes
        assert note.startswith(f"the progress is not up to date: {path}: has 0.0 MB; expected at most 1 lines")
    assert len(reader.read().steps) == 2
    assert reader.notes == []


def test_a_missing_plan_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no plan yet"):
        RunDirectory(tmp_path).read_plan()


# the history of a run


def history(*events: Mapping[str, object]) -> RunHistory:
    common = {"time": 1.0, "stage": "train"}
    return RunHistory(Event.model_validate({**common, **event}) for event in events)


def test_a_damaged_field_of_an_events_data_counts_as_missing_and_the_others_are_read() -> None:
    data = {"folder": 7, "nodes": -1, "label": "a", "partition": [], "configuration": [1, 2], "configurations": "x"}
    (job,) = history({"event": "submitted", "job_id": "7", "data": data}).submissions()
    assert (job.label, job.folder, job.nodes, job.partition) == ("a", "", None, None)
    assert (job.configuration, job.configurations) == (None, ())


def test_events_belong_to_the_latest_submission_of_their_job_id() -> None:
    submitted, ended = {"event": "submitted", "job_id": "7"}, {"event": "ended", "job_id": "7", "failure": "killed"}
    run_history = history(submitted | {"data": {"label": "a"}}, ended, submitted | {"data": {"label": "b"}})
    first, second = run_history.submissions()
    assert first.end is not None
    assert second.end is None
    assert (first.end.time, first.end.failure) == (1.0, Failure.KILLED)
    assert [job.label for job in run_history.unsettled("train")] == ["b"]
    assert [len(run_history.of_training(label)) for label in ("a", "b", "main")] == [2, 1, 0]
    assert run_history.in_vain("a", Failure.KILLED) == 1


def test_what_a_job_reports_before_its_submission_is_on_record_is_kept() -> None:
    report = {"event": "oom", "job_id": "7", "failure": "device_oom"}
    run_history = history(report, {"event": "submitted", "job_id": "7", "data": {"label": "a"}})
    assert run_history.job("7").memory_failure is Failure.DEVICE_OOM
    assert len(run_history.of_training("a")) == 2


def test_a_training_whose_files_were_moved_away_does_not_count_for_the_next_one() -> None:
    """Neither its events nor its nodes count; its jobs stay on record."""
    before = [{"event": "submitted", "job_id": "7"}, {"event": "finished", "job_id": "7"}]
    run_history = history(
        *before, {"event": "submitted", "job_id": "8", "data": {"anew": True}}, {"event": "resumed", "job_id": "8"}
    )
    assert [event.job_id for event in run_history.of_training("main")] == ["8", "8"]
    runs = [JobAccount(job_id=i, stage="train", state="COMPLETED", over=True, nodes=2, elapsed_s=9.0) for i in "78"]
    assert run_history.accounted("main", runs) == (runs[1],)
    assert [job.job_id for job in run_history.submissions("train")] == ["7", "8"]
    assert run_history.accounted("main", runs[:1]) == ()


def test_a_jobs_own_report_goes_before_the_schedulers() -> None:
    own = {"event": "oom", "job_id": "7", "failure": "device_oom", "detail": "at b=64"}
    run_history = history(
        {"event": "submitted", "job_id": "7"}, own, {"event": "ended", "job_id": "7", "failure": "bug"}
    )
    assert run_history.submissions()[0].failure == (Failure.DEVICE_OOM, "at b=64", None)


def test_a_training_that_was_submitted_again_after_its_failure_has_none() -> None:
    failed = {"event": "failed", "job_id": "1", "failure": "killed", "data": {"label": "a"}}
    assert list(history(failed).last_failures()) == ["a"]
    assert not history(failed, {"event": "submitted", "job_id": "2", "data": {"label": "a"}}).last_failures()
    assert not history(failed).last_failures(since=2.0)
