"""`tula init` on the real cluster: the file that it writes is one that Slurm takes jobs for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tula_hpc.config import load_cluster
from tula_hpc.init.__main__ import main
from tula_hpc.launch.launcher import Launcher
from tula_hpc.launch.slurm_executor import could_start
from tula_hpc.records import RunDirectory


@pytest.mark.usefixtures("slurm_cluster")
@pytest.mark.parametrize("partition", ["", "steady", "suspend"])
def test_slurm_takes_jobs_as_the_written_file_asks_for_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], partition: str
) -> None:
    target = tmp_path / "cluster.toml"
    assert main([str(target), *(["--partition", partition] if partition else [])]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ("batch", "cancel", "urgent", "steady"))
    spec = load_cluster(target)
    # nodes of four GPUs and two cores
    assert (spec.partition, spec.device, spec.workers_per_node) == (partition or "batch", "cuda", 2)
    launcher = Launcher(spec, RunDirectory(tmp_path / "run").create(), "x")
    script = launcher.script(stage="train", nodes=spec.max_nodes, minutes=spec.train_minutes, tasks=1)
    assert "to start at" in could_start(script)
