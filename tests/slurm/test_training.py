"""Training that is preempted, cancelled or runs out of memory on the real cluster; see stories.py."""

from __future__ import annotations

from tests.slurm.faulty_training import Training
from tests.slurm.telling import Stories, about
from tula_hpc.errors import Failure
from tula_hpc.records import read_metrics


@about("one")
def test_losses_of_the_uninterrupted_run(told: Training) -> None:
    losses = [epoch.train_loss for epoch in read_metrics(told.files.metrics_file).epochs]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    assert told.events("resumed") == []


@about("preempted", "preempted, user signal")
def test_a_preempted_job_resumes_where_it_stopped(told: Training) -> None:
    (preempted,), (resumed,) = told.events("preempted"), told.events("resumed")
    assert preempted.data["step"] == resumed.data["step"] >= 12
    assert ("SIGUSR2" if "user signal" in told.name else "SIGTERM") in preempted.detail
    assert preempted.job_id == resumed.job_id
    assert told.result().restarts == 1
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
    assert "cancelled in job" in told.accounts[0].error
    assert told.accounts[0].result is None
    (preempted,), (resumed,) = told.events("preempted"), told.events("resumed")
    assert preempted.data["step"] == resumed.data["step"] >= 12
    assert len(told.events("submitted")) == 2
    assert told.redone_steps() == 0


@about("preempted", "preempted, user signal", "cancelled")
def test_the_end_is_that_of_the_uninterrupted_run(told: Training, stories: Stories) -> None:
    told.check_equal(stories.reference(told.name))
