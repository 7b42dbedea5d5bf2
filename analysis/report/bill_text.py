"""Predicted and actual time and cost of a training, in words and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tula_hpc.analysis.costs.spread import TimePart
from tula_hpc.analysis.costs.training_bill import (
    Compared,
    PromiseVerdict,
    Source,
    TrainingBill,
    training_bill,
)
from tula_hpc.analysis.report.plan_text import PART_NAMES
from tula_hpc.analysis.report.tables import TextTable
from tula_hpc.analysis.run_contents import Training, candidate_of
from tula_hpc.formatting import (
    UNKNOWN,
    duration_within,
    format_duration,
    format_money,
    in_comparison,
    money_within,
    plural,
)
from tula_hpc.records import Event, Plan, RunHistory, TrainResult

COLUMNS = ("", "predicted (90 %)", "actual", "verdict")
SOURCES = {
    Source.ACCOUNTING: "by Slurm's accounting",
    Source.NOTES: "by the run's own records",
}
VERDICTS = {
    PromiseVerdict.WITHIN: "as predicted",
    PromiseVerdict.MORE: "more than predicted",
    PromiseVerdict.LESS: "less than predicted",
    PromiseVerdict.UNKNOWN: UNKNOWN,
}
JUDGED = {
    PromiseVerdict.WITHIN: "within the 90 % interval of",
    PromiseVerdict.MORE: "longer than the 90 % interval of",
    PromiseVerdict.LESS: "shorter than the 90 % interval of",
}
# likely causes, by the part of a step that a drift event names
CAUSES = {
    "loader": "; its drift events point to waiting for data",
    "compute": "; its drift events point to the computation, which other load on a node slows down",
    "network": "; its drift events point to the network",
    "unknown": "; its drift events point to no single part of a step, as with other load on a node",
}

# share of a training's steps from which steps of other optimizers after its last step are named;
# the steps of a GAN's other optimizer come in between
MANY_FURTHER = 0.5
# a training of fewer steps is notably slower because of its slow first steps
FEW_STEPS = 200
# shares of the planned samples between which a training took what was planned; full batches leave
# out some samples, at most half
FEW_SAMPLES, MANY_SAMPLES = 0.45, 1.1


def bill_of(plan: Plan | None, events: Iterable[Event], training: Training) -> TrainingBill | None:
    """Return the bill of a training that ended; None if it has not.

    A training that changed its batch is compared with the plan's choice: that was the promise.
    """
    if plan is None or training.result is None:
        return None
    own = RunHistory(events).of_training(training.label)
    return training_bill(
        plan.chosen, training.result, own, training.accounts, training.metrics.epochs
    )


def bill_sentences(
    bill: TrainingBill, name: str = "The training", *, parts: bool = True
) -> Iterator[str]:
    """Yield sentences on the whole time and cost and, with `parts`, on each part that was off."""
    whole, cost = bill.whole, bill.cost
    took = f"{name} took {format_duration(whole.actual)} in all {SOURCES[bill.source]}"
    yield f"{took}, {_judged(whole, _promised_times(whole))}."
    paid = f"It cost {format_money(cost.actual, bill.currency)}"
    yield f"{paid}; {_predicted(promised_amounts(cost, bill.currency))}."
    off = bill.parts_off() if parts else []
    if off:
        yield f"Outside their intervals: {'; '.join(_off(bill, part) for part in off)}."
    most = bill.most_of_it() if parts else None
    if most is not None and most not in off:
        yield f"Most of the difference: {_off(bill, most)}."
    if bill.source is Source.NOTES and bill.unknown_runs:
        killed = plural(bill.unknown_runs, "run")
        yield f"Not included: {killed} of the job, killed without leaving a note."


def steps_off(
    plan: Plan | None, events: Iterable[Event], training: Training, name: str = "the training"
) -> Iterator[str]:
    """Say how far steps were outside the plan's interval and why, if that made a difference."""
    promised = candidate_of(plan, training)
    took_s = training.epoch_time_s
    if plan is None or promised is None or took_s is None:
        return
    if words := _samples_off(plan, training.result):
        yield f"{name[:1].upper()}{name[1:]} {words}"
        return
    expected = promised.predicted("epoch_time_s")
    if expected.low == expected.high or expected.low <= took_s <= expected.high:
        return
    bill = bill_of(plan, events, training)
    if bill is not None and TimePart.STEPS in bill.parts and not bill.has_felt(TimePart.STEPS):
        return
    ends = (expected.low, expected.high)
    took = format_duration(took_s)
    low, high = (duration_within(end, *ends, took_s) for end in ends)
    if took in (low, high):
        took, low, high = (duration_within(each, *ends) for each in (took_s, *ends))
    drift = RunHistory(events).last_drift(training.label)
    cause = CAUSES.get(drift.part, "") if drift else ""
    steps = training.result.steps if training.result else FEW_STEPS
    # the median of more epochs is not that of the first steps
    is_first = len(training.metrics.epochs) <= 2
    if not cause and took_s > expected.high and steps < FEW_STEPS and is_first:
        cause = f"; with only {plural(steps, 'step')} in all, the slow first ones weigh heavily"
    compared = in_comparison(took_s / expected.value, other="predicted")
    yield (
        f"The steps of {name} were {compared}, outside of the 90 % interval: "
        f"the median epoch took {took}, not {low} to {high}{cause}."
    )


def _samples_off(plan: Plan, result: TrainResult | None) -> str:
    """Say that other samples than planned were taken, for example if workload.samples is wrong."""
    if result is None:
        return ""
    if result.further_steps > MANY_FURTHER * result.steps:
        return (
            f"was followed by {result.further_steps:,} steps of other optimizers, as in further "
            "folds or repetitions: the plan is for the first training alone, and the score may "
            "come from another one."
        )
    planned, seen = result.epochs * plan.dataset_samples, result.samples_seen
    if FEW_SAMPLES * planned <= seen <= MANY_SAMPLES * planned:
        a_step = seen / max(1, result.steps)
        # after running out of memory a training has gone on with a smaller batch
        largest = max(result.global_batch, plan.chosen.global_batch)
        if a_step <= MANY_SAMPLES * largest:
            return ""
        return (
            f"took steps of {a_step:,.0f} samples on average, but was planned for {largest:,}: the "
            "script later takes more forward passes for a step than in its profile."
        )
    remedy = "correct that key, and measure again with another --run-dir."
    if result.restarts and seen < planned:
        remedy = "that key is wrong, or the script went on from another training's checkpoint."
    elif result.restarts:
        more = plural(max(1, round((seen - planned) / plan.dataset_samples)), "epoch")
        remedy = (
            f"about {more} more, trained twice after a restart, for example because the script's "
            "checkpoint holds no epoch; otherwise workload.samples is wrong."
        )
    return (
        f"went through {seen:,} samples, but was planned for {planned:,}, "
        f"{plural(result.epochs, 'epoch')} of workload.samples: {remedy}"
    )


def _promised_times(compared: Compared) -> list[str]:
    """Return the expected time and the ends of its interval, with the digits that this allows."""
    if compared.interval is None:
        return [format_duration(compared.expected)]
    ends = compared.interval
    times = (compared.expected, *ends)
    return [duration_within(seconds, *ends, compared.actual) for seconds in times]


def promised_amounts(compared: Compared, currency: str) -> list[str]:
    """Return the expected cost and the ends of its interval, with the digits that this allows."""
    if compared.interval is None:
        return [format_money(compared.expected, currency)]
    ends = compared.interval
    amounts = (compared.expected, *ends)
    return [money_within(amount, *ends, currency, compared.actual) for amount in amounts]


def _judged(compared: Compared, promised: Sequence[str]) -> str:
    """Compare with the prediction: "longer than the 90 % interval of the predicted 19 s"."""
    expected, *ends = promised
    if not ends or compared.verdict is PromiseVerdict.UNKNOWN:
        return f"against the predicted {expected}"
    return f"{JUDGED[compared.verdict]} the predicted {expected} ({' to '.join(ends)})"


def _predicted(promised: Sequence[str]) -> str:
    expected, *ends = promised
    text = f"{expected} was predicted"
    return f"{text} ({' to '.join(ends)})" if ends else text


def _off(bill: TrainingBill, part: TimePart) -> str:
    seconds = bill.parts[part]
    took = f"{PART_NAMES.get(part, str(part))} {format_duration(seconds.actual)}"
    took += _in_starts(bill, part, " ")
    if seconds.expected == 0.0:
        return f"{took} (none predicted)"
    return f"{took} (predicted {_promised_times(seconds)[0]})"


def _in_starts(bill: TrainingBill, part: TimePart, before: str) -> str:
    """Say that a time is that of several starts, since the plan may have predicted fewer."""
    is_several = part is TimePart.STARTS and bill.starts > 1
    return f"{before}in {bill.starts} starts" if is_several else ""


def bill_table(bill: TrainingBill) -> TextTable:
    """Return whole, parts and cost, each with its verdict; a cell's second line is its interval."""
    whole = bill.whole
    rows = [_row("whole training", whole, _promised_times(whole), format_duration(whole.actual))]
    for part, seconds in bill.parts.items():
        name = PART_NAMES.get(part, str(part))
        actual = format_duration(seconds.actual) + _in_starts(bill, part, "\n")
        rows.append(_row(name, seconds, _promised_times(seconds), actual))
    paid = format_money(bill.cost.actual, bill.currency)
    rows.append(_row("cost", bill.cost, promised_amounts(bill.cost, bill.currency), paid))
    return TextTable(COLUMNS, rows)


def _row(name: str, compared: Compared, promised: Sequence[str], actual: str) -> tuple[str, ...]:
    expected, *ends = promised
    predicted = f"{expected}\n{' – '.join(ends)}" if ends else expected
    return name, predicted, actual, VERDICTS[compared.verdict]
