"""Why a job waits: Slurm's word for it in plain words, and whether it goes away by itself.

The words are those of "JOB REASON CODES" in squeue(1) and of the controller's own descriptions.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tula_hpc.slurm import JobState


class Wait(NamedTuple):
    """What a job waits for."""

    words: str  # "" where Slurm's word is none that is known here
    stuck: bool  # it will not go away by itself


class _Kind(NamedTuple):
    pattern: str  # of the whole word
    words: str
    stuck: bool = False


# In order: what is more specific first.
_KINDS = (
    _Kind("None|", "not looked at by the scheduler yet"),
    _Kind("Priority", "other jobs go first"),
    _Kind("Resources", "enough nodes have to become free"),
    _Kind("DependencyNeverSatisfied", "the job that it was to follow did not end as it should", stuck=True),
    _Kind("Dependency", "the job that it follows is not over"),
    _Kind("BeginTime", "its start is set for later; after a requeue about two minutes"),
    _Kind("JobHeldUser|.*held state|.*requeued held", "held; `scontrol release JOB` lets it go", stuck=True),
    _Kind("JobHeldAdmin", "held by an administrator", stuck=True),
    _Kind("JobHoldMaxRequeue", "held after too many requeues; `scontrol release JOB` lets it go", stuck=True),
    _Kind("JobArrayTaskLimit", "earlier tasks of its array, of which array_parallelism run at a time"),
    _Kind("ReqNodeNotAvail.*", "nodes that it needs are down, drained or reserved, for example for maintenance"),
    _Kind("Nodes required for job are .*", "nodes that it needs are down, drained or kept for other jobs"),
    _Kind("NodeDown", "a node that it needs is down"),
    _Kind("PartitionTimeLimit", "asks for more time than its partition allows", stuck=True),
    _Kind("PartitionNodeLimit", "asks for more nodes than its partition allows, or some of its nodes are down"),
    _Kind("PartitionConfig", "asks for more than its partition has or allows", stuck=True),
    _Kind("PartitionDown|PartitionInactive", "its partition is closed until an administrator opens it"),
    _Kind("MaxMemPerLimit", "asks for more memory than its partition allows", stuck=True),
    _Kind("DeadLine", "it cannot end before its deadline", stuck=True),
    _Kind("BadConstraints", "no node is as it asks for", stuck=True),
    _Kind("(Invalid|AccountNotAllowed|QOSNotAllowed).*", "its account or QOS may not be used here", stuck=True),
    _Kind("Reservation", "its reservation has not begun"),
    _Kind("ReservationDeleted", "its reservation was deleted", stuck=True),
    _Kind("(QOS|Assoc)Max.*Per(Job|Node).*", "asks for more than a single job may have", stuck=True),
    _Kind("(QOS|Assoc)Grp.*RunM.*", "other jobs of its account or QOS fill a limit"),
    _Kind("QOSMin.*", "asks for less than its QOS demands", stuck=True),
    _Kind("(QOS|Assoc)Grp.*(Minutes|Wall).*", "the budget of its account or QOS is used up", stuck=True),
    _Kind("QOSUsageThreshold", "its QOS is not used fairly enough for now"),
    _Kind("(QOS|Max).*(PerUser|PU).*", "your own other jobs fill a limit for one user"),
    _Kind("(QOS|Max).*(PerAccount|PA).*", "other jobs of its account fill a limit"),
    _Kind("QOSGrp.*|QOS.*Limit", "other jobs of its QOS fill a limit"),
    _Kind("AssocGrp.*|AssocMax.*|Association.*Limit", "other jobs of its account fill a limit"),
    _Kind("Licenses", "licences have to become free"),
    _Kind("BurstBuffer.*", "the burst buffer has to become free"),
    _Kind("Cleaning|Prolog", "the nodes are getting ready"),
    _Kind("(JobLaunchFailure|SystemFailure|NonZeroExitCode).*", "it could not be started", stuck=True),
)
_STATES = {
    "REQUEUE_HOLD": Wait("held after a requeue; `scontrol release JOB` lets it go", True),
    "SPECIAL_EXIT": Wait("held after a special exit; `scontrol release JOB` lets it go", True),
    "RESV_DEL_HOLD": Wait("held, since its reservation was deleted", True),
    "SUSPENDED": Wait("suspended, so that other jobs can run", False),
    "STOPPED": Wait("stopped; it keeps its nodes", False),
    "REQUEUED": Wait("requeued", False),
    "REQUEUE_FED": Wait("requeued", False),
    "EXPEDITING": Wait("requeued ahead of others", False),
    "LAUNCH_FAILED": Wait("its nodes could not start it", False),
    "RECONFIG_FAIL": Wait("its nodes could not be set up for it", False),
    "REVOKED": Wait("another cluster of the federation runs it", False),
}
WAITING = {"PENDING", *_STATES}  # all other states of a job that is not over are kinds of running


def waits(job: JobState) -> bool:
    """Whether a job that is not over waits."""
    return job.state in WAITING


def explain(job: JobState) -> Wait:
    """Why a job waits."""
    if job.state in _STATES:
        return _STATES[job.state]
    found = (kind for kind in _KINDS if re.fullmatch(kind.pattern, job.reason.strip("()")))
    kind = next(found, None)
    return Wait(kind.words, kind.stuck) if kind else Wait("", False)
