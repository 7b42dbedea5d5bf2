"""Page of several runs side by side: decisions, predicted and actual, curves in one figure."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tula_hpc.analysis.costs.training_bill import TrainingBill
from tula_hpc.analysis.report.bill_text import bill_of
from tula_hpc.analysis.report.first_page import first_page
from tula_hpc.analysis.report.output import figure_files, render_page, replace_files
from tula_hpc.analysis.report.page import shared_content
from tula_hpc.analysis.report.tables import TextTable, format_interval
from tula_hpc.analysis.run_contents import RunContents, holds_study, measured_epochs, read_run
from tula_hpc.config import SweepSpec
from tula_hpc.errors import InputError
from tula_hpc.files import loaded_elsewhere
from tula_hpc.formatting import (
    UNKNOWN,
    format_duration,
    format_money,
    format_score,
)
from tula_hpc.records import Candidate, RunDirectory

TEMPLATE = "runs_template.html"
# of [workload]: with another value epochs are not the same work
SAME_WORK = ("script", "module", "model", "dataset", "samples")
# that differ between any two runs, and say nothing
NOT_TOLD = ("name", "workload.data_dir", "study")
# of settings that differ; a sweep file has more lines
MOST_DIFFERENCES = 40


class NamedRun(NamedTuple):
    """A run with a name that no other one of the page has."""

    name: str
    contents: RunContents

    @property
    def chosen(self) -> Candidate | None:
        """The plan's choice, if there is a plan."""
        if self.contents.plan is None:
            return None
        return self.contents.plan.chosen


def write_runs_report(runs: Sequence[RunDirectory], folder: Path | None = None) -> list[Path]:
    """Write runs.html with its figure as SVG, PNG and CSV, and return the files, runs.html first.

    `folder` is where; None means the first run's report.
    """
    with loaded_elsewhere():
        from tula_hpc.analysis.figures.all import Figures
        from tula_hpc.analysis.figures.drawing import attempt
        from tula_hpc.analysis.figures.run_curves import NAME, curve_of, draw_run_curves

    named = read_runs(runs)
    drawn = Figures([], [])
    curves = [curve_of(run.name, run.contents.in_figures()) for run in named]
    drawn.add(attempt(NAME, draw_run_curves, curves))
    figures = figure_files(drawn.drawings)
    page = shared_content(" · ".join(run.name for run in named), (), drawn, figures)
    page |= runs_content(named)
    files = {"runs.html": render_page(TEMPLATE, page).encode()} | figures
    return replace_files(folder or runs[0].report, [NAME], files)


def read_runs(runs: Sequence[RunDirectory]) -> list[NamedRun]:
    """Read runs; refuse a study, one that is named twice, and work that is not the same."""
    roots = [run.root.resolve() for run in runs]
    for run, root in zip(runs, roots, strict=True):
        if roots.count(root) > 1:
            raise InputError("is named twice; name other runs beside it", source=run.root)
        if run.root.is_dir() and holds_study(run):
            raise InputError(
                "is a study, and only sweeps are shown side by side; leave it out", source=run.root
            )
    contents = [read_run(run) for run in runs]
    _refuse_other_work(runs, contents)
    names = [root.name for root in roots]
    found = []
    for root, name, each in zip(roots, names, contents, strict=True):
        is_alone = names.count(name) == 1
        found.append(NamedRun(name if is_alone else f"{root.parent.name}/{name}", each))
    return found


def _refuse_other_work(runs: Sequence[RunDirectory], contents: Sequence[RunContents]) -> None:
    first = _work_of(contents[0].sweep)
    for run, other in zip(runs[1:], contents[1:], strict=True):
        work = _work_of(other.sweep)
        for fact, there in first.items():
            here = work.get(fact, there)
            if here != there:
                message = (
                    f"cannot be compared with {runs[0].root}: {fact} {here} here and {there} "
                    "there, so that an epoch is other work"
                )
                raise InputError(message, source=run.root)


def _work_of(sweep: SweepSpec | None) -> dict[str, str]:
    """Return the facts on which an epoch's work depends, the best known first."""
    if sweep is None:
        return {}
    workload = sweep.workload
    trains = f"{workload.model} on {workload.dataset}"
    if workload.is_script:
        trains = workload.script_name
    facts = {"it trains": trains}
    for key in SAME_WORK:
        value = getattr(workload, key)
        text = "not set"
        if value is not None:
            text = json.dumps(value, default=str)
        facts[f"workload.{key} is"] = text
    return facts


def runs_content(named: Sequence[NamedRun]) -> dict[str, Any]:
    """Return the contents of the page beside its figure."""
    pages = [(run.name, first_page(run.contents)) for run in named]
    return {
        "subtitle": "Runs side by side: decisions, predicted and actual",
        "decisions": [(name, page.decision) for name, page in pages],
        "runs": runs_table(named),
        "differences": differences(named),
        "knees_apart": knees_apart(named),
    }


def runs_table(named: Sequence[NamedRun]) -> TextTable:
    """Return a row for each quantity, a column for each run."""
    rows = {
        "chosen": [_where(run) for run in named],
        "objective": [_objective(run) for run in named],
        "knee (90 %)": [_knee(run) for run in named],
        "epoch, predicted (90 %)": [_predicted(run, "epoch_time_s") for run in named],
        "epoch, measured": [_measured_epoch(run) for run in named],
        "whole training, predicted (90 %)": [_predicted(run, "wall_time_s") for run in named],
        "whole training, actual": [_actual_time(run) for run in named],
        "cost, predicted (90 %)": [_predicted(run, "cost") for run in named],
        "cost, actual": [_actual_cost(run) for run in named],
        "score": [_score(run) for run in named],
    }
    filled = [
        (quantity, *cells)
        for quantity, cells in rows.items()
        if any(cell != UNKNOWN for cell in cells)
    ]
    return TextTable(("", *(run.name for run in named)), filled)


def _where(run: NamedRun) -> str:
    chosen = run.chosen
    if chosen is None:
        return UNKNOWN
    on = f"\n{chosen.partition}" if chosen.partition else ""
    return f"N = {chosen.nodes}, B = {chosen.global_batch:,}{on}"


def _objective(run: NamedRun) -> str:
    if run.contents.plan is None:
        return UNKNOWN
    return run.contents.plan.objective


def _knee(run: NamedRun) -> str:
    knee = run.contents.plan and run.contents.plan.knee
    if not knee or knee.global_batch is None:
        return UNKNOWN
    text = f"B = {knee.global_batch:,.0f}"
    if knee.interval_90 is None:
        return text
    low, high = knee.interval_90
    return f"{text}\n{low:,.0f} – {high:,.0f}"


def knees_apart(named: Sequence[NamedRun]) -> str:
    """Say which runs' knees lie apart by more than their intervals, and why; "" if none do."""
    ends = {
        run.name: run.contents.plan.knee.interval_90
        for run in named
        if run.contents.plan and run.contents.plan.knee and run.contents.plan.knee.interval_90
    }
    for (name, (_, high)), (other, (low, _)) in itertools.permutations(ends.items(), 2):
        if high < low:
            why = "Look at the settings that differ."
            if not differences(named).rows:
                why = (
                    "Their settings are the same, so machine or code differed: measure both again."
                )
            knees = f"at most B = {high:,.0f} in {name}, at least {low:,.0f} in {other}"
            return f"The knees contradict each other: {knees}. {why}"
    return ""


def _predicted(run: NamedRun, quantity: str) -> str:
    """Write with all digits: rounded by its own interval, the larger could seem the smaller."""
    chosen = run.chosen
    if chosen is None:
        return UNKNOWN
    found = chosen.predicted(quantity)
    if quantity != "cost":
        return format_interval(found)
    cost, low, high = (format_money(amount, chosen.currency) for amount in found)
    return cost if found.low == found.high else f"{cost}\n{low} – {high}"


def _measured_epoch(run: NamedRun) -> str:
    for training in run.contents.trainings:
        if training.epoch_time_s is not None:
            return f"{format_duration(training.epoch_time_s)}\nin training"
    if run.chosen is None or run.contents.plan is None:
        return UNKNOWN
    here = [row for row in run.contents.ok if row.partition == run.chosen.partition]
    found = measured_epochs(here, run.contents.plan.dataset_samples)
    seconds = found.get(run.chosen.configuration)
    if seconds is None:
        return UNKNOWN
    return f"{format_duration(seconds)}\nprofiled"


def _bill(run: NamedRun) -> TrainingBill | None:
    contents = run.contents
    found = (bill_of(contents.plan, contents.events, each) for each in contents.trainings)
    return next((bill for bill in found if bill), None)


def _actual_time(run: NamedRun) -> str:
    bill = _bill(run)
    if bill is None:
        return UNKNOWN
    return format_duration(bill.whole.actual)


def _actual_cost(run: NamedRun) -> str:
    bill = _bill(run)
    if bill is None:
        return UNKNOWN
    return format_money(bill.cost.actual, bill.currency)


def _score(run: NamedRun) -> str:
    for training in run.contents.trainings:
        if training.result:
            return format_score(training.result.test_accuracy, training.result.test_loss)
    return UNKNOWN


def differences(named: Sequence[NamedRun]) -> TextTable:
    """Return the settings of sweep and cluster files in which the runs differ."""
    settings = [_settings(run.contents) for run in named]
    keys = dict.fromkeys(key for each in settings for key in each)
    rows: list[tuple[str, ...]] = []
    for key in keys:
        values = [each.get(key, UNKNOWN) for each in settings]
        if key not in NOT_TOLD and len(set(values)) > 1:
            rows.append((key, *values))
    columns = ("setting", *(run.name for run in named))
    if len(rows) > MOST_DIFFERENCES:
        more = f"{len(rows) - MOST_DIFFERENCES} more"
        rows = [*rows[:MOST_DIFFERENCES], (more, *[""] * len(named))]
    return TextTable(columns, rows)


def _settings(run: RunContents) -> dict[str, str]:
    found: dict[str, str] = {}
    if run.sweep:
        found |= dict(_flat(run.sweep.model_dump(mode="json")))
    if run.cluster:
        # values of the environment are no business of a report
        known = run.cluster.model_dump(mode="json", exclude={"environment", "sbatch", "setup"})
        found |= {f"cluster.{key}": value for key, value in _flat(known)}
    return found


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, str):
            yield f"{prefix}{key}", value
        elif value is not None:
            yield f"{prefix}{key}", json.dumps(value)
