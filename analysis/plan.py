"""Plan from measurements: `make_plan`, and the command that calls it. Neither submits anything.

    tula plan RUN [--objective KIND] [--set SECTION.KEY=VALUE ...] [--what-if]
    [--json] [--write]

Modules that compute with NumPy are imported late, so that `--help` and messages about wrong
arguments appear at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from tula_hpc.analysis.report.output import PLAN_WIDTH, table_lines
from tula_hpc.command_errors import CommandParser, exit_code_of
from tula_hpc.config import (
    PUT_BACK,
    ClusterSpec,
    ObjectiveSpec,
    SweepSpec,
    exposure_warning,
    load_frozen_cluster,
    load_frozen_sweep,
    split_overrides,
    sweep_for,
)
from tula_hpc.errors import InputError, NotEnoughDataError, RunDirectoryError
from tula_hpc.files import MEASUREMENTS_GONE, write_out
from tula_hpc.formatting import command_line, printable, printable_output, with_own_escapes
from tula_hpc.records import (
    Configuration,
    Event,
    Measurement,
    Metrics,
    Plan,
    RunDirectory,
    read_metrics,
    refuse_several,
    write_plan,
)
from tula_hpc.records.measurement import damaged_footprints
from tula_hpc.records.run_directory import holder_of

if TYPE_CHECKING:
    from tula_hpc.analysis.planning.candidates import Partition
    from tula_hpc.analysis.planning.partitions import FittedPartitions
    from tula_hpc.analysis.what_if import WhatIf

NEW_RUN = (
    "start a sweep with these values and a new --run-dir, as the run's own sweep may not profile it"
)


def make_plan(
    sweep: SweepSpec,
    cluster: ClusterSpec,
    measurements: Sequence[Measurement],
    skipped_lines: int = 0,
    *,
    metrics: Metrics | None = None,
    events: Sequence[Event] = (),
) -> Plan:
    """Fit the models, predict every candidate, choose by the objective.

    With measurements of a single cluster size, only that size is planned, because one size says
    nothing about another. `skipped_lines` that could not be read become a warning. `metrics` and
    `events` of a training give the critical batch and the cost of evaluation and checkpoints.

    Raises:
        NotEnoughDataError: There are too few measurements; the message says which are missing.
        InfeasibleError: No candidate fits, or none meets the constraints.
        InputError: A price needs a quantity that is unknown.
    """
    from tula_hpc.analysis.planning.partitions import Trained, fit_parts

    fitted = fit_parts(sweep, cluster, measurements, Trained(metrics, events))
    return _plan_of(fitted, sweep, cluster, measurements, skipped_lines=skipped_lines)


def _plan_of(
    fitted: FittedPartitions,
    sweep: SweepSpec,
    cluster: ClusterSpec,
    measurements: Sequence[Measurement],
    *,
    skipped_lines: int,
    how_to_profile: str | None = None,
) -> Plan:
    """Make a plan as `make_plan` does, of partitions that are fitted."""
    from tula_hpc.analysis.planning.planner import AGAIN, plan_candidates
    from tula_hpc.analysis.search.confirmation import with_confirmation
    from tula_hpc.analysis.search.propose import propose
    from tula_hpc.analysis.search.steadiness import with_steadiness

    awaited: list[Configuration] = []

    def pending(part: Partition, rows: Sequence[Measurement]) -> Sequence[Configuration]:
        own = sweep_for(sweep, part.cluster)
        model = part.models.step_time
        # as the search itself asks: part.cluster states a start that was measured
        found = propose(own, cluster.part(part.name), rows, model=model) if own else []
        awaited.extend(found)
        return found

    plan = plan_candidates(
        sweep,
        fitted,
        measurements,
        pending=pending,
        how_to_profile=how_to_profile or AGAIN,
        skipped_lines=skipped_lines,
    )
    plan = with_confirmation(plan, sweep, measurements, awaited)
    return with_steadiness(plan, sweep, cluster, fitted, measurements)


@printable_output()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 done, 1 no plan could be made, 2 bad input."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.json and options.what_if:
        parser.error("--what-if: prints a table; leave out --json")
    if options.objective:
        options.set = [*options.set, f"objective.kind={options.objective}"]
    return exit_code_of(_run, options, again=False)


def _run(options: argparse.Namespace) -> int:
    write_out(f"{_answer(options)}\n", with_own_escapes(sys.stdout))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
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
        help="another value of a key on which no measurement depends, for example "
        "objective.deadline_hours=12, cluster.pricing.basis=spot or "
        "cluster.partitions.NAME.pricing.usd_per_node_hour=2; repeatable",
    )
    parser.add_argument(
        "--what-if",
        action="store_true",
        help="also a table of what would be chosen on other nodes, at other prices, by a deadline, "
        "for half the cost or by another objective",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON (schema 1)")
    parser.add_argument("--write", action="store_true", help="replace RUN/plan.json")
    return parser


def _answer(options: argparse.Namespace) -> str:
    run = RunDirectory(options.run)
    run.require()
    if warning := exposure_warning(options.set):
        print(f"warning: {warning}", file=sys.stderr)
    # a sweep must not start training while its plan is being replaced
    try:
        with run.locked() if options.write else contextlib.nullcontext():
            return _plan_again(options, run)
    except NotEnoughDataError as error:
        if not holder_of(run.root / ".lock").alive:
            raise
        progress = command_line("status", str(run.root))
        too_early = f"too little is measured yet, and the sweep is still at work: {progress}"
        raise NotEnoughDataError(too_early) from error


def _plan_again(options: argparse.Namespace, run: RunDirectory) -> str:
    from tula_hpc.analysis.planning.partitions import Trained, fit_parts
    from tula_hpc.analysis.what_if import answers

    sweep, cluster, how_to_profile = _inputs(run, *split_overrides(options.set))
    trains_otherwise = _trains_otherwise(run, options, sweep, cluster)
    if options.write:
        _refuse_trained(run)
        if trains_otherwise:
            message = f"--write can change only [objective]; to train with these values: {trains_otherwise}"
            raise InputError(message, source=run.plan_file)
    read = run.measurements()
    events = run.read_events()
    damage = [*damaged_footprints(run.root), *read.damage, *events.damage]
    if not options.write:
        damage += _damaged_plan(run)
    for words in damage:
        print(f"warning: {words}", file=sys.stderr)
    refuse_several(run, read.records)
    trained = Trained(read_metrics(run.train().metrics_file), events.records)
    refuse_lost_measurements(run, read.records)
    try:
        fitted = fit_parts(sweep, cluster, read.records, trained)
        plan = _plan_of(
            fitted,
            sweep,
            cluster,
            read.records,
            skipped_lines=read.skipped,
            how_to_profile=how_to_profile,
        )
    except InputError as error:
        # a price needs a quantity that is unknown
        raise InputError(str(error), source=run.cluster_file) from None
    if options.write:
        differs = _other_objective(load_frozen_sweep(run.sweep_file).objective, sweep.objective)
        plan = plan.model_copy(update={"other_objective": differs})
        write_plan(run.plan_file, plan)
    if options.json:
        return printable(plan.model_dump_json(by_alias=True, indent=1))
    text = f"{_as_text(plan, cluster, read.records, run)}\n{_how_to_train(options, run, trains_otherwise)}"
    if not options.what_if:
        return text
    return f"{text}\n\n{_what_if(answers(sweep, fitted, plan))}"


def _trains_otherwise(
    run: RunDirectory, options: argparse.Namespace, sweep: SweepSpec, cluster: ClusterSpec
) -> str:
    """Return the command that trains with the changed values; "" if a plan can hold all changes."""
    own = load_frozen_sweep(run.sweep_file)
    others = sweep.model_copy(update={"objective": own.objective})
    if (others, cluster) == (own, load_frozen_cluster(run.cluster_file)):
        return ""
    values = (word for value in options.set for word in ("--set", value))
    return command_line(*_sweep_again(run), *values)


def _sweep_again(run: RunDirectory) -> tuple[str, ...]:
    inputs = (str(run.sweep_file), "--cluster", str(run.cluster_file))
    return "sweep", *inputs, "--run-dir", str(run.root)


def _how_to_train(options: argparse.Namespace, run: RunDirectory, trains_otherwise: str) -> str:
    """Say whether a training would follow the plan shown, and how to start it."""
    if run.has_trained():
        return "The training of this run keeps the plan that it began with."
    train = command_line(*_sweep_again(run))
    introduction = "To train with this plan, without measuring again:"
    if trains_otherwise:
        train = trains_otherwise
        introduction = "To train with these values:"
    elif options.set and not options.write:
        introduction = "With --write the run follows this plan; to train then:"
    return f"{introduction}\n  {train}"


def _damaged_plan(run: RunDirectory) -> list[str]:
    """Describe the damage of the run's own plan, with which other commands refuse to continue."""
    try:
        if run.plan_file.exists():
            run.read_plan()
    except RunDirectoryError as error:
        return [str(error)]
    return []


def _what_if(rows: Sequence[WhatIf]) -> str:
    from tula_hpc.analysis.report.tables import not_possible, nothing_changes, what_if_table

    if not rows:
        return "No what-if: the models, fitted again, choose otherwise than the plan."
    if sentence := nothing_changes(rows):
        return textwrap.fill(sentence, PLAN_WIDTH)
    lines = [table_lines(what_if_table(rows))]
    remarks = not_possible(rows)
    lines += [textwrap.fill(text, PLAN_WIDTH) for text in remarks]
    return "\n".join(lines)


def _refuse_trained(run: RunDirectory) -> None:
    if run.has_trained():
        message = (
            "the training of this run follows this plan, which is therefore kept; leave out --write "
            "to see the other plan; to train by that, first move away "
            f"{run.root / 'train'}, which holds the training"
        )
        raise InputError(message, source=run.plan_file)


def _other_objective(own: ObjectiveSpec, wanted: ObjectiveSpec) -> list[str]:
    values = {key: getattr(wanted, key) for key in ObjectiveSpec.model_fields}
    differing = {key: value for key, value in values.items() if value != getattr(own, key)}
    return [f"objective.{key} = {json.dumps(value)}" for key, value in differing.items()]


def _inputs(
    run: RunDirectory, sweep_overrides: Sequence[str], cluster_overrides: Sequence[str]
) -> tuple[SweepSpec, ClusterSpec, str | None]:
    """Return the run's inputs with overrides, and how to profile more if overrides change them."""
    from tula_hpc.config.changes import refuse_other_cluster, refuse_other_sweep

    if words := lost_inputs(run):
        raise InputError(words)
    own_sweep = load_frozen_sweep(run.sweep_file)
    if not run.cluster_file.exists():
        message = "is missing; run the command of the sweep again, which writes it anew"
        raise InputError(message, source=run.cluster_file)
    own_cluster = load_frozen_cluster(run.cluster_file)
    sweep = load_frozen_sweep(run.sweep_file, sweep_overrides)
    cluster = load_frozen_cluster(run.cluster_file, cluster_overrides)
    if sweep.study is not None:
        report = command_line("report", str(run.root))
        message = f"is a study, which has no plan; {report} writes its report, report/study.html"
        raise InputError(message, source=run.root)
    refuse_other_sweep(run.sweep_file, own_sweep, sweep)
    refuse_other_cluster(run.cluster_file, own_cluster, cluster)
    unchanged = (sweep, cluster) == (own_sweep, own_cluster)
    return sweep, cluster, None if unchanged else NEW_RUN


def lost_inputs(run: RunDirectory) -> str:
    """Say which of a run's own inputs is missing or damaged, and the remedy; "" if none.

    Damaged inputs of a run without results need no remedy: the sweep replaces them.
    """
    if not run.sweep_file.exists():
        return f"{run.sweep_file}: is missing; {PUT_BACK}" if run.events_file.exists() else ""
    try:
        load_frozen_sweep(run.sweep_file)
        if run.cluster_file.exists():
            load_frozen_cluster(run.cluster_file)
    except InputError as error:
        # after the ";" comes advice on writing a new file, which is no use here
        mistake = str(error).splitlines()[0].partition(";")[0]
        return f"{mistake}; {PUT_BACK}" if run.has_results() else ""
    return ""


def refuse_lost_measurements(run: RunDirectory, measured: Sequence[Measurement]) -> None:
    """Refuse a run that has trained but lost its measurements: it cannot be profiled again."""
    if not measured and run.has_trained():
        raise RunDirectoryError(MEASUREMENTS_GONE, source=run.profile)


def _as_text(
    plan: Plan, cluster: ClusterSpec, measurements: Sequence[Measurement], run: RunDirectory
) -> str:
    from tula_hpc.analysis.costs.usage import describe_profiling, job_runs
    from tula_hpc.analysis.report.plan_text import describe_plan

    runs = job_runs(run.job_notes(), measurements, cluster)
    return describe_plan(plan, describe_profiling(runs, measurements))


if __name__ == "__main__":
    sys.exit(main())
