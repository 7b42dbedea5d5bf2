"""Work of the commands in an open run directory: a sweep's stages, or a study."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tula_hpc.analysis.costs.training_bill import TrainingBill
from tula_hpc.analysis.costs.usage import describe_profiling, job_runs
from tula_hpc.analysis.planning.partitions import name_of
from tula_hpc.analysis.report.bill_text import bill_of, bill_sentences, promised_amounts, steps_off
from tula_hpc.analysis.report.output import table_lines
from tula_hpc.analysis.report.plan_text import (
    alternatives,
    expectation,
    progress_sentences,
    too_close_to_call,
    unmeasured,
    without_price,
)
from tula_hpc.analysis.report.tables import summary_rows, summary_table
from tula_hpc.analysis.report.text import used_by_profiling
from tula_hpc.analysis.run_contents import (
    SMALLER_STEPS,
    Training,
    learned_nothing,
    read_run,
    training_of,
)
from tula_hpc.cli.options import STAGES
from tula_hpc.errors import StageError, TulaError
from tula_hpc.files import PLAN_WITHOUT_MEASUREMENTS, read_bounded
from tula_hpc.formatting import (
    command_line,
    format_duration,
    format_money,
    format_number,
    format_score,
    plural,
    printable,
    with_own_escapes,
)
from tula_hpc.records import MAIN_LABEL, Measurement, Plan, TrainResult, grouped, read_metrics
from tula_hpc.records.events import setup_failures
from tula_hpc.records.training import NOT_FINITE
from tula_hpc.stages.batches_that_fit import out_of_memory
from tula_hpc.stages.context import Sweep
from tula_hpc.stages.notify import notify
from tula_hpc.stages.plan import plan_stage, why_no_model
from tula_hpc.stages.profile import profile_stage
from tula_hpc.stages.rehearsal import try_before_jobs, warn_of_sources
from tula_hpc.stages.study import study_stage
from tula_hpc.stages.train import train_stage, unmatched_metric

# columns of the summary if the output is no terminal
SUMMARY_WIDTH = 140
# a larger plan.json is refused by whatever reads it
MOST_PLAN_BYTES = 64 * 1024**2
# failed trainings that are named one by one
NAMED_FAILURES = 5
# columns that may be left out; the one with the largest number goes first
SPARE = {"memory per worker": 4, "against prediction": 3, "measured": 2, "all steps": 1}
# least widths of columns whose cells may be wrapped
NARROW = {"configuration": len("N = 16, B = 16,384"), "measured": len("in training")}


def print_summary(
    plan: Plan,
    measurements: Sequence[Measurement],
    trained: Training | None,
    profiling_cost: str = "",
    bill: TrainingBill | None = None,
) -> None:
    """Print the summary table and the cost of profiling; see `report.tables.summary_rows`."""
    content = summary_table(summary_rows(plan, measurements, trained, bill))
    where = f" on {plan.chosen.partition}" if plan.chosen.partition else ""
    title = f"Chosen configuration and its neighbours{where}"
    lines = table_lines(content, title, width=SUMMARY_WIDTH, narrow=NARROW, spare=SPARE)
    with_own_escapes(sys.stdout).write(f"{lines}\n")
    if profiling_cost:
        print(f"profiling cost: {printable(profiling_cost)}")


def report_stage(sweep: Sweep) -> list[Path]:
    """Write figures and report."""
    from tula_hpc.analysis.report.page import write_report

    # reports do not ask the scheduler, so its accounting is written down first
    sweep.launcher.note_accounts()
    return write_report(sweep.run)


def carry_out(sweep: Sweep, until: str) -> int:
    """Do all stages up to `until` that are not done yet; return the exit code.

    Raises:
        InputError: The workload has a mistake, or is not the measured one.
        StageError: A stage failed.
        StillRunningError: Jobs are not over yet, and the sweep is detached.
    """
    try:
        sweep.launcher.find_lost()
        for words in sweep.run.damage():
            print(f"warning: {words}", file=sys.stderr)
        if sweep.spec.study is not None:
            return _run_study(sweep, report=until == "report")
        return _run_stages(sweep, STAGES.index(until))
    except TulaError as error:
        notify(sweep, "sweep_failed", str(error))
        raise


def _run_stages(sweep: Sweep, last: int) -> int:
    has_profiled = not sweep.run.has_trained()
    is_tried = True
    if has_profiled:
        is_tried = _profile(sweep)
    if last == STAGES.index("profile"):
        # for `status`: the sweep ended here as requested
        sweep.run.log_event("ended", "profile")
        return 0
    before = _contents(sweep.run.plan_file)
    plan = plan_stage(sweep)
    if not sweep.run.has_trained():
        notify(sweep, "stage_ended", f"planned: {plan.reason}", "plan")
    is_new = _contents(sweep.run.plan_file) != before
    _say_plan(sweep, plan, is_new=is_new)
    ends_here = last == STAGES.index("plan")
    if is_new or ends_here:
        _say_what_it_takes(sweep, plan)
    is_trained = sweep.run.train().result_file.exists()
    if ends_here:
        _end_with_plan(sweep, is_trained=is_trained)
        return 0
    if is_trained:
        warn_of_sources(
            sweep, "nothing is trained again; another --run-dir trains what is there now"
        )
    over = is_trained or sweep.run.history().unsettled("train")
    if is_tried and not over:
        # code may have changed while jobs measured, or since the last training job ended
        try_before_jobs(sweep)
    result = train_stage(sweep, plan)
    if last == STAGES.index("report"):
        _say_end(sweep, plan, result, is_cost_shown=has_profiled)
        return 0
    trained = _trained(sweep, result)
    _say_bill(bill_of(plan, sweep.run.events(), trained))
    _warn_of_scores(sweep, trained)
    print("\n".join([*_steps_off(sweep, plan, trained), *_model_lines(sweep)]))
    return 0


def _end_with_plan(sweep: Sweep, *, is_trained: bool) -> None:
    """Record that the sweep ends with its plan, as requested, and say what can be done with it."""
    sweep.run.log_event("ended", "plan")
    for words in setup_failures(sweep.run.job_notes()):
        print(printable(f"warning: {words}"))
    root = str(sweep.run.root)
    print(
        f"the whole plan: {command_line('plan', root)}; as a page: {command_line('report', root)}"
    )
    if not is_trained:
        print(f"to train by this plan, without measuring again: {sweep.command()}")


def _profile(sweep: Sweep) -> bool:
    """Profile until the search is done; return whether the workload was tried here."""
    is_tried = try_before_jobs(sweep)
    if sweep.run.plan_file.exists() and not sweep.run.measurements().records:
        sys.stderr.write(
            f"warning: {PLAN_WITHOUT_MEASUREMENTS}: everything is measured and planned anew; to keep the plan, end "
            "this command (Ctrl-C) and put profile/ back\n"
        )
    profile_stage(sweep)
    measured = plural(len(sweep.run.measurements().records), "measurement")
    notify(sweep, "stage_ended", f"profiling is done: {measured}", "profile")
    if named := out_of_memory(sweep.run):
        print(f"out of memory: {', '.join(named)}")
    sweep.launcher.note_accounts()
    print(f"profiling cost: {_profiling_cost(sweep) or 'unknown'}")
    return is_tried


def _say_end(sweep: Sweep, plan: Plan, result: TrainResult, *, is_cost_shown: bool) -> None:
    """Write the report; print the decision, the cost, and the report's path."""
    sys.stderr.write("report: drawing its figures\n")
    paths = report_stage(sweep)
    trained = _trained(sweep, result)
    bill = _say_summary(sweep, plan, trained, "" if is_cost_shown else _profiling_cost(sweep))
    lines = [f"decided: {_decision(plan, result, bill)}"]
    lines += _steps_off(sweep, plan, trained)
    lines.append(f"cost: {_cost(sweep, plan, bill)}")
    lines += _model_lines(sweep)
    lines += [f"warning: {words}" for words in setup_failures(sweep.run.job_notes())]
    lines.append(f"report: {next(path for path in paths if path.suffix == '.html')}")
    print("\n".join(lines))
    notify(sweep, "sweep_ended", "; ".join(lines))


def _model_lines(sweep: Sweep) -> list[str]:
    """Say where the trained model and a script's files are, or that the model is gone."""
    if words := why_no_model(sweep.run, sweep.spec):
        return [f"warning: {words}"]
    files = sweep.run.train()
    lines = []
    if newest := files.newest_checkpoint:
        # a script's weights are only a part of what it keeps
        what = "checkpoint" if sweep.spec.workload.is_script else "model"
        lines.append(f"{what}: {newest}")
    own = files.root / "script" / "work"
    places = (Path(folder, name) for folder, _, names in os.walk(own) for name in names)
    # links lead to the user's own files, which the script has not written
    if not all(path.is_symlink() for path in places):
        lines.append(f"files of the script: {own}")
    return lines


def _decision(plan: Plan, result: TrainResult, bill: TrainingBill | None) -> str:
    chosen = plan.chosen
    took_s = result.wall_time_s
    if bill is not None and bill.whole.actual is not None:
        # includes the start, as in the bill's sentence
        took_s = bill.whole.actual
    where = f" on {chosen.partition}" if chosen.partition else ""
    text = f"{plural(chosen.nodes, 'node')}{where} and a batch of {chosen.global_batch:,} samples"
    if (result.nodes, result.global_batch) != (chosen.nodes, chosen.global_batch):
        at = f"{plural(result.nodes, 'node')} and a batch of {result.global_batch:,}"
        text = f"{text}; trained with {at}, which fits into memory"
    score = format_score(result.test_accuracy, result.test_loss)
    epochs = plural(result.epochs, "epoch")
    if result.epochs < plan.epochs:
        planned = plan.epochs * (plan.dataset_samples // result.global_batch)
        why = "after which the script ended"
        if result.steps == planned:
            # an epoch takes more steps than planned if it ends with a shorter batch
            why = f"in all of its {planned:,} planned steps"
        elif result.restarts:
            why = "unless the script went on by itself from what it had saved"
        epochs = f"{result.epochs} of {plural(plan.epochs, 'epoch')}, {why},"
    return f"{text}; trained {epochs} in {format_duration(took_s)}: {score}"


def _cost(sweep: Sweep, plan: Plan, bill: TrainingBill | None) -> str:
    """Describe the cost of training and profiling, by the plan's price of a node-second."""
    chosen = plan.chosen
    used = used_by_profiling(read_run(sweep.run))
    spent = sum(seconds * _price_s(plan, partition) for partition, seconds in used.items())
    profiling = f"profiling about {format_money(spent, chosen.currency)}"
    by = ""
    part = sweep.cluster.by_name().get(chosen.partition)
    if part is not None and part.pricing.is_default:
        money = format_money(part.pricing.usd_per_node_hour)
        by = f"; at {money} per node and hour, the default of pricing.usd_per_node_hour"
    if bill is None or bill.cost.actual is None:
        return f"{profiling}; the cost of the training is unknown{by}"
    paid = format_money(bill.cost.actual, bill.currency)
    # with the digits of the sentence on the bill, which is printed before
    expected = promised_amounts(bill.cost, bill.currency)[0]
    whole = format_money(bill.cost.actual + spent, bill.currency)
    return f"about {whole}: training {paid} ({expected} was predicted), {profiling}{by}"


def _price_s(plan: Plan, partition: str) -> float:
    """Return the plan's price of a node-second on a partition; if unknown, on the chosen one."""
    known = [plan.chosen, *(item for item in plan.candidates if item.finite_cost)]
    priced = next((item for item in known if item.partition == partition), plan.chosen)
    node_seconds = priced.nodes * priced.wall_time_s
    return priced.cost / node_seconds if node_seconds else 0.0


def _say_summary(
    sweep: Sweep, plan: Plan, trained: Training, profiling_cost: str
) -> TrainingBill | None:
    # the table is about the chosen partition only
    here = trained if trained.partition in (None, plan.chosen.partition) else None
    bill = bill_of(plan, sweep.run.events(), trained)
    print_summary(plan, sweep.run.measurements().records, here, profiling_cost, bill)
    _say_bill(bill)
    _warn_of_scores(sweep, trained)
    return bill


def _trained(sweep: Sweep, result: TrainResult) -> Training:
    metrics = read_metrics(sweep.run.train().metrics_file)
    return training_of(MAIN_LABEL, metrics, result, sweep.run.history(), sweep.run.accounts())


def _steps_off(sweep: Sweep, plan: Plan, trained: Training) -> list[str]:
    found = steps_off(plan, sweep.run.events(), trained)
    return [f"off the plan: {sentence.removesuffix('.')}" for sentence in found]


def _say_bill(bill: TrainingBill | None) -> None:
    if bill is None:
        return
    for sentence in bill_sentences(bill):
        print(printable(sentence))


def _warn_of_scores(sweep: Sweep, trained: Training) -> None:
    """Warn of a training that has a result, but no scores, or that learned nothing."""
    metrics = trained.metrics
    result = trained.result
    if words := unmatched_metric(sweep, metrics):
        print(f"warning: {words}")
    has_own_loss = sweep.spec.workload.loss is not None
    if result is not None and has_own_loss and not result.is_test_finite:
        print(f"warning: {NOT_FINITE}")
    if why := learned_nothing(metrics, sweep.spec.workload):
        print(f"warning: {why}; {SMALLER_STEPS}")


def _profiling_cost(sweep: Sweep) -> str:
    measured = sweep.run.measurements().records
    runs = job_runs(sweep.run.job_notes(), measured, sweep.cluster)
    return describe_profiling(runs, measured)


def _contents(path: Path) -> bytes:
    try:
        return read_bounded(path, MOST_PLAN_BYTES)
    except OSError:
        # whatever reads the plan will report the error
        return b""


def _say_plan(sweep: Sweep, plan: Plan, *, is_new: bool = True) -> None:
    """Print the plan, in full only if it is new."""
    differs = list(plan.other_objective)
    if not differs and plan.objective != sweep.spec.objective.kind:
        differs = [f'objective.kind = "{plan.objective}"']
    if differs:
        undone = "" if sweep.run.has_trained() else "; deleting plan.json undoes that"
        print(
            f"objective: {', '.join(differs)}, by {sweep.run.plan_file} (tula plan --write), not as "
            f"in {sweep.run.sweep_file}{undone}"
        )
    if not is_new:
        count = f", with {plural(len(plan.warnings), 'remark')}" if plan.warnings else ""
        again = command_line("plan", str(sweep.run.root))
        print(f"plan: {name_of(plan.chosen)}, as before{count}: {again}")
        return
    print(f"plan: {plan.reason}")
    for text in too_close_to_call(plan):
        print(f"plan: {text}")
    for heading, texts in grouped(plan.doubts).items():
        for text in texts:
            print(f"{heading.lower()}: {text}")


def _say_what_it_takes(sweep: Sweep, plan: Plan) -> None:
    chosen = plan.chosen
    print(
        f"planned: {name_of(chosen)}, {plural(chosen.configuration.world_size, 'worker')} "
        f"and {plural(plan.epochs, 'epoch')} of {format_duration(chosen.epoch_time_s)}"
    )
    print(f"planned: {expectation(plan)}")
    for text in progress_sentences(plan):
        print(f"planned: {text}")
    for text in without_price(plan, sweep.cluster):
        print(f"planned: {text}")
    if not chosen.measured:
        why = unmeasured(plan) or ["The chosen configuration itself was not measured."]
        print(f"planned: {why[0]} Its numbers are predicted by a model.")
    measured = sweep.run.measurements().records
    runs = job_runs(sweep.run.job_notes(), measured, sweep.cluster)
    spent = sum(run.node_seconds for run in runs)
    takes = chosen.nodes * chosen.wall_time_s
    if spent > takes:
        # the other modes refuse this key
        limit = "; search.max_profiles limits it" if sweep.spec.search.mode == "adaptive" else ""
        print(
            f"planned: profiling took {format_number(spent, 3)} node-seconds, more than this "
            f"training ({format_number(takes, 3)}){limit}"
        )
    for other in alternatives(plan):
        take = ""
        # a run that has trained keeps its plan
        if other.objective and not sweep.run.has_trained():
            words = ("--objective", other.objective, "--write")
            take = f"; {command_line('plan', str(sweep.run.root), *words)} chooses it"
        if take or not other.is_compared:
            compared = f"{name_of(other.candidate)}, {other.against(plan)}"
            print(f"{other.role}: {compared}{take}")


def _run_study(sweep: Sweep, *, report: bool) -> int:
    cells = sweep.spec.study.cells() if sweep.spec.study else []
    if not all(sweep.run.train(cell.label).result_file.exists() for cell in cells):
        try_before_jobs(sweep)
    failures = study_stage(sweep)
    if report:
        from tula_hpc.analysis.report.study_page import report_study

        print(report_study(sweep.run))
    if failures:
        raise StageError(_describe(failures))
    notify(sweep, "sweep_ended", f"{plural(len(cells), 'training')} done")
    return 0


def _describe(failures: Mapping[str, str]) -> str:
    lines = [f"study: {plural(len(failures), 'training')} without a result:"]
    lines += [f"  {label}: {why}" for label, why in list(failures.items())[:NAMED_FAILURES]]
    if len(failures) > NAMED_FAILURES:
        lines.append(f"  and {len(failures) - NAMED_FAILURES} more")
    return "\n".join(lines)
