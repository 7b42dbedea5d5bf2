"""Loader processes ignore the signals that ask a job to stop, but always end with their owner."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OWNER = """
import multiprocessing, time
from tula_hpc.data.loader import make_train_loader

class Items:
    def __len__(self): return 8
    def __getitem__(self, index): return {outcome}

if __name__ == "__main__":
    options = dict(local_batch=4, rank=0, world_size=1, seed=0, loader_workers=1, pin_memory=False)
    stream = make_train_loader(Items(), **options).stream()
    next(stream)
    (process,) = multiprocessing.active_children()
    print(process.pid, flush=True)
    time.sleep(600)
"""


def owner(folder: Path, name: str, outcome: str) -> subprocess.Popen[str]:
    """Start a program with a loader process, which imports its data set from the program's file."""
    path = folder / f"{name}.py"
    path.write_text(OWNER.format(outcome=outcome))
    settings = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, str(path)], env=settings, cwd=folder, **pipes)


def test_loader_processes_end_with_their_owner_however_it_ends(tmp_path: Path) -> None:
    """They survive signals that ask a job to stop; an owner that fails or is killed leaves none behind."""
    killed, failed = owner(tmp_path, "killed", "index"), owner(tmp_path, "failed", "1 / 0")
    assert killed.stdout is not None
    loader_process = int(killed.stdout.readline())
    for number in (signal.SIGTERM, signal.SIGUSR2):
        os.kill(loader_process, number)
    alive = os.pidfd_open(loader_process)
    assert not select.select([alive], [], [], 0.5)[0]
    killed.kill()
    assert select.select([alive], [], [], 30.0)[0]
    os.close(alive)
    killed.communicate()
    _, words = failed.communicate(timeout=60)
    assert failed.returncode == 1
    assert "ZeroDivisionError" in words
