from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning_data import CORNERS, cluster, sweep
from tula_hpc.analysis.costs.interruptions import (
    MAX_SHARE,
    Resume,
    interval_s,
    least_interval_s,
    resume_of,
    with_epoch_ends_s,
)
from tula_hpc.analysis.costs.pricing import Bill, Usage, bill
from tula_hpc.analysis.costs.spread import with_start_and_save
from tula_hpc.analysis.plan import make_plan
from tula_hpc.analysis.report.plan_text import expectation, sentences
from tula_hpc.checkpoint.interval import FIRST_S, Cadence, Interruptions
from tula_hpc.config import ClusterSpec, TrainingSpec, WorkloadSpec
from tula_hpc.formatting import FOREVER_S
from tula_hpc.records import Plan

DAY_S = 86_400.0
NOTHING = Interruptions(DAY_S, is_known=True)
SCRIPT = {"script": "train.py", "arguments": ["{local_batch}"], "samples": 100, "epochs": 3}


def between(every_s: float, epoch_s: float, least_s: float) -> float:
    return float(with_epoch_ends_s(np.array([every_s]), np.array([epoch_s]), least_s)[0])


def saves_of(cadence: Cadence, epochs: int, steps: int, step_s: float, cost_s: float) -> int:
    """Count the saves of a training, which asks after each step and at the end of each epoch as `trainer` does."""
    saves = 0
    for _ in range(epochs):
        for step in range(steps):
            cadence.worked(step_s)
            if cadence.due() or (step == steps - 1 and cadence.may_save):
                cadence.began(cost_s)
                cadence.ended(0.0)
                saves += 1
    return saves


def paid(
    hours: float, *, epochs: int = 1, save_s: float | None = None, basis: str = "node-hour", **training: float
) -> Bill:
    spec = ClusterSpec.model_validate({"train_minutes": 10**6, "pricing": {"basis": basis}})
    usage = Usage(*(np.array([value]) for value in (1.0, 1.0, hours * 3600.0, 1e9, 0.0, epochs)))
    return bill(usage, spec, TrainingSpec.model_validate(training), None, save_s)


@pytest.mark.parametrize(("cost_s", "epoch_s"), [(0.2, 50.0), (2.0, 20.0), (4.0, 1000.0), (15.0, 100.0)])
@pytest.mark.parametrize("fixed_s", [None, 400.0])
def test_as_many_saves_are_reckoned_as_a_training_takes(cost_s: float, epoch_s: float, fixed_s: float | None) -> None:
    epochs, steps = max(10, int(5e3 / epoch_s)), 50
    saves = saves_of(Cadence(NOTHING, fixed_s), epochs, steps, epoch_s / steps, cost_s)
    every_s = float(interval_s(cost_s, np.array([DAY_S]))[0]) if fixed_s is None else fixed_s
    reckoned = epochs * epoch_s / between(every_s, epoch_s, 0.0 if fixed_s else least_interval_s(cost_s))
    assert saves == pytest.approx(reckoned, rel=0.25, abs=1.0 + epochs * epoch_s / FIRST_S * 0.01)


@given(st.floats(0.0, 100.0), st.floats(0.01, 1e5), st.floats(60.0, 1e7))
def test_saving_never_costs_more_than_its_bound(cost_s: float, epoch_s: float, between_s: float) -> None:
    every_s = float(interval_s(cost_s, np.array([between_s]))[0])
    assert cost_s <= MAX_SHARE * between(every_s, epoch_s, least_interval_s(cost_s)) * (1 + 1e-9)


@given(st.floats(1.0, 1e4), st.floats(0.01, 1e5))
def test_an_interval_that_the_user_sets_is_never_exceeded(every_s: float, epoch_s: float) -> None:
    assert between(every_s, epoch_s, 0.0) <= every_s * (1 + 1e-6)
    assert between(every_s, epoch_s, 0.0) <= epoch_s * (1 + 1e-6)


@pytest.mark.parametrize("basis", ["node-hour", "spot"])
def test_costlier_saves_take_longer_and_a_bound_holds(basis: str) -> None:
    times = [float(paid(20, basis=basis, save_s=seconds).wall_time_s[0]) for seconds in (0.0, 1.0, 10.0, 100.0)]
    assert times == sorted(times)
    assert times[0] < times[1] < times[2]
    costly = paid(20, save_s=100.0)
    assert float(costly.saving_s[0]) <= MAX_SHARE * 20 * 3600 * (1 + 1e-9)


def test_short_epochs_save_often_where_the_user_has_set_the_interval() -> None:
    assert float(paid(1, epochs=360, save_s=1.0, checkpoint_minutes=5).saving_s[0]) == pytest.approx(360.0, rel=0.01)
    assert float(paid(1, epochs=360, save_s=1.0).saving_s[0]) <= MAX_SHARE * 3600.0


def test_a_shorter_time_between_interruptions_saves_more_often() -> None:
    often, seldom = (paid(100, interruption_hours=hours, save_s=0.01) for hours in (0.1, 1000.0))
    assert often.checkpoint_s < seldom.checkpoint_s


@pytest.mark.parametrize(
    ("epoch_s", "between_s"), [(299.9, 299.9), (320, 288), (400, 800 / 3), (500, 250), (600, 300), (700, 280)]
)
def test_an_epoch_that_ends_soon_after_a_save_brings_none(epoch_s: float, between_s: float) -> None:
    """A save is due after at most 300 s of steps and costs 5 s, so an epoch that ends 167 s later saves nothing."""
    found = with_epoch_ends_s(np.array([300.0]), np.array([float(epoch_s)]), least_interval_s(5.0))
    assert found == pytest.approx(between_s, rel=1e-3)


def paid_by_script(hours: float, resume: Resume, limit_minutes: int = 10**6, basis: str = "spot") -> Bill:
    spec = ClusterSpec.model_validate({"train_minutes": limit_minutes, "pricing": {"basis": basis}})
    usage = Usage(*(np.array([value]) for value in (1.0, 1.0, hours * 3600.0, 1e9, 0.0, 10.0)))
    return bill(usage, spec, TrainingSpec(), None, resume=resume)


def test_the_less_is_saved_the_more_preemptions_repeat() -> None:
    times = [float(paid_by_script(24.0, resume).wall_time_s[0]) for resume in Resume]
    assert times == sorted(times)
    spec = ClusterSpec.model_validate({"pricing": {"basis": "spot"}}).pricing
    between_s = spec.preemption_hours * 3600.0
    # Daly's equation 20 with the whole work as one segment and no save
    once = between_s * np.exp(spec.start_s / between_s) * np.expm1(24 * 3600.0 / between_s)
    assert times[-1] == pytest.approx(once + spec.start_s, rel=1e-6)


def test_a_training_that_begins_anew_has_to_end_within_one_time_limit() -> None:
    short, long = (paid_by_script(hours, Resume.NOTHING, 600, "node-hour") for hours in (9.0, 11.0))
    assert (short.requeues[0], short.saving_s[0]) == (0.0, 0.0)
    assert long.wall_time_s[0] == FOREVER_S
    assert paid_by_script(11.0, Resume.EPOCH, 600, "node-hour").requeues[0] == 1.0


@pytest.mark.parametrize(("minutes", "requeues"), [(65, np.inf), (70, 9.0), (140, 4.0), (210, 3.0), (700, 0.0)])
def test_a_training_that_resumes_at_ends_of_epochs_has_whole_epochs_in_each_job(minutes: int, requeues: float) -> None:
    """Jobs have whole epochs: a start takes 1 min, ten epochs 66 min, each save 5 s, and the last 90 s are left."""
    paid = paid_by_script(11.0, Resume.EPOCH, minutes, "node-hour")
    assert paid.requeues[0] == requeues
    in_last = 10 - requeues * ((minutes - 2.5) // 66)
    time_s = 60 * (requeues * (minutes - 1.5) + 1) + (66 * 60 + 5) * in_last
    assert paid.wall_time_s[0] == pytest.approx(time_s if requeues < np.inf else FOREVER_S)


def test_a_preempted_job_has_its_whole_time_limit_again() -> None:
    """Work of 20 h that begins anew ends in a job of 24 h, however long preemptions make all jobs together."""
    paid, without_limit = (paid_by_script(20.0, Resume.NOTHING, minutes) for minutes in (24 * 60, 10**6))
    assert paid.wall_time_s[0] == without_limit.wall_time_s[0] > 24 * 3600.0
    assert paid_by_script(24.0, Resume.NOTHING, 24 * 60).wall_time_s[0] == FOREVER_S


@pytest.mark.parametrize("resume", [Resume.CHECKPOINT, Resume.EPOCH])
@pytest.mark.parametrize("minutes", [90, 600])
def test_a_time_limit_costs_as_much_whether_or_not_jobs_are_preempted(resume: Resume, minutes: int) -> None:
    extra_s = []
    for basis in ("node-hour", "spot"):
        limited, free = (paid_by_script(11.0, resume, limit, basis) for limit in (minutes, 10**6))
        assert limited.requeues[0] > free.requeues[0] == 0.0
        extra_s.append(limited.wall_time_s[0] - free.wall_time_s[0])
    assert extra_s[0] == pytest.approx(extra_s[1])


RESUMES = [
    ({"epochs": 3}, False, Resume.CHECKPOINT),
    (SCRIPT, False, Resume.NOTHING),
    (SCRIPT | {"resume_arguments": ["--resume", "last.pt"]}, False, Resume.EPOCH),
    (SCRIPT | {"resume_arguments": []}, False, Resume.EPOCH),
    (SCRIPT, True, Resume.CHECKPOINT),
]


@pytest.mark.parametrize(("workload", "kept", "resume"), RESUMES)
def test_a_workload_decides_from_where_it_resumes(workload: dict[str, object], kept: bool, resume: Resume) -> None:
    spec = WorkloadSpec.model_validate(workload, context={"check_paths": False})
    assert resume_of(spec, kept) is resume


@pytest.mark.parametrize("between_s", [None, 30.0])
def test_what_a_script_saves_between_its_epochs_is_counted_once(between_s: float | None) -> None:
    workload, *_ = RESUMES[2]
    spec = WorkloadSpec.model_validate(workload, context={"check_paths": False})
    rows = [row.model_copy(update={"between_epochs_s": between_s}) for row in CORNERS]
    parts = make_plan(sweep("time").model_copy(update={"workload": spec}), cluster(), rows).chosen.wall_parts_s
    assert (parts["checkpoints"] > 0) == (between_s is None)
    assert (parts["evaluation"] > 0) == (between_s is not None)


@pytest.mark.parametrize(("workload", "kept", "resume"), RESUMES)
def test_a_plan_names_the_checkpoints_that_are_written(workload: dict[str, object], kept: bool, resume: Resume) -> None:
    spec = WorkloadSpec.model_validate(workload, context={"check_paths": False})
    rows = [row.model_copy(update={"kept": kept}) for row in CORNERS]

    long_sweep = sweep("time").model_copy(update={"workload": spec.model_copy(update={"epochs": 1000})})
    long = " ".join(sentences(make_plan(long_sweep, cluster(pricing={"checkpoint_write_s": 5.0}), rows)))
    assert ("with a checkpoint every " in long) == (resume is Resume.CHECKPOINT)
    # nobody knows how often a script saves
    assert ("as far as is known from the end of an epoch" in long) == (resume is Resume.EPOCH)
    assert ("while a checkpoint is written" in long) == (resume is Resume.CHECKPOINT)


@pytest.mark.parametrize(("workload", "kept", "resume"), RESUMES)
def test_what_saves_nothing_waits_for_no_last_save(workload: dict[str, object], kept: bool, resume: Resume) -> None:
    spec = WorkloadSpec.model_validate(workload, context={"check_paths": False})
    rows = [row.model_copy(update={"kept": kept}) for row in CORNERS]
    chosen = make_plan(sweep("time").model_copy(update={"workload": spec}), cluster(), rows).chosen
    assert (chosen.part_intervals_90["checkpoints"] == (0.0, 0.0)) == (resume is Resume.NOTHING)


@pytest.mark.parametrize("basis", ["node-hour", "spot"])
@pytest.mark.parametrize(("workload", "kept", "resume"), RESUMES)
def test_a_batch_beyond_all_samples_has_a_time_that_can_be_written_down(
    workload: dict[str, object], kept: bool, resume: Resume, basis: str
) -> None:
    spec = WorkloadSpec.model_validate(workload, context={"check_paths": False})
    rows = [row.model_copy(update={"kept": kept, "dataset_samples": 600}) for row in CORNERS]
    on = cluster(pricing={"basis": basis})
    plan = make_plan(sweep("time").model_copy(update={"workload": spec}), on, rows)
    assert any(candidate.train_time_s == 0.0 for candidate in plan.candidates)
    assert Plan.model_validate_json(plan.model_dump_json(by_alias=True)) == plan


@pytest.mark.parametrize(
    ("every_s", "expected"),
    [(30.0, " every 30.0 s"), (10.0, " after each epoch"), (40.0, " every 4 epochs"), (100.0, None), (500.0, None)],
)
def test_the_interval_is_given_for_a_training_that_saves_before_its_end(every_s: float, expected: str | None) -> None:
    made = make_plan(sweep("time"), cluster(), CORNERS)
    epoch_s = 10.0 if every_s != 30.0 else 20.0
    times = {"epoch_time_s": epoch_s, "train_time_s": 10 * epoch_s, "wall_time_s": 1000.0}
    chosen = made.chosen.model_copy(update={**times, "checkpoint_minutes": every_s / 60.0})
    text = expectation(made.model_copy(update={"chosen": chosen}))
    assert ("with a checkpoint" in text) == (expected is not None)
    assert expected is None or f"with a checkpoint{expected}" in text


@pytest.mark.parametrize(
    ("stated", "state_bytes", "expected_s"), [(None, 25e6, 0.5), (None, 4e9, 5.0), (None, 0, 5.0), (2.0, 25e6, 2.0)]
)
def test_a_checkpoint_takes_as_long_as_its_size_lets_expect(
    stated: float | None, state_bytes: float, expected_s: float
) -> None:
    pricing = {} if stated is None else {"checkpoint_write_s": stated}
    found = with_start_and_save(cluster(pricing=pricing).pricing, None, state_bytes)
    assert found.save_s == pytest.approx(expected_s)


def test_plans_of_larger_models_expect_longer_checkpoints() -> None:
    def saving_s(parameter_bytes: int) -> float:
        use = [row.memory.model_copy(update={"parameter_bytes": parameter_bytes}) for row in CORNERS if row.memory]
        rows = [row.model_copy(update={"memory": each}) for row, each in zip(CORNERS, use, strict=True)]
        return make_plan(sweep("time"), cluster(), rows).chosen.wall_parts_s["checkpoints"]

    assert 0 < saving_s(10**6) < saving_s(10**8)
