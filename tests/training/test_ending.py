"""How a training ends that was stopped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tula_hpc.checkpoint.safe_points import Progress
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.ddp.stop_signals import StopRequest
from tula_hpc.env import WorkerEnvironment
from tula_hpc.errors import DeviceError, StageError
from tula_hpc.failure_kinds import Failure
from tula_hpc.launch import slurm
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.launch.slurm import Leaving
from tula_hpc.records import Configuration, RunDirectory
from tula_hpc.training import ending

MOST = 3


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch) -> Callable[[Leaving | None, int], tuple[str, list[Any]]]:
    """A function that ends a training of one worker, given how its job ends and the number of restarts."""
    spec = SweepSpec.model_validate({"name": "x", "training": {"max_requeues": MOST}})

    def end(leaving: Leaving | None, restarts: int) -> tuple[str, list[Any]]:
        monkeypatch.setattr(slurm, "leaving", lambda _: leaving)
        monkeypatch.setattr(ending, "slurm_job_id", lambda: "5")
        events: list[Any] = []
        training: Any = SimpleNamespace(
            progress=Progress(step=5, samples_seen=9, restarts=restarts),
            is_main=True,
            job=SimpleNamespace(sweep=spec),
            env=SimpleNamespace(on_slurm=True),
            any=bool,
            log_event=lambda event, detail, data=None: events.append((event, detail)),
        )
        return ending.leave(training, StopRequest()), events

    return end


@pytest.mark.parametrize("restarts", [0, MOST])
def test_a_cancelled_training_is_called_so_however_often_it_was_restarted(
    leave: Callable[[Leaving | None, int], tuple[str, list[Any]]], restarts: int
) -> None:
    how, events = leave(Leaving.CANCELLED, restarts)
    assert how == "cancelled"
    assert events[-1] == ("failed", "by scancel or an operator; saved at step 5")


def test_a_preempted_training_goes_on_as_often_as_it_may(
    leave: Callable[[Leaving | None, int], tuple[str, list[Any]]],
) -> None:
    assert leave(Leaving.PREEMPTED, MOST - 1)[0] == "preempted"
    with pytest.raises(StageError, match=f"restarted {MOST} times, as often as training.max_requeues allows"):
        leave(Leaving.PREEMPTED, MOST)


def test_a_training_that_slurm_has_requeued_does_not_fail_however_often_it_was_restarted(
    leave: Callable[[Leaving | None, int], tuple[str, list[Any]]],
) -> None:
    how, events = leave(Leaving.REQUEUED, MOST)
    assert how == "preempted"
    assert [event for event, _ in events] == ["preempted"]


@pytest.mark.parametrize("is_main", [True, False])
@pytest.mark.parametrize(
    ("restarts", "refused", "last"), [(MOST, None, "failed"), (0, None, "requeued"), (0, "disabled", "failed")]
)
def test_why_a_training_stops_is_on_record_before_any_worker_ends(
    monkeypatch: pytest.MonkeyPatch, is_main: bool, restarts: int, refused: str | None, last: str
) -> None:
    """The first worker that fails makes `srun -K1` end rank 0, too."""
    done: list[str] = []

    def meet(mine: bool) -> bool:
        done.append("met")
        return mine

    training: Any = SimpleNamespace(
        progress=Progress(restarts=restarts),
        is_main=is_main,
        job=SimpleNamespace(sweep=SweepSpec.model_validate({"name": "x", "training": {"max_requeues": MOST}})),
        env=SimpleNamespace(on_slurm=True),
        any=meet,
        log_event=lambda event, *_: done.append(event),
    )
    monkeypatch.setattr(slurm, "leaving", lambda _: None)
    monkeypatch.setattr(slurm, "requeue", lambda _: refused)
    with contextlib.suppress(StageError, SystemExit):
        ending.leave(training, StopRequest())
    assert done[-1] == "met"
    assert done[-2] == (last if is_main else "met")


def test_a_batch_for_which_others_held_the_memory_is_tried_by_two_more_jobs(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run").create()
    job = TrainJob(SweepSpec(name="x"), ClusterSpec(), Configuration(1, 1, 64), run.root)
    env = WorkerEnvironment(0, 1, 0, 0, "1", 0, ("here",), on_slurm=False)
    for job_id in ("1", "2"):
        run.log_event("submitted", "train", job_id=job_id)
        with pytest.raises(DeviceError, match=r"memory ran out at N=1 b=64 \(B=64\), but others held it"):
            ending.record_oom(job, env, Failure.DEVICE_OOM, "others held it")
        run.log_event("ended", "train", job_id=job_id, failure=Failure.DEVICE_FAILED)
    assert run.measurements().records == []
    ending.record_oom(job, env, Failure.DEVICE_OOM, "others held it")
    assert [(row.status, row.local_batch) for row in run.measurements().records] == [("oom", 64)]
