"""`tula init` on unknown clusters: scripts in place of Slurm's commands answer for made-up sites."""

from __future__ import annotations

import getpass
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzzing import fuzz
from tula_hpc.analysis.costs.slurm_billing import billing_per_node, node_resources
from tula_hpc.config import ClusterSpec, load_cluster
from tula_hpc.init.__main__ import main


class MadePartition(NamedTuple):
    """A partition of a made-up site."""

    name: str
    nodes: int = 4
    cpus: int = 32
    memory_mb: int = 128_000
    gres: str = "(null)"
    limit: str = "1-00:00:00"
    state: str = "UP"
    nodes_state: str = "idle"
    fields: str = ""
    # cores and MB of a node that no job gets
    kept: tuple[int, int] = (0, 0)


def put_site(
    folder: Path, partitions: list[MadePartition], *, config: str = "", accounts: str = "", qos: str = ""
) -> None:
    folder.mkdir(exist_ok=True)
    shown = "".join(
        f"PartitionName={p.name} AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default={'YES' if not i else 'NO'} "
        f"MaxTime={p.limit} MaxNodes=UNLIMITED State={p.state} TotalNodes={p.nodes} {p.fields}\n"
        for i, p in enumerate(partitions)
    )
    rows = shown_nodes = ""
    for p in partitions:
        shown_nodes += f"NodeName={p.name}1 CPUEfctv={p.cpus - p.kept[0]} CPUTot={p.cpus} MemSpecLimit={p.kept[1]}\n"
        row = f"{p.nodes}|{p.cpus}|{p.memory_mb}|{p.gres}|{p.nodes_state}|(null)|{p.name}[1-{p.nodes}]"
        rows += f"*'-p {p.name} '*) echo '{row}' ;;\n"
    accounting = f"case \"$*\" in\n*assoc*) printf '{accounts}' ;;\n*) printf '{qos}' ;;\nesac"
    scripts = {
        "scontrol": f"case \"$*\" in\n*config*) printf 'ClusterName = made\\n{config}' ;;\n"
        f"*partition*) cat <<'END'\n{shown}END\n;;\n*node*) cat <<'END'\n{shown_nodes}END\n;;\nesac",
        "sinfo": f'case "$* " in\n{rows}esac',
        "sacctmgr": accounting if accounts else "exit 1",
    }
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o700)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("LOADEDMODULES", raising=False)
    return folder


def written(tmp_path: Path, *options: str) -> ClusterSpec:
    assert main([str(tmp_path / "cluster.toml"), "--force", *options]) == 0
    return load_cluster(tmp_path / "cluster.toml")


def test_gpus_are_recommended_and_the_others_are_named(
    commands: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = MadePartition("gpu", nodes=8, cpus=40, gres="gpu:v100:4(S:0-1)", limit="2-00:00:00")
    put_site(commands, [MadePartition("cpu", nodes=100), gpu])
    cluster = written(tmp_path)
    assert (cluster.partition, cluster.device, cluster.gres) == ("gpu", "cuda", "gpu:v100:4")
    assert (cluster.workers_per_node, cluster.cpus_per_worker, cluster.max_nodes) == (4, 10, 8)
    output = capsys.readouterr().out
    assert "gpu (8 nodes, 40 CPUs, 4 v100 GPUs, at most 2880 min)" in output
    assert "cpu (100 nodes, 32 CPUs, at most 1440 min, the default)" in output
    assert "Next: " in output
    assert " init --examples examples  # sweep files to begin with" in output
    text = (tmp_path / "cluster.toml").read_text()
    asked = [line for line in text.splitlines() if line.endswith("unknown")]
    assert {line.split()[1] for line in asked} == {"device_memory_gb", "NCCL_SOCKET_IFNAME", "usd_per_node_hour"}
    assert written(tmp_path, "--partition", "cpu").device == "cpu"


def test_cores_and_memory_that_no_job_gets_are_left_out(commands: Path, tmp_path: Path) -> None:
    """A job that asks for them is refused."""
    gpu = MadePartition("gpu", cpus=128, gres="gpu:a100:4", kept=(16, 0))
    put_site(commands, [gpu, MadePartition("cpu", memory_mb=100 * 1024, kept=(2, 10 * 1024))])
    assert written(tmp_path).cpus_per_worker == 28
    of_cpus = written(tmp_path, "--partition", "cpu")
    assert (of_cpus.cpus_per_worker, of_cpus.memory_gb) == (30, 85.5)


def test_a_hidden_partition_is_found_by_its_name_alone(
    commands: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_site(commands, [MadePartition("open"), MadePartition("lab7", nodes=90)])
    script = commands / "scontrol"
    hide = 'case "$*" in *--all*) ;; *partition*) /bin/sh "$0" "$@" --all | grep -v =lab7; exit ;; esac'
    script.write_text(script.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\n{hide}\n"))
    assert written(tmp_path).partition == "open"
    assert "lab7" not in capsys.readouterr().out
    assert written(tmp_path, "--partition", "lab7").max_nodes == 90


def test_a_partition_for_another_qos_is_not_recommended(
    commands: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    condo = MadePartition("condo", gres="gpu:8", fields="AllowQos=condo")
    put_site(commands, [MadePartition("cpu"), condo], accounts="ml||normal,long||\\n")
    assert written(tmp_path).partition == "cpu"
    assert "condo (4 nodes, 32 CPUs, 8 GPUs, at most 1440 min): it is for the QOS condo\n" in capsys.readouterr().out


def test_a_whole_node_is_billed_as_the_site_does(commands: Path, tmp_path: Path) -> None:
    weights = "TRESBillingWeights=CPU=1.0,Mem=0.25G,GRES/gpu=16.0"
    node = MadePartition("gpu", cpus=32, memory_mb=128 * 1024, gres="gpu:4", fields=weights)
    put_site(commands, [node], config="PriorityFlags           = CALCULATE_RUNNING,MAX_TRES\\n")
    cluster = written(tmp_path)
    resources = node_resources(cluster)
    assert billing_per_node(cluster.pricing, resources.tres) == 4 * 16.0
    assert resources.assumed == ()
    put_site(commands, [node])
    cluster = written(tmp_path)
    assert billing_per_node(cluster.pricing, node_resources(cluster).tres) == 32 + 128 * 0.25 + 4 * 16.0


def test_the_users_own_choice_of_an_account_goes_before_the_first(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_site(commands, [MadePartition("a")], accounts="bio||normal||\\nml||normal||\\n")
    assert written(tmp_path).account == "bio"
    script = commands / "sacctmgr"
    default = 'case "$*" in *withassoc*clusters=made*) echo ml; exit ;; esac'
    script.write_text(script.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\n{default}\n"))
    assert written(tmp_path).account == "ml"
    assert "# your default account\n" in (tmp_path / "cluster.toml").read_text()
    # some sites' plugins take names that accounting does not list
    monkeypatch.setenv("SBATCH_ACCOUNT", "def-ada")
    assert written(tmp_path).account == "def-ada"
    assert "# SBATCH_ACCOUNT of your shell\n" in (tmp_path / "cluster.toml").read_text()


def test_a_worker_sees_only_one_part_of_a_gpu(commands: Path, tmp_path: Path) -> None:
    put_site(commands, [MadePartition("mig", gres="gpu:a100_1g.5gb:7")])
    cluster = written(tmp_path)
    assert (cluster.workers_per_node, cluster.gres) == (1, "gpu:a100_1g.5gb:1")


def test_limits_of_partition_account_and_qos_hold(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = "AllowAccounts=ml,bio QoS=part AllowQos=high,low TRESBillingWeights=CPU=1.0"
    put_site(
        commands,
        [MadePartition("short", limit="0:10:00", fields=fields)],
        config="AccountingStorageEnforce = associations,limits\\n",
        accounts="chem||normal||\\nml||normal,low||node=3\\n",
        qos="part||node=2\\nlow|5|\\nhigh||\\n",
    )
    cluster = written(tmp_path)
    assert (cluster.account, cluster.qos, cluster.max_nodes) == ("ml", "low", 2)
    assert "# the first of your accounts that may use the partition\n" in (tmp_path / "cluster.toml").read_text()
    assert (cluster.profile_minutes, cluster.train_minutes) == (5, 5)
    assert cluster.signal_delay_s < 150
    assert cluster.pricing.basis == "tres"
    # another account is not submitted with those of ml
    monkeypatch.setenv("SBATCH_ACCOUNT", "chem")
    cluster = written(tmp_path)
    assert (cluster.account, cluster.qos, cluster.profile_minutes) == ("chem", None, 10)


def test_accounts_on_other_clusters_of_the_site_do_not_count(commands: Path, tmp_path: Path) -> None:
    """sacctmgr lists them too, unless it is asked for one cluster."""
    enforced = "AccountingStorageEnforce = associations\\n"
    put_site(commands, [MadePartition("a")], config=enforced, accounts="bio||normal||\\nml||normal||\\n")
    script = commands / "sacctmgr"
    here = "case \"$*\" in *assoc*clusters=made*) printf 'ml||normal||\\n'; exit ;; esac"
    script.write_text(script.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\n{here}\n"))
    assert written(tmp_path).account == "ml"


@pytest.mark.parametrize(
    ("site", "reason"),
    [
        ((MadePartition("a", state="DOWN"), ""), "its state is DOWN"),
        ((MadePartition("a", nodes_state="drained"), ""), "its nodes are down or drained"),
        ((MadePartition("a", fields="AllowGroups=nobody-else"), ""), "it is for the groups nobody-else"),
        ((MadePartition("a", fields="ReqResv=YES"), ""), "its jobs need a reservation"),
        (
            (MadePartition("a"), "AccountingStorageEnforce = associations\\n"),
            f"{getpass.getuser()} has no account there",
        ),
    ],
)
def test_if_nothing_can_be_used_the_reason_is_given_and_nothing_written(
    commands: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], site: tuple[MadePartition, str], reason: str
) -> None:
    put_site(commands, [site[0]], config=site[1])
    assert main([str(tmp_path / "cluster.toml")]) == 2
    assert f"no partition can be used: a: {reason}" in capsys.readouterr().err
    assert not (tmp_path / "cluster.toml").exists()


def test_without_slurm_a_cluster_file_is_said_to_be_needless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([str(tmp_path / "cluster.toml")]) == 1
    error = capsys.readouterr().err
    assert "login node? (without Slurm a sweep needs no cluster file: leave out --cluster)\n" in error
    assert not (tmp_path / "cluster.toml").exists()


def test_an_existing_file_stays(commands: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put_site(commands, [MadePartition("a")])
    (tmp_path / "cluster.toml").write_text("mine")
    assert main([str(tmp_path / "cluster.toml")]) == 2
    assert (tmp_path / "cluster.toml").read_text() == "mine"
    assert "--force" in capsys.readouterr().err
    assert main([str(tmp_path / "b.toml"), "--partition", "b"]) == 2
    assert "there are a" in capsys.readouterr().err


def test_loaded_modules_are_loaded_in_jobs(commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADEDMODULES", "cuda/12.4:python/3.11")
    put_site(commands, [MadePartition("a")])
    assert written(tmp_path).setup == ("module load cuda/12.4 python/3.11",)


GRES = ["(null)", "gpu:1", "gpu:8(S:0-1)", "gpu:a100:4", "gpu:a:2,gpu:b:2", "nvme:1,gpu:tesla:2", "mps:100"]
made = st.builds(
    MadePartition,
    name=st.sampled_from(["batch", "gpu", "debug", "long-jobs", "p_1"]),
    nodes=st.integers(1, 5000),
    cpus=st.integers(1, 512),
    memory_mb=st.integers(500, 4_000_000),
    gres=st.sampled_from(GRES),
    state=st.just("UP"),
    limit=st.sampled_from(["UNLIMITED", "1", "0:02:00", "12:00:00", "7-00:00:00"]),
    nodes_state=st.sampled_from(["idle", "mixed", "allocated", "drained", "down*", "idle~"]),
    fields=st.sampled_from(["", "QoS=N/A", "TRESBillingWeights=CPU=1.0,Mem=0.25G,GRES/gpu=2.0", "DefMemPerCPU=4000"]),
    kept=st.tuples(st.just(0), st.integers(0, 400)),
)


@fuzz(15)
@given(st.lists(made, min_size=1, max_size=4, unique_by=lambda p: p.name))
def test_for_any_site_the_file_is_valid_or_the_reason_is_given(partitions: list[MadePartition]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}/bin:/usr/bin:/bin")
        put_site(Path(folder) / "bin", partitions)
        target = Path(folder) / "cluster.toml"
        code = main([str(target)])
        usable = [p for p in partitions if p.nodes_state not in ("drained", "down*")]
        assert code == (0 if usable else 2)
        if usable:
            cluster = load_cluster(target)
            assert (cluster.device == "cuda") == any("gpu" in p.gres for p in usable)
            assert tomllib.loads(target.read_text())["partition"] in [p.name for p in usable]
