"""Report of a study, finished or not: table, figures and verdicts, from its files alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tula_hpc.analysis import study_results
from tula_hpc.analysis.report.output import figure_files, prepare_folder, render_page, replace_files
from tula_hpc.analysis.report.page import shared_content
from tula_hpc.analysis.report.study_text import cautions, latex, plain_text, table_cells, verdicts
from tula_hpc.analysis.report.tables import TextTable
from tula_hpc.analysis.study_results import StudyContents, StudyTable
from tula_hpc.files import loaded_elsewhere
from tula_hpc.formatting import format_percent, printable
from tula_hpc.records import RunDirectory

if TYPE_CHECKING:
    from tula_hpc.analysis.figures.all import Figures

TEMPLATE = "study_template.html"
# columns of study_runs.csv
RUN_COLUMNS = (
    "method",
    "global_batch_samples",
    "seed",
    "status",
    "test_accuracy",
    "train_accuracy",
    "note",
)


def write_study_report(run: RunDirectory) -> list[Path]:
    """Write RUN/report and return its files, study.html first.

    The others are study_table.tex, study_runs.csv, and each figure as SVG, PNG and CSV;
    study_table.csv has the numbers of the whole table.
    """
    # importing matplotlib takes half a second
    with loaded_elsewhere():
        from tula_hpc.analysis.figures.all import STUDY_FIGURES, draw_study
        from tula_hpc.analysis.figures.drawing import Table

    contents, table = _read(run)
    # before the figures, which take seconds
    prepare_folder(run.report)
    drawn = draw_study(contents, table)
    figures = figure_files(drawn.drawings)
    runs: list[tuple[str | int | float | None, ...]] = [
        (*outcome.cell, outcome.status, outcome.test, outcome.train, outcome.why)
        for outcome in contents.outcomes
    ]
    files: dict[str, bytes] = {
        "study.html": render_page(TEMPLATE, _page(contents, table, drawn, figures)).encode(),
        "study_table.tex": printable(latex(table)).encode(),
        "study_runs.csv": Table(RUN_COLUMNS, runs).to_csv().encode(),
    }
    return replace_files(run.report, STUDY_FIGURES, files | figures)


def report_study(run: RunDirectory) -> str:
    """Write a study's report; return its table for a terminal, the answer, and the page's file."""
    paths = write_study_report(run)
    contents, table = _read(run)
    doubts = [f"warning: {doubt}" for doubt in cautions(contents, table)]
    lines = [plain_text(table), "", study_results.answer(table), *doubts, f"report: {paths[0]}"]
    return "\n".join(lines)


def _read(run: RunDirectory) -> tuple[StudyContents, StudyTable]:
    contents = study_results.read_study(run)
    test_samples = contents.sweep.workload.test_set_size
    return contents, study_results.make_table(contents.study, contents.outcomes, test_samples)


def _page(
    contents: StudyContents, table: StudyTable, drawn: Figures, files: Mapping[str, bytes]
) -> dict[str, Any]:
    return {
        **shared_content(contents.sweep.name, contents.events, drawn, files),
        "subtitle": "Methods of large-batch training, compared after the same number of epochs",
        "answer": study_results.answer(table),
        "warnings": cautions(contents, table),
        "cells": table_cells(table),
        "verdicts": verdicts(table),
        "facts": list(_facts(contents)),
        "rates": _rates(contents),
        "runs": _runs_as_text(contents),
        "sweep_text": contents.sweep_text,
    }


def _facts(contents: StudyContents) -> Iterator[tuple[str, str]]:
    work = contents.sweep.workload
    study = contents.study
    samples = f", {work.samples:,} samples" if work.samples else ""
    yield "workload", f"{work.model} on {work.dataset}{samples}"
    if work.loss:
        yield "loss", work.loss
    if work.metric:
        yield "accuracy", work.metric
    yield "epochs", f"{work.epochs}, the same for every method and batch"
    yield "seeds", ", ".join(map(str, study.seeds))
    yield "nodes", f"{study.nodes} for each training"
    if contents.rates and contents.rates.rates:
        tuned = "; ".join(f"{name}: {rate:g}" for name, rate in contents.rates.rates.items())
        where = f"at B = {study.small_batch:,} on held-out training samples"
        yield "learning rate", f"{tuned} (chosen {where}, never on the test set)"
    elif study.base_lrs:
        yield "learning rate", "not chosen yet, or study_rates.json is missing or damaged"
    else:
        yield "learning rate", f"{work.lr:g}, not tuned"
    for name, keys in study.variants.items():
        yield name, ", ".join(f"{key} = {value}" for key, value in keys.items())


def _runs_as_text(contents: StudyContents) -> TextTable:
    rows: list[tuple[str, ...]] = [
        (*map(str, o.cell), o.status, format_percent(o.test), format_percent(o.train), o.why)
        for o in contents.outcomes
    ]
    return TextTable(
        ("method", "batch", "seed", "status", "test accuracy", "train accuracy", "note"), rows
    )


def _rates(contents: StudyContents) -> TextTable | None:
    if contents.rates is None:
        return None
    rows: list[tuple[str, ...]] = []
    for trial in contents.rates.trials:
        rate = f"{trial.lr:g}"
        if contents.rates.rates.get(trial.family) == trial.lr:
            rate += " (chosen)"
        rows.append((trial.family, rate, format_percent(trial.accuracy)))
    return TextTable(("family", "learning rate", "accuracy on held-out training samples"), rows)
