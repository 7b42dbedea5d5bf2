"""`tula init` on the real cluster: Slurm accepts jobs with the cluster file that it writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

import pytest

from tests.slurm import machine
from tests.slurm.testcluster import STATE, MiniCluster
from tula_hpc.config import load_cluster
from tula_hpc.errors import RefusedError
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
    output = capsys.readouterr().out
    assert all(name in output for name in ("batch", "cancel", "urgent", "steady"))
    spec = load_cluster(target)
    # each node has four GPUs but only two cores, so two workers
    assert (spec.partition, spec.device, spec.workers_per_node) == (partition or "batch", "cuda", 2)
    launcher = Launcher(spec, RunDirectory(tmp_path / "run").create(), "x")
    script = launcher.script(stage="train", nodes=spec.max_nodes, minutes=spec.train_minutes, tasks=1)
    assert "to start at" in could_start(script)


LIMITS = ("", "MaxTime=45", "MaxTime=2:00:00", "MaxTime=7-00:00:00 DefaultTime=1:00:00", "MaxTime=INFINITE")
KINDS = (
    "",
    "MaxNodes=2",
    "MinNodes=2",
    "OverSubscribe=EXCLUSIVE",
    "Hidden=YES",
    "AllowAccounts=ml",
    "MaxMemPerCPU=900",
)
# GPUs of a node; a job can ask for only one of two types
GPUS = ("gpu:4", "gpu:v100:4", "gpu:v100:2,gpu:a100:2", "")
STATES = ("UP", "UP", "UP", "DRAIN", "DOWN", "INACTIVE")


def gres_lines(text: str, gpus: str) -> str:
    """Return gres.conf with GPUs of other types, which take the made-up devices in order."""
    line = text.strip().splitlines()[-1]
    nodes = line.split()[0]
    folder = line.partition("File=")[2].partition("[")[0]
    lines = []
    first = 0
    for kind in filter(None, gpus.split(",")):
        _, *names, count = kind.split(":")
        types = "".join(f"Type={name} " for name in names)
        lines.append(f"{nodes} Name=gpu {types}File={folder}[{first}-{first + int(count) - 1}]\n")
        first += int(count)
    return "".join(lines)


@contextmanager
def of_another_kind(cluster: MiniCluster, random: Random) -> Iterator[None]:
    """Give the cluster other partitions, features and GPUs, perhaps without accounting or with enforced accounts."""
    accounts = random.random() < 0.6
    with ExitStack() as stack:
        if not accounts:
            cluster = stack.enter_context(cluster.changed(accounting=False))
        else:
            for words in (("account", "ml"), ("user", "root", "account=ml")):
                cluster.run("sacctmgr", "--immediate", "add", *words)
            stack.callback(cluster.run, "sacctmgr", "--immediate", "delete", "account", "ml")
        stack.callback(cluster._reread_config)
        config = STATE / "etc" / "slurm.conf"
        devices = STATE / "etc" / "gres.conf"
        before = config.read_text()
        for file in (config, devices):
            stack.callback(file.write_text, file.read_text())
        gpus = random.choice(GPUS)
        devices.write_text(gres_lines(devices.read_text(), gpus))
        lines = [line for line in before.splitlines() if not line.startswith("PartitionName=")]
        features = random.choice(("fast", "v100,ib", "a"))
        of_nodes = f"{f'Gres={gpus} ' if gpus else ''}Features={features}"
        lines = [f"{line.partition('Gres=')[0]}{of_nodes}" if "NodeName=" in line else line for line in lines]
        if accounts:
            lines.append("AccountingStorageEnforce=associations,limits")
        for number in range(random.randint(1, 5)):
            hosts = ",".join(random.sample(cluster.hosts, random.randint(1, len(cluster.hosts))))
            default = "YES" if number == 0 and random.random() < 0.7 else "NO"
            more = f"{random.choice(LIMITS)} {random.choice(KINDS)} State={random.choice(STATES)} Default={default}"
            lines.append(f"PartitionName=part{number} Nodes={hosts} PreemptMode=OFF PriorityTier={number + 1} {more}")
        config.write_text("\n".join(lines) + "\n")
        cluster._reread_config()
        yield


def _may_start(script: str) -> bool:
    try:
        return "to start at" in could_start(script)
    except RefusedError:
        return False


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(8))
def test_clusters_of_all_kinds(
    slurm_cluster: MiniCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    target = tmp_path / "cluster.toml"
    with of_another_kind(slurm_cluster, Random(seed)):
        code = main([str(target)])
        output = capsys.readouterr()
        if code != 0:
            assert "part" in output.err
            assert not target.exists()
            return
        spec = load_cluster(target)
        launcher = Launcher(spec, RunDirectory(tmp_path / "run").create(), "x")
        script = launcher.script(stage="train", nodes=spec.max_nodes, minutes=spec.train_minutes, tasks=1)
        # nodes tell the controller of their GPUs some seconds after a reconfiguration
        machine.wait_for(lambda: _may_start(script), 30, f"an answer to a job of {target.read_text()}")
