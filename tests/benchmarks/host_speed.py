"""How slow a core is over time, for benchmarks on a virtual machine with neighbours.

A virtual core shares a physical one with a neighbour, which slows it for seconds at a time. `CoreSpeed` times a small
convolution on the core about 15 times a second, by the processor's time, so that it does not matter who waits for
whom. It takes a few percent of the core. Times of training steps are compared after division by those of the
convolution meanwhile.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
# memory that is kept and used again: on a virtual machine a new page may take as long as computing what goes there,
# five times longer while other processes start
VARIABLES = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**31)}
PAUSE_S = 0.06


class CoreSpeed:
    """Times a convolution on a core, in a process of its own, until the `with` block ends."""

    def __init__(self, core: int) -> None:
        self.core = core
        self.folder = TemporaryDirectory()
        self.file = Path(self.folder.name) / "times"

    def __enter__(self) -> CoreSpeed:
        command = [sys.executable, "-m", "tests.benchmarks.host_speed", str(self.core), str(self.file)]
        self.process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **VARIABLES})
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()

    def slowness(self, begin: float, end: float) -> float:
        """Return the mean seconds of the convolution between two Unix times."""
        # the last line may be half written
        lines = self.file.read_text().splitlines()[:-1]
        samples = np.array([line.split() for line in lines], dtype=float)
        inside = (begin <= samples[:, 0]) & (samples[:, 0] <= end)
        assert np.any(inside), f"no sample of core {self.core} between {begin} and {end}"
        return float(samples[inside, 1].mean())


def main(core: int, file: Path) -> None:
    """Write a line for each convolution, with the Unix time and its seconds, until killed."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    images = torch.randn(8, 16, 32, 32)
    weights = torch.randn(32, 16, 3, 3)
    with file.open("w", buffering=1) as lines:
        while True:
            before = time.thread_time()
            torch.nn.functional.conv2d(images, weights)
            lines.write(f"{time.time()} {time.thread_time() - before}\n")
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
