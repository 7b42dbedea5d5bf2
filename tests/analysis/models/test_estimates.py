"""What a training needs in addition to its steps: memory, and time for updates of the scale."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.planning_data import SAMPLES, cluster, grid, ok, peak_bytes, sweep, times
from tula_hpc.analysis.models.profiles import summarize, update_time
from tula_hpc.analysis.plan import make_plan
from tula_hpc.analysis.planning.memory_limit import checkpoint_copy_bytes
from tula_hpc.config import TrainingSpec
from tula_hpc.config.training import PASS_SHARE
from tula_hpc.records import Footprint, RunDirectory

BATCHES = (32, 128, 1024)


def test_what_training_needs_on_top_of_a_profiled_step_counts_for_the_limit() -> None:
    copy = checkpoint_copy_bytes(summarize(grid()))
    # a step of 128 samples just fits
    limit_gb = ((peak_bytes(128) + copy) / 0.9 + 1) / 1024**3
    limited = cluster(memory_gb=limit_gb)
    training = [TrainingSpec.model_validate({"method": method, "preset": "paper"}) for method in ("lbt", "ags")]
    specs = [sweep("time").model_copy(update={"training": spec}) for spec in training]
    largest = [max(c.local_batch for c in make_plan(s, limited, grid()).candidates if c.feasible) for s in specs]
    assert largest == [128, 64]


@pytest.mark.parametrize("interval_epochs", [0.01, 0.5, 1.0, 3.0])
def test_updates_of_the_scale_are_counted_as_training_takes_them(interval_epochs: float) -> None:
    """Updates come whole steps apart, never more often than steps, and none comes after the last step."""
    training = TrainingSpec.model_validate({"preset": "paper", "update_interval_epochs": interval_epochs})
    spec = sweep("time").model_copy(update={"training": training})
    plans = [
        make_plan(
            spec, cluster(), [ok(n, b, times=times(n, b, update_time_s=seconds)) for n in (1, 2, 4) for b in BATCHES]
        )
        for seconds in (0.0, 0.2)
    ]
    for plain, updating in zip(*(plan.candidates for plan in plans), strict=True):
        steps, epochs = SAMPLES // updating.global_batch, spec.workload.epochs
        apart = max(1, round(interval_epochs * steps))
        updates = sum(step % apart == 0 for step in range(1, steps * epochs))
        assert updating.train_time_s - plain.train_time_s == pytest.approx(0.2 * updates, abs=1e-6)


@pytest.mark.parametrize("training", [{}, {"method": "adascale"}, {"update_interval_epochs": 0.5}])
def test_passes_of_a_lone_worker_that_wants_norms_for_free_take_time_and_memory(training: dict[str, object]) -> None:
    """An update was timed there because the model has BatchNorm."""
    spec = sweep("time").model_copy(update={"training": TrainingSpec.model_validate(training)})
    rows = [
        [*grid((2, 4)), *(ok(1, batch, times=times(1, batch, update_time_s=update_s)) for batch in (32, 64, 256, 1024))]
        for update_s in (0.0, 0.5)
    ]
    plain, passing = (make_plan(spec, cluster(), measured) for measured in rows)
    before = {(c.nodes, c.local_batch): c.epoch_time_s for c in plain.candidates}
    for candidate in passing.candidates:
        passes = (candidate.epoch_time_s - before[candidate.nodes, candidate.local_batch]) / 0.5
        if candidate.nodes > 1:
            assert passes == pytest.approx(0.0, abs=0.01)
        elif "update_interval_epochs" in training:
            steps = SAMPLES // candidate.global_batch
            assert passes == pytest.approx(steps / round(0.5 * steps), rel=0.01)
        else:
            seen = min(spec.training.reference_batch(candidate.global_batch), candidate.local_batch) * passes
            assert 0.2 < seen / (PASS_SHARE * SAMPLES) < 1.001
    limit_gb = ((peak_bytes(128) + checkpoint_copy_bytes(summarize(grid()))) / 0.9 + 1) / 1024**3
    plans = [make_plan(spec, cluster(memory_gb=limit_gb), measured) for measured in rows]
    largest = [[max(c.local_batch for c in p.candidates if c.feasible and c.nodes == n) for n in (1, 2)] for p in plans]
    assert largest == [[128, 64], [64, 64]]


def test_damaged_estimates_are_none(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    counts = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes_per_sample", "fixed_bytes")
    whole = Footprint(**dict.fromkeys(counts, 1), peaks={8: peak_bytes(8)})
    run.footprint_file().write_text(whole.model_dump_json())
    run.footprint_file("gpu/a").write_text("{")
    assert list(run.footprints(["", "gpu/a", "absent"])) == [""]


def test_updates_of_other_numbers_of_workers_lie_between_the_measured_ones() -> None:
    rows = [ok(nodes, 64, times=times(nodes, 64, update_time_s=seconds)) for nodes, seconds in ((2, 0.1), (8, 0.7))]
    found = update_time(summarize(rows)).predict(np.array([1, 2, 4, 16]))
    assert found == pytest.approx([0.1, 0.1, 0.3, 0.7])
    assert update_time(summarize(grid())).predict(np.array([2])) == 0.0
