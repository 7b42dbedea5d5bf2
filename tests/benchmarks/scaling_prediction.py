"""The scaling tables from at most six profiles against those from a full search, as JSON.

    python -m tests.benchmarks.scaling_prediction --full RUN [RUN ...] --adaptive RUN [RUN ...] --output FILE

Each RUN is a run directory of the same sweep whose profile stage is done: `cluster_prediction` leaves such pairs in its
WORK. Several full runs are rounds of the same search, and their medians are taken as the truth. Nothing is run here.

Only the first six configurations of each adaptive run count. Both tables, of strong and of weak scaling, are for the
batches that the plan of the full measurements chooses. Rows are compared from the larger of the two baselines on, and
speed-up and efficiency are relative to it in both. For each quantity the relative difference, few over full - 1, is
given at each N:

- table: the two tables compared in all rows that both have; "measured" are rows that the full search measured,
  "beyond" rows that are extrapolated even from the full search.
- against_measured: the few profiles' table against the measured steps themselves, without a model of these.
- inside: share of the full table's values that lie in the intervals from the few profiles.
- repeatability: the same largest difference between the tables of the first two full runs; no prediction can be
  expected to be better.

"largest" is the number to compare with the limit of 3 %; "worst" names the N where it occurs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.cluster_prediction import Searched, pooled, read
from tula_hpc.analysis.models.profiles import summarize
from tula_hpc.analysis.node_scaling import NodeScaling, ScalingCurve, ScalingRow, part_scaling
from tula_hpc.analysis.plan import make_plan
from tula_hpc.analysis.planning.partitions import fit_parts
from tula_hpc.records import Candidate, Configuration, Interval, Measurement, is_usable

MOST_PROFILES = 6
LIMIT = 0.03
# quantities that are relative to a baseline
COMPARED = ("speed_up", "efficiency")
QUANTITIES = ("step_s", "epoch_s", *COMPARED, "node_hours")

Rows = Mapping[int, ScalingRow]


def first_profiles(measured: Sequence[Measurement], most: int = MOST_PROFILES) -> list[Measurement]:
    """Return the measurements of the configurations that were measured first."""
    order: list[Configuration] = []
    for row in sorted(filter(is_usable, measured), key=lambda row: row.finished_at):
        if row.configuration not in order:
            order.append(row.configuration)
    return [row for row in measured if row.configuration in order[:most]]


def scaling(full: Searched, rows: Sequence[Measurement], chosen: Candidate) -> NodeScaling:
    """Return the scaling table of some measurements, under the full search's sweep and cluster."""
    part = fit_parts(full.sweep, full.cluster, rows).parts[0]
    return part_scaling(part, full.sweep, chosen)


def compare(full: Searched, adaptive: Searched, chosen: Candidate) -> dict[str, Any]:
    """Return all numbers of one adaptive run."""
    rows = first_profiles(adaptive.measured)
    from_full, from_few = scaling(full, full.measured, chosen), scaling(full, rows, chosen)
    found: dict[str, Any] = {"profiled": [str(p.configuration) for p in summarize(rows).profiles]}
    for kind in ("strong", "weak"):
        true, few = getattr(from_full, kind), getattr(from_few, kind)
        why = true.why or few.why
        found[kind] = {"why": why} if why else compare_curves(true, few)
    return found


def compare_curves(true: ScalingCurve, few: ScalingCurve) -> dict[str, Any]:
    """Return all numbers of one kind of scaling."""
    base = max(true.base.nodes, few.base.nodes)
    known, guessed = ({row.nodes: row for row in curve.rows if row.nodes >= base} for curve in (true, few))
    both = sorted(known.keys() & guessed.keys())
    off = {name: {n: _off(known, guessed, n, name, base) for n in both} for name in QUANTITIES}
    measured = [n for n in both if known[n].basis == "measured"]
    beyond = [n for n in both if known[n].basis == "extrapolated"]
    return {
        "batch": true.batch,
        "base": base,
        "basis": {"few": {n: guessed[n].basis for n in both}, "full": {n: known[n].basis for n in both}},
        "table": {
            "measured": _summary(off, measured),
            "beyond": _summary(off, beyond),
            "all": _summary(off, both),
            "by N": off,
        },
        "against_measured": _summary(_against_measured(known, guessed, measured, base), measured),
        "inside": {name: _inside(known, guessed, both, name, base) for name in QUANTITIES},
    }


def _value(rows: Rows, nodes: int, name: str, base: int) -> Interval:
    """Return the value of a row; speed-up and efficiency relative to `base`."""
    interval: Interval = getattr(rows[nodes], name)
    if name in COMPARED:
        reference: Interval = getattr(rows[base], name)
        return interval.times(1.0 / reference.value)
    return interval


def _off(known: Rows, guessed: Rows, nodes: int, name: str, base: int) -> float:
    return _value(guessed, nodes, name, base).value / _value(known, nodes, name, base).value - 1.0


def _against_measured(known: Rows, guessed: Rows, measured: Sequence[int], base: int) -> dict[str, dict[int, float]]:
    """Return the relative difference of step time and efficiency from the measured steps, without a model of these."""
    steps = {n: guessed[n].step_s.value / s - 1.0 for n in measured if (s := known[n].measured_step_s)}
    if base not in steps:
        return {"step_s": steps}
    return {"step_s": steps, "efficiency": {n: (1.0 + steps[base]) / (1.0 + off) - 1.0 for n, off in steps.items()}}


def _summary(off: Mapping[str, Mapping[int, float]], sizes: Sequence[int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, by_nodes in off.items():
        here = {n: abs(by_nodes[n]) for n in sizes if n in by_nodes}
        if here:
            worst = max(here, key=lambda n: here[n])
            found[name] = {"median": median(here.values()), "largest": here[worst], "worst": f"N={worst}"}
    return found


def _inside(known: Rows, guessed: Rows, sizes: Sequence[int], name: str, base: int) -> float | None:
    """Return the share of the full table's values in the intervals of the few; both relative to the same N."""
    # a baseline's speed-up and efficiency are 1 by definition
    asked = [n for n in sizes if name not in COMPARED or n != base]
    held = []
    for n in asked:
        value, interval = _value(known, n, name, base).value, _value(guessed, n, name, base)
        held.append(interval.low <= value <= interval.high)
    return sum(held) / len(held) if held else None


def largest(found: Mapping[str, Any]) -> float:
    """Return the largest difference of any quantity in rows that the full search measured, of both kinds."""
    kinds = [found[kind]["table"]["measured"] for kind in ("strong", "weak") if "table" in found[kind]]
    return max((row["largest"] for kind in kinds for row in kind.values()), default=float("nan"))


def compare_all(full_runs: Sequence[Path], adaptive_runs: Sequence[Path]) -> dict[str, Any]:
    """Compare every adaptive run with all full runs together."""
    full = pooled([read(run) for run in full_runs])
    chosen = make_plan(full.sweep, full.cluster, full.measured).chosen
    runs = {run.name: compare(full, read(run), chosen) for run in adaptive_runs}
    worst = {name: largest(found) for name, found in runs.items()}
    repeated = None
    if len(full_runs) > 1:
        first, second = (scaling(full, read(run).measured, chosen) for run in full_runs[:2])
        kinds = {kind: compare_curves(getattr(first, kind), getattr(second, kind)) for kind in ("strong", "weak")}
        repeated = largest(kinds)
    return {
        "chosen": str(chosen.configuration),
        "profiled": len(full.times()),
        "limit": LIMIT,
        "largest": worst,
        "median of largest": median(worst.values()),
        "repeatability": repeated,
        "within the limit": {name: value <= LIMIT for name, value in worst.items()},
        "runs": runs,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, print and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.scaling_prediction")
    parser.add_argument("--full", nargs="+", type=Path, required=True, metavar="RUN")
    parser.add_argument("--adaptive", nargs="+", type=Path, required=True, metavar="RUN")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(arguments)
    found = compare_all(options.full, options.adaptive)
    text = json.dumps(found, indent=1)
    print(text)
    options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
