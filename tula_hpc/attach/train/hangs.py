"""Notice that a script's training hangs: no worker's script gives any sign of life for very long.

A sign is a step, a batch of a loader, a pass of an evaluation, or a line of output. One worker that
is quiet for long may wait for another that evaluates or saves, so that all of them have to be.
"""

from __future__ import annotations

import time
from typing import Protocol

from tula_hpc.formatting import format_duration

# the longest pause so far is not unusual up to so many times
TIMES = 10.0
# a worker that has not looked for so long was suspended, and its script with it
SUSPENDED_S = 10.0


class Quiet(Protocol):
    """A script's process that is silent."""

    def silent_s(self) -> float:
        """Return the seconds since its last sign of life."""

    def said(self) -> object | None:
        """Return its last message; None before its first step."""


class Told(Protocol):
    """Messages between the workers."""

    def tell_quiet(self, rank: int, *, is_quiet: bool) -> None:
        """Tell the others whether this worker's script is quiet."""

    def are_all_quiet(self, world_size: int) -> bool:
        """Tell whether those of all workers are."""


class HangWatch:
    """One worker's part of the watch.

    Args:
        peers: The other workers.
        rank: Of this one.
        world_size: Number of workers.
        least_s: Silence that is never too long; 0: any may be.
    """

    def __init__(self, peers: Told, rank: int, world_size: int, least_s: float) -> None:
        self.peers, self.rank, self.world_size, self.least_s = peers, rank, world_size, least_s
        # between two signs of life
        self.longest_s = 0.0
        self._last_s = 0.0
        self._looked_at = self._since = time.monotonic()
        self._is_quiet = False

    def look(self, child: Quiet) -> str | None:
        """Return a sentence once all workers' scripts hang; else None."""
        if not self.least_s or child.said() is None:
            return None
        now = time.monotonic()
        if now - self._looked_at > SUSPENDED_S:
            self._since = now
        self._looked_at = now
        quiet_s = min(child.silent_s(), now - self._since)
        if quiet_s < self._last_s:
            self.longest_s = max(self.longest_s, self._last_s)
        self._last_s = quiet_s
        is_quiet = quiet_s > max(self.least_s, TIMES * self.longest_s)
        if is_quiet != self._is_quiet:
            self._is_quiet = is_quiet
            self.peers.tell_quiet(self.rank, is_quiet=is_quiet)
        if not is_quiet or not self.peers.are_all_quiet(self.world_size):
            return None
        return self._sentence(quiet_s)

    def _sentence(self, quiet_s: float) -> str:
        workers = "its worker" if self.world_size == 1 else f"any of its {self.world_size} workers"
        before = format_duration(max(self.longest_s, 1.0))
        return (
            f"hangs: no step, batch, evaluation or output of {workers} for "
            f"{format_duration(quiet_s)}, at most {before} before (workload.hang_minutes)"
        )
