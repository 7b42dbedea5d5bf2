"""Which setting a training goes on with: rounds that are repeated with another setting, and judged on held-out samples.

Training goes in rounds of some epochs. Now and then a round is run a second time, from the same checkpoint and over the
same samples, with another setting; what has the lower loss on the held-out samples stays, the other one is pruned. Only
then do both see the same rate at the same stage of training: the loss of one round says little about that of the next.
A round that ends worse than it began, or diverges, is run again at once, with one setting after another.

No number here is random, so that every worker, and a resumed run, decides alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, Literal, NamedTuple

EXPLORE_EVERY = 2  # rounds between two that are repeated without need; the first is no test: scales only warm up
TOLERANCE = 2.0  # standard errors of the mean difference between two losses; less is no difference


class Setting(NamedTuple):
    """What is tuned; see `[training]`."""

    delta: float
    small_batch: int

    def __str__(self) -> str:
        return f"delta = {self.delta:g}, small_batch = {self.small_batch}"


def settings(first: Setting, deltas: Sequence[float], small_batches: Sequence[int]) -> list[Setting]:
    """Every pair of the values, each once: first the one given, then those that differ from it in one value only."""
    pairs = product([first.delta, *deltas], [first.small_batch, *small_batches])
    unique = dict.fromkeys(Setting(*pair) for pair in pairs)
    return sorted(unique, key=lambda item: sum(a != b for a, b in zip(item, first, strict=True)))


class Comparison(NamedTuple):
    """How much two losses on the same samples differ."""

    difference: float  # mean of the first minus the second
    error: float  # its standard error

    @property
    def is_less(self) -> bool:
        """Whether the first is lower, beyond the noise."""
        return self.difference < -TOLERANCE * self.error


def compare(first: Sequence[float], second: Sequence[float]) -> Comparison:
    """Sample by sample, so that samples which are hard for both count as no difference.

    The error is that of a mean over samples like these; that another seed would have ended elsewhere is not in it.
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    count = len(differences)
    mean = math.fsum(differences) / count
    variance = math.fsum((value - mean) ** 2 for value in differences) / max(1, count - 1)
    return Comparison(mean, math.sqrt(variance / count))


class Step(NamedTuple):
    """What to do after a round."""

    load: Literal["", "start", "best"]  # go on as it is; from where the round began; from the end of its best run
    won: bool  # the run that has just ended is the best of this round so far: its end must be kept
    over: bool  # the round is decided: the end of its best run is where the next one begins
    pruned: int | None = None  # this setting is not used again


class Tuner:
    """Decides after every run of a round. Settings are numbers from 0; the first is 0.

    Args:
        count: Settings.
        max_rollbacks: A round is repeated at most so often over the whole training.
    """

    def __init__(self, count: int, max_rollbacks: int) -> None:
        self.count, self.max_rollbacks = count, max_rollbacks
        self.current = 0  # the setting in use
        self.best = 0  # the setting whose end is `end`
        self.pruned: list[int] = []
        self.tried = [0]
        self.rollbacks = 0
        self.rounds = 0  # decided
        self.start: list[float] = []  # losses of the held-out samples where the round began
        self.end: list[float] = []  # and at the end of its best run so far; empty before there is one

    @property
    def active(self) -> bool:
        """Whether there is anything left to decide."""
        return bool(self.end) or self._challenger() is not None

    def begin(self, losses: Sequence[float]) -> None:
        """Before the first round."""
        self.start = list(losses)

    def observe(self, losses: Sequence[float]) -> Step:
        """After a run of a round.

        Args:
            losses: Of the held-out samples, as many and in the same order each time; empty where training diverged.

        Raises:
            ValueError: It is not `active`.
        """
        if not self.active:
            raise ValueError("there is nothing left to decide")
        first, pruned = not self.end, None
        alive = bool(losses) and all(map(math.isfinite, losses))
        won = alive and (first or compare(losses, self.end).is_less)
        if not won or not first:
            pruned = self.best if won else self.current
            self.pruned.append(pruned)
        if won:
            self.best, self.end = self.current, list(losses)
        challenger = self._challenger()
        if challenger is not None and (self._hurts() or (first and self._is_time())):
            self._switch(challenger)
            return Step("start", won, over=False, pruned=pruned)
        return self._decide(won, pruned)

    def _hurts(self) -> bool:
        """Whether even the best run of this round made things worse."""
        return not self.end or compare(self.start, self.end).is_less

    def _is_time(self) -> bool:
        return self.rounds % EXPLORE_EVERY == EXPLORE_EVERY - 1

    def _challenger(self) -> int | None:
        """The next setting to try; None where there is none, or no rollback left."""
        if self.rollbacks >= self.max_rollbacks:
            return None
        holder = self.best if self.end else self.current
        return next((i for i in range(self.count) if i not in self.pruned and i != holder), None)

    def _switch(self, challenger: int) -> None:
        self.current = challenger
        self.rollbacks += 1
        if challenger not in self.tried:
            self.tried.append(challenger)

    def _decide(self, won: bool, pruned: int | None) -> Step:
        self.current, self.start, self.end = self.best, self.end, []
        self.rounds += 1
        return Step("" if won else "best", won, over=True, pruned=pruned)

    def state_dict(self) -> dict[str, Any]:
        """Numbers and lists."""
        return {
            "current": self.current,
            "best": self.best,
            "pruned": list(self.pruned),
            "tried": list(self.tried),
            "rollbacks": self.rollbacks,
            "rounds": self.rounds,
            "start": list(self.start),
            "end": list(self.end),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` gave."""
        for name in self.state_dict():
            value = state[name]
            setattr(self, name, list(value) if isinstance(value, list) else value)
