"""Several workers over gloo for a test: processes of its own, or a test file that is run as a program."""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.context import ForkContext, ForkServerContext
from pathlib import Path

# an optimizer's first step imports it: here once, not in every process that is forked
import torch._dynamo  # noqa: F401

from tula_hpc.env import SECRET_FILE
from tula_hpc.records.base import Record

ROOT = Path(__file__).parents[1]
QUICK_NAMES = "timeout:1 attempts:1"  # for RES_OPTIONS: torch looks up names for addresses, which DNS may not answer


def give_secret(folder: Path) -> None:
    """Make a folder what that of a submission is to its workers: the place of the secret by which they meet."""
    (folder / SECRET_FILE).write_text(secrets.token_hex(32))


def run_workers(program: str, *arguments: str | Path, timeout_s: float = 400, **environment: str) -> None:
    """Run a test file as a program, with Python's path and gloo's interface set for it; names are given up soon."""
    settings = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "RES_OPTIONS": QUICK_NAMES}
    command = [sys.executable, program, *map(str, arguments)]
    subprocess.run(command, check=True, timeout=timeout_s, env={**os.environ, **settings, **environment})


def fork_workers(workers: int, work: Callable[[int], None]) -> int:
    """`work(rank)` in as many processes, forked before torch starts any thread: torch is imported once.

    Returns:
        The exit code for the program: 0 if all workers ended well.
    """
    children = []
    for rank in range(1, workers):
        child = os.fork()
        if not child:
            work(rank)
            return 0
        children.append(child)
    work(0)
    return int(any(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))


def start_workers(workers: int, work: Callable[[int, Path], None], folder: Path, timeout_s: float = 400) -> None:
    """`work(rank, folder)` in as many processes of the test's own; all have to end well. See `context_of_workers`."""
    context = context_of_workers()
    processes = [context.Process(target=_over_loopback, args=(work, rank, folder)) for rank in range(workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout_s)
    ends = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert ends == [0] * workers


def context_of_workers() -> ForkServerContext | ForkContext:
    """How processes are started from the test's own: they are forked from it, so that none has to load torch.

    Not where torch's automatic differentiation has threads by now, which no fork takes along: it starts them for GPUs,
    be they there or only made believe by an earlier test. Then they are forked from a process that has loaded it for
    them all.
    """
    if not differentiates_in_threads():
        # their first use builds what reads them: here once, not in every process that is forked
        for kind in Record.__subclasses__():
            kind.model_rebuild()
        return get_context("fork")
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.lockstep", "timm.optim", "tula_hpc.training.loop"])
    return context


def differentiates_in_threads() -> bool:
    names: list[str] = []
    for path in Path("/proc/self/task").glob("*/comm"):
        # a thread may end while it is read
        with contextlib.suppress(OSError):
            names.append(path.read_text())
    return any(name.startswith("pt_autograd") for name in names)


def _over_loopback(work: Callable[[int, Path], None], rank: int, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    gc.freeze()  # what the test process holds need not be looked through for garbage
    work(rank, folder)
