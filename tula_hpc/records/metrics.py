"""metrics.jsonl of a training: its lines as records, and an even choice of steps of long ones.

It is written by `training/metrics_writer.py` alone, which names its readers too.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import Field, RootModel

from tula_hpc.records.base import Batch, Record
from tula_hpc.records.storage import Bounds, lines_of, out_of_bounds, parse_record

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# histograms of the scale reach so far on each side of 1
SCALE_OCTAVES = 6
SCALE_BINS_PER_OCTAVE = 6
# logged steps of a training that are held; of more an even choice
MAX_STEPS = 4_000
# factors so near to 1 come of norms in single precision alone
ROUNDING = 1e-4
# beginnings of lines that earlier versions wrote
OLD_LINES = (b'{"kind":"rollback",', b'{"kind":"curvature",')
MAX_LINES = 5_000_000
# logged lines from which the present pace is taken
RECENT_STEPS = 20
# the same file gives the same choice
SEED = 0


# a line as the trainer writes it: fields in order, without blanks
_STEP = re.compile(rb'\{"kind":"step","step":\d+,"samples_seen":(\d{1,15}),')
_NOISE = b'"noise_trace":'


class StepMetrics(Record):
    """A line of metrics.jsonl for a logged step."""

    kind: Literal["step"] = "step"
    # optimizer steps taken since the start of training
    step: int
    samples_seen: int
    # of its whole batches, so that the last step's is a whole number
    epoch: float
    # None: of a script that does not tell
    loss: float | None
    lr: float
    # mean over the steps since the last logged one
    step_time_s: float
    # Δ(G)
    sensitivity: float | None = None
    gradient_norm: float | None = None
    # share of the steps since the last line whose gradient was scaled
    scaled: float | None = None
    # mean share of the scale that those steps used, from 0 to 1: gate "smooth" and warm-up leave a
    # part of it
    scale_share: float | None = None
    # of the scale as last estimated, over all elements; see `applied_scale`
    scale_mean: float | None = None
    scale_min: float | None = None
    scale_max: float | None = None
    # part of step_time_s: rank 0's wait for the loader, mean
    data_time_s: float | None = None
    # samples, tr(Σ)/|G|² smoothed over the readings of the noise so far
    noise_scale: float | None = None
    # mean |G|² of those since the last line, unbiased, so of any sign
    noise_gradient_square: float | None = None
    # mean tr(Σ) of the same
    noise_trace: float | None = None
    # elements × steps since the last line by the scale that was applied: how many below the bins,
    # those in the bins around 2^(k / SCALE_BINS_PER_OCTAVE) from 2^−SCALE_OCTAVES to
    # 2^SCALE_OCTAVES, and those above
    scale_histogram: list[int] | None = None

    @property
    def applied_scale(self) -> float | None:
        """Return the mean factor on the gradient since the last line, 1 for unscaled steps."""
        if self.scale_mean is None or self.scale_share is None:
            return None
        return 1.0 + self.scale_share * (self.scale_mean - 1.0)

    @property
    def scaled_nothing(self) -> bool:
        """Tell whether no step since the last line was scaled by another factor than 1."""
        factors = [each for each in (self.scale_min, self.scale_max) if each is not None]
        is_one = len(factors) == 2 and all(abs(each - 1.0) <= ROUNDING for each in factors)
        return self.scaled == 0 or self.scale_share == 0 or is_one


class EpochMetrics(Record):
    """A line of metrics.jsonl at the end of an epoch."""

    kind: Literal["epoch"] = "epoch"
    # epochs completed
    epoch: int
    step: int
    samples_seen: int
    global_batch: Batch
    # None: of a script that does not tell
    train_loss: float | None
    test_loss: float | None
    # share of 1; None: of targets that know no right and wrong
    test_accuracy: float | None
    # None: of targets that are no labels
    test_top5_accuracy: float | None
    # training steps only; without evaluation and checkpoints
    epoch_time_s: float
    # steps in this epoch that epoch_time_s covers
    steps: int
    # False: a restart fell into the epoch, so that epoch_time_s covers only a part
    complete: bool = True
    # samples, as of the end of the epoch
    noise_scale: float | None = None
    # samples, mean tr(Σ) over mean |G|² of the readings since the last such line
    critical_batch: float | None = None
    # of the test set, after the epoch's steps; of a script all that it does between its epochs, and
    # evaluates within them
    evaluation_time_s: float | None = None
    # over all nodes
    workers: int | None = None
    # Unix time of this line's first writing: files of a script that are newer have the epoch
    ended_at: float | None = None

    @property
    def is_scored(self) -> bool:
        """Tell whether a score of the test set is known."""
        return (self.test_accuracy, self.test_loss) != (None, None)


AnyMetrics = StepMetrics | EpochMetrics


class _AnyMetrics(RootModel[AnyMetrics]):
    root: AnyMetrics = Field(discriminator="kind")


class Metrics(NamedTuple):
    """metrics.jsonl, split by kind."""

    # at most about `MAX_STEPS`
    steps: list[StepMetrics]
    epochs: list[EpochMetrics]
    skipped: int
    # steps, those that are not held included; 0 where all are
    logged: int = 0

    @property
    def scaled_nothing(self) -> bool:
        """Tell whether gradients should have been scaled, and none was in any logged step."""
        return bool(self.steps) and all(row.scaled_nothing for row in self.steps)


def put_aside(path: Path) -> None:
    """Keep the metrics of a training that begins anew as metrics-N.jsonl, where there are some."""
    if path.exists():
        names = (path.with_name(f"metrics-{number}.jsonl") for number in count(1))
        path.replace(next(name for name in names if not name.exists()))


def read_metrics(path: Path) -> Metrics:
    """Read metrics.jsonl; lines after a rollback to a checkpoint replace the earlier ones.

    Of very many steps only some are held, see `read_chosen`.

    Raises:
        RunDirectoryError: The file is there and cannot be read, or is out of all bounds.
    """
    rows: list[AnyMetrics] = []
    skipped, bounds, lines = 0, Bounds(), metrics_lines(path)
    for line in islice(lines, MAX_STEPS):
        try:
            rows.append(parse_metrics(line))
        except ValueError:
            skipped += 1
        bounds.check(path, len(rows), len(line))
    if next(lines, None) is None:
        return split(rows, skipped)
    # NumPy, which few commands need
    return read_chosen(path)


def metrics_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a metrics.jsonl, except those of a kind that is no longer written."""
    return (line for line in lines_of(path) if not line.startswith(OLD_LINES))


def parse_metrics(line: bytes) -> AnyMetrics:
    """Parse one line.

    Raises:
        ValueError: It is none.
    """
    return parse_record(_AnyMetrics, line).root


def split(rows: Iterable[AnyMetrics], skipped: int) -> Metrics:
    """Split lines by kind; a step takes the place of all that had seen as many samples, or more.

    After a rollback steps may be of another batch. Of two lines of an epoch the later counts. What
    it lacks is taken from the earlier one: a script's scores and the time until its next epoch are
    known at different moments.
    """
    steps: list[StepMetrics] = []
    epochs: dict[int, EpochMetrics] = {}
    for row in rows:
        if isinstance(row, StepMetrics):
            while steps and steps[-1].samples_seen >= row.samples_seen:
                steps.pop()
            steps.append(row)
        else:
            epochs[row.epoch] = _joined(epochs.get(row.epoch), row)
    return Metrics(steps, [epochs[number] for number in sorted(epochs)], skipped)


def _joined(before: EpochMetrics | None, row: EpochMetrics) -> EpochMetrics:
    if before is None or before.step != row.step:
        return row
    known = {name: value for name, value in before if getattr(row, name) is None}
    return row.model_copy(update=known)


def samples_a_step(steps: Sequence[StepMetrics]) -> float:
    """Return the present global batch, which a fallback changes; 0 where no step tells."""
    for before, after in zip(steps[-2::-1], steps[:0:-1], strict=False):
        if after.step > before.step and after.samples_seen > before.samples_seen:
            return (after.samples_seen - before.samples_seen) / (after.step - before.step)
    return steps[-1].samples_seen / steps[-1].step if steps and steps[-1].step else 0.0


def steps_left_s(steps: Sequence[StepMetrics], epochs: float) -> float | None:
    """Estimate the time of the steps that are left, at the pace of these; None where none tells."""
    batch = samples_a_step(steps)
    if not batch or steps[-1].epoch <= 0:
        return None
    last = steps[-1]
    left = max(0.0, epochs - last.epoch) * last.samples_seen / last.epoch
    return left / batch * median(row.step_time_s for row in steps)


def training_left_s(
    steps: Sequence[StepMetrics], last: EpochMetrics | None, epochs: float
) -> float | None:
    """Estimate the time that a training still takes: its steps, and evaluations as the last one."""
    left_s = steps_left_s(steps[-RECENT_STEPS:], epochs)
    if left_s is None or last is None:
        return left_s
    return left_s + max(0.0, epochs - last.epoch) * (last.evaluation_time_s or 0.0)


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

    def kept(self) -> NDArray[np.int64]:
        """Return the indices of the steps that count, by samples seen: see `read_metrics`."""
        import numpy as np

        seen = np.asarray(self.samples_seen)
        # a step counts if all later ones had seen more samples
        least_after = np.append(np.minimum.accumulate(seen[::-1])[::-1][1:], np.inf)[: len(seen)]
        kept: NDArray[np.int64] = np.flatnonzero(seen < least_after)
        return kept


def read_chosen(path: Path) -> Metrics:
    """Read like `read_metrics`, with an even choice of the steps beyond `MAX_STEPS`.

    Two passes need little memory for millions of lines: the first looks at where each line belongs,
    the second parses the chosen ones. Of each of `MAX_STEPS` parts with equally many steps one is
    chosen by chance, so that nothing periodic is missed or doubled; one with a reading of the noise
    scale, which are rare, goes first.

    Raises:
        RunDirectoryError: The file cannot be read, or is out of all bounds.
    """
    # late: a command's --help needs no numerics
    import numpy as np

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


def even_choice(preferred: NDArray[np.bool_], most: int = MAX_STEPS) -> NDArray[np.int64]:
    """Choose one element of each of `most` pieces, preferred ones first, and both ends always."""
    import numpy as np

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
