"""For all tests: one thread for numerics (more would only wait for each other), and what may run beside what."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

HERE = Path(__file__).resolve().parent
JOBS = {HERE / name: name for name in ("local", "slurm")}  # folders whose tests start jobs: one test after another


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With --dist loadgroup, each of these folders is one worker's."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    for item in items:
        folder = next((JOBS[parent] for parent in item.path.parents if parent in JOBS), None)
        if folder is not None:
            item.add_marker(pytest.mark.xdist_group(folder))
