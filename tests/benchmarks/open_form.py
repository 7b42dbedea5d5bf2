"""The adaptive search and its plan if the profiles may not show how the all-reduce grows with the nodes, as JSON.

    python -m tests.benchmarks.open_form tests/benchmarks/results/open_form.json

The clusters are made up: 1, 2, 4 and 8 nodes, exact step times, and all-reduces that follow a known law, for three
sizes of a node, both libraries, three lengths of the all-reduce and three objectives. A search is judged by the number
of its profiles, by the additional time or cost of its choice over the best, and by the number of unprofiled steps that
lie outside their 90 % interval.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from tests.planning_data import cluster, ok, sweep, times
from tula_hpc.analysis.plan import make_plan
from tula_hpc.analysis.search.propose import propose
from tula_hpc.config import ClusterSpec, SweepSpec, batches_timed_apart
from tula_hpc.records import Configuration, Measurement

SAMPLES = 10**6
# share of the computation that the all-reduce overlaps with
HIDDEN = 0.2
# time of an all-reduce by nodes and workers, in units of its length
LAWS: dict[str, Callable[[int, int], float]] = {
    "parameter_server": lambda nodes, workers: float(nodes),
    "ring": lambda nodes, workers: 4.0 * (1.0 - 1.0 / workers),
    "double_tree": lambda nodes, workers: 4.0,
}


class World(NamedTuple):
    """One made-up cluster."""

    law: str
    per_node: int
    backend: str
    length_s: float

    def compute_s(self, batch: int) -> float:
        """Return the seconds of forward, backward and optimizer for a batch."""
        return 0.01 + 0.001 * batch

    def sync_s(self, nodes: int) -> float:
        """Return the seconds of the all-reduce, within a node and between nodes."""
        within = 0.1 * self.length_s * (1.0 - 1.0 / self.per_node)
        return within + (self.length_s * LAWS[self.law](nodes, nodes * self.per_node) if nodes > 1 else 0.0)

    def step_s(self, configuration: Configuration) -> float:
        """Return the seconds of a whole step."""
        compute_s = self.compute_s(configuration.local_batch)
        if configuration.world_size == 1:
            return compute_s
        return (1 - HIDDEN) * compute_s + max(HIDDEN * compute_s, self.sync_s(configuration.nodes))


def measure(world: World, spec: SweepSpec, configuration: Configuration, order: int) -> Measurement:
    """Return a profile without noise."""
    nodes, per_node, batch = configuration
    parts = {"data_time_s": 0.0, "compute_time_s": world.compute_s(batch) - 0.001, "optimizer_time_s": 0.001}
    apart = batches_timed_apart(spec.search, nodes, per_node, batch)
    return ok(
        nodes,
        batch,
        workers_per_node=per_node,
        backend=world.backend if configuration.world_size > 1 else "none",
        finished_at=order + 1.0,
        dataset_samples=SAMPLES,
        times=times(1, batch, step_time_s=world.step_s(configuration), allreduce_time_s=world.sync_s(nodes), **parts),
        smaller_computes=tuple((each, world.compute_s(each) - 0.001) for each in apart),
    )


def search(world: World, spec: SweepSpec, place: ClusterSpec, objective: str) -> dict[str, Any]:
    """Run one search to its end, and judge its plan."""
    rows: list[Measurement] = []
    while proposed := propose(spec, place, rows):
        rows.append(measure(world, spec, proposed[0], len(rows)))
    plan = make_plan(spec, place, rows)
    paid = {
        c.configuration: world.step_s(c.configuration) / c.global_batch * (c.nodes if objective == "cost" else 1)
        for c in plan.candidates
    }
    unseen = [c for c in plan.candidates if not c.measured]
    inside = [
        low <= world.step_s(c.configuration) <= high for c in unseen for low, high in [c.interval_90["step_time_s"]]
    ]
    lost = paid[plan.chosen.configuration] / min(paid.values()) - 1.0
    return {"profiles": len(rows), "lost": None if objective == "knee" else lost, "inside": inside}


def main(path: Path) -> None:
    """Search on all clusters of each law, and write the file."""
    found = {}
    for law in LAWS:
        results = []
        for per_node, device, length_s, objective in product(
            (1, 4, 8), ("cpu", "cuda"), (0.01, 0.05, 0.2), ("time", "knee", "cost")
        ):
            sizes: dict[str, Any] = {"cluster_sizes": (1, 2, 4, 8), "min_batch": 64, "max_batch": 8192}
            spec = sweep(objective, {"epochs": 5}, mode="adaptive", **sizes)
            place = cluster(workers_per_node=per_node, device=device)
            world = World(law, per_node, "nccl" if device == "cuda" else "gloo", length_s)
            results.append(search(world, spec, place, objective))
        inside = [each for result in results for each in result["inside"]]
        found[law] = {
            "searches": len(results),
            "profiles_mean": statistics.fmean(result["profiles"] for result in results),
            "lost_worst": max(result["lost"] for result in results if result["lost"] is not None),
            "predictions": len(inside),
            "outside_their_interval": inside.count(False),
        }
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
