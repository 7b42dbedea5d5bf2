"""Where in its code a script's process is, for messages about workers that wait for each other.

A process that hangs is asked by a signal, which Python's fault handler answers even within a
collective (`answer_where`); of one that fails the error tells it (`place_of`).
"""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import select
import signal
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

from tula_hpc.formatting import plural
from tula_hpc.own_sources import is_own
from tula_hpc.records.base import Record

# to which scripts hardly listen, as they do to USR1
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
    """Answer the signal from now on, by the frames of the main thread.

    Args:
        answers: Descriptor of a pipe.
    """
    faulthandler.register(ASK, file=answers, all_threads=False)


def ask_where(process: int, answers: int) -> Place | None:
    """Ask a process that lives where it is; None where it does not tell, or is in no own code.

    Args:
        process: Its id.
        answers: Other end of its pipe.
    """
    os.kill(process, ASK)
    text = b""
    # all that it says comes in small pieces, one soon after the other
    patience_s = ANSWER_S
    while len(text) < MOST_BYTES and select.select([answers], [], [], patience_s)[0]:
        piece = os.read(answers, MOST_BYTES)
        if not piece:
            break
        text, patience_s = text + piece, 0.1
    frames = [(name, int(line)) for name, line in _FRAME.findall(text.decode(errors="replace"))]
    return _innermost(frames)


def place_of(error: BaseException) -> Place | None:
    """Return where in the user's code an error was raised."""
    found = traceback.extract_tb(error.__traceback__)
    return _innermost([(frame.filename, frame.lineno or 0) for frame in reversed(found)])


def _innermost(frames: Sequence[tuple[str, int]]) -> Place | None:
    """Return the first frame that is the user's, of those that begin with the innermost."""
    is_collective = False
    for name, line in frames:
        path = Path(name)
        if is_own(path):
            return Place(file=path, line=line, is_collective=is_collective)
        is_collective |= "torch" in path.parts and any(part in _COLLECTIVE for part in path.parts)
    return None


def told(places: dict[int, Place]) -> str:
    """Return where the workers are; `places` by rank."""
    ranks: dict[Place, list[int]] = {}
    for rank, place in sorted(places.items()):
        ranks.setdefault(place, []).append(rank)
    if len(ranks) == 1:
        who = "its worker is" if len(places) == 1 else f"all {len(places)} workers are"
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
