"""`tula report RUN`: figures, tables and the report of a run or study, from its files alone.

Works at any stage: over measurements alone, over a plan, during training and after it, on any
machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tula_hpc.analysis.planning.knee import loaded_elsewhere
from tula_hpc.analysis.report.output import (
    figure_files,
    render_page,
    replace_files,
)
from tula_hpc.analysis.report.tables import (
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
from tula_hpc.analysis.report.text import about_plan, answer, how_measured, warnings
from tula_hpc.analysis.run_contents import RunContents, read_run
from tula_hpc.records import RunDirectory

if TYPE_CHECKING:
    from tula_hpc.analysis.figures.all import Figures
    from tula_hpc.analysis.figures.drawing import TitlePage


TEMPLATE = "report_template.html"


def write_report(run: RunDirectory) -> list[Path]:
    """Write RUN/report: report.html, report.pdf, and each figure as SVG, PNG and CSV.

    Figures that have no data yet are left out, and the report says so. Every file is replaced as a
    whole.

    Returns:
        The files, report.html first.

    Raises:
        RunDirectoryError: There is no such directory, or it holds no run.
        OSError: The folder cannot be written.
    """
    # matplotlib takes half a second; the tables do without
    with loaded_elsewhere():
        from tula_hpc.analysis.figures.all import FIGURES, draw_all
    from tula_hpc.analysis.figures.drawing import render_pdf

    contents = read_run(run)
    drawn = draw_all(contents)
    svgs = [drawing.svg() for drawing in drawn.drawings]
    summary, page = _summary(contents), _page(contents, drawn, svgs)
    page["summary"] = summary_table(summary)
    files: dict[str, bytes] = {"report.html": render_page(TEMPLATE, page).encode()}
    files |= figure_files(drawn.drawings, svgs)
    # last: it lays the figures out anew
    files["report.pdf"] = render_pdf(_title_page(page, summary), drawn.drawings)
    return replace_files(run.report, FIGURES, files)


def _page(contents: RunContents, drawn: Figures, svgs: Sequence[str]) -> dict[str, Any]:
    """What the template shows. Everything but the drawings' own SVG is escaped there."""
    from markupsafe import Markup

    from tula_hpc.analysis.figures.style import COLOURS

    plan = contents.plan
    inline = [drawing.inline_svg(svg) for drawing, svg in zip(drawn.drawings, svgs, strict=True)]
    return {
        "title": contents.name,
        "subtitle": _subtitle(contents),
        "answer": answer(contents),
        "about_plan": about_plan(contents),
        "warnings": warnings(contents),
        "figures": [
            # the figures' own SVG
            (drawing, Markup(svg))  # noqa: S704
            for drawing, svg in zip(drawn.drawings, inline, strict=True)
        ],
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
    # the table is about that partition alone
    here = (None, contents.plan.chosen.partition)
    done = next(
        (item for item in contents.trainings if item.result and item.partition in here), None
    )
    trained = (done.result, done.epoch_time_s) if done else (None, None)
    return summary_rows(contents.plan, contents.measurements, *trained)


def _subtitle(contents: RunContents) -> str:
    parts = [f"objective: {contents.plan.objective}"] if contents.plan else []
    parts += [f"cluster: {contents.cluster.name}"] if contents.cluster else []
    return " · ".join(["How many nodes, which batch size, how long, at what cost", *parts])


def _title_page(page: Mapping[str, Any], summary: Sequence[SummaryRow]) -> TitlePage:
    from tula_hpc.analysis.figures.drawing import TitlePage

    table = TextTable(
        SUMMARY_COLUMNS, [summary_cells(row)[: len(SUMMARY_COLUMNS)] for row in summary]
    )
    head = (page["title"], page["subtitle"], page["answer"])
    return TitlePage(*head, *table, page["about_plan"], page["warnings"])
