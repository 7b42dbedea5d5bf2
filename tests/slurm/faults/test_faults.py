"""Every fault that a training meets on a shared cluster, caused for real; see stories.py and the table in README.md."""

from __future__ import annotations

from tests.slurm.faults.faulty_training import Training
from tests.slurm.faults.telling import Stories, about
from tula_hpc.failure_kinds import Failure

KILLED = ("rank killed", "second node killed", "stale writer", "job killed")
STOPPED = ("time limit", "requeue refused")  # by a signal, so that everything is saved
OTHERS = ("damaged checkpoint", "no accounting", "controller gone")


@about(*KILLED, *STOPPED, *OTHERS)
def test_the_end_is_that_of_the_uninterrupted_run(told: Training, stories: Stories) -> None:
    told.check_equal(stories.reference(told.name))


@about(*KILLED)
def test_a_killed_training_goes_on_from_its_last_checkpoint(told: Training) -> None:
    (strike,), resumed = told.strikes, told.events("resumed")[0]
    assert resumed.data["samples_seen"] >= strike.saved > 0


@about(*STOPPED)
def test_a_training_that_is_told_to_stop_loses_no_step(told: Training) -> None:
    stopped = [event.data["samples_seen"] for event in told.events("preempted")]
    # a job that has just finished may still be preempted for another story, and resume at its end
    finished = told.events("finished")[0].time
    resumed = [event.data["samples_seen"] for event in told.events("resumed") if event.time < finished]
    assert resumed == stopped
    assert stopped
    assert told.redone_steps() == 0


@about("time limit")
def test_time_limits_end_a_training_when_its_requeues_are_used_up(told: Training) -> None:
    first, second = told.accounts
    assert first.result is None
    assert first.error.startswith("train: restarted 1 times, as often as training.max_requeues allows")
    assert "Traceback" not in first.error
    assert second.result is not None
    (requeued,), (stopped, used_up) = told.events("requeued"), told.events("preempted")
    assert requeued.job_id == stopped.job_id == used_up.job_id


@about("requeue refused")
def test_a_refused_requeue_is_said_and_the_training_is_submitted_again(told: Training) -> None:
    refused = next(event for event in told.events("failed") if "requeue refused" in event.detail)
    (resumed,) = told.events("resumed")
    jobs = [event.job_id for event in told.events("submitted")]
    assert [refused.job_id, resumed.job_id] == jobs
    assert told.events("failed")[-1].failure is Failure.PREEMPTED


@about("rank killed", "job killed")
def test_a_job_with_a_killed_process_ends_at_once_and_another_follows(told: Training) -> None:
    (failed,) = told.events("failed")
    assert failed.failure is Failure.KILLED
    assert told.events("resumed")[0].job_id != told.events("submitted")[0].job_id


@about("second node killed")
def test_a_training_whose_node_failed_goes_on(told: Training) -> None:
    """Slurm requeues its job, unless srun gives up on the lost node before: then another job follows."""
    failures = {event.failure for event in told.events("failed")}
    assert failures <= {Failure.KILLED, Failure.NODE_FAILED}
    assert len(told.events("submitted")) == 1 + len(told.events("failed"))
    assert told.events("resumed")[-1].job_id == told.job_id


@about("stale writer")
def test_slurm_requeues_a_job_whose_node_failed(told: Training) -> None:
    (submitted,), (resumed,) = told.events("submitted"), told.events("resumed")
    assert submitted.job_id == resumed.job_id
    assert told.events("failed") == []


@about("stale writer")
def test_a_process_that_outlived_its_node_cannot_save(told: Training) -> None:
    assert told.seen["old lived on"]
    old, new = told.seen["hosts"]
    assert old != new
    assert "is a left-over" in told.logs()
    assert all("-r0001-" in path.name for path in told.store.paths())


@about("damaged checkpoint")
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_used(told: Training) -> None:
    (resumed,) = told.events("resumed")
    assert f"{told.seen['damaged']} refused: is truncated" in resumed.detail
    assert f"from {told.seen['before']} " in resumed.detail


@about("controller gone")
def test_a_training_does_not_notice_that_the_controller_is_gone(told: Training) -> None:
    assert len(told.events("submitted")) == len(told.accounts) == 1
    assert {event.event for event in told.events()} <= {"submitted", "checkpoint", "finished", "ended"}
    assert told.redone_steps() == 0
    assert told.events("finished")[0].time > told.strikes[-1].at


@about("no accounting")
def test_without_accounting_a_training_ends_and_its_failures_have_names(told: Training) -> None:
    assert any("requeue refused" in event.detail for event in told.events("failed"))
    failures = [event.failure for event in told.events("failed") if event.failure]
    assert failures == [Failure.PREEMPTED, Failure.KILLED]
    first, second = told.events("resumed")
    assert first.data["samples_seen"] == told.events("preempted")[0].data["samples_seen"]
    assert second.data["samples_seen"] >= told.strikes[1].saved


@about("memory of one rank")
def test_memory_of_one_worker_is_named_and_without_a_smaller_batch_the_training_ends(told: Training) -> None:
    """Without accounting, as it happens: the log alone tells."""
    failed = [m for m in told.run.measurements().records if m.status == "oom"]
    assert [(m.local_batch, m.failure) for m in failed] == [(256, Failure.HOST_OOM)]
    assert len(told.events("fell_back")) == 1
    assert told.accounts[0].result is None
    assert told.accounts[0].error == ("train: out of memory at local batch 256, and plan.json has no smaller fallback")
