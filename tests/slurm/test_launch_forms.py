"""Every form of asking Slurm for GPUs gives each worker its own GPU; the test cluster's GPUs are made up."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.slurm.testcluster import MiniCluster
from tula_hpc.config import ClusterSpec
from tula_hpc.ddp.process_group import pick_device
from tula_hpc.env import join_job
from tula_hpc.launch.job_files import Submitted
from tula_hpc.launch.launcher import Launcher
from tula_hpc.records import RunDirectory

WORKERS = 4
# cores of each worker
CORES = 2
FORMS: dict[str, dict[str, Any]] = {
    "gres": {"gres": "gpu:4"},
    "gres, exclusive": {"gres": "gpu:4", "exclusive": True},
    "gpus_per_node": {"sbatch": {"gpus_per_node": 4}},
    "gpus_per_task": {"sbatch": {"gpus_per_task": 1}},
    "gpu_bind": {"gres": "gpu:4", "sbatch": {"gpu_bind": "single:1"}},
    "closest": {"gres": "gpu:4", "sbatch": {"gpu_bind": "closest"}},
    "gpus": {"max_nodes": 1, "sbatch": {"gpus": 4}},
    "exclusive, of srun": {"exclusive": True, "srun_args": ["-K1", "--gres=gpu:4"]},
}
# forms whose tests are marked `thorough`, since another form asks Slurm for nearly the same
VARIATIONS = ("gres, exclusive", "closest", "gpus")
CHOSEN = [pytest.param(form, marks=[pytest.mark.thorough] if form in VARIATIONS else []) for form in FORMS]
# forms with which Slurm shows each worker only its own GPU
ALONE = {"gpus_per_task", "gpu_bind"}
# nodes of a form's job; default 1
NODES = {"gres": 2}


def cluster_of(form: str) -> ClusterSpec:
    """Return a cluster file with this form of request, for four workers per node."""
    common = {"executor": "slurm", "device": "cuda", "partition": "batch", "exclusive": False, "memory_gb": 2.0}
    workers = {"workers_per_node": WORKERS, "cpus_per_worker": CORES}
    return ClusterSpec.model_validate({**common, **workers, **FORMS[form]})


def onlooker(folder: Path) -> Callable[[], None]:
    """Make a job whose workers note their Slurm variables; importing torch would take 36 workers minutes."""

    def job() -> None:
        env = join_job()
        note = {
            "host": socket.gethostname(),
            "local_rank": env.local_rank,
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            "cores": int(os.environ["SLURM_CPUS_PER_TASK"]),
            "cores_on_node": int(os.environ["SLURM_CPUS_ON_NODE"]),
            "allowed": len(os.sched_getaffinity(0)),
        }
        (folder / f"{env.rank}.json").write_text(json.dumps(note))

    return job


@pytest.fixture(scope="module")
def notes(
    request: pytest.FixtureRequest, slurm_cluster: MiniCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, list[Any]]]:
    """The notes of each form's workers; the jobs of all forms of the selected tests run in parallel."""
    here = (item for item in request.session.items if item.path == Path(__file__))
    chosen = {item.callspec.params["form"] for item in here if isinstance(item, pytest.Function)}
    with slurm_cluster.cpu_share(200), slurm_cluster.changed(cpus=WORKERS * CORES):
        jobs: dict[str, tuple[Launcher, Path, list[Submitted]]] = {}
        for form in filter(chosen.__contains__, FORMS):
            cluster, folder = cluster_of(form), tmp_path_factory.mktemp("form")
            launcher = Launcher(cluster, RunDirectory(folder / "run").create(), "forms")
            submitted = launcher.submit([onlooker(folder)], stage="profile", nodes=NODES.get(form, 1), minutes=5)
            jobs[form] = launcher, folder, submitted
        found = {}
        for form, (launcher, folder, submitted) in jobs.items():
            (end,) = launcher.wait(submitted)
            noted = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
            assert len(noted) == WORKERS * NODES.get(form, 1), f"{form}: {end.log_tail}"
            found[form] = noted
        yield found


def gpus_seen(note: dict[str, Any]) -> list[str]:
    """Return the node's numbers of the GPUs that a worker sees, in the order in which torch counts them."""
    return [name for name in note["visible"].split(",") if name]


@pytest.mark.parametrize("form", CHOSEN)
def test_every_worker_finds_a_gpu_of_its_own(
    notes: dict[str, list[Any]], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here torch chooses a device in each worker's environment, and is made to believe in the GPUs that Slurm names."""
    found = set()
    for note in notes[form]:
        seen = gpus_seen(note)
        monkeypatch.setattr(torch.cuda, "is_available", lambda seen=seen: bool(seen))
        monkeypatch.setattr(torch.cuda, "device_count", lambda seen=seen: len(seen))
        device = pick_device(cluster_of(form), note["local_rank"])
        found.add((note["host"], seen[device.index]))
    hosts = {host for host, _ in found}
    assert len(hosts) == NODES.get(form, 1)
    assert found == {(host, str(number)) for host in hosts for number in range(WORKERS)}


@pytest.mark.parametrize("form", CHOSEN)
def test_a_worker_sees_the_gpus_of_its_peers_where_no_option_hides_them(notes: dict[str, list[Any]], form: str) -> None:
    assert {len(gpus_seen(note)) for note in notes[form]} == {1 if form in ALONE else WORKERS}


@pytest.mark.parametrize("form", CHOSEN)
def test_every_worker_has_cores_of_its_own(notes: dict[str, list[Any]], form: str) -> None:
    """Only as Slurm counts cores: the cluster has more than the machine, and binds no process to a core."""
    for note in notes[form]:
        assert note["cores"] == CORES
        assert note["cores_on_node"] >= WORKERS * CORES
        assert note["allowed"] == os.cpu_count()
