"""A profile and a training whose disk becomes full: each ends with a clear error, and goes on once there is space."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.forked_jobs import forking_jobs
from tests.known import known
from tests.run_factory import candidate, plan
from tula_hpc.checkpoint.store import CheckpointStore
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.env import unix_time
from tula_hpc.errors import StageError, StorageError
from tula_hpc.failure_kinds import Failure
from tula_hpc.records import Configuration, Plan, RunDirectory, TrainResult
from tula_hpc.stages.context import Sweep
from tula_hpc.stages.profile import profile_stage
from tula_hpc.stages.train import train_stage

# size of the disk in bytes
SPACE = 32_000_000
# free bytes: too few for a checkpoint, enough for the log
LEFT = 80_000
EPOCHS = 20
SPEC = SweepSpec.model_validate(
    {
        "name": "full",
        "workload": {
            "model": "tula_hpc.workloads.small_cnns:compact_cnn",
            "dataset": "digits",
            "samples": 256,
            "epochs": EPOCHS,
            "loader_workers": 0,
        },
        "training": {"log_interval_steps": 1, "method": "lbt", "drift": False, "checkpoint_minutes": 0.0001},
    }
)


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    with forking_jobs():
        yield


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SPACE},mode=0700", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk needs the right to mount one")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path, left: int) -> Path:
    """Fill the disk with a file except for `left` bytes; deleting the file frees the space."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        size = max(0, os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - left)
        while size >= 4096:
            try:
                size -= file.write(bytes(size))
            except OSError:
                size //= 2
    return ballast


def one_candidate() -> Plan:
    return plan([candidate(Configuration(1, 1, local_batch)) for local_batch in (16, 32, 64)])


def train(run: RunDirectory) -> TrainResult:
    return train_stage(Sweep(SPEC, ClusterSpec(), run, started_at=unix_time()), one_candidate())


def refused_when_full(work: Callable[[], object], begun: Callable[[], object], disk: Path, left: int) -> str:
    """Return the error of `work` if the disk is filled, except for `left` bytes, as soon as `begun` holds."""

    def fill_then() -> None:
        while not begun():
            time.sleep(0.01)
        fill(disk, left)

    watcher = threading.Thread(target=fill_then, daemon=True)
    watcher.start()
    with pytest.raises(StageError) as raised:
        work()
    watcher.join()
    return str(raised.value)


def test_a_training_that_runs_out_of_space_ends_and_later_goes_on(disk: Path) -> None:
    run = RunDirectory(disk / "run").create()
    checkpoints = run.train().checkpoints
    messages = refused_when_full(lambda: train(run), lambda: list(checkpoints.glob("checkpoint-*.tula")), disk, LEFT)
    assert "No space left on device; make space there or have the quota raised" in messages
    assert [event.failure for event in run.events() if event.event == "failed"] == [Failure.NO_SPACE]
    assert not [path for path in checkpoints.iterdir() if path.name.startswith(".")], "half a checkpoint is left"
    loaded = known(CheckpointStore(checkpoints).load_latest())
    assert not loaded.rejected

    fill(disk, 0)
    # space that the first job has freed at its end
    fill(disk / "run", 0)
    # not even a job can be written
    with pytest.raises(StorageError, match="No space left on device; make space"):
        train(run)
    for ballast in (disk / "ballast", disk / "run" / "ballast"):
        ballast.unlink()
    result = train(run)
    assert (result.epochs, result.samples_seen) == (EPOCHS, EPOCHS * 256)
    resumed = next(event for event in run.events() if event.event == "resumed")
    assert resumed.data["samples_seen"] == loaded.samples_seen > 0


STEPS = 150
PROFILED = SPEC.model_copy(
    update={
        # this model makes the record of a measurement a line of 40 kB and more
        "workload": SPEC.workload.model_copy(update={"model": "tests.examples.wordy:build"}),
        "search": SPEC.search.model_copy(
            update={
                "cluster_sizes": (1,),
                "min_batch": 8,
                "max_batch": 8,
                "mode": "full",
                "estimate": False,
                "min_steps": STEPS,
                "max_steps": STEPS,
            }
        ),
    }
)
# free bytes: too few for that line, enough for the log of one attempt
LEFT_TO_SAY_SO = 24_000


def profile(run: RunDirectory) -> None:
    profile_stage(Sweep(PROFILED, ClusterSpec(), run, started_at=unix_time()))


def measures(run: RunDirectory) -> bool:
    return any(note.note == "measuring" for note in run.job_notes())


def test_a_profile_that_runs_out_of_space_is_reported_and_measured_later(disk: Path) -> None:
    run = RunDirectory(disk / "run").create()
    output = refused_when_full(lambda: profile(run), lambda: measures(run), disk, LEFT_TO_SAY_SO)
    assert "No space left on device; make space there or have the quota raised" in output
    left = run.measurements()
    assert ({row.failure for row in left.records}, left.skipped) == ({Failure.NO_SPACE}, 0)

    (disk / "ballast").unlink()
    profile(run)
    measured = run.measurements()
    (good,) = [row for row in measured.records if row.status == "ok"]
    assert (good.steps, measured.skipped) == (STEPS, 0)
