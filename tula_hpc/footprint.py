"""The estimate of memory before any profile, for callers without torch: it is made in a process of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from tula_hpc.records import Footprint
from tula_hpc.search_path import start_of_python

TIMEOUT_S = 300.0  # importing torch on a busy login node takes the most of it


class Estimate(NamedTuple):
    """A footprint, or why there is none."""

    footprint: Footprint | None
    reason: str = ""

    @property
    def trusted_batch(self) -> int | None:
        """Largest local batch that the estimate lets fit, 0 where none does; None where it says nothing."""
        return None if self.footprint is None else self.footprint.largest_local_batch

    def describe(self) -> str:
        """Say which local batches it lets fit, or why it says nothing, in a sentence."""
        if self.footprint is None:
            return f"no estimate of memory ({self.reason}): the search begins with all batches"
        if self.trusted_batch == 0:
            return "by an estimate, no local batch fits into memory: the search begins with the smallest"
        return f"by an estimate, local batches up to {self.trusted_batch} fit into memory"


def estimate(sweep_file: Path, cluster_file: Path, timeout_s: float = TIMEOUT_S, *, partition: str = "") -> Estimate:
    """Run `tula footprint`. It never raises for what goes wrong there.

    Args:
        sweep_file: The sweep.
        cluster_file: Device and memory limit.
        timeout_s: Give up after so many seconds.
        partition: Which of the cluster's [[partitions]].
    """
    inputs = [str(sweep_file), "--cluster", str(cluster_file), "--partition", partition, "--json"]
    command = [*start_of_python(), "-m", "tula_hpc.workloads.footprint", *inputs]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return Estimate(None, f"the estimate took more than {timeout_s:.0f} s")
    except OSError as error:
        return Estimate(None, f"the estimate could not be started: {error.strerror or error}")
    if done.returncode != 0:
        return Estimate(None, _last_line(done.stderr) or f"the estimate ended with exit code {done.returncode}")
    try:
        return Estimate(Footprint.model_validate_json(_last_line(done.stdout)))
    except ValidationError as error:
        return Estimate(None, f"the estimate is damaged: {error.errors()[0]['msg']}")


def _last_line(text: str) -> str:
    """Whatever a user's own module prints comes before it."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
