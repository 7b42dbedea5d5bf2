"""The time of a whole training by the plan and by Slurm's accounting, on the test cluster, as JSON.

    python -m tests.benchmarks.promise WORK tests/benchmarks/results/promise.json [SWEEPS]

WORK is a folder for the run directories; runs that it already holds are used, so that the benchmark can run in parts.
Needs root and Slurm. Each sweep is the quickstart or a small variant of it (workload, epochs, objective): profiled,
planned and trained by the command. SWEEPS is the number of sweeps, by default all. The machine need not be idle: a
prediction has to allow for neighbours that take processor time between a profile and the training, and no interval was
fitted to these runs.

- whole, and each part: expected seconds, their 90 % interval, actual seconds, and the verdict.
- inside: the share of sweeps whose whole time lies in its interval; `inside_before` is the same with an interval of the
  steps alone and without the end of a job, as in plans of former versions.
- off: how often each part lay outside its own interval.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tests.slurm.testcluster import MiniCluster
from tula_hpc.analysis.costs.spread import TimePart
from tula_hpc.analysis.costs.training_bill import PromiseVerdict, TrainingBill
from tula_hpc.analysis.report.bill_text import bill_of
from tula_hpc.analysis.run_contents import read_run
from tula_hpc.records import RunDirectory

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "sweeps" / "quickstart.toml"
CLUSTER_FILE = ROOT / "slurm_templates" / "testcluster.toml"
COMMAND_S = 540

# network and epochs; a step of the largest network takes ten times as long as one of the smallest
LENGTHS = (("compact", 4), ("medium", 4), ("compact", 10), ("plain", 6), ("compact", 25), ("depthwise", 8))
NARROW = {"search.min_batch": 64, "search.max_batch": 128}


class Variant(NamedTuple):
    """One sweep, given by the keys that it changes in the quickstart."""

    name: str
    keys: dict[str, Any]

    @property
    def options(self) -> list[str]:
        """Return the options of the command."""
        return [word for key, value in self.keys.items() for word in ("--set", f"{key}={value}")]


def variants() -> list[Variant]:
    """Return the sweeps: the quickstart itself, and combinations of workload, objective and epochs."""
    found = [Variant("quickstart-0", {}), Variant("quickstart-1", {})]
    kinds = ("knee", "time", "cost")
    for (model, epochs), kind in itertools.product(LENGTHS, kinds):
        own = {"workload.model": f"tula_hpc.workloads.small_cnns:{model}_cnn", "workload.epochs": epochs}
        keys = {**NARROW, **own, "objective.kind": kind, "search.max_seconds": 1.0}
        found.append(Variant(f"{model}-{kind}-{epochs}", keys))
    return found


def sweep(variant: Variant, run: Path, environment: dict[str, str]) -> None:
    """Run one sweep to the end of its training, unless that has been done."""
    if (run / "train" / "main" / "result.json").exists():
        return
    command = [sys.executable, "-m", "tula_hpc.sweep", str(QUICKSTART), "--cluster", str(CLUSTER_FILE)]
    command += ["--run-dir", str(run), "--until", "train", *variant.options]
    with run.with_name(f"{run.name}.log").open("w") as log:
        subprocess.run(
            command, check=True, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=COMMAND_S
        )


def described(variant: Variant, run: Path) -> dict[str, Any]:
    """Return the predicted and actual times of one sweep."""
    contents = read_run(RunDirectory(run))
    bill = bill_of(contents.plan, contents.events, contents.trainings[0])
    assert contents.plan is not None
    assert bill is not None
    chosen = contents.plan.chosen
    return {
        "name": variant.name,
        "nodes": chosen.nodes,
        "global_batch": chosen.global_batch,
        "whole": bill.whole._asdict() | {"verdict": bill.whole.verdict},
        "inside_before": _inside_before(bill),
        "cost": bill.cost._asdict(),
        "source": bill.source,
        "parts": {part: row._asdict() | {"verdict": row.verdict} for part, row in bill.parts.items()},
    }


def _inside_before(bill: TrainingBill) -> bool:
    """Return whether the whole time lies in the interval that follows from the step time's interval alone."""
    steps = bill.parts[TimePart.STEPS]
    ends = bill.parts.get(TimePart.ENDS)
    whole_s = bill.whole.expected - (ends.expected if ends else 0.0)
    assert steps.interval is not None
    assert bill.whole.actual is not None
    low, high = (whole_s + end - steps.expected for end in steps.interval)
    return low <= bill.whole.actual <= high


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the shares over all sweeps, and the sweeps."""
    off = Counter(
        str(part)
        for row in rows
        for part, found in row["parts"].items()
        if found["verdict"] in (PromiseVerdict.MORE, PromiseVerdict.LESS)
    )
    errors = [row["whole"]["expected"] / row["whole"]["actual"] - 1 for row in rows]
    return {
        "sweeps": len(rows),
        "inside": sum(row["whole"]["verdict"] == PromiseVerdict.WITHIN for row in rows) / len(rows),
        "inside_before": sum(row["inside_before"] for row in rows) / len(rows),
        "median_error": median(errors),
        "median_absolute_error": median(map(abs, errors)),
        "off": dict(off),
        "rows": rows,
    }


def main(work: Path, output: Path, count: int) -> None:
    """Run the sweeps, and write the results after each of them."""
    work.mkdir(parents=True, exist_ok=True)
    rows = []
    with MiniCluster() as cluster:
        environment = {**os.environ, **cluster.environment}
        for variant in variants()[:count]:
            sweep(variant, work / variant.name, environment)
            rows.append(described(variant, work / variant.name))
            print(json.dumps(rows[-1]), flush=True)
            output.write_text(json.dumps(summary(rows), indent=1) + "\n")


if __name__ == "__main__":
    most = int(sys.argv[3]) if len(sys.argv) > 3 else len(variants())
    main(Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute(), most)
