from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tula_hpc.analysis.performance import FORMS, FormName, StepTimeModel
from tula_hpc.analysis.regression import Array

NODES, BATCH = (column.ravel() for column in np.meshgrid([1.0, 2.0, 4.0, 8.0], [8.0, 32.0, 128.0, 512.0]))
FORM_NAMES: list[FormName] = ["ring", "tree", "parameter_server", "reduce_scatter_all_gather"]
laws = settings(max_examples=15, deadline=None)


class Truth(NamedTuple):
    fixed: float = 0.02
    per_sample: float = 0.001
    sync: float = 0.2
    latency: float = 0.0
    overlap: float = 0.0

    def compute(self, batch: Array) -> Array:
        return self.fixed + self.per_sample * batch

    def allreduce(self, form: str, workers: Array) -> Array:
        latency = FORMS[form].latency
        messages = np.zeros_like(workers) if latency is None else latency(workers)
        return self.sync * FORMS[form].bandwidth(workers) + self.latency * messages

    def step(self, form: str, workers: Array, batch: Array) -> Array:
        hidden = self.overlap * self.compute(batch)
        exposed: Array = np.where(workers > 1, np.maximum(self.allreduce(form, workers) - hidden, 0.0), 0.0)
        return self.compute(batch) + exposed


truths = st.builds(
    Truth,
    fixed=st.floats(0.001, 0.1),
    per_sample=st.floats(1e-4, 1e-2),
    sync=st.floats(0.05, 2.0),
    latency=st.floats(0.0, 0.05),
    overlap=st.just(0.0),
)


def error(model: StepTimeModel, nodes: Array, batch: Array, seconds: Array) -> float:
    return float(np.median(np.abs(model.predict(nodes, batch) / seconds - 1)))


@laws
@given(truth=truths, form=st.sampled_from(FORM_NAMES))
def test_coefficients_of_an_exact_law_are_recovered(truth: Truth, form: FormName) -> None:
    model = StepTimeModel(form).fit(NODES, BATCH, truth.step(form, NODES, BATCH))
    np.testing.assert_allclose(model.predict(NODES, BATCH), truth.step(form, NODES, BATCH), rtol=1e-4)
    assert model.parameters_["compute_per_sample_s"] == pytest.approx(truth.per_sample, rel=1e-2)
    assert model.parameters_["sync_s"] == pytest.approx(truth.sync, rel=0.05)
    if FORMS[form].latency is not None:
        assert model.parameters_["latency_s"] == pytest.approx(truth.latency, rel=0.05, abs=1e-3 * truth.sync)


def test_the_overlap_of_an_exact_law_is_recovered() -> None:
    truth = Truth(sync=0.4, overlap=0.6)
    model = StepTimeModel("ring").fit(NODES, BATCH, truth.step("ring", NODES, BATCH))
    assert model.parameters_["overlap_share"] == pytest.approx(0.6, abs=0.01)
    np.testing.assert_allclose(model.predict(NODES, BATCH), truth.step("ring", NODES, BATCH), rtol=1e-3)


@laws
@given(truth=truths, form=st.sampled_from(FORM_NAMES), seed=st.integers(0, 1000))
def test_a_step_grows_with_the_batch_and_is_never_negative(truth: Truth, form: FormName, seed: int) -> None:
    noise = np.random.default_rng(seed).lognormal(0, 0.3, NODES.shape)
    model = StepTimeModel(form).fit(NODES, BATCH, truth.step(form, NODES, BATCH) * noise)
    batches = np.arange(1.0, 2000.0)
    for nodes in (1, 2, 3, 16):
        predicted = model.predict(nodes, batches)
        assert np.all(np.diff(predicted) >= -1e-12)
        assert np.all(predicted > 0)
    assert min(model.parameters_.values()) >= 0
    assert model.parameters_["overlap_share"] <= 1


@pytest.mark.parametrize("form", FORM_NAMES)
def test_synchronization_is_nothing_for_one_worker_and_grows_with_more(form: str) -> None:
    workers = np.arange(1.0, 100.0)
    time = Truth(latency=0.01).allreduce(form, workers)
    assert time[0] == 0
    assert np.all(np.diff(time) > 0)


def test_the_ring_is_never_slower_than_the_parameter_server() -> None:
    workers, batches = np.meshgrid(np.arange(1.0, 65.0), [1.0, 32.0, 512.0])
    ring = StepTimeModel("ring").fit(NODES, BATCH, Truth().step("ring", NODES, BATCH))
    server = StepTimeModel("parameter_server").fit(NODES, BATCH, Truth().step("parameter_server", NODES, BATCH))
    assert np.all(ring.predict(workers, batches) <= server.predict(workers, batches) * (1 + 1e-6))


def test_workers_count_wherever_they_are() -> None:
    steps = Truth().step("ring", NODES, BATCH)
    model = StepTimeModel("ring").fit(NODES, BATCH, steps)
    assert model.predict(2, 32, workers_per_node=4) == pytest.approx(model.predict(8, 32))
    spread = StepTimeModel("ring").fit(np.maximum(NODES / 2, 1), BATCH, steps, workers_per_node=np.minimum(NODES, 2))
    assert spread.parameters_ == model.parameters_


@settings(max_examples=5, deadline=None)
@given(order=st.permutations(range(len(NODES))))
def test_the_order_of_the_records_does_not_matter(order: list[int]) -> None:
    noisy = Truth().step("ring", NODES, BATCH) * np.random.default_rng(0).lognormal(0, 0.1, NODES.shape)
    there = StepTimeModel().fit(NODES, BATCH, noisy)
    again = StepTimeModel().fit(NODES[order], BATCH[order], noisy[order])
    assert again.parameters_ == there.parameters_
    assert again.form_ == there.form_


def test_one_disturbed_measurement_does_not_drag_the_model_along() -> None:
    steps = Truth().step("ring", NODES, BATCH)
    disturbed = steps.copy()
    disturbed[5] *= 8
    assert error(StepTimeModel("ring").fit(NODES, BATCH, disturbed), NODES, BATCH, steps) < 0.02


def test_four_corners_with_parts_measured_apart_identify_the_model() -> None:
    truth = Truth()
    corners = np.isin(NODES, [1, 8]) & np.isin(BATCH, [8, 512])
    nodes, batch = NODES[corners], BATCH[corners]
    model = StepTimeModel().fit(
        nodes,
        batch,
        truth.step("ring", nodes, batch),
        compute_time_s=truth.compute(batch),
        allreduce_time_s=truth.allreduce("ring", nodes),
    )
    assert model.pinned_ == ["latency_s"]
    np.testing.assert_allclose(model.predict(NODES, BATCH), truth.step("ring", NODES, BATCH), rtol=1e-3)


def test_parts_measured_apart_replace_missing_cluster_sizes() -> None:
    truth, nodes, batch = Truth(), np.array([4.0, 4.0]), np.array([8.0, 512.0])
    steps = truth.step("ring", nodes, batch)
    alone = StepTimeModel().fit(nodes, batch, steps)
    assert "sync_s" in alone.pinned_
    apart = StepTimeModel().fit(nodes, batch, steps, compute_time_s=truth.compute(batch))
    assert "sync_s" not in apart.pinned_
    assert apart.parameters_["sync_s"] == pytest.approx(truth.sync, rel=0.01)


@pytest.mark.parametrize(
    ("nodes", "batch", "pinned"),
    [
        ([1], [32], {"compute_fixed_s", "sync_s", "latency_s", "overlap_share"}),
        ([1, 1], [32, 64], {"sync_s", "latency_s", "overlap_share"}),
        ([1, 1, 4], [32, 64, 32], {"latency_s", "overlap_share"}),
        ([2, 2, 4, 4], [32, 64, 32, 64], {"latency_s", "overlap_share"}),
        ([1, 1, 4, 4], [32, 64, 32, 64], {"latency_s"}),
        ([1, 1, 2, 2, 4, 4], [32, 64, 32, 64, 32, 64], set()),
    ],
)
def test_what_the_data_cannot_tell_is_pinned_and_named(nodes: list[int], batch: list[int], pinned: set[str]) -> None:
    steps = Truth().step("ring", np.array(nodes, dtype=float), np.array(batch, dtype=float))
    model = StepTimeModel("ring").fit(nodes, batch, steps)
    assert set(model.pinned_) == pinned
    assert all(model.parameters_[name] == 0 for name in pinned)
    np.testing.assert_allclose(model.predict(nodes, batch), steps, rtol=1e-4)


@pytest.mark.parametrize("form", FORM_NAMES)
def test_auto_finds_the_collective(form: FormName) -> None:
    truth = Truth(sync=0.3)
    noise = np.random.default_rng(1).lognormal(0, 0.005, NODES.shape)
    model = StepTimeModel("auto").fit(NODES, BATCH, truth.step(form, NODES, BATCH) * noise)
    same_without_latency = {"ring", "reduce_scatter_all_gather"}
    assert model.form_ == ("ring" if form in same_without_latency else form)


def test_auto_takes_the_ring_where_two_numbers_of_workers_say_nothing() -> None:
    few = np.isin(NODES, [1, 8])
    steps = Truth().step("parameter_server", NODES[few], BATCH[few])
    assert StepTimeModel("auto").fit(NODES[few], BATCH[few], steps).form_ == "ring"


def test_the_interval_holds_new_measurements_as_often_as_it_says() -> None:
    random = np.random.default_rng(7)
    truth = Truth().step("ring", NODES, BATCH)
    inside = []
    for _ in range(30):
        model = StepTimeModel("ring").fit(NODES, BATCH, truth * random.lognormal(0, 0.05, NODES.shape))
        low, high = model.interval(NODES, BATCH, level=0.9)
        new = truth * random.lognormal(0, 0.05, NODES.shape)
        inside.append(np.mean((low <= new) & (new <= high)))
    assert 0.86 <= np.mean(inside) <= 0.98


def test_intervals_are_wider_for_few_data_far_points_and_high_levels() -> None:
    noisy = Truth().step("ring", NODES, BATCH) * np.random.default_rng(3).lognormal(0, 0.05, NODES.shape)

    def width(model: StepTimeModel, batch: float = 64.0, level: float = 0.9) -> float:
        low, high = model.interval(4, batch, level=level)
        assert low < model.predict(4, batch) < high
        return float(np.log(high / low))

    full = StepTimeModel("ring").fit(NODES, BATCH, noisy)
    corners = np.isin(NODES, [1, 8]) & np.isin(BATCH, [8, 512])
    assert width(StepTimeModel("ring").fit(NODES[corners], BATCH[corners], noisy[corners])) > width(full)
    assert width(full, level=0.99) > width(full, level=0.9) > width(full, level=0.5)
    small = StepTimeModel("ring").fit(NODES[BATCH < 100], BATCH[BATCH < 100], noisy[BATCH < 100])
    assert width(small, batch=5000.0) > width(small, batch=32.0)


def test_shapes_follow_the_arguments() -> None:
    model = StepTimeModel().fit(NODES, BATCH, Truth().step("ring", NODES, BATCH))
    assert model.predict(2, 32).shape == ()
    assert model.predict([[1], [2]], [8, 16, 32]).shape == (2, 3)
    low, high = model.interval([[1], [2]], [8, 16, 32])
    assert low.shape == high.shape == (2, 3)
    assert model.predict(np.full(1_000_000, 4), np.linspace(1, 4096, 1_000_000)).shape == (1_000_000,)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="form: 'star' is not one of: auto, ring"):
        StepTimeModel("star")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="step_time_s: expected positive"):
        StepTimeModel().fit([1, 2], [8, 8], [0.1, -0.1])
    with pytest.raises(ValueError, match="nodes: expected at least one"):
        StepTimeModel().fit([], [], [])
    model = StepTimeModel().fit([1, 2], [8, 16], [0.1, 0.2])
    with pytest.raises(ValueError, match="nodes: expected positive"):
        model.predict(0, 8)
    with pytest.raises(ValueError, match="level"):
        model.interval(1, 8, level=1.0)


def test_a_small_model_on_a_cpu_cluster_is_predicted_from_its_corners() -> None:
    """Seconds of a 4.3 M-parameter network over gloo and 1 Gbit/s, with the bare all-reduce measured apart."""
    nodes, batch = np.repeat([1.0, 2.0, 4.0], 4), np.tile([8.0, 16.0, 32.0, 64.0], 3)
    alone = np.array([0.042, 0.052, 0.069, 0.126])
    steps = np.concatenate([alone, [0.186, 0.200, 0.216, 0.256], [0.274, 0.282, 0.304, 0.344]])
    compute, allreduce = np.tile(alone, 3), np.repeat([0.0, 0.144, 0.218], 4)

    def fit(rows: list[int]) -> StepTimeModel:
        apart = {"compute_time_s": compute[rows], "allreduce_time_s": allreduce[rows]}
        return StepTimeModel().fit(nodes[rows], batch[rows], steps[rows], **apart)

    corners = [0, 3, 8, 11]
    others = np.setdiff1d(np.arange(12), corners)
    assert error(fit(list(range(12))), nodes, batch, steps) < 0.02
    assert error(fit(corners), nodes[others], batch[others], steps[others]) < 0.06


# Median relative error of the plain sum over these traces, all points and from the corners alone.
KNOWN_ERRORS = {
    "imagenet": (0.094, 0.148),
    "cifar10": (0.095, 0.188),
    "yolov3": (0.110, 0.234),
    "deepspeech2": (0.072, 0.194),
    "bert": (0.052, 0.174),
    "ncf": (0.129, 0.257),
}


def traces(workload: str) -> Array:
    """Rows of nodes, local batch and step time with one GPU a node, on two nodes or more."""
    root = Path(os.environ.get("TULA_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))
    folder = root / "traces" / workload
    if not folder.is_dir():
        pytest.skip(f"no step-time traces in {folder.parent}; set TULA_SHARED_DATA to the folder that holds them")
    with (folder / "placements.csv").open() as file:
        placed = [row for row in csv.DictReader(file) if set(row["placement"]) == {"1"}]
    with (folder / "scalability.csv").open() as file:
        scaled = [row for row in csv.DictReader(file) if row["num_nodes"] == row["num_replicas"]]
    nodes = [len(row["placement"]) for row in placed] + [int(row["num_nodes"]) for row in scaled]
    rows = [
        (n, float(row["local_bsz"]), float(row["step_time"])) for n, row in zip(nodes, placed + scaled, strict=True)
    ]
    return np.array([row for row in rows if row[0] > 1])


def corners_of(rows: Array) -> list[int]:
    found = []
    for nodes in (rows[:, 0].min(), rows[:, 0].max()):
        of_size = np.flatnonzero(rows[:, 0] == nodes)
        found += [of_size[rows[of_size, 1].argmin()], of_size[rows[of_size, 1].argmax()]]
    return found


@pytest.mark.parametrize("workload", KNOWN_ERRORS)
def test_recorded_steps_of_a_gpu_cluster_are_predicted_better_than_by_the_plain_sum(workload: str) -> None:
    rows = traces(workload)
    corners = corners_of(rows)
    others = np.delete(rows, corners, axis=0)
    full = StepTimeModel().fit(rows[:, 0], rows[:, 1], rows[:, 2])
    few = StepTimeModel().fit(rows[corners, 0], rows[corners, 1], rows[corners, 2])
    known_full, known_corners = KNOWN_ERRORS[workload]
    assert error(full, rows[:, 0], rows[:, 1], rows[:, 2]) < known_full
    assert error(few, others[:, 0], others[:, 1], others[:, 2]) < known_corners
    for model, points in ((full, rows), (few, others)):
        low, high = model.interval(points[:, 0], points[:, 1])
        assert np.mean((low <= points[:, 2]) & (points[:, 2] <= high)) > 0.8
