"""`python -m tula_hpc.analysis.study RUN`: table, figures and verdicts of a study, from its files alone.

Works while the study runs, too: what has no result yet is counted and left out of the means.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tula_hpc.analysis.planning.knee import loaded_elsewhere
from tula_hpc.analysis.report.output import (
    figure_files,
    render_page,
    replace_files,
)
from tula_hpc.analysis.report.study_text import cautions, latex, plain_text, table_cells, verdicts
from tula_hpc.analysis.report.tables import TextTable, event_table
from tula_hpc.analysis.study_results import (
    StudyContents,
    StudyTable,
    answer,
    make_table,
    read_study,
)
from tula_hpc.errors import InputError, TulaError
from tula_hpc.formatting import UNKNOWN, format_percent, printable, printable_output
from tula_hpc.records import RunDirectory

if TYPE_CHECKING:
    from tula_hpc.analysis.figures.all import Figures

TEMPLATE = "study_template.html"


def write_study_report(run: RunDirectory) -> list[Path]:
    """Write RUN/report anew: study.html, study_table.tex, study_runs.csv, and each figure as SVG, PNG and CSV.

    The CSV file of the table's figure is the table.

    Returns:
        The files, study.html first.

    Raises:
        RunDirectoryError: There is no such directory, or it holds no study.
        OSError: The folder cannot be written.
    """
    # matplotlib takes half a second
    with loaded_elsewhere():
        from tula_hpc.analysis.figures.all import STUDY_FIGURES, draw_study
        from tula_hpc.analysis.figures.drawing import Table

    contents = read_study(run)
    table = make_table(contents.study, contents.outcomes, contents.sweep.workload.test_samples)
    drawn = draw_study(contents, table)
    svgs = [drawing.svg() for drawing in drawn.drawings]
    runs = Table(*_runs(contents)).to_csv()
    files: dict[str, bytes] = {
        "study.html": render_page(TEMPLATE, _page(contents, table, drawn, svgs)).encode(),
        "study_table.tex": printable(latex(table)).encode(),
        "study_runs.csv": runs.encode(),
    }
    return replace_files(run.report, STUDY_FIGURES, files | figure_files(drawn.drawings, svgs))


def study_text(run: RunDirectory) -> str:
    """The table for a terminal, below it the answer.

    Raises:
        RunDirectoryError: There is no such directory, or it holds no study.
    """
    contents = read_study(run)
    table = make_table(contents.study, contents.outcomes, contents.sweep.workload.test_samples)
    doubts = [f"warning: {doubt}" for doubt in cautions(contents, table)]
    return "\n".join([plain_text(table), "", answer(table), *doubts])


def _page(
    contents: StudyContents, table: StudyTable, drawn: Figures, svgs: Sequence[str]
) -> dict[str, Any]:
    """What the template shows. Everything but the drawings' own SVG is escaped there."""
    from markupsafe import Markup

    from tula_hpc.analysis.figures.style import COLOURS

    inline = [drawing.inline_svg(svg) for drawing, svg in zip(drawn.drawings, svgs, strict=True)]
    return {
        "title": contents.name,
        "subtitle": "Methods of large-batch training, compared at equal epochs",
        "answer": answer(table),
        "warnings": cautions(contents, table),
        "cells": table_cells(table),
        "verdicts": verdicts(table),
        "figures": [
            # the figures' own SVG
            (drawing, Markup(svg))  # noqa: S704
            for drawing, svg in zip(drawn.drawings, inline, strict=True)
        ],
        "missing": drawn.missing,
        "colours": COLOURS,
        "facts": list(_facts(contents)),
        "rates": _rates(contents),
        "runs": _as_text(contents),
        "sweep_text": contents.sweep_text,
        "events": event_table(contents.events),
        "happened": len(contents.events),
    }


def _facts(contents: StudyContents) -> Iterator[tuple[str, str]]:
    work, study = contents.sweep.workload, contents.study
    yield (
        "workload",
        f"{work.model} on {work.dataset}" + (f", {work.samples:,} samples" if work.samples else ""),
    )
    yield from (
        (name, given) for name, given in (("loss", work.loss), ("accuracy", work.metric)) if given
    )
    yield "epochs", f"{work.epochs}, the same for every method and batch"
    yield "seeds", ", ".join(map(str, study.seeds))
    yield "nodes", f"{study.nodes} for each training"
    chosen = contents.rates.rates if contents.rates else {}
    tuned = "; ".join(f"{name}: {rate:g}" for name, rate in chosen.items())
    how = f"chosen at B = {study.small_batch:,} on held-out training samples, never on the test set"
    yield "learning rate", f"{tuned} ({how})" if tuned else f"{work.lr:g}, not tuned"
    for name, keys in study.variants.items():
        yield name, ", ".join(f"{key} = {value}" for key, value in keys.items())


RUN_COLUMNS = (
    "method",
    "global_batch_samples",
    "seed",
    "status",
    "test_accuracy",
    "train_accuracy",
    "note",
)


def _runs(
    contents: StudyContents,
) -> tuple[tuple[str, ...], list[tuple[str | int | float | None, ...]]]:
    rows: list[tuple[str | int | float | None, ...]] = [
        (*outcome.cell, outcome.status, outcome.test, outcome.train, outcome.why)
        for outcome in contents.outcomes
    ]
    return RUN_COLUMNS, rows


def _as_text(contents: StudyContents) -> TextTable:
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
    rows: list[tuple[str, ...]] = [
        (
            trial.family,
            f"{trial.lr:g}"
            + (" (chosen)" if contents.rates.rates.get(trial.family) == trial.lr else ""),
            UNKNOWN if trial.accuracy is None else format_percent(trial.accuracy),
        )
        for trial in contents.rates.trials
    ]
    return TextTable(("family", "learning rate", "accuracy on held-out training samples"), rows)


@printable_output()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0 done, 1 the report could not be written, 2 bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m tula_hpc.analysis.study",
        description="Write table, figures and verdicts of a study into RUN/report, from the files in RUN alone.",
    )
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="a run directory of a study, finished or not"
    )
    run = RunDirectory(parser.parse_args(arguments).run)
    try:
        paths = write_study_report(run)
        print(study_text(run))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    except TulaError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error.filename or run.root}: {error.strerror or error}", file=sys.stderr)
        return 1
    print(f"report: {paths[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
