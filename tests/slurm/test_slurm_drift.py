"""A slow link and a node with busy neighbors during training: both are noticed and named, and so is their end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.run_factory import candidate, plan, with_step_time, write_plan
from tests.slurm.machine import busy_neighbours
from tests.slurm.sweeping import TEMPLATE
from tests.slurm.testcluster import MiniCluster
from tula_hpc.config import SweepSpec, load_cluster
from tula_hpc.launch.job_specs import ProfileJob, TrainJob
from tula_hpc.launch.launcher import Launcher
from tula_hpc.records import Configuration, Event, Measurement, RunDirectory, read_metrics, read_records

CONFIGURATION = Configuration(nodes=2, workers_per_node=1, local_batch=32)
# rate of the slowed link; usually 1000
SLOW_MBIT = 20
# interval of the prediction; wide, because other work on this machine may slow all nodes at once
ROOM = (0.4, 1.8)
SWEEP = SweepSpec.model_validate(
    {
        "name": "drifting",
        "workload": {
            "model": "tula_hpc.workloads.small_cnns:compact_cnn",
            "dataset": "digits",
            "epochs": 10_000,
            "loader_workers": 0,
        },
        "search": {"cluster_sizes": [2], "min_batch": 64, "max_batch": 64, "max_seconds": 5},
        "training": {"small_batch": 16, "log_interval_steps": 5, "drift_minutes": 0.08},
    }
)


class Training:
    """A profile and an endless training, in a run directory of its own."""

    def __init__(self, cluster: MiniCluster, folder: Path) -> None:
        self.cluster, self.run = cluster, RunDirectory(folder).create()
        self.files = self.run.train()
        self.files.root.mkdir(parents=True)
        self.spec = load_cluster(TEMPLATE)
        self.launcher = Launcher(self.spec, self.run, "tula-drifting")

    def profile(self) -> Measurement:
        output = self.run.profile / "n2-0.jsonl"
        job = ProfileJob(SWEEP, self.spec, (CONFIGURATION,), output, nodes=2)
        self.launcher.wait(self.launcher.submit([job], stage="profile", nodes=2, minutes=5))
        (measured,) = read_records(Measurement, [output]).records
        return measured

    def write_plan(self, measured: Measurement) -> None:
        """Write a plan that predicts what was measured, with a wide interval."""
        assert measured.times is not None
        step_s, known = measured.times.step_time_s, candidate(CONFIGURATION)
        interval = (ROOM[0] * step_s, ROOM[1] * step_s)
        chosen = with_step_time(known, step_s).model_copy(update={"interval_90": {"step_time_s": interval}})
        write_plan(self.run, plan([known] * 4, chosen=chosen, fallbacks=[]))

    @contextmanager
    def running(self) -> Iterator[None]:
        job = TrainJob(SWEEP, self.spec, CONFIGURATION, self.run.root)
        (submitted,) = self.launcher.submit([job], stage="train", nodes=2, minutes=20)
        try:
            self.cluster.wait_for(lambda: len(read_metrics(self.files.metrics_file).epochs) >= 2, 120, "two epochs")
            yield
        finally:
            self.cluster.run("scancel", submitted.job_id)
            self.launcher.wait([submitted])

    @property
    def drifts(self) -> list[Event]:
        return [event for event in self.run.events() if event.event in ("drifted", "recovered")]

    def wait_for_event(self, number: int) -> Event:
        self.cluster.wait_for(lambda: len(self.drifts) >= number, 120, f"event {number} of the drift")
        return self.drifts[number - 1]


@pytest.fixture(scope="module")
def training(slurm_cluster: MiniCluster, tmp_path_factory: pytest.TempPathFactory) -> Training:
    training = Training(slurm_cluster, tmp_path_factory.mktemp("drift") / "run")
    training.write_plan(training.profile())
    return training


@pytest.mark.thorough
@pytest.mark.alone
def test_a_slow_link_and_a_busy_node_are_noticed_and_named_and_so_is_their_end(training: Training) -> None:
    cluster = training.cluster
    with training.running():
        with cluster.slow_link(cluster.hosts[0], SLOW_MBIT):
            slow = training.wait_for_event(1)
        mended = training.wait_for_event(2)
        with busy_neighbours(cluster.hosts[1], count=4):
            busy = training.wait_for_event(3)

    assert [event.event for event in training.drifts[:3]] == ["drifted", "recovered", "drifted"]
    assert slow.data["part"] == "network"
    assert slow.data["ratio"] > ROOM[1]
    parts = slow.data["parts"]
    assert parts["measured"]["allreduce_time_s"] > 3 * parts["expected"]["allreduce_time_s"]
    assert "network" in slow.detail
    assert mended.data["ratio"] < ROOM[1]
    assert busy.data["part"] == "compute"
    assert busy.data["slowest_host"] == cluster.hosts[1]
    assert training.files.drift_file.exists()
