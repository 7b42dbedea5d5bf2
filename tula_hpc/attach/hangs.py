"""Notice that a script's workers hang, and tell where in its code each of them is.

A training hangs where no worker's script gives any sign of life for very long (`HangWatch`). A sign
is a step, a batch of a loader, a pass of an evaluation, or a line of output. One worker that is
quiet for long may wait for another that evaluates or saves, so that all of them have to be.

A process that hangs is asked where it is by a signal, which Python's fault handler answers even
within a collective (`answer_where`); of one that fails the error tells it (`place_of`).
"""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import select
import signal
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tula_hpc.formatting import format_duration, plural
from tula_hpc.own_sources import is_own
from tula_hpc.records.base import Record

if TYPE_CHECKING:
    from tula_hpc.attach.processes import WorkerPeers

# the longest pause so far is not unusual up to so many times
TIMES = 10.0
# a worker that has not looked for so long was suspended, and its script with it
SUSPENDED_S = 10.0
# a signal that scripts have no use for, as they have for USR1
ASK = signal.SIGRTMIN + 5
ANSWER_S = 1.0
MOST_BYTES = 65536
# of a line of code in a message
SHOWN = 60
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in ', re.MULTILINE)
# folders of torch whose functions wait for other workers
_COLLECTIVE = ("distributed", "autograd", "parallel")


class Place(Record):
    """Line of the user's code in which a process is."""

    file: Path
    line: int
    # it is in a collective, or in a backward pass, which has some
    is_collective: bool

    def __str__(self) -> str:
        code = linecache.getline(str(self.file), self.line).strip()
        shown = code if len(code) <= SHOWN else f"{code[: SHOWN - 3]}..."
        where = f"{self.file.name}:{self.line}"
        return f"{where}, `{shown}`" if shown else where


def answer_where(answers: int) -> None:
    """Answer the signal from now on, by the frames of the main thread, through this pipe."""
    faulthandler.register(ASK, file=answers, all_threads=False)


def ask_where(process: int, answers: int) -> Place | None:
    """Ask a process that lives where it is, by its id and the other end of its pipe.

    Return None where it does not tell, or is in no own code.
    """
    os.kill(process, ASK)
    text = b""
    # all that it says comes in small pieces, one soon after the other
    patience_s = ANSWER_S
    while len(text) < MOST_BYTES and select.select([answers], [], [], patience_s)[0]:
        piece = os.read(answers, MOST_BYTES)
        if not piece:
            break
        text += piece
        patience_s = 0.1
    frames = [(name, int(line)) for name, line in _FRAME.findall(text.decode(errors="replace"))]
    return _innermost(frames)


def place_of(error: BaseException) -> Place | None:
    """Return where in the user's code an error was raised."""
    found = traceback.extract_tb(error.__traceback__)
    return _innermost([(frame.filename, frame.lineno or 0) for frame in reversed(found)])


def _innermost(frames: Sequence[tuple[str, int]]) -> Place | None:
    """Return the first frame that is the user's, of those that begin with the innermost."""
    own = next(((Path(name), line) for name, line in frames if is_own(name)), None)
    if own is None:
        return None
    # the last that was called: layers within a wrapped model wait for nobody
    last = Path(frames[0][0]).parts
    is_collective = "torch" in last and any(part in _COLLECTIVE for part in last)
    return Place(file=own[0], line=own[1], is_collective=is_collective)


def told(places: dict[int, Place], workers: int) -> str:
    """Return where those of so many workers are that tell it; `places` by rank."""
    ranks: dict[Place, list[int]] = {}
    for rank, place in sorted(places.items()):
        ranks.setdefault(place, []).append(rank)
    if len(ranks) == 1 and len(places) == workers:
        who = "its worker is" if workers == 1 else f"all {workers} workers are"
        return f"{who} at {next(iter(ranks))}"
    return "; ".join(f"{_named(of)} at {place}" for place, of in ranks.items())


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    return f"rank {ranks[0]} and {plural(len(ranks) - 1, 'other')} are"


def are_in_different_collectives(places: Iterable[Place]) -> bool:
    """Tell whether workers wait for each other without end."""
    found = set(places)
    return len(found) > 1 and all(place.is_collective for place in found)


class HangWatch:
    """One worker's part of the watch."""

    def __init__(self, peers: WorkerPeers, rank: int, world_size: int, least_s: float) -> None:
        self.peers = peers
        self.rank = rank
        self.world_size = world_size
        # silence that is never too long; 0: nothing is watched
        self.least_s = least_s
        # between two signs of life
        self.longest_s = 0.0
        self._last_s = 0.0
        self._looked_at = self._since = time.monotonic()
        self._is_quiet = False

    def look(self, silent_s: float | None) -> str | None:
        """Return a sentence once all workers' scripts hang; else None.

        `silent_s` is since the last sign of life of this one's; None: before its first step.
        """
        if not self.least_s or silent_s is None:
            return None
        now = time.monotonic()
        if now - self._looked_at > SUSPENDED_S:
            self._since = now
        self._looked_at = now
        quiet_s = min(silent_s, now - self._since)
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
