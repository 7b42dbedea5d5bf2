from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.table_factory import Row, hyperbola, rows_of, table_of
from tula_hpc.analysis.models.regression import Array
from tula_hpc.analysis.planning.knee import (
    Envelope,
    Lines,
    TimeCurves,
    TrainTime,
    doubling_knees,
    knee_of,
    kneedle_knees,
    knees,
    lines_of,
    lower_envelope,
)

laws = settings(max_examples=15)
POWERS = [2**k for k in range(5, 13)]


def envelope(rows: list[Row], law: TrainTime) -> Envelope:
    return lower_envelope(lines_of(table_of(rows)), law)


def curve(times: Array, octaves: float = 7.0) -> Envelope:
    """Return an envelope over batches from 32 on, in equal ratios."""
    return Envelope(32 * 2.0 ** np.linspace(0, octaves, len(times)), times, round((len(times) - 1) / octaves))


BATCHES = 32 * 2.0 ** np.linspace(0, 7, 449)


@laws
# at 64, which the first doubling reaches, rounding decides
@given(st.floats(0.001, 100.0), st.floats(40.0, 63.9) | st.floats(64.1, 4000.0))
def test_a_doubling_saves_a_fifth_up_to_three_times_the_fixed_cost_over_that_of_a_sample(
    fixed: float, knee: float
) -> None:
    """For T = α/B + β, T(B) = 0.8 T(B/2) holds at B = 3 α/β."""
    times = fixed / BATCHES + 3 * fixed / knee
    found = float(doubling_knees(curve(times)))
    assert found == pytest.approx(knee if knee > 64 else 32, rel=0.02)


@laws
@given(st.floats(0.001, 100.0), st.floats(0.0, 1.0), st.integers(4, 10))
def test_kneedles_knee_of_a_hyperbola_is_the_geometric_mean_of_its_ends(
    fixed: float, share: float, octaves: int
) -> None:
    """On axes normalized to its ends, T = α/B + β has slope −1 exactly where B² = B_min · B_max."""
    batches = np.geomspace(32, 32 * 2**octaves, 3001)
    knee = float(kneedle_knees(Envelope(batches, fixed / batches + share * fixed / 4096, 1)))
    assert knee == pytest.approx(32 * 2 ** (octaves / 2), rel=0.01)


@laws
@example([(4.0, 0.0078125), (4.0625, 0.003433), (4.96875, 0.00028934)], 8)
@given(st.lists(st.tuples(st.floats(0.01, 10), st.floats(1e-5, 1e-2)), min_size=1, max_size=4), st.integers(3, 9))
def test_it_is_the_knee_that_kneed_finds(steps: list[tuple[float, float]], octaves: int) -> None:
    """Envelopes of several cluster sizes have several knees; ours is the sharpest one that kneed finds."""
    from kneed import KneeLocator

    batches = np.geomspace(32, 32 * 2**octaves, 1001)
    each = [(fixed + slope * batches / 2**k) / batches for k, (fixed, slope) in enumerate(steps)]
    times = np.minimum.accumulate(np.min(each, axis=0))
    mine = float(kneedle_knees(Envelope(batches, times, 1)))
    theirs = KneeLocator(batches, times, curve="convex", direction="decreasing", online=True).all_knees
    if np.isnan(mine):
        return
    along = (batches - batches[0]) / (batches[-1] - batches[0])
    bend = 1 - along - (times - times[-1]) / (times[0] - times[-1])
    of_mine, *of_theirs = (float(bend[np.searchsorted(batches, knee)]) for knee in (mine, *theirs))
    # between two nearly equal knees, kneed may not see the end of the first: its threshold is a step of the batches
    assert max(of_theirs) == pytest.approx(of_mine, abs=1.5 / len(batches))


@pytest.mark.parametrize("kind", ["knee", "kneedle"])
def test_many_curves_give_what_each_gives(kind: str) -> None:
    many = np.stack([1 / BATCHES + share for share in (0.0, 0.001)] + [np.full_like(BATCHES, 2.0)])
    together = knees(kind, Envelope(BATCHES, many, 64))
    each = [float(knees(kind, Envelope(BATCHES, times, 64))) for times in many]
    np.testing.assert_array_equal(together, each)


@pytest.mark.parametrize(
    "times",
    [
        np.full(100, 5.0),
        np.linspace(1.0, 5.0, 100),
        np.linspace(5.0, 1.0, 100),
        5.0 - np.linspace(0.0, 2.0, 100) ** 2,
        np.linspace(1.03, 1.0, 100) ** 2,
    ],
    ids=["flat", "rising", "straight", "concave", "nearly flat"],
)
def test_a_curve_that_does_not_bend_has_no_knee_of_kneedle(times: Array) -> None:
    assert np.isnan(kneedle_knees(Envelope(np.linspace(32, 4096, 100), np.minimum.accumulate(times), 1)))


def test_the_envelope_takes_the_fastest_cluster_size_at_every_batch_and_never_rises() -> None:
    law = hyperbola(1.0, 0.01)
    batches, times, _ = envelope([*rows_of(law, 1, [32, 1024]), *rows_of(law, 4, [8, 64])], law)
    assert (batches[0], batches[-1]) == (pytest.approx(32), pytest.approx(1024))
    assert np.all(np.diff(times) <= 0)
    one, four = (law(0, np.full_like(batches, n), np.ones_like(batches), batches / n) for n in (1.0, 4.0))
    inside = batches <= 4 * 64
    np.testing.assert_allclose(times[inside], np.minimum(one, four)[inside])
    assert np.all(times <= one + 1e-12)


def test_in_a_gap_between_the_sizes_the_smaller_batch_has_to_do() -> None:
    law = hyperbola(1.0)
    batches, times, _ = envelope([*rows_of(law, 1, [32, 64]), *rows_of(law, 4, [256, 512])], law)
    np.testing.assert_allclose(times[(batches > 65) & (batches < 1023)], 1 / 64)


@laws
@given(st.floats(0.01, 10.0), st.floats(1e-4, 1e-2), st.integers(8, 12))
def test_a_longer_curve_begins_with_the_shorter_one(fixed: float, slope: float, octaves: int) -> None:
    law = hyperbola(fixed, slope)
    short, long = (envelope(rows_of(law, 1, [32, 32 * 2**k]), law) for k in (octaves - 1, octaves))
    count = len(short.global_batch)
    np.testing.assert_array_equal(long.global_batch[:count], short.global_batch)
    np.testing.assert_allclose(long.train_time_s[:count], short.train_time_s)


def test_each_kind_of_nodes_follows_its_own_law() -> None:
    def law(part: int, nodes: Array, workers: Array, batch: Array) -> Array:
        return hyperbola(1.0 if part == 0 else 0.1)(0, nodes, workers, batch)

    lines = Lines(*np.array([[0.0, 1.0], [1.0, 1.0], [1.0, 1.0], [32.0, 64.0], [512.0, 256.0]]))
    batches, times, _ = lower_envelope(lines, law)
    before, after = batches < 63, batches > 65
    np.testing.assert_allclose(times[before], 1.0 / batches[before])
    np.testing.assert_allclose(times[after], np.maximum(0.1 / batches[after], 0.1 / 256), rtol=0.02)


def drawn(spread: float) -> TrainTime:
    """Return hyperbolas whose computation differs between draws."""
    slopes = 0.002 * np.exp(spread * np.random.default_rng(0).standard_normal(200))

    def train_time_s(_: int, nodes: Array, workers: Array, batch: Array) -> Array:
        world = nodes * workers
        return (0.05 + slopes[:, None] * batch + 0.1 * (1 - 1 / world)) / (world * batch)

    return train_time_s


@pytest.mark.parametrize("kind", ["knee", "kneedle"])
def test_the_interval_holds_the_knee_and_grows_with_the_uncertainty(kind: str) -> None:
    sure, unsure, nominal = drawn(0.01), drawn(0.5), drawn(0.0)
    law: TrainTime = lambda *args: nominal(*args)[0]  # noqa: E731 - the first of equal curves
    feasible = table_of([row for nodes in (1, 2, 4) for row in rows_of(law, nodes, POWERS)])
    lines = lines_of(feasible)
    narrow, wide = (knee_of(kind, TimeCurves(lines, law, draws)) for draws in (sure, unsure))
    assert narrow.global_batch is not None
    assert narrow.global_batch == wide.global_batch
    assert narrow.interval_90 is not None
    assert wide.interval_90 is not None
    low, high = narrow.interval_90
    assert narrow.global_batch == pytest.approx((low + high) / 2, rel=0.1)
    assert wide.interval_90[1] - wide.interval_90[0] > high - low
    assert knee_of(kind, TimeCurves(lines, law, unsure)) == wide


def test_an_interval_that_ends_with_the_curve_says_so() -> None:
    sure, unsure, nominal = drawn(0.01), drawn(0.5), drawn(0.0)
    law: TrainTime = lambda *args: nominal(*args)[0]  # noqa: E731 - the first of equal curves
    knees = []
    for largest, draws in ((4096, sure), (128, unsure)):
        lines = lines_of(table_of(rows_of(law, 1, [batch for batch in POWERS if batch <= largest])))
        knees.append(knee_of("knee", TimeCurves(lines, law, draws)))
    assert [knee.is_cut for knee in knees] == [False, True]
    assert knees[1].between.endswith(" and 128, where the curve ends,")


@pytest.mark.parametrize("kind", ["knee", "kneedle"])
@pytest.mark.parametrize("sync_s", [0.0, 0.05, 0.4])
def test_the_interval_holds_the_knee_where_all_draws_lie_on_one_side_of_it(sync_s: float, kind: str) -> None:
    """This happens where a coefficient is fitted at its bound, at which the drawn ones are clipped."""

    def law(extra_s: Array) -> TrainTime:
        def train_time_s(_: int, nodes: Array, workers: Array, batch: Array) -> Array:
            world = nodes * workers
            return (0.05 + 0.002 * batch + extra_s * (1 - 1 / world)) / (world * batch)

        return train_time_s

    feasible = table_of([row for nodes in (1, 2, 4) for row in rows_of(law(np.array(0.0)), nodes, POWERS)])
    draws = law(sync_s * np.linspace(1.0, 2.0, 200)[:, None])
    for at_bound in (0.0, 3.0 * sync_s):
        knee = knee_of(kind, TimeCurves(lines_of(feasible), law(np.array(at_bound)), draws))
        assert knee.global_batch is not None
        assert knee.interval_90 is not None
        low, high = knee.interval_90
        assert 32 <= low <= knee.global_batch <= high <= 4 * 4096
        # the drawn curves have a step between their points
        assert low < high


def test_curves_without_a_knee_are_counted() -> None:
    def half(_: int, nodes: Array, workers: Array, batch: Array) -> Array:
        bent = hyperbola(1.0)(0, nodes, workers, batch)
        return np.stack([bent, np.full_like(bent, 5.0)])

    lines = lines_of(table_of(rows_of(hyperbola(1.0), 1, POWERS)))
    knee = knee_of("kneedle", TimeCurves(lines, hyperbola(1.0), half))
    assert knee.share_without_knee == 0.5
    assert knee.interval_90 is not None
    of_doublings = knee_of("knee", TimeCurves(lines, hyperbola(1.0), half))
    assert of_doublings.share_without_knee == 0.0


def test_two_batches_make_no_knee_of_kneedle() -> None:
    law = hyperbola(1.0)
    lines = lines_of(table_of(rows_of(law, 1, [64])))
    assert knee_of("kneedle", TimeCurves(lines, law)).global_batch is None
    assert knee_of("knee", TimeCurves(lines, law)).global_batch == 64
