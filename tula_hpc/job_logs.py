"""The logs of a job: those of its last run, as far as they tell why it ended."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tula_hpc.env import RUN_MARK
from tula_hpc.job_ends import DEVICE_WORDS, device_word, weight

MAX_LOG_BYTES = 200_000


def last_bytes(path: Path) -> str:
    """The end of a file, as text."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MAX_LOG_BYTES))
        return file.read().decode(errors="replace")


def read_logs(paths: Iterable[Path], read: Callable[[Path], str] = last_bytes) -> tuple[Path | None, list[str]]:
    """The log that says most about why its job ended, the first of equals; and all logs of the last run.

    Args:
        paths: Of the logs.
        read: Gives the end of a file.
    """
    logs = {path: _last_run(read(path)) for path in paths}
    return max(logs, key=lambda path: weight(logs[path]), default=None), list(logs.values())


def ends(logs: Sequence[str], lines: int) -> str:
    """So many last lines of each."""
    tails = ("\n".join(log.splitlines()[-lines:]) for log in logs)
    return "\n".join(tail for tail in tails if tail)


def complaining_nodes(paths: Iterable[Path]) -> list[int]:
    """Return the numbers, within their job, of the nodes whose tasks' logs say that a device is broken.

    submitit writes at the top of a task's log where it runs: `Starting with JobEnvironment(…, node=1(2), …)`. Where
    only nccl complains, and on several nodes, nobody knows which of them it is.
    """
    words: dict[str, list[str]] = {}
    nodes: dict[str, int] = {}
    for path in paths:
        text = last_bytes(path)
        task = path.stem
        if places := re.findall(r"Starting with JobEnvironment\(.*\bnode=(\d+)\(", text):
            nodes[task] = int(places[-1])
        if word := device_word(_last_run(text)):
            words.setdefault(task, []).append(word)
    found = {nodes[task]: said for task, said in words.items() if task in nodes}
    sure = [node for node, said in found.items() if any(re.search(DEVICE_WORDS, word) for word in said)]
    return sorted(sure) if sure or len(found) > 1 else list(found)


def _last_run(text: str) -> str:
    _, mark, last = text.rpartition(RUN_MARK)
    return last.partition("\n")[2] if mark else last
