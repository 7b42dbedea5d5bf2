"""`tula init` on the real cluster: the file that it writes is one that Slurm takes jobs for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

import pytest

from tests.slurm.testcluster import STATE, MiniCluster
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
STATES = ("UP", "UP", "UP", "DRAIN", "DOWN", "INACTIVE")


@contextmanager
def of_another_kind(cluster: MiniCluster, random: Random) -> Iterator[None]:
    """The cluster with other partitions and features, perhaps without accounting, perhaps with accounts that count."""
    accounts = random.random() < 0.6
    with ExitStack() as stack:
        if not accounts:
            cluster = stack.enter_context(cluster.changed(accounting=False))
        else:
            for words in (("account", "ml"), ("user", "root", "account=ml")):
                cluster.run("sacctmgr", "--immediate", "add", *words)
            stack.callback(cluster.run, "sacctmgr", "--immediate", "delete", "account", "ml")
        config = STATE / "etc" / "slurm.conf"
        before = config.read_text()
        stack.callback(cluster._reread_config)
        stack.callback(config.write_text, before)
        lines = [line for line in before.splitlines() if not line.startswith("PartitionName=")]
        lines = [f"{line} Features={random.choice(('fast', 'v100,ib', 'a'))}" if "NodeName=" in line else line
                 for line in lines]  # fmt: skip
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


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(5))
def test_clusters_of_all_kinds(
    slurm_cluster: MiniCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    target = tmp_path / "cluster.toml"
    with of_another_kind(slurm_cluster, Random(seed)):
        code = main([str(target)])
        said = capsys.readouterr()
        if code != 0:
            assert "part" in said.err
            assert not target.exists()
            return
        spec = load_cluster(target)
        launcher = Launcher(spec, RunDirectory(tmp_path / "run").create(), "x")
        script = launcher.script(stage="train", nodes=spec.max_nodes, minutes=spec.train_minutes, tasks=1)
        assert "to start at" in could_start(script), target.read_text()
