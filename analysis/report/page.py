"""Report of a run at any stage: figures, tables and a page, from its files alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tula_hpc.analysis.report import tables
from tula_hpc.analysis.report.bill_text import bill_of, bill_table
from tula_hpc.analysis.report.first_page import first_page
from tula_hpc.analysis.report.output import figure_files, prepare_folder, render_page, replace_files
from tula_hpc.analysis.report.scaling_text import scaling_files, scaling_sections
from tula_hpc.analysis.report.text import assumptions, doubts, how_measured
from tula_hpc.analysis.run_contents import RunContents, read_run
from tula_hpc.analysis.what_if import what_if
from tula_hpc.errors import RunDirectoryError
from tula_hpc.files import MEASUREMENTS_GONE, loaded_elsewhere
from tula_hpc.formatting import plural
from tula_hpc.records import Event, RunDirectory, grouped

if TYPE_CHECKING:
    from tula_hpc.analysis.figures.all import Figures
    from tula_hpc.analysis.figures.drawing import TitlePage


TEMPLATE = "report_template.html"
# most warnings above the line "Details", so that what decides fits on two printed pages
MOST_WARNINGS = 4


def write_report(run: RunDirectory) -> list[Path]:
    """Write RUN/report and return its files, report.html first.

    The others are report.pdf, each figure as SVG, PNG and CSV, and both tables of scaling as plain
    text and as LaTeX. Figures without data yet are left out, and the report names them. Every file
    is replaced as a whole.
    """
    # keeps an earlier report, which still had the measurements
    if run.has_trained() and not any(run.profile.glob("*.jsonl")):
        raise RunDirectoryError(MEASUREMENTS_GONE, source=run.profile)
    # importing matplotlib takes half a second, and the tables do not need it
    with loaded_elsewhere():
        from tula_hpc.analysis.figures.all import DECIDING, FIGURES, draw_all
    from tula_hpc.analysis.figures.drawing import render_pdf

    contents = read_run(run)
    # before the figures, which take seconds
    prepare_folder(run.report)
    drawn = draw_all(contents)
    figures = figure_files(drawn.drawings)
    page = _page(contents, drawn, figures) | {"deciding": DECIDING}
    files = {"report.html": render_page(TEMPLATE, page).encode()} | figures
    if drawn.scaling:
        files |= scaling_files(drawn.scaling)
    # last: it changes the layout of the figures
    files["report.pdf"] = render_pdf(_title_page(page), drawn.drawings)
    return replace_files(run.report, FIGURES, files)


def _page(contents: RunContents, drawn: Figures, files: Mapping[str, bytes]) -> dict[str, Any]:
    shown, more = _shown_and_more(grouped(doubts(contents)))
    others = what_if(contents, drawn.scaling and drawn.scaling.fitted)
    page = {
        **shared_content(contents.name, contents.events, drawn, files),
        "subtitle": _subtitle(contents),
        "first": first_page(contents),
        # the first page has the accuracy
        "summary": tables.summary_table(_summary(contents), with_score=False),
        "bills": list(_bills(contents)),
        "groups": shown,
        "more_groups": more,
        "assumptions": assumptions(contents),
        "scaling": scaling_sections(drawn.scaling) if drawn.scaling else [],
        "facts": how_measured(contents),
        "failures": tables.failure_table(contents.measurements),
        "accounts": tables.account_table(contents.accounts),
        "accounted": len(contents.accounts),
        "failed": sum(item.status != "ok" for item in contents.measurements),
        "models": [],
        "what_if": tables.what_if_table(others),
        "nothing_changes": tables.nothing_changes(others),
        "remarks": tables.not_possible(others),
        "fallbacks": None,
        "candidates": None,
        "inputs": [("sweep.toml", contents.sweep_text), ("cluster.toml", contents.cluster_text)],
    }
    if contents.plan:
        page["models"] = tables.model_tables(contents.plan.models)
        page["fallbacks"] = tables.fallback_table(contents.plan)
        page["candidates"] = tables.candidate_table(contents.plan, contents.measurements)
    return page


def _shown_and_more(
    groups: Mapping[str, Sequence[str]],
) -> tuple[dict[str, Sequence[str]], dict[str, Sequence[str]]]:
    """Split each group's texts into those that are shown and the rest; groups take turns."""
    turns = [(place, name) for name, texts in groups.items() for place in range(len(texts))]
    turns.sort(key=lambda turn: turn[0])
    kept = Counter(name for _, name in turns[:MOST_WARNINGS])
    shown = {name: texts[: kept[name]] for name, texts in groups.items() if kept[name]}
    more = {name: texts[kept[name] :] for name, texts in groups.items() if texts[kept[name] :]}
    return shown, more


def shared_content(
    title: str, events: Sequence[Event], drawn: Figures, files: Mapping[str, bytes]
) -> dict[str, Any]:
    """Return what all templates share; `files` are by name. They escape everything but the SVG."""
    from markupsafe import Markup

    from tula_hpc.analysis.figures.style import COLOURS

    figures = []
    for drawing in drawn.drawings:
        svg = drawing.inline_svg(files[f"{drawing.name}.svg"].decode())
        figures.append((drawing, Markup(svg)))  # noqa: S704
    return {
        "title": title,
        "figures": figures,
        "missing": drawn.missing,
        "colours": COLOURS,
        "events": tables.event_table(events),
        "happened": len(events),
    }


def _summary(contents: RunContents) -> list[tables.SummaryRow]:
    if contents.plan is None:
        return []
    # the table is about the chosen partition alone
    here = (None, contents.plan.chosen.partition)
    for training in contents.trainings:
        if training.result and training.partition in here:
            bill = bill_of(contents.plan, contents.events, training)
            return tables.summary_rows(contents.plan, contents.measurements, training, bill)
    return tables.summary_rows(contents.plan, contents.measurements, None)


def _bills(contents: RunContents) -> Iterator[tuple[str, tables.TextTable]]:
    for training in contents.trainings:
        bill = bill_of(contents.plan, contents.events, training)
        if bill is not None:
            label = "" if len(contents.trainings) == 1 else f" (training {training.label})"
            yield f"Predicted and actual{label}", bill_table(bill)


def _subtitle(contents: RunContents) -> str:
    parts = [contents.sweep.workload.what_is_trained] if contents.sweep else []
    if contents.plan:
        parts.append(f"objective: {contents.plan.objective}")
    if contents.cluster:
        parts.append(f"cluster: {contents.cluster.name}")
    # sentences, tables and figures use these letters
    return " · ".join([*parts, "N nodes, local batch b, global batch B"])


def _title_page(page: Mapping[str, Any]) -> TitlePage:
    from tula_hpc.analysis.figures.drawing import TitlePage

    first = page["first"]
    head = (page["title"], page["subtitle"], first.decision)
    lists = {section.heading: section.sentences for section in first.sections} | page["groups"]
    if more := sum(map(len, page["more_groups"].values())):
        lists["More"] = [f"{plural(more, 'more remark')} in report.html."]
    summary = page["summary"]
    return TitlePage(*head, summary.columns, summary.rows, lists)
