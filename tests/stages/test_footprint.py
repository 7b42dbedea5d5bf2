"""The estimate of memory before any profile: what it counts, and how it is requested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tula_hpc.config import ClusterSpec, SweepSpec, WorkloadSpec
from tula_hpc.records import Footprint
from tula_hpc.stages import batches_that_fit as client
from tula_hpc.workloads.fake_steps import AllocationTracker, Counts, Shapes, count
from tula_hpc.workloads.footprint import estimate_footprint, main

SHAPES = Shapes.of_images(32, 10)
FLOAT = 4
COMPACT = "tula_hpc.workloads.small_cnns:compact_cnn"


@cache
def counts(model: str = COMPACT, world: int = 1, device: str = "cpu", **workload: Any) -> Counts:
    return count(WorkloadSpec(model=model, **workload), SHAPES, world, device, (128, 512), fake=True)


def sweep(**workload: Any) -> SweepSpec:
    fields = {"model": COMPACT, "dataset": "synthetic", **workload}
    search = {"cluster_sizes": [2, 4], "min_batch": 32, "max_batch": 1024}
    return SweepSpec.model_validate({"name": "x", "workload": fields, "search": search})


def test_a_tracker_counts_storages_once_and_until_they_are_freed() -> None:
    with AllocationTracker() as tracker:
        kept = torch.zeros(1000)
        tracker.watch()
        view = kept.view(10, 100)[2:]
        large = torch.ones(5000)
        del large
        small = view + 1.0
        peak = tracker.peak()
    assert peak.live_bytes == (1000 + 5000) * FLOAT
    assert peak.blocks == (5000 * FLOAT,)
    assert small.shape == (8, 100)


@pytest.mark.processes
def test_counting_on_fake_tensors_equals_counting_on_real_ones() -> None:
    workload = WorkloadSpec(model=COMPACT)
    fake, real = (count(workload, SHAPES, 1, "cpu", (2, 4), fake=kind) for kind in (True, False))
    assert fake == real


@pytest.mark.processes
def test_parameters_states_and_gradients_are_counted_as_they_are() -> None:
    # at least; the compact model has millions
    model_bytes = 10_000
    sgd, adamw, plain = counts(), counts(optimizer="adamw"), counts(momentum=0.0)
    assert sgd.parameters == sgd.gradients == sgd.optimizer > model_bytes
    assert adamw.optimizer >= 2 * adamw.parameters
    assert plain.optimizer == 0


@pytest.mark.processes
def test_states_are_divided_under_zero() -> None:
    whole, half, eighth = counts(world=1), counts(world=2, zero_stage=1), counts(world=8, zero_stage=1)
    assert whole.optimizer > half.optimizer >= eighth.optimizer
    assert half.optimizer < 0.8 * whole.optimizer
    assert counts(world=1, zero_stage=1) == whole


@pytest.mark.processes
def test_several_workers_keep_their_gradients_through_the_whole_step() -> None:
    alone, several = counts(), counts(world=2)
    assert alone.fixed < several.fixed <= alone.fixed + alone.gradients
    assert several.per_sample == pytest.approx(alone.per_sample, rel=1e-4)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("option", "smallest", "largest"), [({"precision": "bf16"}, 0.4, 0.9), ({"channels_last": True}, 0.9, 1.2)], ids=str
)
def test_options_change_the_activations(option: dict[str, Any], smallest: float, largest: float) -> None:
    assert smallest < counts(**option).per_sample / counts().per_sample < largest


def dropping(classes: int, image_size: int) -> nn.Module:
    """Return a model for `model = "tests.stages.test_footprint:dropping"`."""
    head = nn.Linear(3 * image_size**2, classes)
    return nn.Sequential(nn.Flatten(), nn.Dropout(), head)


def test_dropout_keeps_a_smaller_mask_on_cuda() -> None:
    cpu, cuda = (counts(f"{__name__}:dropping", device=device) for device in ("cpu", "cuda"))
    assert cuda.per_sample < 0.9 * cpu.per_sample


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.processes)])
def test_an_estimate_grows_with_the_batch_and_says_what_fits(device: str) -> None:
    open_ended = estimate_footprint(sweep(), ClusterSpec.model_validate({"device": device}))
    batches, peaks = list(open_ended.peaks), list(open_ended.peaks.values())
    assert batches == [8, 16, 32, 64, 128, 256, 512]
    assert all(low < high for low, high in pairwise(peaks))
    assert open_ended.largest_local_batch is None
    assert open_ended.world_size == 2
    key = "device_memory_gb" if device == "cuda" else "memory_gb"
    copied = open_ended.checkpoint_bytes
    assert copied == open_ended.parameter_bytes + open_ended.optimizer_bytes
    other_bytes = open_ended.scaling_bytes + (copied if device == "cpu" else 0)
    needed = (peaks[3] + other_bytes + 1) / 0.9 / 1024**3
    limited = estimate_footprint(sweep(), ClusterSpec.model_validate({"device": device, key: needed + 0.02}))
    assert limited.largest_local_batch == 64
    tiny = estimate_footprint(sweep(), ClusterSpec.model_validate({"device": device, key: 0.001}))
    assert tiny.largest_local_batch == 0
    assert tiny.beside_bytes == other_bytes
    assert tiny.parameter_bytes + other_bytes < tiny.before_batch_bytes < peaks[0] + other_bytes


@pytest.mark.processes
def test_a_lone_worker_may_have_to_take_passes_for_norms_that_are_free_elsewhere() -> None:
    alone = sweep().model_copy(update={"search": sweep().search.model_copy(update={"cluster_sizes": (1, 2)})})
    found = [estimate_footprint(spec, ClusterSpec()) for spec in (alone, sweep())]
    assert [estimate.scaling_bytes for estimate in found] == [found[0].gradient_bytes, 0]


class Branching(nn.Module):
    """A model with a branch that depends on values."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(3 * 8 * 8, classes)

    def forward(self, images: Tensor) -> Tensor:
        if float(images.sum()) > 1e9:
            images = images * 0.5
        output: Tensor = self.head(images.flatten(1))
        return output


def branching(classes: int, image_size: int) -> nn.Module:
    """Return a model for `model = "tests.stages.test_footprint:branching"`."""
    return Branching(classes)


def test_a_model_that_needs_values_is_counted_on_real_tensors() -> None:
    found = estimate_footprint(sweep(model=f"{__name__}:branching", dataset="digits"), ClusterSpec())
    assert found.method == "real"
    assert any("real tensors" in text for text in found.assumptions)
    assert found.parameter_bytes == (3 * 8 * 8 + 1) * 10 * FLOAT


@settings(max_examples=40)
@given(
    st.dictionaries(st.sampled_from([1, 2, 4, 8, 64, 512]), st.integers(1, 10**12), min_size=1), st.integers(1, 4096)
)
def test_between_the_powers_of_two_lie_straight_lines(peaks: dict[int, int], batch: int) -> None:
    rising = dict(zip(sorted(peaks), sorted(peaks.values()), strict=True))
    names = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes_per_sample", "fixed_bytes")
    found = Footprint(**dict.fromkeys(names, 0), peaks=rising)
    assert all(found.peak_bytes(known) == pytest.approx(peak) for known, peak in rising.items())
    assert found.peak_bytes(batch) <= found.peak_bytes(batch + 1) * (1 + 1e-9)


def files(folder: Path, model: str = COMPACT, cluster: str = "memory_gb = 4.0") -> tuple[Path, Path]:
    content = f'name = "x"\n[workload]\nmodel = "{model}"\ndataset = "synthetic"\n'
    (folder / "sweep.toml").write_text(content)
    (folder / "cluster.toml").write_text(f'name = "c"\n{cluster}\n')
    return folder / "sweep.toml", folder / "cluster.toml"


def test_the_command_prints_a_table_or_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep_file, cluster_file = map(str, files(tmp_path, cluster="memory_gb = 0.9"))
    assert main([sweep_file, "--cluster", cluster_file]) == 0
    table = capsys.readouterr().out
    assert "parameters" in table
    assert "too large" in table
    assert main([sweep_file, "--cluster", cluster_file, "--json"]) == 0
    assert Footprint.model_validate(json.loads(capsys.readouterr().out)).limit_bytes == int(0.9 * int(0.9 * 1024**3))


TWO_PARTITIONS = """
executor = "local"
[[partitions]]
partition = "small"
memory_gb = 0.9
[[partitions]]
partition = "large"
memory_gb = 64.0
"""


@pytest.mark.processes
def test_each_partition_has_its_table_and_a_record_is_of_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [str(files(tmp_path)[0]), "--cluster", str(files(tmp_path, cluster=TWO_PARTITIONS)[1])]
    assert main(asked) == 0
    small, large = capsys.readouterr().out.split("Partition large:\n")
    assert small.startswith("Partition small:\n")
    assert ("too large" in small, "too large" in large) == (True, False)
    assert main([*asked, "--json", "--partition", "large"]) == 0
    assert Footprint.model_validate(json.loads(capsys.readouterr().out)).limit_bytes == int(0.9 * 64 * 1024**3)
    assert main([*asked, "--json"]) == 2
    assert capsys.readouterr().err == "--partition: --json prints one of [[partitions]]; give small or large\n"
    assert main([*asked, "--partition", "huge"]) == 2
    assert "no partition 'huge'; expected small or large" in capsys.readouterr().err


def test_a_reader_that_closes_the_output_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    # closing writes the rest, as the end of a process does
    with os.fdopen(write_end, "w") as nobody, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", nobody)
        assert main([str(files(tmp_path)[0])]) == 0
    assert capsys.readouterr().err == ""


def test_keys_can_be_set_and_data_that_is_known_by_name_need_not_be_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_file, cluster_file = map(str, files(tmp_path))
    changes = ["workload.dataset=cifar100", "workload.data_dir=/nowhere/at/all", "search.max_batch=64"]
    changes += ["cluster.memory_gb=2.0"]
    options = [part for text in changes for part in ("--set", text)]
    assert main([sweep_file, "--cluster", cluster_file, "--json", *options]) == 0
    footprint = Footprint.model_validate(json.loads(capsys.readouterr().out))
    assert max(footprint.peaks) == 64
    assert footprint.limit_bytes == int(0.9 * 2 * 1024**3)


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(files(tmp_path, model="resnet17")[0])]) == 2
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    assert "resnet17" in output


def test_an_interrupt_ends_it_like_any_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> Footprint:
        raise KeyboardInterrupt

    monkeypatch.setattr("tula_hpc.workloads.footprint.estimate_footprint", interrupted)
    assert main([str(files(tmp_path)[0])]) == 130


def test_the_client_returns_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The client returns its command's record, here without a process."""

    def here(command: list[str], _timeout_s: float) -> subprocess.CompletedProcess[str]:
        code = main(command[command.index("tula_hpc.workloads.footprint") + 1 :])
        return subprocess.CompletedProcess(command, code, *capsys.readouterr())

    monkeypatch.setattr(client, "run_apart", here)
    found = client.estimate(*files(tmp_path, cluster="memory_gb = 4.0"))
    assert found.footprint is not None, found.reason
    assert found.trusted_batch == found.footprint.largest_local_batch


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "timeout_s", "reason"),
    [
        ("import sys; sys.exit('no such thing')", 60.0, "no such thing"),
        ("print('{}')", 60.0, "is damaged"),
        ("import time; time.sleep(60)", 0.2, "took more than"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 60.0, "exit code -9"),
    ],
    ids=["fails", "damaged", "late", "killed"],
)
def test_any_failure_is_a_reason_and_no_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, timeout_s: float, reason: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}"\n')
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(client, "TIMEOUT_S", timeout_s)
    found = client.estimate(*files(tmp_path))
    assert found.footprint is None
    assert found.trusted_batch is None
    assert reason in found.reason


def test_a_python_that_cannot_be_started_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    assert "could not be started" in client.estimate(*files(tmp_path)).reason
