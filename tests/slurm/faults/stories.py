"""Faults that trainings meet: each story starts a training, causes something, and sees to the end of it."""

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
PAUSE_S = 15.0  # squeue gives up after 10 s
SETTINGS = threading.Lock()  # of the cluster: one change at a time
OTHERS_ARE_OVER = threading.Event()

ALONE: Mapping[str, object] = {"exclusive": True, "memory_gb": 4.0}
NO_REQUEUE: Mapping[str, object] = {"sbatch": {"requeue": False, "no-requeue": True}}
REQUEUES: Mapping[str, object] = {**ALONE, "partition": "batch"}  # what a preemption does there
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
    """The uninterrupted run that the others are held against."""
    training.start()
    training.end()


def time_limit(training: Training) -> None:
    """A limit of a minute, one requeue allowed: it is used up, and the same command again goes on to the end."""
    training.start(train_minutes=1)
    training.end()
    training.hurry()
    training.start()
    training.end()


def requeue_refused(training: Training) -> None:
    """The job may not be requeued, and gets the signal of a time limit."""
    training.start()
    training.wait_for_steps()
    training.strike(lambda: training.cluster.signal(training.job_id, "USR2"))
    training.wait_for_event("resumed")
    training.hurry()
    training.end()


def rank_killed(training: Training) -> None:
    """SIGKILL for the second of two workers."""
    training.start()
    training.wait_for_steps()
    training.strike(lambda: training.cluster.kill_task(training.job_id, 1))
    training.wait_for_event("resumed")
    training.hurry()
    training.end()


def second_node_killed(training: Training) -> None:
    """SIGKILL for everything on the second of a job's two nodes: its peer notices at once, Slurm after a while."""
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
    """SIGKILL for slurmd alone: the training lives on there while the requeued job runs on another node."""
    cluster = training.cluster
    training.start()
    training.wait_for_steps(6)
    (host,) = cluster.hosts_of(training.job_id)
    old = cluster.task_pids(training.job_id)[0]
    # the old one is not to finish before Slurm gives its node up
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
    """SIGKILL for all of the job's processes at once."""
    training.start()
    training.wait_for_steps()
    training.strike(lambda: training.cluster.kill_job(training.job_id))
    training.wait_for_event("resumed")
    training.hurry()
    training.end()


def damaged_checkpoint(training: Training) -> None:
    """Between two runs of a requeued job the newest checkpoint is cut in half."""
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
    """A job in a higher-priority partition takes the nodes: TERM."""
    training.start()
    training.wait_for_steps()
    with SETTINGS, settings or nullcontext():  # else not the user signal
        training.strike(lambda: training.cluster.preempt(training.job_id))
        training.wait_for_event("preempted")
    training.wait_for_event("resumed")
    training.hurry()
    training.end()


def preempted_with_user_signal(training: Training) -> None:
    """The same where the site has preempt_send_user_signal: USR2."""
    preempted(training, training.cluster.changed(user_signal=True))


def preempted_for_good(training: Training) -> None:
    """The same where Slurm leaves no time, or must not requeue the job, or cancels it."""
    training.start()
    training.wait_for_steps()
    first = training.job_id
    training.strike(lambda: training.cluster.preempt(first))
    training.wait_for_event("resumed")
    training.seen["state"] = training.cluster.job_state(first)
    training.hurry()
    training.end()


def suspended(training: Training) -> None:
    """The same where the partition suspends: the job's processes are stopped until the other job is over."""
    training.start()
    training.wait_for_steps()
    # it is not to be over before Slurm has suspended it
    training.set_pace(1.5)
    training.strike(lambda: training.cluster.preempt(training.job_id, SUSPENDED_S))
    state = training.cluster.job_state
    training.wait_for(lambda: state(training.job_id) == "SUSPENDED", "the job to be suspended")
    training.set_pace(training.settings.pace_s)

    def stands_still() -> bool:
        before = training.losses()[-1]
        time.sleep(2)  # several steps
        return training.losses()[-1] == before

    training.wait_for(stands_still, "the processes to be stopped")
    training.seen["state"] = state(training.job_id)
    training.wait_for(lambda: state(training.job_id) == "RUNNING", "the job to go on")
    training.hurry()
    training.end()


def cancelled(training: Training) -> None:
    """scancel, which sends TERM as a preemption does; then the same command again."""
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
    """The model becomes hungry in its third epoch; Slurm kills the step, and the plan's fallback takes over."""
    training.start()
    training.end()


def memory_of_one_rank(training: Training) -> None:
    """One of two workers needs too much, and the plan has no smaller batch."""
    training.start()
    training.end()


def no_accounting(training: Training) -> None:
    """Without accounting, where no job is requeued: first the signal of a time limit, then SIGKILL of the worker."""
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
    """The controller is restarted, killed and paused while the training runs and the command waits."""
    training.start()
    training.wait_for_steps()
    training.set_pace(5.0)
    OTHERS_ARE_OVER.wait()  # a job that ends while the controller dies runs for minutes more in its eyes
    cluster = training.cluster
    for disturb in (cluster.restart_controller, cluster.kill_controller, lambda: cluster.pause_controller(PAUSE_S)):
        training.strike(disturb)
        time.sleep(3)  # the command asks every 2 s
    training.hurry()
    training.end()


class Story(NamedTuple):
    """A training and what happens to it."""

    tell: Callable[[Training], None]
    settings: Settings
    reference: str = "one"  # the uninterrupted training that it must equal
    disturbs: bool = False  # is told without accounting, or stops the cluster's controller
    anytime: bool = False  # does not mind the former
    thorough: bool = False  # a variation of what other stories tell


STORIES: dict[str, Story] = {
    "second node killed": Story(second_node_killed, Settings(TWO_NODES, cluster=ALONE), "two"),
    "stale writer": Story(stale_writer, Settings(cluster=ALONE, pace_s=1.0)),
    "time limit": Story(time_limit, Settings(training={"max_requeues": 1}, pace_s=2.0), anytime=True),
    "memory, late": Story(
        memory_late,
        Settings(Configuration(1, 1, 512), cluster={"memory_gb": 1.5}, spec=LATE_SWEEP, plan=late_plan()),
        reference="",
    ),
    "two": Story(undisturbed, Settings(PAIR, pace_s=0.0), "two"),
    "one": Story(undisturbed, Settings(pace_s=0.0)),
    "rank killed": Story(rank_killed, Settings(PAIR, cluster=ALONE), "two"),
    "preempted": Story(preempted, Settings(PAIR, cluster=REQUEUES, loader_workers=1), "two"),
    "preempted, user signal": Story(preempted_with_user_signal, Settings(cluster=REQUEUES), thorough=True),
    "preempted, CANCEL": Story(preempted_for_good, Settings(cluster=CANCELS)),
    "preempted, no grace": Story(preempted_for_good, Settings(cluster=KILLS)),
    "suspended": Story(suspended, Settings(PAIR, cluster=SUSPENDS), "two"),
    "damaged checkpoint": Story(damaged_checkpoint, Settings()),
    "requeue refused": Story(requeue_refused, Settings(cluster=NO_REQUEUE), thorough=True),
    "job killed": Story(job_killed, Settings(), thorough=True),
    "cancelled": Story(cancelled, Settings()),
    "memory of one rank": Story(
        memory_of_one_rank,
        Settings(Configuration(1, 2, 256), cluster={"memory_gb": 1.5}, spec=HUNGRY),
        reference="",
        disturbs=True,
    ),
    "no accounting": Story(no_accounting, Settings(cluster=SITE_DECIDES), disturbs=True),
    "preempted, JobRequeue=0": Story(
        preempted_for_good, Settings(cluster={**REQUEUES, **SITE_DECIDES}), disturbs=True, thorough=True
    ),
    "controller gone": Story(controller_gone, Settings(), disturbs=True),
}
