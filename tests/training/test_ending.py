"""How a training ends that was stopped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tula_hpc.checkpoint.safe_points import Progress
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.ddp.stop_signals import StopRequest
from tula_hpc.env import WorkerEnvironment, unix_time
from tula_hpc.errors import DeviceError, RunDirectoryError, StageError
from tula_hpc.failure_kinds import Failure
from tula_hpc.launch import slurm
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.launch.slurm import Leaving
from tula_hpc.records import Configuration, RunDirectory, RunHistory
from tula_hpc.records.events import EventName
from tula_hpc.training import ending

MOST = 3


def training_of(run: RunDirectory, job_id: str = "5", since: float = 0.0, **more: Any) -> Any:
    """Return a training of one worker in that job of a command that began at `since`."""
    spec = SweepSpec.model_validate({"name": "x", "training": {"max_requeues": MOST}})
    fields = {
        "progress": Progress(step=5, samples_seen=9),
        "is_main": True,
        "job": SimpleNamespace(sweep=spec, root=run.root, label="main", since=since),
        "env": SimpleNamespace(on_slurm=True, job_id=job_id),
        "any": bool,
        "log_event": lambda event, detail, data=None: run.log_event(event, "train", detail=detail, job_id=job_id),
    }
    return SimpleNamespace(**fields | more)


def submit(run: RunDirectory, job_id: str, **own: int) -> None:
    """Put a job on record, and its own events as often as it is said."""
    run.log_event("submitted", "train", job_id=job_id, data={"label": "main"})
    for event, times in own.items():
        for _ in range(times):
            run.log_event(cast("EventName", event), "train", job_id=job_id)


@pytest.fixture
def leave(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[Leaving | None, int], tuple[str, list[tuple[str, str]]]]:
    """A function that ends a training, given how its job ends and how often the job has asked for its requeue."""

    def end(leaving: Leaving | None, restarts: int) -> tuple[str, list[tuple[str, str]]]:
        run = RunDirectory(tmp_path / str(restarts)).create()
        submit(run, "5", requeued=restarts)
        before = len(run.events())
        monkeypatch.setattr(slurm, "leaving", lambda _: leaving)
        monkeypatch.setattr(ending, "slurm_job_id", lambda: "5")
        how = ending.leave(training_of(run), StopRequest())
        return how, [(event.event, event.detail) for event in run.events()[before:]]

    return end


@pytest.mark.parametrize("restarts", [0, MOST])
def test_a_cancelled_training_is_called_so_however_often_it_was_restarted(
    leave: Callable[[Leaving | None, int], tuple[str, list[tuple[str, str]]]], restarts: int
) -> None:
    how, events = leave(Leaving.CANCELLED, restarts)
    assert how == "cancelled"
    assert events[-1] == ("failed", "by scancel or an operator; saved at step 5")


def test_a_preempted_training_goes_on_as_often_as_it_may(
    leave: Callable[[Leaving | None, int], tuple[str, list[tuple[str, str]]]],
) -> None:
    assert leave(Leaving.PREEMPTED, MOST - 1)[0] == "preempted"
    with pytest.raises(StageError, match=f"restarted {MOST} times, as often as training.max_requeues allows"):
        leave(Leaving.PREEMPTED, MOST)


def test_a_training_that_slurm_has_requeued_does_not_fail_however_often_it_was_restarted(
    leave: Callable[[Leaving | None, int], tuple[str, list[tuple[str, str]]]],
) -> None:
    how, events = leave(Leaving.REQUEUED, MOST)
    assert how == "preempted"
    assert [event for event, _ in events] == ["preempted"]


def is_used_up(monkeypatch: pytest.MonkeyPatch, training: Any) -> bool:
    """Tell whether a training that is told to stop, as before its time limit, is not requeued any more."""
    monkeypatch.setattr(slurm, "leaving", lambda _: None)
    monkeypatch.setattr(slurm, "requeue", lambda _: None)
    try:
        ending.leave(training, StopRequest())
    except SystemExit:
        return False
    except StageError:
        return True
    pytest.fail("the job does not end")


def test_requeues_of_slurm_do_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run").create()
    submit(run, "5", requeued=MOST - 1, preempted=9 * MOST, resumed=9 * MOST)
    assert not is_used_up(monkeypatch, training_of(run))
    assert is_used_up(monkeypatch, training_of(run))


def test_a_new_command_may_go_on_as_often_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run").create()
    submit(run, "4", requeued=MOST)
    began_at = unix_time()
    submit(run, "5", requeued=MOST - 1)
    assert is_used_up(monkeypatch, training_of(run, "4"))
    assert not is_used_up(monkeypatch, training_of(run, since=began_at))
    assert is_used_up(monkeypatch, training_of(run, since=began_at))


def test_jobs_that_follow_in_one_command_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where Slurm refuses requeues, each restart is a job."""
    run = RunDirectory(tmp_path / "run").create()
    for job in range(MOST):
        submit(run, str(job))
    assert not is_used_up(monkeypatch, training_of(run, str(MOST - 1)))
    submit(run, str(MOST))
    assert is_used_up(monkeypatch, training_of(run, str(MOST)))


def test_on_one_machine_each_stop_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run").create()
    submit(run, "5")
    here = SimpleNamespace(on_slurm=False, job_id="5")
    assert [is_used_up(monkeypatch, training_of(run, env=here)) for _ in range(MOST + 1)] == [False] * MOST + [True]


def test_events_that_cannot_be_read_end_no_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run").create()
    submit(run, "5", requeued=MOST)

    def refuse(_: RunDirectory) -> RunHistory:
        raise RunDirectoryError("cannot be read")

    monkeypatch.setattr(RunDirectory, "history", refuse)
    assert not is_used_up(monkeypatch, training_of(run))


@pytest.mark.parametrize("is_main", [True, False])
@pytest.mark.parametrize(
    ("restarts", "refused", "last"), [(MOST, None, "failed"), (0, None, "requeued"), (0, "disabled", "failed")]
)
def test_why_a_training_stops_is_on_record_before_any_worker_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, is_main: bool, restarts: int, refused: str | None, last: str
) -> None:
    """The first worker that fails makes `srun -K1` end rank 0, too."""
    done: list[str] = []

    def meet(mine: bool) -> bool:
        done.append("met")
        return mine

    run = RunDirectory(tmp_path / "run").create()
    submit(run, "5", requeued=restarts)
    # rank 0's answer counts on every worker
    used_up = iter([False, False, restarts >= MOST])
    training = training_of(
        run,
        is_main=is_main,
        any=lambda mine: meet(mine or next(used_up, False)),
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
