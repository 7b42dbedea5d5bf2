"""Processes of loaders: started clean, deaf to the signals that tell a job to stop, and gone when their owner is.

Neither nccl nor CUDA survives a fork, nor do locks that other threads hold: processes come from a server that was
started clean and that imports torch once for all of them.

TERM and USR2 ask a training to save at the next whole step, for which it needs its loader. Where Slurm tracks processes
by cgroup it tells only the tasks, elsewhere their children too, as `kill` of a process group does. What is blocked when
a process starts stays so in it and in those that it starts. So the owner ends them with KILL, and they watch over it:
the server ends only when they have, and torch's own look at the parent process sees the server.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import select
import signal
import threading
from collections.abc import Iterator
from functools import partial
from multiprocessing import forkserver, resource_tracker
from typing import Any

import torch

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


def process_options(count: int, module: str) -> dict[str, Any]:
    """Options of a `DataLoader`; the servers that its processes come from are running then.

    Args:
        count: Of processes.
        module: That the server imports for all of them.
    """
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    with _deaf():  # starting the tracker lets TERM through again, so that the server is started apart
        resource_tracker.ensure_running()
    with _deaf():
        forkserver.ensure_running()
    _end_all_at_exit()
    return {
        "num_workers": count,
        "multiprocessing_context": context,
        "worker_init_fn": partial(_end_with, os.getpid()),
    }


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Signals that come meanwhile are delivered to this process afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@functools.cache  # once for each process
def _end_all_at_exit() -> None:
    """Before multiprocessing waits at exit for those that it has sent TERM, which it does where a loader has failed."""
    atexit.register(_end_all)


def _end_all() -> None:
    for process in multiprocessing.active_children():
        process.kill()


def _end_with(owner: int, _: int) -> None:
    """In a loader's process: end as soon as another has, however it did."""
    try:
        alive = os.pidfd_open(owner)
    except ProcessLookupError:
        os._exit(1)
    except OSError:  # a kernel before 5.3
        return

    def watch() -> None:
        select.select([alive], [], [])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="owner").start()
