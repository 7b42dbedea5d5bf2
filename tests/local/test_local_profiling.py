"""Profile jobs on this machine: real processes and real collectives through submitit's local executor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked_jobs import forking_jobs
from tests.known import known
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.profiling.timing import halves_of
from tula_hpc.records import Configuration, JobNote, Measurement, RunDirectory, notes_file, read_records
from tula_hpc.stages.context import Sweep
from tula_hpc.stages.profile import profile_stage

WORKLOAD = {
    "model": "tula_hpc.workloads.small_cnns:compact_cnn",
    "dataset": "digits",
    "samples": 512,
    "loader_workers": 0,
}
QUICK = {"warmup_steps": 1, "min_steps": 5, "max_steps": 5, "min_batch": 32, "max_batch": 64, "mode": "full"}


def profiled(root: Path, cluster: ClusterSpec, workload: dict[str, object], **search: object) -> RunDirectory:
    spec = SweepSpec.model_validate({"name": "x", "workload": workload, "search": {**QUICK, **search}})
    run = RunDirectory(root / "run").create()
    profile_stage(Sweep(spec, cluster, run))
    return run


def submitted(run: RunDirectory) -> list[int]:
    """Return the number of nodes of each submitted job."""
    return [event.data["nodes"] for event in run.events() if event.event == "submitted"]


def by_configuration(run: RunDirectory) -> dict[Configuration, Measurement]:
    return {m.configuration: m for m in run.measurements().records}


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    with forking_jobs():
        yield


@pytest.fixture(scope="module")
def nested(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Profile 1 and 2 nodes with two workers each, in one allocation of two nodes."""
    cluster = ClusterSpec(workers_per_node=2)
    sizes = {"cluster_sizes": [1, 2], "nest": True, "max_batch": 128, "min_batch": 64}
    return profiled(tmp_path_factory.mktemp("nest"), cluster, dict(WORKLOAD), **sizes)


def test_one_job_measures_all_sizes(nested: RunDirectory) -> None:
    assert submitted(nested) == [2]
    measured = by_configuration(nested)
    assert set(measured) == {Configuration(n, 2, b // (2 * n)) for n in (1, 2) for b in (64, 128)}
    assert all(m.status == "ok" and m.backend == "gloo" for m in measured.values())


def test_a_smaller_size_pays_for_the_nodes_that_wait(nested: RunDirectory) -> None:
    for m in nested.measurements().records:
        assert m.node_seconds == pytest.approx(2 * m.elapsed_s)


def test_the_bare_all_reduce_is_timed_once_for_each_size(nested: RunDirectory) -> None:
    records = nested.measurements().records
    for nodes in (1, 2):
        times = {m.times.allreduce_time_s for m in records if m.nodes == nodes and m.times}
        assert len(times) == 1
        assert min(times) > 0
        assert sum("allreduce" in m.samples for m in records if m.nodes == nodes) == 1


def test_both_halves_of_the_rounds_are_on_record(tmp_path: Path) -> None:
    run = profiled(
        tmp_path, ClusterSpec(), dict(WORKLOAD), cluster_sizes=[1], max_batch=32, max_steps=12, ci_width=1e-9
    )
    (measured,) = run.measurements().records
    halves = known(halves_of(measured.samples["step"]))
    assert measured.times is not None
    times = measured.times
    assert (times.first_half_s, times.second_half_s, times.halves_scatter_s) == pytest.approx(halves, rel=1e-2)


def test_a_job_says_what_it_does_before_it_does_it(nested: RunDirectory) -> None:
    notes = nested.job_notes()
    assert [note.note for note in notes] == ["began", "ready", *["measuring"] * 4, "ended"]
    assert [note.time for note in notes] == sorted(note.time for note in notes)
    assert [note.configuration for note in notes[2:-1]] == [m.configuration for m in nested.measurements().records]
    # a process's start in /proc is in hundredths of a second
    assert notes[0].submitted_at <= notes[0].began_at + 1
    assert notes[0].began_at <= notes[0].time


def test_a_worker_that_is_killed_is_noticed(tmp_path: Path) -> None:
    """The worker leaves no error, as if killed by the kernel: the job's note names what it was about to measure."""
    cluster = ClusterSpec(setup=(f"export VICTIM={tmp_path / 'victim'}",))
    mortal = {**WORKLOAD, "model": "tests.examples.mortal:build"}
    run = profiled(tmp_path, cluster, mortal, cluster_sizes=[2])
    first, second = run.measurements().records[0], run.measurements().records[1:]
    assert (first.status, first.configuration) == ("ok", Configuration(2, 1, 16))
    assert [(m.status, m.configuration) for m in second] == [(s, Configuration(2, 1, 32)) for s in ("failed", "ok")]
    outputs = sorted(run.profile.glob("*.jsonl"))
    ends = [read_records(JobNote, [notes_file(path)]).records[-1].note for path in outputs]
    assert sorted(ends) == ["ended", "measuring"]
