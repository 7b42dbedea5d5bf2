"""The adaptive search on public tables of other clusters: its choice, and the number of profiles, as JSON.

    python -m tests.benchmarks.search_replay tests/benchmarks/results/search_replay.json

Every search is replayed over one table of step times: T4 (16 nodes), K80 (1 to 8 nodes of one GPU) and RTX 2080 Ti (1
to 3 nodes of 8), for each workload and objective, and for three kinds of knowledge in addition to the step time: none,
the computation of the measured configuration, or also that of smaller batches on the fewest nodes, as the profiler
times it.

- confirmed: share of searches whose choice was itself measured.
- regret: time or cost per sample of the choice over the least of the table, minus 1; mean and worst. `of_model` is the
  same for the configuration of the least prediction, whether measured or not.
- profiles: mean and largest number.
- error_elsewhere, coverage: median relative error at points that the search did not measure, and share of these points
  inside their 90 % interval; means over the searches.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.benchmarks.trace_errors import MAX_PROFILES, score
from tests.benchmarks.traces import WORKLOADS, Trace, folder, read_trace, single_workers
from tula_hpc.analysis.models.profiles import summarize
from tula_hpc.analysis.models.regression import Array
from tula_hpc.analysis.models.step_time import fit_step_time
from tula_hpc.analysis.search.adaptive import AdaptiveSearch, Predictions
from tula_hpc.analysis.search.decision import DecisionModel
from tula_hpc.records import Configuration, Measurement, MemoryUse, StepTimes

OBJECTIVES = ("time", "cost", "knee")
KNOWN = ("step", "computation", "smaller batches")
# with fewer points there is nothing to search
LEAST_POINTS = 8
# file and GPUs per node by cluster
MORE = {"K80": ("gavel_k80.csv", 1), "2080Ti": ("sia_rtx2080ti.csv", 8)}
NO_MEMORY = dict.fromkeys(("baseline_bytes", "parameter_bytes", "gradient_bytes", "optimizer_bytes"), 0)


class Table(NamedTuple):
    """Step times of one workload on one cluster."""

    cluster: str
    workload: str
    trace: Trace

    @property
    def configurations(self) -> list[Configuration]:
        """Configuration of each row."""
        columns = zip(self.trace.nodes, self.trace.per_node, self.trace.local_batch, strict=True)
        return [Configuration(*map(int, row)) for row in columns]


def tables() -> Iterator[Table]:
    """Yield all tables.

    Raises:
        FileNotFoundError: The traces are not on this machine.
    """
    for workload in WORKLOADS:
        yield Table("T4", workload, single_workers(read_trace(workload)))
    for cluster, (file, per_node) in MORE.items():
        yield from _more(cluster, folder().with_name("traces_more") / file, per_node)


def _more(cluster: str, path: Path, per_node: int) -> Iterator[Table]:
    rows: defaultdict[str, list[tuple[float, ...]]] = defaultdict(list)
    with path.open() as file:
        for row in csv.DictReader(file):
            if int(row["gpus_per_node"]) == per_node:
                nodes, sync_s = float(row["nodes"]), float(row.get("sync_time_s") or "nan")
                seconds = (float(row["local_batch"]), float(row["step_time_s"]), sync_s)
                rows[row["workload"]].append((nodes, nodes * per_node, *seconds))
    for workload, found in rows.items():
        trace = _with_sync(Trace(*np.array(found, dtype=np.float64).T))
        if len(np.unique(trace.nodes)) > 1 and len(trace.nodes) >= LEAST_POINTS:
            yield Table(cluster, workload, trace)


def _with_sync(trace: Trace) -> Trace:
    """Fill in waits that were not measured: the time by which a step exceeds a single worker's step."""
    if not np.isnan(trace.sync_s).any():
        return trace
    alone = trace.workers == 1
    alone_s = dict(zip(trace.local_batch[alone], trace.step_s[alone], strict=True))
    computing_s = np.array([alone_s.get(batch, np.nan) for batch in trace.local_batch])
    sync_s = np.where(np.isnan(computing_s), 0.0, np.maximum(trace.step_s - computing_s, 0.0))
    return trace._replace(sync_s=sync_s)


def measurement(table: Table, row: int, order: int, known: str) -> Measurement:
    """Return one row as the profiler would have recorded it, as far as the table has the values."""
    step_s, compute_s = float(table.trace.step_s[row]), float(table.trace.compute_s[row])
    smaller = _smaller_computes(table.trace, row) if known == KNOWN[2] else []
    of_step = dict.fromkeys(("step_time_s", "step_time_low_s", "step_time_high_s"), step_s)
    unknown = dict.fromkeys(("data_time_s", "optimizer_time_s", "allreduce_time_s"), 0.0)
    nodes, per_node, batch = table.configurations[row]
    return Measurement(
        status="ok",
        nodes=nodes,
        workers_per_node=per_node,
        local_batch=batch,
        backend="nccl",
        finished_at=order + 1.0,
        times=StepTimes.model_validate(of_step | unknown | {"compute_time_s": compute_s if known != KNOWN[0] else 0.0}),
        smaller_computes=tuple(smaller),
        memory=MemoryUse.model_validate(NO_MEMORY | {"peak_bytes": 1, "reserved_bytes": 1}),
    )


def _smaller_computes(trace: Trace, row: int) -> list[tuple[int, float]]:
    if trace.nodes[row] > trace.nodes.min():
        return []
    smaller = (trace.nodes == trace.nodes[row]) & (trace.local_batch < trace.local_batch[row])
    pairs = zip(trace.local_batch[smaller], trace.compute_s[smaller], strict=True)
    return sorted((int(batch), float(seconds)) for batch, seconds in pairs)


def replay(table: Table, objective: str, known: str) -> dict[str, Any]:
    """Search one table to the end."""
    place = {configuration: row for row, configuration in enumerate(table.configurations)}
    search = AdaptiveSearch(list(place), DecisionModel(objective), MAX_PROFILES)
    rows: list[Measurement] = []
    while proposed := search.propose(rows):
        rows.append(measurement(table, place[proposed[0]], len(rows), known))
    seen = np.array([place[row.configuration] for row in rows])
    elsewhere = table.trace.only(np.setdiff1d(np.arange(len(place)), seen))
    measured = summarize(rows)
    model = fit_step_time(measured.profiles)
    predicted_s = model.predict(table.trace.nodes, table.trace.local_batch, table.trace.per_node)
    of_model = int(np.argmin(paid(table.trace, predicted_s, objective)))
    choice = Predictions(sorted(place), measured, model, search.decision, None).choices[-1].configuration
    chosen = place[choice]
    found = {
        "cluster": table.cluster,
        "workload": table.workload,
        "objective": objective,
        "known": known,
        "profiles": len(rows),
        "profiled": [str(row.configuration) for row in rows],
        "chosen": str(choice),
        "confirmed": chosen in seen.tolist(),
    }
    if objective != "knee":
        true = paid(table.trace, table.trace.step_s, objective)
        found["regret"] = float(true[chosen] / true.min() - 1.0)
        found["regret_of_model"] = float(true[of_model] / true.min() - 1.0)
    return found | {"elsewhere": score(model, elsewhere)}


def paid(trace: Trace, step_s: Array, objective: str) -> Array:
    """Return the time or cost per sample."""
    per_sample_s = step_s / (trace.workers * trace.local_batch)
    return per_sample_s * trace.nodes if objective == "cost" else per_sample_s


def summary(searches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summarize several searches."""

    def column(name: str) -> list[float]:
        return [search[name] for search in searches if name in search]

    found: dict[str, Any] = {
        "searches": len(searches),
        "confirmed": float(np.mean(column("confirmed"))),
        "profiles_mean": float(np.mean(column("profiles"))),
        "profiles_most": max(column("profiles")),
        "error_elsewhere": float(np.mean([search["elsewhere"]["median"] for search in searches])),
        "coverage": float(np.mean([search["elsewhere"]["coverage"] for search in searches])),
    }
    for name in ("regret", "regret_of_model"):
        if column(name):
            found |= {f"{name}_mean": float(np.mean(column(name))), f"{name}_worst": max(column(name))}
    return found


def replay_all() -> dict[str, Any]:
    """Replay all searches; summarize them by cluster and objective, and all those for time and cost together."""
    searches = [replay(table, objective, known) for table in tables() for objective in OBJECTIVES for known in KNOWN]
    groups: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for search in searches:
        groups[f"{search['cluster']}, {search['objective']}"].append(search)
        if search["objective"] != "knee":
            groups["time and cost"].append(search)
            groups[f"time and cost, {search['known']}"].append(search)
    return {"summaries": {name: summary(group) for name, group in groups.items()}, "searches": searches}


def show(summaries: dict[str, Any]) -> None:
    """Print the summaries as a table."""
    for name, numbers in summaries.items():
        regret = (
            f"regret {numbers['regret_mean']:6.1%}, worst {numbers['regret_worst']:6.1%}"
            if "regret_mean" in numbers
            else ""
        )
        print(
            f"{name:30} confirmed {numbers['confirmed']:4.0%}  profiles {numbers['profiles_mean']:.1f}  "
            f"elsewhere {numbers['error_elsewhere']:5.1%}, inside {numbers['coverage']:4.0%}  {regret}"
        )


def main() -> None:
    """Replay all, print the summaries, write the JSON."""
    found = replay_all()
    show(found["summaries"])
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
