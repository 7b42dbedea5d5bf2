"""How profiles are packed into jobs on the real cluster."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.examples.slow import PACE_FILE
from tests.slurm.sweeping import run_sweep
from tests.slurm.testcluster import MiniCluster
from tula_hpc.failure_kinds import Failure
from tula_hpc.records import RunDirectory

pytestmark = pytest.mark.usefixtures("quick_nodes")
QUICK = """
name = "quick"
[workload]
model = "tula_hpc.workloads.small_cnns:compact_cnn"
dataset = "digits"
loader_workers = 0
[search]
estimate = false
warmup_steps = 1
min_steps = 5
max_steps = 5
"""


class Profiled:
    """A run directory, the command's output, and the jobs that it submitted."""

    def __init__(self, folder: Path, done: subprocess.CompletedProcess[str]) -> None:
        assert done.returncode == 0, done.stderr + done.stdout
        self.run, self.output = RunDirectory(folder / "run"), done.stdout
        self.jobs = [event for event in self.run.events() if event.event == "submitted"]


def profile(folder: Path, cluster: MiniCluster, **search: object) -> Profiled:
    settings = tuple(f"search.{key}={value}" for key, value in search.items())
    return Profiled(folder, run_sweep(QUICK, folder, cluster.environment, "--until", "profile", settings=settings))


def submitted(run: RunDirectory) -> list[str]:
    """Return the ids of the run's jobs; empty if there is no run directory yet."""
    return [event.job_id for event in run.events() if event.event == "submitted"] if run.root.is_dir() else []


def profile_that_has_to_leave(folder: Path, cluster: MiniCluster) -> Profiled:
    """Send a profile's job the user signal, as a preemption may, while Slurm must not requeue the job."""
    pace, run = folder / "pace", RunDirectory(folder / "run")
    pace.write_text("1")
    text = QUICK.replace("tula_hpc.workloads.small_cnns:compact_cnn", "tests.examples.slow:build")
    fields = ("search.cluster_sizes=[1]", "search.min_batch=64", "search.max_batch=64", "search.mode=full")
    site = ("cluster.sbatch.requeue=false", "cluster.sbatch.no-requeue=true")
    environment = {**cluster.environment, PACE_FILE: str(pace)}
    with ThreadPoolExecutor() as pool:
        command = pool.submit(run_sweep, text, folder, environment, "--until", "profile", settings=(*fields, *site))

        def measures() -> bool:
            return any(note.configuration for note in run.job_notes()) if run.profile.is_dir() else command.done()

        cluster.wait_for(measures, 180, "the first measurement to begin")
        (first,) = submitted(run)
        cluster.signal(first, "USR2")
        pace.write_text("0")
        return Profiled(folder, command.result())


@pytest.fixture(scope="module")
def begun(
    slurm_cluster: MiniCluster, quick_nodes: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Profiled]]]:
    """Profiles in parallel, because they mostly wait; the one that needs most nodes gets them first."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("nested", "adaptive", "leaves")}
    with ThreadPoolExecutor() as pool:

        def begin(name: str, **search: object) -> Future[Profiled]:
            return pool.submit(profile, folders[name], slurm_cluster, **search)

        sizes = {"mode": "full", "cluster_sizes": [1, 2], "min_batch": 64, "max_batch": 128}
        nested = begin("nested", nest="true", **sizes)
        run = RunDirectory(folders["nested"] / "run")
        slurm_cluster.wait_for(lambda: submitted(run) or nested.done(), 120, "the first submission")
        yield {
            "nested": nested,
            "leaves": pool.submit(profile_that_has_to_leave, folders["leaves"], slurm_cluster),
            "adaptive": begin("adaptive", mode="adaptive", cluster_sizes=[2], min_batch=16, max_batch=128),
        }


def test_a_job_goes_on_with_what_the_search_wants_next(begun: dict[str, Future[Profiled]]) -> None:
    found = begun["adaptive"].result()
    (job,) = found.jobs
    records = found.run.measurements().records
    assert all(m.status == "ok" and m.job_id == job.job_id for m in records)
    notes = found.run.job_notes()
    assert [note.configuration for note in notes if note.configuration] == [m.configuration for m in records]
    assert (notes[-1].note, notes[-1].detail) == ("ended", "")
    # it began with the smallest and the largest
    assert len({m.local_batch for m in records}) > 2


@pytest.fixture(scope="module")
def nested(begun: dict[str, Future[Profiled]]) -> Profiled:
    return begun["nested"].result()


def test_in_one_allocation_smaller_sizes_run_on_its_first_nodes(nested: Profiled) -> None:
    (job,) = nested.jobs
    assert job.data["nodes"] == 2
    records = nested.run.measurements().records
    assert {(m.nodes, m.local_batch) for m in records} == {(1, 64), (1, 128), (2, 32), (2, 64)}
    hosts = next(m.hosts for m in records if m.nodes == 2)
    assert len(set(hosts)) == 2
    for m in records:
        assert (m.status, m.hosts) == ("ok", hosts[: m.nodes])
        assert m.node_seconds == pytest.approx(2 * m.elapsed_s)
        assert m.times is not None
        assert (m.times.allreduce_time_s > 0) == (m.nodes > 1)


def test_the_cost_counts_from_the_start_of_the_allocation(nested: Profiled) -> None:
    began, ready = nested.run.job_notes()[:2]
    assert 0 <= began.began_at - began.submitted_at < 60
    assert began.began_at <= began.time < ready.time
    assert "profiling cost: 4 configurations in 1 job" in nested.output


def test_a_profile_whose_requeue_is_refused_is_followed_by_another(begun: dict[str, Future[Profiled]]) -> None:
    """The stop does not count as a failure of the configuration that was being measured."""
    found = begun["leaves"].result()
    ends = [event.failure for event in found.run.events() if event.event == "ended" and event.job_id]
    assert ends == [Failure.PREEMPTED, None]
    (measured,) = found.run.measurements().records
    assert measured.status == "ok"
    first, second = (job.job_id for job in found.jobs)
    assert measured.job_id == second != first
