from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from tests.known import known
from tests.planning_data import cluster, sweep
from tests.run_factory import (
    DATASET_SAMPLES,
    EPOCHS,
    MEMORY_LIMIT,
    MIB,
    candidate,
    configurations,
    make_run,
    measurement,
    memory_use,
    oom,
    peak_bytes,
    plan,
    write_plan,
    write_training,
)
from tula_hpc.analysis.figures.all import FIGURES, draw_all
from tula_hpc.analysis.figures.drawing import MARGIN_IN, Drawing, Missing, TitlePage, render_pdf
from tula_hpc.analysis.figures.labels import LETTER_SHARE, EndLabel, label_ends, mark_chosen, spread
from tula_hpc.analysis.figures.run_curves import curve_of, draw_run_curves
from tula_hpc.analysis.figures.style import (
    SIZES,
    Key,
    amount_axis,
    batch_axis,
    duration_tick,
    legend,
    new_figure,
    size_style,
    styled,
    title_band_in,
    value_axis,
)
from tula_hpc.analysis.figures.training import training_marks
from tula_hpc.analysis.models.profiles import parts_of
from tula_hpc.analysis.plan import make_plan
from tula_hpc.analysis.report.tables import SUMMARY_COLUMNS
from tula_hpc.analysis.run_contents import RunContents, read_run
from tula_hpc.config import SweepSpec, TrainingSpec
from tula_hpc.formatting import in_percent
from tula_hpc.records import Candidate, Configuration, Event, Knee, Measurement, RunDirectory, StepTimes, append_record

SVG = "{http://www.w3.org/2000/svg}"
CONFIGURATION_COLUMNS = ("nodes", "workers_per_node", "local_batch_samples")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunContents:
    """A finished run, which no test changes."""
    return read_run(make_run(tmp_path_factory.mktemp("figures") / "run"))


@pytest.fixture(scope="module")
def drawings(run: RunContents) -> dict[str, Drawing]:
    """Every figure of the finished run, not rendered."""
    return {drawing.name: drawing for drawing in draw_all(run).drawings}


def rows(drawing: Drawing) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(drawing.table.to_csv())))


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)  # noqa: S314 - made by the code under test


def drawn(contents: RunContents, name: str) -> Drawing:
    result = FIGURES[name](contents)
    assert isinstance(result, Drawing)
    return result


def lines_of(drawing: Drawing, panel: int = 0) -> list[Any]:
    return list(drawing.figure.axes[panel].get_lines())


def test_a_finished_run_has_every_figure(drawings: dict[str, Drawing]) -> None:
    assert list(drawings) == list(FIGURES)


def test_epoch_times_are_full_steps_of_the_measurements(run: RunContents, drawings: dict[str, Drawing]) -> None:
    measured = [row for row in rows(drawings["epoch_time"]) if row["mark"] == "measured_95"]
    for row, item in zip(measured, run.ok, strict=True):
        assert item.times is not None
        steps = DATASET_SAMPLES // item.configuration.global_batch
        assert float(row["epoch_time_s"]) == pytest.approx(steps * item.times.step_time_s)
        assert float(row["low_epoch_time_s"]) == pytest.approx(steps * item.times.step_time_low_s)
        assert float(row["high_epoch_time_s"]) == pytest.approx(steps * item.times.step_time_high_s)


def test_predictions_are_those_of_the_plan(run: RunContents, drawings: dict[str, Drawing]) -> None:
    assert run.plan is not None
    for name, column in (("epoch_time", "epoch_time_s"), ("cost", "cost_usd")):
        line = [row for row in rows(drawings[name]) if row["mark"] == "predicted_90"]
        field = column.removesuffix("_usd")
        assert [float(row[column]) for row in line] == [getattr(item, field) for item in run.plan.candidates]
        assert [row["feasible"] == "true" for row in line] == [item.feasible for item in run.plan.candidates]
        chosen = [int(row["global_batch_samples"]) for row in line if row["chosen"] == "true"]
        assert chosen == [run.plan.chosen.global_batch]


def test_the_front_of_the_plan_is_joined_and_every_candidate_is_there(
    run: RunContents, drawings: dict[str, Drawing]
) -> None:
    assert run.plan is not None
    table = rows(drawings["pareto"])
    assert len(table) == len(run.plan.candidates)
    front = sorted((float(row["cost"]), float(row["wall_time_s"])) for row in table if row["pareto"] == "true")
    assert front == sorted((item.cost, item.train_time_s) for item in run.plan.pareto)
    joined = [sorted(zip(*line.get_data(), strict=True)) for line in lines_of(drawings["pareto"])]
    assert front in joined
    assert [row["chosen"] for row in table].count("true") == 1


def test_a_front_of_one_candidate_has_no_line(run: RunContents) -> None:
    assert run.plan is not None
    front = run.plan.pareto[:1]
    others = [item.model_copy(update={"pareto": False}) for item in run.plan.candidates if item not in front]
    for made, is_line in ((run.plan, True), (run.plan.model_copy(update={"candidates": [*front, *others]}), False)):
        pareto = drawn(run._replace(plan=made), "pareto")
        assert ("Pareto front" in keys_of(pareto)) == is_line
        assert ("On the line" in pareto.caption) == is_line


def test_a_plan_without_a_front_has_no_figure_of_it(run: RunContents) -> None:
    assert run.plan is not None
    old = [item.model_copy(update={"pareto": False}) for item in run.plan.candidates]
    plain = run._replace(plan=run.plan.model_copy(update={"candidates": old}))
    assert isinstance(FIGURES["pareto"](plain), Missing)


def priced(run: RunContents, usd: float, more: Iterable[Candidate] = ()) -> RunContents:
    """Return the same run with this price for each candidate, and with `more` candidates."""
    assert run.plan is not None
    free = [item.model_copy(update={"cost": usd, "interval_90": {}}) for item in run.plan.candidates]
    chosen = next(item for item in free if item.configuration == run.plan.chosen.configuration)
    return run._replace(plan=run.plan.model_copy(update={"candidates": [*free, *more], "chosen": chosen}))


def seen(drawing: Drawing) -> set[tuple[float, float]]:
    """Return the points of lines and marks that lie within the panel."""
    (left, right), (low, high) = drawing.figure.axes[0].get_xlim(), drawing.figure.axes[0].get_ylim()
    points = (point for line in lines_of(drawing) for point in zip(*line.get_data(), strict=True))
    return {(x, y) for x, y in points if left <= x <= right and low <= y <= high}


@pytest.mark.parametrize("paid", [0, 2])
def test_nodes_that_cost_nothing_are_drawn(run: RunContents, paid: int) -> None:
    """Free are either all candidates, or those of one partition while another's are slower and cost something."""
    assert run.plan is not None
    changes = {"partition": "cloud", "pareto": False, "feasible": True, "interval_90": {}}
    slow = [item.model_copy(update={**changes, "cost": 3.0 + item.cost}) for item in run.plan.candidates[:paid]]
    free = priced(run, 0.0, slow)
    pareto = drawn(free, "pareto")
    assert seen(pareto) == {(item.cost, item.train_time_s) for item in known(free.plan).candidates}
    assert pareto.figure.axes[0].get_xscale() == "linear"
    assert {(item.global_batch, 0.0) for item in run.plan.candidates} <= seen(drawn(free.of_chosen_partition(), "cost"))


def test_the_knee_stands_in_a_band_as_wide_as_its_interval(run: RunContents) -> None:
    knee = known(known(run.plan).knee)
    assert knee.interval_90 is not None
    drawing = drawn(run, "epoch_time")
    assert any(list(line.get_xdata()) == [knee.global_batch] * 2 for line in lines_of(drawing))
    to_data = drawing.figure.axes[0].transData.inverted()
    spans = [patch.get_window_extent().transformed(to_data) for patch in drawing.figure.axes[0].patches]
    assert any((span.x0, span.x1) == pytest.approx(knee.interval_90) for span in spans)
    assert "it lies between 360 and 500 with 90 % probability" in drawing.caption
    assert "knee, 90 % interval" in keys_of(drawing)


def keys_of(drawing: Drawing) -> list[str]:
    legend = known(drawing.figure.axes[0].get_legend())
    return [text.get_text() for text in legend.get_texts()]


def test_a_knee_beyond_the_batches_is_stated_and_not_drawn(run: RunContents) -> None:
    assert run.plan is not None
    far = run.plan.model_copy(update={"knee": Knee(global_batch=1e6, interval_90=(5e5, 2e6))})
    drawing = drawn(run._replace(plan=far), "epoch_time")
    assert "The knee, at B = 1,000,000, lies beyond these batches" in drawing.caption
    assert not any(1e6 in list(line.get_xdata()) for line in lines_of(drawing))
    without = drawn(run._replace(plan=run.plan.model_copy(update={"knee": None})), "epoch_time")
    assert len(drawing.figure.axes[0].patches) == len(without.figure.axes[0].patches)
    assert keys_of(drawing) == keys_of(without)


def test_without_a_knee_there_is_no_band_of_it(run: RunContents) -> None:
    assert run.plan is not None
    none, rare = (Knee(global_batch=None, interval_90=interval) for interval in (None, (360.0, 500.0)))
    plain, some = (
        drawn(run._replace(plan=run.plan.model_copy(update={"knee": knee})), "epoch_time") for knee in (none, rare)
    )
    assert "no knee" in some.caption
    assert len(some.figure.axes[0].patches) == len(plain.figure.axes[0].patches)


def of_two_partitions(run: RunContents) -> RunContents:
    """Return the run as if it knew partitions b and a, and its plan had chosen a; neither has measurements."""
    assert run.plan is not None
    named = [item.model_copy(update={"partition": "a"}) for item in run.plan.candidates]
    other = [item.model_copy(update={"partition": "b", "step_time_s": 9.0}) for item in run.plan.candidates]
    chosen = run.plan.chosen.model_copy(update={"partition": "a"})
    made = run.plan.model_copy(update={"candidates": [*other, *named], "chosen": chosen})
    return run._replace(plan=made, cluster=None)


def test_all_figures_but_the_front_show_the_chosen_one_of_several_partitions(run: RunContents) -> None:
    both = of_two_partitions(run)
    assert both.plan is not None
    alone = both.of_chosen_partition()
    assert known(alone.plan).candidates == [item for item in both.plan.candidates if item.partition == "a"]
    assert alone.measurements == []
    assert both.plan.find(both.plan.chosen.configuration) == both.plan.chosen
    assert run.of_chosen_partition() is run


def test_the_front_shows_each_of_several_partitions_and_other_figures_name_the_chosen_one(
    run: RunContents, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = {name: FIGURES[name] for name in ("epoch_time", "pareto", "timeline", "memory", "gradient_scale")}
    monkeypatch.setattr("tula_hpc.analysis.figures.all.FIGURES", some)
    drawings = {drawing.name: drawing for drawing in draw_all(of_two_partitions(run)).drawings}
    naming = {name for name, drawing in drawings.items() if drawing.caption.startswith("Shown is partition a, ")}
    assert naming == {"epoch_time", "memory"}
    axes = drawings["pareto"].figure.axes[0]
    legend = known(axes.get_legend())
    keys = {text.get_text(): handle for text, handle in zip(legend.get_texts(), legend.get_lines(), strict=True)}
    shapes = [str(keys[name].get_marker()) for name in "ba"]
    assert len(set(shapes)) == 2
    drawn = [str(line.get_marker()) for line in axes.get_lines() if line.get_marker() in shapes]
    # one line for the feasible batches of each N, one for the others
    assert sorted(drawn) == sorted(2 * len(run.cluster_sizes) * shapes)
    assert any(text.get_text().endswith("on a") for text in axes.texts)


def test_the_curve_holds_the_numbers_of_the_csv(drawings: dict[str, Drawing]) -> None:
    table = [row for row in rows(drawings["epoch_time"]) if row["mark"] == "predicted_90" and row["nodes"] == "2"]
    expected = [float(row["epoch_time_s"]) for row in table]
    curves = [list(line.get_ydata()) for line in lines_of(drawings["epoch_time"])]
    assert any(len(curve) == len(expected) and curve == pytest.approx(expected) for curve in curves)


def test_measured_cost_is_measured_time_at_the_plans_price(run: RunContents, drawings: dict[str, Drawing]) -> None:
    measured = [row for row in rows(drawings["cost"]) if row["mark"] == "measured_95"]
    for row, item in zip(measured, run.ok, strict=True):
        hours = EPOCHS * (DATASET_SAMPLES // item.configuration.global_batch) * known(item.times).step_time_s / 3600
        assert float(row["cost_usd"]) == pytest.approx(hours * item.nodes * 2.48)


def with_start_up(item: Candidate) -> Candidate:
    """Return the candidate with evaluation and starts that take as long, and cost as much, as its steps."""
    steps_s, cost = item.train_time_s, 2 * item.cost
    parts = {"steps": steps_s, "evaluation": 0.2 * steps_s, "starts": 0.8 * steps_s}
    # those of the steps alone
    ends = {"cost": (1.93 * item.cost, 2.08 * item.cost)}
    changes = {"wall_time_s": 2 * steps_s, "wall_parts_s": parts, "cost": cost}
    return item.model_copy(update={**changes, "interval_90": item.interval_90 | ends})


def test_start_up_costs_the_same_however_long_steps_take(run: RunContents) -> None:
    assert run.plan is not None
    started = [with_start_up(item) for item in run.plan.candidates]
    dearer = run._replace(plan=run.plan.model_copy(update={"candidates": started}))
    steps = {item.configuration: item.cost for item in run.plan.candidates}
    for before, after in zip(rows(drawn(run, "cost")), rows(drawn(dearer, "cost")), strict=True):
        if before["mark"] != "out_of_memory":
            where = Configuration(*(int(before[name]) for name in CONFIGURATION_COLUMNS))
            for column in ("cost_usd", "low_cost_usd", "high_cost_usd"):
                assert float(after[column]) == pytest.approx(float(before[column]) + steps[where])


def costing(where: Configuration, cost: float, seconds: float) -> Candidate:
    """Return a candidate with this cost and time, without intervals."""
    changes = {"cost": cost, "train_time_s": seconds, "wall_time_s": seconds, "interval_90": {}}
    return candidate(where).model_copy(update=changes)


@pytest.mark.parametrize(
    ("cost", "pace", "ending"),
    [
        (0.99, 2.0, "0.99 USD, but take 4.0 s instead of 2.0 s"),
        (0.99, 0.5, "0.99 USD, and take 1.0 s instead of 2.0 s"),
        (0.99, 1.01, "0.99 USD, and be as fast"),
        (0.999, 0.5, "cost 1.00 USD, as cheap as any"),
        (1.5, 0.5, "cost 1.00 USD, as cheap as any"),
    ],
)
def test_the_cheapest_is_decided_by_the_digits_that_are_shown(
    run: RunContents, cost: float, pace: float, ending: str
) -> None:
    chosen = costing(Configuration(1, 1, 64), 1.0, 2.0)
    other = costing(Configuration(1, 1, 32), cost, 2.0 * pace)
    assert drawn(run._replace(plan=plan([chosen, other], chosen=chosen)), "cost").title.endswith(ending)


def test_a_cost_is_shown_with_the_time_that_is_paid_for(run: RunContents) -> None:
    """It is the time of the whole run, as in the front's figure; by its steps alone the cheaper one seems slower."""
    chosen = costing(Configuration(1, 1, 64), 1.0, 2.0)
    other = costing(Configuration(1, 1, 32), 0.5, 3.0)
    made = plan([chosen.model_copy(update={"wall_time_s": 9.0}), other.model_copy(update={"wall_time_s": 5.0})])
    title = drawn(run._replace(plan=made.model_copy(update={"chosen": made.candidates[0]})), "cost").title
    assert title.endswith("0.50 USD, and take 5.0 s instead of 9.0 s")


@pytest.mark.parametrize(
    ("cost", "time_s", "title"),
    [
        (2.0, 62.3, "The cheapest candidate costs 1.00 USD and takes about as long as the fastest: 1 min 2 s"),
        (1.001, 31.0, "The fastest candidate takes 31.0 s and costs about as much as the cheapest: 1.00 USD"),
        (2.0, 31.0, "The Pareto front runs from 1.00 USD in 1 min 2 s to 2.00 USD in 31.0 s"),
    ],
)
def test_the_front_is_decided_by_the_digits_that_are_shown(
    run: RunContents, cost: float, time_s: float, title: str
) -> None:
    cheapest = costing(Configuration(1, 1, 64), 1.0, 62.4)
    fastest = costing(Configuration(2, 1, 32), cost, time_s)
    made = plan([cheapest, fastest], chosen=cheapest)
    assert drawn(run._replace(plan=made), "pareto").title == title


def test_times_to_the_same_progress_are_shown_as_far_apart_as_they_are(run: RunContents) -> None:
    """If they were rounded by their wide intervals, 12.9 s and 13.7 s would be shown as 13 s and 15 s."""
    made = []
    for batch, seconds, ends in ((32, 12.9, (7.4, 27.1)), (64, 13.7, (7.7, 29.4))):
        changes = {"progress_time_s": seconds, "interval_90": {"progress_time_s": ends, "wall_time_s": ends}}
        made.append(costing(Configuration(1, 1, batch), 1.0, seconds).model_copy(update=changes))
    title = drawn(run._replace(plan=plan(made, chosen=made[1])), "progress").title
    assert title == "Least time to the same progress: 1 node with batch 32, 12.9 s; the chosen one takes 13.7 s"


def test_out_of_memory_is_in_time_cost_and_memory(run: RunContents, drawings: dict[str, Drawing]) -> None:
    assert run.out_of_memory
    for name in ("epoch_time", "cost", "memory"):
        crosses = [row for row in rows(drawings[name]) if row["mark"] == "out_of_memory"]
        assert [(int(row["nodes"]), int(row["local_batch_samples"])) for row in crosses] == [
            (item.nodes, item.local_batch) for item in run.out_of_memory
        ]


def test_memory_shows_limit_bound_and_reserved_bytes(run: RunContents, drawings: dict[str, Drawing]) -> None:
    table = rows(drawings["memory"])
    measured = [int(row["peak_memory_bytes"]) for row in table if row["mark"] == "measured"]
    assert measured == [item.memory.reserved_bytes for item in run.ok if item.memory]
    assert [int(row["peak_memory_bytes"]) for row in table if row["mark"] == "limit"] == [MEMORY_LIMIT]
    feasible = [item.local_batch for item in run.plan.candidates if item.feasible] if run.plan else []
    assert [int(row["local_batch_samples"]) for row in table if row["mark"] == "largest_that_fits"] == [max(feasible)]
    assert "resident memory of the whole process" in drawings["memory"].caption
    # small batches need no less than the optimizer's step
    assert "above a floor it is straight in b" in drawings["memory"].caption


def test_a_batch_within_the_margin_below_the_limit_does_not_fit(run: RunContents) -> None:
    careful = run._replace(cluster=known(run.cluster).model_copy(update={"memory_margin": 0.3}))
    largest = [row for row in rows(drawn(careful, "memory")) if row["mark"] == "largest_that_fits"]
    assert [row["local_batch_samples"] for row in largest] == ["256"]


def in_parts(run: RunContents, *out: Configuration) -> RunContents:
    """Return the run with a single worker that takes its batch in two parts, and so holds only half of it at once."""
    rows = []
    for where in configurations((1, 2), (32, 64, 128, 256)):
        parts = 2 if where.nodes == 1 else 1
        memory = memory_use(where.local_batch // parts)
        rows.append(measurement(where, parts=parts, memory=memory) if where not in out else oom(where))
    made = make_plan(sweep("time", cluster_sizes=[1, 2], min_batch=32, max_batch=256), cluster(), rows)
    return run._replace(measurements=rows, plan=made, cluster=cluster(), trainings=[])


def test_a_single_worker_that_takes_its_batch_in_parts_has_a_line_of_its_own(run: RunContents) -> None:
    drawing = drawn(in_parts(run), "memory")
    assert "5.4 MiB for each further sample of its batch, on average, with a single worker 2.7 MiB" in drawing.title
    assert "a single worker's lie on a curve of their own" in drawing.caption
    line = {(row["nodes"], row["local_batch_samples"]): row for row in rows(drawing) if row["mark"] == "predicted_90"}
    assert set(line) == {*(("1", str(b)) for b in (32, 64, 128, 256)), *(("", str(b)) for b in (16, 32, 64, 128))}
    for batch in (32, 64, 128, 256):
        alone, half = (float(line[key]["peak_memory_bytes"]) for key in (("1", str(batch)), ("", str(batch // 2))))
        assert alone == pytest.approx(half, rel=0.01)


def test_the_largest_batch_is_given_for_a_single_worker_and_for_several_as_in_the_plan(run: RunContents) -> None:
    contents = in_parts(run, Configuration(2, 1, 128))
    drawing = drawn(contents, "memory")
    assert drawing.title.endswith("; 64 samples fit, on a single worker 128 samples fit")
    fitting = [item for item in contents.plan.candidates if item.feasible] if contents.plan else []
    largest = {nodes: max(item.local_batch for item in fitting if item.nodes == nodes) for nodes in (1, 2)}
    limits = [row for row in rows(drawing) if row["mark"] == "largest_that_fits"]
    assert {int(row["nodes"] or 2): int(row["local_batch_samples"]) for row in limits} == largest == {1: 128, 2: 64}


def test_memory_that_training_holds_outside_its_steps_counts_for_what_fits(run: RunContents) -> None:
    """On CPUs that is the copy from which a checkpoint is written."""
    measured = [measurement(where, memory=memory_use(where.local_batch)) for where in configurations((2, 4), (64, 512))]
    limited = cluster(memory_gb=(peak_bytes(256) + 20 * MIB) / 0.9 / 1024**3)
    spec = sweep("time", cluster_sizes=[2, 4], min_batch=64, max_batch=512)
    made = make_plan(spec, limited, measured)
    assert {item.local_batch for item in made.candidates if not item.feasible} == {256}
    drawing = drawn(run._replace(sweep=spec, cluster=limited, measurements=measured, plan=made), "memory")
    assert drawing.title.endswith("; 128 samples fit, the next candidate does not")


def test_memory_on_a_gpu_is_called_that(run: RunContents) -> None:
    on_gpu = run._replace(cluster=known(run.cluster).model_copy(update={"device": "cuda"}))
    assert "GPU memory reserved by the allocator" in drawn(on_gpu, "memory").caption


def test_a_limit_far_above_does_not_flatten_the_measurements(run: RunContents) -> None:
    wide = run._replace(plan=known(run.plan).model_copy(update={"memory_limit_bytes": 1024 * MEMORY_LIMIT}))
    drawing = drawn(wide, "memory")
    top = drawing.figure.axes[0].get_ylim()[1]
    assert top * 1024**3 < 20 * MEMORY_LIMIT
    # a line that is not drawn has no look
    assert "of it. The rest is a margin" in drawing.caption
    assert "of it (dotted in red). The rest is a margin" in drawn(run, "memory").caption
    assert "most that plans use" in keys_of(drawn(run, "memory"))
    assert "most that plans use" not in keys_of(drawing)


def test_the_parts_of_a_step_sum_to_the_step(drawings: dict[str, Drawing]) -> None:
    for row in rows(drawings["step_breakdown"]):
        parts = [
            float(row[f"{name}_s"])
            for name in ("data_wait", "forward_backward", "optimizer", "exposed_synchronization")
        ]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(float(row["step_time_s"]))
        share = 100 * parts[3] / float(row["step_time_s"])
        assert float(row["exposed_synchronization_percent"]) == pytest.approx(share)


def profiled(where: Configuration, rest: float, optimizer: float = 0.01, allreduce_s: float = 0.1) -> Measurement:
    """Return a profile in which the rest of a step, the optimizer and the all-reduce have these shares."""
    times = {"data_time_s": 0.0, "compute_time_s": 1.0 - rest - optimizer, "optimizer_time_s": optimizer}
    whole = dict.fromkeys(("step_time_s", "step_time_low_s", "step_time_high_s"), 1.0)
    allreduce = {"allreduce_time_s": allreduce_s if where.world_size > 1 else 0.0}
    return measurement(where, times=StepTimes.model_validate(whole | times | allreduce))


ALONE, ALONE_64, PAIR = Configuration(1, 1, 32), Configuration(1, 1, 64), Configuration(2, 1, 32)


@pytest.mark.parametrize(
    ("rows", "title"),
    [
        ([profiled(ALONE, 0.3)], "Neither data nor the optimizer takes more than 1.0 % of a step"),
        ([profiled(ALONE, 0.3, 0.1)], "The optimizer takes 10.0 % of a step at N = 1, B = 32"),
        ([profiled(ALONE, 0.02)], "Computing fills every step: no other part takes more than 2.0 %"),
        (
            [profiled(ALONE, 0.3), profiled(PAIR, 0.02)],
            "Neither data nor the optimizer nor exchanging gradients takes more than 2.0 % of a step",
        ),
        (
            [profiled(ALONE, 0.1), profiled(ALONE_64, 0.0), profiled(PAIR, 0.3, allreduce_s=0.3)],
            "Exchanging gradients takes 30.0 % of a step at N = 2, B = 64",
        ),
        (
            # the rest is as large as without any exchange
            [profiled(ALONE, 0.4), profiled(PAIR, 0.3, allreduce_s=0.3)],
            "The rest besides data, computing and optimizer takes 30.0 % of a step at N = 2, B = 64 "
            "(a bare all-reduce takes 30.0 %)",
        ),
        (
            # the exchange does not explain the rest
            [profiled(ALONE, 0.1), profiled(PAIR, 0.68, allreduce_s=0.26)],
            "The rest besides data, computing and optimizer takes 68.0 % of a step at N = 2, B = 64 "
            "(a bare all-reduce takes 26.0 %)",
        ),
        (
            # older records lack the time of the all-reduce
            [profiled(PAIR, 0.3, allreduce_s=0.0)],
            "The rest besides data, computing and optimizer takes 30.0 % of a step at N = 2, B = 64",
        ),
    ],
)
def test_one_worker_exchanges_no_gradients(run: RunContents, rows: list[Measurement], title: str) -> None:
    drawing = drawn(run._replace(measurements=rows, plan=None), "step_breakdown")
    assert drawing.title == title


@pytest.mark.parametrize(("wait_s", "decides"), [(0.09, False), (0.3, False), (0.5, True)])
def test_the_loader_decides_where_waiting_for_data_is_the_largest_part(
    run: RunContents, wait_s: float, decides: bool
) -> None:
    slow, pair = profiled(ALONE, 0.0), profiled(PAIR, 0.6)
    waiting = known(slow.times).model_copy(update={"data_time_s": wait_s, "compute_time_s": 0.9 - wait_s})
    rows = [slow.model_copy(update={"times": waiting}), pair]
    title = drawn(run._replace(measurements=rows, plan=None), "step_breakdown").title
    says = "The data loader is the bottleneck: waiting for data takes 50.0 % of a step at N = 1, B = 32"
    assert (title == says) == ("loader" in title) == decides
    assert title.startswith("The rest besides data, computing and optimizer takes 60.0 % of a step at N = 2") != decides


def test_what_a_script_does_between_its_steps_is_not_called_its_loader(run: RunContents) -> None:
    theirs = {"script": "/train.py", "arguments": ["{local_batch}"], "samples": 4096, "epochs": 2}
    spec = SweepSpec.model_validate({"name": "x", "workload": theirs}, context={"check_paths": False})
    slow = profiled(ALONE, 0.0)
    assert slow.times is not None
    waiting = slow.times.model_copy(update={"data_time_s": 0.5, "compute_time_s": 0.4})
    rows = [slow.model_copy(update={"times": waiting})]
    drawing = drawn(run._replace(measurements=rows, plan=None, sweep=spec), "step_breakdown")
    assert drawing.title.startswith("Waiting for data, or other work between steps, takes 50.0 % of a step")
    assert "with all else that the script does between them" in drawing.caption


def test_a_diamond_is_explained_where_there_is_one(run: RunContents) -> None:
    for where in (ALONE, PAIR):
        caption = drawn(run._replace(measurements=[profiled(where, 0.3)]), "step_breakdown").caption
        assert ("left of it" in caption) == ("diamond" in caption) == (where == PAIR)


def ticks_below(figure: Figure) -> list[str]:
    """Return the names on the x axis; assert that they lie within the figure and clear of one another."""
    figure.draw_without_rendering()
    axes = figure.axes[-1]
    left, right = axes.get_xlim()
    ticks = sorted(axes.get_xticklabels(), key=lambda label: label.get_position()[0])
    ticks = [label for label in ticks if left <= label.get_position()[0] <= right]
    boxes = [label.get_window_extent() for label in ticks]
    # pixels between two names
    assert all(after.x0 - before.x1 > 3.0 for before, after in itertools.pairwise(boxes))
    return [label.get_text() for label in ticks]


@pytest.mark.parametrize(
    "batches",
    [
        [1280, 1664, 2368, 2944, 4352, 5120, 7936, 8704, 14_848, 15_872, 28_672, 90_112, 118_784, 151_552, 262_144],
        [256, 512, 1024, 2048, 4096, 8192, 65_536],
        [2**power for power in range(5, 17)],
        [2**power for power in range(10, 20)],
        [1, 1_000_000, 1_000_001],
    ],
)
def test_names_of_batches_do_not_run_into_one_another(batches: list[int]) -> None:
    with new_figure("batches", 3.4) as (figure, (axes,)):
        batch_axis(axes, batches, "batch", right=0.35)
        assert ticks_below(figure)[-1] == f"{batches[-1]:,}"


def test_every_batch_is_named_where_there_is_room() -> None:
    with new_figure("batches", 3.4) as (figure, (axes,)):
        batch_axis(axes, [2**power for power in range(5, 13)], "batch", right=0.13)
        assert ticks_below(figure) == [f"{2**power:,}" for power in range(5, 13)]


@pytest.mark.parametrize("least", [1e-12, 0.02, 3e15])
def test_amounts_of_any_size_have_ticks(least: float) -> None:
    with new_figure("amounts", 3.4) as (figure, (axes,)):
        amount_axis(axes, [least, 30 * least], "amount")
        value_axis(axes, [least, 30 * least], label="time", durations=True)
        assert 3 <= len(ticks_below(figure)) <= 8
        assert 3 <= len(axes.get_yticks()) <= 8


@pytest.mark.parametrize(
    ("largest", "ticks"), [(9.0, [0.01, 0.1, 1.0, 10.0]), (0.3, [0.005, 0.01, 0.02, 0.05, 0.1, 0.2])]
)
def test_ticks_of_many_decades_are_powers_of_ten(largest: float, ticks: list[float]) -> None:
    with new_figure("changes", 3.4) as (_, (axes,)):
        value_axis(axes, [0.005, largest], label="change")
        assert list(axes.get_yticks()) == pytest.approx(ticks)


@pytest.mark.parametrize("ratio", [3.0, 12.0])
@pytest.mark.parametrize("least_s", [0.0141, 37.0, 3100.0, 900_000.0])
def test_ticks_of_durations_are_round(least_s: float, ratio: float) -> None:
    """A second unit is a round part of the first: "1 h 30 min", never "1 h 23 min"."""
    with new_figure("times", 3.4) as (figure, (axes,)):
        value_axis(axes, [least_s, ratio * least_s], label="time", durations=True)
        figure.draw_without_rendering()
        low, high = axes.get_ylim()
        ticks = [tick for tick in axes.get_yticks() if low <= tick <= high]
        assert 3 <= len(ticks) <= 8
        words = [duration_tick(tick) for tick in ticks if tick]
        assert all(re.fullmatch(r"[\d.,]+ \w+( (6|12|18) h| [1-5]?0 (min|s))?", text) for text in words), words


def test_shares_are_named_where_an_all_reduce_is_far_longer_than_a_step(run: RunContents) -> None:
    alone, long = profiled(ALONE, 0.3), profiled(PAIR, 0.3, allreduce_s=8.0)
    for rows, shares in (([alone], ["0 %", "25 %", "50 %", "75 %", "100 %"]), ([alone, long], ["100 %"])):
        with styled():
            named = ticks_below(drawn(run._replace(measurements=rows), "step_breakdown").figure)
        assert named[-len(shares) :] == shares


def test_parts_that_took_longer_apart_are_shortened_to_what_the_step_leaves() -> None:
    times = StepTimes(
        step_time_s=0.1,
        step_time_low_s=0.1,
        step_time_high_s=0.1,
        data_time_s=0.02,
        compute_time_s=0.09,
        optimizer_time_s=0.01,
        allreduce_time_s=0.0,
    )
    assert parts_of(times) == pytest.approx((0.02, 0.072, 0.008, 0.0))
    # no step waits for longer than it takes
    waited = times.model_copy(update={"data_time_s": 0.3})
    assert parts_of(waited) == (0.1, 0.0, 0.0, 0.0)


def test_errors_are_predicted_over_measured_minus_one(run: RunContents, drawings: dict[str, Drawing]) -> None:
    table = rows(drawings["prediction_error"])
    assert len(table) == len(run.ok) + 1
    for row in table:
        relative = float(row["predicted_s"]) / float(row["measured_s"]) - 1
        assert float(row["relative_error_percent"]) == pytest.approx(100 * relative)
    assert table[-1]["quantity"] == "training_epoch main"
    assert float(table[-1]["measured_s"]) == run.trainings[0].epoch_time_s


def test_errors_of_memory_are_predicted_over_measured_minus_one(run: RunContents, drawings: dict[str, Drawing]) -> None:
    shown = rows(drawings["memory_error"])
    assert len(shown) == len(run.ok)
    for row, item in zip(shown, run.ok, strict=True):
        found = known(known(run.plan).find(item.configuration))
        expected = 100 * (found.peak_memory_bytes / known(item.memory).reserved_bytes - 1)
        assert float(row["relative_error_percent"]) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["epoch_time", "cost", "prediction_error", "memory_error", "memory"])
def test_measurements_in_other_forward_passes_are_not_shown_beside_predictions(run: RunContents, name: str) -> None:
    assert run.plan is not None
    other = run.ok[0].configuration
    passes = [1 + (item.configuration == other) for item in run.plan.candidates]
    candidates = [
        item.model_copy(update={"accumulation": count}) for item, count in zip(run.plan.candidates, passes, strict=True)
    ]
    measured = [item.model_copy(update={"accumulation": 1}) for item in run.measurements]
    changed = run._replace(measurements=measured, plan=run.plan.model_copy(update={"candidates": candidates}))
    before, after = (
        [row for row in rows(drawn(each._replace(trainings=[]), name)) if "predicted" not in row.get("mark", "")]
        for each in (run, changed)
    )
    assert len(after) == len(before) - 1


def test_markers_are_explained_where_there_are_some(run: RunContents) -> None:
    assert run.plan is not None
    later = run.plan.candidates[0].model_copy(update={"measured": False})
    after = run._replace(plan=run.plan.model_copy(update={"candidates": [later, *run.plan.candidates[1:]]}))
    for name in ("prediction_error", "memory_error"):
        assert "Hollow markers were measured after the plan" in drawn(after, name).caption
        assert "Hollow" not in drawn(run, name).caption
    assert "marker" not in drawn(run._replace(measurements=[]), "prediction_error").caption


def test_a_training_that_changed_its_batch_is_not_compared(tmp_path: Path) -> None:
    files = make_run(tmp_path / "run", epochs_done=4)
    lines = files.train().metrics_file.read_text().replace('"global_batch":1024', '"global_batch":512', 2)
    files.train().metrics_file.write_text(lines)
    contents = read_run(files)
    assert "training_epoch main" not in {row["quantity"] for row in rows(drawn(contents, "prediction_error"))}
    assert "event B = 1,024" in {row["mark"] for row in rows(drawn(contents, "training"))}


def test_a_training_without_losses_has_one_panel_with_room_for_its_marks(run: RunContents) -> None:
    """A script that reports only its accuracy has no losses."""
    (training,) = run.trainings
    bare = {"test_loss": None, "train_loss": None}
    epochs = [row.model_copy(update=bare) for row in training.metrics.epochs]
    without = training._replace(metrics=training.metrics._replace(epochs=epochs))
    drawing = drawn(run._replace(trainings=[without]), "training")
    assert isinstance(drawing, Drawing)
    (panel,) = drawing.figure.axes
    assert panel.get_ylabel() == "test accuracy, %"
    assert panel.get_ylim()[1] > panel.dataLim.y1
    assert "oss" not in drawing.caption


def test_training_holds_the_logged_epochs(run: RunContents, drawings: dict[str, Drawing]) -> None:
    table = [row for row in rows(drawings["training"]) if row["mark"] == "main"]
    epochs = run.trainings[0].metrics.epochs
    assert [float(row["test_accuracy_percent"]) for row in table] == pytest.approx(
        [in_percent(item.test_accuracy) for item in epochs]
    )
    assert [float(row["train_loss"]) for row in table] == [item.train_loss for item in epochs]


def test_a_stop_is_marked_where_it_happened(run: RunContents, drawings: dict[str, Drawing]) -> None:
    marks = list(training_marks(run.trainings[0].metrics, run.events))
    assert [mark.what for mark in marks] == ["stopped", "restarted"]
    assert [mark.epoch for mark in marks] == pytest.approx([6.4, 6.4], abs=0.05)
    panel = drawings["training"].figure.axes[0]
    assert "stopped, restarted" in [text.get_text() for text in panel.texts]


def test_events_of_unknown_place_are_not_marked(run: RunContents) -> None:
    lost = Event(time=1.0, event="preempted", stage="train", data={"samples_seen": "many"})
    assert list(training_marks(run.trainings[0].metrics, [lost])) == []


def test_the_figure_of_the_scale_holds_the_logged_steps(run: RunContents, drawings: dict[str, Drawing]) -> None:
    table = rows(drawings["gradient_scale"])
    steps = run.trainings[0].metrics.steps
    assert [float(row["variability"]) for row in table] == [item.sensitivity for item in steps]
    assert [float(row["scale_max"]) for row in table] == [item.scale_max for item in steps]
    assert [float(row["scale_applied"]) for row in table] == [item.applied_scale for item in steps]


GATES = {
    "paper": ("only while Δ(G) is below the dashed threshold δ = 0.5", "(Δ below 0.5)", "by 1.67 on"),
    "none": ("at every step, whatever Δ(G) is", "Gradients were scaled", "by 1.67 on"),
}


def scale_figure_of(run: RunContents, **training: object) -> Drawing:
    spec = TrainingSpec.model_validate({"delta": 0.5, **training})
    return drawn(run._replace(sweep=known(run.sweep).model_copy(update={"training": spec})), "gradient_scale")


def dashed(drawing: Drawing) -> int:
    """Count the lines that cross the whole panel of Δ(G)."""
    return sum(len(line.get_xdata()) == 2 for line in lines_of(drawing))


@pytest.mark.parametrize("gate", list(GATES))
def test_the_figure_of_the_scale_names_the_gate_that_the_training_had(run: RunContents, gate: str) -> None:
    drawing = scale_figure_of(run, gate=gate)
    caption, *title = GATES[gate]
    assert caption in drawing.caption
    assert all(words in drawing.title for words in title)
    assert dashed(drawing) == (gate != "none")
    assert ("δ" in drawing.caption) == (gate != "none")


@pytest.mark.parametrize(("share", "words"), [(0.0, "by 1 on"), (1.0, "by 1.84 on")])
def test_the_figure_shows_the_scale_that_was_applied(run: RunContents, share: float, words: str) -> None:
    """The estimated scale, which the gate may not have let through, is not shown."""
    training = run.trainings[0]
    steps = [row.model_copy(update={"scale_share": share}) for row in training.metrics.steps]
    changed = training._replace(metrics=training.metrics._replace(steps=steps))
    drawing = scale_figure_of(run._replace(trainings=[changed, *run.trainings[1:]]))
    assert words in drawing.title


def test_no_step_is_called_scaled_before_the_first_estimate(run: RunContents) -> None:
    """Before the first estimate the gate lets steps pass whose factors are still 1."""
    training = run.trainings[0]
    ones = {"scale_mean": 1.0, "scale_min": 1.0, "scale_max": 1.0, "scaled": 1.0, "scale_share": 1.0}
    steps = [row.model_copy(update=ones) if row.epoch < 1 else row for row in training.metrics.steps]
    changed = training._replace(metrics=training.metrics._replace(steps=steps))
    for row in rows(drawn(run._replace(trainings=[changed]), "gradient_scale")):
        assert (float(row["scaled_steps_percent"]) == 0) == (float(row["epochs"]) < 1)


def test_adascale_has_no_gate_whatever_the_keys_say(run: RunContents) -> None:
    drawing = scale_figure_of(run, method="adascale", gate="paper")
    assert "at every step" in drawing.caption
    assert not dashed(drawing)


def test_without_settings_nothing_is_said_about_the_gate(run: RunContents) -> None:
    drawing = drawn(run._replace(sweep=None), "gradient_scale")
    assert "is not known here" in drawing.caption
    assert not dashed(drawing)


def test_figures_without_data_are_named_with_the_reason(tmp_path: Path) -> None:
    result = draw_all(read_run(make_run(tmp_path / "run", stage="profile")))
    of_trainings = {"training", "gradient_scale"}
    of_plans = {"cost", "memory_error", "pareto", "prediction_error", "progress", "strong_scaling", "weak_scaling"}
    assert {item.name for item in result.missing} == of_trainings | of_plans
    planned = read_run(make_run(tmp_path / "planned", stage="plan"))
    missing = [*result.missing, *(FIGURES[name](planned) for name in of_trainings)]
    assert all(isinstance(item, Missing) and item.why for item in missing)


def test_a_plan_without_measurements_is_drawn(run: RunContents) -> None:
    result = draw_all(run._replace(measurements=[], trainings=[]))
    assert {drawing.name for drawing in result.drawings} == {
        "epoch_time", "progress", "cost", "pareto", "memory", "timeline"
    }  # fmt: skip


@pytest.mark.parametrize("name", list(FIGURES))
def test_a_run_without_any_data_is_no_error(run: RunContents, name: str) -> None:
    empty = run._replace(measurements=[], plan=None, trainings=[], events=[])
    assert isinstance(FIGURES[name](empty), Missing)


@pytest.mark.processes
def test_one_configuration_alone_is_drawn(run: RunContents) -> None:
    alone = run._replace(measurements=[measurement(Configuration(1, 1, 32))], plan=None, trainings=[])
    for drawing in draw_all(alone).drawings:
        parsed(drawing.svg())


def visible(line: Any) -> bool:
    """Return whether the line can be seen; a line of one point needs a marker."""
    shown = int(np.isfinite(np.asarray(line.get_ydata(), dtype=float)).sum())
    return shown > 1 or (shown == 1 and line.get_marker() not in ("", "None", None))


def test_a_single_epoch_or_batch_is_seen(run: RunContents) -> None:
    assert run.plan is not None
    (training,) = run.trainings
    metrics = training.metrics._replace(epochs=training.metrics.epochs[:1])
    chosen = run.plan.chosen
    alone = run._replace(
        measurements=[],
        plan=run.plan.model_copy(update={"candidates": [chosen]}),
        trainings=[training._replace(metrics=metrics)],
    )
    for name, panel, count in (("training", 1, 2), ("epoch_time", 0, 2), ("memory", 0, 1)):
        assert sum(map(visible, lines_of(drawn(alone, name), panel))) >= count, name
    together = draw_run_curves([curve_of(alone._replace(name="alone"))])
    assert isinstance(together, Drawing)
    assert all(visible(line) for panel in (0, 1) for line in lines_of(together, panel) if len(line.get_xdata()))


def test_the_label_of_the_chosen_point_is_clear_of_its_bar(run: RunContents) -> None:
    assert run.plan is not None
    chosen = run.plan.chosen
    row = measurement(chosen.configuration)
    assert row.times is not None
    wide = {"step_time_low_s": 0.4 * row.times.step_time_s, "step_time_high_s": 1.6 * row.times.step_time_s}
    rows = [row.model_copy(update={"times": row.times.model_copy(update=wide)})]
    alone = run._replace(measurements=rows, plan=run.plan.model_copy(update={"candidates": [chosen], "knee": None}))
    axes = drawn(alone, "epoch_time").figure.axes[0]
    (label,) = (text for text in axes.texts if text.get_text().startswith("chosen"))
    centre = float(label.get_position()[0])
    bar = float((axes.transData + axes.transAxes.inverted()).transform((chosen.global_batch, 0))[0])
    half_width = LETTER_SHARE * max(map(len, label.get_text().split("\n"))) / 2
    assert abs(centre - bar) > half_width


def test_the_pointer_of_a_label_crosses_no_other_line() -> None:
    axes = Figure().subplots()
    axes.set(xlim=(0, 1), ylim=(0, 1))
    across = [0.06, 0.32, 0.59, 0.85]
    # the chosen point is the end of the lower line
    heights = [[0.44, 0.35, 0.17, 0.14], [0.84, 0.59, 0.52, 0.32]]
    names = np.array([(x, y) for x in (0.88, 0.95) for y in (0.14, 0.32)])
    lines = [list(zip(across, line, strict=True)) for line in heights]
    mark_chosen(axes, (0.85, 0.14), "chosen: N = 1, B = 256\n156 ms", lines=lines, taken=names)
    (label,) = axes.texts
    x, y = label.get_position()
    assert y < np.interp(x, across, heights[1])


def test_a_label_goes_far_away_where_lines_leave_no_room_nearby() -> None:
    axes = Figure().subplots()
    axes.set(xlim=(0, 1), ylim=(0, 1))
    crowd = [[(0.45, height), (1.0, height)] for height in np.linspace(0, 1, 25)]
    text = "chosen: N = 128, B = 8,192\n2 min 3 s"
    mark_chosen(axes, (0.9, 0.5), text, lines=crowd, taken=np.empty((0, 2)))
    (label,) = axes.texts
    assert label.get_position()[0] + LETTER_SHARE * len(text.partition("\n")[0]) / 2 < 0.45


def test_a_data_set_smaller_than_one_batch_is_drawn(run: RunContents) -> None:
    too_large = candidate(Configuration(1, 1, 65_536)).model_copy(
        update={"epoch_time_s": 0.0, "train_time_s": 0.0, "cost": 0.0, "interval_90": {}, "feasible": False}
    )
    assert run.plan is not None
    odd = run._replace(plan=run.plan.model_copy(update={"candidates": [*run.plan.candidates, too_large]}))
    assert "65536" not in {row["global_batch_samples"] for row in rows(drawn(odd, "epoch_time"))}


@pytest.mark.processes
def test_each_file_takes_one_drawing(run: RunContents, monkeypatch: pytest.MonkeyPatch) -> None:
    drawings: list[Figure] = []
    draw = Figure.draw

    def noting(figure: Figure, renderer: Any) -> None:
        drawings.append(figure)
        draw(figure, renderer)

    monkeypatch.setattr(Figure, "draw", noting)
    drawing = drawn(run, "timeline")
    for made in (drawing.svg, drawing.png, lambda: render_pdf(TitlePage("", "", "", (), [], {}), [drawing])):
        drawings.clear()
        assert made()
        assert drawings.count(drawing.figure) == 1


@pytest.mark.processes
@pytest.mark.parametrize("name", ["cost", "step_breakdown"])
def test_all_is_within_the_figure_and_below_its_title(run: RunContents, name: str) -> None:
    drawing = drawn(run, name)
    drawing.svg()
    width_in, height_in = drawing.figure.get_size_inches()
    box = drawing.figure.get_tightbbox()
    assert box.xmin >= 0
    assert box.ymin >= 0
    assert box.xmax <= width_in
    assert box.ymax <= height_in - title_band_in(drawing.title) + 0.01


def test_a_figure_that_fails_takes_nothing_else_with_it(run: RunContents, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: RunContents) -> Drawing:
        raise ZeroDivisionError("nothing to divide by")

    some = {"epoch_time": FIGURES["epoch_time"], "memory": fail, "cost": FIGURES["cost"]}
    monkeypatch.setattr("tula_hpc.analysis.figures.all.FIGURES", some)
    drawn = draw_all(run)
    assert [drawing.name for drawing in drawn.drawings] == ["epoch_time", "cost"]
    (missing,) = drawn.missing
    assert missing.name == "memory"
    assert "ZeroDivisionError: nothing to divide by" in missing.why


def test_matplotlibs_settings_are_left_alone(run: RunContents) -> None:
    before = dict(mpl.rcParams)
    drawn(run, "timeline").png()
    assert dict(mpl.rcParams) == before


def test_the_same_numbers_give_the_same_svg_whatever_a_users_matplotlibrc_says(run: RunContents) -> None:
    plain = drawn(run, "timeline").svg()
    with mpl.rc_context({"axes.labelweight": "bold", "xtick.direction": "in", "axes.spines.left": False}):
        assert drawn(run, "timeline").svg() == plain


def test_a_cluster_size_keeps_its_colour() -> None:
    sizes = [1, 2, 4, 8, 16]
    assert len({size_style(sizes, nodes)[1:] for nodes in sizes}) == len(sizes)
    assert size_style(sizes, 4).colour == SIZES[2].light
    many = list(range(1, 57))
    assert len({size_style(many, nodes)[1:] for nodes in many}) == len(many)


def test_hostile_names_are_only_text(tmp_path: Path) -> None:
    files = make_run(tmp_path / "run", stage="plan")
    for label in ("<script>alert(1)</script>".replace("/", "∕"), "$\\undefined{$", "名前"):
        write_training(files, epochs_done=2, label=label)
    contents = read_run(files)
    svg = drawn(contents, "training").svg()
    tags = {element.tag for element in parsed(svg).iter()}
    assert f"{SVG}script" not in tags


def test_a_formula_in_a_name_is_no_formula_in_the_csv(tmp_path: Path) -> None:
    files = make_run(tmp_path / "run", stage="plan")
    write_training(files, epochs_done=2, label="=1+1")
    assert {row["mark"] for row in rows(drawn(read_run(files), "training"))} >= {"'=1+1"}


@given(st.lists(st.floats(min_value=0, max_value=1), max_size=12), st.floats(min_value=0.001, max_value=0.2))
def test_labels_keep_their_distance_and_their_centre(wanted: list[float], gap: float) -> None:
    placed = spread(sorted(wanted), gap)
    assert all(after - before >= gap * (1 - 1e-6) for before, after in itertools.pairwise(placed))
    assert sum(placed) == pytest.approx(sum(wanted), abs=1e-6)
    far_apart = all(after - before >= gap for before, after in itertools.pairwise(sorted(wanted)))
    assert not far_apart or placed == pytest.approx(sorted(wanted))


@pytest.mark.parametrize("height", [0.01, 0.5, 0.99])
def test_names_at_the_ends_of_lines_stay_in_the_panel(height: float) -> None:
    with new_figure("lines", 3.7) as (figure, (axes,)):
        label_ends(axes, [EndLabel(0.5, height, Key(f"N = {nodes}")) for nodes in range(14)])
        figure.draw_without_rendering()
    panel = axes.get_window_extent()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert all(panel.y0 <= box.y0 and box.y1 - box.height / 2 <= panel.y1 for box in boxes)
    # pixels by which two names may overlap
    assert all(above.y0 >= below.y1 - 1.0 for below, above in itertools.pairwise(boxes))


@pytest.mark.parametrize("count", [3, 12, 16])
def test_cluster_sizes_are_named_in_a_legend_where_there_are_too_many_for_line_ends(tmp_path: Path, count: int) -> None:
    files = make_run(tmp_path / "run", stage="profile")
    sizes = range(1, count + 1)
    write_plan(files, plan([candidate(Configuration(nodes, 1, batch)) for nodes in sizes for batch in (32, 64)]))
    (axes,) = drawn(read_run(files)._replace(measurements=[]), "epoch_time").figure.axes
    legend = known(axes.get_legend())
    names = {f"N = {nodes}" for nodes in sizes}
    at_lines, in_legend = (names & {text.get_text() for text in texts} for texts in (axes.texts, legend.get_texts()))
    assert (at_lines, in_legend) == ((names, set()) if count <= 14 else (set(), names))


def test_the_front_names_the_colours_of_many_cluster_sizes(tmp_path: Path) -> None:
    files = make_run(tmp_path / "run", stage="profile")
    write_plan(files, plan([candidate(Configuration(nodes, 1, 32)) for nodes in range(1, 17)]))
    assert {f"N = {nodes}" for nodes in range(1, 17)} <= set(keys_of(drawn(read_run(files), "pareto")))


def test_intervals_of_multiples_follow_one_another() -> None:
    item = candidate(configurations()[0])
    low, high = item.interval_90["train_time_s"]
    for field in ("epoch_time_s", "step_time_s", "cost", "train_time_s"):
        interval = item.predicted(field)
        assert interval.low / interval.value == pytest.approx(low / item.train_time_s)
        assert interval.high / interval.value == pytest.approx(high / item.train_time_s)
    assert item.predicted("peak_memory_bytes").low == item.peak_memory_bytes


def test_an_infeasible_end_is_shaded(tmp_path: Path) -> None:
    def large(item: Candidate) -> Candidate:
        return item.model_copy(update={"feasible": item.feasible and item.global_batch < 1024})

    files = make_run(tmp_path / "run", stage="profile")
    write_plan(files, plan([large(candidate(item)) for item in configurations()]))
    assert "grey region" in drawn(read_run(files), "epoch_time").caption


def test_repeated_measurements_are_all_drawn(tmp_path: Path) -> None:
    files = RunDirectory(tmp_path / "run").create()
    where = Configuration(2, 1, 64)
    for seed in range(3):
        append_record(files.profile / "a.jsonl", measurement(where, seed))
    append_record(files.profile / "a.jsonl", oom(Configuration(2, 1, 4096)))
    marks = [row["mark"] for row in rows(drawn(read_run(files), "epoch_time"))]
    assert marks == ["measured_95"] * 3 + ["out_of_memory"]


@pytest.mark.parametrize(
    ("names", "per_row"),
    [([], 1), (["a"] * 5, 5), (["a" * 14] * 5, 3), (["a" * 14] * 6, 3), (["a" * 40, "b", "c"], 3), (["a" * 90] * 3, 1)],
)
def test_rows_of_a_legend_are_about_equally_long_and_fit(names: list[str], per_row: int) -> None:
    with new_figure("a title", 2.0) as (_, (axes,)):
        legend(axes, [Key(name, "o") for name in names])
    found = known(axes.get_legend())
    assert max(vars(found)["_ncols"], 1) == per_row


@pytest.mark.parametrize("count", [2, 17])
def test_a_legend_of_many_rows_leaves_the_panel_its_height(count: int) -> None:
    with new_figure("long names", 3.7) as (figure, (axes,)):
        legend(axes, [Key(f"a variant with a name as long as this one, {number}", "o") for number in range(count)])
        figure.draw_without_rendering()
        height_in = axes.get_position().height * figure.get_figheight()
        assert height_in > 2.5
        assert figure.get_tightbbox().ymax <= figure.get_figheight() + 0.01


@pytest.mark.parametrize("name", ["quickstart", "resnet50-imagenet-4-nodes_per-replica.2026-11-30-second-attempt_"])
def test_the_first_page_of_the_pdf_has_room_for_long_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[Figure] = []
    monkeypatch.setattr("tula_hpc.analysis.figures.drawing._add_page", lambda _, figure: pages.append(figure))
    render_pdf(TitlePage(name, f"{name} on {name}: nodes, batch size · cluster: {name}", "", (), [], {}), [])
    (page,) = pages
    page.draw_without_rendering()
    right = page.bbox.x1
    assert all(text.get_window_extent().x1 < right for text in page.texts)


def test_nothing_in_the_pdfs_table_overlaps(monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[Figure] = []
    monkeypatch.setattr("tula_hpc.analysis.figures.drawing._add_page", lambda _, figure: pages.append(figure))
    chosen = (
        "N = 4, B = 1,024\nchosen", "17.2 s\n16.0 s – 18.6 s", "17.2 s\n16.8 s in training",
        "2 % shorter\nin training", "5 min 44 s\n5 min 38 s in training", "5 min 44 s",
        "0.95 USD\n1.43 USD paid", "1.9 GiB",
    )  # fmt: skip
    other = (
        "N = 1, B = 1,024\nsame batch, 1 node, not feasible", "58.0 s\n53.9 s – 1 min 3 s", "–",
        "–", "19 min 20 s", "19 min 20 s", "0.80 USD", "5.9 GiB",
    )  # fmt: skip
    render_pdf(TitlePage("a", "b", "c", SUMMARY_COLUMNS, [chosen, other], {}), [])
    (page,) = pages
    page.draw_without_rendering()
    # after the title's three lines
    boxes = [text.get_window_extent() for text in page.texts[3:] if text.get_text()]
    shown = sum(bool(line) for row in (chosen, other) for cell in row for line in cell.split("\n"))
    assert len(boxes) == len(SUMMARY_COLUMNS) + shown
    assert not any(one.overlaps(two) for one, two in itertools.combinations(boxes, 2))
    assert max(box.x1 for box in boxes) < page.bbox.x1 - MARGIN_IN * page.dpi / 2
