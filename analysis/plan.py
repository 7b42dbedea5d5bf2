"""From measurements to a plan, and the command that plans again from a run directory's logs.

`python -m tula_hpc.analysis.plan RUN [--objective knee|time|cost] [--json] [--write]`

Whatever computes with NumPy is imported late: `--help` and a mistake in the arguments are answered at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tula_hpc.analysis import cautions
from tula_hpc.analysis.aggregate import Summary, summarize
from tula_hpc.analysis.search import candidates
from tula_hpc.config import ClusterSpec, ObjectiveSpec, SweepSpec, load_cluster, load_sweep
from tula_hpc.errors import InfeasibleError, InputError, NotEnoughDataError, TulaError
from tula_hpc.records import Candidate, Configuration, Measurement, Plan, RunDirectory, write_atomically


def make_plan(
    sweep: SweepSpec, cluster: ClusterSpec, measurements: Sequence[Measurement], skipped_lines: int = 0
) -> Plan:
    """Fit the models, predict every candidate, choose by the objective.

    With measurements of a single cluster size, only that size is planned: one size says nothing about another. The
    order of the measurements does not matter; `skipped_lines`, how many could not be read, goes into the warnings.

    Raises:
        NotEnoughDataError: Too few measurements; the message says what is missing.
        InfeasibleError: No candidate fits.
    """
    from tula_hpc.analysis.candidates import build_candidates, fit_models
    from tula_hpc.analysis.objective import choose

    summary = summarize(measurements)
    models = fit_models(summary)
    planned, unplanned = _plannable(sweep, cluster, summary)
    epochs, samples = sweep.workload.epochs, summary.dataset_samples
    built = build_candidates(
        planned, models, cluster, summary, epochs=epochs, updates_per_epoch=sweep.updates_per_epoch
    )
    feasible = _feasible(built)
    choice = choose(sweep.objective.kind, feasible, partial(models.train_time_s, epochs * samples))
    chosen, workers = choice.ranking[0], cluster.workers_per_node
    doubts = cautions.about_choice(chosen, feasible, summary)
    doubts += cautions.about_measurements(summary, sweep, workers)
    doubts += cautions.about_missing(summary, sweep, cluster, measurements, skipped_lines)
    return Plan(
        objective=sweep.objective.kind,
        chosen=chosen,
        reason=f"{chosen.configuration}: {choice.reason}",
        candidates=built,
        fallbacks=_fallbacks(choice.ranking),
        models=models.describe(),
        warnings=[*choice.warnings, *unplanned, *doubts],
        dataset_samples=samples,
        epochs=epochs,
        memory_limit_bytes=cluster.memory_limit_bytes,
    )


def _plannable(sweep: SweepSpec, cluster: ClusterSpec, summary: Summary) -> tuple[list[Configuration], list[str]]:
    """The candidates that the measurements can say something about, and a warning about the others."""
    wanted = candidates(sweep.search, cluster.workers_per_node)
    sizes = {profile.configuration.nodes for profile in summary.profiles}
    if len(sizes) > 1:
        return wanted, []
    kept = [configuration for configuration in wanted if configuration.nodes in sizes]
    if not kept:
        message = f"plan: only N={min(sizes)} was measured, which is not in search.cluster_sizes"
        raise NotEnoughDataError(f"{message}; run the sweep again to profile the cluster sizes that are")
    left = sorted({configuration.nodes for configuration in wanted} - sizes)
    names = ", ".join(f"N={nodes}" for nodes in left)
    return kept, [f"only N={min(sizes)} was measured: nothing can be said about {names}"] if left else []


def _fallbacks(ranking: Sequence[Candidate]) -> list[Candidate]:
    """Smaller local batches, should memory run out: the next smaller on as many nodes, then all others by rank."""
    chosen = ranking[0]
    smaller = [candidate for candidate in ranking if candidate.local_batch < chosen.local_batch]
    same = [candidate for candidate in smaller if candidate.nodes == chosen.nodes]
    other = [candidate for candidate in smaller if candidate.nodes != chosen.nodes]
    return [*sorted(same, key=lambda candidate: -candidate.local_batch), *other]


def _feasible(built: Sequence[Candidate]) -> list[Candidate]:
    feasible = [candidate for candidate in built if candidate.feasible]
    if feasible:
        return feasible
    smallest = min(built, key=lambda candidate: (candidate.local_batch, candidate.global_batch))
    advice = "lower search.min_batch, allow more nodes, or use a machine with more memory"
    why = f"{smallest.configuration}: {smallest.why}"
    raise InfeasibleError(f"plan: none of {len(built)} candidates is feasible; {why}; {advice}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 done, 1 no plan could be made, 2 bad input."""
    options = _parser().parse_args(arguments)
    try:
        plan = _replan(options.run, options.objective)
        if options.write:
            write_atomically(RunDirectory(options.run).plan_file, plan.model_dump_json(by_alias=True, indent=1))
        print(plan.model_dump_json(by_alias=True, indent=1) if options.json else _as_text(plan))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    except TulaError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error.filename or options.run}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tula_hpc.analysis.plan",
        description="Plan again from a run directory's measurements. Submits nothing.",
    )
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="run directory with sweep.toml, cluster.toml and profile/"
    )
    parser.add_argument("--objective", choices=["knee", "time", "cost"], help="instead of the sweep's own")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON (schema 1)")
    parser.add_argument("--write", action="store_true", help="replace RUN/plan.json")
    return parser


def _replan(root: Path, objective: str | None) -> Plan:
    run = RunDirectory(root)
    if not root.is_dir():
        raise InputError("no such run directory", source=root)
    sweep = load_sweep(run.sweep_file, check_paths=False)
    if objective:
        sweep = sweep.model_copy(update={"objective": ObjectiveSpec.model_validate({"kind": objective})})
    read = run.measurements()
    return make_plan(sweep, load_cluster(run.cluster_file), read.records, read.skipped)


def _as_text(plan: Plan) -> str:
    from tula_hpc.analysis.plan_text import describe_plan

    return describe_plan(plan)


if __name__ == "__main__":
    sys.exit(main())
