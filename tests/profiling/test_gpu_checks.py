"""The checks that a GPU runs include every method, and compare what can be compared."""

from __future__ import annotations

import gc
from typing import Any, get_args

import pytest
import torch

from tests.benchmarks import gpu_checks
from tests.planning_data import ok
from tula_hpc.config import Method
from tula_hpc.ddp.worker import Worker


def test_synchronizations_are_counted_for_every_method() -> None:
    assert {spec.training.method for spec in gpu_checks.FORMS.values()} == set(get_args(Method))
    assert set(gpu_checks.MEANT) <= set(gpu_checks.FORMS)


@pytest.mark.processes
def test_a_profile_is_compared_with_steps_without_reference_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile times a pass on its own; on a GPU the larger batch is an epoch, and every other step would take one."""

    def refuse(*_: Any) -> None:
        raise AssertionError("a reference pass")

    monkeypatch.setattr(gpu_checks, "measure", lambda *_: ok(1, 32))
    monkeypatch.setattr(gpu_checks, "FREE_STEPS", 30)
    monkeypatch.setattr(gpu_checks, "FREE_RUNS", 2)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(Worker, "reference_gradient", refuse)
    assert len(gpu_checks._profiled(torch.device("cpu"), 16)["free_s"]) == 1
