"""Which exceptions mean that a device of this node is broken; the worker that meets one says so, with its host."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from tula_hpc.env import array_job_id, node_name, slurm_job_id, submitted_job_id
from tula_hpc.errors import DeviceError, Failure, LaunchError, StorageError, TulaError
from tula_hpc.launch import slurm
from tula_hpc.launch.reasons import DEVICE_WORDS, MOST_WORDS
from tula_hpc.records import RunDirectory

# cudaErrorDevicesUnavailable, NoDevice, ECCUncorrectable, NvlinkUncorrectable, LaunchFailure,
# SystemNotReady, SystemDriverMismatch and Unknown
DEVICE_CODES = frozenset({46, 100, 214, 220, 719, 802, 803, 999})
# for which Slurm's answer is waited while a worker is about to leave
ANSWER_S = 10.0


def broken_device(error: BaseException) -> str:
    """Return what an error says of a broken device of this node; "" where it is about something else.

    An error of nccl is not enough: its network may have failed at any of the peers.
    """
    if isinstance(error, TulaError) and not isinstance(error, DeviceError):
        return ""
    text = str(error)
    coded = (
        isinstance(error, torch.AcceleratorError)
        and getattr(error, "error_code", None) in DEVICE_CODES
    )
    if not (isinstance(error, DeviceError) or coded or re.search(DEVICE_WORDS, text)):
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if re.search(DEVICE_WORDS, line)), lines[0])[:MOST_WORDS]


@contextlib.contextmanager
def telling_broken_devices(root: Path, stage: str) -> Iterator[None]:
    """Write an event, with the name of this host, where a worker's work ends with an error of a broken device.

    Args:
        root: The run directory.
        stage: Whose work it is.

    Raises:
        DeviceError: In place of that error.
    """
    try:
        yield
    except Exception as error:
        said = broken_device(error)
        if not said:
            raise
        host = node_name()
        with contextlib.suppress(StorageError):
            RunDirectory(root).log_event(
                "failed",
                stage,
                failure=Failure.DEVICE_FAILED,
                job_id=submitted_job_id(),
                detail=said,
                data={"hosts": [host]},
            )
        _warn_siblings(host)
        raise DeviceError(f"{host}: {said}") from error


def _warn_siblings(host: str) -> None:
    """Keep the array's other tasks off this host: it is free again as soon as this one has failed."""
    array_id, task_id = array_job_id(), slurm_job_id()
    if array_id is not None and task_id is not None:
        with contextlib.suppress(LaunchError):
            slurm.avoid_host(array_id, task_id, host, ANSWER_S)
