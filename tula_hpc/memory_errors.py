"""Which exceptions of torch mean that memory ran out, and whose."""

from __future__ import annotations

import re

import torch

from tula_hpc.errors import Failure

# torch raises a plain RuntimeError when the host's allocator fails
_HOST_PHRASES = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
_DEVICE_WORDS = re.compile(
    r"CUDA out of memory|CUDA error: out of memory|Cuda failure.*out of memory|Failed to CUDA [cm]alloc"
    # cuDNN 9 has another name for it than those before
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
)


def out_of_memory(error: BaseException) -> Failure | None:
    """DEVICE_OOM, HOST_OOM, or None when the error is something else."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or _DEVICE_WORDS.search(text):
        return Failure.DEVICE_OOM
    if isinstance(error, MemoryError) or any(phrase in text for phrase in _HOST_PHRASES):
        return Failure.HOST_OOM
    return None
