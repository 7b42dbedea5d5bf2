"""Start several workers over gloo: forked from a test's process, or by running a benchmark's file as a program."""

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

# imported by an optimizer's first step: imported here once, no forked process has to do it again
import torch._dynamo  # noqa: F401

from tula_hpc.env import SECRET_FILE, WorkerEnvironment
from tula_hpc.records.base import Record

ROOT = Path(__file__).parents[1]
# a single worker, which needs no others and so no process of its own
ALONE = WorkerEnvironment(0, 1, 0, 0, "1", 0, ("here",), on_slurm=False)
# value of RES_OPTIONS: torch looks up names of addresses, and a DNS server that does not answer must not delay it
QUICK_NAMES = "timeout:1 attempts:1"


def give_secret(folder: Path) -> None:
    """Write the secret by which workers meet into a folder, as a submission's folder has it."""
    (folder / SECRET_FILE).write_text(secrets.token_hex(32))


def run_workers(program: str, *arguments: str | Path, timeout_s: float = 400, **environment: str) -> None:
    """Run a file as a program, with PYTHONPATH, gloo's interface and a short limit for DNS look-ups."""
    settings = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "RES_OPTIONS": QUICK_NAMES}
    command = [sys.executable, program, *map(str, arguments)]
    subprocess.run(command, check=True, timeout=timeout_s, env={**os.environ, **settings, **environment})


def fork_workers(workers: int, work: Callable[[int], None]) -> int:
    """Run `work(rank)` in `workers` processes, forked before torch starts any thread, so torch is imported only once.

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
    """Run `work(rank, folder)` in `workers` processes, and assert that each exits with 0. See `context_of_workers`."""
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
    """Return how to start workers: forked from the test's process, so that none has to load torch.

    If torch's automatic differentiation has started threads, which a fork does not copy, workers are forked from a
    server process that has loaded torch once. It starts threads for GPUs, real ones or those that an earlier test
    simulated.
    """
    if not differentiates_in_threads():
        # pydantic builds a record's validator at its first use: built here once, no forked process has to do it again
        for kind in Record.__subclasses__():
            kind.model_rebuild()
        return get_context("fork")
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.lockstep", "timm.optim", "tula_hpc.training.loop"])
    return context


def differentiates_in_threads() -> bool:
    names: list[str] = []
    for path in Path("/proc/self/task").glob("*/comm"):
        # a thread may end before its name is read
        with contextlib.suppress(OSError):
            names.append(path.read_text())
    return any(name.startswith("pt_autograd") for name in names)


def _over_loopback(work: Callable[[int, Path], None], rank: int, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # spare the garbage collector the objects of the test process
    gc.freeze()
    work(rank, folder)
