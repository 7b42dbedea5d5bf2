"""Searches over a network whose computation the processor does not disturb, on the test cluster, as JSON.

    python -m tests.benchmarks.paced_profiles DATA WORK tests/benchmarks/results/paced_profiles.json

DATA is CIFAR-100 as an ImageFolder tree, WORK a folder for the run directories; runs that it already holds are used.
Needs root, Slurm and a machine that is otherwise idle. The network is that of `paced.py`; N is 1, 2, 4.

- scaling: as in `scaling_prediction`, two rounds. Adaptive searches, and "rows", full searches of two batches only that
  measure strong scaling itself with six profiles, are compared with full searches of 15 configurations.
- slow loader: items take 12 ms to load, by four processes of each worker. The step times that the adaptive search did
  not measure, as predicted from those that it did, are compared with those of a full search; `coverage` is the share in
  their 90 % intervals.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.cluster_prediction import SEARCHES, SWEEP, Searched, elsewhere, profile, read
from tests.benchmarks.scaling_prediction import compare_all
from tests.examples.sleepy import ITEM_CV, ITEM_S
from tests.slurm.testcluster import MiniCluster
from tula_hpc.analysis.models.profiles import summarize
from tula_hpc.analysis.models.step_time import fit_step_time

ROUNDS = 2
# the layers wait most of the time, so four nodes of a whole core fit two cores
CLUSTER = MiniCluster(rate_mbit=250, cpu_percent=100)
FULL, ADAPTIVE = SEARCHES["full"], SEARCHES["adaptive"]
ROWS = [*FULL, "search.min_batch=128"]
SLOW = [
    "workload.dataset=tests.examples.sleepy:images",
    "workload.image_size=8",
    "workload.loader_workers=4",
    f'cluster.environment.{ITEM_S}="0.012"',
    f'cluster.environment.{ITEM_CV}="0.3"',
]


def profile_all(data: Path, work: Path) -> None:
    """Profile by each search."""
    model = "tests.benchmarks.paced:paced_perceptron"
    sweep = SWEEP.format(name="paced", model=model, data=data, smallest=16, largest=256)
    searches = {
        f"{name}-{number}": keys
        for number, (name, keys) in itertools.product(
            range(ROUNDS), (("full", FULL), ("adaptive", ADAPTIVE), ("rows", ROWS))
        )
    }
    searches |= {"slow-full": [*FULL, *SLOW], "slow-adaptive": [*ADAPTIVE, *SLOW]}
    wanted = {name: keys for name, keys in searches.items() if not (work / name).exists()}
    if not wanted:
        return
    work.mkdir(parents=True, exist_ok=True)
    with CLUSTER as cluster:
        environment = {**os.environ, **cluster.environment}
        for name, keys in wanted.items():
            profile(sweep, keys, work / name, environment)


def compare_elsewhere(full: Searched, adaptive: Searched) -> dict[str, Any]:
    """Return errors and coverage at the configurations that only the full search measured."""
    truth = elsewhere(adaptive.measured, full.times())
    model = fit_step_time(summarize(adaptive.measured).profiles)
    off, held = {}, []
    for where, seconds in truth.items():
        place = (where.nodes, where.local_batch, where.workers_per_node)
        low, high = (float(end) for end in model.interval(*place))
        off[str(where)] = float(model.predict(*place)) / seconds - 1.0
        held.append(low <= seconds <= high)
    sizes = [abs(each) for each in off.values()]
    found = {"median": median(sizes), "largest": max(sizes), "coverage": sum(held) / len(held), "off": off}
    return {"profiled": [str(each) for each in adaptive.times()], **found}


def main(data: Path, work: Path, output: Path) -> None:
    """Profile, compare and write the JSON."""
    profile_all(data, work)
    rounds = {name: [work / f"{name}-{i}" for i in range(ROUNDS)] for name in ("full", "adaptive", "rows")}
    found = {
        "scaling": compare_all(rounds["full"], [*rounds["adaptive"], *rounds["rows"]]),
        "slow loader": compare_elsewhere(read(work / "slow-full"), read(work / "slow-adaptive")),
    }
    output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(*(Path(argument).absolute() for argument in sys.argv[1:]))
