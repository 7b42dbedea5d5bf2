"""Every fault that a training meets on a shared cluster; see scenarios.py and the table in README.md."""

from __future__ import annotations

from tests.slurm.faults.faulty_training import Training
from tests.slurm.faults.scenario_runs import ScenarioRuns, about
from tula_hpc.failure_kinds import Failure

KILLED = ("rank killed", "second node killed", "stale writer", "job killed")
# by a signal, so that everything is saved
STOPPED = ("time limit", "requeue refused")
OTHERS = ("damaged checkpoint", "no accounting", "controller gone")


@about(*KILLED, *STOPPED, *OTHERS)
def test_the_end_is_that_of_the_uninterrupted_run(ended: Training, scenarios: ScenarioRuns) -> None:
    ended.check_equal(scenarios.reference(ended.name))


@about(*KILLED)
def test_a_killed_training_goes_on_from_its_last_checkpoint(ended: Training) -> None:
    (strike,), resumed = ended.strikes, ended.events("resumed")[0]
    assert resumed.data["samples_seen"] >= strike.saved > 0


@about(*STOPPED)
def test_a_training_that_is_told_to_stop_loses_no_step(ended: Training) -> None:
    stopped = [event.data["samples_seen"] for event in ended.events("preempted")]
    # a job that has just finished may still be preempted for another scenario, and resume at its end
    finished = ended.events("finished")[0].time
    resumed = [event.data["samples_seen"] for event in ended.events("resumed") if event.time < finished]
    assert resumed == stopped
    assert stopped
    assert ended.redone_steps() == 0


@about("time limit")
def test_time_limits_end_a_training_when_its_requeues_are_used_up(ended: Training) -> None:
    first, second = ended.accounts
    assert first.result is None
    assert first.error.startswith("train: restarted 1 time, as often as training.max_requeues allows")
    assert "Traceback" not in first.error
    assert second.result is not None
    (requeued,), (stopped, used_up) = ended.events("requeued"), ended.events("preempted")
    assert requeued.job_id == stopped.job_id == used_up.job_id


@about("requeue refused")
def test_a_refused_requeue_is_reported_and_the_training_is_submitted_again(ended: Training) -> None:
    refused = next(event for event in ended.events("failed") if "requeue refused" in event.detail)
    (resumed,) = ended.events("resumed")
    jobs = [event.job_id for event in ended.events("submitted")]
    assert [refused.job_id, resumed.job_id] == jobs
    assert ended.events("failed")[-1].failure is Failure.PREEMPTED


@about("rank killed", "job killed")
def test_a_job_with_a_killed_process_ends_at_once_and_another_follows(ended: Training) -> None:
    (failed,) = ended.events("failed")
    assert failed.failure is Failure.KILLED
    assert ended.events("resumed")[0].job_id != ended.events("submitted")[0].job_id


@about("second node killed")
def test_a_training_whose_node_failed_goes_on(ended: Training) -> None:
    """Slurm requeues its job, unless srun gives up on the lost node before: then another job follows."""
    failures = {event.failure for event in ended.events("failed")}
    assert failures <= {Failure.KILLED, Failure.NODE_FAILED}
    assert len(ended.events("submitted")) == 1 + len(ended.events("failed"))
    assert ended.events("resumed")[-1].job_id == ended.job_id


@about("stale writer")
def test_slurm_requeues_a_job_whose_node_failed(ended: Training) -> None:
    (submitted,), (resumed,) = ended.events("submitted"), ended.events("resumed")
    assert submitted.job_id == resumed.job_id
    assert ended.events("failed") == []


@about("stale writer")
def test_a_process_that_outlived_its_node_cannot_save(ended: Training) -> None:
    assert ended.seen["old lived on"]
    old, new = ended.seen["hosts"]
    assert old != new
    assert "is a left-over" in ended.logs()
    assert all("-r0001-" in path.name for path in ended.store.paths())


@about("damaged checkpoint")
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_used(ended: Training) -> None:
    (resumed,) = ended.events("resumed")
    assert f"{ended.seen['damaged']} refused: is truncated" in resumed.detail
    assert f"from {ended.seen['before']} " in resumed.detail


@about("controller gone")
def test_a_training_does_not_notice_that_the_controller_is_gone(ended: Training) -> None:
    assert len(ended.events("submitted")) == len(ended.accounts) == 1
    assert {event.event for event in ended.events()} <= {"submitted", "checkpoint", "finished", "ended"}
    assert ended.redone_steps() == 0
    assert ended.events("finished")[0].time > ended.strikes[-1].at


@about("no accounting")
def test_without_accounting_a_training_ends_and_its_failures_have_names(ended: Training) -> None:
    assert any("requeue refused" in event.detail for event in ended.events("failed"))
    failures = [event.failure for event in ended.events("failed") if event.failure]
    assert failures == [Failure.PREEMPTED, Failure.KILLED]
    first, second = ended.events("resumed")
    assert first.data["samples_seen"] == ended.events("preempted")[0].data["samples_seen"]
    assert second.data["samples_seen"] >= ended.strikes[1].saved


@about("memory of one rank")
def test_memory_of_one_worker_is_named_and_without_a_smaller_batch_the_training_ends(ended: Training) -> None:
    """Without accounting, as it happens: the log alone tells."""
    failed = [m for m in ended.run.measurements().records if m.status == "oom"]
    assert [(m.local_batch, m.failure) for m in failed] == [(256, Failure.HOST_OOM)]
    assert len(ended.events("fell_back")) == 0
    assert ended.accounts[0].result is None
    assert ended.accounts[0].error == (
        "train: out of memory at local batch 256, and plan.json has no smaller fallback; use nodes with more memory, "
        "or a smaller search.min_batch with another --run-dir"
    )
