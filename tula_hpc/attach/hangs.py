"""Notice that a script's workers hang, and find where in its code each of them is.

A training hangs when no worker's script gives any sign of life for very long (`HangWatch`). A sign
of life is a step, a batch of a loader, a pass of an evaluation, or a line of output. A single quiet
worker may be waiting for another that evaluates or saves, so all of them have to be quiet.

A process that hangs is asked for its place in the code by a signal, which Python's fault handler
answers even within a collective (`answer_where`). If a process fails, its error shows the place
(`place_of`).
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

# silence is unusual only above this multiple of the longest pause so far
TIMES = 10.0
# a worker that has not looked for longer than this was suspended, and its script with it
SUSPENDED_S = 10.0
# signal that asks a process where it is; unlike USR1, scripts have no use for it
ASK = signal.SIGRTMIN + 5
ANSWER_S = 1.0
MOST_BYTES = 65536
# most characters of a line of code in a message
SHOWN = 60
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in ', re.MULTILINE)
# folders of torch whose functions wait for other workers
_COLLECTIVE = ("distributed", "autograd", "parallel")


class Place(Record):
    """Line of the user's code in which a process is."""

    file: Path
    line: int
    # whether the process is in a collective, or in a backward pass, which runs collectives
    is_collective: bool

    @property
    def code(self) -> str:
        """Return the line itself; "" if it cannot be read."""
        return linecache.getline(str(self.file), self.line).strip()

    def __str__(self) -> str:
        code = self.code
        shown = code if len(code) <= SHOWN else f"{code[: SHOWN - 3]}..."
        where = f"{self.file.name}:{self.line}"
        return f"{where}, `{shown}`" if shown else where


def answer_where(answers: int) -> None:
    """From now on, answer `ASK` with the frames of the main thread, through the pipe `answers`."""
    faulthandler.register(ASK, file=answers, all_threads=False)


def ask_where(process: int, answers: int) -> Place | None:
    """Ask a living process, by its id and the read end of its pipe, where in the user's code it is.

    Return None if it does not answer, or none of its frames is the user's own code.
    """
    os.kill(process, ASK)
    text = b""
    # the answer comes in small pieces, which soon follow each other
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
    """Return the innermost frame of the user's own code; `frames` begin with the innermost."""
    own = next(((Path(name), line) for name, line in frames if is_own(name)), None)
    if own is None:
        return None
    # only the innermost frame counts: layers within a wrapped model wait for nobody
    last = Path(frames[0][0]).parts
    is_collective = "torch" in last and any(part in _COLLECTIVE for part in last)
    return Place(file=own[0], line=own[1], is_collective=is_collective)


def describe_places(places: dict[int, Place], workers: int) -> str:
    """Describe where the workers are; `places` has the known places by rank."""
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
    """Tell whether workers wait for each other without end, in different collectives."""
    found = set(places)
    return len(found) > 1 and all(place.is_collective for place in found)


class HangWatch:
    """One worker's part in the watch for hangs."""

    def __init__(self, peers: WorkerPeers, rank: int, world_size: int, least_s: float) -> None:
        self.peers = peers
        self.rank = rank
        self.world_size = world_size
        # seconds of silence that are never too long; 0: nothing is watched
        self.least_s = least_s
        # longest time so far between two signs of life
        self.longest_s = 0.0
        self._last_s = 0.0
        self._looked_at = self._since = time.monotonic()
        self._is_quiet = False

    def look(self, silent_s: float | None) -> str | None:
        """Return a sentence once all workers' scripts hang; else None.

        `silent_s` is the time since the last sign of life of this worker's script; None: the
        script has not taken its first step.
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
            self.peers.report_quiet(self.rank, is_quiet=is_quiet)
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
