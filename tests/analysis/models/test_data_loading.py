"""When a plan says that data loading decides, and what would end that."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning_data import CORNERS, cluster, ok, sweep, times
from tula_hpc.analysis.models.accumulation import Passes
from tula_hpc.analysis.models.data_loading import (
    MOST_PROCESSES,
    cores_needed,
    describe_slow_loader,
    held_up_by_storage,
    loader_decides,
    loads_ahead,
    processes_needed,
)
from tula_hpc.analysis.models.profiles import summarize
from tula_hpc.analysis.models.step_time import StepTimeModel, fit_step_time
from tula_hpc.analysis.plan import make_plan
from tula_hpc.analysis.search.steadiness import unsteady
from tula_hpc.config import WorkloadSpec
from tula_hpc.records import Measurement, StepTimes


def waiting(step_s: float, wait_s: float) -> StepTimes:
    return times(1, 32, step_time_s=step_s, data_time_s=wait_s)


def measured(wait_s: float, **changes: object) -> Measurement:
    """Return a step of 0.04 s with this wait, by a worker with four cores."""
    used = {"loader_s": 0.01, "worker_s": 0.03, "cores": 4.0}
    return ok(1, 32, **{"times": waiting(0.04 + wait_s, wait_s), "processor": used} | changes)


def warnings_of(row: Measurement, loader_workers: int = 8) -> list[str]:
    spec = sweep(workload={"epochs": 5, "loader_workers": loader_workers})
    found = make_plan(spec, cluster(), [row, *CORNERS[1:]]).warnings
    return [warning for warning in found if "N=1 b=32" in warning and ("data" in warning or "settled" in warning)]


@given(st.floats(0.001, 10.0), st.floats(0.0, 0.98), st.integers(1, 64))
def test_so_many_processes_deliver_as_fast_as_the_rest_of_a_step_takes(
    step_s: float, share: float, processes: int
) -> None:
    """A loader that delays the step takes as long for a batch as the step does; more processes divide that time."""
    needed = processes_needed(waiting(step_s, share * step_s), processes)
    assert needed > processes
    assert step_s * processes / needed <= step_s * (1 - share) + 1e-9


def test_a_worker_that_loads_by_itself_needs_processes_for_what_it_waits() -> None:
    assert processes_needed(waiting(0.05, 0.01), 0) == 1
    assert processes_needed(waiting(0.14, 0.10), 0) == 3


@pytest.mark.parametrize(
    ("wait_s", "changes", "end"),
    [
        (0.04, {}, "; workload.loader_workers = 20 (now 8) would end the wait"),
        (0.04, {"processor": None}, "; workload.loader_workers = 20 (now 8) would end the wait"),
        # the processes only wait for a file system
        (0.36, {}, "; workload.loader_workers = 96 (now 8) would end the wait"),
        (
            0.04,
            {"processor": {"loader_s": 0.29, "worker_s": 0.03, "cores": 4.0}},
            "; no number of loader processes on the 4 cores of a worker would end the wait, since loading and "
            "computing a batch would keep 8 cores busy: raise cpus_per_worker to 8 and workload.loader_workers to 20",
        ),
        (3.0, {}, "; even 256 loader processes would not end the wait: make its items cheaper to load"),
    ],
)
def test_the_plan_says_what_would_end_the_wait(wait_s: float, changes: dict[str, object], end: str) -> None:
    share = round(100 * wait_s / (0.04 + wait_s))
    where = f"waiting for data takes {share} % of a step at N=1 b=32 (B=32)"
    (warning,) = warnings_of(measured(wait_s, **changes))
    assert warning == f"the data loader holds steps up: {where}{end}"


def test_between_a_scripts_steps_there_may_be_more_than_a_loader() -> None:
    (profile,) = summarize([measured(0.04)]).profiles
    words = describe_slow_loader(profile, None)
    assert words.startswith("waiting for data, or what else the script does between its steps, takes 50 % of a step")


def test_where_the_loader_decides_uneven_steps_are_not_reported_again() -> None:
    assert len(warnings_of(measured(0.04, converged=False))) == 1
    assert warnings_of(measured(0.001, converged=False)) == []
    for wait_s, count in ((0.04, 0), (0.001, 1)):
        profiles = summarize([measured(wait_s, converged=False)]).profiles
        assert len(unsteady(profiles)) == count


def test_cores_are_those_of_a_step_that_does_not_wait() -> None:
    (profile,) = summarize([measured(0.06)]).profiles
    assert cores_needed(profile) == pytest.approx(1.0)
    (unknown,) = summarize([measured(0.06, processor=None)]).profiles
    assert cores_needed(unknown) == 0.0
    assert loader_decides(profile.times)


def test_repeats_that_know_nothing_of_processors_do_not_count() -> None:
    rows = [measured(0.06), measured(0.06, processor=None)]
    (profile,) = summarize(rows).profiles
    assert profile.processor == rows[0].processor


def test_the_bound_is_that_of_the_key() -> None:
    assert WorkloadSpec(loader_workers=MOST_PROCESSES).loader_workers == MOST_PROCESSES
    with pytest.raises(ValueError, match="loader_workers"):
        WorkloadSpec(loader_workers=MOST_PROCESSES + 1)


def test_waiting_that_comes_with_the_nodes_is_for_the_file_system() -> None:
    def row(nodes: int, batch: int) -> Measurement:
        read_s = 0.002 * nodes * batch
        computed_s = 0.01 + 0.002 * batch
        step_s = max(read_s, computed_s)
        parts = {"data_time_s": step_s - computed_s, "compute_time_s": computed_s, "optimizer_time_s": 0.0}
        return ok(nodes, batch, times=times(nodes, batch, step_time_s=step_s, allreduce_time_s=1e-4, **parts))

    rows = [row(1, 32), row(1, 256), row(2, 32), row(4, 64)]
    in_memory = make_plan(sweep(workload={"epochs": 5}), cluster(), rows)
    assert [w for w in in_memory.warnings if "the data loader holds steps up" in w]
    assert not [w for w in in_memory.warnings if "the file system" in w]
    plan = make_plan(sweep(workload={"epochs": 5, "data_dir": "/data"}), cluster(), rows)
    assert [w for w in plan.warnings if "the file system that all nodes share holds steps up: at N=4" in w]
    assert not [w for w in plan.warnings if "the data loader holds steps up" in w]
    assert plan.models["step_time"]["parameters"]["storage_s"] == pytest.approx(0.002, rel=0.05)
    # workers on one machine share its cores, too
    emulated = [each.model_copy(update={"emulated": True}) for each in rows]
    plan = make_plan(sweep(workload={"epochs": 5, "data_dir": "/data"}), cluster(), emulated)
    assert not [w for w in plan.warnings if "the file system" in w]


def test_a_slow_loader_with_which_small_batches_keep_up_is_not_called_the_file_system() -> None:
    """On one node b=64 hides its loading behind the fixed cost of a step, larger batches do not."""

    def row(nodes: int, batch: int) -> Measurement:
        computed_s = 0.02 + 0.001 * batch
        step_s = max(computed_s + 0.005 * (nodes > 1), 0.0013 * batch)
        parts = {"compute_time_s": computed_s, "optimizer_time_s": 0.0, "allreduce_time_s": 0.005}
        data_s = step_s - computed_s - 0.005 * (nodes > 1)
        return ok(nodes, batch, times=times(nodes, batch, step_time_s=step_s, data_time_s=data_s, **parts))

    rows = [row(1, 64), row(1, 1024), row(2, 64), row(2, 512), row(4, 256), row(4, 512)]
    assert rows[0].times is not None
    assert rows[0].times.data_time_s == 0.0
    assert held_up_by_storage(summarize(rows).profiles) == []
    plan = make_plan(sweep(workload={"epochs": 5, "data_dir": "/data"}), cluster(), rows)
    assert [w for w in plan.warnings if "the data loader holds steps up" in w]
    parameters = plan.models["step_time"]["parameters"]
    assert "storage_s" not in parameters
    assert parameters["compute_per_sample_s"] == pytest.approx(0.0013, rel=0.1)


def loaded(nodes: int, batch: int, *, ahead: bool, processes: bool = True) -> Measurement:
    """Return a step whose data take 0.003 s a sample, while the step runs or before it."""
    computed_s = 0.01 + 0.001 * batch
    busy_s = computed_s + (0.1 if nodes > 1 else 0.0)
    wait_s = max(0.0, 0.003 * batch - busy_s) if ahead else 0.0003 * batch
    parts = {"compute_time_s": computed_s, "optimizer_time_s": 0.0, "data_time_s": wait_s}
    used = {"loader_s": 0.01 if processes else 0.0, "worker_s": 0.01, "cores": 4.0}
    spent = times(nodes, batch, step_time_s=busy_s + wait_s, allreduce_time_s=0.1, **parts)
    return ok(nodes, batch, times=spent, processor=used)


def fitted_to(rows: list[Measurement]) -> StepTimeModel:
    return fit_step_time(summarize(rows).profiles)


def test_loader_processes_go_on_while_the_workers_synchronize() -> None:
    rows = [loaded(1, 32, ahead=True), loaded(1, 512, ahead=True), loaded(2, 32, ahead=True)]
    model = fitted_to(rows)
    assert model.parameters_["loader_s"] == pytest.approx(0.003, rel=0.02)
    # the loader takes longer than computation and synchronization together
    assert float(model.predict(4, 512)) == pytest.approx(0.003 * 512, rel=0.05)
    assert float(model.predict(4, 256)) == pytest.approx(0.003 * 256, rel=0.05)
    # a worker that loads by itself does not go on
    alone = [loaded(1, 32, ahead=True, processes=False), loaded(1, 512, ahead=True, processes=False), rows[2]]
    assert "loader_s" not in fitted_to(alone).parameters_
    assert float(fitted_to(alone).predict(4, 64)) > float(model.predict(4, 64))


def test_a_loader_is_waited_for_in_each_pass_of_a_step() -> None:
    """Four passes of 64 samples take as long as four steps of so many, without synchronization."""
    rows = [loaded(1, 64, ahead=True), loaded(1, 256, ahead=True)]
    model = fit_step_time(summarize(rows).profiles, passes=Passes(most=64))
    assert float(model.predict(1, 256)) == pytest.approx(4 * 0.003 * 64, rel=0.05)


def test_a_wait_that_adds_to_every_step_is_not_taken_for_a_loader_that_goes_on() -> None:
    """Some waiting is for what the worker itself does with a batch."""
    places = [(1, 32), (1, 512), (2, 32), (2, 256), (4, 64)]
    rows = [loaded(*place, ahead=False) for place in places]
    assert loads_ahead(summarize(rows).profiles)
    assert "loader_s" in fitted_to(rows[:2]).parameters_
    assert "loader_s" not in fitted_to(rows).parameters_


def test_one_configuration_that_was_disturbed_is_not_for_the_file_system() -> None:
    """N=2 b=128 once waited for 37 % of a step, and N=2 b=256 for 8 %, though the data were in memory."""

    def row(nodes: int, batch: int, step_s: float, data_s: float) -> Measurement:
        parts = {"data_time_s": data_s, "compute_time_s": 0.8 * (step_s - data_s), "optimizer_time_s": 0.0}
        return ok(nodes, batch, times=times(nodes, batch, step_time_s=step_s, allreduce_time_s=1e-4, **parts))

    rows = [row(1, 64, 0.015, 0.0009), row(2, 128, 0.0366, 0.0134), row(2, 256, 0.0464, 0.0039)]
    assert held_up_by_storage(summarize(rows).profiles) == []
    assert len(held_up_by_storage(summarize(rows[:2]).profiles)) == 1
