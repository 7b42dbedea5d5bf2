"""Own models and data: the example works, and every departure from the protocol is one line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tula_hpc.config import ClusterSpec, SweepSpec, WorkloadSpec
from tula_hpc.data.loader import make_train_loader
from tula_hpc.ddp.worker import Worker
from tula_hpc.env import WorkerEnvironment
from tula_hpc.errors import InputError
from tula_hpc.records import Configuration
from tula_hpc.user_code import own_data, own_function
from tula_hpc.workloads.workload import Workload, build_workload

EXAMPLES = Path(__file__).parents[1] / "examples"
MODEL, DATASET = "own_workload:perceptron", "own_workload:stripes"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search the working directory for modules although it is not on Python's path, as in a fresh process."""
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", str(EXAMPLES))])


def accuracy(workload: Workload) -> float:
    model = workload.model.eval()
    right = [int(model(image[None]).argmax()) == label for image, label in (workload.test[i] for i in range(64))]
    return float(sum(right) / len(right))


@pytest.mark.processes
def test_the_example_trains() -> None:
    workload = build_workload(WorkloadSpec(model=MODEL, dataset=DATASET))
    assert (workload.classes, workload.image_size) == (4, 16)
    loader = make_train_loader(
        workload.train, local_batch=32, rank=0, world_size=1, seed=0, loader_workers=0, pin_memory=False
    )
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.1)
    losses = []
    for (images, labels), _ in zip(loader.stream(), range(100), strict=False):
        optimizer.zero_grad()
        loss = workload.criterion.loss(workload.model(images), labels)
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2
    assert accuracy(workload) > 0.8


def test_own_parts_work_with_built_in_ones() -> None:
    assert build_workload(WorkloadSpec(model=MODEL, dataset="digits")).image_size == 8
    workload = build_workload(WorkloadSpec(model="squeezenet1_1", dataset=DATASET, image_size=8, samples=100))
    assert len(workload.train) == 100  # type: ignore[arg-type]


HEAD = """
import torch
from torch import nn
class Data(list): pass
item = (torch.zeros(3, 8, 8), 1)
good = Data([item] * 4)
"""


def write_module(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    (folder / "mine.py").write_text(HEAD + body)
    monkeypatch.chdir(folder)
    # another test's folder is removed from the path
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("mine", None)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("f = lambda c, s: 'text'", "mine:f returned an object of type str; expected a torch.nn.Module"),
        ("f = lambda c, s: None", "mine:f returned None; expected a torch.nn.Module"),
        ("f = lambda: None", r"cannot be called with \(classes, image_size\)"),
        ("f = 3", "mine:f is int 3; expected a function"),
        ("", "mine has no 'f'"),
        (
            "import not_there",
            "mine cannot be imported: .*No module named 'not_there' .mine.py:.*; correct the name, or install",
        ),
        ("f = (", "mine cannot be imported"),
        (
            "f = lambda c, s: nn.Sequential(nn.Flatten(), nn.Sequential(nn.ReLU(), nn.Linear(99, c)))",
            r"mat1 and mat2.*; in its layer 1\.1, Linear\(in_features=99, out_features=10, bias=True\)",
        ),
        ("f = lambda c, s: nn.Sequential(nn.Flatten(), nn.Linear(s * s * 3, 99))", r"\(2, 99\).*expected.*\(2, 10\)"),
        (
            "f = lambda c, s: nn.Linear(99, c)",
            r"cannot take inputs of 3×8×8 from the test set: RuntimeError: .*mat1 and mat2",
        ),
    ],
)
def test_a_model_that_is_none_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, expected: str
) -> None:
    write_module(tmp_path, monkeypatch, body)
    # skips the configuration's check, which reads the source, because this test is of what happens on the nodes
    spec = WorkloadSpec.model_construct(**{**WorkloadSpec().model_dump(), "model": "mine:f"})
    with pytest.raises(InputError, match=expected) as raised:
        build_workload(spec)
    assert raised.value.key == "workload.model"
    assert "\n" not in str(raised.value)
    # the place that it names, if any, is in the user's code
    assert all(file not in str(raised.value) for file in ("workload.py", "user_code.py"))


CHOOSY = """
class Choosy(nn.Linear):
    def forward(self, images):
        assert images.device == self.weight.device == torch.device("{wanted}"), images.device
        return super().forward(images.flatten(1))
f = lambda c, s: Choosy(3 * s * s, c)
"""


def test_a_module_that_a_job_does_not_find_is_reported_with_where_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = WorkloadSpec().model_copy(update={"model": "nowhere_at_all:f"})
    with pytest.raises(InputError, match=rf"No module .*; it was looked for among .* and in {tmp_path}$"):
        build_workload(spec)


def test_a_model_is_tried_on_the_device_that_it_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module(tmp_path, monkeypatch, CHOOSY.format(wanted="meta"))
    spec = WorkloadSpec(dataset="digits").model_copy(update={"model": "mine:f"})
    build_workload(spec, torch.device("meta"))
    with pytest.raises(
        InputError, match=r"mine:f cannot take inputs of 3×8×8 from the test set: AssertionError: cpu"
    ) as raised:
        build_workload(spec)
    assert raised.value.key == "workload.model"


def test_a_worker_tries_a_model_on_its_own_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module(tmp_path, monkeypatch, CHOOSY.format(wanted="cpu"))
    monkeypatch.setattr("tula_hpc.ddp.worker.pick_device", lambda *_: torch.device("meta"))
    monkeypatch.setattr("tula_hpc.ddp.worker.check_kernels", lambda *_: None)
    workload = WorkloadSpec(dataset="digits", loader_workers=0).model_copy(update={"model": "mine:f"})
    alone = WorkerEnvironment(0, 1, 0, 0, "1", 0, ("here",), on_slurm=False)
    with pytest.raises(
        InputError, match="mine:f cannot take inputs of 3×8×8 from the test set: AssertionError: meta"
    ) as raised:
        Worker(SweepSpec(name="x", workload=workload), ClusterSpec(), Configuration(1, 1, 8), alone)
    assert raised.value.key == "workload.model"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("def f(spec): return good", r"returned Data of length 4; expected a tuple \(train, test, classes\)"),
        ("def f(spec): return good, good", "returned tuple of length 2"),
        ("def f(spec): return good, good, '2'", "'2' for classes"),
        ("def f(spec): return good, good, True", "True for classes; expected a whole"),
        ("def f(spec): return good, iter(good), 2", "as the test set; expected one with __len__ and __getitem__"),
        (
            "def f(spec): return torch.utils.data.DataLoader(good), good, 2",
            "DataLoader as the train set; return its data set",
        ),
        (
            "good.file = open(__file__)\ndef f(spec): return good, good, 2",
            "a train set that cannot be sent to loader processes: its attribute file, TypeError: cannot pickle '_io",
        ),
        (
            "class Kept(list): pass\nkept = Kept(good)\nkept.change = lambda x: x\ndef f(spec): return good, kept, 2",
            "a test set that cannot be sent to loader processes: its attribute change, .*lambda",
        ),
        (
            "class Odd(int): __reduce__ = lambda _: 1 / 0\ndef f(spec): return [(good[0][0], Odd(1))], good, 2",
            "a train set that cannot be sent to loader processes: ZeroDivisionError",
        ),
        ("def f(spec): return Data(), good, 2", "empty train set"),
        ("def f(spec): return good, good, 1", "label 1 as item 0 of the train set; expected 0 to 0"),
        ("def f(spec): return [(1, 2)], good, 2", r"has \(int 1, int 2\) as item 0 of the train set"),
        ("def f(spec): return good, [(item[0].byte(), 1)], 2", "uint8 tensor"),
        ("def f(spec): return good, [(item[0][0], 1)], 2", r"shape \(8, 8\)"),
        (
            "def f(spec): return good, [(item[0], 1.0)], 2",
            "float 1.0 as the label of item 0 of the test set; expected a whole number from 0 to 1",
        ),
        ("def f(spec): return good, [item[0]], 2", "float32 tensor"),
        ("f = lambda: (good, good, 2)", r"cannot be called with \(spec\)"),
        (
            "def f(spec): return spec.data_dir / 'train'",
            r"mine:f failed: TypeError: .* \(mine.py:\d+\); spec.data_dir is None, as workload.data_dir is not set",
        ),
    ],
)
def test_a_data_set_that_is_none_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, expected: str
) -> None:
    write_module(tmp_path, monkeypatch, body)
    with pytest.raises(InputError, match=expected) as raised:
        build_workload(WorkloadSpec(model="squeezenet1_1", dataset="mine:f"))
    assert raised.value.key == "workload.dataset"


@pytest.mark.parametrize("classes", ["torch.tensor([0, 1]).max() + 1", "torch.arange(3).numpy().max()"])
def test_a_number_of_classes_may_be_of_the_same_kinds_as_a_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, classes: str
) -> None:
    write_module(tmp_path, monkeypatch, f"def f(spec): return good, good, {classes}")
    found = own_data(WorkloadSpec(dataset="mine:f")).classes
    assert (found, type(found)) == (2, int)


def test_a_users_folder_is_searched_after_all_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wave.py").write_text("raise SystemExit('not the library')")
    (tmp_path / "beside.py").write_text("model = lambda classes, image_size: None")
    write_module(tmp_path, monkeypatch, "import wave\nfrom beside import model")
    parameters = ("classes", "image_size")
    own_function("workload.model", "tula_hpc.workloads.small_cnns:compact_cnn", parameters)
    assert str(tmp_path) not in sys.path
    own_function("workload.model", "mine:model", parameters)
    assert sys.path[-1] == str(tmp_path)


def test_a_folder_without_code_is_no_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some packages leave folders like `tests` or `data` behind."""
    (tmp_path / "elsewhere" / "mine").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    write_module(tmp_path, monkeypatch, "model = lambda classes, image_size: None")
    assert own_function("workload.model", "mine:model", ("classes", "image_size"))(1, 1) is None


@pytest.mark.parametrize("label", ["1", "torch.tensor(1)", "__import__('numpy').int64(1)"])
def test_labels_may_be_of_any_whole_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, label: str) -> None:
    write_module(tmp_path, monkeypatch, f"def f(spec): return [(item[0], {label})] * 4, good, 2")
    workload: Any = build_workload(WorkloadSpec(model="squeezenet1_1", dataset="mine:f"))
    loader = make_train_loader(
        workload.train, local_batch=4, rank=0, world_size=1, seed=0, loader_workers=0, pin_memory=False
    )
    _, labels = next(loader.stream())
    assert labels.tolist() == [1, 1, 1, 1]
