"""Figures of strong and weak scaling."""

from __future__ import annotations

import csv
import io
from typing import Any
from unittest import mock

import pytest

from tests.run_factory import make_run
from tula_hpc.analysis import node_scaling
from tula_hpc.analysis.figures import all as figures
from tula_hpc.analysis.figures.drawing import Drawing, Missing
from tula_hpc.analysis.figures.scaling_panels import COLOUR, draw_strong_scaling, draw_weak_scaling
from tula_hpc.analysis.figures.style import INK, named_ticks, new_figure
from tula_hpc.analysis.node_scaling import NodeScaling, ScalingCurve, node_scaling_of
from tula_hpc.analysis.plan import make_plan
from tula_hpc.analysis.planning.partitions import fit_parts
from tula_hpc.analysis.run_contents import RunContents, read_run
from tula_hpc.analysis.what_if import what_if

DRAWN = {"strong": draw_strong_scaling, "weak": draw_weak_scaling}
QUANTITIES = ("step_time_s", "epoch_time_s", "training_time_s", "speed_up", "efficiency_percent", "node_hours")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunContents:
    """A planned run, which no test changes."""
    return read_run(make_run(tmp_path_factory.mktemp("scaling") / "run", stage="plan"))


@pytest.fixture(scope="module")
def scaling(run: RunContents) -> NodeScaling:
    return node_scaling_of(run)


def drawn(kind: str, run: RunContents, scaling: NodeScaling) -> tuple[Drawing, ScalingCurve]:
    result = DRAWN[kind](run, scaling)
    assert isinstance(result, Drawing)
    return result, getattr(scaling, kind)


@pytest.mark.parametrize("kind", DRAWN)
def test_the_csv_file_has_the_same_numbers(kind: str, run: RunContents, scaling: NodeScaling) -> None:
    drawing, curve = drawn(kind, run, scaling)
    rows = list(csv.DictReader(io.StringIO(drawing.table.to_csv())))
    for row, item in zip(rows, curve.rows, strict=True):
        intervals = (item.step_s, item.epoch_s, item.training_s, item.speed_up, item.efficiency.times(100))
        for name, interval in zip(QUANTITIES, (*intervals, item.node_hours), strict=True):
            assert tuple(float(row[f"{end}{name}"]) for end in ("", "low_", "high_")) == interval
        assert (int(row["nodes"]), row["basis"]) == (item.nodes, item.basis)
        assert row["measured_step_time_s"] == ("" if item.measured_step_s is None else str(item.measured_step_s))
    assert [row["nodes"] for row in rows if row["chosen"] == "true"] == ["4"]


@pytest.mark.parametrize("kind", DRAWN)
def test_marks_tell_what_each_row_rests_on(kind: str, run: RunContents, scaling: NodeScaling) -> None:
    drawing, curve = drawn(kind, run, scaling)
    for index, axes in enumerate(drawing.figure.axes):
        lines: list[Any] = [line for line in axes.get_lines() if line.get_color() == COLOUR]
        marks = {round(line.get_xdata()[0]): line for line in lines if len(line.get_xdata()) == 1}
        assert list(marks) == [row.nodes for row in curve.rows]
        for row in curve.rows:
            mark = marks[row.nodes]
            assert mark.get_marker() == ("D" if row.basis == "extrapolated" else "o")
            # no whole training was measured
            filled = row.basis == "measured" and index < 3
            assert (mark.get_markerfacecolor() == COLOUR) == filled
        dashed = [line for line in lines if len(line.get_xdata()) == 2 and line.get_linestyle() == "--"]
        assert len(dashed) == sum(row.basis == "extrapolated" for row in curve.rows)
        rings: list[Any] = [line for line in axes.get_lines() if line.get_color() == INK.light]
        assert [list(ring.get_xdata()) for ring in rings] == [[4]]


@pytest.mark.parametrize("kind", DRAWN)
def test_axes_and_caption_say_what_is_shown(kind: str, run: RunContents, scaling: NodeScaling) -> None:
    drawing, curve = drawn(kind, run, scaling)
    base = curve.base.nodes
    time = "time of an epoch" if kind == "strong" else "time of a step"
    names = [time, f"speed-up over N = {base}", "efficiency", "node-hours of the training"]
    assert [axes.get_ylabel() for axes in drawing.figure.axes] == names
    assert [axes.get_xlabel() for axes in drawing.figure.axes] == ["", "", "number of nodes N", "number of nodes N"]
    for text in (f"over N = {base}, the smallest profiled", "90 % intervals", "extrapolated beyond", "chosen N"):
        assert text in drawing.caption
    assert "16 would" in drawing.title


def test_omitted_sizes_are_named(run: RunContents, scaling: NodeScaling) -> None:
    drawing, _ = drawn("strong", run, scaling)
    assert drawing.caption.endswith("Left out: N = 1 (does not fit in memory).")


def test_without_a_plan_the_reason_is_given(run: RunContents) -> None:
    missing = draw_strong_scaling(run._replace(plan=None))
    assert isinstance(missing, Missing)
    assert "there is none yet" in missing.why
    assert not missing.optional


def test_models_are_fitted_once_for_all(run: RunContents, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run.sweep is not None
    assert run.cluster is not None
    run = run._replace(plan=make_plan(run.sweep, run.cluster, run.measurements))
    fit = mock.Mock(wraps=fit_parts)
    monkeypatch.setattr(node_scaling, "fit_parts", fit)
    both = {name: figures.FIGURES[name] for name in ("strong_scaling", "weak_scaling")}
    monkeypatch.setattr(figures, "FIGURES", both)
    result = figures.draw_all(run)
    assert [drawing.name for drawing in result.drawings] == [*both]
    assert result.scaling is not None
    assert len(result.scaling.curves) == 2
    assert what_if(run, result.scaling.fitted)
    assert fit.call_count == 1


def test_a_failing_model_costs_only_its_figures(run: RunContents, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise FloatingPointError("overflow")

    monkeypatch.setattr(node_scaling, "fit_parts", fail)
    monkeypatch.setattr(figures, "FIGURES", {name: figures.FIGURES[name] for name in ("cost", "weak_scaling")})
    result = figures.draw_all(run)
    assert [drawing.name for drawing in result.drawings] == ["cost"]
    (missing,) = result.missing
    assert "FloatingPointError: overflow" in missing.why


def test_a_failing_scaling_leaves_the_models_for_the_what_if(run: RunContents, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run.sweep is not None
    assert run.cluster is not None
    run = run._replace(plan=make_plan(run.sweep, run.cluster, run.measurements))
    monkeypatch.setattr(node_scaling, "part_scaling", mock.Mock(side_effect=FloatingPointError("overflow")))
    scaling = node_scaling_of(run)
    assert {curve.why for curve in (scaling.strong, scaling.weak)} == {
        "it could not be predicted, FloatingPointError: overflow"
    }
    assert what_if(run, scaling.fitted)


def test_ticks_keep_clear_of_one_another_in_narrow_panels() -> None:
    shown = []
    for columns in (1, 2):
        with new_figure("ticks", 3.0, columns=columns) as (_, panels):
            panels[0].set_xlim(0, 30)
            named_ticks(panels[0], list(range(1, 30)), lambda value: f"{value:.0f} nodes")
            shown.append(len(panels[0].get_xticks()))
    assert shown[0] >= 1.5 * shown[1] > 0
