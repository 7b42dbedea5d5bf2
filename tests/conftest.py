"""For all tests: one thread for numerics. On few cores more threads only wait for each other."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
