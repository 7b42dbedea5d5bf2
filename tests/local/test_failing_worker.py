"""If a worker of a local job fails, it ends at once, and the job's other workers are ended after a while."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE

from tests.launch.test_launch import launcher, processes_of, sleeper
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.env import join_job
from tula_hpc.failure_kinds import Failure
from tula_hpc.launch.diagnosis import informative_line
from tula_hpc.launch.job_files import Submitted
from tula_hpc.launch.job_specs import ProfileJob, TrainJob
from tula_hpc.launch.launcher import Ended, Launcher
from tula_hpc.records import Configuration, RunDirectory
from tula_hpc.stages.context import describe_failures


def fails_with_a_peer_that_waits(exit_code: int) -> Callable[[], None]:
    """Make a job whose rank 1 fails, by an error or a signal, while rank 0 waits for it as over nccl."""

    def job() -> None:
        if os.environ["SUBMITIT_LOCAL_GLOBALID"] == "0":
            time.sleep(300)
        elif exit_code < 0:
            # drop the signal's handler, as early in a process
            with contextlib.suppress(OSError):
                signal.signal(-exit_code, signal.SIG_DFL)
            os.kill(os.getpid(), -exit_code)
        else:
            raise KeyError("of rank 1")

    return job


def test_a_worker_that_fails_ends_its_job(tmp_path: Path) -> None:
    local = launcher(tmp_path, workers_per_node=2, array_parallelism=3)
    jobs = [fails_with_a_peer_that_waits(exit_code) for exit_code in (1, -9, -15)]
    raised, killed, terminated = local.wait(local.submit(jobs, stage="train", nodes=1, minutes=4))
    assert raised.failure is Failure.BUG
    assert "of rank 1" in raised.log_tail
    assert killed.failure is Failure.KILLED
    assert "task 1: Killed" in killed.log_tail
    assert terminated.failure is Failure.KILLED
    assert "task 1: Terminated" in terminated.log_tail


def asks_to_run_again(count: int) -> Callable[[], None]:
    """Make a job whose process asks `count` times to be started again, as at a time limit."""

    def job() -> None:
        starts = Path(os.environ["SUBMITIT_FOLDER"], "starts")
        with starts.open("a") as file:
            file.write("x")
        if starts.stat().st_size <= count:
            os._exit(LOCAL_REQUEUE_RETURN_CODE)

    return job


def test_a_job_is_started_again_as_often_as_it_asks_for(tmp_path: Path) -> None:
    """The launcher sets no limit: a training bounds its requeues itself, by `training.max_requeues`."""
    local = launcher(tmp_path)
    (ended,) = local.wait(local.submit([asks_to_run_again(4)], stage="train", nodes=1, minutes=4))
    assert "completed successfully" in ended.log_tail


def exits_without_a_word() -> Callable[[], None]:
    """Make a job whose process fails without a line in its log."""

    def job() -> None:
        os._exit(3)

    return job


def kill_all_but_the_shell(job: Submitted) -> None:
    """Kill the job's controller and worker, once the worker runs."""
    deadline = time.monotonic() + 60
    while not any("Loading pickle" in path.read_text() for path in job.log_files()):
        assert time.monotonic() < deadline, "the job did not begin"
        time.sleep(0.05)
    for process in processes_of(job):
        if process != int(job.job_id):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def joins_and_sleeps() -> Callable[[], None]:
    """Make a job whose workers join their job, as those that profile and train do."""

    def job() -> None:
        join_job()
        sys.stdout.write("joined\n")
        sys.stdout.flush()
        time.sleep(60)

    return job


def test_workers_end_with_their_controller(tmp_path: Path) -> None:
    local = launcher(tmp_path, workers_per_node=2)
    (job,) = local.submit([joins_and_sleeps()], stage="train", nodes=1, minutes=4)
    deadline = time.monotonic() + 60
    while sum("joined" in path.read_text() for path in job.folder.glob("*_log.out")) < 2:
        assert time.monotonic() < deadline, "the job did not begin"
        time.sleep(0.05)
    commands = {process: Path(f"/proc/{process}/cmdline").read_bytes() for process in processes_of(job)}
    (controller,) = [
        process for process, command in commands.items() if b"\0tula_hpc.launch.local_controller\0" in command
    ]
    os.kill(controller, signal.SIGKILL)
    (end,) = local.wait([job])
    assert end.failure is Failure.KILLED
    # the kernel kills the workers a moment later
    while processes_of(job):
        assert time.monotonic() < deadline, "a worker goes on without its controller"
        time.sleep(0.05)


def test_a_job_that_is_killed_as_a_whole_is_distinguished_from_one_that_ends_by_itself(tmp_path: Path) -> None:
    local = launcher(tmp_path)
    # submitted one by one, so that each job has its own folder, by which its processes are found
    tasks = (sleeper(), sleeper(), exits_without_a_word())
    jobs = [job for task in tasks for job in local.submit([task], stage="train", nodes=1, minutes=4)]
    kill_all_but_the_shell(jobs[0])
    kill_all_but_the_shell(jobs[1])
    os.kill(int(jobs[1].job_id), signal.SIGKILL)
    ended = local.wait(jobs)
    assert [end.failure for end in ended] == [Failure.KILLED, Failure.KILLED, Failure.BUG]
    for end in ended:
        assert "submitit" not in describe_failures([end])
    assert "its log does not say why" in describe_failures(ended[2:])


LINGERING = SweepSpec.model_validate(
    {
        "name": "lingering",
        "workload": {"model": "tests.examples.lingering:build", "dataset": "digits", "samples": 512, "epochs": 1},
        "search": {"min_steps": 5, "max_steps": 5},
        "training": {"method": "lbt"},
    }
)
PAIR = Configuration(nodes=1, workers_per_node=2, local_batch=32)


def end_of_lingering_worker(
    run: RunDirectory, stage: Literal["profile", "train"], environment: dict[str, str], loaders: int
) -> Ended:
    """Let a job's second worker fail; all of the job's processes must be gone long before they would wake up."""
    cluster = ClusterSpec(workers_per_node=2, environment=environment)
    spec = LINGERING.model_copy(update={"workload": LINGERING.workload.model_copy(update={"loader_workers": loaders})})
    job: ProfileJob | TrainJob
    if stage == "profile":
        job = ProfileJob(spec, cluster, (PAIR,), run.profile / "job.jsonl", nodes=1)
    else:
        run.train().root.mkdir()
        job = TrainJob(spec, cluster, PAIR, run.root)
    local = Launcher(cluster, run, "tula-test")
    (submitted,) = local.submit([job], stage=stage, nodes=1, minutes=4)
    deadline = time.monotonic() + 240
    try:
        while processes := processes_of(submitted):
            assert time.monotonic() < deadline, "the job does not end"
            time.sleep(0.1)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    (end,) = local.wait([submitted])
    return end


def log_of_second_worker(end: Ended) -> str:
    (path,) = end.job.folder.glob("*_1_log.err")
    return path.read_text()


def test_a_worker_that_has_recorded_its_failure_is_gone_whatever_its_destructors_want(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run").create()
    end = end_of_lingering_worker(run, "profile", {"LINGERS": "destructor", "RAISES": "MemoryError"}, 0)
    (record,) = run.measurements().records
    assert (record.status, record.failure, record.detail) == ("oom", Failure.HOST_OOM, "rank 1")
    assert "out of memory (host_oom)" in log_of_second_worker(end)


def test_a_worker_that_has_raised_is_gone_whatever_its_threads_do(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run").create()
    end = end_of_lingering_worker(run, "train", {"LINGERS": "thread", "RAISES": "KeyError"}, 1)
    assert end.failure is Failure.BAD_INPUT
    assert informative_line(end.log_tail).startswith(
        "workload.model: tests.examples.lingering:build failed: KeyError: "
    )
    assert "Traceback (most recent call last)" in log_of_second_worker(end)
    assert "KeyError: 'of rank 1'" in log_of_second_worker(end)
