"""Predicted and measured step times of three CIFAR-100 workloads on the test cluster, and profiling's cost, as JSON.

    python -m tests.benchmarks.cluster_prediction DATA WORK tests/benchmarks/results/cluster_prediction.json [NAME ...]

DATA is CIFAR-100 as an ImageFolder tree, WORK a folder for the run directories; runs that it already holds are used.
Needs root, Slurm and a machine that is otherwise idle. If DATA is the word `recorded`, nothing is run: the present
models are compared with the runs in WORK. The workloads have little gradient to communicate for their computation
(shufflenet_v2_x0_5), more (mobilenet_v3_small), or much (a VGG-like network with a big head). N is 1, 2, 4.

Each workload is profiled by full search with one job for each configuration, and by the adaptive search in packed jobs,
both in three rounds over all workloads. Neighbours on the host of a virtual machine disturb it for seconds to hours, so
the median over the rounds is taken as the truth.

- full: a model fitted to the true measurements and compared with them.
- corners: fitted to four corners of the true measurements, compared with the others.
- adaptive_replayed: fitted to the true measurements that the adaptive search would take, compared with the others. The
  computation of smaller batches, which it also times, is the median over its own rounds.
- full, single rounds: fitted to each round of the full search alone; shows the error that disturbances leave any model.
- adaptive: fitted to the adaptive search's own measurements of one round, disturbances included, compared with the
  true measurements of other configurations; one value for each round and their median.
- repeatability: how far single rounds are from the median.
- cost_share: node-seconds of the adaptive search's jobs over those of the full search's jobs, start-up included; median
  over its rounds.
- regret: of the configuration chosen for each of three objectives, by the true measurements. The choice comes from the
  adaptive search's own measurements for the knee, and from its replay for that objective.
- memory: predicted peak against the full search's, fitted to either search.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from tests.slurm.testcluster import MiniCluster
from tula_hpc.analysis.costs.usage import job_runs
from tula_hpc.analysis.models.fitted import fit_models
from tula_hpc.analysis.models.profiles import summarize
from tula_hpc.analysis.models.step_time import fit_step_time
from tula_hpc.analysis.plan import make_plan
from tula_hpc.analysis.run_contents import measured_epochs
from tula_hpc.analysis.search.adaptive import AdaptiveSearch
from tula_hpc.analysis.search.decision import DecisionModel
from tula_hpc.config import ClusterSpec, SweepSpec, load_cluster, load_frozen_sweep
from tula_hpc.config.search import FormName
from tula_hpc.records import Configuration, Measurement, RunDirectory, corners, is_usable

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
ROUNDS = 3
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


def profile(sweep: str, keys: Sequence[str], run: Path, environment: dict[str, str]) -> Searched:
    """Run the profile stage of a sweep's text, with some keys changed."""
    file = run.with_name(f"{run.name}.toml")
    file.write_text(sweep)
    command = [sys.executable, "-m", "tula_hpc.sweep", str(file), "--cluster", str(CLUSTER_FILE), "--run-dir", str(run)]
    options = [part for text in keys for part in ("--set", text)]
    subprocess.run([*command, *options, "--until", "profile"], check=True, cwd=ROOT, env=environment)
    return read(run)


def read(run: Path) -> Searched:
    """Read a finished profile stage."""
    directory = RunDirectory(run)
    measured = directory.measurements().records
    runs = job_runs(directory.job_notes(), measured)
    sweep, cluster = load_frozen_sweep(directory.sweep_file), load_cluster(directory.cluster_file)
    return Searched(sweep, cluster, measured, sum(run.node_seconds for run in runs), len(runs))


def pooled(rounds: Sequence[Searched]) -> Searched:
    """Join the measurements of all rounds; repeats count as their median."""
    return rounds[0]._replace(measured=[row for searched in rounds for row in searched.measured if is_usable(row)])


def repeatability(rounds: Sequence[Searched]) -> dict[str, float]:
    """Return how far the single measurements of a configuration are from their median."""
    true = pooled(rounds).times()
    off = [abs(s / true[c] - 1) for searched in rounds for c, s in searched.times().items()]
    return {"median": median(off), "largest": max(off)}


def errors(rows: Sequence[Measurement], truth: dict[Configuration, float], form: FormName = "auto") -> dict[str, float]:
    """Fit some measurements, and return relative errors at the configurations of `truth`, seconds."""
    model = fit_step_time(summarize(rows).profiles, form)
    relative = {
        c: abs(float(model.predict(c.nodes, c.local_batch, c.workers_per_node)) / s - 1) for c, s in truth.items()
    }
    return {"median": median(relative.values()), "largest": max(relative.values()), "points": len(relative)}


def elsewhere(rows: Sequence[Measurement], truth: dict[Configuration, float]) -> dict[Configuration, float]:
    """Return the part of the truth whose configurations are not in these measurements."""
    seen = {row.configuration for row in rows}
    return {configuration: s for configuration, s in truth.items() if configuration not in seen}


def at_corners(searched: Searched) -> list[Measurement]:
    """Return the measurements that a partial search would have taken."""
    wanted = corners(searched.times())
    return [row for row in searched.measured if row.configuration in wanted]


def replayed(searched: Searched) -> list[Measurement]:
    """Return the measurements, of all rounds, that the adaptive search would have taken."""
    decision = DecisionModel(searched.sweep.objective.kind, searched.sweep, searched.cluster)
    search = AdaptiveSearch(sorted(searched.times()), decision)
    rows: list[Measurement] = []
    while proposed := search.propose(rows):
        latest = {"finished_at": len(rows) + 1.0}
        rows += [row.model_copy(update=latest) for row in searched.measured if row.configuration == proposed[0]]
    return rows


def with_smaller_computes(full: Searched, adaptive_rounds: Sequence[Searched]) -> Searched:
    """Add to the full search's measurements the computation of smaller batches that the adaptive ones timed."""
    timed = {p.configuration: p.smaller_computes for p in summarize(pooled(adaptive_rounds).measured).profiles}
    rows = [
        row.model_copy(update={"smaller_computes": timed.get(row.configuration) or row.smaller_computes})
        for row in full.measured
    ]
    return full._replace(measured=rows)


def regrets(full: Searched, rounds: Sequence[Searched]) -> dict[str, dict[str, Any]]:
    """Return the true objective of an adaptive search's choice over the least true objective, minus 1.

    The objective is that of a whole training: measured steps, with evaluation, checkpoints and start as the plan of the
    full search predicts them.
    """
    whole = _trainings(full)
    memory = {p.configuration: p.memory.reserved_bytes for p in summarize(full.measured).profiles}
    true: dict[str, Callable[[Configuration], float]] = {
        "time": lambda c: whole[c],
        "cost by node-hour": lambda c: whole[c] * c.nodes,
        "cost by memory": lambda c: whole[c] * c.nodes * memory[c],
    }
    found = {}
    for name, value in true.items():
        best = min(whole, key=value)
        chosen = [_chosen(_for_objective(adaptive, name)) for adaptive in rounds]
        aimed = _for_objective(full, name)
        aimed = aimed._replace(measured=replayed(aimed))
        last = _chosen(aimed)
        regret = [value(c) / value(best) - 1.0 for c in chosen]
        found[name] = {
            "best": str(best),
            "searched for the knee": {"chosen": [str(c) for c in chosen], "regret": median(regret), "rounds": regret},
            "searched for it, replayed": {
                "chosen": str(last),
                "regret": value(last) / value(best) - 1.0,
                "profiled": len(aimed.times()),
            },
        }
    return found


def _trainings(full: Searched) -> dict[Configuration, float]:
    """Return the seconds of a whole training at each configuration, with measured steps."""
    epochs = measured_epochs(full.measured, full.measured[0].dataset_samples)
    plan = make_plan(full.sweep, full.cluster, full.measured)
    other_s = {c.configuration: c.wall_time_s - c.train_time_s for c in plan.candidates}
    return {c: other_s[c] + full.sweep.workload.epochs * seconds for c, seconds in epochs.items()}


def _for_objective(searched: Searched, name: str) -> Searched:
    kind = "time" if name == "time" else "cost"
    basis = "memory" if "memory" in name else "node-hour"
    objective = searched.sweep.objective.model_copy(update={"kind": kind})
    pricing = searched.cluster.pricing.model_copy(update={"basis": basis})
    sweep = searched.sweep.model_copy(update={"objective": objective})
    return searched._replace(sweep=sweep, cluster=searched.cluster.model_copy(update={"pricing": pricing}))


def _chosen(searched: Searched) -> Configuration:
    return make_plan(searched.sweep, searched.cluster, searched.measured).chosen.configuration


def memory_error(fitted: Searched, truth: Searched) -> float:
    """Return the median relative error of the peak memory fitted to one search against the other search's."""
    model = fit_models(summarize(fitted.measured)).memory
    profiles = summarize(truth.measured).profiles
    relative = [
        abs(float(model.predict(p.configuration.local_batch, p.configuration.world_size)) / p.memory.reserved_bytes - 1)
        for p in profiles
    ]
    return float(np.median(relative))


def compare(full_rounds: Sequence[Searched], adaptive_rounds: Sequence[Searched]) -> dict[str, Any]:
    """Return all numbers of one workload."""
    full = pooled(full_rounds)
    truth = full.times()
    played = replayed(with_smaller_computes(full, adaptive_rounds))
    named = (("full", full_rounds), ("adaptive", adaptive_rounds))
    whole = median(searched.node_seconds for searched in full_rounds)
    shares = [searched.node_seconds / whole for searched in adaptive_rounds]
    return {
        "full": errors(full.measured, truth),
        "full, single rounds": of_rounds(full_rounds, truth),
        "full, paper's form": errors(full.measured, truth, "paper"),
        "corners": errors(at_corners(full), elsewhere(at_corners(full), truth)),
        "corners, paper's form": errors(at_corners(full), elsewhere(at_corners(full), truth), "paper"),
        "adaptive_replayed": errors(played, elsewhere(played, truth)),
        "adaptive": of_rounds(adaptive_rounds, truth),
        "adaptive, paper's form": of_rounds(adaptive_rounds, truth, "paper"),
        "repeatability": repeatability([*full_rounds, *adaptive_rounds]),
        "profiled": {"full": len(truth), "adaptive": [[str(c) for c in sorted(a.times())] for a in adaptive_rounds]},
        "node_seconds": {name: [s.node_seconds for s in rounds] for name, rounds in named},
        "jobs": {name: [s.jobs for s in rounds] for name, rounds in named},
        "cost_share": {"median": median(shares), "rounds": shares},
        "regret": regrets(with_smaller_computes(full, adaptive_rounds), adaptive_rounds),
        "memory": {"full": memory_error(full, full), "adaptive": [memory_error(a, full) for a in adaptive_rounds]},
        "step_times_s": {str(c): [s.times().get(c) for s in full_rounds] for c in sorted(truth)},
    }


def of_rounds(rounds: Sequence[Searched], truth: dict[Configuration, float], form: FormName = "auto") -> dict[str, Any]:
    """Return errors of each round's own model where that round did not measure; everywhere for a full search."""
    found = [errors(a.measured, elsewhere(a.measured, truth) or truth, form)["median"] for a in rounds]
    return {"median": median(found), "rounds": found}


# by workload and search
Rounds = dict[tuple[str, str], list[Searched]]


def all_profiled(data: Path, work: Path, names: Sequence[str]) -> Rounds:
    """Profile each workload by each search, in rounds."""
    work.mkdir(parents=True, exist_ok=True)
    found: Rounds = {}
    with MiniCluster() as cluster:
        environment = {**os.environ, **cluster.environment}
        for number, name, search in itertools.product(range(ROUNDS), names, SEARCHES):
            sweep = SWEEP.format(name=name, data=data, **WORKLOADS[name]._asdict())
            run = work / f"{name}-{search}-{number}"
            found.setdefault((name, search), []).append(profile(sweep, SEARCHES[search], run, environment))
    return found


def all_recorded(work: Path, names: Sequence[str]) -> Rounds:
    """Read all searches that WORK holds."""
    return {
        (name, search): [read(run) for run in sorted(work.glob(f"{name}-{search}*"))]
        for name, search in itertools.product(names, SEARCHES)
    }


def main(data: str, work: Path, output: Path, names: Sequence[str]) -> None:
    """Profile, compare, write the JSON."""
    recorded = data == "recorded"
    rounds = all_recorded(work, names) if recorded else all_profiled(Path(data).absolute(), work, names)
    found: dict[str, Any] = {}
    for name in names:
        found[name] = compare(*(rounds[name, search] for search in SEARCHES))
        print(name, json.dumps({k: v for k, v in found[name].items() if k != "step_times_s"}, indent=1), flush=True)
    found["mean of medians"] = {
        row: fmean(found[name][row]["median"] for name in names)
        for row in ("full", "corners", "adaptive_replayed", "full, single rounds", "adaptive", "cost_share")
    }
    found["load_average"] = None if recorded else os.getloadavg()[0]
    output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    work_folder, output_file = (Path(argument).absolute() for argument in sys.argv[2:4])
    main(sys.argv[1], work_folder, output_file, sys.argv[4:] or list(WORKLOADS))
