"""A sweep that is started among modules that have names of libraries: jobs import none of them, and the user's own."""

from __future__ import annotations

from pathlib import Path

from tests.test_working_directory import NAMES, loaded_by_python_itself, run, trapped
from tula_hpc.records import RunDirectory

SWEEP = """
name = "small"
[workload]
model = "mine:build"
dataset = "mine:data"
samples = 128
loader_workers = 1
[search]
cluster_sizes = [1]
min_batch = 32
max_batch = 64
min_steps = 5
max_steps = 5
"""
MINE = """
from torch import nn
from beside import data

def build(classes, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size**2, classes))
"""
BESIDE = """
import torch
from torch.utils.data import Dataset

class Noise(Dataset):
    def __len__(self):
        return 128
    def __getitem__(self, index):
        return torch.rand(3, 8, 8), index % 2

def data(spec):
    return Noise(), Noise(), 2
"""


def test_jobs_import_nothing_that_is_not_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    for name, text in {"mine.py": MINE, "beside.py": BESIDE, "s.toml": SWEEP}.items():
        (folder / name).write_text(text)
    with trapped(folder, NAMES - loaded_by_python_itself()):
        options = ["--until", "profile", "--set", "cluster.memory_gb=64"]
        done = run(["-m", "tula_hpc.sweep", "s.toml", *options], folder, PATH="/usr/bin:/bin")
    assert done.returncode == 0, done.stderr + done.stdout
    result = RunDirectory(folder / "runs" / "small")
    assert {row.status for row in result.measurements().records} == {"ok"}
    # it was made in a process of its own, which ran the model
    assert result.footprints([""])
    assert not result.history().unsettled("profile")
