"""Jobs in a container on the real cluster: by a stand-in that checks its arguments, by Apptainer where it is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launch import apptainer
from tests.slurm.testcluster import MiniCluster
from tula_hpc.config import ClusterSpec, WorkloadSpec
from tula_hpc.env import join_job
from tula_hpc.launch.launcher import Launcher
from tula_hpc.records import RunDirectory

pytestmark = pytest.mark.usefixtures("quick_nodes")
ROOT = Path(__file__).resolve().parents[2]


def onlooker(folder: Path) -> Callable[[], None]:
    """A job whose workers note what they find inside."""

    def job() -> None:
        env = join_job()
        note = {"hosts": env.hosts, "mine": os.environ["MINE"], "cwd": str(Path.cwd()), "world": env.world_size}
        note["image"] = os.environ.get("APPTAINER_CONTAINER", "")
        (folder / f"found-{env.rank}.json").write_text(json.dumps(note))

    return job


def run_inside(folder: Path, container: dict[str, Any], setup: list[str]) -> tuple[RunDirectory, list[dict[str, Any]]]:
    """The run of a job of two workers that look around in a container, and what they found."""
    fields = {"executor": "slurm", "partition": "batch", "exclusive": False, "memory_gb": 1.0}
    settings = {"environment": {"MINE": "a secret"}, "setup": setup, "container": container}
    cluster = ClusterSpec.model_validate_json(json.dumps({**fields, **settings}))
    run = RunDirectory(folder / "run").create()
    work = WorkloadSpec.model_validate({"data_dir": folder / "data"})
    launcher = Launcher(cluster, run, "tula-container", work=work)
    (end,) = launcher.wait(launcher.submit([onlooker(folder)], stage="profile", nodes=2, minutes=5))
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("found-*.json"))]
    assert [each["world"] for each in found] == [2, 2], end.log_tail
    assert {each["mine"] for each in found} == {"a secret"}
    assert {each["cwd"] for each in found} == {str(folder / "here")}
    (script,) = run.slurm.glob("*/*_submission.sh")
    assert "a secret" not in script.read_text()
    return run, found


@pytest.fixture
def folder(slurm_cluster: MiniCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("here", "data"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def test_every_worker_runs_in_the_container(folder: Path) -> None:
    programs, notes = apptainer.make(folder)
    (folder / "image.sif").touch()
    container = {"image": str(folder / "image.sif"), "python": sys.executable, "mounts": ["/usr/share:/in:ro"]}
    run_inside(folder, container, [f'export PATH="{programs}:$PATH"'])
    for rank in range(2):
        note = json.loads((notes / f"{rank}.json").read_text())
        own = [str(folder / name) for name in ("here", "run", "data")]
        assert note["given"]["--bind"] == [*own, "/usr/share:/in:ro"]
        assert note["command"][:3] == ["-u", "-m", "tula_hpc.launch.job_start"]
        assert note["environment"]["MINE"] == "a secret"


def image_of_this_machine(folder: Path) -> dict[str, Any]:
    """A container whose image holds nothing but what is mounted from here."""
    image = folder / "image"
    for name in ("usr", "etc", "proc", "sys", "dev", "tmp", "var/tmp", "root", "home"):
        (image / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        (image / name).symlink_to(f"usr/{name}")
    for name in ("passwd", "group"):
        (image / "etc" / name).touch()
    mounts = ["/usr", *{sys.prefix, sys.base_prefix, str(ROOT)}]
    return {"image": str(image), "python": sys.executable, "mounts": mounts, "options": ["--no-privs"]}


def test_apptainer_itself_runs_every_worker(folder: Path) -> None:
    program = shutil.which("apptainer")
    if program is None:
        pytest.skip("apptainer is not installed")
    container = image_of_this_machine(folder)
    binds = [f"--bind={mount}" for mount in container["mounts"]]
    tried = subprocess.run(
        [program, "exec", *binds, *container["options"], container["image"], sys.executable, "--version"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if tried.returncode:
        pytest.skip(f"apptainer runs nothing here: {tried.stderr[-200:]}")
    _, found = run_inside(folder, container, [])
    assert {each["image"] for each in found} == {container["image"]}
