"""metrics.jsonl of a training: its lines as records; of a long file evenly chosen steps.

`training/metrics_writer.py` writes the file; its docstring names the readers. A script's accuracies
that turn out to be percent are corrected by lines that `attach/train/scores.py` appends.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Sequence
from itertools import count, pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Literal, NamedTuple

from pydantic import Field, RootModel

from tula_hpc.errors import RunDirectoryError
from tula_hpc.records.base import Batch, Record
from tula_hpc.records.storage import Bounds, lines_of, out_of_bounds, parse_record

# logged steps of a training that are held; of a longer file evenly chosen ones
MAX_STEPS = 4_000
# if a rollback leaves fewer held steps than this, all later ones are held again
FEW_STEPS = 1_000
# a scale factor this close to 1 is rounding of norms in single precision
ROUNDING = 1e-4
MAX_LINES = 5_000_000
# newest logged lines that give the present pace
RECENT_STEPS = 20
# fixed, so that reading a file twice gives the same choice
SEED = 0


# a step's line as `MetricsWriter` writes it: fields in this order, without blanks
_STEP = re.compile(rb'\{"kind":"step","step":\d+,"samples_seen":(\d{1,15}),')
_READING = re.compile(rb'"noise_trace":(?!null)')


class StepMetrics(Record):
    """A line of metrics.jsonl for a logged step."""

    kind: Literal["step"] = "step"
    # optimizer steps taken since the start of training
    step: int
    samples_seen: int
    # epochs trained, counted in whole batches: a whole number after an epoch's last step
    epoch: float
    # None: the script does not report it
    loss: float | None
    lr: float
    # mean over the steps since the last logged one
    step_time_s: float
    # Δ(G)
    sensitivity: float | None = None
    gradient_norm: float | None = None
    # share of the steps since the last line whose gradient was scaled
    scaled: float | None = None
    # mean share of the scale that those steps applied, 0 to 1; below 1 in warm-up
    scale_share: float | None = None
    # the last estimated scale over all elements, at full strength; see `applied_scale`
    scale_mean: float | None = None
    scale_min: float | None = None
    scale_max: float | None = None
    # part of step_time_s: mean wait of rank 0 for the loader
    data_time_s: float | None = None
    # samples: tr(Σ)/|G|², smoothed over all readings of the noise so far
    noise_scale: float | None = None
    # mean |G|² over the readings since the last line; unbiased, so it may be negative
    noise_gradient_square: float | None = None
    # mean tr(Σ) over the same readings
    noise_trace: float | None = None

    @property
    def applied_scale(self) -> float | None:
        """Return the mean factor on the gradient since the last line, 1 for unscaled steps."""
        if self.scale_mean is None or self.scale_share is None:
            return None
        return 1.0 + self.scale_share * (self.scale_mean - 1.0)

    @property
    def scaled_nothing(self) -> bool:
        """Tell whether every step since the last line was scaled by 1, or not at all."""
        factors = (self.scale_min, self.scale_max)
        is_one = all(each is not None and abs(each - 1.0) <= ROUNDING for each in factors)
        return self.scaled == 0 or self.scale_share == 0 or is_one


class EpochMetrics(Record):
    """A line of metrics.jsonl at the end of an epoch."""

    kind: Literal["epoch"] = "epoch"
    # epochs completed
    epoch: int
    step: int
    samples_seen: int
    global_batch: Batch
    # None: the script does not report it
    train_loss: float | None
    test_loss: float | None
    # from 0 to 1; None: the targets are not right or wrong, as in a regression
    test_accuracy: float | None
    # None: the targets are no labels
    test_top5_accuracy: float | None
    # training steps only; without evaluation and checkpoints
    epoch_time_s: float
    # steps in this epoch that epoch_time_s covers
    steps: int
    # False: a restart fell into the epoch, so that epoch_time_s covers only a part
    complete: bool = True
    # samples; the steps' `noise_scale` at the end of the epoch
    noise_scale: float | None = None
    # samples: mean tr(Σ) over mean |G|², of the readings since the last epoch's line
    critical_batch: float | None = None
    # seconds for the test set after the epoch's steps; for a script, all that it does between
    # epochs, and evaluations within them
    evaluation_time_s: float | None = None
    # number of workers on all nodes
    workers: int | None = None
    # when the epoch's first line was written: newer files of a script include this epoch
    ended_at: float | None = None

    @property
    def is_scored(self) -> bool:
        """Tell whether accuracy or loss on the test set is known."""
        return (self.test_accuracy, self.test_loss) != (None, None)


AnyMetrics = StepMetrics | EpochMetrics


class _AnyMetrics(RootModel[AnyMetrics]):
    root: AnyMetrics = Field(discriminator="kind")


class Metrics(NamedTuple):
    """metrics.jsonl, split by kind."""

    # all of them, or about `MAX_STEPS` of very many
    steps: list[StepMetrics]
    epochs: list[EpochMetrics]
    # lines that could not be read
    skipped: int
    # logged steps with those not held and those replaced after a rollback; 0 while all are held
    logged: int = 0
    # a gradient was scaled in a step that is not held
    others_scaled: bool = False

    @property
    def scaled_nothing(self) -> bool:
        """Tell whether there are logged steps, and no gradient was scaled in any of them."""
        if self.others_scaled or not self.steps:
            return False
        return all(row.scaled_nothing for row in self.steps)


def put_aside(path: Path) -> None:
    """Before a training begins anew, rename its metrics.jsonl, if any, to metrics-N.jsonl."""
    if path.exists():
        names = (path.with_name(f"metrics-{number}.jsonl") for number in count(1))
        path.replace(next(name for name in names if not name.exists()))


class _Steps:
    """Logged steps that are held: all of them, or of very many an even choice.

    For the choice, the range of samples seen is cut into equal pieces. Each piece holds one step:
    the first after a random place, so that periodic events are neither missed nor overcounted.

    A new step replaces all steps with as many samples seen, or more: after a rollback to a
    checkpoint, steps may have another batch.
    """

    def __init__(self) -> None:
        self.held: list[StepMetrics] = []
        self.newest: StepMetrics | None = None
        # the last line, unparsed, if it was passed over; else empty
        self.passed = b""
        self.count = 0
        # samples of a piece; 0 while every new step is held
        self.spacing = 0.0
        # some steps are not held
        self.is_choice = False
        # samples seen at which the next step is held
        self.next = 0.0
        # random only for an even choice, not for security
        self.random = Random(SEED)  # noqa: S311
        self.others_scaled = False

    def passes_over(self, line: bytes) -> bool:
        """Tell whether a line is left out, without parsing it, which takes far longer."""
        found = _STEP.match(line)
        # while `others_scaled` is False, each line is parsed to see whether its steps were scaled
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
        """Add the next step."""
        self.count += 1
        self.newest = row
        self.passed = b""
        while self.held and self.held[-1].samples_seen >= row.samples_seen:
            self.held.pop()
            self.next = 0.0
        if len(self.held) < FEW_STEPS:
            self.spacing = 0.0
        self._hold(row)
        # once may not suffice: two steps that are farther apart than the spacing both stay
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
        """Hold every other step, now and from here on."""
        first, *rows = self.held
        gaps = (after.samples_seen - row.samples_seen for row, after in pairwise(rows))
        self.spacing = 2 * (self.spacing or median(gaps))
        self.next = rows[-1].samples_seen + self.random.random() * self.spacing
        self.held = [first]
        self.is_choice = True
        for pair in zip(rows[::2], rows[1::2], strict=True):
            before, after = pair
            if after.samples_seen - before.samples_seen > self.spacing:
                # sparse steps, from before a rollback: both stay
                self.held += pair
            else:
                self.held.append(self._preferred(*self.random.sample(pair, 2)))

    def _preferred(self, row: StepMetrics, other: StepMetrics) -> StepMetrics:
        """Return the first step, or the other if it alone has a (rare) reading of the noise."""
        if other.noise_trace is not None and row.noise_trace is None:
            self._leave_out(row)
            return other
        self._leave_out(other)
        return row

    def _leave_out(self, row: StepMetrics) -> None:
        self.others_scaled = self.others_scaled or not row.scaled_nothing

    def with_newest(self) -> list[StepMetrics]:
        """Return the steps that are held, followed by the newest step if it is not."""
        with contextlib.suppress(ValueError):
            if self.passed:
                self.newest = parse_record(StepMetrics, self.passed)
        if self.newest is None or self.held[-1] is self.newest:
            return self.held
        return [*self.held, self.newest]


def read_metrics(path: Path) -> Metrics:
    """Read metrics.jsonl; of very many steps only some are held, see `_Steps`.

    Of two lines for an epoch the later one counts. Fields that it lacks come from the earlier one:
    a script's scores and the time until its next epoch become known at different moments.

    Raises:
        RunDirectoryError: The file exists but cannot be read, or exceeds a bound.
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


# a larger file takes noticeable time to read
LARGE_BYTES = 1_000_000
# pause after such a reading, as a multiple of its time
PAUSE_TIMES = 20.0


class MetricsReader:
    """Reader of a growing metrics.jsonl for a command that shows it again and again.

    The file of a long training takes seconds to read, so it is not read at each call. Nor may a
    file that cannot be read, or is beyond a bound, end a command that only shows it: the metrics
    then remain those that were read last.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last = Metrics([], [], 0)
        # a sentence on why the metrics are not up to date, if they are not
        self.notes: list[str] = []
        # when it may be read again, by `monotonic`
        self._next_at = 0.0

    def read(self) -> Metrics:
        """Return the metrics; those of a large file may be older, see `PAUSE_TIMES`."""
        started = time.monotonic()
        if started < self._next_at:
            return self.last
        try:
            self.last = read_metrics(self.path)
            self.notes = []
        except RunDirectoryError as error:
            self.notes = [f"the progress is not up to date: {error}"]
        with contextlib.suppress(OSError):
            if self.path.stat().st_size > LARGE_BYTES:
                ended = time.monotonic()
                self._next_at = ended + PAUSE_TIMES * (ended - started)
        return self.last


def parse_metrics(line: bytes) -> AnyMetrics:
    """Parse one line.

    Raises:
        ValueError: The line is no such record.
    """
    return parse_record(_AnyMetrics, line).root


def _joined(before: EpochMetrics | None, row: EpochMetrics) -> EpochMetrics:
    if before is None or before.step != row.step:
        return row
    known = {name: value for name, value in before if getattr(row, name) is None}
    return row.model_copy(update=known)


def samples_a_step(steps: Sequence[StepMetrics]) -> float:
    """Return the present global batch, which a fallback may have changed; 0 if unknown."""
    for before, after in zip(steps[-2::-1], steps[:0:-1], strict=False):
        if after.step > before.step and after.samples_seen > before.samples_seen:
            return (after.samples_seen - before.samples_seen) / (after.step - before.step)
    return steps[-1].samples_seen / steps[-1].step if steps and steps[-1].step else 0.0


def kept_steps(steps: Sequence[StepMetrics], saved: int | None) -> Sequence[StepMetrics]:
    """Return the logged steps; if those after `saved` samples are lost, end with that progress."""
    if not steps or saved is None or saved >= steps[-1].samples_seen:
        return steps
    last = steps[-1]
    share = saved / last.samples_seen
    place = {"step": round(share * last.step), "epoch": share * last.epoch, "samples_seen": saved}
    return [*steps, last.model_copy(update=place)]


def steps_left_s(steps: Sequence[StepMetrics], epochs: float) -> float | None:
    """Estimate the seconds of the steps that are left, at the pace of `steps`; None if unknown."""
    batch = samples_a_step(steps)
    if not batch or steps[-1].epoch <= 0:
        return None
    last = steps[-1]
    left = max(0.0, epochs - last.epoch) * last.samples_seen / last.epoch
    return left / batch * median(row.step_time_s for row in steps)


def training_left_s(
    steps: Sequence[StepMetrics], last: EpochMetrics | None, epochs: float
) -> float | None:
    """Estimate the seconds left of a training: steps, and evaluations as long as the last."""
    left_s = steps_left_s(steps[-RECENT_STEPS:], epochs)
    if left_s is None or last is None:
        return left_s
    return left_s + max(0.0, epochs - last.epoch) * (last.evaluation_time_s or 0.0)
