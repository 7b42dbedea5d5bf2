"""The epoch in a line of steps is whole at the end of each epoch, however large its last batch is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.spoiled import spoil_item
from tests.forked import ALONE
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.ddp.stop_signals import StopRequest
from tula_hpc.errors import InputError
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.records import Configuration, RunDirectory, read_metrics
from tula_hpc.training import loop as trainer_module

PERCEPTRON = "tests.examples.own_workload:perceptron"


@pytest.mark.parametrize(("samples", "steps"), [(64, 4), (79, 4), (17, 1)])
def test_the_last_step_of_an_epoch_is_at_a_whole_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: int, steps: int
) -> None:
    monkeypatch.setattr(trainer_module, "join_job", lambda: ALONE)
    workload = {"model": PERCEPTRON, "dataset": "digits", "loader_workers": 0, "samples": samples, "epochs": 2}
    tables = {"name": "x", "workload": workload, "training": {"method": "lbt", "log_interval_steps": 1}}
    run = RunDirectory(tmp_path / "run").create()
    run.train().root.mkdir()
    job = TrainJob(SweepSpec.model_validate(tables), ClusterSpec(), Configuration(1, 1, 16), run.root)
    assert trainer_module.run_training(job, StopRequest()) == "finished"
    metrics = read_metrics(run.train().metrics_file)
    assert [row.epoch for row in metrics.steps] == [step / steps for step in range(1, 2 * steps + 1)]
    assert [row.epoch for row in metrics.epochs] == [1, 2]


@pytest.mark.parametrize("study", [None, {"methods": ["lbt"], "batches": [16]}], ids=["a plan", "a study"])
@pytest.mark.parametrize("interval", [1, 3])
def test_an_item_that_is_not_finite_is_named_and_not_the_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: int, study: dict[str, object] | None
) -> None:
    """It may be in any step since the last line; a study does not count it against a method."""
    monkeypatch.setattr(trainer_module, "join_job", lambda: ALONE)
    workload = {"model": PERCEPTRON, "dataset": "digits", "loader_workers": 0, "samples": 64, "epochs": 2}
    tables: dict[str, object] = {"name": "x", "workload": workload}
    tables["training"] = {"method": "lbt", "log_interval_steps": interval}
    if study is not None:
        tables["study"] = study
    run = RunDirectory(tmp_path / "run").create()
    run.train().root.mkdir()
    spoil_item(monkeypatch, 7)
    job = TrainJob(SweepSpec.model_validate(tables), ClusterSpec(), Configuration(1, 1, 16), run.root)
    with pytest.raises(InputError, match=r"^workload.dataset: item 7 of the training set holds inf or nan; mend the"):
        trainer_module.run_training(job, StopRequest())
    assert not run.train().result_file.exists()
