"""Submission to the real scheduler: each task runs once, whatever the controller, the site or the submitter does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGCONT, SIGSTOP

import pytest

from tests.slurm.sweeping import ROOT, TEMPLATE
from tests.slurm.testcluster import MiniCluster
from tula_hpc.config import load_cluster
from tula_hpc.errors import LaunchError
from tula_hpc.launch import slurm
from tula_hpc.launch.job_specs import Requeueable
from tula_hpc.launch.launcher import NOTICE, Launcher
from tula_hpc.records import RunDirectory
from tula_hpc.stages.context import submitted_job
from tula_hpc.sweep import main

pytestmark = pytest.mark.usefixtures("quick_nodes")


def says(number: int, folder: Path, seconds: float = 0.0) -> Callable[[], None]:
    """Make a job that writes down when it ran; an inner function, because those are pickled by value."""

    def job() -> None:
        began = time.time()
        time.sleep(seconds)
        with (folder / f"{number}.txt").open("a") as file:
            file.write(f"{began} {time.time()}\n")

    return job


def runs(folder: Path) -> Counter[int]:
    """Count how often each task ran."""
    return Counter({int(path.stem): len(path.read_text().splitlines()) for path in folder.glob("*.txt")})


def launcher_at(root: Path, *settings: str) -> Launcher:
    cluster = load_cluster(TEMPLATE, ["exclusive=false", *settings])
    return Launcher(cluster, RunDirectory(root / "run").create(), "tula-test")


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    return folder


def names(launcher: Launcher) -> list[str]:
    """Return the names of all submissions, from the notices written before sbatch is called."""
    return [json.loads(path.read_text())["name"] for path in launcher.run.slurm.glob(f"*/{NOTICE}")]


@contextmanager
def stopped(cluster: MiniCluster, seconds: float) -> Iterator[None]:
    """Stop the controller from answering for some seconds, counted from the start of the block."""
    pid = cluster.pid("slurmctld")
    assert pid is not None
    os.kill(pid, SIGSTOP)
    timer = threading.Timer(seconds, os.kill, (pid, SIGCONT))
    timer.start()
    try:
        yield
    finally:
        timer.join()


def test_a_controller_that_is_paused_during_sbatch_gets_exactly_one_job(
    slurm_cluster: MiniCluster, tmp_path: Path, notes: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    launcher = launcher_at(tmp_path)
    with stopped(slurm_cluster, 15):
        jobs = launcher.submit([says(0, notes)], stage="profile", nodes=1, minutes=2)
    # proves that sbatch failed
    assert "looking for the job" in capfd.readouterr().err
    launcher.wait(jobs)
    (name,) = names(launcher)
    assert slurm.named(name) == [jobs[0].job_id]
    assert runs(notes) == {0: 1}
    assert [event.job_id for event in launcher.run.events()] == [jobs[0].job_id]


@pytest.mark.parametrize(("largest", "pieces"), [(4, [2, 4]), (0, [1] * 6)])
def test_arrays_above_the_sites_limit_run_in_pieces_with_no_more_jobs_at_once_than_allowed(
    slurm_cluster: MiniCluster, tmp_path: Path, notes: Path, largest: int, pieces: list[int]
) -> None:
    launcher = launcher_at(tmp_path, "array_parallelism=3")
    with slurm_cluster.changed(max_array_size=largest):
        jobs = launcher.submit([says(i, notes, 1.0) for i in range(6)], stage="profile", nodes=1, minutes=2)
        assert sorted(Counter(job.array_id for job in jobs).values()) == pieces
        launcher.wait(jobs)
    assert runs(notes) == dict.fromkeys(range(6), 1)
    spans = [tuple(map(float, path.read_text().split())) for path in notes.glob("*.txt")]
    assert max(sum(began <= at < ended for began, ended in spans) for at, _ in spans) <= 3


def stops_once(folder: Path) -> Requeueable:
    """Make a job that writes down parts of its environment and, at its first run, waits to be stopped."""

    class StopsOnce(Requeueable):
        def __call__(self) -> None:
            index = os.environ.get("SLURM_ARRAY_TASK_ID", "0")
            with (folder / f"{index}.txt").open("a") as file:
                file.write(os.environ["TOKEN"] + "\n")
            time.sleep(60 if (folder / f"{index}.txt").read_text().count("\n") == 1 else 0)

    return StopsOnce()


def test_what_submitit_requeues_runs_again_from_its_pickle_with_a_secret_that_slurm_does_not_show(
    slurm_cluster: MiniCluster, tmp_path: Path, notes: Path
) -> None:
    launcher = launcher_at(tmp_path, "array_parallelism=2", "environment.TOKEN=5ecret")
    jobs = launcher.submit([stops_once(notes), stops_once(notes)], stage="profile", nodes=1, minutes=2)
    slurm_cluster.wait_for(lambda: len(runs(notes)) == len(jobs), 60, "both tasks")
    for job in jobs:
        asked = [["squeue", "-o", "%all", "-j"], ["scontrol", "show", "job"]]
        assert all("5ecret" not in slurm_cluster.run(*words, job.job_id) for words in asked)
    assert "5ecret" not in slurm_cluster.run("scontrol", "write", "batch_script", jobs[0].array_id, "-")
    slurm_cluster.signal(jobs[0].array_id, "USR2")
    launcher.wait(jobs)
    assert runs(notes) == {0: 2, 1: 2}
    assert {path.read_text() for path in notes.iterdir()} == {"5ecret\n" * 2}
    assert [path.read_text() for path in jobs[0].folder.glob("*_time_outs_left.txt")] == ["2\n"] * 2


def test_a_limit_on_submitted_jobs_is_respected_and_nothing_is_lost(
    slurm_cluster: MiniCluster, tmp_path: Path, notes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = launcher_at(tmp_path, "array_parallelism=4")
    with slurm_cluster.changed(submit_limit=2):
        todo = list(range(4))
        # like the stages, submit again what was not accepted
        while todo:
            jobs = launcher.submit([says(i, notes) for i in todo], stage="profile", nodes=1, minutes=2)
            assert 1 <= len(jobs) <= 2
            if len(jobs) == 2:
                assert main([*dry_run_of(tmp_path), "--set", "search.cluster_sizes=[1]"]) == 0
                output = capsys.readouterr().out
                assert "train, N=1, 1 task: would wait until you have fewer jobs: " in output
                assert output.count("QOSMaxSubmitJobPerUserLimit") == 2
            launcher.wait(jobs)
            todo = todo[len(jobs) :]
    assert runs(notes) == dict.fromkeys(range(4), 1)


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.slurm.test_submission import launcher_at, says
from tula_hpc.launch.launcher import Launcher
from tula_hpc.records import RunDirectory
from tula_hpc.launch import slurm_executor

def die(*_): os.kill(os.getpid(), signal.SIGKILL)

root, notes, at = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
if at == "before sbatch":
    slurm_executor.submit_once = die
elif at == "after sbatch":
    Launcher._log_submitted = die
else:
    log = RunDirectory.log_event
    RunDirectory.log_event = lambda self, *a, **k: die() if self.events() else log(self, *a, **k)
launcher_at(root).submit([says(i, notes) for i in range(2)], stage="profile", nodes=1, minutes=2)
"""


def test_a_submitter_that_is_killed_around_sbatch_leaves_nothing_twice_and_nothing_behind(
    slurm_cluster: MiniCluster, tmp_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at in ("before sbatch", "after sbatch", "between two events of an array"):
        done = subprocess.run([sys.executable, "-c", KILLED, tmp_path, notes, at], cwd=ROOT, check=False, timeout=120)
        assert done.returncode == -9
    launcher = launcher_at(tmp_path)
    known = [event.job_id for event in launcher.run.events()]
    assert len(known) == 1
    # no wait: no sbatch call is still running
    monkeypatch.setattr("tula_hpc.launch.slurm_executor.SBATCH_S", 0.0)
    found = launcher.find_lost()
    assert len(found) == 3
    ids = [event.job_id for event in launcher.run.events()]
    assert ids == [*known, *(job.job_id for job in found)]
    assert len({job_id.partition("_")[0] for job_id in ids}) == 2, (
        "there are two arrays, one of which was known in part"
    )
    launcher.wait([submitted_job(launcher.run, job) for job in launcher.run.history().submissions()])
    assert runs(notes) == dict.fromkeys(range(2), 2), "each array must be submitted once"
    assert launcher.find_lost() == []


def test_what_the_scheduler_refuses_for_good_is_one_clear_line(slurm_cluster: MiniCluster, tmp_path: Path) -> None:
    launcher = launcher_at(tmp_path, 'partition="nowhere"')
    with pytest.raises(LaunchError, match=r"refused the job: .*partition"):
        launcher.submit([says(0, tmp_path)], stage="profile", nodes=1, minutes=2)
    assert launcher.find_lost() == []


def dry_run_of(folder: Path) -> list[str]:
    """Return the arguments of a dry run of `folder`/sweep.toml."""
    sweep = folder / "sweep.toml"
    search = "min_batch = 32\nmax_batch = 64\nestimate = false\n"
    sweep.write_text(f'name = "asked"\n[workload]\ndataset = "digits"\n[search]\n{search}')
    return [str(sweep), "--cluster", str(TEMPLATE), "--run-dir", str(folder / "dry"), "--dry-run"]


def test_a_dry_run_asks_what_slurm_would_do_and_submits_nothing(
    slurm_cluster: MiniCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, sweep = dry_run_of(tmp_path), tmp_path / "sweep.toml"
    before = slurm.own_jobs()
    assert main([*command, "--set", "search.cluster_sizes=[1,2]"]) == 0
    out = capsys.readouterr().out
    assert "profile, N=2, 1 task: could start at 20" in out
    assert "in partition" in out
    assert main([*command, "--set", "search.cluster_sizes=[1]", "--set", "cluster.constraint=nowhere"]) == 1
    shown = capsys.readouterr()
    assert "train, N=1, 1 task: refused: " in shown.out
    assert "Slurm would refuse 2 of 2 submissions" in shown.err
    slurm_cluster.run("scontrol", "update", "nodename=ALL", "state=drain", "reason=a test")
    try:
        assert main([*command, "--set", "search.cluster_sizes=[1,2]"]) == 0, "sbatch takes such jobs"
    finally:
        slurm_cluster.run("scontrol", "update", "nodename=ALL", "state=resume")
    words = "would wait: 4 of the 4 nodes of partition batch are down or drained (sinfo -R says why)"
    assert f"profile, N=2, 1 task: {words}" in capsys.readouterr().out
    study = "[study]\nmethods = ['lbt']\nbatches = [64]\nseeds = [0, 1]\nnodes = 64\n"
    sweep.write_text(f"{sweep.read_text()}{study}")
    for real in (command, command[:-1]):
        assert main([*real, "--set", "cluster.max_nodes=64"]) == 2
        assert "--set: cluster.max_nodes: 64, but partition " in capsys.readouterr().err
        assert main([*real, "--set", "cluster.max_nodes=64", "--set", "cluster.partition=nowhere"]) == 2
        assert "--set: cluster.partition: Slurm has no partition 'nowhere'" in capsys.readouterr().err
    assert slurm.own_jobs() == before
    assert not (tmp_path / "dry").exists()
