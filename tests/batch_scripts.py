"""A stand-in for Slurm: accepts a batch script as `sbatch` does, and runs it as the first node of a job does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tula_hpc.config import ClusterSpec
from tula_hpc.launch import slurm
from tula_hpc.launch.launcher import Launcher
from tula_hpc.records import RunDirectory

JOB_ID = "7"
SBATCH = """#!/bin/sh
cp "$1" {folder}/script
echo Submitted batch job 7
"""
# skip srun's options, which come before the program, Python
SRUN = """#!/bin/bash
while [ "$1" != {python} ]; do shift; done
exec "$@"
"""
SCONTROL = """#!/bin/sh
echo "$@" >>{folder}/scontrol.log
"""


class FewLines:
    """A launcher that submits to this stand-in, and the script of the latest submission."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **cluster: Any) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        for name, text in {"sbatch": SBATCH, "srun": SRUN, "scontrol": SCONTROL}.items():
            (folder / "bin" / name).write_text(text.format(folder=folder, python=sys.executable))
            (folder / "bin" / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
        monkeypatch.setattr(slurm, "largest_array", lambda: 1000)
        self.run_directory = RunDirectory(folder / "run").create()
        self.launcher = Launcher(ClusterSpec(executor="slurm", **cluster), self.run_directory, "tula-x")

    def submit(self, *jobs: Callable[[], Any]) -> Path:
        """Submit jobs; return the submission's folder."""
        return self.launcher.submit(jobs, stage="train", nodes=1, minutes=5)[0].folder

    @property
    def script(self) -> str:
        """The batch script that sbatch received."""
        return (self.folder / "script").read_text()

    def start(self, index: int | None = None) -> subprocess.Popen[str]:
        """Start the script, as a task of a job array if an index is given."""
        task = {} if index is None else {"SLURM_ARRAY_JOB_ID": JOB_ID, "SLURM_ARRAY_TASK_ID": str(index)}
        own = {"SLURM_JOB_ID": JOB_ID, "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1", **task}
        command = ["bash", str(self.folder / "script")]
        out, err = subprocess.PIPE, subprocess.STDOUT
        return subprocess.Popen(command, env={**os.environ, **own}, text=True, stdout=out, stderr=err)

    def run(self, index: int | None = None) -> tuple[int, str]:
        """Run the script to its end; return its exit code and its output."""
        with self.start(index) as process:
            output, _ = process.communicate(timeout=60)
        return process.returncode, output
