"""Page of several runs side by side: decisions, predicted and actual, curves in one figure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from tula_hpc.analysis import run_contents
from tula_hpc.analysis.report.bill_text import bill_of
from tula_hpc.analysis.report.first_page import first_page
from tula_hpc.analysis.report.output import figure_files, prepare_folder, render_page, replace_files
from tula_hpc.analysis.report.page import shared_content
from tula_hpc.analysis.report.tables import TextTable, format_interval
from tula_hpc.analysis.run_contents import RunContents
from tula_hpc.config import SweepSpec, leaves
from tula_hpc.config.validation import HIDDEN
from tula_hpc.errors import InputError
from tula_hpc.files import loaded_elsewhere
from tula_hpc.formatting import UNKNOWN, format_duration, format_money, format_score
from tula_hpc.records import RunDirectory

TEMPLATE = "runs_template.html"
# keys of [workload] in which runs must not differ, or their epochs are not the same work
SAME_WORK = ("script", "module", "model", "dataset", "samples")
# settings that differ between any two runs, and say nothing
NOT_LISTED = ("name", "workload.data_dir", "study")
# most settings that are listed as different; a sweep file may have more
MOST_DIFFERENCES = 40


# rows of the table
QUANTITIES = (
    "chosen",
    "objective",
    "knee (90 %)",
    "epoch, predicted (90 %)",
    "epoch, measured",
    "whole training, predicted (90 %)",
    "whole training, actual",
    "cost, predicted (90 %)",
    "cost, actual",
    "score",
)


def write_runs_report(runs: Sequence[RunDirectory], folder: Path | None = None) -> list[Path]:
    """Write runs.html with its figure as SVG, PNG and CSV, and return the files, runs.html first.

    They are written into `folder`, or into the first run's report folder if that is None.
    """
    with loaded_elsewhere():
        from tula_hpc.analysis.figures.all import Figures
        from tula_hpc.analysis.figures.drawing import attempt
        from tula_hpc.analysis.figures.run_curves import NAME, curve_of, draw_run_curves

    named = read_runs(runs)
    place = folder or runs[0].report
    # before the figure, which takes seconds
    prepare_folder(place)
    drawn = Figures([], [])
    curves = [curve_of(run.in_figures()) for run in named]
    drawn.add(attempt(NAME, draw_run_curves, curves))
    figures = figure_files(drawn.drawings)
    page = shared_content(" · ".join(_names(named)), (), drawn, figures)
    page |= {
        "subtitle": "Runs side by side: decisions, predicted and actual",
        "decisions": [(run.name, first_page(run).decision) for run in named],
        "runs": runs_table(named),
        "differences": differences(named),
    }
    files = {"runs.html": render_page(TEMPLATE, page).encode()} | figures
    return replace_files(place, [NAME], files)


def read_runs(runs: Sequence[RunDirectory]) -> list[RunContents]:
    """Read runs under different names; refuse a study, the same run twice, and different work."""
    roots = [run.root.resolve() for run in runs]
    for run, root in zip(runs, roots, strict=True):
        if roots.count(root) > 1:
            raise InputError("is named twice; name each run once", source=run.root)
        if run.root.is_dir() and run_contents.holds_study(run):
            raise InputError(
                "is a study, and only sweeps are shown side by side; leave it out", source=run.root
            )
    contents = list(map(run_contents.read_run, runs))
    _refuse_other_work(runs, contents)
    names = [root.name for root in roots]
    found = []
    for root, each in zip(roots, contents, strict=True):
        is_alone = names.count(root.name) == 1
        name = root.name if is_alone else f"{root.parent.name}/{root.name}"
        found.append(each._replace(name=name))
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
                    "there, so that an epoch is not the same work"
                )
                raise InputError(message, source=run.root)


def _work_of(sweep: SweepSpec | None) -> dict[str, str]:
    """Return the facts that an epoch's work depends on, the most important first."""
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


def _names(named: Sequence[RunContents]) -> list[str]:
    return [run.name for run in named]


def runs_table(named: Sequence[RunContents]) -> TextTable:
    """Return a row for each quantity that a run has, a column for each run."""
    facts = [{**dict(_planned(run)), **dict(_done(run))} for run in named]
    rows: list[tuple[str, ...]] = []
    for quantity in QUANTITIES:
        cells = [each.get(quantity, UNKNOWN) for each in facts]
        if any(cell != UNKNOWN for cell in cells):
            rows.append((quantity, *cells))
    return TextTable(("", *_names(named)), rows)


def _planned(run: RunContents) -> Iterator[tuple[str, str]]:
    """Yield quantities of the plan.

    They are not rounded by their intervals, which could make the larger of two look smaller.
    """
    if run.plan is None:
        return
    chosen = run.plan.chosen
    on = f"\n{chosen.partition}" if chosen.partition else ""
    yield "chosen", f"{chosen.configuration.short}{on}"
    yield "objective", run.plan.objective
    knee = run.plan.knee
    if knee and knee.global_batch is not None:
        text = f"B = {knee.global_batch:,.0f}"
        if knee.interval_90 is not None:
            low, high = knee.interval_90
            text += f"\n{low:,.0f} – {high:,.0f}"
        yield "knee (90 %)", text
    yield "epoch, predicted (90 %)", format_interval(chosen.predicted("epoch_time_s"))
    yield "whole training, predicted (90 %)", format_interval(chosen.predicted("wall_time_s"))
    paid = chosen.predicted("cost")
    cost, least, most = (format_money(amount, chosen.currency) for amount in paid)
    yield "cost, predicted (90 %)", cost if paid.low == paid.high else f"{cost}\n{least} – {most}"
    here = [row for row in run.comparable if row.partition == chosen.partition]
    profiled = run_contents.measured_epochs(here, run.plan.dataset_samples)
    if chosen.configuration in profiled:
        seconds = profiled[chosen.configuration]
        yield "epoch, measured", f"{format_duration(seconds)}\nprofiled"


def _done(run: RunContents) -> Iterator[tuple[str, str]]:
    """Yield actual quantities, those of the first training last, so that they replace others."""
    for training in reversed(run.trainings):
        if training.epoch_time_s is not None:
            yield "epoch, measured", f"{format_duration(training.epoch_time_s)}\nin training"
        if bill := bill_of(run.plan, run.events, training):
            yield "whole training, actual", format_duration(bill.whole.actual)
            yield "cost, actual", format_money(bill.cost.actual, bill.currency)
        if training.result:
            result = training.result
            yield "score", format_score(result.test_accuracy, result.test_loss)


def differences(named: Sequence[RunContents]) -> TextTable:
    """Return the settings of sweep and cluster files in which the runs differ."""
    settings = list(map(_settings, named))
    rows: list[tuple[str, ...]] = []
    for key in dict.fromkeys(chain.from_iterable(settings)):
        values = [each.get(key, UNKNOWN) for each in settings]
        if key not in NOT_LISTED and len(set(values)) > 1:
            rows.append((key, *values))
    columns = ("setting", *_names(named))
    if len(rows) > MOST_DIFFERENCES:
        more = f"{len(rows) - MOST_DIFFERENCES} more"
        rows = [*rows[:MOST_DIFFERENCES], (more, *[""] * len(named))]
    return TextTable(columns, rows)


def _settings(run: RunContents) -> dict[str, str]:
    tables: dict[str, Any] = {}
    if run.sweep:
        tables |= run.sweep.model_dump(mode="json", exclude_none=True)
    if run.cluster:
        # reports are mailed, so that what may be secret is left out
        secret = {*HIDDEN, "sbatch"}
        tables["cluster"] = run.cluster.model_dump(mode="json", exclude=secret, exclude_none=True)
    found = {}
    for key, value in leaves(tables):
        found[key] = value if isinstance(value, str) else json.dumps(value)
    return found
