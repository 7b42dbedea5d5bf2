"""Test which error messages of torch and of its libraries count as running out of memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tula_hpc.failure_kinds import Failure
from tula_hpc.process_memory import descendants_processor_s, free_device_share, out_of_memory

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


GIB = 1024**3


@pytest.mark.parametrize(
    ("free", "reserved", "allocated", "share"),
    [(1, 0, 0, 1 / 32), (0, 30, 30, 0.0), (0, 30, 6, 24 / 32)],
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
        assert server.stdout is not None
        assert server.stdout.readline() == b"ended\n"
        serving = descendants_processor_s()
        assert serving - alone >= 0.25
        server.communicate()
    assert descendants_processor_s() >= serving
