"""The logs of a job: those of its last run, as far as they tell why it ended."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tula_hpc.env import RUN_MARK
from tula_hpc.job_ends import weight

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


def _last_run(text: str) -> str:
    _, mark, last = text.rpartition(RUN_MARK)
    return last.partition("\n")[2] if mark else last
