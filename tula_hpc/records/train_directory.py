"""Paths of one training."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

from tula_hpc.records.reading import read_document
from tula_hpc.records.result import TrainResult


class TrainDirectory(NamedTuple):
    """Files of one training."""

    root: Path

    @property
    def metrics_file(self) -> Path:
        """One line per logged step and per epoch."""
        return self.root / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.root / "checkpoints"

    @property
    def drift_file(self) -> Path:
        """There while measured step times lie beyond the plan's prediction: a `Drift`."""
        return self.root / "drift.json"

    @property
    def result_file(self) -> Path:
        """Written once, at the end of training."""
        return self.root / "result.json"

    def read_result(self) -> TrainResult | None:
        """Read result.json; None where training has not ended.

        Raises:
            RunDirectoryError: It is damaged.
        """
        with contextlib.suppress(FileNotFoundError):
            return read_document(TrainResult, self.result_file)
        return None
