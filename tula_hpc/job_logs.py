"""The logs of a job: those of its last run, as far as they tell why it ended."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from tula_hpc.env import RUN_MARK

MAX_LOG_BYTES = 200_000


def read_logs(paths: Iterable[Path]) -> tuple[Path | None, list[str]]:
    """The log that tells most, and all logs of the last run: a traceback beats a slurmstepd message beats silence."""
    best: Path | None = None
    logs: list[str] = []
    for path in paths:
        text = _last_run(_last_bytes(path))
        if best is None or ("Traceback" in text and "Connection closed by peer" not in text):
            best = path
        logs.append(text)
    return best, logs


def ends(logs: Sequence[str], lines: int) -> str:
    """So many last lines of each."""
    tails = ("\n".join(log.splitlines()[-lines:]) for log in logs)
    return "\n".join(tail for tail in tails if tail)


def _last_run(text: str) -> str:
    _, mark, last = text.rpartition(RUN_MARK)
    return last.partition("\n")[2] if mark else last


def _last_bytes(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MAX_LOG_BYTES))
        return file.read().decode(errors="replace")
