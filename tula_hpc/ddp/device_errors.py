"""Recognize exceptions that mean a broken device of this node, and log the node's host name."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from tula_hpc.env import array_job_id, node_name, slurm_job_id, submitted_job_id
from tula_hpc.errors import DeviceError, LaunchError, StorageError, TulaError
from tula_hpc.failure_kinds import Failure
from tula_hpc.launch import slurm
from tula_hpc.launch.diagnosis import DEVICE_WORDS, MOST_WORDS
from tula_hpc.records import RunDirectory

# CUDA error codes of a broken device: cudaErrorDevicesUnavailable, NoDevice, ECCUncorrectable,
# NvlinkUncorrectable, LaunchFailure, SystemNotReady, SystemDriverMismatch and Unknown
DEVICE_CODES = frozenset({46, 100, 214, 220, 719, 802, 803, 999})
# longest wait for Slurm's answer before a failed worker exits
ANSWER_S = 10.0


def is_of_accelerator(error: BaseException) -> bool:
    """Tell whether an error has torch's type for CUDA errors, which exists since torch 2.8."""
    return isinstance(error, getattr(torch, "AcceleratorError", ()))


def broken_device(error: BaseException) -> str:
    """Return the line of an error that names a broken device of this node, or "".

    An nccl error alone is not enough: the network may have failed at any of the peers.
    """
    if isinstance(error, TulaError) and not isinstance(error, DeviceError):
        return ""
    text = str(error)
    coded = is_of_accelerator(error) and getattr(error, "error_code", None) in DEVICE_CODES
    if not (isinstance(error, DeviceError) or coded or re.search(DEVICE_WORDS, text)):
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if re.search(DEVICE_WORDS, line)), lines[0])[:MOST_WORDS]


@contextlib.contextmanager
def reporting_broken_devices(root: Path, stage: str) -> Iterator[None]:
    """Log the name of this host if the block fails with an error of a broken device.

    Raises:
        DeviceError: In place of that error.
    """
    try:
        yield
    except Exception as error:
        detail = broken_device(error)
        if not detail:
            raise
        host = node_name()
        with contextlib.suppress(StorageError):
            RunDirectory(root).log_event(
                "failed",
                stage,
                failure=Failure.DEVICE_FAILED,
                job_id=submitted_job_id(),
                detail=detail,
                data={"hosts": [host]},
            )
        array_id = array_job_id()
        task_id = slurm_job_id()
        if array_id is not None and task_id is not None:
            # the array's other tasks must avoid this host, which becomes free when this one ends
            with contextlib.suppress(LaunchError):
                slurm.avoid_host(array_id, task_id, host, ANSWER_S)
        raise DeviceError(f"{host}: {detail}") from error
