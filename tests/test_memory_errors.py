"""Test which error messages of torch and of its libraries count as running out of memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.known import known
from tula_hpc.failure_kinds import Failure
from tula_hpc.process_memory import descendants_processor_s, free_device_share, held_by_others, out_of_memory, parent_of

NCCL = (
    "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.28.9"
)


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), Failure.DEVICE_OOM),
        (RuntimeError("CUDA error: out of memory"), Failure.DEVICE_OOM),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            Failure.DEVICE_OOM,
        ),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), Failure.DEVICE_OOM),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), Failure.DEVICE_OOM),
        (RuntimeError(f"{NCCL}\nLast error:\nCuda failure 2 'out of memory'"), Failure.DEVICE_OOM),
        (RuntimeError(f"{NCCL}\nLast error:\nFailed to CUDA calloc async 608 bytes"), Failure.DEVICE_OOM),
        (RuntimeError(f"{NCCL}\nLast error:\nFailed to CUDA malloc 4194304 bytes"), Failure.DEVICE_OOM),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), Failure.HOST_OOM),
        (MemoryError(), Failure.HOST_OOM),
        (RuntimeError("CUDA error: device-side assert triggered"), None),
        (RuntimeError(f"{NCCL}\nLast error:\nCuda failure 1 'invalid argument'"), None),
    ],
)
def test_errors_are_distinguished(error: BaseException, failure: Failure | None) -> None:
    assert out_of_memory(error) is failure


@pytest.mark.parametrize(
    "words",
    [
        "GET was unable to find an engine to execute this computation",
        "FIND was unable to find an engine to execute this computation",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    ],
)
def test_with_little_free_memory_an_ambiguous_error_is_lack_of_memory(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for free, failure in ((0.01, Failure.DEVICE_OOM), (0.5, None)):
        monkeypatch.setattr("tula_hpc.process_memory.free_device_share", lambda free=free: free)
        assert out_of_memory(RuntimeError(words)) is failure


def test_other_errors_are_no_lack_of_memory_however_little_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tula_hpc.process_memory.free_device_share", lambda: 0.0)
    assert out_of_memory(RuntimeError("CUDA error: device-side assert triggered")) is None


# torch 2.10's message; older ones say "capacty". No process has so large a number.
SHARED_GPU = (
    "CUDA out of memory. Tried to allocate 138.00 MiB. GPU 0 has a total capacity of 15.90 GiB of which 8.44 MiB is "
    "free. Process 4194305 has 5.00 GiB memory in use. Including non-PyTorch memory, this process has 10.32 GiB memory "
    "in use. Of the allocated memory 9.12 GiB is allocated by PyTorch, and 410.41 MiB is reserved by PyTorch but "
    "unallocated."
)


@pytest.mark.parametrize(
    ("message", "ours", "held"),
    [
        (SHARED_GPU, [], "5.0 GiB of the device's 16 GiB were held outside of this job, by process 4194305"),
        (SHARED_GPU.replace("capacity", "capacty"), [7], "5.0 GiB of the device's"),
        # such as the engine of a script, or another worker
        (SHARED_GPU, [7, 4194305], ""),
        (SHARED_GPU.replace("5.00 GiB", "577.00 MiB"), [], ""),
        # in a container torch does not recognize its own process
        (SHARED_GPU.replace("Including non-PyTorch memory, this process", "Process 20"), [], ""),
        ("CUDA error: out of memory", [], ""),
    ],
)
def test_processes_of_others_that_hold_much_of_a_gpu_are_named(
    message: str, ours: list[int], held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tula_hpc.process_memory.descendants", lambda _: iter(ours))
    found = held_by_others(torch.OutOfMemoryError(message), 1)
    assert found.startswith(held)
    assert bool(found) == bool(held)


@pytest.mark.processes
def test_a_process_of_the_same_slurm_job_is_no_other_wherever_it_descends_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container each task has an ancestor of its own."""
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setattr("tula_hpc.process_memory.descendants", lambda _: iter(()))
    for job_id, is_other in (("5", False), ("6", True)):
        with subprocess.Popen(["/bin/sleep", "60"], env={"SLURM_JOB_ID": job_id}) as process:
            # right after its start a process may still have no environment
            while not Path(f"/proc/{process.pid}/environ").read_bytes():
                time.sleep(0.01)
            message = SHARED_GPU.replace("4194305", str(process.pid))
            assert bool(held_by_others(torch.OutOfMemoryError(message), 1)) == is_other
            process.kill()


def test_the_parent_of_a_process_is_known_while_it_lives() -> None:
    assert parent_of(os.getpid()) == os.getppid()
    assert parent_of(2**22 + 1) == 0


GIB = 1024**3


@pytest.mark.parametrize(
    ("free", "reserved", "allocated", "share"), [(1, 0, 0, 1 / 32), (0, 30, 30, 0.0), (0, 30, 6, 24 / 32)]
)
def test_memory_that_the_allocator_holds_but_nobody_uses_is_free(
    monkeypatch: pytest.MonkeyPatch, free: int, reserved: int, allocated: int, share: float
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free * GIB, 32 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: allocated * GIB)
    assert free_device_share() == pytest.approx(share)


def test_the_memory_of_a_gpu_that_answers_no_more_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> tuple[int, int]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    error = RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")
    assert out_of_memory(error) is None


WORKS = "import time\nwhile time.process_time() < 0.3: pass"
# a process that, like a fork server, has a child that has ended
SERVES = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {WORKS!r}], check=True)
print("ended", flush=True)
sys.stdin.read()
"""


@pytest.mark.processes
def test_processor_time_of_processes_that_have_ended_still_counts() -> None:
    """A loader ends its processes after each epoch; the processor time that they used must still count."""
    before = descendants_processor_s()
    subprocess.run([sys.executable, "-c", WORKS], check=True)
    alone = descendants_processor_s()
    assert alone - before >= 0.25
    with subprocess.Popen([sys.executable, "-c", SERVES], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert known(server.stdout).readline() == b"ended\n"
        serving = descendants_processor_s()
        assert serving - alone >= 0.25
        server.communicate()
    assert descendants_processor_s() >= serving
