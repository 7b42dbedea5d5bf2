"""The configuration that a search chooses has been measured itself, or the plan says in a sentence why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.search_replay import replay, tables
from tests.benchmarks.traces import folder
from tests.fuzzing import fuzz
from tests.planning_data import cluster, failed, ok, step_time_s, sweep, times
from tula_hpc.analysis.plan import make_plan
from tula_hpc.analysis.report.plan_text import sentences
from tula_hpc.analysis.search.confirmation import PROFILE_SHARE
from tula_hpc.analysis.search.propose import propose
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.formatting import format_number
from tula_hpc.records import Configuration, Measurement, Plan

CLUSTER = cluster(max_nodes=8)
OBJECTIVES = ["time", "cost", "knee", "weighted"]
# a day of training, or two minutes
LONG, SHORT = 10**7, 10**3
UNMEASURED = "was not measured itself"


class World(NamedTuple):
    """Step times of a made-up cluster."""

    # configurations that are slower than the law says
    factor: float = 1.0
    is_slow: Callable[[Configuration], bool] = lambda _: False
    noise: float = 0.0
    samples: int = LONG
    fails: frozenset[Configuration] = frozenset()

    def measure(self, configuration: Configuration, order: int) -> Measurement:
        """Profile one configuration."""
        nodes, _, batch = configuration
        if configuration in self.fails:
            return failed(nodes, batch, finished_at=order + 1.0)
        departure = float(np.random.default_rng([nodes, batch]).lognormal(0.0, self.noise))
        seconds = step_time_s(nodes, batch) * departure * (self.factor if self.is_slow(configuration) else 1.0)
        known = times(nodes, batch, step_time_s=seconds)
        return ok(nodes, batch, times=known, finished_at=order + 1.0, dataset_samples=self.samples)


def spec_of(kind: str, **constraints: Any) -> SweepSpec:
    spec = sweep(kind, cluster_sizes=[1, 2, 4, 8], min_batch=32, max_batch=2048, mode="adaptive")
    return spec.model_copy(update={"objective": spec.objective.model_copy(update=constraints)})


def searched(spec: SweepSpec, world: World, on: ClusterSpec = CLUSTER) -> list[Measurement]:
    rows: list[Measurement] = []
    while proposed := propose(spec, on, rows):
        rows.append(world.measure(proposed[0], len(rows)))
    return rows


def sentences_with(plan: Plan, words: str) -> list[str]:
    return [text for text in (*plan.notes, *plan.warnings) if words in text]


def is_confirmed(plan: Plan, rows: list[Measurement]) -> bool:
    return plan.chosen.configuration in {row.configuration for row in rows if row.status == "ok"}


@st.composite
def worlds(draw: st.DrawFn) -> World:
    nodes, batch = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([64, 128, 256, 1024]))
    slow: list[Callable[[Configuration], bool]] = [
        lambda c: c.nodes == nodes,
        lambda c: c.local_batch == batch,
        lambda c: c == (nodes, 1, batch),
        lambda c: c.nodes * c.local_batch >= 2 * batch,
    ]
    return World(
        factor=draw(st.sampled_from([0.5, 1.0, 1.5, 4.0])),
        is_slow=draw(st.sampled_from(slow)),
        noise=draw(st.sampled_from([0.0, 0.03])),
        samples=draw(st.sampled_from([LONG, SHORT])),
    )


@pytest.mark.processes
@fuzz(5)
@given(worlds(), st.sampled_from(OBJECTIVES), st.sampled_from([{}, {"max_global_batch": 512}]))
def test_the_choice_was_measured_or_the_plan_says_why_not(world: World, kind: str, constraints: dict[str, Any]) -> None:
    spec = spec_of(kind, **constraints)
    rows = searched(spec, world)
    assert len(rows) <= spec.search.max_profiles
    plan = make_plan(spec, CLUSTER, rows)
    assert is_confirmed(plan, rows) == plan.chosen.measured
    reasons = len(sentences_with(plan, UNMEASURED)) + (plan.profile_share is not None)
    assert reasons == (0 if plan.chosen.measured else 1)
    unmeasured_ends = len(rows) == spec.search.max_profiles or world.samples == SHORT
    assert plan.chosen.measured or unmeasured_ends


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "constraints"), [("knee", {}), ("cost", {"deadline_hours": 0.04})])
def test_replayed_over_its_own_records_in_any_order_it_proposes_the_same(
    kind: str, constraints: dict[str, float]
) -> None:
    spec, slow = spec_of(kind, **constraints), World(4.0, lambda c: c.nodes == 8 and c.local_batch > 32, 0.03)
    rows = searched(spec, slow)
    for count in range(3, len(rows)):
        assert propose(spec, CLUSTER, rows[:count][::-1])[0] == rows[count].configuration
    assert propose(spec, CLUSTER, rows[::-1]) == []


CLIFFS: dict[str, Callable[[Configuration], bool]] = {
    "a size": lambda c: c.nodes == 8 and c.local_batch > 4,
    "a configuration": lambda c: c == (8, 1, 256),
    "shared storage": lambda c: c.nodes > 2 and c.global_batch > 512,
}


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "where"), [*zip(["time", "cost", "weighted"], CLIFFS, strict=True)])
def test_what_is_four_times_slower_than_the_law_is_not_chosen(kind: str, where: str) -> None:
    world = World(4.0, CLIFFS[where])
    plan = make_plan(spec_of(kind), CLUSTER, searched(spec_of(kind), world))
    assert not world.is_slow(plan.chosen.configuration)


@pytest.mark.processes
def test_a_rival_on_other_nodes_that_is_faster_than_the_law_says_is_found() -> None:
    fast = World(0.4, lambda c: c == (2, 1, 1024))
    rows = searched(spec_of("cost"), fast)
    assert make_plan(spec_of("cost"), CLUSTER, rows).chosen.configuration == (2, 1, 1024)
    # unless its profile would cost too much of the training
    short = searched(spec_of("cost"), fast._replace(samples=SHORT))
    assert (2, 1, 1024) not in {row.configuration for row in short}


def test_a_short_training_is_not_worth_a_profile() -> None:
    spec, short = spec_of("time"), World(samples=SHORT)
    rows = searched(spec, short)
    plan = make_plan(spec, CLUSTER, rows)
    assert not plan.chosen.measured
    assert plan.profile_share is not None
    assert plan.profile_share > PROFILE_SHARE
    assert not sentences_with(plan, UNMEASURED)
    (message,) = [text for text in sentences(plan) if "not measured" in text]
    percent = format_number(100 * plan.profile_share, 2)
    assert message.endswith(f"was not measured, as its profile would cost {percent} % of the training's node-seconds.")
    assert not sentences_with(plan, "not yet profiled")
    assert len(rows) <= len(searched(spec, World()))


def test_a_choice_that_cannot_be_profiled_is_no_endless_search() -> None:
    spec, world = spec_of("time"), World(fails=frozenset([Configuration(8, 1, 256)]))
    rows = searched(spec, world)
    plan = make_plan(spec, CLUSTER, rows)
    assert plan.chosen.configuration == (8, 1, 256)
    assert sentences_with(plan, UNMEASURED)
    assert sum(row.status == "failed" for row in rows) == 2


def test_what_another_objective_would_choose_is_still_to_be_profiled() -> None:
    """One sentence already says that."""
    rows = searched(spec_of("cost"), World())[:-1]
    plan = make_plan(spec_of("time"), CLUSTER, rows)
    assert not plan.chosen.measured
    assert str(plan.chosen.configuration) in sentences_with(plan, "not yet profiled")[0]
    assert not sentences_with(plan, UNMEASURED)
    assert plan.profile_share is None


@pytest.mark.processes
@pytest.mark.skipif(not (folder() / "imagenet").is_dir(), reason=f"no step-time traces in {folder()}")
@pytest.mark.parametrize("objective", ["time", "cost"])
def test_on_recorded_steps_every_choice_was_measured(objective: str) -> None:
    recorded = [table for table in tables() if table.workload in {"imagenet", "transformer", "yolov3"}]
    searches = [replay(table, objective, "computation") for table in recorded]
    assert all(search["confirmed"] for search in searches)
    assert np.mean([search["profiles"] for search in searches]) <= 7
    assert np.mean([search["regret"] for search in searches]) <= 0.02
