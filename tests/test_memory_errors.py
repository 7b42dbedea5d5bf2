"""Which errors mean that memory ran out, in the words of the libraries that torch calls."""

from __future__ import annotations

import pytest
import torch

from tula_hpc.errors import Failure
from tula_hpc.memory_errors import out_of_memory

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
def test_errors_are_told_apart(error: BaseException, failure: Failure | None) -> None:
    assert out_of_memory(error) is failure
