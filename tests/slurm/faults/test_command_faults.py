"""The command is killed, or detaches itself, while a whole sweep runs on the cluster."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from signal import SIGKILL

import pytest

from tests.slurm.sweeping import ROOT, TEMPLATE
from tests.slurm.testcluster import MiniCluster
from tula_hpc.errors import RunDirectoryError
from tula_hpc.launch.diagnosis import BY_HAND
from tula_hpc.records import RunDirectory, read_metrics

pytestmark = pytest.mark.usefixtures("quick_nodes")
SWEEP = """
name = "{name}"
[workload]
model = "tula_hpc.workloads.small_cnns:compact_cnn"
dataset = "digits"
epochs = 3
lr = 0.05
loader_workers = 0
[search]
cluster_sizes = {sizes}
min_batch = 64
max_batch = 128
mode = "full"
max_steps = 20
max_seconds = 3
estimate = false
[objective]
kind = "time"
[training]
method = "lbt"
log_interval_steps = 5
"""


class Command:
    """`python -m tula_hpc.sweep` on a run directory of its own."""

    def __init__(self, folder: Path, cluster: MiniCluster, sizes: Sequence[int] = (1, 2)) -> None:
        self.run, self.cluster, self.log = RunDirectory(folder / "run"), cluster, folder / "log.txt"
        self.sweep = folder / "sweep.toml"
        self.sweep.write_text(SWEEP.format(name=folder.name, sizes=[*sizes]))

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "tula_hpc.sweep", str(self.sweep)]
        words += ["--cluster", str(TEMPLATE), "--run-dir", str(self.run.root)]
        with self.log.open("ab") as log:
            environment = self.cluster.environment
            return subprocess.Popen([*words, *options], cwd=ROOT, env=environment, stdout=log, stderr=log)

    def kill_when(self, reached: Callable[[], bool]) -> None:
        process = self.start()
        try:
            self.cluster.wait_for(lambda: reached() or process.poll() is not None, 180)
        finally:
            process.send_signal(SIGKILL)
        assert process.wait(60) == -SIGKILL, self.log.read_text()

    def has(self, event: str, stage: str) -> bool:
        return self.run.root.exists() and any((e.event, e.stage) == (event, stage) for e in self.run.events())

    def control(self, role: str | None = None) -> list[str]:
        """Return the job ids of the controllers, or of their guards with the role "guard"."""
        submitted = [e for e in self.run.events() if (e.event, e.stage) == ("submitted", "control")]
        return [event.job_id for event in submitted if event.data.get("role") == role]

    def logs_of_controllers(self, words: str) -> list[Path]:
        """Return the controllers' log files that contain the words."""
        return [log for log in self.run.root.glob("slurm/control-*/*_log.*") if words in log.read_text()]

    def submissions(self) -> Counter[str]:
        return Counter(event.stage for event in self.run.events() if event.event == "submitted")


@pytest.fixture(scope="session")
def detached(slurm_cluster: MiniCluster, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """A detached sweep that runs in parallel to the other tests; its first two controllers are killed."""
    command = Command(tmp_path_factory.mktemp("detached"), slurm_cluster)
    assert command.start("--detach").wait(120) == 0, command.log.read_text()
    threading.Thread(target=kill_controllers, args=(command,), daemon=True).start()
    return command


def kill_controllers(command: Command) -> None:
    """Kill the first controller's process, then the whole job of the second, each as soon as it runs."""
    cluster = command.cluster
    cluster.wait_for(lambda: cluster.task_pids(command.control()[0]), 300, "the controller job")
    cluster.kill_task(command.control()[0], 0)
    cluster.wait_for(lambda: len(command.control()) > 1, 300, "the next controller")
    second = command.control()[1]
    # hold the job and the run's lock, so that the controller is killed before it does anything, even on a busy machine
    cluster.run("scontrol", "hold", second)
    with held(command.run, cluster):
        cluster.run("scontrol", "release", second)
        cluster.wait_for(lambda: cluster.task_pids(second), 300, "its start")
        cluster.kill_job(second)


@contextmanager
def held(run: RunDirectory, cluster: MiniCluster) -> Iterator[None]:
    """Hold the run's lock within the block, once nobody else has it."""
    with ExitStack() as stack:

        def is_locked() -> bool:
            with suppress(RunDirectoryError):
                stack.enter_context(run.locked("another command"))
                return True
            return False

        cluster.wait_for(is_locked, 120, "the end of the controller before it")
        yield


def test_a_plain_command_on_a_detached_sweep_waits_and_cancels_nothing(
    slurm_cluster: MiniCluster, detached: Command
) -> None:
    process = detached.start()
    slurm_cluster.wait_for(lambda: "carries this sweep on" in detached.log.read_text(), 60)
    process.terminate()
    assert process.wait(60) == 130
    output = detached.log.read_text()
    assert "interrupted; the sweep goes on unattended, by controller job " in output
    assert "--take-over" in output.splitlines()[-2]
    assert "is cancelled" not in output


def test_a_detached_sweep_cancelled_with_all_its_jobs_is_over(slurm_cluster: MiniCluster, tmp_path: Path) -> None:
    command = Command(tmp_path, slurm_cluster)
    # keep the controller from starting, so that it cannot finish before the command has ended
    slurm_cluster.run("scontrol", "update", "PartitionName=batch", "State=DOWN")
    try:
        ended = command.start("--detach").wait(120)
    finally:
        # jobs start some time after this call, so the next line locks the run before the controller can
        slurm_cluster.run("scontrol", "update", "PartitionName=batch", "State=UP")
    with held(command.run, slurm_cluster):
        assert ended == 0, command.log.read_text()
        (controller,) = command.control()
        # wait until the controller handles TERM: before this line in its log, TERM would end Python at once
        slurm_cluster.wait_for(lambda: command.logs_of_controllers("Loading pickle"), 300, "the controller's start")
        before = command.submissions()
        slurm_cluster.run("scancel", controller, *command.control("guard"))
    slurm_cluster.wait_for(lambda: command.has("ended", "control"), 60, "the controller's end")
    assert command.submissions() == before
    (end,) = (event for event in command.run.events() if (event.event, event.stage) == ("ended", "control"))
    assert end.detail == f"controller job {controller} was cancelled, {BY_HAND}"


def test_a_command_that_is_killed_at_any_moment_goes_on_and_does_nothing_twice(
    slurm_cluster: MiniCluster, detached: Command, tmp_path: Path
) -> None:
    killed = Command(tmp_path, slurm_cluster, sizes=[1])
    killed.kill_when(lambda: killed.has("submitted", "profile"))
    killed.kill_when(killed.run.plan_file.exists)
    killed.kill_when(lambda: bool(read_metrics(killed.run.train().metrics_file).steps))
    assert killed.start("--until", "train").wait(300) == 0, killed.log.read_text()
    measured = Counter(m.configuration for m in killed.run.measurements().records)
    assert len(measured) == 2
    assert set(measured.values()) == {1}
    assert killed.submissions() == {"profile": 1, "train": 1}
    samples = [step.samples_seen for step in read_metrics(killed.run.train().metrics_file).steps]
    assert samples == sorted(set(samples))


def test_a_detached_sweep_comes_to_its_end_with_nothing_alive_on_the_login_node(
    slurm_cluster: MiniCluster, detached: Command
) -> None:
    slurm_cluster.wait_for((detached.run.report / "report.html").exists, 300, "the report")
    output = detached.log.read_text()
    assert "detached: job" in output
    assert f" status {detached.run.root}" in output
    assert detached.run.train().result_file.exists()
    first = next(detached.run.slurm.glob(f"control-*/{detached.control()[0]}_submission.sh")).parent
    assert (first / "killed").read_text() == "137\n"
    assert "--- restart 1" in "".join(path.read_text() for path in first.glob("*.err"))
    submitted = detached.submissions()
    assert (submitted["profile"], submitted["train"]) == (2, 1)
    assert len(detached.control()) >= 2
    assert len(detached.control("guard")) >= 2, "the first guard acted, and left another one"
    assert slurm_cluster.job_state(detached.control()[1]) == "FAILED"
    assert slurm_cluster.job_state(detached.control("guard")[0]) == "COMPLETED"
    assert set(Counter(m.configuration for m in detached.run.measurements().records).values()) == {1}
    slurm_cluster.wait_for(lambda: not _alive(slurm_cluster, detached.run), 60, "the end of the controllers")


def _alive(cluster: MiniCluster, run: RunDirectory) -> set[str]:
    ours = {event.job_id for event in run.events() if event.event == "submitted"}
    return ours & set(cluster.run("squeue", "-h", "-o", "%i").split())
