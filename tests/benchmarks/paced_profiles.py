"""Profile a network whose computation the processor does not disturb, for `scaling_prediction`.

    python -m tests.benchmarks.paced_profiles DATA WORK

DATA is CIFAR-100 as an ImageFolder tree, WORK a folder for the run directories; runs that it already holds are used.
Needs root, Slurm and a machine that is otherwise idle. The network is that of `paced.py`; N is 1, 2, 4. Each round has
three searches: full (15 configurations), adaptive, and rows: a full search of two batches only, which measures strong
scaling itself, with six profiles.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

from tests.benchmarks.cluster_prediction import SEARCHES, SWEEP, profile
from tests.slurm.testcluster import MiniCluster

ROUNDS = 2
# the layers wait most of the time, so four nodes of a whole core fit two cores
CLUSTER = MiniCluster(rate_mbit=250, cpu_percent=100)


def main(data: Path, work: Path) -> None:
    """Profile by each search, in rounds."""
    work.mkdir(parents=True, exist_ok=True)
    sweep = SWEEP.format(
        name="paced", model="tests.benchmarks.paced:paced_perceptron", data=data, smallest=16, largest=256
    )
    searches = {**SEARCHES, "rows": [*SEARCHES["full"], "search.min_batch=128"]}
    with CLUSTER as cluster:
        environment = {**os.environ, **cluster.environment}
        for number, (name, keys) in itertools.product(range(ROUNDS), searches.items()):
            profile(sweep, keys, work / f"{name}-{number}", environment)


if __name__ == "__main__":
    main(*(Path(argument).absolute() for argument in sys.argv[1:]))
