"""Test which failures of a training or of a profile lead to another job, from the policy's tables alone."""

from __future__ import annotations

import pytest

from tula_hpc.failure_kinds import Failure
from tula_hpc.records import Event, RunHistory, StopReason
from tula_hpc.records.events import JobFailure
from tula_hpc.retry_policy import (
    HOPELESS_ROUNDS,
    UNBOUNDED,
    NextStep,
    RetryPolicy,
    is_broken_round,
    is_configuration_given_up,
    is_held_against,
    is_partition_hopeless,
    plan_policy,
    study_policy,
)

PLAN_TABLE, STUDY_TABLE = plan_policy(max_requeues=6), study_policy(max_requeues=6)
# jobs of one command that fail like this: of the plan's training and of a study's, at the same sample; of a profile
ENDS = {
    Failure.DEVICE_OOM: (NextStep.SMALLER_BATCH, 1, 2),
    Failure.HOST_OOM: (NextStep.SMALLER_BATCH, 1, 2),
    Failure.PREEMPTED: (7, 7, UNBOUNDED),
    Failure.TIMED_OUT: (7, 7, 2),
    Failure.NODE_FAILED: (7, 7, 2),
    Failure.DEVICE_FAILED: (3, 3, 3),
    Failure.KILLED: (3, 3, 2),
    Failure.NO_SPACE: (1, 1, 2),
    Failure.CANCELLED: (1, 1, 2),
    Failure.BAD_INPUT: (1, 1, 1),
    Failure.DIVERGED: (1, 1, 1),
    Failure.BUG: (1, 3, 2),
}


def jobs_until_given_up(policy: RetryPolicy, failure: Failure, step: int = 0, interrupted: int = 0) -> int | NextStep:
    """Count the jobs of a training that always fails like this; each resumes `step` samples after the one before.

    The first `interrupted` jobs are preempted instead.
    """
    events: list[Event] = []
    for job in range(1, 30):
        common = {"stage": "train", "time": 1.0, "job_id": str(job)}
        for name, fields in (
            ("submitted", {"data": {"label": "a"}}),
            ("resumed", {"data": {"samples_seen": job * step}}),
            ("ended", {"failure": (how := Failure.PREEMPTED if job <= interrupted else failure)}),
        ):
            events.append(Event.model_validate({**common, **fields, "event": name}))
        next_step = policy.judge(RunHistory(events), "a", JobFailure(how), since=1.0)
        if next_step is not NextStep.AGAIN:
            return job if next_step is NextStep.GIVE_UP else next_step
    return UNBOUNDED


def profiles_until_given_up(failure: Failure) -> int:
    """Count the jobs that measure one configuration and always fail like this."""
    attempts = 0
    for job in range(1, 30):
        attempts += is_held_against(failure, broken_devices=job - 1)
        if attempts and is_configuration_given_up(failure, attempts):
            return job
    return UNBOUNDED


@pytest.mark.parametrize("failure", Failure)
def test_the_tables_say_how_many_jobs_a_training_and_a_profile_get(failure: Failure) -> None:
    trained = jobs_until_given_up(PLAN_TABLE, failure), jobs_until_given_up(STUDY_TABLE, failure)
    assert (*trained, profiles_until_given_up(failure)) == ENDS[failure]


def test_a_partition_is_given_up_after_three_rounds_or_where_no_other_job_ends_better() -> None:
    assert not is_partition_hopeless([Failure.KILLED, Failure.PREEMPTED, Failure.HOST_OOM], HOPELESS_ROUNDS - 1)
    assert is_partition_hopeless([], HOPELESS_ROUNDS)
    assert {each for each in Failure if is_partition_hopeless([each], 0)} == {
        Failure.BAD_INPUT, Failure.DIVERGED, Failure.TIMED_OUT,
    }  # fmt: skip
    assert {each for each in Failure if not is_broken_round(each)} == {
        Failure.PREEMPTED, Failure.DEVICE_OOM, Failure.HOST_OOM,
    }  # fmt: skip


def test_whatever_gets_further_each_time_is_tried_again_but_for_the_number_of_requeues() -> None:
    assert jobs_until_given_up(PLAN_TABLE, Failure.DEVICE_FAILED, step=64) == UNBOUNDED
    assert jobs_until_given_up(STUDY_TABLE, Failure.DEVICE_FAILED, step=64) == UNBOUNDED
    assert jobs_until_given_up(PLAN_TABLE, Failure.KILLED, step=64) == 7
    assert jobs_until_given_up(STUDY_TABLE, Failure.KILLED, step=64) == 3


def test_a_preempted_job_uses_up_no_attempt_of_another_failure() -> None:
    assert jobs_until_given_up(STUDY_TABLE, Failure.BUG, interrupted=2) == 2 + 3
    assert jobs_until_given_up(PLAN_TABLE, Failure.BUG, interrupted=2) == 2 + 1
    assert jobs_until_given_up(STUDY_TABLE, Failure.TIMED_OUT, interrupted=2) == 7


def test_a_training_that_gets_further_is_not_killed_in_vain_though_its_nodes_clock_is_behind() -> None:
    events = [
        Event(time=time, event=name, stage="train", job_id=str(job), failure=failure, data=data)
        for job in (1, 2, 3)
        for time, name, failure, data in (
            (5.0, "submitted", None, {"label": "a"}),
            (1.0, "resumed", None, {"samples_seen": job}),
            (6.0, "ended", Failure.KILLED, {}),
        )
    ]
    assert PLAN_TABLE.judge(RunHistory(events), "a", JobFailure(Failure.KILLED), since=4.0) is NextStep.AGAIN


def test_a_preempted_job_of_an_earlier_command_does_not_count_for_this_one() -> None:
    events = [
        Event(time=time, event=name, stage="train", job_id=job, failure=failure, data={"label": "a"})
        for time, name, job, failure in (
            (1.0, "submitted", "1", None),
            (3.0, "ended", "1", Failure.PREEMPTED),
            (4.0, "submitted", "2", None),
            (5.0, "ended", "2", Failure.CANCELLED),
        )
    ]
    assert PLAN_TABLE.judge(RunHistory(events), "a", JobFailure(Failure.CANCELLED), since=2.0) is NextStep.GIVE_UP


@pytest.mark.parametrize("policy", [PLAN_TABLE, STUDY_TABLE])
@pytest.mark.parametrize("stop", [None, *StopReason])
def test_a_training_whose_requeues_are_used_up_is_given_up_but_by_a_new_command(
    policy: RetryPolicy, stop: StopReason | None
) -> None:
    submitted = {"time": 1.0, "event": "submitted", "stage": "train", "job_id": "1", "data": {"label": "a"}}
    history, failure = RunHistory([Event.model_validate(submitted)]), JobFailure(Failure.PREEMPTED, stop=stop)
    used_up = stop in (StopReason.REQUEUES_EXHAUSTED, StopReason.LIMIT_IN_VAIN)
    assert policy.judge(history, "a", failure, since=1.0) is (NextStep.GIVE_UP if used_up else NextStep.AGAIN)
    assert policy.judge(history, "a", failure, since=2.0) is NextStep.AGAIN
