"""Decide whether a job that ended without a result is submitted again, by tables and limits.

`stages/train.py` asks for a plan's training, `stages/profile.py` for profiles, and
`stages/train_many.py` for a study, which it gives up as a whole if the first trainings all fail
before a step. The answer depends on how the job failed (`failure_kinds.py`) and on its purpose:

    failure                 plan's training        study's training       a configuration's profile
    device_oom, host_oom    a smaller batch        given up               given up, and larger ones
    preempted               max_requeues + 1 jobs  max_requeues + 1 jobs  as often as it happens
    timed_out, node_failed  max_requeues + 1 jobs  max_requeues + 1 jobs  PROFILE_ATTEMPTS
    killed                  max_requeues + 1 jobs, STUDY_ATTEMPTS         PROFILE_ATTEMPTS
                            KILLS of them in vain
    device_failed           DEVICE_RETRIES more jobs in vain; each of     DEVICE_RETRIES more
                            them avoids the hosts of the jobs before
    bug                     given up               STUDY_ATTEMPTS         PROFILE_ATTEMPTS
    cancelled               given up               given up               PROFILE_ATTEMPTS
    no_space, bad_input     given up               given up               given up, and all others
    diverged                given up               given up               given up

After no_space or bad_input `stages/profile.py` gives up all profiles (FOR_THE_USER). A script that
keeps nothing and has no `resume_arguments` is given up once its time limit ended it, as the next
job would get no further: `attach/train/script_job.py` says so by `StopReason.LIMIT_IN_VAIN`.

The last jobs of a training were "in vain" if they all failed in the same way and started at the
same sample. Jobs of an earlier command do not count: the user may have removed the cause.
`analysis/search/propose.py` decides which larger configurations a lack of memory rules out; a
partition where nothing could be measured is given up as a whole, see `is_partition_hopeless`.

A job is also started again under its own id: by Slurm, as often as it likes; by the training itself
after a stop, up to `training.max_requeues` times in the jobs of one command; by submitit at the
time limit of a profile (TIME_OUTS) or controller (`controller_time_outs`); and by a controller's
batch script if its process is killed (REVIVALS).
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
# jobs of a study's training that ends in an apparent bug: a killed process looks the same
STUDY_ATTEMPTS = 3
# profile jobs of a configuration that fails for other reasons than memory
PROFILE_ATTEMPTS = 2
# submissions to a partition that fail, for other reasons than memory, before anything is measured
HOPELESS_ROUNDS = 3
# jobs after the first one that met a broken device; each avoids the hosts of the jobs before
DEVICE_RETRIES = 2
# requeues at the time limit of a job that leaves requeueing to submitit
TIME_OUTS = 3
# restarts of a controller job whose process is killed
REVIVALS = 3
# longest wait of a controller job for room under a site's limit; its own time limits requeue it
CONTROL_MINUTES = 30 * 24 * 60
UNBOUNDED = sys.maxsize
INTERRUPTIONS = (Failure.PREEMPTED, Failure.TIMED_OUT, Failure.NODE_FAILED)


class NextStep(Enum):
    """Consequence of the end of a training's job."""

    DONE = auto()
    AGAIN = auto()
    SMALLER_BATCH = auto()
    GIVE_UP = auto()


# reasons for a stop that would end the next job in the same way
FINAL = (StopReason.REQUEUES_EXHAUSTED, StopReason.LIMIT_IN_VAIN)


@dataclass(frozen=True)
class RetryPolicy:
    """Number of jobs that one command submits for a training, by how its last one failed.

    A failure that is in no table ends the training: the next job would fail in the same way.
    """

    # most jobs by their last failure; unless it is an interruption, interrupted jobs do not count
    jobs: Mapping[Failure, int]
    # most jobs in a row that failed like this and started at the same sample
    in_vain: Mapping[Failure, int]
    # failures after which a smaller batch is trained instead
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
            # an interrupted job says nothing about the training
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

    `broken_devices` counts the earlier jobs of that configuration that a broken device ended.
    """
    if failure is Failure.DEVICE_FAILED:
        # a broken device says nothing about the configuration
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
    """Tell whether to submit nothing more to a partition where nothing was measured so far.

    `failures` are those of this command's jobs there; `broken_rounds` counts its submissions that
    failed as `is_broken_round` says.
    """
    if broken_rounds >= HOPELESS_ROUNDS:
        return True
    # a job timed out after all its requeues, and another one would take as long
    return any(each.is_the_users or each is Failure.TIMED_OUT for each in failures)


def controller_time_outs(minutes: int) -> int:
    """Return how often a controller job with a time limit of `minutes` is requeued."""
    return math.ceil(CONTROL_MINUTES / minutes)
