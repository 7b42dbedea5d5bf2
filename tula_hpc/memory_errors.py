"""Which exceptions of torch mean that memory ran out, and whose."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from tula_hpc.errors import Failure

# torch raises a plain RuntimeError when the host's allocator fails
_HOST_PHRASES = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
_DEVICE_WORDS = re.compile(
    r"CUDA out of memory|CUDA error: out of memory|Cuda failure.*out of memory|Failed to CUDA [cm]alloc"
    # cuDNN 9 has another name for it than those before
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
)
# what cuDNN and cuBLAS say when they get no memory for a handle or a workspace, and for other reasons too
_PERHAPS_DEVICE_WORDS = re.compile(
    r"unable to find an engine to execute this computation|CUBLAS_STATUS_NOT_INITIALIZED"
    r"|CUBLAS_STATUS_INTERNAL_ERROR|CUDNN_STATUS_NOT_INITIALIZED|CUDNN_STATUS_INTERNAL_ERROR"
)
LITTLE_FREE = 0.05


def free_device_share() -> float:
    """Return the share of the current GPU's memory that this process could still get; 1 where it cannot be told.

    That is what no process holds, and what torch's allocator holds but has not given away.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch's
        return 1.0
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:
        # after some errors a process cannot use its GPU any more
        return 1.0
    return (free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()) / total


def out_of_memory(error: BaseException, free_share: Callable[[], float] = free_device_share) -> Failure | None:
    """Tell whether an error means that memory ran out. Ask while it is handled: its tensors count.

    Args:
        error: What was raised.
        free_share: Tells the share of the device's memory that is free; asked only where it decides.

    Returns:
        DEVICE_OOM, HOST_OOM, or None when the error is something else.
    """
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or _DEVICE_WORDS.search(text):
        return Failure.DEVICE_OOM
    if isinstance(error, MemoryError) or any(phrase in text for phrase in _HOST_PHRASES):
        return Failure.HOST_OOM
    if _PERHAPS_DEVICE_WORDS.search(text) and free_share() < LITTLE_FREE:
        return Failure.DEVICE_OOM
    return None
