"""The callables that submitit sends to the nodes. Importing this imports no torch: login nodes only pickle them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.records import Configuration


class Requeueable:
    """A job that submitit may start again as it is: what it has done is on disk."""

    def __call__(self) -> Any:
        """Do the job; every worker calls this."""
        raise NotImplementedError

    def checkpoint(self) -> Any:
        """What submitit resubmits when it handles a signal itself: the same job."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


@dataclass(frozen=True)
class ProfileJob(Requeueable):
    """Measures configurations of one cluster size, one after another.

    Attributes:
        sweep: The frozen sweep.
        cluster: The frozen cluster.
        configurations: All of one N; what the output already holds is not measured again after a requeue.
        output: JSON Lines file that this task alone appends to.
    """

    sweep: SweepSpec
    cluster: ClusterSpec
    configurations: tuple[Configuration, ...]
    output: Path

    def __call__(self) -> int:
        """Measure and append; every worker of the job calls this. Returns how many configurations are on record."""
        from tula_hpc.profiler import run_profile

        return run_profile(self)


@dataclass(frozen=True)
class TrainJob(Requeueable):
    """Trains one configuration to the end, from the newest checkpoint if there is one.

    Attributes:
        sweep: The frozen sweep.
        cluster: The frozen cluster.
        configuration: Nodes, workers per node and local batch to train with.
        root: The run directory.
        label: Name of this training inside the run directory.
    """

    sweep: SweepSpec
    cluster: ClusterSpec
    configuration: Configuration
    root: Path
    label: str = "main"

    def __call__(self) -> str:
        """Train; every worker calls this. Returns `finished`, or `stopped` if a stop came and a requeue was refused."""
        from tula_hpc.stopping import StopRequest

        stop = StopRequest().install()  # before torch is imported, which takes seconds
        from tula_hpc.trainer import run_training

        return run_training(self, stop)
