"""metrics.jsonl of a training: its lines as records, and an even choice of steps of long ones.

It is written by `training/metrics_writer.py` alone, which names its readers too.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from itertools import count, pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Literal, NamedTuple

from pydantic import Field, RootModel

from tula_hpc.records.base import Batch, Record
from tula_hpc.records.storage import Bounds, lines_of, out_of_bounds, parse_record

# logged steps of a training that are held; of more an even choice
MAX_STEPS = 4_000
# where fewer are left of a training that was set back, all that come are held again
FEW_STEPS = 1_000
# factors so near to 1 come of norms in single precision alone
ROUNDING = 1e-4
MAX_LINES = 5_000_000
# logged lines from which the present pace is taken
RECENT_STEPS = 20
# the same file gives the same choice
SEED = 0


# a line as the trainer writes it: fields in order, without blanks
_STEP = re.compile(rb'\{"kind":"step","step":\d+,"samples_seen":(\d{1,15}),')
_READING = re.compile(rb'"noise_trace":(?!null)')


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
    # mean share of the scale that those steps used, from 0 to 1: warm-up leaves a part of it
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
    # steps, with those that are not held or that a rollback replaced; 0 while all are held
    logged: int = 0
    # a gradient was scaled in steps that are not held
    others_scaled: bool = False

    @property
    def scaled_nothing(self) -> bool:
        """Tell whether gradients should have been scaled, and none was in any logged step."""
        if self.others_scaled or not self.steps:
            return False
        return all(row.scaled_nothing for row in self.steps)


def put_aside(path: Path) -> None:
    """Keep the metrics of a training that begins anew as metrics-N.jsonl, where there are some."""
    if path.exists():
        names = (path.with_name(f"metrics-{number}.jsonl") for number in count(1))
        path.replace(next(name for name in names if not name.exists()))


class _Steps:
    """Logged steps that are held: all of them, or of very many an even choice.

    The samples seen are cut into equal pieces, and in each of them one step is held: the first one
    from a place by chance on, so that nothing periodic is missed or doubled.

    A step takes the place of all that had seen as many samples, or more: after a rollback to a
    checkpoint, steps may be of another batch.
    """

    def __init__(self) -> None:
        self.held: list[StepMetrics] = []
        self.newest: StepMetrics | None = None
        # since then at most, as it was written
        self.passed = b""
        self.count = 0
        # samples of a piece; 0 while all that come are held
        self.spacing = 0.0
        # some were not held
        self.is_choice = False
        # samples seen from which on the next one is held
        self.next = 0.0
        # a choice, no secret
        self.random = Random(SEED)  # noqa: S311
        self.others_scaled = False

    def passes_over(self, line: bytes) -> bool:
        """Tell whether a line is left out, without parsing it, which takes far longer."""
        found = _STEP.match(line)
        # of all others it has to be seen whether they were scaled
        if found is None or not line.endswith(b"}\n") or not self.others_scaled:
            return False
        last = self.held[-1]
        is_near = last.samples_seen < int(found[1]) < self.next
        if not is_near or (last.noise_trace is None and _READING.search(line)):
            return False
        self.count += 1
        self.passed = line
        return True

    def add(self, row: StepMetrics) -> None:
        """Take in the next line."""
        self.count += 1
        self.newest = row
        self.passed = b""
        while self.held and self.held[-1].samples_seen >= row.samples_seen:
            self.held.pop()
            self.next = 0.0
        if len(self.held) < FEW_STEPS:
            self.spacing = 0.0
        self._hold(row)
        # the first time may find all of them far apart
        while len(self.held) > MAX_STEPS:
            self._thin()

    def _hold(self, row: StepMetrics) -> None:
        if self.held and row.samples_seen < self.next:
            self.held[-1] = self._preferred(self.held[-1], row)
            return
        self.held.append(row)
        if self.spacing:
            reached = max(self.next, row.samples_seen - self.spacing) // self.spacing
            self.next = (reached + 1 + self.random.random()) * self.spacing

    def _thin(self) -> None:
        """Hold one of each two from now on."""
        first, *rows = self.held
        gaps = (after.samples_seen - row.samples_seen for row, after in pairwise(rows))
        self.spacing = 2 * (self.spacing or median(gaps))
        self.next = rows[-1].samples_seen + self.random.random() * self.spacing
        self.held = [first]
        self.is_choice = True
        for pair in zip(rows[::2], rows[1::2], strict=True):
            before, after = pair
            if after.samples_seen - before.samples_seen > self.spacing:
                # from before the training was set back
                self.held += pair
            else:
                self.held.append(self._preferred(*self.random.sample(pair, 2)))

    def _preferred(self, row: StepMetrics, other: StepMetrics) -> StepMetrics:
        """Return one of two, the first one unless the other alone has a reading of the noise."""
        # which are rare
        if other.noise_trace is not None and row.noise_trace is None:
            self._leave_out(row)
            return other
        self._leave_out(other)
        return row

    def _leave_out(self, row: StepMetrics) -> None:
        self.others_scaled = self.others_scaled or not row.scaled_nothing

    def with_newest(self) -> list[StepMetrics]:
        """Return those that are held, and the newest of all at their end."""
        with contextlib.suppress(ValueError):
            if self.passed:
                self.newest = parse_record(StepMetrics, self.passed)
        if self.newest is None or self.held[-1] is self.newest:
            return self.held
        return [*self.held, self.newest]


def read_metrics(path: Path) -> Metrics:
    """Read metrics.jsonl; of very many steps only some are held, see `_Steps`.

    Of two lines of an epoch the later counts. What it lacks is taken from the earlier one: a
    script's scores and the time until its next epoch are known at different moments.

    Raises:
        RunDirectoryError: The file is there and cannot be read, or is out of all bounds.
    """
    steps = _Steps()
    epochs: dict[int, EpochMetrics] = {}
    skipped = 0
    bounds = Bounds()
    for number, line in enumerate(lines_of(path)):
        if number >= MAX_LINES:
            advice = "a larger training.log_interval_steps keeps it shorter"
            raise out_of_bounds(path, f"at most {MAX_LINES:,} lines", advice)
        if steps.passes_over(line):
            continue
        try:
            row = parse_metrics(line)
        except ValueError:
            skipped += 1
            continue
        if isinstance(row, StepMetrics):
            steps.add(row)
        else:
            epochs[row.epoch] = _joined(epochs.get(row.epoch), row)
        bounds.check(path, len(steps.held) + len(epochs), len(line))
    return Metrics(
        steps.with_newest(),
        [epochs[number] for number in sorted(epochs)],
        skipped,
        steps.count if steps.is_choice else 0,
        steps.others_scaled,
    )


def parse_metrics(line: bytes) -> AnyMetrics:
    """Parse one line.

    Raises:
        ValueError: It is none.
    """
    return parse_record(_AnyMetrics, line).root


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
