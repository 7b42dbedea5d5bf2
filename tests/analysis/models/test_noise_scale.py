"""The gradient noise scale, compared with problems whose G and Σ are known, and with published traces."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from tests.known import known
from tula_hpc.analysis.models.critical_batch import critical_batch
from tula_hpc.gradients.noise_scale import NoiseScale, gradient_square, noise_scale, noise_trace
from tula_hpc.optim import TulaOptimizer
from tula_hpc.records import Configuration, Measurement, Metrics, StepMetrics

Array = NDArray[np.float64]
FEATURES, NOISE = 20, 3.0
TRACES = Path(os.environ.get("TULA_SHARED_DATA", Path(__file__).parents[4] / "shared" / "data")) / "traces"


class Regression:
    """Linear regression y = x·w* + ε with x ~ N(0, 1) and ε ~ N(0, σ²), loss (x·w − y)²/2.

    With d = w − w*: G = d and, by the fourth moments of the normal distribution, tr(Σ) = (p + 1)|d|² + σ²p.
    """

    def __init__(self, distance: float, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        direction = torch.randn(FEATURES, generator=self.generator, dtype=torch.float64)
        self.offset = distance * direction / direction.norm()
        self.square = distance**2
        self.trace = (FEATURES + 1) * distance**2 + NOISE**2 * FEATURES

    def gradients(self, draws: int, samples: int) -> Tensor:
        """Return per-sample gradients (draws, samples, p)."""
        x = torch.randn(draws, samples, FEATURES, generator=self.generator, dtype=torch.float64)
        residual = x @ self.offset - NOISE * torch.randn(draws, samples, generator=self.generator, dtype=torch.float64)
        found: Tensor = x * residual[..., None]
        return found


@pytest.mark.parametrize("distance", [0.5, 3.0])
@pytest.mark.parametrize("nested", [True, False], ids=["part of the large batch", "a batch of its own"])
def test_both_estimates_are_unbiased(distance: float, nested: bool) -> None:
    problem, draws, small, large = Regression(distance), 4000, 4, 32
    batches = problem.gradients(draws, large)
    parts = batches[:, :small] if nested else problem.gradients(draws, small)
    norms = [g.mean(1).square().sum(1) for g in (parts, batches)]
    for estimate, truth in (
        (gradient_square(norms[0], norms[1], small, large), problem.square),
        (noise_trace(norms[0], norms[1], small, large), problem.trace),
    ):
        error = float(estimate.mean()) - truth
        # four standard errors
        assert abs(error) < 4 * float(estimate.std()) / math.sqrt(draws)
        assert float(estimate.std()) / math.sqrt(draws) < 0.05 * problem.trace


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.integers(1, 100), st.integers(2, 50))
def test_expected_norms_give_back_what_they_came_from(square: float, trace: float, small: int, times: int) -> None:
    large = small * times
    norms = (square + trace / small, square + trace / large, small, large)
    found = noise_trace(*norms) / gradient_square(*norms)
    assert math.isclose(found, trace / square, rel_tol=1e-6, abs_tol=1e-6 * trace / square)


@given(st.floats(1e-3, 1e3), st.floats(1.01, 10))
def test_the_scale_has_no_unit_of_the_loss(factor: float, ratio: float) -> None:
    """If the loss is multiplied by c, both |G|² and tr(Σ) are multiplied by c²."""
    plain, scaled = ((ratio * c, c) for c in (1.0, factor))
    scales = [noise_scale(gradient_square(*n, 1, 16), noise_trace(*n, 1, 16)) for n in (plain, scaled)]
    assert scales[0] == pytest.approx(scales[1], rel=1e-9, nan_ok=True)


def follow(noise: NoiseScale, batches: Tensor, small: int = 4) -> None:
    """Pass pairs of batches (pairs, large, p) to `noise`; the small batch of a pair is a part of the large one."""
    for batch in batches:
        norms = [batch[:count].mean(0).square().sum() for count in (small, len(batch))]
        noise.observe(norms[0], norms[1], small, len(batch))


def test_smoothing_apart_comes_near_the_truth_where_single_ratios_do_not() -> None:
    truth = Regression(3.0).trace / 3.0**2
    singles, smoothed = [], []
    for seed in range(40):
        noise, batches = NoiseScale(), Regression(3.0, seed).gradients(20, 32)
        follow(noise, batches)
        smoothed.append(noise.read().noise_scale)
        follow(noise, batches[:1])
        reading = noise.read()
        singles.append(noise_scale(reading.recent_square, reading.recent_trace))
    assert np.nanmedian(smoothed) == pytest.approx(truth, rel=0.25)
    misses = [np.nansum(np.abs(np.log(np.array(values) / truth)) > np.log(3)) for values in (singles, smoothed)]
    assert misses[0] + np.isnan(singles).sum() > 10
    assert misses[1] + np.isnan(smoothed).sum() < 6


def test_a_reading_starts_the_recent_means_anew_and_not_the_averages() -> None:
    noise = NoiseScale()
    assert all(math.isnan(value) for value in noise.read())
    follow(noise, Regression(3.0).gradients(10, 32))
    first, second = noise.read(), noise.read()
    assert first.noise_scale == second.noise_scale
    assert math.isnan(second.recent_square)
    assert first.recent_trace > 0


def test_state_goes_on_where_it_stopped() -> None:
    whole, cut, resumed = NoiseScale(), NoiseScale(), NoiseScale()
    batches = Regression(1.0).gradients(20, 32)
    follow(whole, batches)
    follow(cut, batches[:10])
    resumed.load_state_dict(cut.state_dict(), torch.device("cpu"))
    # what was saved must be a copy, which this does not change
    follow(cut, Regression(9.0).gradients(5, 32))
    follow(resumed, batches[10:])
    assert whole.read() == resumed.read()


def test_an_overflow_and_equal_batches_are_passed_over() -> None:
    noise = NoiseScale()
    follow(noise, Regression(3.0).gradients(5, 32))
    before = noise.read().noise_scale
    noise.observe(torch.tensor(math.inf), torch.tensor(1.0), 4, 32)
    noise.observe(torch.tensor(2.0), torch.tensor(1.0), 32, 32)
    assert noise.read().noise_scale == before


def test_the_optimizer_learns_it_from_the_scales_own_gradients_and_saves_it() -> None:
    problem = Regression(3.0)
    parameter = nn.Parameter(torch.zeros(FEATURES, dtype=torch.float64))
    optimizer, other = (
        TulaOptimizer(torch.optim.SGD([parameter], lr=0.1), small_batch=4, large_batch=32) for _ in range(2)
    )
    batches, alone = problem.gradients(20, 32), NoiseScale()
    for batch in batches:
        optimizer.update_gradscale([batch[:4].mean(0)], [batch.mean(0)])
    follow(alone, batches)
    other.load_state_dict(optimizer.state_dict())
    reading = optimizer.noise()
    assert reading == pytest.approx(alone.read())
    assert other.noise() == reading


# analysis/models/critical_batch.py


def profiled(problem: Regression, passes: int, small: int = 16, large: int = 64) -> Measurement:
    norms = [
        (*(float(g[:count].mean(0).square().sum()) for count in (small, large)), small, large)
        for g in problem.gradients(passes, large)
    ]
    terms = tuple((gradient_square(*each), noise_trace(*each)) for each in norms)
    place = Configuration(1, 1, large)._asdict()
    return Measurement(status="ok", noise_terms=terms, noise_samples=passes * large, noise_scale=1.0, **place)


def trained(problem: Regression, updates: int, since: int = 0) -> list[StepMetrics]:
    terms = profiled(problem, updates).noise_terms
    return [
        StepMetrics(
            step=since + index, samples_seen=64 * (since + index), epoch=0.1, loss=1.0, lr=0.1, step_time_s=1.0,
            noise_gradient_square=square, noise_trace=trace,
        )
        for index, (square, trace) in enumerate(terms)
    ]  # fmt: skip


def test_the_critical_batch_of_profiles_is_near_the_truth() -> None:
    batches = []
    inside = 0
    truth = Regression(3.0).trace / Regression(3.0).square
    for seed in range(30):
        problem = Regression(3.0, seed=seed)
        found = known(critical_batch([profiled(problem, 20) for _ in range(3)]))
        assert found.source == "profile"
        batches.append(found.batch)
        low, high = found.interval_90
        inside += low <= truth <= high
    assert np.median(batches) == pytest.approx(truth, rel=0.15)
    # of 30 intervals at 90 %, fewer than these or all 30 are rare
    assert 24 <= inside <= 30


def test_training_counts_before_profiles_and_its_later_half_alone() -> None:
    early, late = Regression(30.0), Regression(1.5)
    steps = [*trained(early, 200), *trained(late, 200, since=200)]
    found = known(critical_batch([profiled(early, 30)], Metrics(steps, [], 0)))
    assert found.source == "training"
    assert found.batch == pytest.approx(late.trace / late.square, rel=0.5)
    assert found.batch > 3 * early.trace / early.square


def test_too_few_data_or_noise_alone_give_no_critical_batch() -> None:
    assert critical_batch([]) is None
    assert critical_batch([profiled(Regression(3.0), 2)]) is None
    assert critical_batch([Measurement(status="ok", **Configuration(1, 1, 8)._asdict())]) is None
    hidden = Measurement(
        status="ok", noise_terms=((-1.0, 5.0),) * 9, noise_samples=9, **Configuration(1, 1, 8)._asdict()
    )
    assert critical_batch([hidden], Metrics([], [], 0)) is None


# published measurements: |G|² and tr(Σ) (of a batch of the workload's least size) over training at several batches


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"needs the public traces in {TRACES}")
@pytest.mark.parametrize(("workload", "batches"), [("imagenet", (1600, 3200, 6400, 12800)), ("yolov3", (32, 64, 128))])
def test_the_noise_scale_at_equal_progress_hardly_depends_on_the_batch(workload: str, batches: tuple[int, ...]) -> None:
    columns = [_trace(TRACES / workload / f"validation-{batch}.csv") for batch in batches]
    progress = np.linspace(0.1, 0.8, 50) * columns[0][0][-1]
    squares, traces = (np.array([np.interp(progress, c[0], c[which]) for c in columns]) for which in (1, 2))
    assert np.median(traces.max(axis=0) / traces.min(axis=0)) < 1.5
    scales = traces / squares
    assert np.median(scales.max(axis=0) / scales.min(axis=0)) < 2.5
    # the noise scale grows during training
    assert np.median(scales[:, -10:]) > 2 * np.median(scales[:, :10])


def _trace(path: Path) -> tuple[Array, Array, Array]:
    with path.open() as file:
        rows = [[float(row[name]) for name in ("progress", "grad_sqr", "grad_var")] for row in csv.DictReader(file)]
    progress, squares, traces = np.array(rows).T
    return progress, squares, traces
