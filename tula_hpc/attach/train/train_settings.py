"""Settings of a script's training, from its job for the script's processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from tula_hpc.attach.train.script_drift import DriftSettings
from tula_hpc.env import unix_time
from tula_hpc.records.base import Record


class TrainSettings(Record):
    """Settings of a script's training, in addition to those that every process has."""

    # run directory
    root: Path
    label: str
    job_id: str
    # samples of an epoch, over all workers
    samples: int
    global_batch: int
    # epochs of the whole training; 0: unknown
    epochs: int = 0
    # the script is given the steps of all epochs together: an epoch may end within a step
    counts_steps: bool = False
    # samples of one forward pass of one worker; 0: unknown
    forward_batch: int = 0
    log_interval_steps: int
    # parameters of the model that was measured; None: unknown
    parameters: int | None = None
    # higher for each later run of this training
    restart_count: int = 0
    # where this start begins, unless there is a checkpoint: fields of `ScriptProgress`
    progress: dict[str, int | float] = Field(default={})
    # Unix time of this job's beginning
    job_began_at: float = Field(default_factory=unix_time)
    # sweep file of a method that scales gradients; empty: the script's steps are left as they are
    sweep: dict[str, Any] = Field(default={})
    # nodes, workers per node and local batch
    configuration: tuple[int, int, int] = (1, 1, 1)
    # what decides the interval between checkpoints: see `Interruptions` and `Cadence`
    between_s: float
    between_is_known: bool = False
    fixed_s: float | None = None
    # None: step times are compared with nothing
    drift: DriftSettings | None = None
