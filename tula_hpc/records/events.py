"""What the stages of a run and its profile jobs note down as they go."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from tula_hpc.errors import Failure
from tula_hpc.records.base import Configuration, JobId, Nodes, Record


class JobNote(Record):
    """What a profile job says of itself while it runs: for its cost, and for whoever finds it dead.

    A job that is requeued begins again: its notes then hold several runs, each from "began" on.
    """

    # ready: all workers have met
    note: Literal["began", "ready", "measuring", "ended"]
    # Unix time
    time: float
    job_id: JobId = ""
    allocated_nodes: Nodes = 1
    submitted_at: float = 0.0
    # when the allocation was granted, as far as the job can tell
    began_at: float = 0.0
    # what it is about to measure
    configuration: Configuration | None = None
    detail: str = ""


class Event(Record):
    """One line of events.jsonl."""

    time: float
    event: Literal[
        "submitted",
        "started",
        "oom",
        "preempted",
        "requeued",
        "resumed",
        "checkpoint",
        "fell_back",
        "drifted",
        "recovered",
        "replanned",
        "finished",
        "failed",
        "ended",
        "detached",
    ]
    stage: Literal["profile", "plan", "train", "report", "control"]
    detail: str = ""
    failure: Failure | None = None
    job_id: JobId = ""
    data: dict[str, Any] = Field(default={})
