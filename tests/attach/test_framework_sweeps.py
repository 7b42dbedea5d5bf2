"""Scripts on frameworks, as they are: profiled, planned, trained and reported on this machine, through the command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from tula_hpc.records import RunDirectory, is_usable, read_metrics

SCRIPTS = Path(__file__).parent / "scripts"
SAMPLES, BATCH, EPOCHS = 128, 16, 2
STEPS = EPOCHS * SAMPLES // BATCH


class Case(NamedTuple):
    until: str
    method: str = "lbt"
    arguments: tuple[str, ...] = ()
    # keys of [workload]
    more: Mapping[str, Any] = MappingProxyType({})


def swept(folder: Path, script: str, case: Case) -> RunDirectory:
    """A run of two workers at one batch."""
    sweep = folder / "mine.toml"
    given = ["--batch-size", "{local_batch}", "--epochs", "{epochs}", "--samples", str(SAMPLES), *case.arguments]
    more = "\n".join(f"{key} = {json.dumps(value)}" for key, value in case.more.items())
    sweep.write_text(f"""
name = "mine"
[workload]
script = "{SCRIPTS / script}"
arguments = {json.dumps(given)}
samples = {SAMPLES}
epochs = {EPOCHS}
{more}
[search]
cluster_sizes = [2]
min_batch = {BATCH}
max_batch = {BATCH}
warmup_steps = 1
min_steps = 5
max_steps = 5
[training]
method = "{case.method}"
base_batch = 8
log_interval_steps = 1
""")
    command = [sys.executable, "-m", "tula_hpc.sweep", str(sweep), "--run-dir", str(folder / "run")]
    command += ["--until", case.until]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=400)
    assert done.returncode == 0, done.stderr + done.stdout
    return RunDirectory(folder / "run")


CASES = {
    "on_trainer.py": Case("plan"),
    "on_lightning.py": Case("report", "ags"),
    "on_accelerate.py": Case("plan", arguments=("--accumulate", "{accumulation}"), more={"accumulation": 2}),
    "on_timm.py": Case("report", "ags", more={"metric": r"Acc@1 (?P<test_accuracy>[\d.]+)"}),
}


@pytest.mark.parametrize("script", CASES)
def test_a_script_is_profiled_planned_trained_and_reported(tmp_path: Path, script: str) -> None:
    """Trainings on the Trainer and accelerate are in test_frameworks.py."""
    case = CASES[script]
    run = swept(tmp_path, script, case)
    (measured,) = run.measurements().records
    assert is_usable(measured)
    assert (measured.nodes, measured.local_batch, measured.backend) == (2, BATCH // 2, "gloo")
    assert measured.kept == (script != "on_timm.py")
    plan = run.read_plan()
    assert plan is not None
    assert plan.chosen.global_batch == BATCH
    if case.until == "plan":
        return
    metrics = read_metrics(run.train().metrics_file)
    assert [row.step for row in metrics.steps] == list(range(1, STEPS + 1))
    assert [row.epoch for row in metrics.epochs] == list(range(1, EPOCHS + 1))
    assert all(0.0 <= (row.test_accuracy or -1.0) <= 1.0 for row in metrics.epochs)
    assert len({row.scale_mean for row in metrics.steps} - {None}) > STEPS // 2
    assert (run.root / "report" / "report.html").exists()
