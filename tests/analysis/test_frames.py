"""A run's records as DataFrames: one row a record, one column a nested field; and files from them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import tula_hpc.analysis
from tests.planning_data import failed, ok
from tests.run_factory import EPOCHS, configurations, make_run
from tula_hpc.analysis.data_frames import Frames
from tula_hpc.errors import InputError, RunDirectoryError
from tula_hpc.records import Identity, RunDirectory, append_record


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return make_run(tmp_path_factory.mktemp("frames") / "run")


@pytest.fixture(scope="module")
def frames(run: RunDirectory) -> Frames:
    pytest.importorskip("pandas")
    return tula_hpc.analysis.frames(run.root)


def test_every_record_is_a_row(run: RunDirectory, frames: Frames) -> None:
    assert len(frames.measurements) == len(run.measurements().records) == len(configurations())
    assert len(frames.events) == len(run.events())
    assert len(frames.epochs) == EPOCHS
    assert set(frames.metrics["training"]) == {"main"}
    chosen = frames.candidates[frames.candidates["chosen"]]
    assert chosen["global_batch"].tolist() == [run.read_plan().chosen.global_batch]


def test_numbers_are_those_of_the_records_and_times_are_dates(run: RunDirectory, frames: Frames) -> None:
    ok = frames.measurements[frames.measurements["status"] == "ok"]
    steps = [row.times.step_time_s for row in run.measurements().records if row.times]
    assert ok["times.step_time_s"].tolist() == steps
    assert frames.events["time"].dt.tz is not None
    assert frames.events["time"].is_monotonic_increasing


def test_frames_become_csv_files(frames: Frames, tmp_path: Path) -> None:
    for name, frame in frames._asdict().items():
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
        assert len((tmp_path / f"{name}.csv").read_text().splitlines()) == len(frame) + 1


def test_a_stage_that_has_not_run_has_columns_without_rows(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    found = tula_hpc.analysis.frames(str(make_run(tmp_path / "run", stage="profile").root))
    assert len(found.candidates) == len(found.metrics) == len(found.epochs) == 0
    assert {"chosen", "train_time_s"} <= set(found.candidates.columns)


def test_columns_are_the_same_whatever_the_rows_lack(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    whole, empty, without = (RunDirectory(tmp_path / name).create() for name in ("whole", "empty", "without"))
    for run, rows in ((whole, [ok(1, 32), ok(2, 32)]), (without, [failed(1, 32)])):
        for row in rows:
            append_record(run.profile / "job.jsonl", row)
    empty.log_event("submitted", "profile")
    whole_frame, *others = (tula_hpc.analysis.frames(run.root).measurements for run in (whole, empty, without))
    fixed = {name for name in whole_frame.columns if not name.startswith(("samples.", "round_steps."))}
    assert {"times.step_time_s", "memory.peak_bytes"} <= fixed
    for frame in others:
        assert fixed <= set(frame.columns) <= fixed | {"samples", "round_steps"}


def test_names_of_a_users_files_are_no_columns(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    run = RunDirectory(tmp_path / "run").create()
    known = Identity(
        parameters=1, gradient_bytes=4, structure="", train_samples=8, test_samples=2, sources={"train.py": "0a"}
    )
    append_record(run.profile / "job.jsonl", ok(1, 32, identity=known))
    frame = tula_hpc.analysis.frames(run.root).measurements
    assert frame["identity.sources"].tolist() == ['{"train.py": "0a"}']
    assert not [name for name in frame.columns if "train.py" in name]


def test_without_pandas_the_error_says_what_to_install(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    absent: Any = None
    monkeypatch.setitem(sys.modules, "pandas", absent)
    with pytest.raises(InputError, match=r"pip install 'tula_hpc\[pandas\]'"):
        tula_hpc.analysis.frames(run.root)


def test_no_run_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    with pytest.raises(RunDirectoryError):
        tula_hpc.analysis.frames(tmp_path / "nowhere")
