"""Retry policy: is a job that ended without a result submitted again? All tables and limits stand here.

The answer depends on how the job failed (`failure_kinds.py`) and on its purpose:

    failure                 plan's training        study's training       a configuration's profile
    device_oom, host_oom    a smaller batch        given up               given up, and larger ones
    preempted               max_requeues + 1 jobs  max_requeues + 1 jobs  as often as it happens
    timed_out, node_failed  max_requeues + 1 jobs  max_requeues + 1 jobs  PROFILE_ATTEMPTS
    killed                  as these, but of jobs  STUDY_ATTEMPTS         PROFILE_ATTEMPTS
                            in vain KILLS
    device_failed           DEVICE_RETRIES more, in vain; every failure   DEVICE_RETRIES more
                            leaves out the hosts of those before
    bug                     given up               STUDY_ATTEMPTS         PROFILE_ATTEMPTS
    cancelled               given up               given up               PROFILE_ATTEMPTS
    no_space, bad_input     given up               given up               given up, and all others
    diverged                given up               given up               given up

A script that keeps nothing and has no `resume_arguments` is given up once its time limit ended it:
the next job would get as far.

"In vain" are a training's last jobs that ended alike and had begun at one sample. Jobs of an
earlier command do not count: the user may have removed the cause. `analysis/search/propose.py`
decides which larger ones lack of memory rules out; a partition where nothing could be measured
is given up as a whole, see `is_partition_hopeless`.

A job is also started again under its own id: by the training itself after a stop, up to
`training.max_requeues` times; by submitit at the time limit of a profile (TIME_OUTS) or controller
(`controller_time_outs`); and by a controller's batch script where its process is killed (REVIVALS).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from tula_hpc.failure_kinds import Failure
from tula_hpc.records import RunHistory, StopReason
from tula_hpc.records.events import JobFailure

# jobs in a row that were killed before they got any further: then the training itself is the cause
KILLS = 3
# of a study's training that dies of what looks like a bug: a killed process looks the same
STUDY_ATTEMPTS = 3
# of a configuration that fails for other reasons than memory
PROFILE_ATTEMPTS = 2
# of profile jobs that fail, for other reasons than memory, before anything was measured
HOPELESS_ROUNDS = 3
# after the first job that met a broken device: each leaves out the hosts of those before
DEVICE_RETRIES = 2
# requeues after a time limit of a job that leaves them to submitit
TIME_OUTS = 3
# of a controller job whose process is killed
REVIVALS = 3
# so long a controller job may wait for room below a limit, requeued at each time limit of its own
CONTROL_MINUTES = 30 * 24 * 60
UNBOUNDED = sys.maxsize
INTERRUPTIONS = (Failure.PREEMPTED, Failure.TIMED_OUT, Failure.NODE_FAILED)


class NextStep(Enum):
    """Consequence of the end of a training's job."""

    DONE = auto()
    AGAIN = auto()
    SMALLER_BATCH = auto()
    GIVE_UP = auto()


# another job would end alike
FINAL = (StopReason.REQUEUES_EXHAUSTED, StopReason.LIMIT_IN_VAIN)


@dataclass(frozen=True)
class RetryPolicy:
    """Number of jobs that one command submits for a training, by how its last one failed.

    A failure that is in no table ends the training: the next job would fail in the same way.
    """

    # jobs in all, but for a failure that is no interruption: those that were not interrupted
    jobs: Mapping[Failure, int]
    # last jobs that all failed like this and had begun at the same sample
    in_vain: Mapping[Failure, int]
    # a smaller batch is trained instead
    smaller_batch: frozenset[Failure] = frozenset()

    def judge(
        self, history: RunHistory, label: str, failure: JobFailure, since: float = 0.0
    ) -> NextStep:
        """Decide the next step after a job that ended without a result and is on record.

        Jobs of earlier commands, from before this one began (`since`, Unix time), do not count.
        """
        kind = failure.kind or Failure.BUG
        attempts = history.attempts(label, since)
        if kind in self.smaller_batch:
            return NextStep.SMALLER_BATCH
        # an earlier command's job: the user may have removed the cause
        if attempts == 0:
            return NextStep.AGAIN
        if kind not in INTERRUPTIONS:
            # an interrupted job says nothing of the training
            attempts -= history.ends(label, INTERRUPTIONS, since)
        if failure.stop in FINAL or attempts >= self.jobs.get(kind, 1):
            return NextStep.GIVE_UP
        most = self.in_vain.get(kind)
        if most is not None and history.in_vain(label, kind, since) >= most:
            return NextStep.GIVE_UP
        return NextStep.AGAIN


def plan_policy(max_requeues: int) -> RetryPolicy:
    """Return the table of the training that a plan chose."""
    return RetryPolicy(
        jobs={
            **dict.fromkeys((*INTERRUPTIONS, Failure.KILLED), max_requeues + 1),
            Failure.DEVICE_FAILED: UNBOUNDED,
        },
        in_vain={Failure.KILLED: KILLS, Failure.DEVICE_FAILED: DEVICE_RETRIES + 1},
        smaller_batch=frozenset(failure for failure in Failure if failure.is_oom),
    )


def study_policy(max_requeues: int) -> RetryPolicy:
    """Return the table of a study's training: its batch is given."""
    return RetryPolicy(
        jobs={
            **dict.fromkeys(INTERRUPTIONS, max_requeues + 1),
            **dict.fromkeys((Failure.BUG, Failure.KILLED), STUDY_ATTEMPTS),
            Failure.DEVICE_FAILED: UNBOUNDED,
        },
        in_vain={Failure.DEVICE_FAILED: DEVICE_RETRIES + 1},
    )


def is_held_against(failure: Failure, broken_devices: int) -> bool:
    """Tell whether a failed profile job counts as an attempt at the configuration that it measured.

    Args:
        failure: Of the job.
        broken_devices: Earlier jobs that a device ended while they measured the same.
    """
    if failure is Failure.DEVICE_FAILED:
        # it says nothing of the configuration
        return broken_devices >= DEVICE_RETRIES
    return failure is not Failure.PREEMPTED


def is_configuration_given_up(failure: Failure | None, attempts: int) -> bool:
    """Tell whether a configuration is not measured again, by the last of its failures on record."""
    if failure is None:
        return attempts >= PROFILE_ATTEMPTS
    # a broken device is recorded after the last attempt only, see `is_held_against`
    is_final = failure is Failure.DEVICE_FAILED or failure.is_the_users
    return is_final or attempts >= PROFILE_ATTEMPTS


def is_broken_round(failure: Failure) -> bool:
    """Tell whether a profile job's failure counts for `HOPELESS_ROUNDS`."""
    return not failure.is_oom and failure is not Failure.PREEMPTED


def is_partition_hopeless(failures: Iterable[Failure], broken_rounds: int) -> bool:
    """Tell whether nothing more is submitted to a partition where nothing was measured so far.

    Args:
        failures: Of this command's jobs there.
        broken_rounds: Submissions of this command with a failure as `is_broken_round` means it.
    """
    if broken_rounds >= HOPELESS_ROUNDS:
        return True
    # after all its requeues another job would take as long
    return any(each.is_the_users or each is Failure.TIMED_OUT for each in failures)


def controller_time_outs(minutes: int) -> int:
    """Return how often a controller job is requeued at this time limit."""
    return math.ceil(CONTROL_MINUTES / minutes)
