"""The command that plans again from a run directory's logs, under other objectives and prices. Submits nothing.

    tula plan RUN [--objective knee|time|cost|weighted] [--set section.key=value ...] [--json]
    [--write]

`make_plan` is the same as a function.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from tula_hpc.analysis.planning.planner import AGAIN, make_plan
from tula_hpc.config import (
    ClusterSpec,
    ObjectiveSpec,
    SweepSpec,
    load_cluster,
    load_frozen_sweep,
    split_overrides,
    told_by_set,
)
from tula_hpc.errors import InputError, TulaError
from tula_hpc.files import write_out
from tula_hpc.formatting import printable, printable_output, with_own_escapes
from tula_hpc.invocation import command_line
from tula_hpc.records import Measurement, Plan, RunDirectory, read_metrics, write_atomically

__all__ = ["main", "make_plan"]

ANEW = "the run's own sweep may not want it: one with these values and a new --run-dir does"


@printable_output()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 done, 1 no plan could be made, 2 bad input."""
    options = _parser().parse_args(arguments)
    try:
        write_out(f"{_answer(options)}\n", with_own_escapes(sys.stdout))
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
        prog="tula plan",
        description="Plan again from a run directory's measurements. Submits nothing.",
    )
    parser.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        help="run directory with sweep.toml, cluster.toml and profile/",
    )
    kinds = get_args(ObjectiveSpec.model_fields["kind"].annotation)
    parser.add_argument("--objective", choices=kinds, help="instead of the sweep's own")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="a key of the sweep or the cluster file that changes nothing that was measured, for example "
        "objective.deadline_hours=12, pricing.basis=spot or partitions.NAME.pricing.usd_per_node_hour=2",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON (schema 1)")
    parser.add_argument("--write", action="store_true", help="replace RUN/plan.json")
    return parser


def _answer(options: argparse.Namespace) -> str:
    """What the command prints."""
    if not options.run.is_dir():
        raise InputError("no such run directory", source=options.run)
    run = RunDirectory(options.run)
    if warning := told_by_set(options.set):
        print(f"warning: {warning}", file=sys.stderr)
    mine, others = split_overrides(options.set)
    if options.objective:
        mine.append(f"objective.kind={options.objective}")
    sweep, cluster, how_to_profile = _inputs(run, mine, others)
    read = run.measurements()
    footprints, metrics = (
        run.footprints(cluster.part_names()),
        read_metrics(run.train().metrics_file),
    )
    events = run.events()
    try:
        plan = make_plan(
            sweep,
            cluster,
            read.records,
            read.skipped,
            footprints,
            metrics=metrics,
            events=events,
            how_to_profile=how_to_profile,
        )
    except InputError as error:
        # prices that need what is not known
        raise InputError(str(error), source=run.cluster_file) from None
    text = plan.model_dump_json(by_alias=True, indent=1) if options.json or options.write else ""
    if options.write:
        write_atomically(run.plan_file, text)
    return printable(text) if options.json else _as_text(plan, sweep, cluster, read.records, run)


def _inputs(
    run: RunDirectory, mine: Sequence[str], others: Sequence[str]
) -> tuple[SweepSpec, ClusterSpec, str]:
    """The run's own with overrides of either file, and what to do where these need other measurements.

    Raises: InputError: A mistake, nothing to plan, or an override for which the run's measurements
        do not hold.
    """
    from tula_hpc.config.changes import refuse_other_cluster, refuse_other_sweep

    sweep, cluster = load_frozen_sweep(run.sweep_file, mine), load_cluster(run.cluster_file, others)
    if sweep.study is not None:
        report = command_line("report", str(run.root))
        words = f"is a study, which has no plan; {report} writes its report, report/study.html"
        raise InputError(words, source=run.root)
    own_sweep = load_frozen_sweep(run.sweep_file) if mine else sweep
    own_cluster = load_cluster(run.cluster_file) if others else cluster
    refuse_other_sweep(run.sweep_file, own_sweep, sweep)
    refuse_other_cluster(run.cluster_file, own_cluster, cluster)
    return sweep, cluster, AGAIN if (sweep, cluster) == (own_sweep, own_cluster) else ANEW


def _as_text(
    plan: Plan,
    sweep: SweepSpec,
    cluster: ClusterSpec,
    measurements: Sequence[Measurement],
    run: RunDirectory,
) -> str:
    from tula_hpc.analysis.report.plan_text import describe_plan
    from tula_hpc.analysis.search import profiling_cost

    return describe_plan(
        plan, profiling_cost.describe(sweep, cluster, measurements, run.job_notes())
    )


if __name__ == "__main__":
    sys.exit(main())
