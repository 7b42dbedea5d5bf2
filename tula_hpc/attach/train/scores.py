"""Read scores from a script's output by a regular expression, and record them with their epochs.

The output goes through a pipe to the worker, which writes it to the log as it comes.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from tula_hpc.env import unix_time
from tula_hpc.records import TrainDirectory, append_record, read_metrics
from tula_hpc.training.metrics_writer import write_scores

SCORES = ("test_accuracy", "test_top5_accuracy", "test_loss", "train_loss")
# bytes of a line; a longer line has no score
MOST_LINE_BYTES = 65_536
CHUNK_BYTES = 65_536
# accuracies above this are in percent; a mean of shares may be above 1 by rounding
LARGEST_SHARE = 1.001
# lines of scores that are corrected once their accuracies turn out to be percent
MOST_SHARES = 100
# least seconds between two records: a script may print its loss at each step, and each record
# writes an epoch's line anew
WRITTEN_EVERY_S = 30.0
# seconds to wait for the end of the output, which the script's own processes may hold open
DRAIN_S = 5.0


def as_share(name: str, value: float, *, is_percent: bool = False) -> float:
    """Return a score as records have it: accuracies above 1, or known to be percent, as shares."""
    if "accuracy" in name and (is_percent or value > LARGEST_SHARE):
        return value / 100.0
    return value


def known_scores(reported: Mapping[str, Any]) -> dict[str, float]:
    """Return a script's scores as records have them; a name that is not known is said to be so."""
    scores: dict[str, float] = {}
    for name, value in reported.items():
        if name not in SCORES:
            known = ", ".join(SCORES)
            words = f"tula.report: {name!r} is not a known score; expected one of {known}"
            sys.stderr.write(f"{words}\n")
        elif math.isfinite(float(value)):
            scores[name] = as_share(name, float(value))
    return scores


class Scores:
    """Reader of a script's output; without an expression the script writes to its log itself."""

    def __init__(self, pattern: str | None, files: TrainDirectory, log: IO[bytes]) -> None:
        # expression with groups that are named as in `SCORES`
        self.pattern = None if pattern is None else re.compile(pattern)
        self.files, self.log = files, log
        # scores with the size of the metrics file when they were printed, which shows their epoch
        self._found: deque[tuple[int, dict[str, float]]] = deque()
        self._began_at = unix_time()
        # accuracies are percent: in this start or before, one was above 1 or had the sign behind it
        self._is_percent = files.percent_file.exists()
        # last scores as they were printed, while accuracies are taken for shares
        self._shares: deque[tuple[int, dict[str, float]]] = deque(maxlen=MOST_SHARES)
        # the last scores within the first epoch
        self._within: dict[str, float] = {}
        self._rest = b""
        self._written_at = -math.inf
        self._thread: threading.Thread | None = None

    def read(self, process: subprocess.Popen[bytes]) -> None:
        """Read a process's output, if it comes through a pipe, in a thread of its own."""
        if process.stdout is not None:
            number = process.stdout.fileno()
            self._thread = threading.Thread(target=self._read, args=(number,), daemon=True)
            self._thread.start()

    def _read(self, number: int) -> None:
        while content := os.read(number, CHUNK_BYTES):
            # a full disk must not end this thread: without a reader the script would block
            with contextlib.suppress(OSError, ValueError):
                self.log.write(content)
                self.log.flush()
            self.take(content)
        self.take(b"\n")

    def close(self) -> None:
        """Wait for the end of the output, and record the last scores."""
        if self._thread is not None:
            self._thread.join(DRAIN_S)
        self.write()
        file = self.files.metrics_file
        # a script may evaluate within its first epoch, and then have no other
        if self._within and len(read_metrics(file).epochs) == 1 and not last_scores(file):
            write_scores(file, [(self._size(), self._within)])

    def take(self, content: bytes) -> None:
        """Look for scores in the next part of the output."""
        # progress bars end their lines with \r
        *lines, rest = (self._rest + content).replace(b"\r", b"\n").split(b"\n")
        self._rest = rest[-MOST_LINE_BYTES:]
        for line in lines:
            self._take_line(line[:MOST_LINE_BYTES].decode(errors="replace"))

    def _take_line(self, line: str) -> None:
        match = None if self.pattern is None else self.pattern.search(line)
        if match is None:
            return
        scores: dict[str, float] = {}
        for name, text in match.groupdict().items():
            # a group may be unmatched, or hold no number
            with contextlib.suppress(AttributeError, ValueError):
                # other groups of the expression are the user's own
                if name in SCORES and math.isfinite(value := float(text.rstrip(" %"))):
                    scores[name] = value
        if scores:
            self._note(match, scores)

    def _note(self, match: re.Match[str], scores: dict[str, float]) -> None:
        """Note scores as printed; if they turn out to be percent, note earlier ones anew."""
        noted = [(self._size(), scores)]
        if not self._is_percent:
            # the sign may stand in the group, too
            begins = {name: match.start(name) + len(match[name].rstrip(" %")) for name in scores}
            self._is_percent = any(
                "accuracy" in name
                and (scores[name] > LARGEST_SHARE or match.string[begin:].lstrip()[:1] == "%")
                for name, begin in begins.items()
            )
            self._shares += noted
            noted = list(self._shares) if self._is_percent else noted
        for size, values in noted:
            shares = {
                name: as_share(name, value, is_percent=self._is_percent)
                for name, value in values.items()
            }
            self._found.append((size, shares))

    def _size(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return self.files.metrics_file.stat().st_size
        return 0

    def look(self) -> None:
        """Record the scores that were found, at most every `WRITTEN_EVERY_S` seconds."""
        now = time.monotonic()
        if self._found and now - self._written_at >= WRITTEN_EVERY_S:
            self._written_at = now
            self.write()

    def write(self) -> None:
        """Record the scores that were found, each with the last epoch that had ended before it.

        Later scores of an epoch replace earlier ones.
        """
        # taken before the file is read, so that it holds all lines from before they were printed
        scores = [self._found.popleft() for _ in range(len(self._found))]
        if self._is_percent and not self.files.percent_file.exists():
            self.files.percent_file.touch()
            self._correct_earlier()
        if scores:
            self._within |= write_scores(self.files.metrics_file, scores)

    def _correct_earlier(self) -> None:
        """Correct accuracies of earlier starts, which were taken for shares and are percent."""
        for row in read_metrics(self.files.metrics_file).epochs:
            if row.ended_at is None or row.ended_at >= self._began_at:
                continue
            known = row.model_dump(include=set(SCORES), exclude_none=True)
            shares = {name: as_share(name, value, is_percent=True) for name, value in known.items()}
            append_record(self.files.metrics_file, row.model_copy(update=shares))


def last_scores(metrics_file: Path) -> dict[str, float]:
    """Return the last known value of each score."""
    latest: dict[str, float] = {}
    for row in read_metrics(metrics_file).epochs:
        latest |= row.model_dump(include=set(SCORES), exclude_none=True)
    return latest
