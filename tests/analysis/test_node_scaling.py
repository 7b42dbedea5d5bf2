"""Laws of strong and weak scaling, over made-up models of the step and over fitted ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.known import known
from tests.planning_data import CORNERS, SAMPLES, cluster, grid, memory, oom, peak_bytes, sweep
from tests.planning_data import ok as measured
from tests.run_factory import make_run
from tula_hpc.analysis.costs.interruptions import Resume
from tula_hpc.analysis.models.regression import Array
from tula_hpc.analysis.models.step_time import StepTimeModel
from tula_hpc.analysis.node_scaling import (
    MOST_SIZES,
    NodeScaling,
    ScalingCurve,
    listed_sizes,
    node_scaling_of,
    part_scaling,
)
from tula_hpc.analysis.plan import make_plan
from tula_hpc.analysis.planning.candidates import Partition
from tula_hpc.analysis.planning.partitions import fit_parts
from tula_hpc.analysis.run_contents import measured_epochs, read_run
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.records import Candidate, Configuration, Interval, Measurement

SEARCH: dict[str, Any] = {"cluster_sizes": [1, 2, 4], "min_batch": 32, "max_batch": 1024}
ROOMY = cluster(memory_gb=64.0)


class Law:
    """A known model of the step; the drawn ones are off by the share `off`, the same at all points."""

    spread_ = 0.05

    def __init__(self, step_s: Callable[[Array, Array], Array], off: float = 0.0, unseen: float = 0.0) -> None:
        self.step_s, self.off, self.unseen = step_s, off, unseen

    def predict(self, nodes: Any, local_batch: Any, workers_per_node: Any = 1) -> Array:
        return self.step_s(np.asarray(nodes, float), np.asarray(local_batch, float))

    def interval(self, nodes: Any, local_batch: Any, workers_per_node: Any = 1) -> tuple[Array, Array]:
        step = self.predict(nodes, local_batch)
        return 0.9 * step, 1.2 * step

    def samples(
        self, nodes: Any, local_batch: Any, workers_per_node: Any = 1, count: int = 200, seed: int = 0
    ) -> Array:
        factors = np.exp(self.off * np.random.default_rng(seed).standard_normal((count, 1)))
        return self.predict(nodes, local_batch) * factors

    def covariance(self, nodes: Any, local_batch: Any, workers_per_node: Any = 1) -> Array:
        return np.ones((len(nodes), len(nodes))) + self.unseen * np.eye(len(nodes))


# a cluster without a memory limit, for tests of which rows there are
KNOWN = Law(lambda _, batch: 0.001 * batch)


def part_of(rows: list[Measurement], spec: SweepSpec, where: ClusterSpec = ROOMY, law: Law | None = None) -> Partition:
    part = fit_parts(spec, where, rows).parts[0]
    if law is None:
        return part
    profiles = []
    for profile in part.summary.profiles:
        step_s = float(law.predict(profile.configuration.nodes, profile.configuration.local_batch))
        exact = dict.fromkeys(("step_time_s", "step_time_low_s", "step_time_high_s"), step_s)
        profiles.append(profile._replace(times=profile.times.model_copy(update=exact)))
    models = part.models._replace(step_time=cast(StepTimeModel, law))
    return part._replace(models=models, summary=part.summary._replace(profiles=tuple(profiles)))


def chosen(nodes: int, global_batch: int, workers_per_node: int = 1) -> Candidate:
    local = global_batch // (nodes * workers_per_node)
    where = {"nodes": nodes, "workers_per_node": workers_per_node, "local_batch": local, "global_batch": global_batch}
    times = ("step_time_s", "model_step_time_s", "epoch_time_s", "train_time_s", "wall_time_s")
    numbers = dict.fromkeys((*times, "cost", "peak_memory_bytes"), 1)
    return Candidate.model_validate(where | numbers)


def scaled(law: Law | None = None, choice: Candidate | None = None, **search: Any) -> NodeScaling:
    spec = sweep(**(SEARCH | search))
    return part_scaling(part_of(grid(), spec, law=law), spec, choice or chosen(4, 256))


@pytest.fixture(scope="module")
def fitted() -> NodeScaling:
    return scaled()


def test_the_baseline_has_efficiency_1_without_an_interval(fitted: NodeScaling) -> None:
    for curve in (fitted.strong, fitted.weak):
        assert curve.base.nodes == 1
        assert curve.base.speed_up == curve.base.efficiency == Interval(1.0, 1.0, 1.0)


def test_efficiency_is_speed_up_by_node(fitted: NodeScaling) -> None:
    for curve in (fitted.strong, fitted.weak):
        for row in curve.rows:
            assert row.efficiency.times(row.nodes / curve.base.nodes) == pytest.approx(row.speed_up)


def test_speed_up_is_in_samples_per_second(fitted: NodeScaling) -> None:
    for curve in (fitted.strong, fitted.weak):
        pace = [row.candidate.global_batch / row.step_s.value for row in curve.rows]
        assert [row.speed_up.value for row in curve.rows] == pytest.approx([each / pace[0] for each in pace])


def test_node_hours_are_nodes_times_the_whole_training(fitted: NodeScaling) -> None:
    for curve in (fitted.strong, fitted.weak):
        for row in curve.rows:
            assert row.node_hours == pytest.approx(row.training_s.times(row.nodes / 3600))
            # starts and checkpoints in addition to the steps
            assert row.training_s.value > 5 * row.epoch_s.value


def test_intervals_hold_their_values_and_widen_beyond_what_was_measured(fitted: NodeScaling) -> None:
    for curve in (fitted.strong, fitted.weak):
        for row in curve.rows:
            for value, low, high in (row.step_s, row.epoch_s, row.node_hours, row.speed_up, row.efficiency):
                assert 0 < low <= value <= high
        widths = [row.efficiency.high / row.efficiency.low for row in curve.rows]
        assert widths[-1] > widths[2] > widths[0]


def test_of_many_numbers_of_nodes_some_are_left_out_but_never_the_baseline() -> None:
    """Strong scaling of 1,024 needs divisors of it; those up to 4 nodes lack memory."""
    sizes = list(range(1, 31))
    rows = [measured(nodes, batch) for nodes in sizes for batch in (8, 32)] + [oom(1, 256)]
    spec = sweep(cluster_sizes=sizes, min_batch=8, max_batch=1024)
    found = part_scaling(part_of(rows, spec, law=KNOWN), spec, chosen(16, 1024))
    assert [row.nodes for row in found.strong.rows] == [8, 16, 64]
    nodes = [row.nodes for row in found.weak.rows]
    assert nodes[0] == 1
    assert nodes[-1] == 120
    assert 16 in nodes
    assert len(nodes) <= MOST_SIZES + 1


@pytest.mark.parametrize("off", [0.0, 0.3])
def test_perfect_scaling_has_efficiency_1_whatever_all_models_share(off: float) -> None:
    perfect = scaled(Law(lambda _, batch: 0.001 * batch, off))
    for curve in (perfect.strong, perfect.weak):
        for row in curve.rows:
            assert row.efficiency == pytest.approx(Interval(1.0, 1.0, 1.0))
            assert row.speed_up.value == pytest.approx(row.nodes)


def test_steps_that_do_not_get_shorter_scale_not_at_all() -> None:
    stuck = scaled(Law(lambda _, batch: np.full_like(batch, 0.5)))
    assert [row.speed_up.value for row in stuck.strong.rows] == pytest.approx([1.0] * 5)
    assert [row.efficiency.value for row in stuck.weak.rows] == pytest.approx([1.0] * 5)


def test_what_no_drawn_model_knows_widens_the_intervals() -> None:
    """Only the covariance has the departures of sizes that nobody measured."""
    unseen = scaled(Law(lambda _, batch: 0.001 * batch, unseen=2.0))
    for row in unseen.weak.rows[1:]:
        assert row.efficiency.high / row.efficiency.value == pytest.approx(np.exp(1.645 * 0.05 * 2.0))


def test_speed_ups_are_no_less_sure_than_both_steps_together() -> None:
    """Few profiles leave models that miss even what was measured."""
    rows = [measured(1, 32), measured(1, 1024), measured(64, 16)]
    spec = sweep(cluster_sizes=[1, 2, 4, 64], min_batch=32, max_batch=1024)
    found = part_scaling(part_of(rows, spec), spec, chosen(64, 1024))
    for curve in found.curves:
        _, first_low, first_high = curve.base.step_s
        for row in curve.rows:
            batches = row.candidate.global_batch / curve.base.candidate.global_batch
            assert row.speed_up.low >= 0.999 * batches * first_low / row.step_s.high
            assert row.speed_up.high <= 1.001 * batches * first_high / row.step_s.low


def test_speed_ups_are_no_surer_than_the_steps_that_were_measured() -> None:
    rows = []
    for row in CORNERS:
        assert row.times is not None
        noisy = row.times.model_copy(update={"step_time_high_s": 1.5 * row.times.step_time_s})
        rows.append(row.model_copy(update={"times": noisy}))
    at, spec = chosen(2, 256), sweep(cluster_sizes=[1, 2, 4], min_batch=32, max_batch=1024)
    first, *others = part_scaling(part_of(rows, spec), spec, at).strong.rows
    assert (first.speed_up.low, first.speed_up.high) == (1.0, 1.0)
    assert all(row.speed_up.high > 1.5 * row.speed_up.value for row in others)


def test_the_same_measurements_give_the_same_numbers(fitted: NodeScaling) -> None:
    assert scaled() == fitted


def test_one_batch_is_split_and_the_other_repeated(fitted: NodeScaling) -> None:
    assert [row.candidate.global_batch for row in fitted.strong.rows] == [256] * 5
    assert [row.candidate.local_batch for row in fitted.weak.rows] == [64] * 5
    assert [row.nodes for row in fitted.weak.rows] == [1, 2, 4, 8, 16]


def test_rows_go_to_four_times_the_largest_profiled_size_and_name_the_clusters() -> None:
    spec = sweep(**SEARCH)
    where = cluster(memory_gb=64.0, max_nodes=12)
    found = part_scaling(part_of(grid(), spec, where, KNOWN), spec, chosen(4, 256))
    assert [row.nodes for row in found.weak.rows] == [1, 2, 4, 8, 12, 16]
    assert found.max_nodes == 12
    # 256 samples cannot be divided by twelve
    assert [row.nodes for row in found.strong.rows] == [1, 2, 4, 8, 16]
    assert found.strong.left_out == {"the batch has no equal shares": [12]}


def test_of_very_many_sizes_some_are_shown_the_first_last_and_chosen_among_them() -> None:
    spec = sweep(cluster_sizes=list(range(1, 65)), min_batch=32, max_batch=4096)
    rows = [measured(1, 32), measured(1, 64), measured(64, 32)]
    found = part_scaling(part_of(rows, spec, law=KNOWN), spec, chosen(37, 37 * 32))
    shown = [row.nodes for row in found.weak.rows]
    assert len(shown) <= 25
    assert {1, 37, 256} <= set(shown)


def basis_of(rows: list[Measurement], where: Configuration) -> str:
    measured = [row.configuration for row in rows if row.status == "ok"]
    if where in measured:
        return "measured"
    sizes, batches = [c.nodes for c in measured], [c.local_batch for c in measured]
    within = min(sizes) <= where.nodes <= max(sizes) and min(batches) <= where.local_batch <= max(batches)
    if within and where.global_batch <= max(c.global_batch for c in measured):
        return "predicted"
    return "extrapolated"


@pytest.mark.parametrize("rows", [grid(), CORNERS, grid((2, 4)), grid((1, 2, 4), (32, 1024)), [*CORNERS, oom(2, 512)]])
def test_rows_beyond_what_was_measured_are_marked(rows: list[Measurement]) -> None:
    spec = sweep(**SEARCH)
    part = part_of(rows, spec, law=KNOWN)
    for batch in (32, 256, 1024):
        found = part_scaling(part, spec, chosen(4, batch))
        for curve in found.curves:
            for row in curve.rows:
                assert row.basis == basis_of(rows, row.candidate.configuration)
                assert (row.measured_step_s is None) == (row.basis != "measured")
            assert curve.base.nodes in {row.nodes for row in rows}
        assert any(row.basis == "extrapolated" for row in found.weak.rows)


def test_more_samples_in_a_step_than_any_measured_are_extrapolated() -> None:
    """Weak scaling of a large batch reads more at once than the corners of a search have shown."""
    spec = sweep(**SEARCH)
    found = part_scaling(part_of([*CORNERS, measured(2, 512)], spec, law=KNOWN), spec, chosen(1, 1024))
    assert [(row.nodes, row.basis) for row in found.weak.rows[:3]] == [
        (1, "measured"),
        (2, "extrapolated"),
        (4, "extrapolated"),
    ]
    assert [row.basis for row in found.strong.rows[:3]] == ["measured"] * 3


def test_the_baseline_is_the_smallest_profiled_size_that_can_run_the_batch() -> None:
    spec = sweep(**SEARCH)
    tight = cluster(memory_gb=3.0)
    found = part_scaling(part_of(grid(), spec, tight, KNOWN), spec, chosen(4, 1024))
    assert found.strong.base.nodes == 2
    assert found.strong.base.efficiency.value == 1.0
    assert found.strong.left_out == {"does not fit in memory": [1]}
    assert found.weak.base.nodes == 1
    # N = 1 is a candidate that was never profiled
    unprofiled = part_scaling(part_of(grid((2, 4)), spec, law=KNOWN), spec, chosen(4, 256))
    assert unprofiled.strong.base.nodes == unprofiled.weak.base.nodes == 2


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"train_minutes": 2}, "needs longer jobs than train_minutes allows"),
        ({"pricing": {"basis": "spot", "preemption_hours": 0.003}}, "interruptions leave no time for work"),
    ],
)
def test_what_leaves_no_time_for_work_is_named(changes: dict[str, Any], why: str) -> None:
    spec = sweep(**SEARCH)
    part = part_of(grid(), spec, ROOMY, KNOWN)
    part = part._replace(cluster=cluster(memory_gb=64.0, **changes), resume=Resume.NOTHING)
    found = part_scaling(part, spec, chosen(4, 256))
    assert set(found.strong.left_out) == {why}


def test_sizes_whose_memory_nobody_can_know_are_left_out_with_the_reason() -> None:
    # scattered measurements, so that nothing is known far beyond them
    reserved = {16: 0.97, 32: 1.05, 64: 0.97}
    rows = [
        measured(nodes, batch, memory=memory(batch, reserved_bytes=int(factor * peak_bytes(batch))))
        for nodes in (1, 4)
        for batch, factor in reserved.items()
    ]
    spec = sweep(cluster_sizes=[1, 2, 4], min_batch=16, max_batch=1024)
    for gigabytes in (1.8, 2.0):
        part = fit_parts(spec, cluster(memory_gb=gigabytes), rows).parts[0]
        left_out = part_scaling(part, spec, chosen(4, 256)).strong.left_out
        assert any(why.startswith("may not fit in memory") for why in left_out)


def test_a_batch_that_no_two_sizes_can_run_is_explained() -> None:
    found = scaled(KNOWN, chosen(4, 4))
    assert [row.nodes for row in found.strong.rows] == [1, 2, 4]
    spec = sweep(**SEARCH)
    tight = cluster(memory_gb=1.0)
    part = part_of([measured(n, b, memory=memory(b)) for n in (1, 4) for b in (16, 32)], spec, tight)
    none = part_scaling(part, spec, chosen(4, 4 * SAMPLES))
    assert none.curves == ()
    assert "can run local batch 20,000; left out: N = 1" in none.weak.why
    assert "(does not fit in memory)" in none.weak.why


def test_several_workers_a_node_share_the_batch() -> None:
    spec = sweep(**SEARCH)
    where = cluster(memory_gb=64.0, workers_per_node=2)
    rows = [row.model_copy(update={"workers_per_node": 2}) for row in grid()]
    found = part_scaling(part_of(rows, spec, where, KNOWN), spec, chosen(4, 256, 2))
    assert [(row.nodes, row.candidate.local_batch) for row in found.strong.rows] == [
        (1, 128),
        (2, 64),
        (4, 32),
        (8, 16),
        (16, 8),
    ]
    assert [row.basis for row in found.strong.rows] == ["measured"] * 3 + ["extrapolated"] * 2
    for curve in found.curves:
        assert {row.candidate.workers_per_node for row in curve.rows} == {2}


def test_measured_speed_ups_are_those_of_measured_steps(fitted: NodeScaling) -> None:
    curve: ScalingCurve = fitted.strong
    steps = {row.configuration: row.times.step_time_s for row in grid() if row.times}
    for row in curve.rows[:3]:
        expected = steps[Configuration(1, 1, 256)] / steps[row.candidate.configuration]
        assert curve.measured_speed_up(row) == pytest.approx(expected)
    assert curve.measured_speed_up(curve.rows[-1]) is None


def test_the_chosen_row_is_the_plans(tmp_path: Path) -> None:
    contents = read_run(make_run(tmp_path / "run", stage="plan"))
    assert contents.sweep is not None
    assert contents.cluster is not None
    plan = make_plan(contents.sweep, contents.cluster, contents.measurements)
    found = node_scaling_of(contents._replace(plan=plan))
    for curve in (found.strong, found.weak):
        (row,) = [row for row in curve.rows if row.nodes == plan.chosen.nodes]
        for name in ("step_time_s", "epoch_time_s", "wall_time_s"):
            assert getattr(row.candidate, name) == pytest.approx(getattr(plan.chosen, name))
            assert row.candidate.interval_90[name] == pytest.approx(plan.chosen.interval_90[name])


def test_of_several_partitions_the_chosen_one_is_named(tmp_path: Path) -> None:
    contents = read_run(make_run(tmp_path / "run", stage="plan"))
    assert contents.plan is not None
    names = {"partition": "a"}, {"partition": "b"}
    rows = [row.model_copy(update=name) for row in contents.measurements for name in names]
    plan = contents.plan.model_copy(update={"chosen": contents.plan.chosen.model_copy(update=names[0])})
    both = contents._replace(cluster=cluster(partitions=names), measurements=rows, plan=plan)
    assert (
        node_scaling_of(both).name
        == node_scaling_of(both.of_chosen_partition()).name
        == f"{contents.name} on partition a"
    )
    alone = [row for row in rows if row.partition == "b"]
    assert "partition a" in node_scaling_of(both._replace(measurements=alone)).strong.why


def test_sizes_are_listed_as_in_a_sentence() -> None:
    assert [listed_sizes(nodes) for nodes in ([2], [1, 2, 4], list(range(5, 17)))] == [
        "2",
        "1, 2 and 4",
        "5, 6, ..., 16",
    ]


def test_the_reason_is_given_where_nothing_can_be_scaled(tmp_path: Path) -> None:
    contents = read_run(make_run(tmp_path / "run", stage="plan"))
    alone = [row for row in contents.measurements if row.nodes == 4]
    cases = {
        "there is none yet": contents._replace(plan=None),
        "sweep.toml or cluster.toml": contents._replace(cluster=None),
        "no usable measurement": contents._replace(measurements=[]),
        "only N = 4 was profiled": contents._replace(measurements=alone),
    }
    for why, run in cases.items():
        found = node_scaling_of(run)
        assert found.curves == ()
        assert why in found.strong.why
        assert why in found.weak.why


def test_a_measured_epoch_takes_as_long_as_in_the_other_tables(tmp_path: Path) -> None:
    contents = read_run(make_run(tmp_path / "run", stage="plan"))
    rows = []
    # updates of AGS's scale differ between batches, though the plan counts them alike
    for row in contents.ok:
        updated = known(row.times).model_copy(update={"update_time_s": 0.01 * row.local_batch})
        rows.append(row.model_copy(update={"times": updated, "updates_per_epoch": 2.0}))
    epochs_s = measured_epochs(rows, known(contents.plan).dataset_samples)
    scaling = node_scaling_of(contents._replace(measurements=rows))
    measured = [row for curve in scaling.curves for row in curve.rows if row.measured_step_s is not None]
    assert measured
    assert all(row.measured_epoch_s == epochs_s[row.candidate.configuration] for row in measured)
