"""Loading matplotlib anywhere: it takes a `matplotlibrc` of the working directory, whoever wrote it, for the user's.

Such a file could end the report with an error, never end itself, or have text set by TeX.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def loaded_elsewhere() -> Iterator[None]:
    """Import matplotlib inside this: meanwhile the working directory is a folder of the package's."""
    # a path would not lead back where the folder was deleted or renamed
    before = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))
    try:
        os.chdir(Path(__file__).parent)
        yield
    finally:
        os.fchdir(before)
        os.close(before)
