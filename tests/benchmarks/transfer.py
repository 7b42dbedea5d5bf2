"""How well few points of a cluster predict the others, on public step times of several kinds of clusters, as JSON.

    python -m tests.benchmarks.transfer tests/benchmarks/results/transfer.json

Clusters, see `step_time_tables`: T4 (16 nodes of 1 to 4 GPUs), K80 (8 nodes of 1), RTX 2080 Ti (3 nodes of 8), Quadro
(one node of 4). Each split is listed as the points that the fit sees → the points that it is compared with:

- corners: one GPU per node, the smallest and largest batch on the fewest nodes above one and on the most nodes, and the
  computation of every batch on one GPU → the other points on several nodes, with one GPU per node.
- to 2 nodes, to 4 nodes: one GPU per node, at most 2 or 4 nodes, all batches → more nodes, up to 8.
- one node, two nodes: several GPUs per node, at most 1 or 2 nodes → more nodes.
- few on large nodes: one GPU, one whole node, and all nodes whole, each with the smallest and largest batch → all other
  placements.

Each number is a mean over a cluster's workloads: of the median relative error, of the share of points inside their 90 %
interval (coverage), of the median of log(predicted / measured) (signed), and of the median half width of the intervals
as a factor. The error of the paper's plain sum is given, too. Two more errors at the same points tell where the error
comes from: `floor` is that of a fit to all points of the split; `error, growth and overlap known` is that of a fit to
the few points that takes the ring share and the overlap from the fit to all.

The prior beliefs in `models.step_time_fit` were chosen on these tables; `left out` gives, for each cluster, the values
of the four important ones that would have been chosen without it, and its error with these values. `searches` has the
error, coverage and regret of adaptive searches on these clusters, see `search_replay`.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.benchmarks.search_replay import replay_all, show
from tests.benchmarks.step_time_tables import Table, read_tables
from tula_hpc.analysis.models import step_time_fit
from tula_hpc.analysis.models.regression import Array
from tula_hpc.analysis.models.step_time import StepTimeModel
from tula_hpc.config.search import FormName

FARTHEST = 8
# prior spread of a coefficient that counts as known
KNOWN_SPREAD = 1e-3
# values of beliefs to choose from: ring share, its spread, congestion's spread, departures' spread
CHOICES = list(itertools.product((0.6, 0.8, 1.0), (0.15, 0.3), (0.1,), (0.1, 0.15, 0.2)))


class Split(NamedTuple):
    """Rows that a fit sees, and rows that it is compared with."""

    cluster: str
    workload: str
    name: str
    seen: Table
    others: Table


class Score(NamedTuple):
    """Numbers of one split, see the module."""

    error: float
    coverage: float
    signed: float
    width: float


def splits() -> Iterator[Split]:
    """Yield all splits of all clusters."""
    for cluster, workload, table in read_tables():
        single = table.only(table.per_node == 1)
        sizes = np.unique(single.nodes)
        if len(sizes) > 2:
            several = single.only(single.nodes > 1)
            corners = _ends(several, several.nodes.min()) | _ends(several, several.nodes.max())
            seen = several.only(corners).joined(single.only(single.nodes == 1).computation())
            yield Split(cluster, workload, "corners", seen, several.only(~corners))
            for most in (2, 4):
                beyond = (single.nodes > most) & (single.nodes <= FARTHEST)
                if np.any(beyond):
                    seen = single.only(single.nodes <= most)
                    yield Split(cluster, workload, f"to {most} nodes", seen, single.only(beyond))
        if table.per_node.max() == 1:
            continue
        for most, name in ((1, "one node"), (2, "two nodes")):
            if table.nodes.max() > most:
                inside = table.nodes <= most
                yield Split(cluster, workload, name, table.only(inside), table.only(~inside))
        whole = table.per_node == table.per_node.max()
        few = _ends(table, 1.0, table.per_node == 1)
        few |= _ends(table, 1.0, whole) | _ends(table, table.nodes.max(), whole)
        yield Split(cluster, workload, "few on large nodes", table.only(few), table.only(~few))


def _ends(table: Table, nodes: float, among: Any = True) -> Any:
    """Mark the smallest and the largest batch on a number of nodes."""
    inside = (table.nodes == nodes) & among
    batches = table.local_batch[inside]
    return inside & np.isin(table.local_batch, [batches.min(), batches.max()])


def fitted(split: Split, rows: Table, form: FormName = "auto") -> StepTimeModel:
    """Fit some rows of a split, with the computation if the split times it."""
    compute = rows.compute_s if split.name in {"corners", "few on large nodes"} else None
    return StepTimeModel(form).fit(rows.nodes, rows.local_batch, rows.step_s, rows.per_node, compute)


def ratios(model: StepTimeModel, rows: Table) -> Array:
    """Return predicted over measured steps."""
    return model.predict(rows.nodes, rows.local_batch, rows.per_node) / rows.step_s


def error(ratio: Array) -> float:
    """Return the median relative error."""
    return float(np.median(np.abs(ratio - 1.0)))


def score(split: Split, form: FormName = "auto") -> Score:
    """Fit the rows seen, and predict the others."""
    others = split.others
    model = fitted(split, split.seen, form)
    ratio = ratios(model, others)
    low, high = model.interval(others.nodes, others.local_batch, others.per_node)
    return Score(
        error=error(ratio),
        coverage=float(np.mean((low <= others.step_s) & (others.step_s <= high))),
        signed=float(np.median(np.log(ratio))),
        width=float(np.sqrt(np.median(high / low))),
    )


def floor(split: Split) -> tuple[float, float]:
    """Return the errors of a fit to all rows, and of one to the rows seen that knows growth and overlap from it."""
    of_all = fitted(split, split.seen.joined(split.others))
    believed = step_time_fit.BELIEFS["nccl"]
    step_time_fit.BELIEFS["nccl"] = believed._replace(
        ring_share=of_all.parameters_["ring_share"],
        ring_spread=KNOWN_SPREAD,
        overlap_share=of_all.parameters_["overlap_share"],
        overlap_spread=KNOWN_SPREAD,
    )
    knowing = fitted(split, split.seen)
    step_time_fit.BELIEFS["nccl"] = believed
    return error(ratios(of_all, split.others)), error(ratios(knowing, split.others))


def summarize(scores: dict[tuple[str, str], list[Score]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the means by split and cluster."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for (name, cluster), rows in scores.items():
        means = dict(zip(Score._fields, np.mean(rows, axis=0).tolist(), strict=True))
        found.setdefault(name, {})[cluster] = means
    return found


def all_scores(form: FormName = "auto", only: frozenset[str] | None = None) -> dict[tuple[str, str], list[Score]]:
    """Score every split, by its name and cluster."""
    found: dict[tuple[str, str], list[Score]] = {}
    for split in splits():
        if only is None or split.name in only:
            found.setdefault((split.name, split.cluster), []).append(score(split, form))
    return found


def all_floors() -> dict[tuple[str, str], list[float]]:
    """Return the means of `floor` over the workloads, by the split's name and cluster."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for split in splits():
        found.setdefault((split.name, split.cluster), []).append(floor(split))
    return {key: np.mean(rows, axis=0).tolist() for key, rows in found.items()}


def left_out() -> dict[str, Any]:
    """Choose beliefs without each cluster, by the error when few nodes are measured; return the error on it."""
    transfer = frozenset({"corners", "to 2 nodes", "to 4 nodes", "two nodes"})
    believed, beliefs = step_time_fit.BELIEFS["nccl"], dict(step_time_fit.BELIEFS)
    before = step_time_fit.CONGESTION_SPREAD, step_time_fit.EFFECT_SPREAD
    errors = {}
    for ring, spread, congestion, effect in CHOICES:
        beliefs["nccl"] = believed._replace(ring_share=ring, ring_spread=spread)
        step_time_fit.BELIEFS["nccl"] = beliefs["nccl"]
        step_time_fit.CONGESTION_SPREAD, step_time_fit.EFFECT_SPREAD = congestion, effect
        by_cluster: dict[str, list[float]] = {}
        for (_, cluster), rows in all_scores(only=transfer).items():
            by_cluster.setdefault(cluster, []).append(float(np.mean([row.error for row in rows])))
        errors[ring, spread, congestion, effect] = {name: float(np.mean(e)) for name, e in by_cluster.items()}
    step_time_fit.BELIEFS["nccl"] = believed
    step_time_fit.CONGESTION_SPREAD, step_time_fit.EFFECT_SPREAD = before
    found = {}
    for cluster in next(iter(errors.values())):
        rest = {choice: np.mean([e for name, e in by.items() if name != cluster]) for choice, by in errors.items()}
        chosen = min(rest, key=lambda choice: rest[choice])
        best = min(errors, key=lambda choice: errors[choice][cluster])
        found[cluster] = {
            "chosen on the others": chosen,
            "error": errors[chosen][cluster],
            "best here": best,
            "error of the best": errors[best][cluster],
        }
    return found


def main(output: Path) -> None:
    """Score all splits and searches, print the tables, write the JSON."""
    model, paper = summarize(all_scores()), summarize(all_scores("paper"))
    floors = all_floors()
    print(f"{'split':20} {'cluster':8} error (paper)  coverage  signed  width  floor  growth and overlap known")
    for name, by_cluster in model.items():
        for cluster, row in by_cluster.items():
            row["error, paper's form"] = paper[name][cluster]["error"]
            row["floor"], known = floors[name, cluster]
            row["error, growth and overlap known"] = known
            print(
                f"{name:20} {cluster:8} {row['error']:5.1%} ({row['error, paper' + chr(39) + 's form']:5.1%})"
                f"  {row['coverage']:7.1%} {row['signed']:+7.3f}  x{row['width']:.2f}"
                f"  {row['floor']:5.1%}  {known:5.1%}"
            )
    searches = replay_all()["summaries"]
    show(searches)
    found = {"splits": model, "left out": left_out(), "searches": searches}
    print(json.dumps(found["left out"], indent=1))
    output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
