from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning_data import SAMPLES, cluster, grid, ok, sweep, times
from tula_hpc.analysis.costs.evaluation import (
    FORWARD_SHARE,
    LEAST_BATCH,
    MOST_EVALUATION_S,
    EvaluationTime,
    evaluated_on,
    evaluation_of,
)
from tula_hpc.analysis.models.profiles import summarize
from tula_hpc.analysis.plan import make_plan
from tula_hpc.config import WorkloadSpec
from tula_hpc.records import EpochMetrics, Event, Measurement, Metrics, Plan

WORKLOAD = WorkloadSpec(dataset="synthetic")
counts = st.integers(1, 512)


def predicted(workers: float, batch: float, evaluation: EvaluationTime | None = None) -> float:
    found = evaluation or evaluation_of(summarize(grid()).profiles, WORKLOAD, SAMPLES)
    return float(found.seconds(np.array([workers]), np.array([batch]))[0])


def epoch(seconds: float | None, *, workers: int = 2, batch: int = 128, number: int = 1) -> EpochMetrics:
    fields: dict[str, Any] = dict.fromkeys(EpochMetrics.model_fields, 0) | {"kind": "epoch", "epoch": number}
    none = dict.fromkeys(("noise_scale", "critical_batch"))
    own = {"evaluation_time_s": seconds, "workers": workers, "global_batch": workers * batch, "complete": True}
    return EpochMetrics.model_validate(fields | none | own)


def planned(epochs: list[EpochMetrics] | None = None, events: list[Event] | None = None, **workload: Any) -> Plan:
    spec = sweep("time", workload={"epochs": 5, "dataset": "synthetic"} | workload)
    metrics = None if epochs is None else Metrics([], epochs, 0)
    return make_plan(spec, cluster(), grid(), metrics=metrics, events=events or [])


def saved(cost_s: float, time: float = 1.0) -> Event:
    return Event(time=time, event="checkpoint", stage="train", data={"cost_s": cost_s, "interval_s": 100.0})


def timed(local_batch: int, forward_s: float, data_s: float = 0.0) -> Measurement:
    """Return a profile with a timed forward pass; forward and backward together take 0.6 s."""
    parts = {"compute_time_s": 0.6, "data_time_s": data_s, "forward_time_s": forward_s}
    return ok(1, local_batch, times=times(1, local_batch, **parts))


def of_rows(*rows: Measurement, workload: WorkloadSpec = WORKLOAD, samples: int = 0) -> EvaluationTime:
    return evaluation_of(summarize(rows).profiles, workload, SAMPLES, samples)


def test_a_forward_pass_over_the_test_set_takes_its_share_of_the_computation() -> None:
    row = ok(1, 128, times=times(1, 128, compute_time_s=0.6, data_time_s=0.0))
    found = evaluation_of(summarize([row]).profiles, WORKLOAD, SAMPLES)
    assert predicted(1, 128, found) == pytest.approx(512 / 128 * 0.6 * FORWARD_SHARE)
    waiting = ok(1, 128, times=times(1, 128, compute_time_s=0.6, data_time_s=0.1))
    with_data = evaluation_of(summarize([waiting]).profiles, WORKLOAD, SAMPLES)
    assert predicted(1, 128, with_data) - predicted(1, 128, found) == pytest.approx(512 / 128 * 0.1)


@given(st.floats(1e-6, 1e6), st.floats(0.0, 10.0), st.booleans())
def test_a_timed_forward_pass_goes_before_the_share(forward_s: float, data_s: float, recomputes: bool) -> None:
    workload = WORKLOAD.model_copy(update={"activation_checkpointing": recomputes})
    found = of_rows(timed(128, forward_s, data_s), workload=workload)
    assert predicted(1, 128, found) == pytest.approx(512 / 128 * (forward_s + data_s))
    assert "timed at profiling" in found.describe()
    assert "is assumed to take" in of_rows(*grid()).describe()


@given(st.integers(1, 64), st.integers(1, 1000), st.integers(1, 1000))
def test_it_takes_as_long_as_each_workers_share_of_the_samples(workers: int, own: int, more: int) -> None:
    found, larger = (of_rows(timed(128, 0.2), samples=workers * count) for count in (own, own + more))
    assert predicted(workers, 128, found) == pytest.approx(own / 128 * 0.2)
    assert predicted(workers, 128, larger) == pytest.approx((own + more) / own * predicted(workers, 128, found))
    assert predicted(workers, 128, of_rows(timed(128, 0.4), samples=workers * own)) == pytest.approx(own / 128 * 0.4)


@given(st.floats(0.0, 1.0), st.floats(1e-5, 0.1), st.floats(64.0, 512.0))
def test_an_affine_forward_pass_is_known_between_the_profiled_batches(fixed: float, each: float, batch: float) -> None:
    found = of_rows(*(timed(profiled, fixed + each * profiled) for profiled in (4, 512)))
    assert predicted(1, batch, found) == pytest.approx(512 / batch * (fixed + each * batch))


def test_a_pass_that_was_not_timed_takes_the_share_that_the_others_measured() -> None:
    untimed = ok(1, 256, times=times(1, 256, compute_time_s=1.0, data_time_s=0.0))
    found = of_rows(timed(64, 0.06), timed(128, 0.12), timed(512, 0.18), untimed)
    assert predicted(1, 256, found) == pytest.approx(512 / 256 * 0.2 * 1.0)


@pytest.mark.parametrize("forward_s", [0.0, -0.1, -1e99, 10 * MOST_EVALUATION_S, 1e99])
def test_a_forward_time_that_cannot_be_true_is_not_used(forward_s: float) -> None:
    found = of_rows(timed(128, forward_s))
    assert predicted(1, 128, found) == pytest.approx(512 / 128 * 0.6 * FORWARD_SHARE)
    assert not found.timed


def test_the_plan_evaluates_as_many_samples_as_the_profiles_counted() -> None:
    rows = [[row.model_copy(update={"test_samples": count}) for row in grid()] for count in (0, 1000, 3000)]
    spec = sweep("time", workload={"epochs": 5, "dataset": "imagefolder", "data_dir": "/"})
    assumed, few, many = (make_plan(spec, cluster(), kept) for kept in rows)
    assert many.chosen.wall_parts_s["evaluation"] == pytest.approx(3 * few.chosen.wall_parts_s["evaluation"], rel=0.01)
    assert any("(assumed)" in note for note in assumed.notes)
    assert any("3,000 test samples;" in note for note in many.notes)


@given(counts, counts, counts)
def test_more_workers_never_evaluate_slower_and_small_batches_are_not_used(few: int, more: int, batch: int) -> None:
    few, more = sorted((few, more))
    assert predicted(more, batch) <= predicted(few, batch) * (1 + 1e-9)
    assert predicted(few, batch) == predicted(few, max(batch, LEAST_BATCH))
    assert 0.0 < predicted(few, 2 * batch) <= predicted(few, batch) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("workload", "samples", "known"),
    [
        ({"dataset": "cifar100", "data_dir": "/"}, 10_000, True),
        ({"dataset": "cifar100", "data_dir": "/", "classes": 20}, 2_000, True),
        ({"dataset": "cifar10", "data_dir": "/", "holdout": 0.2}, 200, True),
        ({"dataset": "cifar10", "data_dir": "/", "classes": 5, "test_samples": 300}, 300, True),
        ({"dataset": "imagefolder", "data_dir": "/", "test_samples": 300}, 300, True),
        ({"dataset": "imagefolder", "data_dir": "/", "test_samples": 300, "holdout": 0.2}, 200, True),
        ({"dataset": "imagefolder", "data_dir": "/"}, 200, False),
    ],
)
def test_the_size_of_the_test_set(workload: dict[str, Any], samples: int, known: bool) -> None:
    assert evaluated_on(WorkloadSpec.model_validate(workload), 800) == (samples, known)


@pytest.mark.parametrize("holdout", [0.0, 0.2])
def test_what_profiles_counted_is_the_size_of_the_test_set(holdout: float) -> None:
    workload = WORKLOAD.model_copy(update={"holdout": holdout})
    assert evaluated_on(workload, 800, 77) == (77, True)


@pytest.mark.parametrize("keys", [{}, {"test_samples": 100}, {"holdout": 0.3}, {"holdout": 0.3, "samples": 200}])
@pytest.mark.parametrize("dataset", ["synthetic", "digits"])
def test_it_is_the_size_of_the_set_that_is_built(dataset: str, keys: dict[str, float]) -> None:
    from tula_hpc.data.datasets import build_data

    spec = WorkloadSpec.model_validate({"dataset": dataset, "image_size": 8, **keys})
    assert len(build_data(spec).test) == spec.test_set_size  # type: ignore[arg-type] # ours have a length


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=5))
def test_measured_evaluations_correct_all_predictions_alike(seconds: list[float]) -> None:
    plain = evaluation_of(summarize(grid()).profiles, WORKLOAD, SAMPLES)
    found = plain.corrected([epoch(None), *(epoch(value) for value in seconds)])
    assert predicted(2, 128, found) == pytest.approx(float(np.median(seconds)))
    factor = predicted(2, 128, found) / predicted(2, 128, plain)
    assert predicted(4, 512, found) == pytest.approx(factor * predicted(4, 512, plain))
    assert found.measured == len(seconds)


def evaluations(**trained: Any) -> dict[str, float]:
    """Return the five predictions for two workers and local batches of 64; nodes of `old` are five times as slow."""
    rows = [
        row.model_copy(update={"partition": name, "times": times(*row.configuration[::2], compute_time_s=compute_s)})
        for name, compute_s in (("old", 0.5), ("new", 0.1))
        for row in grid((1, 2), (64, 128, 512))
    ]
    parts = cluster(partitions=[{"partition": "old"}, {"partition": "new"}])
    plan = make_plan(sweep("time", workload={"epochs": 5, "dataset": "synthetic"}), parts, rows, **trained)
    found = {c.partition: c.wall_parts_s["evaluation"] for c in plan.candidates if c.configuration == (2, 1, 64)}
    assert found["old"] > 4 * found["new"]
    return found


@functools.cache
def evaluations_before_training() -> dict[str, float]:
    return evaluations()


def trained_on(*partitions: str) -> list[Event]:
    return [Event(time=1.0, event="submitted", stage="train", data={"partition": name}) for name in partitions]


@pytest.mark.parametrize(("where", "ratio"), [("old", 1.0), ("new", 3.0)])
def test_all_partitions_are_corrected_by_the_ratio_that_one_of_them_measured(where: str, ratio: float) -> None:
    plain = evaluations_before_training()
    metrics = Metrics([], [epoch(ratio * plain[where] / 5, batch=64)], 0)
    corrected = evaluations(metrics=metrics, events=trained_on(where))
    assert corrected == pytest.approx({name: ratio * seconds for name, seconds in plain.items()})


@pytest.mark.parametrize("events", [[], trained_on("old", "new"), trained_on("elsewhere")])
def test_an_evaluation_measured_in_an_unknown_partition_corrects_none(events: list[Event]) -> None:
    assert evaluations(metrics=Metrics([], [epoch(100.0)], 0), events=events) == evaluations_before_training()


def test_lines_without_a_time_change_nothing() -> None:
    plain = evaluation_of(summarize(grid()).profiles, WORKLOAD, SAMPLES)
    odd = [epoch(value) for value in (None, 0.0, -1.0, math.inf, math.nan)]
    assert plain.corrected([*odd, epoch(1.0, workers=-2, batch=-8)]) is plain


def test_the_parts_of_the_expected_time_add_up_to_it() -> None:
    for candidate in planned().candidates:
        assert sum(candidate.wall_parts_s.values()) == pytest.approx(candidate.wall_time_s)
        assert candidate.wall_parts_s["steps"] == candidate.train_time_s
        evaluations = 5 * predicted(candidate.nodes, candidate.local_batch)
        assert candidate.wall_parts_s["evaluation"] == pytest.approx(evaluations)


SCRIPT = WorkloadSpec.model_validate(
    {"script": "/train.py", "arguments": ["{local_batch}"], "samples": SAMPLES, "epochs": 5},
    context={"check_paths": False},
)


def test_a_scripts_time_between_epochs_is_as_profiles_saw_it() -> None:
    rows = [ok(nodes, 64, between_epochs_s=3.0 + 8.0 / nodes) for nodes in (1, 2, 4)]
    found = of_rows(*rows, workload=SCRIPT)
    assert [predicted(n, 64, found) for n in (1, 2, 8)] == pytest.approx([11.0, 7.0, 4.0])
    assert "as its profiles measured" in found.describe()
    assert predicted(8, 64, of_rows(ok(1, 64, between_epochs_s=2.0), ok(4, 64), workload=SCRIPT)) == 2.0
    # a training whose pauses took half as long
    corrected = found.corrected([epoch(3.5, number=n) for n in (1, 2)])
    assert predicted(1, 64, corrected) == pytest.approx(5.5)


def test_the_plan_says_that_pauses_were_not_seen_until_a_training_has_shown_them() -> None:
    unknown = of_rows(ok(1, 64), workload=SCRIPT)
    assert (predicted(1, 64, unknown), "it is unknown" in unknown.describe()) == (0.0, True)
    known = unknown.corrected([epoch(seconds, number=n) for n, seconds in enumerate((1.0, 4.0, 4.0))])
    assert (predicted(4, 64, known), "3 epochs of its training" in known.describe()) == (4.0, True)
    # the plan uses the same for each kind of nodes
    assert predicted(4, 64, unknown.corrected_as(known)) == 4.0


def test_longer_evaluation_is_paid_for() -> None:
    plain, slow = planned().chosen, planned([epoch(1000.0)]).chosen
    more = slow.wall_parts_s["evaluation"] - plain.wall_parts_s["evaluation"]
    assert more > 1000.0
    assert slow.train_time_s == plain.train_time_s
    assert slow.cost / plain.cost == pytest.approx(slow.wall_time_s / plain.wall_time_s)


def test_a_measured_checkpoint_goes_before_the_stated_one() -> None:
    plain, cheap = planned(), planned(events=[saved(9.0, 1.0), saved(0.001, 2.0)])
    assert cheap.chosen.wall_parts_s["checkpoints"] < plain.chosen.wall_parts_s["checkpoints"]
    assert any("pricing.checkpoint_write_s" in note for note in plain.notes)
    assert any("as a training of this run measured" in note for note in cheap.notes)


@pytest.mark.parametrize("cost_s", [None, "much", math.inf, math.nan, -1.0, 10**400])
def test_an_event_that_says_nothing_of_the_cost_changes_nothing(cost_s: object) -> None:
    event = Event(time=1.0, event="checkpoint", stage="train", data={"cost_s": cost_s})
    assert planned(events=[event]).chosen == planned().chosen


def test_where_nothing_is_preempted_nothing_is_repeated_however_short_the_training() -> None:
    """Work shorter than an interval must not be charged for a whole checkpoint."""
    prices = {"basis": "spot", "usd_per_node_hour": 1.0, "preemption_hours": 1e6, "checkpoint_write_s": 5.0}
    spec = sweep("time", workload={"epochs": 1})
    for candidate in make_plan(spec, cluster(pricing=prices), grid()).candidates:
        assert candidate.checkpoint_minutes is not None
        assert candidate.train_time_s < 60 * candidate.checkpoint_minutes
        assert candidate.wall_parts_s["repeated"] == pytest.approx(0.0, abs=0.01)
