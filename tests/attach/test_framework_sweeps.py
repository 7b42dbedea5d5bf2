"""Unchanged scripts on frameworks are profiled, planned, trained and reported on this machine, through the command.

In the profiles of `STARTED` the first worker's script is started, so that it imports its framework as a user's does;
other processes are forked.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from tests.attach.test_frameworks import frameworks_are_imported  # noqa: F401 # a fixture
from tests.forked_jobs import forking_jobs
from tests.known import known
from tula_hpc.records import RunDirectory, is_usable, read_metrics
from tula_hpc.sweep import main

SCRIPTS = Path(__file__).parent / "scripts"
SAMPLES, BATCH, EPOCHS = 64, 16, 2
STEPS = EPOCHS * SAMPLES // BATCH


class Case(NamedTuple):
    workers: int = 2
    method: str = "lbt"
    arguments: tuple[str, ...] = ()
    # keys of [workload]
    more: Mapping[str, Any] = MappingProxyType({})


CASES = {
    "on_trainer.py": Case(),
    "on_lightning.py": Case(method="ags"),
    "on_accelerate.py": Case(1, arguments=("--accumulate", "{accumulation}"), more={"accumulation": 2}),
    "on_timm.py": Case(method="ags", more={"metric": r"Acc@1 (?P<test_accuracy>[\d.]+)"}),
}


def arguments_for(script: str, folder: Path) -> list[str]:
    """Return the command's arguments for a sweep at one batch; the script without `tula` is run as a module."""
    case, sweep = CASES[script], folder / "mine.toml"
    given = ["--batch-size", "{local_batch}", "--epochs", "{epochs}", "--samples", str(SAMPLES), *case.arguments]
    program = f'script = "{SCRIPTS / script}"'
    if script == "on_timm.py":
        shutil.copy(SCRIPTS / script, folder)
        program = 'module = "on_timm"'
    more = "\n".join(f"{key} = {json.dumps(value)}" for key, value in case.more.items())
    sweep.write_text(f"""
name = "mine"
[workload]
{program}
arguments = {json.dumps(given)}
samples = {SAMPLES}
epochs = {EPOCHS}
{more}
[search]
cluster_sizes = [{case.workers}]
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
    return [str(sweep), "--run-dir", str(folder / "run")]


# without timm, whose modules nothing of ours looks at, and the Trainer, which loads ahead by means of accelerate
STARTED = ("on_lightning.py", "on_accelerate.py")
# accelerate is also part of the Trainer, and its trainings are tested in test_frameworks.py
VARIED = "on_accelerate.py"


@pytest.fixture(scope="module", autouse=True)
def timm_is_imported() -> None:
    """Once for all processes that are forked."""
    import timm.data
    import timm.scheduler  # noqa: F401


@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=[pytest.mark.thorough] if name == VARIED else []) for name in CASES]
)
def test_a_script_is_profiled_planned_trained_and_reported(
    tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only one script's report is checked, without its figures."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tula_hpc.analysis.figures.all.FIGURES", {})
    until = "report" if script == "on_timm.py" else "train"
    arguments = arguments_for(script, tmp_path)
    with forking_jobs(starting_first=script in STARTED):
        assert main([*arguments, "--until", "plan"]) == 0
    with forking_jobs():
        assert main([*arguments, "--until", until]) == 0
    run = RunDirectory(tmp_path / "run")
    case = CASES[script]
    (measured,) = run.measurements().records
    assert is_usable(measured)
    assert (measured.nodes, measured.local_batch) == (case.workers, BATCH // case.workers)
    assert measured.backend == ("gloo" if case.workers > 1 else "none")
    assert measured.kept == (script != "on_timm.py")
    plan = known(run.read_plan())
    assert plan.chosen.global_batch == BATCH
    metrics = read_metrics(run.train().metrics_file)
    assert [row.step for row in metrics.steps] == list(range(1, STEPS + 1))
    assert [row.epoch for row in metrics.epochs] == list(range(1, EPOCHS + 1))
    assert all(0.0 <= (row.test_accuracy or -1.0) <= 1.0 for row in metrics.epochs)
    scales = {row.scale_mean for row in metrics.steps} - {None}
    assert len(scales) > STEPS // 2 if case.method == "ags" else not scales
    if until == "report":
        assert "on_timm" in (run.report / "report.html").read_text()
        # it keeps none of our checkpoints
        assert "model is gone" not in capsys.readouterr().out
