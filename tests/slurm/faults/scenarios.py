"""Faults that trainings meet: each scenario starts a training, causes a fault, and waits for the training's end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from signal import SIGUSR2
from typing import NamedTuple

from tests.run_factory import LATE_SWEEP, late_plan
from tests.slurm.faults.faulty_training import Settings, Training
from tula_hpc.config import SweepSpec
from tula_hpc.records import Configuration

PAIR = Configuration(nodes=1, workers_per_node=2, local_batch=32)
TWO_NODES = Configuration(nodes=2, workers_per_node=1, local_batch=32)
SUSPENDED_S = 20.0
# squeue gives up after 10 s
PAUSE_S = 15.0
# held by the scenario that changes the cluster's settings or depends on them
SETTINGS = threading.Lock()
OTHERS_ARE_OVER = threading.Event()

ALONE: Mapping[str, object] = {"exclusive": True, "memory_gb": 4.0}
NO_REQUEUE: Mapping[str, object] = {"sbatch": {"requeue": False, "no-requeue": True}}
# named by what a preemption does in the partition
REQUEUES: Mapping[str, object] = {**ALONE, "partition": "batch"}
CANCELS: Mapping[str, object] = {**ALONE, "partition": "cancel"}
KILLS: Mapping[str, object] = {**ALONE, "partition": "abrupt"}
SUSPENDS: Mapping[str, object] = {"partition": "suspend"}
SITE_DECIDES: Mapping[str, object] = {"sbatch": {"requeue": False}}
HUNGRY = SweepSpec.model_validate(
    {
        "name": "hungry",
        "workload": {
            "model": "tests.examples.hungry:build_one_rank",
            "dataset": "digits",
            "samples": 512,
            "epochs": 2,
            "loader_workers": 0,
        },
        "training": {"log_interval_steps": 1, "method": "lbt", "drift": False},
    }
)


def undisturbed(training: Training) -> None:
    """Train without a fault, as the reference of other scenarios."""
    training.start()
    training.end()


def time_limit(training: Training) -> None:
    """Reach a time limit of a minute until the one allowed requeue is used up; the next command ends the training."""
    training.start(train_minutes=1)
    training.end()
    training.hurry()
    training.start()
    training.end()


def requeue_refused(training: Training) -> None:
    """Send the signal of a time limit to a job that Slurm must not requeue."""
    training.start()
    training.wait_for_steps()
    training.strike(lambda: training.cluster.signal(training.job_id, "USR2"))
    training.wait_for_event("resumed")
    training.hurry()
    training.end()


def rank_killed(training: Training) -> None:
    """Kill the second of two workers."""
    training.start()
    training.wait_for_steps()
    training.strike(lambda: training.cluster.kill_task(training.job_id, 1))
    training.wait_for_event("resumed")
    training.hurry()
    training.end()


def second_node_killed(training: Training) -> None:
    """Kill all processes on a job's second node: the worker on the first notices at once, Slurm after a while."""
    training.start()
    training.wait_for_steps()
    host = training.cluster.hosts_of(training.job_id)[1]
    training.strike(lambda: training.cluster.kill_node(host))
    training.wait_for(lambda: host not in training.cluster.hosts_of(training.job_id), "the end of the job there")
    training.cluster.start_slurmd(host)
    training.wait_for_event("resumed")
    training.hurry()
    training.end()


def stale_writer(training: Training) -> None:
    """Kill slurmd alone: the old training lives on there while the requeued job runs on another node."""
    cluster = training.cluster
    training.start()
    training.wait_for_steps(6)
    (host,) = cluster.hosts_of(training.job_id)
    old = cluster.task_pids(training.job_id)[0]
    # slow enough that the old training does not finish before Slurm gives its node up
    training.set_pace(10.0)
    training.strike(lambda: cluster.kill_slurmd(host))
    training.wait_for_event("resumed")
    training.seen["old lived on"] = cluster.is_alive(old)
    training.seen["hosts"] = host, *cluster.hosts_of(training.job_id)
    training.wait_for(lambda: not cluster.is_alive(old), "the end of the stale writer")
    training.hurry()
    cluster.start_slurmd(host)
    training.end()


def job_killed(training: Training) -> None:
    """Kill all of the job's processes at once."""
    training.start()
    training.wait_for_steps()
    training.strike(lambda: training.cluster.kill_job(training.job_id))
    training.wait_for_event("resumed")
    training.hurry()
    training.end()


def damaged_checkpoint(training: Training) -> None:
    """Cut the newest checkpoint in half between two runs of a requeued job."""
    training.start()
    training.wait_for_steps()
    training.strike(lambda: training.cluster.signal(training.job_id, "USR2"))
    training.wait_for_event("requeued")
    before, newest = training.store.paths()[-2:]
    os.truncate(newest, newest.stat().st_size // 2)
    training.seen.update(damaged=newest.name, before=before.name)
    training.wait_for_event("resumed")
    training.hurry()
    training.end()


def preempted(training: Training, settings: AbstractContextManager[object] | None = None) -> None:
    """Preempt the job by one in a partition of higher priority; Slurm sends TERM."""
    training.start()
    training.wait_for_steps()
    # no other scenario may change which signal a preemption sends
    with SETTINGS, settings or nullcontext():
        training.strike(lambda: training.cluster.preempt(training.job_id))
        training.wait_for_event("preempted")
    training.wait_for_event("resumed")
    training.hurry()
    training.end()


def preempted_with_user_signal(training: Training) -> None:
    """Preempt the job while the site sets preempt_send_user_signal; Slurm sends USR2."""
    preempted(training, training.cluster.changed(user_signal=True))


def preempted_for_good(training: Training) -> None:
    """Preempt the job where Slurm kills it without grace time, cancels it, or must not requeue it."""
    training.start()
    training.wait_for_steps()
    first = training.job_id
    training.strike(lambda: training.cluster.preempt(first))
    training.wait_for_event("resumed")
    training.seen["state"] = training.cluster.job_state(first)
    training.hurry()
    training.end()


def suspended(training: Training) -> None:
    """Preempt the job in a partition that suspends: its processes are stopped until the other job is over."""
    training.start()
    training.wait_for_steps()
    # slow enough that the training does not end before Slurm suspends it
    training.set_pace(1.5)
    training.strike(lambda: training.cluster.preempt(training.job_id, SUSPENDED_S))
    state = training.cluster.job_state
    training.wait_for(lambda: state(training.job_id) == "SUSPENDED", "the job to be suspended")
    training.set_pace(training.settings.pace_s)

    def stands_still() -> bool:
        before = training.losses()[-1]
        # long enough for several steps
        time.sleep(2)
        return training.losses()[-1] == before

    training.wait_for(stands_still, "the processes to be stopped")
    training.seen["state"] = state(training.job_id)
    training.wait_for(lambda: state(training.job_id) == "RUNNING", "the job to go on")
    training.hurry()
    training.end()


def cancelled(training: Training) -> None:
    """Cancel the job with scancel, which sends TERM as a preemption does; then run the same command again."""
    training.start()
    training.wait_for_steps()
    training.strike(lambda: training.cluster.run("scancel", training.job_id))
    training.end()
    training.seen["state"] = training.cluster.job_state(training.job_id)
    training.start()
    training.wait_for_event("resumed")
    training.hurry()
    training.end()


def memory_late(training: Training) -> None:
    """Run out of memory in the third epoch; Slurm kills the step, and the training goes on with the plan's fallback."""
    training.start()
    training.end()


def memory_of_one_rank(training: Training) -> None:
    """Let one of two workers run out of memory, with a plan that has no smaller batch."""
    training.start()
    training.end()


def no_accounting(training: Training) -> None:
    """Without accounting and requeues, first send the signal of a time limit, then kill the worker."""
    training.start()
    training.wait_for_steps()
    training.strike(lambda: training.cluster.kill_task(training.job_id, 0, SIGUSR2))
    training.wait_for_event("resumed")
    training.wait_for_steps()
    training.strike(lambda: training.cluster.kill_task(training.job_id, 0))
    training.wait_for_event("resumed", 2)
    training.hurry()
    training.end()


def controller_gone(training: Training) -> None:
    """Restart, kill and pause the controller while the training runs and the command waits."""
    training.start()
    training.wait_for_steps()
    training.set_pace(5.0)
    # the controller takes a job that ended while it was down for running, for minutes
    OTHERS_ARE_OVER.wait()
    cluster = training.cluster
    for disturb in (cluster.restart_controller, cluster.kill_controller, lambda: cluster.pause_controller(PAUSE_S)):
        training.strike(disturb)
        # the command polls Slurm every 2 s, so it meets each disturbance
        time.sleep(3)
    training.hurry()
    training.end()


class Scenario(NamedTuple):
    """A training and what happens to it."""

    run: Callable[[Training], None]
    settings: Settings
    # the uninterrupted training that it must equal
    reference: str = "one"
    # stops the controller, or needs accounting and requeues off; starts after the others
    disturbs: bool = False
    # may still run while scenarios that disturb the controller run
    anytime: bool = False
    # a variation of another scenario; its tests are marked `thorough`
    thorough: bool = False


SCENARIOS: dict[str, Scenario] = {
    "second node killed": Scenario(second_node_killed, Settings(TWO_NODES, cluster=ALONE), "two", thorough=True),
    "stale writer": Scenario(stale_writer, Settings(cluster=ALONE, pace_s=1.0)),
    "time limit": Scenario(time_limit, Settings(training={"max_requeues": 1}, pace_s=2.0), anytime=True),
    "memory, late": Scenario(
        memory_late,
        Settings(Configuration(1, 1, 512), cluster={"memory_gb": 1.5}, spec=LATE_SWEEP, plan=late_plan()),
        reference="",
    ),
    "two": Scenario(undisturbed, Settings(PAIR, pace_s=0.0), "two"),
    "one": Scenario(undisturbed, Settings(pace_s=0.0)),
    "rank killed": Scenario(rank_killed, Settings(PAIR, cluster=ALONE), "two"),
    "preempted": Scenario(preempted, Settings(cluster=REQUEUES)),
    "preempted, user signal": Scenario(
        preempted_with_user_signal, Settings(PAIR, cluster=REQUEUES, loader_workers=1), "two", thorough=True
    ),
    "preempted, CANCEL": Scenario(preempted_for_good, Settings(cluster=CANCELS)),
    "preempted, no grace": Scenario(preempted_for_good, Settings(cluster=KILLS), thorough=True),
    "suspended": Scenario(suspended, Settings(PAIR, cluster=SUSPENDS), "two", thorough=True),
    "damaged checkpoint": Scenario(damaged_checkpoint, Settings(), thorough=True),
    "requeue refused": Scenario(requeue_refused, Settings(cluster=NO_REQUEUE), thorough=True),
    "job killed": Scenario(job_killed, Settings(), thorough=True),
    "cancelled": Scenario(cancelled, Settings()),
    "memory of one rank": Scenario(
        memory_of_one_rank,
        Settings(Configuration(1, 2, 256), cluster={"memory_gb": 1.5}, spec=HUNGRY),
        reference="",
        disturbs=True,
        thorough=True,
    ),
    "no accounting": Scenario(no_accounting, Settings(cluster=SITE_DECIDES), disturbs=True),
    "preempted, JobRequeue=0": Scenario(
        preempted_for_good, Settings(cluster={**REQUEUES, **SITE_DECIDES}), disturbs=True, thorough=True
    ),
    "controller gone": Scenario(controller_gone, Settings(), disturbs=True),
}
