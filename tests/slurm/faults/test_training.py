"""Training that is preempted, cancelled or runs out of memory on the real cluster; see scenarios.py."""

from __future__ import annotations

from tests.slurm.faults.faulty_training import Training
from tests.slurm.faults.scenario_runs import ScenarioRuns, about
from tests.slurm.faults.scenarios import SUSPENDED_S
from tula_hpc.failure_kinds import Failure
from tula_hpc.records import read_metrics


@about("one")
def test_losses_of_the_uninterrupted_run(ended: Training) -> None:
    losses = [epoch.train_loss or 0.0 for epoch in read_metrics(ended.files.metrics_file).epochs]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    assert ended.events("resumed") == []


@about("preempted", "preempted, user signal")
def test_a_preempted_job_resumes_where_it_stopped(ended: Training) -> None:
    (preempted,), (resumed,) = ended.events("preempted"), ended.events("resumed")
    assert preempted.data["step"] == resumed.data["step"] >= 12
    # a grace time shortens the time limit, of which Slurm warns as well: where a busy machine lets both signals
    # arrive at once, Python handles the lower number first
    expected = ("SIGUSR2",) if "user signal" in ended.name else ("SIGTERM", "SIGUSR2")
    assert any(signal in preempted.detail for signal in expected)
    assert preempted.job_id == resumed.job_id
    assert ended.result().restarts == 1
    assert ended.redone_steps() == 0


@about("preempted, CANCEL")
def test_a_job_that_a_preemption_cancels_is_followed_by_another(ended: Training) -> None:
    """Slurm ends it as scancel does, but nobody wanted the training to stop."""
    assert ended.seen["state"] == "PREEMPTED"
    (failed,) = ended.events("failed")
    assert failed.failure is Failure.PREEMPTED
    first, second = (event.job_id for event in ended.events("submitted"))
    assert (failed.job_id, ended.events("resumed")[0].job_id) == (first, second)


@about("preempted, no grace")
def test_a_job_that_is_preempted_without_grace_is_requeued_by_slurm(ended: Training) -> None:
    (submitted,), (resumed,) = ended.events("submitted"), ended.events("resumed")
    assert submitted.job_id == resumed.job_id
    assert ended.events("failed") == []


@about("preempted, CANCEL", "preempted, no grace")
def test_nothing_is_lost_beyond_the_last_checkpoint(ended: Training) -> None:
    (strike,), resumed = ended.strikes, ended.events("resumed")[0]
    assert resumed.data["samples_seen"] >= strike.saved > 0


@about("suspended")
def test_a_suspended_training_goes_on_as_if_nothing_had_happened(ended: Training) -> None:
    assert ended.seen["state"] == "SUSPENDED"
    assert {event.event for event in ended.events()} <= {"submitted", "checkpoint", "finished", "ended"}
    assert ended.redone_steps() == 0
    result = ended.result()
    assert result.train_time_s < result.wall_time_s - SUSPENDED_S / 2


@about("preempted, JobRequeue=0")
def test_a_preempted_job_that_may_not_be_requeued_is_followed_by_another(ended: Training) -> None:
    assert any("requeue refused" in event.detail for event in ended.events("failed"))
    assert ended.events("failed")[-1].failure is Failure.PREEMPTED
    assert len(ended.events("submitted")) == 2
    assert ended.redone_steps() == 0


@about("memory, late")
def test_a_training_killed_for_its_memory_goes_on_with_a_smaller_batch(ended: Training) -> None:
    result = ended.result()
    assert (result.local_batch, result.epochs, result.samples_seen) == (64, 3, 3 * 1024)
    failed = [m for m in ended.run.measurements().records if m.status == "oom"]
    assert [(m.local_batch, m.stage, m.failure) for m in failed] == [(512, "train", Failure.HOST_OOM)]
    (resumed,) = ended.events("resumed")
    assert resumed.data["samples_seen"] > 0


@about("cancelled")
def test_a_cancelled_training_stays_cancelled_and_goes_on_when_asked_again(ended: Training) -> None:
    """scancel sends TERM as a preemption does; the job must save, but not requeue itself."""
    assert ended.seen["state"] == "CANCELLED"
    assert "was cancelled, by scancel or an operator" in ended.accounts[0].error
    assert ended.accounts[0].result is None
    (preempted,), (resumed,) = ended.events("preempted"), ended.events("resumed")
    assert preempted.data["step"] == resumed.data["step"] >= 12
    assert len(ended.events("submitted")) == 2
    assert ended.redone_steps() == 0


@about(
    "preempted",
    "preempted, user signal",
    "preempted, CANCEL",
    "preempted, no grace",
    "preempted, JobRequeue=0",
    "suspended",
    "cancelled",
)
def test_the_end_is_that_of_the_uninterrupted_run(ended: Training, scenarios: ScenarioRuns) -> None:
    ended.check_equal(scenarios.reference(ended.name))
