"""Gradients of the step-time law, against differences of its predictions."""

from __future__ import annotations

import numpy as np
import pytest

from tula_hpc.analysis.models.regression import Array
from tula_hpc.analysis.models.step_time_law import (
    ALLREDUCE,
    FITTED,
    FORMS,
    NAMES,
    PAPER,
    PER_SAMPLE,
    STORAGE,
    Collective,
    Knots,
    Law,
    Rows,
)

POINTS = 60
BATCHES: Array = 2.0 ** np.arange(8, dtype=np.float64)


def rows_of(random: np.random.Generator) -> Rows:
    nodes = random.integers(1, 9, POINTS).astype(np.float64)
    per_node = random.choice([1.0, 1.5, 4.0], POINTS)
    rows = Rows(random.integers(0, 3, POINTS), nodes, per_node, random.choice(BATCHES, POINTS), np.ones(POINTS))
    return rows.only((rows.kind != ALLREDUCE) | (rows.workers > 1.0))


def knots_of(rows: Rows) -> Knots:
    """Return some of the batches and sizes, so that rows lie at, between and beyond the knots."""
    sizes = np.stack([rows.nodes, rows.per_node], axis=1)[rows.workers > 1.0]
    return Knots(BATCHES[1:6:2], np.unique(sizes, axis=0)[::2])


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("form", [*FORMS.values(), *FITTED.values(), PAPER])
def test_gradients_are_the_derivatives_of_what_is_predicted(form: Collective, additive: bool) -> None:
    random = np.random.default_rng(0)
    rows = rows_of(random)
    law = Law(form, knots_of(rows), additive)
    coefficients = random.uniform(0.05, 1.0, law.coefficients)
    # with these, every term decides in some of the rows
    coefficients[[PER_SAMPLE, STORAGE]] /= 100.0
    coefficients[len(NAMES) :] -= 0.5
    found = law.evaluate(coefficients, rows)
    assert found.seconds == pytest.approx(law.seconds(coefficients, rows))
    steps = np.diag(1e-6 * np.abs(coefficients))
    ends = law.seconds(coefficients + steps, rows) - law.seconds(coefficients - steps, rows)
    differences = (ends / (2.0 * np.diag(steps)[:, None])).T
    scale = np.max(np.abs(differences), axis=1, keepdims=True)
    assert found.gradients / scale == pytest.approx(differences / scale, abs=1e-6)
    of_storage = coefficients[STORAGE] * differences[:, STORAGE]
    assert found.by_storage_effect == pytest.approx(of_storage, rel=1e-5, abs=1e-7)
