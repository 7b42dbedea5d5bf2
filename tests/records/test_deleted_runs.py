"""If a run directory is deleted while its jobs work, they end, and do not touch a later run of that name."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forked import ALONE
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.ddp.stop_signals import StopRequest
from tula_hpc.errors import CheckpointError, StorageError
from tula_hpc.files import HeldFolder
from tula_hpc.launch.job_specs import ProfileJob, TrainJob
from tula_hpc.profiling.profile_loop import run_profile
from tula_hpc.records import Configuration, RunDirectory, append_record, write_atomically
from tula_hpc.training import loop as trainer_module
from tula_hpc.training.loop import run_training

CONFIGURATION = Configuration(nodes=1, workers_per_node=1, local_batch=32)
SWEEP = SweepSpec.model_validate(
    {
        "name": "x",
        "workload": {
            "model": "tests.examples.own_workload:perceptron",
            "dataset": "digits",
            "loader_workers": 0,
            "samples": 256,
            "epochs": 50,
        },
        "search": {"min_steps": 5, "max_steps": 5, "warmup_steps": 1},
    }
)


def put_another_in_the_place_of(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir(mode=0o700)


def test_a_folder_is_lost_when_its_name_leads_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    held = HeldFolder(folder)
    seen = [held.is_lost]
    folder.rename(tmp_path / "moved")
    seen.append(held.is_lost)
    (tmp_path / "moved").rename(folder)
    seen.append(held.is_lost)
    # a file system often gives it the same number again
    for _ in range(3):
        put_another_in_the_place_of(folder)
        seen.append(held.is_lost)
    assert seen == [False, True, False, True, True, True]
    assert not HeldFolder(folder).is_lost


def test_a_folder_that_cannot_be_checked_for_now_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldFolder(tmp_path)

    def unreachable(*_: object, **__: object) -> os.stat_result:
        raise OSError(5, os.strerror(5))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", unreachable)
        lost = held.is_lost
    assert not lost


class SwapAtCheck(StopRequest):
    """A stop request that replaces a training's folder at its third check, between two steps."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.looks = folder, 0

    @property
    def received(self) -> signal.Signals | None:  # type: ignore[override]
        self.looks += 1
        if self.looks == 3:
            put_another_in_the_place_of(self.folder)
        return None


def test_a_training_whose_folder_was_deleted_ends_and_writes_nothing_into_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "join_job", lambda: ALONE)
    run = RunDirectory(tmp_path / "run").create()
    folder = run.make_train().root
    stop = SwapAtCheck(folder)
    with pytest.raises(CheckpointError, match=f"{folder}: was deleted or moved while this job trained"):
        run_training(TrainJob(SWEEP, ClusterSpec(), CONFIGURATION, run.root), stop)
    assert stop.looks == 3
    assert list(folder.iterdir()) == []


class SwapWhenAsked:
    """A work queue of one configuration, which replaces the profile's folder when it is asked for it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.left = folder, [CONFIGURATION]

    def next(self) -> Configuration | None:
        put_another_in_the_place_of(self.folder)
        return self.left.pop() if self.left else None


def test_a_profile_whose_folder_was_deleted_records_nothing_in_the_next_one(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run").create()
    job = ProfileJob(SWEEP, ClusterSpec(), (CONFIGURATION,), run.profile / "n1-0.jsonl", nodes=1)
    with pytest.raises(StorageError, match=f"{run.profile}: was deleted or moved while this job measured"):
        run_profile(job, ALONE, SwapWhenAsked(run.profile))  # type: ignore[arg-type]
    assert list(run.profile.iterdir()) == []


@pytest.mark.parametrize("write", [lambda path: append_record(path, {}), lambda path: write_atomically(path, "")])
def test_a_folder_that_is_gone_is_called_that(tmp_path: Path, write: Callable[[Path], None]) -> None:
    with pytest.raises(StorageError, match=f"^{tmp_path}/run: is gone: somebody has deleted or moved it"):
        write(tmp_path / "run" / "events.jsonl")
