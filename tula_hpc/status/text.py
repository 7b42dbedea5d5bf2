"""State of a run as plain text for one screen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from tula_hpc.formatting import (
    command_line,
    duration_within,
    first_line,
    format_duration,
    format_left,
    format_money,
    format_number,
    format_percent,
    format_score,
    in_short_lines,
    money_within,
    plural,
    printable,
    wrapped,
)
from tula_hpc.records import Configuration
from tula_hpc.status.cost import CostStatus, PromiseStatus, StageCost
from tula_hpc.status.jobs import JobPhase, JobStatus
from tula_hpc.status.run_status import (
    CommandStatus,
    PlanStatus,
    ProfileStatus,
    RunStatus,
    StudyStatus,
)
from tula_hpc.status.trainings import TrainingStatus
from tula_hpc.status.verdict import failure_words

LABEL_WIDTH = 11
# groups of equal jobs that are shown, one line each
MOST_GROUPS = 8
MOST_FAILURES = 5
# running trainings of a study that are shown
MOST_TRAININGS = 3
SOURCES = {
    "sacct": "from sacct, every run of each job",
    "notes": "from the jobs' own records",
    "events": "an estimate: from submission to the last sign of life",
    "steps": "an estimate: steps and events, without the start of jobs",
    "": "",
}

LabelledLine = tuple[str, str]


def status_text(status: RunStatus, width: int = 110) -> str:
    """Format the state as text, wrapped to a number of columns."""
    lines = [
        *_head(status),
        *_stages(status),
        *_job_lines(status),
        *_failure_lines(status.failures, status.words),
        *_avoided_lines(status),
        *_cost_lines(status.cost),
        *_notes(status),
    ]
    title = f"{status.name} in {status.run_directory}"
    return "\n".join([title, *(_wrapped(*line, width) for line in lines), ""])


def _notes(status: RunStatus) -> Iterator[LabelledLine]:
    """Yield the doubts, except one about a file that the state already names."""
    named, _, _ = status.words.partition(": ")
    return (("note", doubt) for doubt in status.doubts if doubt.partition(": ")[0] != named)


def _wrapped(label: str, text: str, width: int) -> str:
    head = f"{label:<{LABEL_WIDTH}}"
    # not wrapped, so that the path can be copied
    if text.startswith("log: ") or (label == "report" and text.startswith("/")):
        return head + in_short_lines(printable(text.replace("\n", " ")))
    return "\n".join(wrapped(head, text, max(width, 60), LABEL_WIDTH + 2))


def _head(status: RunStatus) -> Iterator[LabelledLine]:
    yield "state", f"{status.state}: {status.words}"
    # a command's state that cannot be seen does not matter to a run that is finished or detached
    matters = status.state != "finished" and not _is_carried_on(status)
    if status.command.alive is not None or matters:
        yield "command", _command(status.command)
    if status.detached is not None:
        sweep = status.detached
        job = "no controller job was submitted"
        if sweep.phase is JobPhase.UNKNOWN:
            job = f"controller job {sweep.job_id} is not over according to the files"
        elif sweep.phase:
            job = f"controller job {sweep.job_id} is {sweep.phase}"
        yield "detached", f"{_ago(status.asked_at - sweep.since)}, until {sweep.until}; {job}"
    if not status.scheduler.answered:
        yield (
            "scheduler",
            f"could not be asked: {status.scheduler.words}; what follows is from the files alone",
        )
    elif status.scheduler.words:
        yield "scheduler", status.scheduler.words


def _ago(seconds: float) -> str:
    return f"{format_duration(float(round(seconds)))} ago" if seconds >= 1.0 else "just now"


def _command(command: CommandStatus) -> str:
    who = f"process {command.process} on {command.host}" if command.host else ""
    if command.stopped:
        return (
            f"{who} holds the run and is stopped, as by Ctrl-Z: continue it with fg in its terminal, "
            f"or with kill -CONT {command.process}"
        )
    if command.alive:
        return f"a command is at work: {who or 'its process is not known'}"
    if command.alive is None:
        return f"the last was {who or 'not known'}; whether it is at work cannot be seen from this machine"
    if not who:
        return "none is at work"
    return f"none is at work; the last was {who}"


def _stages(status: RunStatus) -> Iterator[LabelledLine]:
    if status.study is not None:
        yield from _study_lines(status.study)
    if status.profile is not None:
        yield "profile", _profile(status.profile)
    if status.plan is not None:
        yield "plan", _plan(status.plan)
    if status.training is not None:
        yield from _training_lines(status.training)
    if status.promise is not None:
        yield "actual", _promise(status.promise)
    yield "report", _report(status)


def _report(status: RunStatus) -> str:
    if not status.report:
        return "not yet"
    if not status.report_stale:
        page = "study.html" if status.study else "report.html"
        return f"{status.run_directory}/report/{page}"
    again = command_line("report", status.run_directory)
    return f"older than the measurements, the plan or the training; to write it again: {again}"


def _profile(profile: ProfileStatus) -> str:
    most = profile.wanted
    if profile.stand == "done" and not (profile.measured + profile.out_of_memory + profile.failed):
        return f"over, but no measurements are left; {plural(profile.jobs, 'job')}"
    # more may be measured than wanted, if the sweep was narrowed afterwards
    if profile.stand == "done" or most is None or profile.measured > most:
        most = None
        counts = [f"{plural(profile.measured, 'configuration')} measured"]
    else:
        counts = [f"{profile.measured} of at most {plural(most, 'configuration')} measured"]
    if profile.out_of_memory:
        counts.append(f"{profile.out_of_memory} out of memory")
    if profile.failed:
        counts.append(f"{profile.failed} failed")
    stand = {
        "none": "not begun",
        "stopped": "not going on",
        "unknown": "not over according to the files",
    }.get(profile.stand, profile.stand)
    parts = [f"{stand}: {', '.join(counts)}", plural(profile.jobs, "job")]
    if profile.left_s is not None:
        parts.append(format_left(profile.left_s, is_most=bool(most)))
    return "; ".join(parts)


def _plan(plan: PlanStatus) -> str:
    where = f" on {plan.partition}" if plan.partition else ""
    chosen = Configuration(plan.nodes, plan.workers_per_node, plan.local_batch)
    parts = f" in {plan.accumulation} parts" if plan.accumulation > 1 else ""
    return (
        f"{chosen}{parts}{where}: predicted {format_duration(plan.epoch_time_s)} an epoch, "
        f"{duration_within(*plan.with_interval('wall_time_s'))} and "
        f"{money_within(*plan.with_interval('cost'), plan.currency)} in all"
    )


def _promise(promise: PromiseStatus) -> str:
    expected = f"predicted: {format_duration(promise.expected_s)}"
    if promise.interval_s is not None:
        ends = promise.interval_s
        time, low, high = (
            duration_within(s, *ends, promise.actual_s) for s in (promise.expected_s, *ends)
        )
        verdict = {"more": "longer than", "less": "shorter than", "within": "within"}
        where = verdict.get(promise.verdict, "against")
        expected = f"{where} the predicted {low} to {high} (90 %; expected {time})"
    taken = f"took {format_duration(promise.actual_s)}, {expected}"
    currency = promise.promised_currency
    paid = format_money(promise.paid, currency)
    # with the digits of the line on the plan
    ends = promise.cost_interval or (promise.expected_cost, promise.expected_cost)
    predicted = money_within(promise.expected_cost, *ends, currency)
    source = {"accounting": "accounting", "notes": "the run's own records"}[promise.told_by]
    return f"{taken}; cost {paid} (predicted: {predicted}); by {source}"


def _training_lines(training: TrainingStatus) -> Iterator[LabelledLine]:
    stand = {"none": "not submitted", "over": "its job is over"}.get(training.stand, training.stand)
    yield "train", f"{stand}: {_progress(training)}"
    marks = [*_marks(training)]
    if marks:
        yield "", "; ".join(marks)
    if training.passed_over:
        yield "", f"a checkpoint cannot be used, and its work is done again: {training.passed_over}"
    if training.drift:
        yield "", training.drift


def _progress(training: TrainingStatus) -> str:
    epoch = f"epoch {training.epoch:.4g}"
    if training.epochs:
        epoch += f" of {training.epochs}"
    if training.share is not None:
        epoch += f" ({format_percent(training.share)})"
    parts = [epoch]
    if training.step:
        parts.append(f"step {training.step:,}, {training.samples_seen:,} samples")
    if training.global_batch:
        parts.append(f"B = {training.global_batch:,}")
    if training.step_time_s is not None:
        parts.append(f"{format_duration(training.step_time_s)} a step")
    # 0: all steps are done, and what follows is not known
    if training.left_s:
        parts.append(f"about {format_duration(training.left_s)} of steps left")
    return ", ".join(parts)


def _marks(training: TrainingStatus) -> Iterator[str]:
    if training.test_accuracy is not None or training.test_loss is not None:
        yield f"{format_score(training.test_accuracy, training.test_loss)} after epoch {training.test_epoch}"
    if training.restarts:
        yield plural(training.restarts, "restart")
    if training.fallbacks:
        yield f"{plural(training.fallbacks, 'fallback')} to a smaller batch, out of memory"
    if training.checkpoint_age_s is not None and training.stand not in ("finished", "diverged"):
        yield f"last checkpoint {_ago(training.checkpoint_age_s)}"


def _study_lines(study: StudyStatus) -> Iterator[LabelledLine]:
    if study.rates:
        trainings = plural(study.rates, "training")
        rates = f"{study.rates_finished} of {trainings} that choose learning rates are done"
        if study.rates_failed:
            rates += f", {study.rates_failed} failed"
        yield "rates", rates
    counts = {
        "finished": study.finished,
        "diverged": study.diverged,
        "running": study.running,
        "waiting": study.waiting,
        "failed": study.failed - study.rates_failed,
        "left": study.left,
    }
    shown = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    yield (
        "study",
        f"{study.finished + study.diverged} of {plural(study.cells, 'training')} done: {shown}",
    )
    for training in study.under_way[:MOST_TRAININGS]:
        yield "", f"{training.label}: {_progress(training)}"
    if len(study.under_way) > MOST_TRAININGS:
        yield "", f"and {len(study.under_way) - MOST_TRAININGS} more run"


def _job_lines(status: RunStatus) -> Iterator[LabelledLine]:
    """Format the jobs that have neither finished nor failed; equal jobs share a line."""
    open_jobs = [
        job for job in status.jobs if job.phase not in (JobPhase.FINISHED, JobPhase.FAILED)
    ]
    groups = [list(group) for _, group in groupby(sorted(open_jobs, key=_kind), key=_kind)]
    rows = [_job_row(group, status) for group in groups[:MOST_GROUPS]]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    label = "jobs"
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)]
        yield label, "  ".join([*cells, row[3]])
        label = ""
    if len(groups) > MOST_GROUPS:
        yield "", f"and {sum(map(len, groups[MOST_GROUPS:]))} more"
    elif not rows and status.jobs:
        over = "over" if len(status.jobs) == 1 else "all over"
        yield "jobs", f"{plural(len(status.jobs), 'job')}, {over}"


def _kind(job: JobStatus) -> tuple[str, str, str, str, int]:
    return job.phase.value, job.kind, job.state, job.reason, job.nodes or 0


def _job_row(group: Sequence[JobStatus], status: RunStatus) -> tuple[str, str, str, str]:
    first = group[0]
    nodes = plural(first.nodes, "node") if first.nodes else ""
    since = _ago(status.asked_at - min(job.submitted_at for job in group))
    words = f"{_stand(first, status)}; submitted {since}"
    return short_ids(job.job_id for job in group), first.kind, nodes, words


def _stand(job: JobStatus, status: RunStatus) -> str:
    if job.phase is JobPhase.OVER:
        how = f" ({job.state.lower().replace('_', ' ')})" if job.state else ""
        return f"over{how}, not yet acted on: {_who_acts(status)}"
    if job.phase is JobPhase.UNKNOWN:
        return "not over according to the files"
    if job.phase is JobPhase.RUNNING:
        return job.state.lower().replace("_", " ") or "running"
    if job.kind == "guard" and not job.stuck:
        return "waiting in case the controller job is killed"
    # Slurm calls it "None" if there is no reason
    why = "waiting" if job.reason in ("", "None") else f"waiting for {job.reason}"
    if job.waits_for:
        why += f": {job.waits_for}"
    if job.stuck:
        why += "; THIS DOES NOT GO AWAY BY ITSELF"
    return why


def _is_carried_on(status: RunStatus) -> bool:
    on_duty = (JobPhase.WAITING, JobPhase.RUNNING)
    return status.detached is not None and status.detached.phase in on_duty


def _who_acts(status: RunStatus) -> str:
    if status.detached is not None and _is_carried_on(status):
        return f"controller job {status.detached.job_id} will"
    if status.command.alive:
        return "the command at work will"
    return "run the same command again"


def short_ids(job_ids: Iterable[str]) -> str:
    """Shorten job ids, with array tasks joined: `12_[0-2,5] 17`; of many, only the first."""
    arrays: dict[str, list[int]] = {}
    for job_id in job_ids:
        parent, _, task = job_id.partition("_")
        tasks = arrays.setdefault(parent, [])
        if task.isdecimal():
            tasks.append(int(task))
    shown = [_array(parent, sorted(tasks)) for parent, tasks in list(arrays.items())[:3]]
    if len(arrays) > 3:
        shown.append(f"and {len(arrays) - 3} more")
    return " ".join(shown)


def _array(parent: str, tasks: Sequence[int]) -> str:
    if len(tasks) < 2:
        return "_".join([parent, *map(str, tasks)])
    runs: list[list[int]] = []
    for task in tasks:
        if runs and task == runs[-1][1] + 1:
            runs[-1][1] = task
        else:
            runs.append([task, task])
    shown = [str(low) if low == high else f"{low}-{high}" for low, high in runs[:3]]
    if len(runs) > 3:
        shown.append("…")
    return f"{parent}_[{','.join(shown)}]"


def _failure_lines(failures: Sequence[JobStatus], state: str) -> Iterator[LabelledLine]:
    label = "failed"
    for job in failures[-MOST_FAILURES:]:
        named = " ".join(filter(None, [job.job_id, job.stage, job.label or job.what]))
        why = failure_words(job, "ended without a result")
        # the state already says it, in a long sentence with the remedy
        is_shown = job.failure is not None and job.failure.is_the_users and why in state
        yield label, f"{named}: as said above" if is_shown else f"{named}: {why}"
        label = ""
        if job.log_file:
            yield "", f"log: {job.log_file}"
    if len(failures) > MOST_FAILURES:
        yield "", f"and {len(failures) - MOST_FAILURES} before them"


def _avoided_lines(status: RunStatus) -> Iterator[LabelledLine]:
    label = "avoids"
    for each in status.avoided:
        until = format_duration(round(each.until - status.asked_at))
        yield label, f"{each.host} for {until} more, where a device failed: {first_line(each.said)}"
        label = ""


def _cost_lines(cost: CostStatus) -> Iterator[LabelledLine]:
    stages = (("profile", cost.profile), ("train", cost.train), ("control", cost.control))
    known = [(name, stage) for name, stage in stages if stage is not None]
    if not known:
        yield "cost", "nothing is known yet"
        return
    so_far = f"{_amount(cost.node_hours, cost.cost, cost.currency)} so far"
    if cost.price:
        so_far += f" ({cost.price})"
    yield "cost", so_far
    for name, stage in known:
        yield f"  {name}", _stage_cost(stage, cost.currency)


def _stage_cost(stage: StageCost, currency: str) -> str:
    used = f"{_amount(stage.node_hours, stage.cost, currency)}, {SOURCES[stage.source]}"
    if (stage.queue_s or 0.0) >= 0.5:
        return f"{used}; {format_duration(stage.queue_s)} waiting for nodes"
    return used


def _amount(node_hours: float, cost: float | None, currency: str) -> str:
    hours = f"{format_number(node_hours, 3)} node-hours"
    if cost is None:
        return f"{hours}, price not known"
    return f"{hours}, {format_money(cost, currency)}"
