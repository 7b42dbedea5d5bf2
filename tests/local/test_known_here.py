"""Mistakes as a user sees them: the command refuses what it can find itself; the rest ends in one job, once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked_jobs import run_command
from tests.known import known
from tula_hpc.records import RunDirectory
from tula_hpc.sweep import main

OWN = """
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

WIDTH = 16

class Net(nn.Module):
    def __init__(self, classes, size):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3 * size * size, WIDTH), nn.ReLU(), nn.Linear(WIDTH, classes))

    def forward(self, images):
        return self.body(images.flatten(1))

def net(classes, image_size):
    return Net(classes, image_size)

class Items(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        if index == BROKEN:
            raise KeyError("colour")
        return torch.full((3, 8, 8), index / 256), index % 4

BROKEN = -1

def data(spec):
    return Items(), Items(), 4
"""
SWEEP = """
name = "known"
[workload]
model = "mine:net"
dataset = "mine:data"
epochs = 1
loader_workers = {loaders}
[search]
cluster_sizes = [1]
min_batch = 32
max_batch = 64
mode = "full"
pack = "never"
min_steps = 5
max_steps = 5
warmup_steps = 1
[objective]
kind = "time"
[training]
method = "lbt"
"""


@pytest.fixture(autouse=True)
def no_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn bytecode off: Python would take a file that was changed within a second for the old one."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def sweep(folder: Path, own: str, *options: str, loaders: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command in a user's folder."""
    (folder / "mine.py").write_text(own)
    (folder / "known.toml").write_text(SWEEP.format(loaders=loaders))
    return run_command(main, ["known.toml", "--run-dir", "run", *options], folder)


def jobs(folder: Path, stage: str) -> int:
    return len(RunDirectory(folder / "run").history().submissions(stage))


def test_a_bug_that_a_few_items_show_is_refused_before_any_job_and_by_a_dry_run(tmp_path: Path) -> None:
    broken = OWN.replace("self.body(images", "self.boddy(images")
    message = (
        "mine:net cannot take inputs of 3×8×8 from the test set: AttributeError: 'Net' object has no attribute 'boddy'"
    )
    dry = sweep(tmp_path, broken, "--dry-run")
    assert (dry.returncode, dry.stdout) == (2, "")
    assert message in dry.stderr
    assert not (tmp_path / "run").exists()
    real = sweep(tmp_path, broken)
    assert (real.returncode, jobs(tmp_path, "profile")) == (2, 0)
    assert f"{message} (mine.py:14)\nNothing was submitted.\n" in real.stderr
    assert "Traceback" not in real.stderr


@pytest.mark.parametrize("loaders", [0, 1])
def test_a_bug_that_only_a_job_finds_ends_it_after_one_job_with_a_sentence(tmp_path: Path, loaders: int) -> None:
    done = sweep(tmp_path, OWN.replace("BROKEN = -1", "BROKEN = 77"), loaders=loaders)
    assert (done.returncode, jobs(tmp_path, "profile")) == (1, 1)
    message = "workload.dataset: item 77 of the training set cannot be loaded: KeyError: 'colour' (mine.py:25)"
    assert f"profile: nothing could be measured; {message}\nlog: " in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_trained_is_what_was_measured(tmp_path: Path) -> None:
    measured = sweep(tmp_path, OWN, "--until", "profile")
    assert measured.returncode == 0, measured.stderr
    run = RunDirectory(tmp_path / "run")
    identities = [row.identity for row in run.measurements().records]
    trial = known(run.trial())
    assert len(identities) == 2
    assert all(identity == trial.identity for identity in identities)
    doubled = OWN.replace("WIDTH = 16", "WIDTH = 32")
    refused = sweep(tmp_path, doubled)
    before, now = (193 * width + (width + 1) * 4 for width in (16, 32))
    assert (refused.returncode, jobs(tmp_path, "train")) == (2, 0)
    assert f"the model has {now:,} parameters now, {before:,} before; changed since then: mine.py" in refused.stderr
    # the job finds what the command does not check
    failed = sweep(tmp_path, doubled, "--set", "search.estimate=false")
    assert (failed.returncode, jobs(tmp_path, "train")) == (1, 1)
    assert (
        "warning: mine.py changed since the measurements; if that changed the model, the training's job refuses it"
        in failed.stderr
    )
    assert f"what would be trained now is not what was measured: the model has {now:,} parameters" in failed.stderr
    trained = sweep(tmp_path, OWN + "\n# a remark\n", "--until", "train")
    assert trained.returncode == 0, trained.stderr
    assert jobs(tmp_path, "train") == 2
    assert "changed since" not in trained.stderr
    over = sweep(tmp_path, doubled, "--until", "train")
    assert (over.returncode, jobs(tmp_path, "train")) == (0, 2)
    assert "mine.py changed since the measurements; nothing is trained again; another --run-dir" in over.stderr
