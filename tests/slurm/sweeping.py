"""Run the sweep command on the test cluster, as a user does, but in a fork that need not load torch.

The command is started for real in `faults/test_command_faults.py`. Its jobs, which Slurm starts, are real everywhere.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.forked_jobs import run_command
from tula_hpc.sweep import main

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "slurm_templates" / "testcluster.toml"
Done = subprocess.CompletedProcess[str]


def run_sweep(
    text: str, folder: Path, environment: Mapping[str, str], *options: str, settings: tuple[str, ...] = ()
) -> Done:
    """Run a sweep or a study from the text of its file; the run directory is `folder`/run."""
    path = folder / "sweep.toml"
    path.write_text(text)
    return run_sweep_file(path, folder, environment, *options, settings=settings)


def run_sweep_file(
    path: Path, folder: Path, environment: Mapping[str, str], *options: str, settings: tuple[str, ...] = ()
) -> Done:
    """Run a sweep or a study from its file; each of the settings is `TABLE.KEY=VALUE`."""
    arguments = [str(path), "--cluster", str(TEMPLATE), "--run-dir", str(folder / "run"), *options]
    arguments += [word for setting in settings for word in ("--set", setting)]
    return run_command(main, arguments, ROOT, environment)
