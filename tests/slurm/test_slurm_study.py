"""A study on the real cluster: one job array that keeps to the cluster file's limit of parallel tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.sweeping import Done, run_sweep
from tests.slurm.testcluster import MiniCluster
from tula_hpc.records import RunDirectory, TrainResult

pytestmark = pytest.mark.usefixtures("quick_nodes")
STUDY = """
name = "tiny-study"
[workload]
model = "tula_hpc.workloads.small_cnns:compact_cnn"
dataset = "digits"
samples = 512
epochs = 2
loader_workers = 0
[study]
methods = ["lbt", "static"]
batches = [128]
seeds = [0]
small_batch = 0
"""


def study(folder: Path, cluster: MiniCluster) -> Done:
    two = ("cluster.array_parallelism=2",)
    return run_sweep(STUDY, folder, cluster.environment, "--until", "train", settings=two)


def test_a_study_is_one_array_and_runs_once(slurm_cluster: MiniCluster, tmp_path: Path) -> None:
    done = study(tmp_path, slurm_cluster)
    assert done.returncode == 0, done.stderr + done.stdout
    run = RunDirectory(tmp_path / "run")
    jobs = [event for event in run.events() if event.event == "submitted"]
    assert [job.job_id.partition("_")[2] for job in jobs] == ["0", "1"]
    assert len({job.job_id.partition("_")[0] for job in jobs}) == 1
    for job in jobs:
        result = TrainResult.model_validate_json(run.train(str(job.data["label"])).result_file.read_bytes())
        assert (result.epochs, result.global_batch, result.diverged) == (2, 128, False)
    before = run.events_file.read_text()
    assert study(tmp_path, slurm_cluster).returncode == 0
    assert run.events_file.read_text() == before
