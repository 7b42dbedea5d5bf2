"""The trial of a workload on the command's own machine: each mistake leads to one line, and nothing else to any."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from tula_hpc.config import WorkloadSpec, load_sweep
from tula_hpc.profiling import rehearsal_process
from tula_hpc.records import Trial
from tula_hpc.user_code import own_data
from tula_hpc.workloads.workload import build_workload

OWN = """
import torch
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

class Net(nn.Module):
    def __init__(self, classes, size):
        super().__init__()
        self.head = nn.Linear(3 * size * size, classes)
        self.spare = nn.Linear(1, 1)
        self.spare.requires_grad_(False)

    def forward(self, images):
        return self.head(images.flatten(1))

def net(classes, image_size):
    return Net(classes, image_size)

def tensors(count=40):
    random = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, 8, 8, generator=random), torch.arange(count) % 4

def data(spec):
    return TensorDataset(*tensors()), TensorDataset(*tensors(12)), 4
"""
SWEEP = """
name = "x"
[workload]
model = "mine:net"
dataset = "mine:data"
[search]
cluster_sizes = [{nodes}]
min_batch = 8
max_batch = 16
"""


def tried(folder: Path, *, own: str = OWN, nodes: int = 1, cluster: str = "", more: str = "") -> int:
    """Try the workload in this process; return the exit code."""
    (folder / "mine.py").write_text(own)
    sys.modules.pop("mine", None)
    (folder / "sweep.toml").write_text(SWEEP.format(nodes=nodes).replace("[search]", f"{more}\n[search]"))
    (folder / "cluster.toml").write_text(f'name = "c"\n{cluster}\n')
    return rehearsal_process.main([str(folder / "sweep.toml"), str(folder / "cluster.toml")])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def test_a_workload_as_it_should_be_has_an_identity(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tried(here) == 0
    identity = Trial.model_validate_json(capsys.readouterr().out).identity
    assert (identity.train_samples, identity.test_samples, identity.item) == (40, 12, "float32 3×8×8 with int64")
    assert (identity.parameters, identity.gradient_bytes) == (193 * 4 + 2, 193 * 4 * 4)
    assert [*identity.sources] == ["mine.py"]


def test_data_that_differ_from_call_to_call_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    it = "    return TensorDataset(*tensors()), TensorDataset(*tensors(12)), 4"
    drawn = "    return TensorDataset(*tensors(next(sizes))), TensorDataset(*tensors(12)), 4"
    counting = OWN.replace("def data(", "import itertools\nsizes = itertools.count(40)\ndef data(")
    assert tried(here, own=counting.replace(it, drawn)) == 2
    output = capsys.readouterr().err
    assert "mine:data returns 40 and 12 training and test samples, and 41 and 12 when it is called again;" in output


CUT = "subsets = Subset(whole, order[:40]), Subset(whole, order[40:])"
SPLITS = {
    "torch": ("subsets = torch.utils.data.random_split(whole, [40, 12])", True),
    "numpy": (f"order = numpy.random.permutation(52)\n    {CUT}", True),
    # the two seeds give different first items, unlike one pair in 52
    "a generator of its own": (f"order = numpy.random.default_rng(next(SEEDS)).permutation(52)\n    {CUT}", False),
}


@pytest.mark.parametrize("name", SPLITS)
def test_a_split_is_the_same_in_all_processes_or_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    code, is_same = SPLITS[name]
    head = "def data(spec):\n"
    imports = "import itertools\nimport numpy\nSEEDS = itertools.count()\n"
    body = f"    whole = TensorDataset(*tensors(52))\n    {code}\n    return *subsets, 4\n"
    own = OWN.replace(head, f"{imports}{head}{body}")
    assert tried(here, own=own) == (0 if is_same else 2)
    message = "mine:data returns another training item 0 when it is called again; all workers have to get the same"
    assert (message in capsys.readouterr().err) != is_same
    if is_same:
        first, second = (own_data(WorkloadSpec(model="mine:net", dataset="mine:data")) for _ in range(2))
        assert all(torch.equal(first.test[n][0], second.test[n][0]) for n in range(12))


def test_pythons_warnings_about_own_code_are_passed_on(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    it = "        return self.head"
    own = OWN.replace(it, f"        nn.functional.mse_loss(images, images[:1])\n{it}")
    assert tried(here, own=own) == 0
    (words,) = Trial.model_validate_json(capsys.readouterr().out).warnings
    assert words.startswith("mine.py:14: Using a target size")
    assert tried(here) == 0
    assert Trial.model_validate_json(capsys.readouterr().out).warnings == ()


@pytest.mark.parametrize("width", ["[:, 0]", "[:, :1]"])
def test_a_loss_in_which_shapes_broadcast_is_a_warning(
    here: Path, capsys: pytest.CaptureFixture[str], width: str
) -> None:
    outputs = f"outputs{width}"
    loss = f"def loss(outputs, targets):\n    return ({outputs} - targets).pow(2).reshape(len(targets), -1).mean(1)\n"
    assert tried(here, own=OWN + loss, more='loss = "mine:loss"') == 0
    words = Trial.model_validate_json(capsys.readouterr().out).warnings
    assert len(words) == (width == "[:, :1]")
    assert all(one.startswith("mine:loss gives a sample another loss in a batch than alone, for") for one in words)


RANDOM = "torch.randn(count, 3, 8, 8, generator=random)"
MISTAKES = {
    "doubles": (
        (RANDOM, f"{RANDOM}.double()"),
        "workload.dataset: mine:net cannot take inputs of 3×8×8: .*; the data set gives float64: return",
    ),
    "an item that is not finite": (
        (f"return {RANDOM}", f"images = {RANDOM}\n    images[0, 0] = -torch.inf\n    return images"),
        "workload.dataset: mine:data: training item 0 holds inf or nan",
    ),
    "a missing import": (
        ("import torch\n", "import torch, not_there\n"),
        "No module named 'not_there' (mine.py:2); correct the name, or install what is missing",
    ),
    "an error while importing": (
        ("import torch\n", "import torch\ntorch.nowhere\n"),
        "mine cannot be imported: AttributeError: .* (mine.py:",
    ),
    "a command line that is parsed while importing": (
        ("import torch\n", "import torch, argparse\nargparse.ArgumentParser().parse_args(['--lr'])\n"),
        "mine cannot be imported: SystemExit: 2 (mine.py:3): it exits, as it does if it cannot parse the command line",
    ),
    "a data set that ends the process": (
        ("def data(spec):", "def data(spec):\n    raise SystemExit('no data here')"),
        "workload.dataset: mine:data failed: SystemExit: no data here (mine.py:",
    ),
    "a model that leaves the process at once": (
        ("    return Net(", "    import os\n    os._exit(0)\n    return Net("),
        "workload.model: mine:net failed: SystemExit: os._exit(0) (mine.py:",
    ),
    "a forward pass that raises": (
        ("self.head(", "self.haed("),
        "cannot take inputs of 3×8×8 from the test set: AttributeError: .* (mine.py:",
    ),
    "a debugger that was left in": (
        ("        return self.head", "        import bdb\n        raise bdb.BdbQuit\n        return self.head"),
        "cannot take inputs of 3×8×8 from the test set: a breakpoint() or pdb stops it; remove that (mine.py:",
    ),
    "one that raises in training": (
        ("        return self.head", "        assert not self.training, 'oh'\n        return self.head"),
        "workload.model: mine:net cannot take a training step: AssertionError: oh (mine.py:",
    ),
    "other scores than classes": (("images.flatten(1))", "images.flatten(1))[:, :3]"), r"shape (8, 3).*expected"),
    "labels of no class": (
        ("% 4", "% 4 + 5 * (torch.arange(count) % 10 == 4)"),
        "mine:data has label 5 at item 4 of the train set, and 3 more; expected 0 to 3",
    ),
    "a first label of no class": (
        ("% 4", "% 4 + 4"),
        "mine:data has label .* as item 0 of the train set; expected 0 to 3, as it returned 4 for classes; labels",
    ),
    "items of several shapes": (
        ("return TensorDataset(*tensors())", "return [(torch.zeros(3, 8, 8 + (n > 30)), 1) for n in range(40)]"),
        "has items 0, (float32 tensor of shape (3, 8, 8), int 1), and 32, (float32 tensor of shape (3, 8, 9), int 1), "
        "in the train set that cannot be put into one batch",
    ),
    "a model that is frozen as a whole": (
        ("    return Net(classes, image_size)", "    return Net(classes, image_size).requires_grad_(False)"),
        "mine:net has nothing to train: requires_grad is False for all of its 4 parameters; expected True for those",
    ),
    "a length that is no whole number": (
        ("return TensorDataset(*tensors())", "return type('D', (Dataset,), {'__len__': lambda _: 3.5})()"),
        "mine:data failed: TypeError: 'float' object cannot be interpreted as an integer",
    ),
    "a data set that raises": (
        ("def data(spec):", "def data(spec):\n    {}['x']"),
        "mine:data failed: KeyError: 'x' (mine.py:",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_own_code_is_one_line(here: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (old, new), message = MISTAKES[name]
    assert old in OWN
    code = tried(here, own=OWN.replace(old, new, 1))
    error = capsys.readouterr().err
    # what is missing here may exist elsewhere
    assert code == (3 if name == "a missing import" else 2)
    # argparse writes its usage before
    assert error.count("\n") == 1 or "usage:" in error
    for part in message.split(".*"):
        assert part in error


@pytest.mark.parametrize("ending", ["sys.stderr.write('it is gone\\n')", "raise OSError('already closed')"])
def test_the_mistake_comes_after_what_objects_of_the_code_print_at_their_end(
    here: Path, capsys: pytest.CaptureFixture[str], ending: str
) -> None:
    bar = f"class Bar:\n    def __del__(self):\n        {ending}\n"
    failing = "def data(spec):\n    bar = Bar()\n    raise ValueError('the index file is damaged')\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", lambda found: sys.stderr.write(f"{found.exc_value}\n"))
        assert tried(here, own=f"import sys\n{OWN}\n{bar}{failing}") == 2
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first in ("it is gone", "already closed")
    assert last.startswith("workload.dataset: mine:data failed: ValueError: the index file is damaged (mine.py:")


LATE = """
class Late(Dataset):
    def __init__(self, targets): self.targets = targets
    def __len__(self): return 1000
    def __getitem__(self, index):
        return torch.zeros(3, 8, 8), int(self.targets[index]) {shift}

def data(spec):
    targets = [n % 4 for n in range(1000)]
    targets[600] = 9
    return Late(targets), TensorDataset(*tensors(12)), 4
"""


def test_labels_count_only_where_they_are_those_of_the_items(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tried(here, own=OWN + LATE.format(shift="")) == 2
    assert "has label 9 at item 600 of the train set; expected 0 to 3" in capsys.readouterr().err
    assert tried(here, own=OWN + LATE.format(shift="% 3")) == 0


@pytest.mark.parametrize(("nodes", "code"), [(1, 0), (2, 2)])
def test_parameters_without_a_gradient_matter_to_several_workers(
    here: Path, capsys: pytest.CaptureFixture[str], nodes: int, code: int
) -> None:
    own = OWN.replace("        self.spare.requires_grad_(False)\n", "")
    assert tried(here, own=own, nodes=nodes) == code
    assert ("no gradient to spare.weight, spare.bias" in capsys.readouterr().err) == bool(code)


def test_more_samples_than_there_are_is_a_mistake(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tried(here, more="samples = 50") == 2
    assert capsys.readouterr().err == "workload.samples: 50, but the training set has 40\n"


def tree(folder: Path) -> Path:
    for split in ("train", "test"):
        for label in ("cat", "dog"):
            (folder / split / label).mkdir(parents=True)
            for number in range(8):
                Image.new("RGB", (80, 80), (number, 0, 0)).save(folder / split / label / f"{number}.png")
    return folder


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ("", ""),
        ("test/dog/2.png", "2.png: cannot be decoded"),
        ("train/cat/0.png", "0.png: cannot be decoded"),
        ("train", "expected a folder train/ in it, found: test"),
    ],
)
def test_folders_of_images(here: Path, capsys: pytest.CaptureFixture[str], broken: str, expected: str) -> None:
    folder = tree(here / "images")
    if broken == "train":
        (folder / "train").rename(here / "elsewhere")
    elif broken:
        (folder / broken).write_bytes((folder / broken).read_bytes()[:60])
    more = f'data_dir = "{folder}"\nimage_size = 72'
    (here / "sweep.toml").write_text(
        f'name = "x"\n[workload]\nmodel = "squeezenet1_1"\ndataset = "imagefolder"\n{more}\n[search]\nmax_batch = 32\n'
    )
    (here / "cluster.toml").write_text('name = "c"\n')
    code = {"": 0, "train": 3}.get(broken, 2)
    assert rehearsal_process.main([str(here / "sweep.toml"), str(here / "cluster.toml")]) == code
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == bool(broken)


ASKS_FOR_A_GPU = "assert images.is_cuda, 'expected a tensor on a GPU'\n        return self.head("


@pytest.mark.parametrize(
    ("change", "device", "code"),
    [(ASKS_FOR_A_GPU, "cuda", 0), (ASKS_FOR_A_GPU, "cpu", 2), ("return self.haed(", "cuda", 2)],
)
def test_code_that_asks_for_a_gpu_is_no_mistake_where_training_has_one(
    here: Path, monkeypatch: pytest.MonkeyPatch, change: str, device: str, code: int
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    own = OWN.replace("return self.head(", change)
    assert tried(here, own=own, cluster=f'device = "{device}"\nexecutor = "slurm"\ngres = "gpu:1"') == code


def test_a_large_model_takes_no_step(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tried(here) == 0
    stepped = Trial.model_validate_json(capsys.readouterr().out)
    monkeypatch.setattr(rehearsal_process, "LARGEST_BYTES", 1000)
    monkeypatch.setattr(rehearsal_process, "workload_of", None)
    assert tried(here) == 0
    assert Trial.model_validate_json(capsys.readouterr().out) == stepped


@pytest.mark.parametrize(
    ("statement", "expected"),
    [("raise OSError(116, 'Stale file handle')", "Stale file handle"), ("raise MemoryError", "MemoryError")],
)
def test_what_another_machine_may_do_better_refuses_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], statement: str, expected: str
) -> None:
    assert tried(here, own=OWN.replace("def data(spec):", f"def data(spec):\n    {statement}")) == 1
    assert expected in capsys.readouterr().err


def test_memory_is_estimated_on_the_way(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables = 'executor = "local"\nmemory_gb = 2.0\n[[partitions]]\npartition = "a"\n'
    tables += '[[partitions]]\npartition = "b"\nmemory_gb = 4.0'
    tried(here, cluster=tables)
    capsys.readouterr()
    files = [str(here / "sweep.toml"), str(here / "cluster.toml")]
    assert rehearsal_process.main([*files, "--memory", "a", "--memory", "b"]) == 0
    found = Trial.model_validate(json.loads(capsys.readouterr().out)).footprints
    assert {name: footprint.limit_bytes for name, footprint in found.items()} == {
        "a": int(0.9 * 2 * 1024**3),
        "b": int(0.9 * 4 * 1024**3),
    }


def test_jobs_find_what_the_trial_found(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tried(here) == 0
    found = Trial.model_validate_json(capsys.readouterr().out).identity
    spec = load_sweep(here / "sweep.toml").workload
    for changed in ({}, {"channels_last": True}, {"seed": 3}, {"augment": False}):
        assert build_workload(spec.model_copy(update=changed)).identity == found


def test_a_model_that_computes_activations_again_is_the_same_one() -> None:
    spec = WorkloadSpec(model="tula_hpc.workloads.small_cnns:compact_cnn", dataset="digits")
    again = spec.model_copy(update={"activation_checkpointing": True})
    assert build_workload(again).identity == build_workload(spec).identity
