from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.known import known
from tests.planning_data import failed, grid, memory, ok, oom, times
from tula_hpc.analysis.models.profiles import summarize
from tula_hpc.failure_kinds import Failure
from tula_hpc.records import Configuration, Measurement, MemoryUse

PARTS = ("data_time_s", "compute_time_s", "optimizer_time_s", "allreduce_time_s", "update_time_s")


def test_repeats_become_their_median() -> None:
    rows = [ok(1, 32, times=times(1, 32, step_time_s=step)) for step in (0.1, 0.2, 9.0)]
    rows += [ok(2, 32, memory=memory(32, reserved_bytes=size)) for size in (100, 201)]
    first, second = summarize(rows).profiles
    assert first.times.step_time_s == 0.2
    assert first.times.compute_time_s == pytest.approx(rows[0].times.compute_time_s if rows[0].times else 0)
    assert second.memory.reserved_bytes == 150


def test_smaller_computations_become_medians_too() -> None:
    apart = (((8, 0.1), (16, 0.3)), ((8, 0.3),), ((8, 0.2),), ())
    (found,) = summarize(ok(1, 32, smaller_computes=row) for row in apart).profiles
    assert dict(found.smaller_computes) == pytest.approx({8: 0.2, 16: 0.3})


def test_repeats_that_do_not_know_a_time_do_not_count_for_its_median() -> None:
    rows = [ok(1, 32, times=times(1, 32, forward_time_s=forward)) for forward in (0.1, 0.3)]
    former = ok(1, 32)
    found, unknown = summarize([*rows, former, ok(1, 64), ok(1, 64)]).profiles
    assert known(former.times).forward_time_s is None
    assert found.times.forward_time_s == pytest.approx(0.2)
    assert unknown.times.forward_time_s is None


@settings(max_examples=30)
@given(st.randoms(use_true_random=False))
def test_the_order_of_the_records_does_not_matter(shuffler: random.Random) -> None:
    rows = [*grid(), ok(1, 32, times=times(1, 32, step_time_s=7.0)), oom(1, 2048), oom(2, 4096), failed(4, 4)]
    rows += [failed(4, 4, detail="another", finished_at=5.0), ok(2, 8, dataset_samples=7), ok(2, 8, dataset_samples=8)]
    shuffled = rows.copy()
    shuffler.shuffle(shuffled)
    assert summarize(shuffled) == summarize(rows)


def test_the_smallest_batch_that_ran_out_of_memory_is_the_bound() -> None:
    rows = [*grid(), oom(4, 2048), oom(1, 4096), failed(2, 1600, failure=Failure.HOST_OOM)]
    summary = summarize(rows)
    assert summary.oom_bound(alone=True) == summary.oom_bound(alone=False) == 1600
    assert summary.oom_reason == "local batch 1600 ran out of memory"
    assert summary.out_of_memory == (Configuration(1, 1, 4096), Configuration(2, 1, 1600), Configuration(4, 1, 2048))
    assert summary.failed == {}
    assert summarize(grid()).oom_bound(alone=False) == math.inf


def test_a_configuration_that_ran_in_spite_of_a_bound_is_a_warning() -> None:
    summary = summarize([ok(1, 64), ok(1, 128), oom(4, 128)])
    assert summary.oom_bound(alone=False) == 128
    assert any(
        "local batch 128 ran out of memory" in warning and "N=1 b=128" in warning for warning in summary.warnings
    )


def test_a_single_worker_that_holds_fewer_samples_at_once_contradicts_no_bound() -> None:
    alone = [ok(1, batch, parts=2) for batch in (32, 128)]
    assert summarize([*alone, ok(2, 64), oom(2, 128)]).warnings == ()
    (warning,) = summarize([*alone, ok(1, 256, parts=2), oom(2, 128)]).warnings
    assert warning.startswith("N=2 b=128 (B=256), with 128 samples at once, ran out of memory once, but N=1 b=256 ")
    (warning,) = summarize([*alone, ok(2, 128), oom(1, 256)]).warnings
    assert warning.startswith("N=1 b=256 (B=256), with 128 samples at once, ran out of memory once, but N=2 b=128 ")


def test_failures_keep_their_last_reason_until_a_repeat_succeeds() -> None:
    rows = [failed(1, 32, detail="late", finished_at=2.0), failed(1, 32, detail="soon", finished_at=1.0), failed(2, 8)]
    assert summarize(rows).failed == {
        Configuration(1, 1, 32): "bug: late",
        Configuration(2, 1, 8): "bug: ValueError: no",
    }
    assert list(summarize([*rows, ok(1, 32)]).failed) == [Configuration(2, 1, 8)]


@pytest.mark.parametrize(
    "changes",
    [
        {"times": None},
        {"memory": None},
        {"times": times(1, 32, step_time_s=math.nan)},
        {"times": times(1, 32, step_time_s=math.inf)},
        {"times": times(1, 32, step_time_s=0.0)},
        *({"times": times(1, 32, step_time_s=seconds)} for seconds in (-1.0, 1e-30, 1e90)),
        *({"times": times(1, 32, **{part: seconds})} for part in PARTS for seconds in (-1.0, 1e90, math.nan)),
        {"memory": memory(32, reserved_bytes=0)},
        {"memory": memory(32, peak_bytes=0, baseline_bytes=0)},
        *({"memory": memory(32, **{name: count})} for name in MemoryUse.model_fields for count in (-(10**12), 10**400)),
    ],
)
def test_a_record_without_possible_times_and_memory_is_not_usable(changes: dict[str, object]) -> None:
    summary = summarize([ok(1, 32, **changes)])
    assert summary.profiles == ()
    lacking = None in changes.values()
    reason = "no time or memory was recorded" if lacking else "its times or memory are not plausible"
    assert summary.failed == {Configuration(1, 1, 32): reason}


def test_data_sets_of_different_size_are_a_warning_and_the_majority_counts() -> None:
    summary = summarize([*grid(), ok(1, 8, dataset_samples=99_999), ok(1, 16, dataset_samples=0)])
    assert summary.dataset_samples == 20_000
    assert any("20,000, 99,999 samples" in warning for warning in summary.warnings)
    assert summarize(grid()).warnings == ()
    assert any("models" in warning for warning in summarize([ok(1, 8), ok(1, 8, parameters=5)]).warnings)


def test_the_test_samples_are_those_of_most_records_that_count_them() -> None:
    counted = [ok(1, 32, test_samples=count) for count in (500, 500, 9999, -1, 0, 0, 0)]
    assert summarize(counted).test_samples == 500
    assert summarize(grid()).test_samples == 0


def test_doubts_about_repeats_are_kept() -> None:
    rows: list[Measurement] = [
        ok(1, 32, converged=False),
        ok(1, 32),
        ok(1, 32, exclusive=False),
        ok(1, 32, emulated=True),
    ]
    (profile,) = summarize(rows).profiles
    assert (profile.converged, profile.exclusive, profile.emulated) == (True, False, True)


def test_nothing_is_summarized_as_nothing() -> None:
    summary = summarize([])
    assert (summary.profiles, summary.out_of_memory, summary.dataset_samples) == ((), (), 0)
