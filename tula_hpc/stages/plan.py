"""Run the plan stage: fit the models and choose a configuration."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tula_hpc.analysis.plan import lost_inputs, make_plan, refuse_lost_measurements
from tula_hpc.config import SweepSpec
from tula_hpc.errors import ConstraintsError, InputError, RunDirectoryError
from tula_hpc.formatting import command_line
from tula_hpc.records import Measurement, Plan, RunDirectory, refuse_several, write_plan
from tula_hpc.stages.context import Sweep, recording_failure

MADE_AGAIN = "is missing: it is made again from the measurements"
AS_BEGUN = "the training began with it; why it was chosen was lost with the former plan"


def plan_stage(sweep: Sweep) -> Plan:
    """Fit the models, choose and write plan.json; keep a plan that `plan_is_good`.

    Raises:
        RunDirectoryError: The measurements are of several models, or were lost after a training.
        StageError: No plan can be made.
    """
    if plan_is_good(sweep.run):
        return sweep.run.read_plan()
    if is_plan_lost(sweep.run):
        sys.stderr.write(f"{sweep.run.plan_file}: {MADE_AGAIN}\n")
    measured = sweep.run.measurements()
    refuse_lost_measurements(sweep.run, measured.records)
    refuse_several(sweep.run, measured.records)
    spec, differs = _written_objective(sweep)
    try:
        with recording_failure(sweep.run, "plan"):
            plan = make_plan(spec, sweep.cluster, measured.records, measured.skipped)
    except ConstraintsError as error:
        again = command_line("plan", str(sweep.run.root), "--set", "objective.KEY=VALUE", "--write")
        raise ConstraintsError(
            f"{error}\nTo try other constraints with the same measurements: {again}"
        ) from None
    if is_plan_lost(sweep.run):
        plan = _as_begun(plan, sweep.run)
    plan = plan.model_copy(update={"other_objective": differs})
    write_plan(sweep.run.plan_file, plan)
    return plan


def _written_objective(sweep: Sweep) -> tuple[SweepSpec, list[str]]:
    """Return the sweep with the objective that `tula plan --write` gave its plan, and what differs.

    Measurements after that, as of a configuration that failed before, are no reason to give it up.
    """
    from tula_hpc.analysis.planning.objective import objective_of

    spec = sweep.spec
    try:
        plan = sweep.run.read_plan()
    except RunDirectoryError:
        return spec, []
    if not plan.other_objective:
        return spec, []
    objective = objective_of(plan, spec.objective)
    return spec.model_copy(update={"objective": objective}), plan.other_objective


def _as_begun(plan: Plan, run: RunDirectory) -> Plan:
    """Choose the candidate that the training began with, even if another is better by now."""
    submitted = run.history().submissions("train")
    if not submitted:
        return plan
    first = submitted[0]
    for each in plan.candidates:
        here = each.partition == (first.partition or "")
        if here and each.configuration == first.configuration and each != plan.chosen:
            return plan.model_copy(update={"chosen": each, "reason": AS_BEGUN})
    return plan


def is_plan_lost(run: RunDirectory) -> bool:
    """Tell whether a training has begun with a plan that is now missing."""
    return run.has_trained() and not run.plan_file.exists()


def why_no_model(run: RunDirectory, spec: SweepSpec | None) -> str:
    """Say that the model of a finished training is gone, and what to do; "" if it is there.

    Also "" for a script, which may save its model anywhere.
    """
    files = run.train()
    if spec is None or spec.workload.is_script or files.newest_checkpoint is not None:
        return ""
    return (
        f"the trained model is gone: {files.checkpoints} has no checkpoint; put it back, or train again "
        f"over the same measurements: move {files.root.parent} away and run the same command again"
    )


def obstacle(run: RunDirectory, measured: Sequence[Measurement]) -> str:
    """Name a file of the run that stops every command, and say what to do; "" if none does."""
    if words := lost_inputs(run):
        return words
    try:
        if plan_is_good(run):
            run.read_plan()
        else:
            refuse_several(run, measured)
    except (RunDirectoryError, InputError) as error:
        return str(error)
    return ""


def plan_is_good(run: RunDirectory) -> bool:
    """Tell whether a training began with the plan, or nothing was measured since it was made."""
    if not run.plan_file.exists():
        return False
    written = run.plan_file.stat().st_mtime
    return run.has_trained() or all(
        path.stat().st_mtime <= written for path in run.profile.glob("*.jsonl")
    )
