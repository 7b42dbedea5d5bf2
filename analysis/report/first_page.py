"""First page of the report: the decision in plain words, and answers to a reader's next questions.

How long will it take, or did it take? How sure is that? Why this one? What would change it? What
should be done next? Each answer is a section of a few sentences; no fact appears in two sections.
The first paragraph is `_decision`, or `_without_plan`; `report_template.html` shows the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tula_hpc.analysis import run_contents
from tula_hpc.analysis.models.profiles import is_out_of_memory, parts_of, summarize
from tula_hpc.analysis.planning.partitions import name_of
from tula_hpc.analysis.report import plan_text
from tula_hpc.analysis.report.bill_text import bill_of, bill_sentences, steps_off
from tula_hpc.analysis.report.text import as_sentence, doubts, of_partition_in_words
from tula_hpc.analysis.run_contents import RunContents, Training
from tula_hpc.formatting import (
    duration_within,
    first_line,
    format_bytes,
    format_duration,
    format_number,
    format_score,
    in_comparison,
    listed,
    money_within,
    plural,
)
from tula_hpc.records import (
    Candidate,
    Measurement,
    Plan,
    Remedy,
    RunHistory,
    TrainResult,
    of_partition,
)

# least share of a step that is named
NOTABLE = 0.01
GO_ON = "tula sweep RUN/sweep.toml --cluster RUN/cluster.toml --run-dir RUN"
IS_RUN = "RUN is the run's directory."


class Section(NamedTuple):
    """Sentences under a heading."""

    heading: str
    sentences: list[str]


class FirstPage(NamedTuple):
    """Decision, or how far the run has come, and the sections below it."""

    decision: str
    # sections that have at least one sentence
    sections: list[Section]


def first_page(run: RunContents) -> FirstPage:
    """Return the first page of a run at any stage."""
    if run.plan is None:
        decision = " ".join(_without_plan(run))
        answers = {"What it took": list(_took(run)), "What to do next": _next_steps(run)}
    else:
        decision = _decision(run, run.plan)
        will_take = []
        price = plan_text.without_price(run.plan, run.cluster) if run.cluster else []
        took = list(_took(run))
        bills = [bill_of(run.plan, run.events, one) for one in run.trainings]
        is_billed = any(bills)
        if is_billed:
            took += price
        else:
            will_take = [_expected(run.plan), *plan_text.where_time_goes(run.plan.chosen)]
            will_take += [*_step_shares(run, run.plan), *price, *_batch_adaptation(run, run.plan)]
            will_take += plan_text.progress_sentences(run.plan)
        answers = {
            "What it will take": will_take,
            "What it took": took,
            "How sure": list(_how_sure(run, run.plan, is_billed=is_billed)),
            "Why this one": [
                as_sentence(run.plan.reason.removeprefix(f"{name_of(run.plan.chosen)}: ")),
                *plan_text.why_not_better(run.plan),
                *plan_text.knee_sentences(run.plan),
                *_half_the_batch(run.plan),
            ],
            "What would change it": list(
                _what_would_change(run.plan, has_trained=bool(run.trainings))
            ),
            "What to do next": _next_steps(run),
        }
    found = [Section(heading, sentences) for heading, sentences in answers.items() if sentences]
    return FirstPage(decision, found)


def _without_plan(run: RunContents) -> Iterator[str]:
    yield "There is no plan yet."
    ok = run.ok
    count = _configurations(ok)
    measured = f"{plural(count, 'configuration')} {'has' if count == 1 else 'have'} been measured"
    if not ok:
        measured = "No configuration has been measured"
    out = list(filter(is_out_of_memory, run.measurements))
    failed = _configurations(run.measurements) - _configurations([*ok, *out])
    ends = {"ran out of memory": _configurations(out), "failed": failed}
    others = "".join(f", {number} {end}" for end, number in ends.items() if number)
    yield f"{measured}{others or ' so far'}."
    epochs = {}
    by_partition: dict[str, list[Measurement]] = {}
    for item in ok:
        by_partition.setdefault(item.partition, []).append(item)
    for name, rows in sorted(by_partition.items()):
        for configuration, seconds in run_contents.measured_epochs(rows, 0).items():
            epochs[name, configuration] = seconds
    if epochs:
        name, best = min(epochs, key=lambda key: epochs[key])
        yield (
            f"The fastest is {plural(best.nodes, 'node')}{of_partition_in_words(name)} with global "
            f"batch {best.global_batch:,}: {format_duration(epochs[name, best])} for an epoch."
        )


def _configurations(measurements: Iterable[Measurement]) -> int:
    return len({(item.partition, item.configuration) for item in measurements})


def _decision(run: RunContents, plan: Plan) -> str:
    chosen = plan.chosen
    results = [(one, one.result) for one in run.trainings if one.result is not None]
    verb = "Train"
    if any(_ended_as(chosen, training, result) for training, result in results):
        verb = "Trained"
    workers = chosen.configuration.world_size
    each = "one worker" if workers == 1 else f"each of {workers:,} workers"
    return (
        f"{verb} on {plural(chosen.nodes, 'node')}{of_partition_in_words(chosen.partition)} with "
        f"global batch {chosen.global_batch:,} ({plural(chosen.local_batch, 'sample')} for {each}"
        f"{chosen.in_parts})."
    )


def _expected(plan: Plan) -> str:
    chosen = plan.chosen
    time = chosen.predicted("wall_time_s")
    cost = chosen.predicted("cost")
    memory = format_bytes(chosen.peak_memory_bytes)
    if plan.memory_limit_bytes:
        memory += f" of {format_bytes(plan.memory_limit_bytes)}"
    energy = ""
    if chosen.energy_kwh is not None:
        energy = f", {format_number(chosen.energy_kwh, 2)} kWh"
    # the next sentence gives the parts of this time
    return (
        f"About {duration_within(*time)} and {money_within(*cost, chosen.currency)}{energy} for "
        f"{plural(plan.epochs, 'epoch')}, from start to end; {memory} of memory per worker."
    )


def _step_shares(run: RunContents, plan: Plan) -> list[str]:
    """Say where the time of the chosen configuration's step goes; empty if it was not measured."""
    here = of_partition(run_contents.as_planned(run.measurements, plan), plan.chosen.partition)
    own = [row for row in here if row.configuration == plan.chosen.configuration]
    times = next((profile.times for profile in summarize(own).profiles), None)
    if times is None:
        return []
    parts = parts_of(times)
    rest = "other work"
    if plan.chosen.configuration.world_size > 1:
        rest = "exchange of gradients and waiting for other workers"
    wait = "waiting for data"
    if run.sweep is not None and run.sweep.workload.is_script:
        wait += " or other work of the script between its steps"
    names = (wait, "computation", "the optimizer", rest)
    step_s = times.step_time_s
    shown = [
        f"{100 * seconds / step_s:.0f} % {name}"
        for seconds, name in sorted(zip(parts, names, strict=True), reverse=True)
        if seconds >= NOTABLE * step_s
    ]
    return [f"A step of {format_duration(step_s)} is {', '.join(shown)}."]


# what a training does for a large batch, by training.method
ADAPTED = {
    "ags": "gradients are scaled",
    "adascale": "gradients are scaled",
    "static": "gradients are scaled",
    "lrs": "the learning rate is scaled",
    "sqrt": "the learning rate is scaled",
    "lars": "rates are adapted by layer",
    "lamb": "rates are adapted by layer",
}


def _batch_adaptation(run: RunContents, plan: Plan) -> list[str]:
    """Say what the training does for its large batch; empty if it does nothing."""
    if run.sweep is None:
        return []
    training = run.sweep.training
    batch = plan.chosen.global_batch
    if batch <= training.base_batch or training.method not in ADAPTED:
        return []
    if run.sweep.lacks_factors(plan.chosen.configuration.world_size):
        return []
    return [
        f"The batch is {batch / training.base_batch:,.3g} times training.base_batch, so "
        f'{ADAPTED[training.method]} (training.method = "{training.method}"). How much accuracy '
        "that preserves is not known until tula study measures it."
    ]


def _took(run: RunContents) -> Iterator[str]:
    for training in run.trainings:
        name = as_sentence(_name(run, training.label))[:-1]
        if bill := bill_of(run.plan, run.events, training):
            yield from bill_sentences(bill, name, parts=False)
        yield from _outcome(run, training, name)
    for label in RunHistory(run.events).last_failures():
        if label not in run.labels:
            yield as_sentence(f"{_name(run, label)} failed before its first logged step")


def _name(run: RunContents, label: str) -> str:
    is_only = {label}.issuperset(run.labels)
    return "the training" if is_only else f"training {label}"


def _outcome(run: RunContents, training: Training, name: str) -> Iterator[str]:
    result = training.result
    if result is None:
        done = "no epoch is done yet"
        if training.metrics.epochs:
            last = training.metrics.epochs[-1]
            score = format_score(last.test_accuracy, last.test_loss)
            verb = "is" if last.epoch == 1 else "are"
            done = f"{plural(last.epoch, 'epoch')} {verb} done, {score}"
        yield f"{name} is not finished; {done}."
        return
    time = f"{format_duration(result.train_time_s)}{_against_prediction(run, training)}"
    end = "has no score"
    if result.test_accuracy is not None or result.test_loss is not None:
        end = f"reached {format_score(result.test_accuracy, result.test_loss)}"
    method = f'training.method = "{result.method}"'
    yield f"{name}'s steps took {time}; with {method} the model {end}."
    if run.plan and not _ended_as(run.plan.chosen, training, result):
        where = plural(result.nodes, "node") + of_partition_in_words(training.partition or "")
        batch = f"global batch {result.global_batch:,}"
        yield f"It ended on {where} with {batch}, not with the chosen configuration."
    if result.restarts:
        often = "once" if result.restarts == 1 else f"{result.restarts} times"
        restart = RunHistory(run.events).last_restart(training.label)
        went_on = "started over" if restart and restart.samples_seen == 0 else "resumed"
        yield f"It was interrupted and {went_on} {often}."


def _ended_as(chosen: Candidate, training: Training, result: TrainResult) -> bool:
    same = (result.nodes, result.global_batch) == (chosen.nodes, chosen.global_batch)
    return same and training.partition in (None, chosen.partition)


def _against_prediction(run: RunContents, training: Training) -> str:
    candidate = run_contents.candidate_of(run.plan, training)
    is_reported = any(steps_off(run.plan, run.events, training))
    if candidate is None or not training.epoch_time_s or is_reported:
        return ""
    # the median epoch, since the sum of all epochs includes the start of the first one
    ratio = training.epoch_time_s / candidate.epoch_time_s
    return f" (its median epoch was {in_comparison(ratio, other='predicted')})"


def _how_sure(run: RunContents, plan: Plan, *, is_billed: bool) -> Iterator[str]:
    chosen = plan.chosen
    for training in run.trainings:
        yield from steps_off(plan, run.events, training, _name(run, training.label))
    time = chosen.predicted("wall_time_s")
    cost = chosen.predicted("cost")
    # the bill already says what was predicted
    if time.low < time.high and not is_billed:
        times = [duration_within(end, time.low, time.high) for end in (time.low, time.high)]
        costs = ""
        if cost.low < cost.high:
            usd = [money_within(end, cost.low, cost.high, chosen.currency) for end in cost[1:]]
            costs = f" and costs {usd[0].removesuffix(f' {chosen.currency}')} to {usd[1]}"
        yield f"With 90 % probability it takes {times[0]} to {times[1]}{costs}."
    # a billed training has itself measured the configuration
    if not is_billed:
        yield from _how_measured(run, plan)
    yield from plan_text.too_close_to_call(plan)


def _how_measured(run: RunContents, plan: Plan) -> Iterator[str]:
    count = _configurations(item for item in run.ok if item.partition == plan.chosen.partition)
    model = f"a model fitted to {plural(count, 'measured configuration')}"
    if plan.chosen.measured:
        yield "This configuration itself was measured."
    elif plan.profile_share is not None:
        yield from plan_text.unmeasured(plan)
        yield f"It is predicted by {model}."
    elif count:
        yield f"This configuration itself was not measured; it is predicted by {model}."


def _half_the_batch(plan: Plan) -> Iterator[str]:
    half = [
        c for c in plan.candidates if c.feasible and 2 * c.global_batch == plan.chosen.global_batch
    ]
    best = min(half, key=lambda c: (c.wall_time_s, c.cost), default=None)
    # as the next best it is compared where it is named
    is_named = any(other.candidate == best for other in plan_text.alternatives(plan))
    if best is not None and best.wall_time_s > plan.chosen.wall_time_s and not is_named:
        yield (
            f"Half the batch takes longer for the same epochs: {name_of(best)} is "
            f"{plan_text.against(best, plan.chosen)}."
        )


def _what_would_change(plan: Plan, *, has_trained: bool) -> Iterator[str]:
    """Yield the deciding facts: constraints, and choices of other objectives."""
    yield from map(as_sentence, plan.binding)
    is_decided = True
    for other in plan_text.alternatives(plan):
        roles = listed([f"the {role}" for role in other.roles])
        compared = f": {other.against(plan)}"
        kind = other.objective
        takes = ""
        if kind:
            takes = f'; objective.kind = "{kind}" chooses it'
        if kind and not has_trained:
            # a run that has trained keeps its plan
            takes = f"; tula plan RUN --objective {kind} --write chooses it"
        is_decided = is_decided and not kind
        if other.is_compared:
            # "Why this one" has a faster and cheaper candidate, "How sure" one that is too close
            compared = ", compared above"
        if kind or not other.is_compared:
            yield f"{as_sentence(roles)[:-1]} is {name_of(other.candidate)}{compared}{takes}."
    feasible = [candidate for candidate in plan.candidates if candidate.feasible]
    if all(candidate == plan.chosen for candidate in feasible):
        yield "Nothing within the search: no other candidate is feasible."
    elif is_decided:
        yield (
            'Neither objective.kind = "time" nor "cost" would: of all feasible candidates, it is '
            "the fastest and the cheapest."
        )


def _open_trainings(run: RunContents) -> list[str]:
    """Return the labels of trainings without a result, whether or not they have logged anything."""
    history = RunHistory(run.events)
    labels = run.labels + [job.label for job in history.unsettled("train")]
    labels += history.last_failures()
    done = [training.label for training in run.trainings if training.result is not None]
    return [label for label in labels if label not in done]


def _of_open_trainings(run: RunContents, labels: Iterable[str]) -> str:
    failures = RunHistory(run.events).last_failures()
    failure = next((failures[label] for label in labels if label in failures), None)
    if failure is None:
        return f"Wait for the training; tula status RUN shows how far it is. {IS_RUN}"
    why = f" {as_sentence(first_line(failure.detail))}" if failure.detail else ""
    fix = f"Fix what ended the training, then run: {GO_ON}.{why}"
    return f"{fix} tula status RUN names the log. {IS_RUN}"


def _next_steps(run: RunContents) -> list[str]:
    # the sweep itself writes the report only after its training
    if run.seen_at and not any(training.result for training in run.trainings):
        return [f"Wait: a command is at work; tula status RUN shows how far it is. {IS_RUN}"]
    remedies = {doubt.remedy for doubt in doubts(run)}
    failed = RunHistory(run.events).stage_failure(run.plan_at)
    if failed is not None:
        why = as_sentence(first_line(failed.detail))
        return [
            f"Fix what ended the last command, then run: {GO_ON}. {why} If a job failed, tula "
            f"status RUN names its log. {IS_RUN}"
        ]
    if run.plan is None:
        what = "Make the plan again" if run.trainings else "Go on measuring"
        return [f"{what}: {GO_ON}. {IS_RUN}"]
    if labels := _open_trainings(run):
        return [_of_open_trainings(run, labels)]
    todo = [remedy.heading for remedy in (Remedy.MEASURE, Remedy.CHANGE) if remedy in remedies]
    below = listed([f"“{heading}”" for heading in todo])
    if run.trainings:
        longer = f"The training is done; before a longer one see {below} below."
        return [longer if below else "Nothing: the training is done."]
    found = []
    if below:
        verb = "matters" if len(todo) == 1 else "matter"
        found.append(f"It can be started now; {below} below {verb} before a long training.")
    return [*found, f"To train it, without measuring again: {GO_ON}. {IS_RUN}"]
