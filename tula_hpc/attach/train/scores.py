"""Scores in a script's output: read by a regular expression, and put beside the epoch they are of.

The output goes through a pipe to the worker, which writes it to the log as it comes.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tula_hpc.env import unix_time
from tula_hpc.records import TrainDirectory, append_record, read_metrics
from tula_hpc.training.metrics_writer import write_scores

SCORES = ("test_accuracy", "test_top5_accuracy", "test_loss", "train_loss")
# of one line; what is longer is no line with a score
MOST_LINE_BYTES = 65_536
CHUNK_BYTES = 65_536
# accuracies above are in percent; those of a mean may be above 1 by rounding
LARGEST_SHARE = 1.001
# that are corrected once they turn out to be percent
MOST_SHARES = 100
# a script may print its loss at each step, and each time an epoch's line is written anew
WRITTEN_EVERY_S = 30.0
# of waiting for the last of the output, which processes of the script's own may hold open
DRAIN_S = 5.0


def as_share(name: str, value: float, *, is_percent: bool = False) -> float:
    """Return a score as records have it: an accuracy above 1 is in percent, as others may be."""
    if "accuracy" in name and (is_percent or value > LARGEST_SHARE):
        return value / 100.0
    return value


class Scores:
    """Reader of a script's output; without an expression the script writes to its log itself."""

    def __init__(self, pattern: str | None, files: TrainDirectory, log: IO[bytes]) -> None:
        # with groups that are named as `SCORES`
        self.pattern = None if pattern is None else re.compile(pattern)
        self.files, self.log = files, log
        # with the size that the metrics had when each was printed: the last epoch by then counts
        self._found: deque[tuple[int, dict[str, float]]] = deque()
        self._began_at = unix_time()
        # accuracies are percent: one was above 1, or has the sign behind it, in this start or before
        self._is_percent = files.percent_file.exists()
        # the last ones, as they were printed, that were taken for shares
        self._shares: deque[tuple[int, dict[str, float]]] = deque(maxlen=MOST_SHARES)
        self._rest = b""
        self._written_at = -math.inf
        self._thread: threading.Thread | None = None

    @classmethod
    @contextlib.contextmanager
    def of(cls, pattern: str | None, files: TrainDirectory, log: IO[bytes]) -> Iterator[Scores]:
        """Read in the block, and put the last scores on record at its end."""
        scores = cls(pattern, files, log)
        try:
            yield scores
        finally:
            if scores._thread is not None:
                scores._thread.join(DRAIN_S)
            scores.write()

    @property
    def output(self) -> int | IO[bytes]:
        """Return the destination of the script's output, as subprocess takes it."""
        return self.log if self.pattern is None else subprocess.PIPE

    def read(self, process: subprocess.Popen[bytes]) -> None:
        """Read a process's output, in a thread of its own."""
        if self.pattern is not None and process.stdout is not None:
            number = process.stdout.fileno()
            self._thread = threading.Thread(target=self._read, args=(number,), daemon=True)
            self._thread.start()

    def _read(self, number: int) -> None:
        while content := os.read(number, CHUNK_BYTES):
            # a full disk must not end the script, which would wait for a reader
            with contextlib.suppress(OSError, ValueError):
                self.log.write(content)
                self.log.flush()
            self.take(content)
        self.take(b"\n")

    def take(self, content: bytes) -> None:
        """Look for scores in the next part of the output."""
        # progress bars end their lines so
        *lines, rest = (self._rest + content).replace(b"\r", b"\n").split(b"\n")
        self._rest = rest[-MOST_LINE_BYTES:]
        for line in lines:
            self._take_line(line[:MOST_LINE_BYTES].decode(errors="replace"))

    def _take_line(self, line: str) -> None:
        if self.pattern is None:
            return
        found = self.pattern.search(line)
        if found is None:
            return
        scores: dict[str, float] = {}
        for name, text in found.groupdict().items():
            # a group may take part in no match, or hold no number
            with contextlib.suppress(TypeError, ValueError):
                # other groups of the expression are the user's own
                if name in SCORES and math.isfinite(value := float(text)):
                    scores[name] = value
        if scores:
            self._note(found, scores)

    def _note(self, found: re.Match[str], scores: dict[str, float]) -> None:
        """Note scores as they were printed; where they tell the unit, those before are noted anew."""
        noted = [(self._size(), scores)]
        if not self._is_percent:
            signs = {name: found.string[found.end(name) :].lstrip()[:1] for name in scores}
            self._is_percent = any(
                "accuracy" in name and (scores[name] > LARGEST_SHARE or sign == "%")
                for name, sign in signs.items()
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
        """Record the scores that were found, every `WRITTEN_EVERY_S` at most."""
        now = time.monotonic()
        if self._found and now - self._written_at >= WRITTEN_EVERY_S:
            self._written_at = now
            self.write()

    def write(self) -> None:
        """Record the scores that were found, each beside the last epoch that was over by then.

        Later scores of an epoch replace earlier ones.
        """
        # before the file is read, which must hold what each of them was printed after
        found = [self._found.popleft() for _ in range(len(self._found))]
        if self._is_percent and not self.files.percent_file.exists():
            self.files.percent_file.touch()
            self._correct_earlier()
        if found:
            write_scores(self.files.metrics_file, found)

    def _correct_earlier(self) -> None:
        """Take the accuracies of earlier starts, which were taken for shares, for percent."""
        for row in read_metrics(self.files.metrics_file).epochs:
            if row.ended_at is None or row.ended_at >= self._began_at:
                continue
            known = {name: getattr(row, name) for name in SCORES if getattr(row, name) is not None}
            shares = {name: as_share(name, value, is_percent=True) for name, value in known.items()}
            append_record(self.files.metrics_file, row.model_copy(update=shares))


def last_scores(metrics_file: Path) -> dict[str, float]:
    """Return the last of each score that is known."""
    found: dict[str, float] = {}
    for row in read_metrics(metrics_file).epochs:
        values = {name: getattr(row, name) for name in SCORES}
        found |= {name: value for name, value in values.items() if value is not None}
    return found
