"""What a study's run directory holds, read once: how each of its trainings ended, and what they logged."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from tula_hpc.config import StudyCell, StudySpec, SweepSpec, load_frozen_sweep
from tula_hpc.errors import RunDirectoryError
from tula_hpc.invocation import command_line
from tula_hpc.records import EpochMetrics, Event, Metrics, RunDirectory, TrainResult, TunedRates, read_metrics


class Outcome(NamedTuple):
    """How one training ended. Accuracies are shares of 1, of the study's metric, at the end of training."""

    cell: StudyCell
    status: Literal["finished", "diverged", "failed", "missing"]  # missing: it waits, runs, or was never submitted
    test: float | None = None  # of those that finished
    train: float | None = None
    why: str = ""


class StudyContents(NamedTuple):
    """What the files of a study say."""

    name: str
    sweep: SweepSpec
    study: StudySpec
    outcomes: list[Outcome]
    metrics: dict[StudyCell, Metrics]
    rates: TunedRates | None
    sweep_text: str
    events: list[Event]

    def of(self, column: str, batch: int) -> list[Metrics]:
        """What the trainings of a column at a batch logged, seed by seed: of those that finished.

        Before the first has: of those under way. One that began or failed must not cut the others short.
        """
        ended = [o for o in self.outcomes if (o.cell.column, o.cell.batch) == (column, batch)]
        finished = [o.cell for o in ended if o.status == "finished"]
        return [self.metrics[cell] for cell in finished or (o.cell for o in ended if o.status != "diverged")]

    def accuracy(self, row: EpochMetrics) -> float:
        """Test accuracy after an epoch, in the metric of the study; NaN where there is none."""
        accuracy = row.test_top5_accuracy if self.study.metric == "top5" else row.test_accuracy
        return math.nan if accuracy is None else accuracy


def read_study(run: RunDirectory) -> StudyContents:
    """Read everything that is there.

    Raises:
        RunDirectoryError: There is no such directory, or it holds no study.
        InputError: Its sweep.toml is damaged.
    """
    if not run.sweep_file.exists():
        raise RunDirectoryError("is not a run directory: it has no sweep.toml", source=run.root)
    sweep = load_frozen_sweep(run.sweep_file)  # its data are where it ran, not necessarily here
    if sweep.study is None:
        raise RunDirectoryError(f"holds no study; use {command_line('report', str(run.root))}", source=run.root)
    events, cells = run.events(), sweep.study.cells()
    return StudyContents(
        name=sweep.name,
        sweep=sweep,
        study=sweep.study,
        outcomes=list(_outcomes(run, sweep.study, _failures(events))),
        metrics={cell: read_metrics(run.train(cell.label).metrics_file) for cell in cells},
        rates=_read_rates(run),
        sweep_text=run.sweep_file.read_text(encoding="utf-8", errors="replace"),
        events=events,
    )


def _failures(events: Iterable[Event]) -> dict[str, str]:
    """Why each training that was not submitted again after a failure has none to show, by label."""
    last: dict[str, str] = {}
    for event in events:
        label = event.data.get("label")
        if isinstance(label, str) and event.event in ("submitted", "failed"):
            words = str(event.failure or "").replace("_", " ")
            last[label] = f"{words}: {event.detail}" if event.event == "failed" else ""
    return {label: words for label, words in last.items() if words}


def _outcomes(run: RunDirectory, study: StudySpec, failures: dict[str, str]) -> Iterator[Outcome]:
    for cell in study.cells():
        result = _read_result(run, cell)
        if result is None:
            why = failures.get(cell.label, "")
            yield Outcome(cell, "failed" if why else "missing", why=why)
        elif result.diverged:
            yield Outcome(cell, "diverged", why=f"the loss was not finite after {result.steps:,} steps")
        else:
            test, train = _accuracies(result, study)
            missing = "no accuracy: none of such targets, or workload.metric was not finite" if test is None else ""
            yield Outcome(cell, "failed" if missing else "finished", test, train, missing)


def _accuracies(result: TrainResult, study: StudySpec) -> tuple[float | None, float | None]:
    if study.metric == "top5":
        return result.test_top5_accuracy, result.train_top5_accuracy
    return result.test_accuracy, result.train_accuracy


def _read_result(run: RunDirectory, cell: StudyCell) -> TrainResult | None:
    with contextlib.suppress(RunDirectoryError):  # damaged: as good as none
        return run.train(cell.label).read_result()
    return None


def _read_rates(run: RunDirectory) -> TunedRates | None:
    with contextlib.suppress(RunDirectoryError):
        return run.read_rates()
    return None
