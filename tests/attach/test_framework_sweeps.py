"""Scripts on frameworks, as they are: profiled, planned, trained and reported on this machine, through the command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tula_hpc.records import RunDirectory, is_usable, read_metrics

SCRIPTS = Path(__file__).parent / "scripts"
SAMPLES, BATCH, EPOCHS = 128, 16, 2
STEPS = EPOCHS * SAMPLES // BATCH


def swept(folder: Path, script: str, method: str, *arguments: str, **workload: Any) -> tuple[RunDirectory, str]:
    """A run of two workers at one batch, from profile to report, and what the command printed."""
    sweep = folder / "mine.toml"
    given = ["--batch-size", "{local_batch}", "--epochs", "{epochs}", "--samples", str(SAMPLES), *arguments]
    more = "\n".join(f"{key} = {json.dumps(value)}" for key, value in workload.items())
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
method = "{method}"
base_batch = 8
log_interval_steps = 1
""")
    command = [sys.executable, "-m", "tula_hpc.sweep", str(sweep), "--run-dir", str(folder / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=400)
    assert done.returncode == 0, done.stderr + done.stdout
    return RunDirectory(folder / "run"), done.stdout


@pytest.mark.parametrize(
    ("script", "method", "more"),
    [
        ("on_trainer.py", "ags", {}),
        ("on_lightning.py", "ags", {}),
        ("on_accelerate.py", "lbt", {"accumulation": 2, "arguments": ["--accumulate", "{accumulation}"]}),
        ("on_timm.py", "ags", {"metric": r"Acc@1 (?P<test_accuracy>[\d.]+)"}),
    ],
)
def test_a_script_is_profiled_planned_trained_and_reported(
    tmp_path: Path, script: str, method: str, more: dict[str, Any]
) -> None:
    workload = dict(more)
    run, said = swept(tmp_path, script, method, *workload.pop("arguments", []), **workload)
    (measured,) = run.measurements().records
    assert is_usable(measured)
    assert (measured.nodes, measured.local_batch, measured.backend) == (2, BATCH // 2, "gloo")
    assert measured.kept == (script != "on_timm.py")
    plan = run.read_plan()
    assert plan is not None
    assert plan.chosen.global_batch == BATCH
    metrics = read_metrics(run.train().metrics_file)
    assert [row.step for row in metrics.steps] == list(range(1, STEPS + 1))
    assert [row.epoch for row in metrics.epochs] == list(range(1, EPOCHS + 1))
    assert all(0.0 <= (row.test_accuracy or -1.0) <= 1.0 for row in metrics.epochs)
    if method == "ags":
        assert all(row.scale_mean is not None for row in metrics.steps)
    assert re.search(r"report", said)
    assert list(run.root.glob("*.html")) or list(run.root.rglob("report*"))
