"""`tula report RUN`: figures, tables and the report of a run or study, from its files alone.

Works at any stage: over measurements alone, over a plan, during training and after it, on any machine.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tula_hpc.analysis.drawing_library import loaded_elsewhere
from tula_hpc.analysis.formatting import keep_units
from tula_hpc.analysis.report_data import RunContents, holds_study, read_run
from tula_hpc.analysis.report_tables import (
    SUMMARY_COLUMNS,
    SummaryRow,
    TextTable,
    candidate_table,
    event_table,
    failure_table,
    fallback_table,
    model_tables,
    summary_cells,
    summary_rows,
    summary_table,
)
from tula_hpc.analysis.report_text import about_plan, answer, how_measured, warnings
from tula_hpc.errors import InputError, RunDirectoryError, TulaError
from tula_hpc.files import mistrust
from tula_hpc.printable import printable, printable_output
from tula_hpc.records import RunDirectory, write_atomically

if TYPE_CHECKING:
    import jinja2

    from tula_hpc.analysis.figures import Drawing, Figures, TitlePage

__all__ = [
    "SUMMARY_COLUMNS",
    "SummaryRow",
    "figure_files",
    "main",
    "render_page",
    "replace_files",
    "summary_cells",
    "summary_rows",
    "write_report",
]

TEMPLATE = "report_template.html"
SUFFIXES = ("svg", "png", "csv")


def write_report(run: RunDirectory) -> list[Path]:
    """Write RUN/report anew: report.html, report.pdf, and each figure as SVG, PNG and CSV; of a study its own report.

    Figures that have no data yet are left out, and the report says so. Every file is replaced as a whole.

    Returns:
        The files, report.html (study.html) first.

    Raises:
        RunDirectoryError: There is no such directory, or it holds no run.
        OSError: The folder cannot be written.
    """
    if holds_study(run):
        from tula_hpc.analysis.study import write_study_report  # which imports this module

        return write_study_report(run)
    # matplotlib takes half a second; the tables do without
    with loaded_elsewhere():
        from tula_hpc.analysis import figures

    contents = read_run(run)
    drawn = figures.draw_all(contents)
    svgs = [drawing.svg() for drawing in drawn.drawings]
    summary, page = _summary(contents), _page(contents, drawn, svgs)
    page["summary"] = summary_table(summary)
    files: dict[str, bytes] = {"report.html": render_page(TEMPLATE, page).encode()}
    files |= figure_files(drawn.drawings, svgs)
    # last: it lays the figures out anew
    files["report.pdf"] = figures.render_pdf(_title_page(page, summary), drawn.drawings)
    return replace_files(run.report, figures.FIGURES, files)


def figure_files(drawings: Sequence[Drawing], svgs: Sequence[str]) -> dict[str, bytes]:
    """Each figure as SVG, PNG and CSV, by file name."""
    files: dict[str, bytes] = {}
    for drawing, svg in zip(drawings, svgs, strict=True):
        forms = (svg.encode(), drawing.png(), drawing.table.to_csv().encode())
        files |= {f"{drawing.name}.{suffix}": form for suffix, form in zip(SUFFIXES, forms, strict=True)}
    return files


def replace_files(folder: Path, figures: Iterable[str], files: Mapping[str, bytes]) -> list[Path]:
    """Write a report's files; those of its figures that an earlier one had and this one has not are deleted.

    Raises:
        RunDirectoryError: The folder is someone else's, or a link to somewhere else.
        StorageError: A file cannot be written.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if reason := mistrust(folder):
        raise RunDirectoryError(reason, source=folder)
    for name in {f"{figure}.{suffix}" for figure in figures for suffix in SUFFIXES} - set(files):
        (folder / name).unlink(missing_ok=True)  # it would seem to belong to this report
    for name, content in files.items():
        write_atomically(folder / name, content)
    return [folder / name for name in files]


def render_page(template: str, page: Mapping[str, Any]) -> str:
    """HTML from one of the templates beside this file; everything that is not marked as safe is escaped."""
    return printable(_environment().get_template(template).render(page))


@functools.cache
def _environment() -> jinja2.Environment:
    """It keeps the templates: to compile one takes as long as to fill it in ten times."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["keep_units"] = keep_units
    return environment


def _page(contents: RunContents, drawn: Figures, svgs: Sequence[str]) -> dict[str, Any]:
    """What the template shows. Everything but the drawings' own SVG is escaped there."""
    from markupsafe import Markup

    from tula_hpc.analysis.figures import COLOURS

    plan = contents.plan
    inline = [drawing.inline_svg(svg) for drawing, svg in zip(drawn.drawings, svgs, strict=True)]
    return {
        "title": contents.name,
        "subtitle": _subtitle(contents),
        "answer": answer(contents),
        "about_plan": about_plan(contents),
        "warnings": warnings(contents),
        "figures": [(drawing, Markup(svg)) for drawing, svg in zip(drawn.drawings, inline, strict=True)],  # noqa: S704 - our XML
        "missing": drawn.missing,
        "colours": COLOURS,
        "facts": how_measured(contents),
        "failures": failure_table(contents.measurements),
        "failed": sum(item.status != "ok" for item in contents.measurements),
        "models": model_tables(plan.models) if plan else [],
        "fallbacks": fallback_table(plan) if plan else None,
        "candidates": candidate_table(plan, contents.measurements) if plan else None,
        "inputs": [("sweep.toml", contents.sweep_text), ("cluster.toml", contents.cluster_text)],
        "events": event_table(contents.events),
        "happened": len(contents.events),
    }


def _summary(contents: RunContents) -> list[SummaryRow]:
    if contents.plan is None:
        return []
    here = (None, contents.plan.chosen.partition)  # the table is about that partition alone
    done = next((item for item in contents.trainings if item.result and item.partition in here), None)
    trained = (done.result, done.epoch_time_s) if done else (None, None)
    return summary_rows(contents.plan, contents.measurements, *trained)


def _subtitle(contents: RunContents) -> str:
    parts = [f"objective: {contents.plan.objective}"] if contents.plan else []
    parts += [f"cluster: {contents.cluster.name}"] if contents.cluster else []
    return " · ".join(["How many nodes, which batch size, how long, at what cost", *parts])


def _title_page(page: Mapping[str, Any], summary: Sequence[SummaryRow]) -> TitlePage:
    from tula_hpc.analysis.figures import TitlePage

    table = TextTable(SUMMARY_COLUMNS, [summary_cells(row)[: len(SUMMARY_COLUMNS)] for row in summary])
    head = (page["title"], page["subtitle"], page["answer"])
    return TitlePage(*head, *table, page["about_plan"], page["warnings"])


@printable_output()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0 done, 1 the report could not be written, 2 bad input."""
    parser = argparse.ArgumentParser(
        prog="tula report",
        description="Write figures, tables and the report of a run into RUN/report, from the files in RUN alone.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory, finished or not")
    run = RunDirectory(parser.parse_args(arguments).run)
    try:
        paths = write_report(run)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    except TulaError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error.filename or run.root}: {error.strerror or error}", file=sys.stderr)
        return 1
    print(paths[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
