"""Jobs in containers: the options for Apptainer and pyxis, what is mounted, and what a job finds inside."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launch import apptainer
from tula_hpc.check.site_verdicts import judge_container
from tula_hpc.config import ClusterSpec, WorkloadSpec, load_cluster
from tula_hpc.config.changes import refuse_other_cluster
from tula_hpc.containers import Folders, folders_of, mounts_of
from tula_hpc.errors import InputError
from tula_hpc.launch.launcher import Launcher
from tula_hpc.records import RunDirectory


def cluster_in(image: Path | str = "/image.sif", executor: str = "slurm", **container: Any) -> ClusterSpec:
    fields: dict[str, Any] = {"executor": executor, "environment": {"MINE": "a secret"}}
    return ClusterSpec.model_validate({**fields, "container": {"image": str(image), **container}})


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkloadSpec:
    """A workload with data, and with a model of its own that is on Python's path."""
    (tmp_path / "data").mkdir()
    sources = tmp_path / "sources" / "mine"
    sources.mkdir(parents=True)
    (sources / "__init__.py").touch()
    (sources / "net.py").write_text("def build(classes, image_size): ...\n")
    (tmp_path / "here").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "sources")
    monkeypatch.chdir(tmp_path / "here")
    return WorkloadSpec.model_validate({"model": "mine.net:build", "data_dir": tmp_path / "data"})


def script_of(cluster: ClusterSpec, work: WorkloadSpec, run: Path) -> str:
    return Launcher(cluster, RunDirectory(run), "tula-x", work=work).script(stage="train", nodes=2, minutes=5, tasks=1)


def test_apptainer_has_the_options_the_mounts_and_the_variables(tmp_path: Path, work: WorkloadSpec) -> None:
    cluster = cluster_in(mounts=["/scratch", "/a:/in:ro"], options=["--writable-tmpfs"], python="/opt/bin/python")
    text = script_of(cluster.model_copy(update={"device": "cuda"}), work, tmp_path / "run")
    line = next(line for line in text.splitlines() if line.startswith("srun "))
    words = shlex.split(line)
    begin = words.index("apptainer")
    own = [tmp_path / name for name in ("here", "run", "data", "sources")]
    binds = [f"--bind={mount}" for mount in (*own, "/scratch", "/a:/in:ro")]
    end = ["--pwd=" + str(tmp_path / "here"), "--writable-tmpfs", "/image.sif", "/opt/bin/python", "-u", "-m"]
    assert words[begin:][: len(binds) + 9] == ["apptainer", "exec", "--nv", *binds, *end]
    assert 'export APPTAINERENV_MINE="$MINE"' in text
    assert f"export PYTHONPATH={tmp_path / 'sources'}${{PYTHONPATH:+:$PYTHONPATH}}" in text
    assert "a secret" not in text
    assert sys.executable not in text
    assert "--nv" not in script_of(cluster, work, tmp_path / "run")


def test_pyxis_is_set_up_by_options_of_srun(tmp_path: Path, work: WorkloadSpec) -> None:
    text = script_of(cluster_in(runtime="pyxis", mounts=["/scratch"]), work, tmp_path / "run")
    words = shlex.split(next(line for line in text.splitlines() if line.startswith("srun ")))
    mounts = ",".join(str(tmp_path / name) for name in ("here", "run", "data", "sources"))
    assert "--container-image=/image.sif" in words
    assert f"--container-mounts={mounts},/scratch" in words
    assert f"--container-workdir={tmp_path / 'here'}" in words
    (kept,) = (word for word in words if word.startswith("--container-env="))
    assert {"MINE", "OMP_NUM_THREADS", "PYTHONPATH"} <= set(kept.partition("=")[2].split(","))
    at = words.index("python3")
    assert words[at : at + 4] == ["python3", "-u", "-m", "tula_hpc.launch.job_start"]
    assert "a secret" not in text


def test_folders_below_another_mount_are_not_mounted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folders = Folders((tmp_path / "data",), (tmp_path,))
    assert mounts_of(cluster_in(), folders, tmp_path / "runs" / "a") == [str(tmp_path)]
    with pytest.raises(InputError, match=r"a,b cannot be mounted: its name holds a comma or a colon"):
        mounts_of(cluster_in(), folders, tmp_path / "a,b")


def test_a_script_brings_the_folder_that_it_lies_in(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import helper\n")
    (tmp_path / "helper.py").touch()
    fields = {"script": tmp_path / "train.py", "arguments": ["-b", "{local_batch}"], "samples": 512, "epochs": 1}
    assert folders_of(WorkloadSpec.model_validate(fields)).sources == (tmp_path,)


def test_controllers_stay_outside_as_they_need_slurms_commands() -> None:
    assert cluster_in().controller().container is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('executor = "local"\n[container]\nimage = "a"\nruntime = "pyxis"', 'container.runtime: "pyxis" is a plug-in'),
        ('[container]\nimage = "a"\nmounts = ["data"]', "container.mounts"),
        ('[container]\nimage = "a"\noptions = ["rm"]', "container.options.*options with their values in one word"),
        ("[container]\npython = '3'", "container.image: is required"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=words) as caught:
        load_cluster(path)
    assert len(str(caught.value).splitlines()) == 1


def test_another_image_is_another_measurement(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r'container: measured with \{"image": "/image.sif"'):
        refuse_other_cluster(tmp_path, cluster_in(), cluster_in("/other.sif"))


def test_check_says_which_container_and_that_its_image_is_missing(tmp_path: Path) -> None:
    (missing,) = judge_container(cluster_in(tmp_path / "no.sif"), Folders(), tmp_path)
    assert missing.found == f"{tmp_path / 'no.sif'} is not on this machine"
    (there,) = judge_container(cluster_in("docker://pytorch"), Folders(), tmp_path)
    assert there.found.startswith("python3 in docker://pytorch, by apptainer; it must contain this version of tula_hpc")
    assert judge_container(ClusterSpec(), Folders(), tmp_path) == []


def inside(folder: Path) -> Callable[[], None]:
    """Make a job that writes down what it finds."""

    def job() -> None:
        found = {name: os.environ.get(name, "") for name in ("MINE", "PYTHONPATH", "VIRTUAL_ENV")}
        (folder / "found.json").write_text(json.dumps({**found, "cwd": str(Path.cwd())}))

    return job


@pytest.mark.processes
def test_a_local_job_runs_in_the_container(tmp_path: Path, work: WorkloadSpec) -> None:
    programs, notes = apptainer.make(tmp_path)
    image = tmp_path / "image.sif"
    image.touch()
    cluster = cluster_in(image, "local", python=sys.executable, mounts=[f"{tmp_path}/data:/in:ro"])
    cluster = cluster.model_copy(update={"setup": (f'export PATH="{programs}:$PATH"',)})
    run = RunDirectory(tmp_path / "run").create()
    launcher = Launcher(cluster, run, "tula-x", work=work)
    (end,) = launcher.wait(launcher.submit([inside(tmp_path)], stage="profile", nodes=1, minutes=2))
    note = json.loads((notes / "0.json").read_text())
    own = [str(tmp_path / name) for name in ("here", "run", "data", "sources")]
    assert note["given"]["--bind"] == [*own, f"{tmp_path}/data:/in:ro"], end.log_tail
    assert note["command"][:3] == ["-u", "-m", "tula_hpc.launch.job_start"]
    assert note["environment"]["MINE"] == "a secret"
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["MINE"], found["cwd"]) == ("a secret", str(tmp_path / "here"))
    assert str(tmp_path / "sources") in found["PYTHONPATH"].split(":")
