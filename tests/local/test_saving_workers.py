"""Real trainings that save in the background: killed while writing, with a full disk, with two workers."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.forked import give_secret, start_workers
from tests.known import known
from tula_hpc.checkpoint import store as checkpoint
from tula_hpc.checkpoint.background import BackgroundWriter
from tula_hpc.checkpoint.store import CheckpointStore
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.ddp import agreement as stopping
from tula_hpc.ddp.stop_signals import StopRequest
from tula_hpc.ddp.worker import Worker
from tula_hpc.env import WorkerEnvironment
from tula_hpc.errors import CheckpointError, DataError
from tula_hpc.failure_kinds import Failure
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.records import Configuration, RunDirectory, TrainResult
from tula_hpc.training import loop as trainer

EPOCHS, STEPS_PER_EPOCH, BATCH = 4, 8, 32
SWEEP = SweepSpec.model_validate(
    {
        "name": "x",
        "workload": {
            "model": "tula_hpc.workloads.small_cnns:compact_cnn",
            "dataset": "digits",
            "samples": STEPS_PER_EPOCH * BATCH,
            "epochs": EPOCHS,
            "loader_workers": 0,
        },
        # each save follows the one before at once
        "training": {"method": "lbt", "checkpoint_minutes": 1e-6},
    }
)
# number of the write that fails or is killed; it begins in the second epoch at the latest
WRITES = 3


def work(rank: int, folder: Path) -> None:
    """Let the first process start the trainings with one worker, one after another; then two workers train."""
    if rank == 0:
        for name, strike in STRIKES.items():
            assert ended(partial(train, folder / name, strike=strike)) == -signal.SIGKILL
            if strike is die:
                cut_the_newest(folder / name)
            assert ended(partial(train, folder / name)) == 0
        assert ended(partial(train, folder / "whole", note=True)) == 0
        assert ended(partial(train, folder / "stopped", strike=stop_now)) not in (0, -signal.SIGALRM)
        note_what_was_on_disk(folder / "stopped")
        assert ended(partial(train, folder / "stopped")) == 0
    try:
        train(folder / "full disk", rank=rank, workers=2, strike=full_disk if rank == 0 else None)
    except CheckpointError as error:
        (folder / f"{rank}.txt").write_text(str(error))
    # a job's process would end here
    torch.distributed.destroy_process_group()
    if rank == 1:
        see_an_old_list()
    try:
        train(folder / "full disk", rank=rank, workers=2)
    except DataError as error:
        (folder / f"old list {rank}.txt").write_text(str(error))


def ended(action: Callable[[], object]) -> int:
    """Run an action in a forked process; return its exit code, or the negative number of the signal that killed it."""
    child = os.fork()
    if not child:
        signal.alarm(60)
        try:
            action()
            os._exit(0)
        finally:  # an exception must not let the child go on as a second program
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def train(
    root: Path, *, rank: int = 0, workers: int = 1, strike: Callable[[], None] | None = None, note: bool = False
) -> None:
    env = WorkerEnvironment(rank, workers, 0, rank, "1", 0, ("here",), on_slurm=False, submission=str(root.parent))
    patch = pytest.MonkeyPatch()
    patch.setattr(trainer, "join_job", lambda: env)
    # check for a stop at every step
    patch.setattr(stopping, "FIRST_CHECKS", 1000)
    patch.setattr(checkpoint, "_write_checkpoint", slowed(checkpoint._write_checkpoint, strike))
    written: list[bool] = []
    if note:
        check_what_is_written(patch, written)
    job = TrainJob(SWEEP, ClusterSpec(), Configuration(workers, 1, BATCH // workers), root)
    trainer.run_training(job, StopRequest().install())
    torch.save(written, root / "written.pt")


def note_what_was_on_disk(root: Path) -> None:
    """Write down when the job reported its save, and when the newest checkpoint was written."""
    run = RunDirectory(root)
    reported = next(event.time for event in run.events() if event.event == "preempted")
    written = CheckpointStore(run.train().checkpoints).paths()[-1].stat().st_mtime
    torch.save({"reported": reported, "written": written}, root / "times.pt")


def slowed(write: Callable[..., None], strike: Callable[[], None] | None) -> Callable[..., None]:
    """Slow every write down to the time of some steps; call `strike` in the write of number `WRITES`."""
    count = 0

    def slow(file: Any, state: dict[str, Any]) -> None:
        nonlocal count
        count += 1
        time.sleep(0.05)
        if strike is not None and count == WRITES:
            strike()
        write(file, state)

    return slow


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def cut_the_newest(root: Path) -> None:
    """Cut the newest whole checkpoint in half, between two starts of a training."""
    newest = CheckpointStore(RunDirectory(root).train().checkpoints).paths()[-1]
    os.truncate(newest, newest.stat().st_size // 2)


def die_after_the_rename() -> None:
    pytest.MonkeyPatch().setattr(checkpoint, "sync_folder", die)


def stop_now() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def full_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def see_an_old_list() -> None:
    """Hide the newest checkpoints, like a node whose NFS client still has an old list of the folder."""
    paths = CheckpointStore.paths
    pytest.MonkeyPatch().setattr(CheckpointStore, "paths", lambda self: paths(self)[:-1])


STRIKES: dict[str, Callable[[], None]] = {"with the file begun": die, "after the rename": die_after_the_rename}


def check_what_is_written(patch: pytest.MonkeyPatch, written: list[bool]) -> None:
    """Record for every checkpoint whether it has the state of its own step, though it is written some steps later."""
    begin, save, step = BackgroundWriter.begin, CheckpointStore.save, Worker.train_step
    then: list[Tensor] = []
    # steps taken so far, and steps at the begin of the save
    steps: list[int] = [0, 0]

    def stepping(self: Worker, *batch: Tensor) -> Tensor:
        steps[0] += 1
        return step(self, *batch)

    def beginning(self: BackgroundWriter, state: dict[str, Any], **where: int) -> None:
        then[:] = [bits(state)]
        steps[1] = steps[0]
        begin(self, state, **where)

    def saving(self: CheckpointStore, state: dict[str, Any], **where: int) -> Path:
        path = save(self, state, **where)
        if steps[0] > steps[1]:
            written.append(torch.equal(bits(CheckpointStore.load(path)), then[0]))
        return path

    patch.setattr(Worker, "train_step", stepping)
    patch.setattr(BackgroundWriter, "begin", beginning)
    patch.setattr(CheckpointStore, "save", saving)


def bits(state: dict[str, Any]) -> Tensor:
    """Return all weights, statistics and momenta as one vector."""
    momenta = [s["momentum_buffer"] for s in state["optimizer"]["state"].values()]
    return torch.cat([value.double().flatten() for value in [*state["model"].values(), *momenta]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which all have trained; see `work`."""
    folder = tmp_path_factory.mktemp("saving")
    for name in (*STRIKES, "whole", "stopped", "full disk"):
        RunDirectory(folder / name).create().train().root.mkdir()
    give_secret(folder)
    start_workers(2, work, folder)
    return folder


def final(root: Path) -> tuple[Tensor, TrainResult]:
    files = RunDirectory(root).train()
    loaded = known(CheckpointStore(files.checkpoints).load_latest())
    return bits(loaded.state), TrainResult.model_validate_json(files.result_file.read_bytes())


@pytest.mark.parametrize("name", STRIKES)
def test_a_training_killed_while_a_checkpoint_is_written_ends_as_undisturbed(folder: Path, name: str) -> None:
    (whole, expected), (resumed, result) = final(folder / "whole"), final(folder / name)
    assert torch.equal(whole, resumed)
    assert (result.steps, result.samples_seen, result.restarts) == (expected.steps, expected.samples_seen, 1)
    assert result.final_loss == expected.final_loss
    events = {event.event: event for event in RunDirectory(folder / name).events()}
    assert 0 < events["resumed"].data["step"] < EPOCHS * STEPS_PER_EPOCH
    assert ("refused: is truncated" in events["resumed"].detail) == (STRIKES[name] is die)


def test_a_stop_while_a_checkpoint_is_written_saves_its_own_step_too(folder: Path) -> None:
    events = {event.event: event for event in RunDirectory(folder / "stopped").events()}
    assert events["preempted"].data["step"] == events["resumed"].data["step"]
    assert torch.equal(final(folder / "whole")[0], final(folder / "stopped")[0])
    times = torch.load(folder / "stopped" / "times.pt")
    assert times["written"] < times["reported"]


def test_only_restarts_that_lost_work_count_for_the_interval(folder: Path) -> None:
    for name, expected in {"whole": 0, "stopped": 0, **dict.fromkeys(STRIKES, 1)}.items():
        loaded = known(CheckpointStore(RunDirectory(folder / name).train().checkpoints).load_latest())
        assert loaded.state["progress"]["interruptions"] == expected


def test_what_is_written_is_the_state_of_its_step_though_training_goes_on(folder: Path) -> None:
    written = torch.load(folder / "whole" / "written.pt")
    assert len(written) >= 2
    assert all(written)


def test_the_cost_of_a_save_is_reported_once(folder: Path) -> None:
    saves = [event for event in RunDirectory(folder / "whole").events() if event.event == "checkpoint"]
    assert len(saves) == 1
    data = saves[0].data
    assert data["write_s"] > 0.05, "every write was slowed by at least 0.05 s"
    assert data["stall_s"] > 0
    assert data["share"] > 0


def test_a_full_disk_ends_both_workers_with_a_line(folder: Path) -> None:
    assert "cannot be saved: No space left on device" in (folder / "0.txt").read_text()
    assert "rank 0's checkpoint cannot be saved: No space left on device" in (folder / "1.txt").read_text()
    assert CheckpointStore(RunDirectory(folder / "full disk").train().checkpoints).load_latest() is not None


def test_workers_that_see_different_checkpoints_end_so_that_another_job_is_tried(folder: Path) -> None:
    for rank in range(2):
        assert "workers see different checkpoints" in (folder / f"old list {rank}.txt").read_text()
    assert DataError.failure is Failure.KILLED
