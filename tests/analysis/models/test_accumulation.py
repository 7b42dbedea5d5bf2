"""Batches that a script takes in several forward passes: models, search, plan, and a training that lacks memory."""

from __future__ import annotations

from typing import Any

import pytest

from tests.planning_data import (
    BYTES_PER_SAMPLE,
    COMPUTE_FIXED_S,
    FIXED_BYTES,
    SAMPLES,
    cluster,
    compute_time_s,
    memory,
    ok,
    oom,
    sync_time_s,
    times,
)
from tula_hpc.analysis.models.accumulation import Passes
from tula_hpc.analysis.models.fitted import fit_models
from tula_hpc.analysis.models.profiles import summarize
from tula_hpc.analysis.plan import make_plan
from tula_hpc.analysis.report.tables import candidate_table
from tula_hpc.analysis.run_contents import as_planned
from tula_hpc.analysis.search.propose import largest_pass, propose
from tula_hpc.config import GIB, SweepSpec
from tula_hpc.formatting import UNKNOWN
from tula_hpc.launch.job_specs import in_passes
from tula_hpc.records import Candidate, Configuration, Measurement, Plan, RunDirectory, append_record
from tula_hpc.stages.train import next_candidate

# a limit under which a script's passes fit up to 64 samples
LIMIT = cluster(memory_gb=(FIXED_BYTES + 100 * BYTES_PER_SAMPLE) / GIB, memory_margin=0.0)


def sweep(*more: str, **search: Any) -> SweepSpec:
    arguments = ["--batch-size", "{local_batch}", *more]
    workload = {"script": "/train.py", "arguments": arguments, "samples": SAMPLES, "epochs": 5}
    bounds = {"mode": "partial", "min_batch": 32, "max_batch": 1024, "cluster_sizes": [1, 2, 4], **search}
    tables = {"name": "x", "workload": workload, "search": bounds, "objective": {"kind": "time"}}
    return SweepSpec.model_validate(tables, context={"check_paths": False})


def step_time_s(nodes: int, batch: int, passes: int) -> float:
    # however many the passes, the optimizer steps once
    others_s = (passes - 1) * (compute_time_s(batch // passes) - 0.1 * COMPUTE_FIXED_S)
    return others_s + compute_time_s(batch // passes) + sync_time_s(nodes)


def taken_in(nodes: int, batch: int, passes: int) -> Measurement:
    one = times(nodes, batch // passes)
    step_s = step_time_s(nodes, batch, passes)
    whole = {
        "step_time_s": step_s,
        "step_time_low_s": 0.99 * step_s,
        "step_time_high_s": 1.01 * step_s,
        "data_time_s": passes * one.data_time_s,
        "compute_time_s": passes * one.compute_time_s,
    }
    found = one.model_copy(update=whole)
    return ok(nodes, batch, times=found, memory=memory(batch // passes), accumulation=passes)


AT_ONCE = [taken_in(nodes, batch, 1) for nodes in (1, 4) for batch in (8, 16, 32, 64)]
PLACEHOLDER = ("--steps", "{accumulation}")


def test_parts_that_a_script_always_takes_are_shown_and_change_no_time() -> None:
    spec = sweep()
    always = spec.model_copy(update={"workload": spec.workload.model_copy(update={"accumulation": 4})})
    rows = [row.model_copy(update={"accumulation": None}) for row in AT_ONCE]
    plans = [make_plan(each, cluster(), rows) for each in (spec, always)]
    assert [plan.chosen.in_parts for plan in plans] == ["", " in 4 parts"]
    assert plans[0].chosen.step_time_s == plans[1].chosen.step_time_s


@pytest.mark.parametrize(("batch", "passes"), [(1, 1), (64, 1), (65, 2), (128, 2), (1024, 16)])
def test_a_batch_takes_the_fewest_passes_that_fit(batch: int, passes: int) -> None:
    assert Passes(64).of(batch) == passes
    assert Passes(64, least=4).of(batch) == max(passes, 4)
    assert Passes().of(batch) == 1


@pytest.mark.parametrize("measured", [AT_ONCE, [taken_in(n, 8 * k, k) for n in (1, 4) for k in (1, 2, 4)] + AT_ONCE])
def test_a_step_in_parts_computes_in_each_and_synchronizes_once(measured: list[Measurement]) -> None:
    models = fit_models(summarize(measured)._replace(passes=Passes(64)), form="ring")
    for nodes, batch, passes in [(1, 32, 1), (1, 512, 8), (2, 256, 4), (4, 1024, 16)]:
        expected_s = step_time_s(nodes, batch, passes)
        assert models.step_time.predict(nodes, batch) == pytest.approx(expected_s, rel=0.03)
        low_s, high_s = models.step_time.interval(nodes, batch)
        assert low_s < expected_s < high_s
        assert models.memory.predict(batch) == pytest.approx(memory(batch // passes).reserved_bytes, rel=0.01)


def test_the_plan_offers_what_memory_forbids_in_parts() -> None:
    plan = make_plan(sweep(*PLACEHOLDER), LIMIT, AT_ONCE)
    assert all(c.feasible for c in plan.candidates)
    for candidate in plan.candidates:
        passes = max(1, candidate.local_batch // 64)
        assert candidate.accumulation == passes
        expected_s = step_time_s(candidate.nodes, candidate.local_batch, passes)
        assert candidate.step_time_s == pytest.approx(expected_s, rel=0.03)
        assert candidate.measured == (passes == 1 and candidate.nodes != 2 and candidate.local_batch <= 64)
    assert Plan.model_validate_json(plan.model_dump_json(by_alias=True)) == plan
    assert "at most 64 samples in one forward pass" in " ".join(plan.notes)
    largest = max(plan.candidates, key=lambda c: c.local_batch)
    assert largest.in_parts == " in 16 parts"


def test_without_the_placeholder_it_is_left_out() -> None:
    plan = make_plan(sweep(), LIMIT, [row.model_copy(update={"accumulation": None}) for row in AT_ONCE])
    for candidate in plan.candidates:
        assert (candidate.feasible, candidate.accumulation) == (candidate.local_batch <= 64, 1)


def test_a_measurement_in_other_parts_does_not_count_for_the_candidate() -> None:
    rows = [*AT_ONCE, taken_in(1, 256, 4), taken_in(1, 512, 16)]
    plan = make_plan(sweep(*PLACEHOLDER), LIMIT, rows)
    found = {c.configuration: c.measured for c in plan.candidates}
    assert found[Configuration(1, 1, 256)]
    assert not found[Configuration(1, 1, 512)]
    table = candidate_table(plan, rows)
    cells = {(row[0], row[1].split()[0]): row[table.columns.index("measured")] for row in table.rows}
    assert cells["1", "256"] != UNKNOWN
    assert cells["1", "512"] == UNKNOWN, "it would be compared with an epoch of other passes"
    assert as_planned(rows, None) == rows


def test_what_ran_out_of_memory_comes_again_in_more_parts() -> None:
    spec, rows = sweep(*PLACEHOLDER, cluster_sizes=[1]), [taken_in(1, 32, 1)]
    largest = Configuration(1, 1, 1024)
    assert propose(spec, cluster(), rows) == [largest]
    assert largest_pass(spec, cluster(), rows) is None
    for passes in (1, 2, 4):
        rows.append(oom(1, 1024, accumulation=passes))
        assert propose(spec, cluster(), rows) == [largest]
        assert largest_pass(spec, cluster(), rows) == 512 / passes
    rows.append(taken_in(1, 1024, 8))
    assert propose(spec, cluster(), rows) == []
    (bound,) = {c.accumulation for c in make_plan(spec, cluster(), rows).candidates if c.local_batch == 512}
    assert bound == 4


def test_a_search_ends_where_one_sample_is_too_many() -> None:
    assert propose(sweep(*PLACEHOLDER), cluster(), [oom(1, 32, accumulation=32)]) == []


def test_the_memory_model_says_what_fits_before_it_is_tried() -> None:
    # two measured batches allow one twice as large, four allow every batch that fits
    assert largest_pass(sweep(*PLACEHOLDER), LIMIT, AT_ONCE[:2]) == 32
    assert largest_pass(sweep(*PLACEHOLDER), LIMIT, AT_ONCE) == 64
    assert largest_pass(sweep(*PLACEHOLDER), cluster(memory_gb=1000.0), AT_ONCE) is None
    assert largest_pass(sweep(), LIMIT, AT_ONCE) is None


def test_a_training_that_lacks_memory_takes_more_parts(tmp_path: Any) -> None:
    run = RunDirectory(tmp_path / "run").create()
    plan = make_plan(sweep(*PLACEHOLDER), LIMIT, AT_ONCE)
    chosen = plan.chosen.model_copy(update={"local_batch": 256, "accumulation": 4})
    plan = plan.model_copy(update={"chosen": chosen, "fallbacks": []})

    def after(passes: int) -> Candidate:
        row = oom(chosen.nodes, 256, accumulation=passes, stage="train")
        append_record(run.profile / "train-main.jsonl", row)
        return next_candidate(plan, run, max_fallbacks=3)

    assert next_candidate(plan, run, max_fallbacks=3) == chosen
    assert after(4) == chosen.model_copy(update={"accumulation": 8})
    assert after(8).accumulation == 16


def test_the_script_gets_the_number_of_parts() -> None:
    assert in_passes(sweep(*PLACEHOLDER), 8).workload.accumulation == 8
    assert in_passes(sweep(), 8) == sweep()
