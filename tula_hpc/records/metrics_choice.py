"""Even choice of the steps in a metrics.jsonl of millions, in two passes and little memory.

The first pass looks at where each line belongs, without parsing those that the trainer wrote; the
second one parses the chosen. Of each of `MAX_STEPS` parts with equally many steps one is chosen by
chance, so that nothing periodic is missed or doubled; one with a reading of the noise scale, which
are rare, goes first.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tula_hpc.records.metrics import (
    MAX_STEPS,
    AnyMetrics,
    Metrics,
    StepMetrics,
    metrics_lines,
    parse_metrics,
    split,
)
from tula_hpc.records.storage import Bounds, out_of_bounds

MAX_LINES = 5_000_000
# the same file gives the same choice
SEED = 0

Places = NDArray[np.int64]

# a line as the trainer writes it: fields in order, without blanks
_STEP = re.compile(rb'\{"kind":"step","step":\d+,"samples_seen":(\d{1,15}),')
_NOISE = b'"noise_trace":'


class _Index:
    """Places of the logged steps in the file, and all other lines."""

    def __init__(self) -> None:
        self.line = array("q")
        self.samples_seen = array("d")
        # whether the line has a reading of it
        self.noise = array("b")
        self.others: list[AnyMetrics] = []
        self.skipped = 0

    def add(self, place: int, line: bytes) -> bool:
        """Take a line in; tell whether it was one that is held as a record."""
        found = _STEP.match(line)
        if found is None or not line.endswith(b"}\n"):
            return self._add_parsed(place, line)
        noise_at = line.find(_NOISE)
        has_noise = noise_at >= 0 and not line.startswith(b"null", noise_at + len(_NOISE))
        self._add_step(place, int(found[1]), has_noise)
        return False

    def _add_parsed(self, place: int, line: bytes) -> bool:
        try:
            row = parse_metrics(line)
        except ValueError:
            self.skipped += 1
            return False
        if isinstance(row, StepMetrics):
            self._add_step(place, row.samples_seen, row.noise_trace is not None)
            return False
        self.others.append(row)
        return True

    def _add_step(self, place: int, samples_seen: int, has_noise: bool) -> None:
        self.line.append(place)
        self.samples_seen.append(samples_seen)
        self.noise.append(has_noise)

    def kept(self) -> Places:
        """Return the indices of the steps that count, by samples seen: see `read_metrics`."""
        seen = np.asarray(self.samples_seen)
        order = np.argsort(seen, kind="stable")
        is_last = np.append(np.diff(seen[order]) > 0, True)[: len(order)]
        kept: Places = order[is_last]
        return kept


def read_chosen(path: Path) -> Metrics:
    """Read like `read_metrics`, with a choice of the steps beyond `MAX_STEPS`.

    Raises:
        RunDirectoryError: The file cannot be read, or is out of all bounds.
    """
    index = _indexed(path)
    kept = index.kept()
    chosen = kept[even_choice(np.asarray(index.noise)[kept] > 0)]
    steps, skipped = _parsed(path, set(np.asarray(index.line)[chosen].tolist()))
    if len(kept) > len(chosen) and steps and all(row.scaled_nothing for row in steps):
        # whether any step was scaled is told of all of them
        steps += _first_scaled(path, set(np.asarray(index.line)[kept].tolist()))
    found = split([*index.others, *steps], index.skipped + skipped)
    return found._replace(logged=len(kept) if len(kept) > len(chosen) else 0)


def _indexed(path: Path) -> _Index:
    index, bounds = _Index(), Bounds()
    for place, line in enumerate(metrics_lines(path)):
        if place >= MAX_LINES:
            advice = "a larger training.log_interval_steps keeps it shorter"
            raise out_of_bounds(path, f"at most {MAX_LINES:,} lines", advice)
        if index.add(place, line):
            bounds.check(path, len(index.others), len(line))
    return index


def even_choice(preferred: NDArray[np.bool_], most: int = MAX_STEPS) -> Places:
    """Choose one element of each of `most` pieces, preferred ones first, and both ends always."""
    count = len(preferred)
    if count <= most:
        return np.arange(count)
    random = np.random.default_rng(SEED)
    edges = np.arange(most + 1) * count // most
    chosen = random.integers(edges[:-1], edges[1:])
    first = random.permutation(np.flatnonzero(preferred))
    chosen[np.searchsorted(edges, first, side="right") - 1] = first
    chosen[[0, -1]] = 0, count - 1
    return chosen


def _parsed(path: Path, wanted: set[int]) -> tuple[list[StepMetrics], int]:
    """Parse the lines at these places; count those that could not be read."""
    found = list(_steps_at(path, wanted))
    return found, len(wanted) - len(found)


def _steps_at(path: Path, wanted: set[int]) -> Iterator[StepMetrics]:
    for place, line in enumerate(metrics_lines(path)):
        if place in wanted:
            try:
                row = parse_metrics(line)
            except ValueError:
                continue
            if isinstance(row, StepMetrics):
                yield row


def _first_scaled(path: Path, wanted: set[int]) -> list[StepMetrics]:
    return next(([row] for row in _steps_at(path, wanted) if not row.scaled_nothing), [])
