from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzzing import fuzz
from tests.planning_data import cluster, compute_time_s, failed, ok, oom, step_time_s, sweep, times
from tula_hpc.analysis.models.profiles import summarize
from tula_hpc.analysis.models.step_time import fit_step_time
from tula_hpc.analysis.plan import make_plan
from tula_hpc.analysis.planning.candidates import candidates
from tula_hpc.analysis.search.adaptive import AdaptiveSearch, cheap_corners
from tula_hpc.analysis.search.decision import DecisionModel
from tula_hpc.analysis.search.propose import propose
from tula_hpc.config import SearchSpec, batches_timed_apart
from tula_hpc.records import Configuration, Measurement

SEARCH = SearchSpec(cluster_sizes=(1, 2, 4, 8), min_batch=32, max_batch=2048)
POINTS = candidates(SEARCH, 1)
OBJECTIVES = ["time", "cost", "knee", "kneedle", "weighted"]


def measure(
    configuration: Configuration, order: int, noise: float = 0.0, seed: int = 0, **changes: object
) -> Measurement:
    nodes, per_node, batch = configuration
    factor = float(np.random.default_rng([nodes, batch, seed]).lognormal(0.0, noise))
    seconds = times(nodes, batch, step_time_s=step_time_s(nodes, batch) * factor)
    return ok(nodes, batch, workers_per_node=per_node, times=seconds, finished_at=order + 1.0, **changes)


def run(search: AdaptiveSearch, noise: float = 0.0, seed: int = 0) -> list[Measurement]:
    rows: list[Measurement] = []
    while proposed := search.propose(rows):
        rows.append(measure(proposed[0], len(rows), noise, seed))
    return rows


def test_it_starts_at_the_cheap_corners() -> None:
    assert AdaptiveSearch(POINTS).propose([]) == [
        Configuration(1, 1, 32),
        Configuration(1, 1, 2048),
        Configuration(8, 1, 4),
    ]
    assert cheap_corners([]) == []
    assert cheap_corners(POINTS[:1]) == POINTS[:1]


@pytest.mark.parametrize(
    "objective", ["time", *(pytest.param(it, marks=pytest.mark.processes) for it in OBJECTIVES[1:])]
)
def test_on_a_clean_law_a_few_measurements_decide(objective: str) -> None:
    rows = run(AdaptiveSearch(POINTS, DecisionModel(objective), max_profiles=len(POINTS)))
    # many candidates cost nearly the same, so that it takes more measurements to distinguish them
    flat = objective == "cost"
    assert len(rows) < len(POINTS) if flat else len(rows) <= len(POINTS) // 2
    assert len({row.configuration for row in rows}) == len(rows)


@pytest.mark.processes
@fuzz(6)
@given(noise=st.floats(0.0, 0.05), objective=st.sampled_from(["time", "cost"]))
def test_what_is_chosen_from_few_is_nearly_the_best_of_all(noise: float, objective: str) -> None:
    rows = run(AdaptiveSearch(POINTS, DecisionModel(objective)), noise)
    assert len(rows) <= 8
    model = fit_step_time(summarize(rows).profiles)
    nodes, _, batch = np.array(POINTS, dtype=float).T
    weight = (nodes if objective == "cost" else 1.0) / (nodes * batch)
    true = np.array([step_time_s(c.nodes, c.local_batch) for c in POINTS]) * weight
    assert true[np.argmin(model.predict(nodes, batch) * weight)] <= 1.05 * true.min()


@pytest.mark.processes
def test_the_same_measurements_get_the_same_answer_in_any_order() -> None:
    rows: list[Measurement] = []
    search = AdaptiveSearch(POINTS, DecisionModel("knee"))
    while proposed := search.propose(rows):
        assert (
            search.propose(rows[::-1]) == proposed == AdaptiveSearch(POINTS[::-1], DecisionModel("knee")).propose(rows)
        )
        rows.append(measure(proposed[0], len(rows), 0.03))


def test_so_many_measurements_are_enough_and_no_more_are_asked_for() -> None:
    rows = run(AdaptiveSearch(POINTS, DecisionModel("time"), max_profiles=4), noise=0.2)
    assert len(rows) <= 4
    assert AdaptiveSearch(POINTS, max_profiles=4).propose(rows) == []


@pytest.mark.processes
def test_noisy_measurements_are_followed_by_more_of_them() -> None:
    search = AdaptiveSearch(POINTS, DecisionModel("time"), max_profiles=12)
    clean = len(run(search))
    assert clean < 12
    assert all(len(run(search, 0.1, seed)) > clean for seed in range(2))


def test_a_plan_fits_its_measurements_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = run(AdaptiveSearch(POINTS, DecisionModel("time"), max_profiles=5))
    monkeypatch.setattr("tula_hpc.analysis.search.adaptive.fit_step_time", None)
    spec = sweep("time", cluster_sizes=[1, 2, 4, 8], min_batch=32, max_batch=2048, mode="adaptive")
    assert make_plan(spec, cluster(max_nodes=8), rows).chosen.measured


def test_it_looks_where_the_model_is_unsure_not_where_it_has_been() -> None:
    """All batches of one cluster size are known, so there is more to learn at the others."""
    known = [measure(c, 0) for c in POINTS if c.nodes in (1, 8)]
    noisy = [row.model_copy(update={"finished_at": 0.0}) for row in known]
    proposed = AdaptiveSearch(POINTS, DecisionModel("cost"), max_profiles=99).propose(noisy)
    assert all(c.nodes in (2, 4) for c in proposed)


@pytest.mark.processes
def test_one_cluster_size_does_not_decide_between_sizes_whose_form_it_cannot_tell() -> None:
    """If all-reduces take as long as by a parameter server, profiles on 1 and 8 nodes alone chose 23 % too slow."""
    spec = sweep("time", mode="adaptive", cluster_sizes=(1, 2, 4, 8), min_batch=64, max_batch=8192)
    rows: list[Measurement] = []
    while proposed := propose(spec, EIGHT_WORKERS, rows):
        rows.append(with_parameter_server(spec.search, proposed[0], len(rows)))
    per_sample_s = {c: server_step_s(c.nodes, c.local_batch) / c.global_batch for c in candidates(spec.search, 8)}
    chosen = make_plan(spec, EIGHT_WORKERS, rows).chosen.configuration
    assert per_sample_s[chosen] < 1.02 * min(per_sample_s.values())


EIGHT_WORKERS = cluster(workers_per_node=8, device="cpu")


def server_step_s(nodes: int, batch: int) -> float:
    compute_s = compute_time_s(batch)
    return 0.8 * compute_s + max(0.2 * compute_s, server_sync_s(nodes))


def server_sync_s(nodes: int) -> float:
    return 0.00875 if nodes == 1 else 0.00875 + 0.05 * nodes


def with_parameter_server(search: SearchSpec, configuration: Configuration, order: int) -> Measurement:
    nodes, per_node, batch = configuration
    seconds = times(nodes, batch, step_time_s=server_step_s(nodes, batch), allreduce_time_s=server_sync_s(nodes))
    apart = [(b, compute_time_s(b) - 0.002) for b in batches_timed_apart(search, nodes, per_node, batch)]
    return ok(
        nodes,
        batch,
        workers_per_node=per_node,
        backend="gloo",
        times=seconds,
        smaller_computes=tuple(apart),
        dataset_samples=10**6,
        finished_at=order + 1.0,
    )


def test_failed_and_impossible_configurations_are_left_out() -> None:
    spec = sweep("time", cluster_sizes=[1, 2, 4], min_batch=32, max_batch=1024, mode="adaptive")
    out_of_memory = [oom(1, 1024), failed(4, 8), failed(4, 8)]
    assert propose(spec, cluster(), []) == [Configuration(1, 1, 32), Configuration(1, 1, 1024), Configuration(4, 1, 8)]
    proposed = propose(spec, cluster(), out_of_memory)
    assert proposed == [Configuration(1, 1, 32), Configuration(1, 1, 512)]
    more = propose(spec, cluster(), [*out_of_memory, ok(1, 32), ok(1, 512)])
    assert more
    assert Configuration(4, 1, 8) not in more


def test_before_any_measurement_only_batches_that_an_estimate_trusts_are_tried() -> None:
    spec = sweep("time", cluster_sizes=[1, 2], min_batch=32, max_batch=1024, mode="adaptive")
    first = propose(spec, cluster(), [], trusted_batch=100)
    assert max(c.local_batch for c in first) == 64
    assert propose(spec, cluster(), [ok(1, 32), ok(1, 64)], trusted_batch=100) == [
        Configuration(1, 1, 1024),
        Configuration(2, 1, 16),
    ]
