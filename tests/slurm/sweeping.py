"""Run the sweep command on the test cluster, as a user does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

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
    command = [sys.executable, "-m", "tula_hpc.sweep", str(path), "--cluster", str(TEMPLATE)]
    command += ["--run-dir", str(folder / "run"), *options]
    command += [word for setting in settings for word in ("--set", setting)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment, timeout=580)
