"""What the profile stage submits together, from records alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run_factory import measurement
from tula_hpc.config import ClusterSpec, SearchSpec, SweepSpec
from tula_hpc.footprint import Estimate
from tula_hpc.jobs import counted
from tula_hpc.profile_stage import _trusted_batch, allocated_nodes, first_wave, parts_of
from tula_hpc.progress import LineProgress
from tula_hpc.records import Configuration, Footprint, Measurement, RunDirectory, append_record
from tula_hpc.stages import Sweep

PROPOSED = [Configuration(n, 1, b // n) for n in (4, 1, 2) for b in (32, 256)]


def spec(**search: object) -> SweepSpec:
    return SweepSpec(name="x", search=SearchSpec.model_validate(search))


def slurm(**fields: object) -> ClusterSpec:
    return ClusterSpec.model_validate({"executor": "slurm", **fields})


def test_sizes_run_one_after_another_unless_the_cluster_runs_several_jobs() -> None:
    assert first_wave(spec(), slurm(), PROPOSED) == [(Configuration(1, 1, 32), Configuration(1, 1, 256))]
    assert [group[0].nodes for group in first_wave(spec(), slurm(array_parallelism=2), PROPOSED)] == [1, 2, 4]


def test_on_this_machine_jobs_never_run_beside_each_other() -> None:
    parallel = ClusterSpec(array_parallelism=8)
    assert first_wave(spec(), parallel, PROPOSED) == [(Configuration(1, 1, 32), Configuration(1, 1, 256))]
    assert first_wave(spec(pack="never"), parallel, PROPOSED) == [(Configuration(1, 1, 32),)]


def test_in_one_allocation_all_go_together_and_what_may_run_out_of_memory_goes_last() -> None:
    (group,) = first_wave(spec(nest=True), slurm(), PROPOSED)
    assert sorted(group) == sorted(PROPOSED)
    assert [c.local_batch for c in group] == sorted(c.local_batch for c in PROPOSED)
    assert allocated_nodes(spec(nest=True, cluster_sizes=[1, 4, 8]), group) == 8
    assert allocated_nodes(spec(), group[-2:]) == group[-2].nodes


def test_a_part_without_nodes_enough_is_left_out(tmp_path_factory: pytest.TempPathFactory) -> None:
    run = RunDirectory(tmp_path_factory.mktemp("run"))
    tables = [{"partition": "big"}, {"partition": "small", "max_nodes": 1}, {"partition": "tiny", "max_nodes": 1}]
    parts = parts_of(Sweep(spec(cluster_sizes=[2, 4]), slurm(partitions=tables), run))
    assert [part.partition for part in parts] == ["big"]
    parts = parts_of(Sweep(spec(cluster_sizes=[1, 2]), slurm(partitions=tables[:2]), run))
    assert [(part.partition, part.spec.search.cluster_sizes) for part in parts] == [("big", (1, 2)), ("small", (1,))]
    assert [part.cluster.partition for part in parts] == ["big", "small"]


def test_failures_of_an_earlier_command_may_have_been_mended() -> None:
    fields = {"nodes": 1, "workers_per_node": 1, "local_batch": 8, "failure": "bug"}
    rows = [
        Measurement.model_validate({"status": status, "finished_at": at, "partition": part, **fields})
        for status, at, part in [("failed", 100, ""), ("failed", 300, ""), ("oom", 100, ""), ("oom", 300, "other")]
    ]
    assert counted(rows, "", since=200.0) == rows[1:3]


def test_one_allocation_for_all_needs_packing() -> None:
    with pytest.raises(ValueError, match="nest: true measures everything in one job"):
        spec(nest=True, pack="never")


class Said(LineProgress):
    """Keeps what was said."""

    def __init__(self) -> None:
        super().__init__("profile")
        self.lines: list[str] = []

    def update(self, done: float, total: float, text: str) -> None:
        self.lines.append(text)


FOOTPRINT = Footprint(
    parameter_bytes=1,
    gradient_bytes=1,
    optimizer_bytes=1,
    activation_bytes_per_sample=1,
    fixed_bytes=1,
    peaks={32: 1, 64: 2},
    largest_local_batch=32,
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The estimate is not made, only asked for."""
    partitions: list[str] = []

    def estimate(*_: Path, partition: str) -> Estimate:
        partitions.append(partition)
        return Estimate(FOOTPRINT) if partition != "broken" else Estimate(None, "no torch here")

    monkeypatch.setattr("tula_hpc.profile_stage.estimate", estimate)
    return partitions


def part_with_limit(root: Path, name: str = "", **search: object) -> Sweep:
    return Sweep(spec(**search), slurm(memory_gb=1.0), RunDirectory(root).create(), partition=name)


def test_before_the_first_profile_an_estimate_is_made_once(tmp_path: Path, asked: list[str]) -> None:
    said = Said()
    assert [_trusted_batch(part_with_limit(tmp_path), said) for _ in range(2)] == [32, 32]
    assert asked == [""]
    assert "local batches up to 32 fit" in said.lines[-1]
    assert _trusted_batch(part_with_limit(tmp_path, "gpu"), said) == 32
    assert asked == ["", "gpu"]  # another part has another limit


def test_an_estimate_that_fails_is_said_and_stops_nothing(tmp_path: Path, asked: list[str]) -> None:
    said = Said()
    assert _trusted_batch(part_with_limit(tmp_path, "broken"), said) is None
    assert "no torch here" in said.lines[-1]
    assert asked == ["broken"]


def test_no_estimate_without_a_limit_after_measurements_or_where_none_is_wanted(
    tmp_path: Path, asked: list[str]
) -> None:
    assert _trusted_batch(part_with_limit(tmp_path, estimate=False), Said()) is None
    assert _trusted_batch(part_with_limit(tmp_path)._replace(cluster=ClusterSpec()), Said()) is None
    append_record(tmp_path / "profile" / "n1.jsonl", measurement(Configuration(1, 1, 32)))
    assert _trusted_batch(part_with_limit(tmp_path), Said()) is None
    assert asked == []
