"""Predicted against measured on the test cluster, for three CIFAR-100 workloads; and what finding out costs, as JSON.

    python -m tests.benchmarks.cluster_prediction DATA WORK tests/benchmarks/results/cluster_prediction.json [NAME ...]

DATA is CIFAR-100 as an ImageFolder tree, WORK a folder for the run directories; what is there already is used. Needs
root, Slurm and a machine that is otherwise idle. With the word `recorded` for DATA nothing is run: the models of today
are compared with what WORK holds. The workloads differ in computation to communication: little gradient
(shufflenet_v2_x0_5), more (mobilenet_v3_small), much (a VGG-like network with a big head). N is 1, 2, 4.

Each is profiled twice: by full search with one job for each configuration, and by the adaptive search in packed jobs.

- full: fitted to the full search's measurements and compared with them.
- corners: fitted to its four corners, compared elsewhere.
- adaptive_replayed: the adaptive search replayed over the full search's records, compared where it did not look.
- adaptive: fitted to what the adaptive search measured itself, compared with the full search's measurements where it
  did not look; `repeatability` is how much the two differ where both measured.
- cost_share: node-seconds of the adaptive search's jobs over those of the full search's, start-up and all.
- regret: of the configuration chosen from the adaptive search, by the full search's measurements, for three objectives.
- memory: predicted peak against the full search's, from both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from tests.slurm.testcluster import MiniCluster
from tula_hpc.analysis.adaptive import AdaptiveSearch
from tula_hpc.analysis.aggregate import is_usable, summarize
from tula_hpc.analysis.aim import Aim
from tula_hpc.analysis.candidates import fit_models
from tula_hpc.analysis.performance import FormName, fit_step_time
from tula_hpc.analysis.planning import make_plan
from tula_hpc.analysis.profiling_cost import profiling_cost
from tula_hpc.analysis.report_data import measured_epochs
from tula_hpc.config import ClusterSpec, SweepSpec, load_cluster, load_sweep
from tula_hpc.records import Configuration, Measurement, RunDirectory

ROOT = Path(__file__).resolve().parents[2]
CLUSTER_FILE = ROOT / "slurm_templates" / "testcluster.toml"
SWEEP = """
name = "{name}"
[workload]
model = "{model}"
dataset = "cifar100"
data_dir = "{data}"
samples = 10_000
epochs = 10
loader_workers = 0
[search]
cluster_sizes = [1, 2, 4]
min_batch = {smallest}
max_batch = {largest}
warmup_steps = 3
min_steps = 10
max_steps = 40
max_seconds = 6.0
"""


class Workload(NamedTuple):
    """A model and the global batches of its candidates."""

    model: str
    smallest: int
    largest: int


WORKLOADS = {
    "shufflenet": Workload("shufflenet_v2_x0_5", 8, 128),
    "mobilenet": Workload("mobilenet_v3_small", 8, 128),
    "vgg_like": Workload("tests.benchmarks.vgg_like:vgg_like", 16, 256),
}
SEARCHES = {"full": ["search.mode=full", "search.pack=never"], "adaptive": ["search.mode=adaptive"]}


class Searched(NamedTuple):
    """A finished profile stage."""

    sweep: SweepSpec
    cluster: ClusterSpec
    measured: list[Measurement]
    node_seconds: float
    jobs: int

    def times(self) -> dict[Configuration, float]:
        """Median measured step time of each configuration, seconds."""
        return {p.configuration: p.times.step_time_s for p in summarize(self.measured).profiles}


def profile(name: str, search: str, data: Path, work: Path, environment: dict[str, str]) -> Searched:
    """Run the profile stage."""
    run = work / f"{name}-{search}"
    file = work / f"{name}.toml"
    file.write_text(SWEEP.format(name=name, data=data, **WORKLOADS[name]._asdict()))
    command = [sys.executable, "-m", "tula_hpc.sweep", str(file), "--cluster", str(CLUSTER_FILE), "--run-dir", str(run)]
    options = [part for text in SEARCHES[search] for part in ("--set", text)]
    subprocess.run([*command, *options, "--until", "profile"], check=True, cwd=ROOT, env=environment)
    return read(name, search, work)


def read(name: str, search: str, work: Path) -> Searched:
    """What a profile stage left."""
    directory = RunDirectory(work / f"{name}-{search}")
    measured = directory.measurements().records
    cost = profiling_cost(measured, directory.job_notes())
    sweep, cluster = load_sweep(directory.sweep_file), load_cluster(directory.cluster_file)
    return Searched(sweep, cluster, measured, cost.node_seconds, cost.jobs)


def errors(rows: Sequence[Measurement], truth: dict[Configuration, float], form: FormName = "auto") -> dict[str, float]:
    """Error of the model of some measurements at all configurations of `truth`, seconds."""
    model = fit_step_time(summarize(rows).profiles, form)
    relative = {
        c: abs(float(model.predict(c.nodes, c.local_batch, c.workers_per_node)) / s - 1) for c, s in truth.items()
    }
    return {"median": median(relative.values()), "largest": max(relative.values()), "points": len(relative)}


def elsewhere(rows: Sequence[Measurement], truth: dict[Configuration, float]) -> dict[Configuration, float]:
    """The part of the truth that these measurements did not see."""
    seen = {row.configuration for row in rows}
    return {configuration: s for configuration, s in truth.items() if configuration not in seen}


def corners(searched: Searched) -> list[Measurement]:
    """Smallest and largest batch on the fewest and on the most nodes."""
    by_nodes: dict[int, list[Configuration]] = {}
    for configuration in sorted(searched.times()):
        by_nodes.setdefault(configuration.nodes, []).append(configuration)
    ends = (by_nodes[min(by_nodes)], by_nodes[max(by_nodes)])
    wanted = {configuration for row in ends for configuration in (row[0], row[-1])}
    return [row for row in searched.measured if row.configuration in wanted]


def replayed(searched: Searched) -> list[Measurement]:
    """What the adaptive search would have measured."""
    by_configuration = {row.configuration: row for row in searched.measured if is_usable(row)}
    search = AdaptiveSearch(list(by_configuration), Aim(searched.sweep.objective.kind))
    rows: list[Measurement] = []
    while proposed := search.propose(rows):
        rows.append(by_configuration[proposed[0]].model_copy(update={"finished_at": len(rows) + 1.0}))
    return rows


def regrets(full: Searched, adaptive: Searched) -> dict[str, dict[str, Any]]:
    """True objective of what is chosen from the adaptive search, over the least one, less 1."""
    epochs = measured_epochs(full.measured, full.measured[0].dataset_samples)
    memory = {p.configuration: p.memory.reserved_bytes for p in summarize(full.measured).profiles}
    true: dict[str, Callable[[Configuration], float]] = {
        "time": lambda c: epochs[c],
        "cost by node-hour": lambda c: epochs[c] * c.nodes,
        "cost by memory": lambda c: epochs[c] * c.nodes * memory[c],
    }
    found = {}
    for name, value in true.items():
        chosen = _chosen(adaptive, name)
        best = min(epochs, key=value)
        regret = value(chosen) / value(best) - 1.0
        found[name] = {"chosen": str(chosen), "best": str(best), "regret": regret}
    return found


def _chosen(searched: Searched, name: str) -> Configuration:
    kind = "time" if name == "time" else "cost"
    basis = "memory" if "memory" in name else "node-hour"
    objective = searched.sweep.objective.model_copy(update={"kind": kind})
    pricing = searched.cluster.pricing.model_copy(update={"basis": basis})
    sweep = searched.sweep.model_copy(update={"objective": objective})
    cluster = searched.cluster.model_copy(update={"pricing": pricing})
    return make_plan(sweep, cluster, searched.measured).chosen.configuration


def memory_error(fitted: Searched, truth: Searched) -> float:
    """Median relative error of the predicted peak, fitted to one search, against the other's."""
    model = fit_models(summarize(fitted.measured)).memory
    profiles = summarize(truth.measured).profiles
    relative = [
        abs(float(model.predict(p.configuration.local_batch, p.configuration.world_size)) / p.memory.reserved_bytes - 1)
        for p in profiles
    ]
    return float(np.median(relative))


def compare(full: Searched, adaptive: Searched) -> dict[str, Any]:
    """All numbers of one workload."""
    truth, own = full.times(), adaptive.times()
    both = [abs(own[c] / truth[c] - 1) for c in own if c in truth]
    played = replayed(full)
    return {
        "full": errors(full.measured, truth),
        "full, paper's form": errors(full.measured, truth, "paper"),
        "corners": errors(corners(full), elsewhere(corners(full), truth)),
        "corners, paper's form": errors(corners(full), elsewhere(corners(full), truth), "paper"),
        "adaptive_replayed": errors(played, elsewhere(played, truth)),
        "adaptive": errors(adaptive.measured, elsewhere(adaptive.measured, truth)),
        "adaptive, paper's form": errors(adaptive.measured, elsewhere(adaptive.measured, truth), "paper"),
        "repeatability": {"median": median(both), "largest": max(both)},
        "profiled": {"full": len(truth), "adaptive": [str(c) for c in sorted(own)]},
        "node_seconds": {"full": full.node_seconds, "adaptive": adaptive.node_seconds},
        "jobs": {"full": full.jobs, "adaptive": adaptive.jobs},
        "cost_share": adaptive.node_seconds / full.node_seconds,
        "regret": regrets(full, adaptive),
        "memory": {"full": memory_error(full, full), "adaptive": memory_error(adaptive, full)},
        "step_times_s": {str(c): seconds for c, seconds in sorted(truth.items())},
    }


def all_profiled(data: Path, work: Path, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Searched]]]:
    """Each workload with its searches, run one after another."""
    work.mkdir(parents=True, exist_ok=True)
    with MiniCluster() as cluster:
        environment = {**os.environ, **cluster.environment}
        for name in names:
            yield name, {search: profile(name, search, data, work, environment) for search in SEARCHES}


def all_recorded(work: Path, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Searched]]]:
    """The same from what is there."""
    for name in names:
        yield name, {search: read(name, search, work) for search in SEARCHES}


def main(data: str, work: Path, output: Path, names: Sequence[str]) -> None:
    """Profile, compare, write the JSON."""
    recorded = data == "recorded"
    searches = all_recorded(work, names) if recorded else all_profiled(Path(data).absolute(), work, names)
    found: dict[str, Any] = {}
    for name, searched in searches:
        found[name] = compare(searched["full"], searched["adaptive"])
        print(name, json.dumps({k: v for k, v in found[name].items() if k != "step_times_s"}, indent=1), flush=True)
    found["load_average"] = None if recorded else os.getloadavg()[0]
    output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    work_folder, output_file = (Path(argument).absolute() for argument in sys.argv[2:4])
    main(sys.argv[1], work_folder, output_file, sys.argv[4:] or list(WORKLOADS))
