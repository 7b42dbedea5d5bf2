"""Tables of scaling for the page, as plain text and as LaTeX."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.run_factory import SWEEP_TOML, candidate, configurations, make_run, plan, write_plan
from tula_hpc.analysis.figures.all import FIGURES
from tula_hpc.analysis.node_scaling import NodeScaling, node_scaling_of
from tula_hpc.analysis.report.page import write_report
from tula_hpc.analysis.report.scaling_text import explain, latex, plain_text, scaling_sections, scaling_table
from tula_hpc.analysis.report.tables import latex_escaped
from tula_hpc.analysis.run_contents import read_run
from tula_hpc.records import RunDirectory

HOSTILE = "a_b & 50% of $x^2 ~ {\\input{/etc/passwd}} #1 <ü–日>|"


@pytest.fixture(scope="module")
def scaling(tmp_path_factory: pytest.TempPathFactory) -> NodeScaling:
    return node_scaling_of(read_run(make_run(tmp_path_factory.mktemp("scaling") / "run", stage="plan")))


@pytest.fixture
def no_drawings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no figures, for tests of the tables."""
    monkeypatch.setattr("tula_hpc.analysis.figures.all.FIGURES", {"strong_scaling": FIGURES["strong_scaling"]})
    monkeypatch.setattr("tula_hpc.analysis.figures.drawing.render_pdf", lambda *_: b"%PDF")


def test_plain_text_marks_exactly_what_is_extrapolated(scaling: NodeScaling) -> None:
    for curve in scaling.curves:
        lines = plain_text(scaling, curve).splitlines()
        head = next(index for index, line in enumerate(lines) if line.startswith("nodes"))
        for row, line in zip(curve.rows, lines[head + 1 :], strict=False):
            mark = "*" if row.basis == "extrapolated" else ""
            assert line.split()[0] == f"{row.nodes}{mark}"
        table = lines[head : head + 1 + len(curve.rows)]
        assert len({len(line) for line in table}) == 1
        assert all(line.isascii() for line in lines)


def test_sentences_say_how_the_numbers_were_made(scaling: NodeScaling) -> None:
    measured, sizes, *_ = explain(scaling, scaling.weak)
    assert measured.startswith("Step times were measured on 1, 2 and 4 nodes (18 configurations of nodes and batch)")
    assert "N = 1, 2 and 4 are among the measured ones" in sizes
    assert "N = 8 and 16 (*) are extrapolated" in sizes
    assert "predicted" not in sizes
    for curve in scaling.curves:
        whole = " ".join(plain_text(scaling, curve).split())
        assert " ".join(explain(scaling, curve)) in whole
        assert f"relative to N = {curve.base.nodes}, the smallest measured number of nodes" in whole
        assert "(20 epochs)" in whole


def test_sentences_name_the_workers_of_a_node(scaling: NodeScaling) -> None:
    first = scaling.weak.base
    eight = first._replace(candidate=first.candidate.model_copy(update={"workers_per_node": 8}))
    measured, *_ = explain(scaling, scaling.weak._replace(rows=[eight, *scaling.weak.rows[1:]]))
    assert measured.startswith("Step times were measured on 1, 2 and 4 nodes with 8 workers each (18 configur")


def test_the_text_says_what_limits_it(scaling: NodeScaling) -> None:
    assert "Left out: N = 1 (does not fit in memory)." in plain_text(scaling, scaling.strong)
    small = scaling._replace(max_nodes=4, emulated=True)
    assert "jobs of 4 nodes at most" in plain_text(small, small.weak)
    assert "real nodes will differ" in plain_text(small, small.weak)
    assert "nodes at most" not in plain_text(scaling, scaling.weak)
    assert "real nodes" not in plain_text(scaling, scaling.weak)


def test_values_stand_with_their_intervals(scaling: NodeScaling) -> None:
    first, *others = scaling_table(scaling.weak).rows
    assert first[4:6] == ("1.00", "100")
    for cells, row in zip(others, scaling.weak.rows[1:], strict=True):
        for cell, interval in zip(cells[4:], (row.speed_up, row.efficiency.times(100), row.node_hours), strict=True):
            value, low, high = (float(part.replace(",", "")) for part in re.split(r"\n| – ", cell))
            assert (value, low, high) == pytest.approx(interval, rel=6e-3)


def test_times_have_the_unit_that_suits_them(scaling: NodeScaling) -> None:
    for factor, unit in ((1e-6, "ms"), (1.0, "ms"), (10.0, "s"), (1e3, "min"), (1e5, "h")):
        rows = []
        for row in scaling.weak.rows:
            step_s = factor * row.candidate.step_time_s
            rows.append(row._replace(candidate=row.candidate.model_copy(update={"step_time_s": step_s})))
        assert scaling_table(scaling.weak._replace(rows=rows)).columns[2] == f"step, {unit}"


def test_latex_is_a_table_that_needs_no_package(scaling: NodeScaling) -> None:
    for curve in scaling.curves:
        text = latex(scaling, curve)
        assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 1
        assert text.count("{") == text.count("}")
        assert text.isascii()
        commands = set(re.findall(r"\\([a-zA-Z]+)", text))
        assert commands <= {
            "small",
            "setlength",
            "tabcolsep",
            "noindent",
            "begin",
            "end",
            "hline",
            "footnotesize",
            "par",
        }
        rows = [line for line in text.splitlines() if line.endswith(r"\\")]
        assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {len(scaling_table(curve).columns) - 1}
        for row in curve.rows:
            mark = r"\*" if row.basis == "extrapolated" else ""
            assert re.search(rf"^{row.nodes}{mark} & ", text, re.MULTILINE)


def test_names_cannot_leave_the_text_of_latex(scaling: NodeScaling) -> None:
    text = latex(scaling._replace(name=HOSTILE), scaling.strong)
    plain = latex(scaling._replace(name="x"), scaling.strong)
    assert latex_escaped(HOSTILE) in text
    assert text.replace(latex_escaped(HOSTILE), "x") == plain
    # each of TeX's own letters is behind a backslash or spelt out
    rest = re.sub(r"\\text\w+\{\}|\\[{}$&#_%]", "", latex_escaped(HOSTILE))
    assert not set(rest) & set("\\{}$&#_%~^<>|")
    assert r"\textbackslash{}input\{/etc/passwd\}" in text
    assert latex_escaped("Zürich") == "Zurich"
    assert latex_escaped("日") == "?"


def test_sections_name_what_each_row_rests_on(scaling: NodeScaling) -> None:
    strong, weak = scaling_sections(scaling)
    assert (strong.heading, weak.heading) == ("Strong scaling", "Weak scaling")
    assert "Node-hours are those expected of the whole training" in strong.text
    assert "Node-hours" not in weak.text, "node-hours are in the table above"
    assert [row[0] for row in weak.table.rows] == [
        "1\nmeasured",
        "2\nmeasured",
        "4\nmeasured",
        "8*\nextrapolated",
        "16*\nextrapolated",
    ]


@pytest.mark.usefixtures("no_drawings")
def test_the_page_has_the_tables_and_links_to_their_files_and_none_of_an_earlier_report_stay(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", stage="plan")
    run.sweep_file.write_text(SWEEP_TOML.replace('"cifar100-vgg11"', '"my_net"'))
    page = write_report(run)[0].read_text()
    assert "Will it scale?" in page
    for kind in ("strong", "weak"):
        for suffix in ("txt", "tex"):
            assert f'href="{kind}_scaling.{suffix}"' in page
            text = (run.report / f"{kind}_scaling.{suffix}").read_text()
            assert ("my_net" if suffix == "txt" else r"my\_net") in text
    run.plan_file.unlink()
    page = write_report(run)[0].read_text()
    assert "Will it scale?" not in page
    assert "strong scaling: its batch comes with the plan" in page
    assert [path.name for path in run.report.glob("strong_scaling*")] == []


@pytest.mark.processes
@pytest.mark.parametrize("case", ["one size", "one candidate", "no inputs"])
@pytest.mark.usefixtures("no_drawings")
def test_a_report_is_written_where_there_is_little_to_scale(tmp_path: Path, case: str) -> None:
    run: RunDirectory = make_run(tmp_path / "run", stage="plan")
    if case == "one size":
        for file in run.profile.glob("*.jsonl"):
            if not file.name.startswith("4-"):
                file.unlink()
    elif case == "one candidate":
        made = plan([candidate(where) for where in configurations((4,), (256, 512))])
        write_plan(run, made.model_copy(update={"candidates": [made.chosen], "fallbacks": []}))
    else:
        run.sweep_file.unlink()
    page = write_report(run)[0].read_text()
    assert ("Will it scale?" in page) == (case == "one candidate")
    assert ("strong scaling: only N = 4 was profiled" in page) == (case == "one size")
    assert ("sweep.toml or cluster.toml" in page) == (case == "no inputs")
