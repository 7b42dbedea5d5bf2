"""Laws of the tuner's decisions, whatever the losses are: bounded, deterministic, and never back to what was pruned."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzzing import fuzz
from tula_hpc.tuner import EXPLORE_EVERY, Setting, Step, Tuner, compare, settings

SAMPLES = 4
ROUNDS = 12
START = [2.0] * SAMPLES

scattered = st.lists(st.floats(0, 10), min_size=SAMPLES, max_size=SAMPLES)
# of one level: only such differ clearly from each other
level = st.builds(
    lambda at, noise: [at + n for n in noise],
    st.floats(0, 10),
    st.lists(st.floats(0, 0.1), min_size=SAMPLES, max_size=SAMPLES),
)
losses = level | scattered
diverged: st.SearchStrategy[list[float]] = st.just([]) | st.just([math.nan] * SAMPLES) | st.just([math.inf] * SAMPLES)
runs = st.lists(losses | diverged, min_size=3 * ROUNDS, max_size=3 * ROUNDS)
counts, budgets = st.integers(1, 6), st.integers(1, 8)


def follow(tuner: Tuner, outcomes: Sequence[Sequence[float]]) -> list[tuple[int, Step]]:
    """What was in use, and what was decided, run by run, until nothing is left to decide."""
    tuner.begin(START)
    history = []
    for outcome in outcomes:
        if not tuner.active or tuner.rounds >= ROUNDS:
            break
        used = tuner.current
        history.append((used, tuner.observe(outcome)))
    return history


@fuzz(40)
@given(counts, budgets, runs)
def test_rollbacks_are_bounded_and_so_is_the_extra_work(count: int, budget: int, outcomes: list[list[float]]) -> None:
    tuner = Tuner(count, budget)
    history = follow(tuner, outcomes)
    again = sum(step.load == "start" for _, step in history)
    assert again == tuner.rollbacks <= min(budget, count - 1)
    assert len(history) <= tuner.rounds + again + 1  # runs of rounds: one each, and those again; the last may be dead
    assert len(tuner.pruned) <= len(set(tuner.pruned)) <= tuner.rollbacks + 1


@fuzz(40)
@given(counts, budgets, runs)
def test_a_pruned_setting_is_never_used_again(count: int, budget: int, outcomes: list[list[float]]) -> None:
    pruned: set[int] = set()
    for used, step in follow(Tuner(count, budget), outcomes):
        assert used not in pruned
        if step.pruned is not None:
            pruned.add(step.pruned)


@fuzz(40)
@given(counts, budgets, runs)
def test_training_goes_on_from_the_run_with_the_lowest_loss(
    count: int, budget: int, outcomes: list[list[float]]
) -> None:
    tuner = Tuner(count, budget)
    best: list[float] = []
    for (_, step), outcome in zip(follow(tuner, outcomes), outcomes, strict=False):
        assert not (step.won and not all(map(math.isfinite, outcome)))
        if step.won and best:
            assert sum(outcome) < sum(best)
        best = [] if step.over else outcome if step.won else best
        assert step.over == (step.load != "start")
        assert not (step.load == "best" and step.won)


@fuzz(40)
@given(counts, budgets, runs, st.integers(0, 10))
def test_a_tuner_that_is_resumed_anywhere_decides_alike(
    count: int, budget: int, outcomes: list[list[float]], when: int
) -> None:
    whole, parts = Tuner(count, budget), Tuner(count, budget)
    whole.begin(START)
    parts.begin(START)
    for number, outcome in enumerate(outcomes):
        if not whole.active:
            break
        if number == when:
            state: dict[str, Any] = json.loads(json.dumps(parts.state_dict()))  # plain numbers and lists
            parts = Tuner(count, budget)
            parts.load_state_dict(state)
        assert whole.observe(outcome) == parts.observe(outcome)
        assert vars(whole) == vars(parts)


def test_a_setting_that_makes_things_worse_is_left_at_once() -> None:
    tuner = Tuner(3, 8)
    tuner.begin(START)
    assert tuner.observe([5.0, 5.1, 5.2, 5.3]) == Step("start", won=True, over=False)
    assert tuner.observe([1.0, 1.1, 1.2, 1.3]) == Step("", won=True, over=True, pruned=0)
    assert (tuner.current, tuner.rollbacks) == (1, 1)


def test_a_challenger_that_is_no_better_beyond_the_noise_is_dropped() -> None:
    tuner = Tuner(2, 8)
    tuner.begin(START)
    for number in range(EXPLORE_EVERY - 1):
        assert tuner.observe([1.9 - number] * SAMPLES) == Step("", won=True, over=True)
    assert tuner.observe([0.5, 0.6, 0.7, 0.8]).load == "start"
    assert tuner.observe([0.4, 0.7, 0.6, 0.8]) == Step("best", won=False, over=True, pruned=1)
    assert not tuner.active


def test_where_all_diverge_there_is_nothing_to_go_on_with() -> None:
    tuner = Tuner(2, 8)
    tuner.begin(START)
    assert tuner.observe([]) == Step("start", won=False, over=False, pruned=0)
    assert (tuner.current, tuner.active) == (1, False)
    with pytest.raises(ValueError, match="nothing left"):
        tuner.observe([])


def test_the_last_setting_goes_on_even_where_it_hurts() -> None:
    tuner = Tuner(2, 1)
    tuner.begin(START)
    tuner.observe([8.0] * SAMPLES)
    assert tuner.observe([9.0] * SAMPLES) == Step("best", won=False, over=True, pruned=1)
    assert (tuner.current, tuner.active) == (0, False)


def test_the_error_is_that_of_the_mean_difference_sample_by_sample() -> None:
    hard, easy = [10.0, 1.0, 5.0, 0.1], [10.1, 1.1, 5.1, 0.2]
    assert compare(hard, easy).difference == pytest.approx(-0.1)
    assert compare(hard, easy).error == pytest.approx(0, abs=1e-12)
    assert compare(hard, easy).is_less
    assert not compare(hard, hard).is_less
    assert compare([0.0, 2.0], [0.0, 0.0]).error == pytest.approx(1.0)


def test_settings_are_every_pair_once_and_the_nearest_to_the_configured_one_first() -> None:
    first = Setting(0.5, 32)
    pairs = settings(first, [0.1, 0.5], [16, 32, 64])
    assert pairs[0] == first
    assert len(pairs) == len(set(pairs)) == 6
    changed = [sum(a != b for a, b in zip(pair, first, strict=True)) for pair in pairs]
    assert changed == sorted(changed)
    assert settings(first, [], []) == [first]
