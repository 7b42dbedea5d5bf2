from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.known import known
from tests.planning_data import cluster, failed, grid, ok, step_time_s, sweep, times
from tula_hpc.analysis.plan import make_plan
from tula_hpc.analysis.planning.candidates import candidate_grid, candidates
from tula_hpc.config import ClusterSpec, check_together, load_cluster, sweep_for
from tula_hpc.errors import InputError, NotEnoughDataError
from tula_hpc.records import Configuration, Measurement

SLOW, FAST = "v100", "a100"
TWO: list[dict[str, Any]] = [
    {"partition": SLOW, "max_nodes": 4, "pricing": {"usd_per_node_hour": 1.0}},
    {"partition": FAST, "max_nodes": 2, "memory_gb": 8.0, "pricing": {"usd_per_node_hour": 10.0}},
]


def both(**more: Any) -> ClusterSpec:
    return cluster(partitions=TWO, **more)


def on(partition: str, nodes: int, local_batch: int, pace: float = 1.0) -> Measurement:
    step = pace * step_time_s(nodes, local_batch)
    alone = pace * step_time_s(1, local_batch)
    timed = times(nodes, local_batch, step_time_s=step, compute_time_s=0.9 * alone, allreduce_time_s=0.0)
    return ok(nodes, local_batch, partition=partition, times=timed)


def measured() -> list[Measurement]:
    """Return measurements in which the second partition is four times as fast and ten times as expensive."""
    slow = [on(SLOW, nodes, batch // nodes) for nodes in (1, 2, 4) for batch in (32, 128, 1024)]
    return slow + [on(FAST, nodes, batch // nodes, 0.25) for nodes in (1, 2) for batch in (32, 128, 1024)]


def test_without_tables_the_cluster_is_its_only_part() -> None:
    spec = cluster(partition="gpu")
    assert spec.parts() == (spec,)
    assert spec.part_names() == ("",)
    assert spec.part("") is spec
    with pytest.raises(InputError, match="no partition 'gpu'"):
        spec.part("gpu")


def test_a_part_overrides_what_it_names_and_keeps_the_rest() -> None:
    spec = both(memory_gb=4.0, account="physics", pricing={"basis": "spot", "preemption_hours": 3.0})
    slow, fast = spec.parts()
    assert (slow.partition, slow.max_nodes, slow.memory_gb, slow.account) == (SLOW, 4, 4.0, "physics")
    assert (fast.partition, fast.max_nodes, fast.memory_gb, fast.account) == (FAST, 2, 8.0, "physics")
    assert (fast.pricing.basis, fast.pricing.usd_per_node_hour, fast.pricing.preemption_hours) == ("spot", 10.0, 3.0)
    assert slow.partitions == fast.partitions == ()
    assert spec.part(FAST) == fast
    with pytest.raises(InputError, match="no partition 'h100'"):
        spec.part("h100")


def test_parts_survive_the_run_directory_and_overrides_there_reach_them(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(tomli_w.dumps(both().model_dump(mode="json", exclude_none=True)))
    assert load_cluster(path) == both()
    changed = load_cluster(path, ["pricing.basis=memory"])
    assert [part.pricing.basis for part in changed.parts()] == ["memory", "memory"]
    assert [part.pricing.usd_per_node_hour for part in changed.parts()] == [1.0, 10.0]


def test_each_part_is_checked_as_a_cluster() -> None:
    with pytest.raises(ValueError, match=r"partitions: a: gres: device"):
        cluster(executor="slurm", device="cuda", partitions=[{"partition": "a"}])
    assert cluster(executor="slurm", device="cuda", partitions=[{"partition": "a", "gres": "gpu:1"}])


def test_a_cluster_size_has_to_fit_one_part() -> None:
    check_together(sweep(), both(), "sweep", "cluster")
    with pytest.raises(InputError, match="8 nodes, but cluster has max_nodes = 4"):
        check_together(sweep(cluster_sizes=[1, 8]), both(), "sweep", "cluster")
    fast = both().part(FAST)
    narrowed = known(sweep_for(sweep(), fast))
    assert narrowed.search.cluster_sizes == (1, 2)
    assert sweep_for(sweep(cluster_sizes=[4]), fast) is None
    assert sweep_for(sweep(), both().part(SLOW)) == sweep()


@pytest.mark.parametrize("bounds", [(24, 5000), (32, 4096)])
@pytest.mark.parametrize(("sizes", "workers"), [([1, 2, 4], 1), ([3, 5], 4), ([1, 7, 64], 2)])
def test_the_grid_is_what_the_search_lists(sizes: list[int], workers: int, bounds: tuple[int, int]) -> None:
    spec = sweep(cluster_sizes=sizes, min_batch=bounds[0], max_batch=bounds[1])
    columns = candidate_grid(spec.search, cluster(workers_per_node=workers))
    rows = [Configuration(*map(int, row)) for row in zip(*columns, strict=True)]
    assert rows == candidates(spec.search, workers)
    assert [row.global_batch for row in rows] == columns.global_batch.tolist()
    assert len(set(columns.keys().tolist())) == len(rows)


def test_candidates_of_all_parts_compete_at_their_own_speed_and_price() -> None:
    plans = {kind: make_plan(sweep(kind), both(), measured()) for kind in ("time", "cost")}
    assert (plans["time"].chosen.partition, plans["cost"].chosen.partition) == (FAST, SLOW)
    plan = plans["time"]
    assert {(c.partition, c.nodes) for c in plan.candidates} == {(SLOW, 1), (SLOW, 2), (SLOW, 4), (FAST, 1), (FAST, 2)}
    by_key = {(c.partition, c.configuration): c for c in plan.candidates}
    for (partition, key), candidate in by_key.items():
        if partition == FAST:
            assert candidate.step_time_s == pytest.approx(0.25 * by_key[SLOW, key].step_time_s, rel=0.25)
        price = {SLOW: 1.0, FAST: 10.0}[partition]
        assert candidate.cost == pytest.approx(candidate.wall_time_s / 3600 * candidate.nodes * price)
    assert set(plan.models["partitions"]) == {SLOW, FAST}
    assert f"on {FAST}" in plan.reason


def test_memory_and_fallbacks_are_those_of_the_chosen_part() -> None:
    plan = make_plan(sweep("time"), both(memory_gb=2.0), measured())
    assert plan.memory_limit_bytes == 8 * 1024**3
    assert {c.partition for c in plan.fallbacks} == {FAST}
    assert any(not c.feasible for c in plan.candidates if c.partition == SLOW)
    assert all(c.feasible for c in plan.candidates if c.partition == FAST)


def test_a_part_without_enough_measurements_is_left_out_and_named() -> None:
    rows = [row for row in measured() if row.partition == SLOW] + [failed(1, 32, partition=FAST)]
    plan = make_plan(sweep("time"), both(), rows)
    assert {c.partition for c in plan.candidates} == {SLOW}
    assert any(f"partition {FAST} is left out: no usable measurement" in warning for warning in plan.warnings)
    with pytest.raises(NotEnoughDataError, match=f"{SLOW}: no usable measurement.*{FAST}: no usable measurement"):
        make_plan(sweep("time"), both(), [])


def test_a_mistake_in_the_prices_of_a_part_names_it() -> None:
    with pytest.raises(InputError, match=f"partition {SLOW}: pricing.watts_per_node: no measurement has"):
        make_plan(sweep("time"), both(pricing={"basis": "energy"}), measured())


def test_cluster_sizes_that_no_part_has_nodes_for_are_named() -> None:
    plan = make_plan(sweep("time", cluster_sizes=[1, 2, 4, 8]), both(), measured())
    assert max(c.nodes for c in plan.candidates) == 4
    assert any("search.cluster_sizes: N=8, more than max_nodes = 4" in warning for warning in plan.warnings)
    assert not any("max_nodes" in warning for warning in make_plan(sweep("time"), both(), measured()).warnings)


def test_doubts_about_a_part_name_it() -> None:
    rows = measured()
    rows[0] = rows[0].model_copy(update={"exclusive": False})
    assert any(w.startswith(f"{SLOW}: these measurements shared") for w in make_plan(sweep(), both(), rows).warnings)


def test_notes_about_a_part_name_it_and_common_notes_come_once() -> None:
    starts = {SLOW: 5.0, FAST: 20.0}
    rows = [row.model_copy(update={"start_s": starts[row.partition]}) for row in measured()]
    notes = make_plan(sweep(), both(), rows).notes
    assert [note for note in notes if "to its first step" in note] == [
        f"{name}: a job takes {seconds:.1f} s to its first step, as profile jobs of this run measured"
        for name, seconds in starts.items()
    ]
    assert sum("evaluation" in note for note in notes) == 1
    assert not any(note.startswith(f"{name}: evaluation") for name in starts for note in notes)
    alone = make_plan(sweep(), cluster(), [row.model_copy(update={"partition": ""}) for row in rows]).notes
    assert any(note.startswith("a job takes 5.0 s") for note in alone)


def test_measurements_of_other_parts_do_not_count() -> None:
    rows = grid()
    plan = make_plan(sweep(), cluster(), rows)
    assert {c.partition for c in plan.candidates} == {""}
    with pytest.raises(NotEnoughDataError):
        make_plan(sweep(), both(), rows)
