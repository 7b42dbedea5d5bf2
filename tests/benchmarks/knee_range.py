"""How far the choice at the knee follows the search's range, and whether its interval holds, as JSON.

    python -m tests.benchmarks.knee_range tests/benchmarks/results/knee_range.json

The 16 tables are those of `search_replay`: T4, K80 and RTX 2080 Ti. Each is planned with every power of two as
`search.max_batch`, from all of its rows, by the law of doublings ("knee") and by Kneedle ("kneedle").

- moved_from_twice, moved_from_four_times: among pairs of ranges whose shorter range reaches at least two or four times
  the batch chosen in it, the share in which the longer range chose another batch; `octaves` is the largest move.
- coverage: share of the tables in which the knee found from all rows lies inside the 90 % interval found from the rows
  that the adaptive search took; `interval_octaves` is the median width of that interval.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.search_replay import KNOWN, Table, measurement, tables
from tests.benchmarks.trace_errors import MAX_PROFILES
from tula_hpc.analysis.plan import make_plan
from tula_hpc.analysis.search.adaptive import AdaptiveSearch
from tula_hpc.analysis.search.decision import DecisionModel
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.records import Configuration, Measurement, Plan

KINDS = ("knee", "kneedle")
SAMPLES = 2**20


def planned(table: Table, rows: list[Measurement], kind: str, largest: int) -> Plan:
    """Plan one table up to a largest batch."""
    configurations = table.configurations
    search = {
        "cluster_sizes": sorted({c.nodes for c in configurations}),
        "min_batch": min(c.global_batch for c in configurations),
        "max_batch": largest,
        "mode": "partial",
    }
    spec = {"name": "knee", "search": search, "objective": {"kind": kind}, "workload": {"epochs": 10}}
    per_node = configurations[0].workers_per_node
    cluster = ClusterSpec.model_validate({"workers_per_node": per_node, "max_nodes": 64})
    return make_plan(SweepSpec.model_validate(spec), cluster, rows)


def ranges(table: Table, rows: list[Measurement], kind: str) -> list[tuple[int, int]]:
    """Return the largest batch and the chosen batch of each range, ascending."""
    batches = [c.global_batch for c in table.configurations]
    least, most = max(2 * min(batches), 64), max(batches)
    ends = [2**k for k in range(math.ceil(math.log2(least)), math.floor(math.log2(most)) + 1)]
    return [(end, planned(table, rows, kind, end).chosen.global_batch) for end in ends]


def moves(found: list[tuple[int, int]], times: int) -> list[float]:
    """Return by how many octaves a longer range moves the choice, if the shorter reaches `times` its own choice."""
    pairs = [(short, long) for short, long in itertools.combinations(found, 2) if short[0] >= times * short[1]]
    return [abs(math.log2(long[1] / short[1])) for short, long in pairs]


def searched(table: Table, rows: dict[Configuration, Measurement], kind: str) -> list[Measurement]:
    """Return the rows of a table that the adaptive search takes."""
    search = AdaptiveSearch(list(rows), DecisionModel(kind), MAX_PROFILES)
    taken: list[Measurement] = []
    while proposed := search.propose(taken):
        taken.append(rows[proposed[0]].model_copy(update={"finished_at": len(taken) + 1.0}))
    return taken


def of_kind(kind: str) -> dict[str, Any]:
    """Return the numbers of one law over all tables."""
    found: dict[str, list[tuple[int, int]]] = {}
    inside, widths = [], []
    for table in tables():
        rows = {
            configuration: measurement(table, row, row, KNOWN[2]).model_copy(update={"dataset_samples": SAMPLES})
            for row, configuration in enumerate(table.configurations)
        }
        every = list(rows.values())
        name = f"{table.cluster}, {table.workload}"
        found[name] = ranges(table, every, kind)
        most = max(c.global_batch for c in rows)
        true = planned(table, every, kind, most).knee
        few = planned(table, searched(table, rows, kind), kind, most).knee
        if true and few and true.global_batch and few.interval_90:
            low, high = few.interval_90
            inside.append(low <= true.global_batch <= high)
            widths.append(math.log2(high / low))
    summary: dict[str, Any] = {"tables": len(found)}
    for name, times in (("twice", 2), ("four_times", 4)):
        octaves = [move for each in found.values() for move in moves(each, times)]
        summary[f"pairs_from_{name}"] = len(octaves)
        summary[f"moved_from_{name}"] = sum(move > 0 for move in octaves) / max(1, len(octaves))
        summary[f"octaves_from_{name}"] = max(octaves, default=0.0)
    summary |= {"coverage": sum(inside) / len(inside), "interval_octaves": median(widths)}
    return summary | {"choices": found}


if __name__ == "__main__":
    result = {kind: of_kind(kind) for kind in KINDS}
    for law, numbers in result.items():
        print(law, {name: value for name, value in numbers.items() if name != "choices"})
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")
