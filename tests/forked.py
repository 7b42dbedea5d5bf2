"""Several workers over gloo for a test: a test file that is run as a program is those workers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_workers(program: str, *arguments: str | Path, timeout_s: float = 120, **environment: str) -> None:
    """Run a test file as a program, with Python's path and gloo's interface set for it."""
    paths = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, program, *map(str, arguments)]
    subprocess.run(command, check=True, timeout=timeout_s, env={**os.environ, **paths, **environment})


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


def free_ports(count: int) -> list[str]:
    """One for each process group: a quick worker could still meet the last group's store under the same port."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [str(each.getsockname()[1]) for each in sockets]
