"""Processes that were stopped for a while, as those of a suspended job: what was timed meanwhile says nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ddp.test_worker import CONFIGURATION, sweep
from tests.forked import ALONE, start_workers
from tula_hpc.config import ClusterSpec
from tula_hpc.ddp.stop_signals import Suspensions
from tula_hpc.errors import PreemptedError
from tula_hpc.profiling.measure import SharedTimes, StepProfile, measure
from tula_hpc.profiling.meters import MemoryMeter, PowerMeter


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGCONT)
    yield
    signal.signal(signal.SIGCONT, before)


def test_a_suspension_is_reported_once() -> None:
    suspensions = Suspensions().install()
    assert not suspensions.take()
    os.kill(os.getpid(), signal.SIGCONT)
    assert suspensions.take()
    assert not suspensions.take()


LOST = "[gloo/unbound_buffer.cc:78] Timed out waiting 180000ms for recv operation to complete"


@pytest.mark.parametrize(
    ("words", "suspended", "raised"),
    [
        (LOST, True, PreemptedError),
        (LOST, False, RuntimeError),
        # the peer was killed; Slurm then sends CONT
        ("Connection closed by peer [127.0.0.1]:919", True, RuntimeError),
        ("mat1 and mat2 shapes cannot be multiplied", True, RuntimeError),
    ],
)
def test_a_collective_that_timed_out_after_a_suspension_is_no_failure_of_a_worker(
    words: str, suspended: bool, raised: type[Exception]
) -> None:
    suspensions = Suspensions().install()
    if suspended:
        os.kill(os.getpid(), signal.SIGCONT)
    with pytest.raises(raised), suspensions.blamed():
        raise RuntimeError(words)


PATIENCE_S = 1.2


def suspended_while_it_waits(rank: int, folder: Path) -> None:
    """Stop the first worker in a collective for longer than its time limit; the second worker never joins it."""
    suspensions = Suspensions().install()
    meeting, patience = f"file://{folder / 'meeting'}", timedelta(seconds=PATIENCE_S)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=patience)
    processes = torch.zeros(2, dtype=torch.int64)
    processes[rank] = os.getpid()
    dist.all_reduce(processes)
    if rank == 0:
        with pytest.raises(PreemptedError, match="was suspended"), suspensions.blamed():
            dist.all_reduce(torch.zeros(1))
        (folder / "notified").touch()
    else:
        peer = int(processes[0])
        os.kill(peer, signal.SIGSTOP)
        time.sleep(1.5 * PATIENCE_S)
        os.kill(peer, signal.SIGCONT)
        while not (folder / "notified").exists() and Path(f"/proc/{peer}").exists():
            time.sleep(0.05)
    # the group's destructor would wait for the other worker
    os._exit(0)


@pytest.mark.processes
def test_a_worker_that_was_stopped_in_a_collective_names_the_suspension(tmp_path: Path) -> None:
    start_workers(2, suspended_while_it_waits, tmp_path, timeout_s=60)
    assert (tmp_path / "notified").exists()


@pytest.mark.processes
def test_a_configuration_whose_job_was_suspended_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rounds are repeated, because in a mean of few rounds a suspended one counts too much."""
    run = StepProfile.run
    profiles: list[StepProfile] = []
    known: list[set[tuple[int, int]]] = []

    def suspended_at_first(self: StepProfile, memory: MemoryMeter, power: PowerMeter) -> None:
        known.append(set(self.shared.computed))
        run(self, memory, power)
        if not profiles:
            os.kill(os.getpid(), signal.SIGCONT)
        profiles.append(self)

    monkeypatch.setattr(StepProfile, "run", suspended_at_first)
    shared = SharedTimes()
    measured = measure(sweep(), ClusterSpec(), CONFIGURATION, ALONE, shared, job_began_at=1.0)
    assert len(profiles) == 2
    # nothing of the first measurement is kept
    assert known == [set(), set()]
    assert measured.samples["step"] == [round(seconds, 7) for seconds in profiles[1].samples["step"]]
    # and its start cannot be measured again
    assert measured.start_s == 0.0
    assert shared.computed


@pytest.mark.processes
def test_a_job_that_is_suspended_every_time_is_measured_a_limited_number_of_times(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This happens with gang scheduling, which suspends jobs in turns."""
    run = StepProfile.run
    profiles: list[StepProfile] = []

    def suspended_always(self: StepProfile, memory: MemoryMeter, power: PowerMeter) -> None:
        run(self, memory, power)
        os.kill(os.getpid(), signal.SIGCONT)
        profiles.append(self)

    monkeypatch.setattr(StepProfile, "run", suspended_always)
    monkeypatch.setattr("tula_hpc.profiling.measure.MOST_ATTEMPTS", 2)
    assert measure(sweep(), ClusterSpec(), CONFIGURATION, ALONE).samples["step"]
    assert len(profiles) == 2
    assert "taken as it is after 2 attempts" in capsys.readouterr().err
