"""Jobs in a container on the real cluster: a stand-in for Apptainer checks its arguments and runs the command."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch import apptainer
from tests.slurm.testcluster import MiniCluster
from tula_hpc.config import ClusterSpec, WorkloadSpec
from tula_hpc.env import join_job
from tula_hpc.launch.launcher import Launcher
from tula_hpc.records import RunDirectory

pytestmark = pytest.mark.usefixtures("quick_nodes")


def onlooker(folder: Path) -> Callable[[], None]:
    """A job whose workers note what they find inside."""

    def job() -> None:
        env = join_job()
        note = {"hosts": env.hosts, "mine": os.environ["MINE"], "cwd": str(Path.cwd()), "world": env.world_size}
        (folder / f"found-{env.rank}.json").write_text(json.dumps(note))

    return job


def test_every_worker_runs_in_the_container(
    slurm_cluster: MiniCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, notes = apptainer.make(tmp_path)
    for name in ("here", "data"):
        (tmp_path / name).mkdir()
    (tmp_path / "image.sif").touch()
    monkeypatch.chdir(tmp_path / "here")
    container = {"image": str(tmp_path / "image.sif"), "python": sys.executable, "mounts": ["/usr/share:/in:ro"]}
    fields = {"executor": "slurm", "partition": "batch", "exclusive": False, "memory_gb": 1.0}
    settings = {"environment": {"MINE": "a secret"}, "setup": [f'export PATH="{programs}:$PATH"']}
    cluster = ClusterSpec.model_validate_json(json.dumps({**fields, **settings, "container": container}))
    run = RunDirectory(tmp_path / "run").create()
    work = WorkloadSpec.model_validate({"data_dir": tmp_path / "data"})
    launcher = Launcher(cluster, run, "tula-container", work=work)
    (end,) = launcher.wait(launcher.submit([onlooker(tmp_path)], stage="profile", nodes=2, minutes=5))
    found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("found-*.json"))]
    assert [each["world"] for each in found] == [2, 2], end.log_tail
    assert {each["mine"] for each in found} == {"a secret"}
    assert {each["cwd"] for each in found} == {str(tmp_path / "here")}
    for rank in range(2):
        note = json.loads((notes / f"{rank}.json").read_text())
        own = [str(tmp_path / name) for name in ("here", "run", "data")]
        assert note["given"]["--bind"] == [*own, "/usr/share:/in:ro"]
        assert note["command"][:3] == ["-u", "-m", "tula_hpc.launch.job_start"]
        assert note["environment"]["MINE"] == "a secret"
    (script,) = run.slurm.glob("*/*_submission.sh")
    assert "a secret" not in script.read_text()
