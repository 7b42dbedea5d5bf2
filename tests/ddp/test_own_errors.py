"""An exception of the user's own code in a job is one sentence, and everything else is left as it is."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from submitit.core.utils import UncompletedJobError
from torch import Tensor, nn

from tests.forked import ALONE
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.ddp.device_errors import broken_device
from tula_hpc.ddp.own_errors import explaining_own_mistakes
from tula_hpc.ddp.worker import Worker
from tula_hpc.errors import DeviceError, InputError, PreemptedError
from tula_hpc.failure_kinds import Failure
from tula_hpc.launch.diagnosis import classify, informative_line
from tula_hpc.records import Configuration
from tula_hpc.user_code import _CALLERS, blamed

RAISED: dict[str, Exception] = {}


class Moody(nn.Module):
    """A classifier that raises the test's exception in training."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(192, classes))

    def forward(self, images: Tensor) -> Tensor:
        if self.training and "model" in RAISED:
            raise RAISED["model"]
        output: Tensor = self.head(images)
        return output


def moody(classes: int, image_size: int) -> nn.Module:
    """For `model`."""
    return Moody(classes)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """For `loss`."""
    if outputs.requires_grad and "loss" in RAISED:
        raise RAISED["loss"]
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def metric(outputs: Tensor, targets: Tensor) -> Tensor:
    """For `metric`."""
    if "metric" in RAISED:
        raise RAISED["metric"]
    return outputs.argmax(1) == targets


def spec_of(**workload: object) -> SweepSpec:
    own = {"model": f"{__name__}:moody", "loss": f"{__name__}:loss", "metric": f"{__name__}:metric"}
    fields = {"dataset": "digits", "loader_workers": 0, **own, **workload}
    return SweepSpec.model_validate({"name": "x", "workload": fields, "training": {"method": "lbt"}})


def step(spec: SweepSpec, where: str, error: Exception) -> None:
    """Run a training step or an evaluation in which the user's code raises an exception."""
    RAISED.clear()
    worker = Worker(spec, ClusterSpec(), Configuration(1, 1, 8), ALONE)
    inputs, targets = next(worker.batches())
    RAISED[where] = error
    with explaining_own_mistakes(spec.workload):
        worker.score(inputs, targets) if where == "metric" else worker.train_step(inputs, targets)


@pytest.mark.parametrize("where", ["model", "loss", "metric"])
def test_a_bug_in_own_code_is_a_sentence_with_key_file_and_line(where: str) -> None:
    with pytest.raises(InputError) as raised:
        step(spec_of(), where, KeyError("colour"))
    name = {"model": "moody"}.get(where, where)
    words = rf"workload.{where}: {__name__}:{name} failed: KeyError: 'colour' \({Path(__file__).name}:\d+\)"
    assert re.fullmatch(words, str(raised.value))


@pytest.mark.parametrize(("label", "is_told"), [(12, True), (-1, True), (-100, False)])
def test_a_label_beyond_the_scores_is_reported_with_the_loss_that_fails(label: int, is_told: bool) -> None:
    spec = spec_of(metric=None)
    RAISED.clear()
    worker: Any = Worker(spec, ClusterSpec(), Configuration(1, 1, 8), ALONE)
    inputs, targets = next(worker.batches())
    targets[3] = label
    # what torch leaves out is no mistake
    RAISED["loss"] = IndexError("Target is out of bounds.")
    message = r"workload.loss: \S+ failed: IndexError: "
    with pytest.raises(InputError, match=message) as raised, explaining_own_mistakes(spec.workload):
        worker.train_step(inputs, targets)
    hint = (
        f"; a sample has label {label}, and the model gives scores for labels 0 to 9: correct the data set's labels"
        f"{', or give the model more classes' if label > 9 else ''}"
    )
    assert str(raised.value).endswith(hint) == is_told


def test_the_end_of_such_a_job_is_the_users_and_the_log_says_the_sentence() -> None:
    log = (
        'Traceback (most recent call last):\n  File "x.py", line 3\ntula_hpc.errors.InputError: workload.loss: f: no\n'
    )
    assert classify([], log) is Failure.BAD_INPUT
    assert informative_line(log) == "workload.loss: f: no"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        MemoryError("no"),
        DeviceError("node1: uncorrectable ECC error"),
        RuntimeError("CUDA error: uncorrectable ECC error encountered"),
        RuntimeError("NCCL error in: NCCLUtils.hpp:317, unhandled system error"),
        RuntimeError("[../gloo/transport/tcp/pair.cc:525] Read error [10.0.0.1]:1: Connection reset by peer"),
        OSError(errno.ESTALE, "Stale file handle"),
        ConnectionResetError("by a server of data"),
        UncompletedJobError("of a signal at the time limit"),
    ],
    ids=lambda error: f"{type(error).__name__} {str(error)[:20]}",
)
def test_what_may_not_be_the_users_mistake_is_left_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        step(spec_of(), "model", error)
    assert raised.value is error


@pytest.mark.parametrize("error", [PreemptedError("requeue refused"), UncompletedJobError("timed out")])
def test_a_signal_while_the_users_function_runs_is_no_mistake_of_it(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, blamed("workload.model", "mine:f failed"):
        raise error
    assert raised.value is error


def test_a_shipped_model_is_not_the_users_own() -> None:
    spec = spec_of(model="squeezenet1_1", loss=None, metric=None)
    worker: Any = Worker(spec, ClusterSpec(), Configuration(1, 1, 8), ALONE)
    with pytest.raises(RuntimeError), explaining_own_mistakes(spec.workload):
        worker.train_step(torch.zeros(8, 5, 8, 8), torch.zeros(8, dtype=torch.long))


def test_a_layer_of_torch_in_an_own_model_is_the_users_too() -> None:
    spec = spec_of()
    RAISED.clear()
    worker: Any = Worker(spec, ClusterSpec(), Configuration(1, 1, 8), ALONE)
    message = rf"workload.model: {__name__}:moody failed: RuntimeError: .*mat1 and mat2"
    with pytest.raises(InputError, match=message), explaining_own_mistakes(spec.workload):
        worker.train_step(torch.zeros(8, 3, 9, 9), torch.zeros(8, dtype=torch.long))


def test_modules_that_call_the_users_code_are_where_they_are_looked_for() -> None:
    assert [path for path in _CALLERS if not path.is_file()] == []


def test_a_torch_before_2_8_has_no_errors_of_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "AcceleratorError")
    assert broken_device(RuntimeError("CUDA error: uncorrectable ECC error encountered"))
    with pytest.raises(InputError, match="ValueError: mine"):
        step(spec_of(), "model", ValueError("mine"))
