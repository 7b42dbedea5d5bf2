"""Compute on a run's records: fit models, propose measurements, choose a plan, write the report.

The package needs neither torch nor submitit. Importing it loads none of its modules, so that each
module costs only what it needs itself.

Raises:
    ImportError: The folder was imported under its bare name `analysis`, which would make a second
        copy of every class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if __name__ != "tula_hpc.analysis":
    raise ImportError(f"import this package as tula_hpc.analysis, not as {__name__}")

if TYPE_CHECKING:
    from pathlib import Path

    from tula_hpc.analysis.data_frames import Frames


def frames(run: str | Path) -> Frames:
    """Return a run's measurements, candidates, metrics, epochs and events as pandas DataFrames.

    Args:
        run: The run directory.

    Raises:
        InputError: pandas is not installed (`pip install tula_hpc[pandas]`).
        RunDirectoryError: There is no such directory, or it holds no run.
    """
    from tula_hpc.analysis.data_frames import read_frames

    return read_frames(run)
