"""Training that is preempted, cancelled or runs out of memory on the real cluster; see stories.py."""

from __future__ import annotations

from tests.slurm.faults.faulty_training import Training
from tests.slurm.faults.stories import SUSPENDED_S
from tests.slurm.faults.telling import Stories, about
from tula_hpc.failure_kinds import Failure
from tula_hpc.records import read_metrics


@about("one")
def test_losses_of_the_uninterrupted_run(told: Training) -> None:
    losses = [epoch.train_loss or 0.0 for epoch in read_metrics(told.files.metrics_file).epochs]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    assert told.events("resumed") == []


@about("preempted", "preempted, user signal")
def test_a_preempted_job_resumes_where_it_stopped(told: Training) -> None:
    (preempted,), (resumed,) = told.events("preempted"), told.events("resumed")
    assert preempted.data["step"] == resumed.data["step"] >= 12
    # a grace time shortens the time limit, of which Slurm warns as well: where a busy machine lets both signals
    # arrive at once, Python handles the lower number first
    expected = ("SIGUSR2",) if "user signal" in told.name else ("SIGTERM", "SIGUSR2")
    assert any(signal in preempted.detail for signal in expected)
    assert preempted.job_id == resumed.job_id
    assert told.result().restarts == 1
    assert told.redone_steps() == 0


@about("preempted, CANCEL")
def test_a_job_that_a_preemption_cancels_is_followed_by_another(told: Training) -> None:
    """Slurm ends it as scancel does, but nobody wanted the training to stop."""
    assert told.seen["state"] == "PREEMPTED"
    (failed,) = told.events("failed")
    assert failed.failure is Failure.PREEMPTED
    first, second = (event.job_id for event in told.events("submitted"))
    assert (failed.job_id, told.events("resumed")[0].job_id) == (first, second)


@about("preempted, no grace")
def test_a_job_that_is_preempted_without_grace_is_requeued_by_slurm(told: Training) -> None:
    (submitted,), (resumed,) = told.events("submitted"), told.events("resumed")
    assert submitted.job_id == resumed.job_id
    assert told.events("failed") == []


@about("preempted, CANCEL", "preempted, no grace")
def test_nothing_is_lost_beyond_the_last_checkpoint(told: Training) -> None:
    (strike,), resumed = told.strikes, told.events("resumed")[0]
    assert resumed.data["samples_seen"] >= strike.saved > 0


@about("suspended")
def test_a_suspended_training_goes_on_as_if_nothing_had_happened(told: Training) -> None:
    assert told.seen["state"] == "SUSPENDED"
    assert {event.event for event in told.events()} <= {"submitted", "checkpoint", "finished", "ended"}
    assert told.redone_steps() == 0
    result = told.result()
    assert result.train_time_s < result.wall_time_s - SUSPENDED_S / 2


@about("preempted, JobRequeue=0")
def test_a_preempted_job_that_may_not_be_requeued_is_followed_by_another(told: Training) -> None:
    assert any("requeue refused" in event.detail for event in told.events("failed"))
    assert told.events("failed")[-1].failure is Failure.PREEMPTED
    assert len(told.events("submitted")) == 2
    assert told.redone_steps() == 0


@about("memory, late")
def test_a_training_killed_for_its_memory_goes_on_with_a_smaller_batch(told: Training) -> None:
    result = told.result()
    assert (result.local_batch, result.epochs, result.samples_seen) == (64, 3, 3 * 1024)
    failed = [m for m in told.run.measurements().records if m.status == "oom"]
    assert [(m.local_batch, m.stage, m.failure) for m in failed] == [(512, "train", Failure.HOST_OOM)]
    (resumed,) = told.events("resumed")
    assert resumed.data["samples_seen"] > 0


@about("cancelled")
def test_a_cancelled_training_stays_cancelled_and_goes_on_when_asked_again(told: Training) -> None:
    """scancel sends TERM as a preemption does; the job must save, but not requeue itself."""
    assert told.seen["state"] == "CANCELLED"
    assert "was cancelled, by scancel or an operator" in told.accounts[0].error
    assert told.accounts[0].result is None
    (preempted,), (resumed,) = told.events("preempted"), told.events("resumed")
    assert preempted.data["step"] == resumed.data["step"] >= 12
    assert len(told.events("submitted")) == 2
    assert told.redone_steps() == 0


@about(
    "preempted",
    "preempted, user signal",
    "preempted, CANCEL",
    "preempted, no grace",
    "preempted, JobRequeue=0",
    "suspended",
    "cancelled",
)
def test_the_end_is_that_of_the_uninterrupted_run(told: Training, stories: Stories) -> None:
    told.check_equal(stories.reference(told.name))
