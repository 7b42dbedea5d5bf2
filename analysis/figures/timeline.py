"""Timeline of a run: when each of its jobs waited and ran, and interruptions of the training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from tula_hpc.analysis.costs.usage import job_runs, length_of_union
from tula_hpc.analysis.figures import style
from tula_hpc.analysis.figures.drawing import Drawing, Missing, Table
from tula_hpc.analysis.run_contents import RunContents, evenly
from tula_hpc.formatting import format_duration, plural
from tula_hpc.records import MAIN_LABEL, RunHistory, Sign, Submission

Kind = Literal["waiting", "profiling", "training"]
COLOURS: dict[Kind, style.Colour] = {
    "waiting": style.DATA,
    "profiling": style.COMPUTE,
    "training": style.SIZES[0],
}
STOPS = ("stopped", "finished")
COLUMNS = ("row", "job", "kind", "begin_s", "end_s", "ended_by")
# most rows; of more rows, evenly spread ones are drawn
MOST_ROWS = 24
# most waits and runs; of more, evenly spread ones are drawn
MOST_STRETCHES = 1000
ROW_IN = 0.27
# least width of a bar that can be seen, as a share of the whole time
LEAST_WIDTH = 0.004
# share of the whole time from which the title mentions waiting, or time without a job
NOTABLE_WAIT = 0.005
# least length of the time axis, for jobs that all began and ended at the same time
MOMENT_S = 1e-3


class Stretch(NamedTuple):
    """One job's wait or run, in Unix seconds; in the figure, in seconds from the first one."""

    row: str
    job_id: str
    kind: Kind
    begin: float
    end: float
    # "preempted", "requeued", "finished", …; empty if unknown
    ended_by: str = ""

    @property
    def is_interrupted(self) -> bool:
        """Tell whether the run ended before the work was done."""
        return self.kind == "training" and self.ended_by not in ("", "finished")


def stretches(run: RunContents) -> list[Stretch]:
    """Return the waits and runs of all profile jobs and trainings, ordered by their start."""
    history = RunHistory(run.events)
    found = [*_profiling(run, history)]
    signs: defaultdict[str, list[Sign]] = defaultdict(list)
    for sign in history.signs():
        signs[sign.label].append(sign)
    jobs: defaultdict[str, list[Submission]] = defaultdict(list)
    for job in history.submissions("train"):
        jobs[job.label].append(job)
    for label in dict.fromkeys([*run.labels, *signs, *jobs]):
        found += _training(run, label, jobs[label], signs[label])
    return sorted(found, key=lambda one: (one.begin, one.end))


def _profiling(run: RunContents, history: RunHistory) -> Iterator[Stretch]:
    """Yield waits and runs of profile jobs by their notes, or else by their submission and end."""
    noted = set()
    for job in job_runs(run.job_notes, run.measurements, run.cluster):
        # the id of an array's task is the array's id with a number, as 17_3
        noted |= {job.job_id, job.job_id.partition("_")[0]}
        row = f"profile {job.job_id}".strip()
        yield Stretch(row, job.job_id, "waiting", job.waited_from, job.began_at)
        yield Stretch(row, job.job_id, "profiling", job.began_at, job.ended_at)
    elapsed = {account.job_id: account.elapsed_s for account in run.accounts if account.over}
    for submitted in history.submissions("profile"):
        if submitted.job_id in noted:
            continue
        row = f"profile {submitted.job_id}".strip()
        waited_from = submitted.submitted_at
        if submitted.end is None:
            # a job that has started would have left a note
            yield _still_waiting(row, submitted.job_id, waited_from, run)
            continue
        ended = submitted.end.time
        began = max(waited_from, ended - elapsed.get(submitted.job_id, ended))
        yield Stretch(row, submitted.job_id, "waiting", waited_from, began)
        yield Stretch(row, submitted.job_id, "profiling", began, max(began, ended))


def _training(
    run: RunContents, label: str, jobs: Sequence[Submission], signs: Sequence[Sign]
) -> Iterator[Stretch]:
    row = "training" if label == MAIN_LABEL else f"training {label}"
    submitted = {job.job_id: job.submitted_at for job in jobs}
    of_job: dict[str, list[Sign]] = {job_id: [] for job_id in submitted}
    for sign in signs:
        of_job.setdefault(sign.job_id, []).append(sign)
    mine = [training for training in run.trainings if training.label == label]
    # a job writes few events while it trains, but the times of its epochs say how far it came
    logged_s = sum(epoch.epoch_time_s for one in mine for epoch in one.metrics.epochs)
    for job in jobs:
        of_job[job.job_id] += _last_known(job, of_job[job.job_id], jobs[0].submitted_at + logged_s)
    took: dict[str, list[float]] = {}
    for one in run.accounts:
        if one.over:
            took.setdefault(one.job_id, []).append(one.elapsed_s)
    worked_s = sum(one.result.wall_time_s for one in mine if one.result)
    for job_id, job_signs in of_job.items():
        known = took.get(job_id, [])
        groups = _runs(job_signs, len(known))
        elapsed: Sequence[float | None] = known if len(known) == len(groups) else ()
        waiting_since = submitted.get(job_id)
        for run_signs, seconds in zip_longest(groups, elapsed):
            usual = worked_s if len(groups) == len(submitted) == 1 else None
            begin = _begin(run_signs, seconds or usual, waiting_since)
            last = next((one for one in run_signs if one.kind in STOPS), None)
            if last is None and seconds:
                last = Sign(begin + seconds, "stopped", "killed", job_id)
            end = max(begin, (last or run_signs[-1]).time)
            if waiting_since is not None:
                yield Stretch(row, job_id, "waiting", waiting_since, begin)
            yield Stretch(row, job_id, "training", begin, end, last.title if last else "")
            waiting_since = max(end, run_signs[-1].time)
        waits = not groups or groups[-1][-1].title == "requeued"
        if waits and waiting_since is not None:
            yield _still_waiting(row, job_id, waiting_since, run)


def _still_waiting(row: str, job_id: str, since: float, run: RunContents) -> Stretch:
    return Stretch(row, job_id, "waiting", since, max(since, run.seen_at))


def _last_known(job: Submission, signs: Sequence[Sign], logged_at: float) -> list[Sign]:
    """Return a stop at the last known time of a job whose last run left no sign of its end."""
    if signs and signs[-1].kind in STOPS:
        return []
    if job.end is not None:
        failure = job.end.failure
        return [Sign(job.end.time, "stopped", failure.value if failure else "", job.job_id)]
    known = max(job.last_sign_at, logged_at)
    return [Sign(known, "stopped", "", job.job_id)] if known > job.submitted_at else []


def _runs(signs: Iterable[Sign], known: int) -> list[list[Sign]]:
    """Split the signs of a job into its runs, of which accounting knows the length of `known`.

    Each but the first begins with "resumed". A run that was killed gave no sign of its end: without
    its length it is taken together with the next one.
    """
    groups: list[list[Sign]] = []
    for sign in signs:
        if not groups or sign.kind == "resumed":
            groups.append([])
        groups[-1].append(sign)
    if len(groups) == known:
        return groups
    merged: list[list[Sign]] = []
    for group in groups:
        if merged and not any(sign.kind in STOPS for sign in merged[-1]):
            merged[-1] += group
        else:
            merged.append(group)
    return merged


def _begin(signs: Sequence[Sign], elapsed_s: float | None, waiting_since: float | None) -> float:
    """Return a run's start: as its end notes it, else by its first sign or length."""
    for sign in signs:
        if sign.began_at is not None:
            return sign.began_at if waiting_since is None else max(waiting_since, sign.began_at)
    known = []
    if signs[0].kind == "resumed":
        known.append(signs[0].time)
    if elapsed_s:
        known.append(signs[-1].time - elapsed_s)
    if waiting_since is None:
        return min(known, default=signs[0].time)
    return max(waiting_since, min(known, default=waiting_since))


def draw_timeline(run: RunContents) -> Drawing | Missing:
    """Draw waits and runs of all jobs over time, in rows, with marks for interruptions."""
    found = stretches(run)
    if not found:
        return Missing("timeline", "timeline", "no job has been submitted yet", optional=True)
    first = min(one.begin for one in found)
    found = [one._replace(begin=one.begin - first, end=one.end - first) for one in found]
    whole_s = max(MOMENT_S, *(one.end for one in found))
    title = _title(found, whole_s)
    rows = evenly(list(dict.fromkeys(one.row for one in found)), MOST_ROWS)
    shown = evenly(found, MOST_STRETCHES)
    with style.new_figure(title, 1.0 + ROW_IN * max(2, len(rows))) as (figure, (axes,)):
        _draw(axes, [one for one in shown if one.row in rows], rows, whole_s)
        _set_up_axes(axes, rows, whole_s, found)
    return Drawing("timeline", title, _caption(found, rows), figure, Table(COLUMNS, [*shown]))


def _draw(axes: Axes, shown: Sequence[Stretch], rows: Sequence[str], whole_s: float) -> None:
    places = {row: place for place, row in enumerate(rows)}
    # the bar of a run hides that of a wait of no length
    axes.barh(
        [places[one.row] for one in shown],
        [max(one.end - one.begin, LEAST_WIDTH * whole_s) for one in shown],
        left=[one.begin for one in shown],
        height=0.62,
        color=[COLOURS[one.kind].light for one in shown],
        edgecolor=style.PAPER.light,
        linewidth=0.5,
        zorder=3,
    )
    for one in shown:
        if one.is_interrupted:
            (cross,) = axes.plot([one.end], [places[one.row]], "X", color=style.ALERT.light)
            cross.set(markersize=7, zorder=5)


def _set_up_axes(axes: Axes, rows: Sequence[str], whole_s: float, found: Sequence[Stretch]) -> None:
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.set_xlim(0, 1.02 * whole_s)
    style.even_ticks(axes.xaxis, 6, longest_s=1.02 * whole_s)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: style.duration_tick(value)))
    axes.set_xlabel("time since the first job was submitted")
    last = {one.row: one for one in found}.values()
    kinds = {one.kind for one in found if one.end > one.begin or one in last}
    keys = [
        style.Key(kind, marker="s", colour=colour.light)
        for kind, colour in COLOURS.items()
        if kind in kinds
    ]
    if any(one.is_interrupted for one in found):
        keys.append(style.Key("interrupted", marker="X", colour=style.ALERT.light))
    style.legend(axes, keys, left=0.0)


def _title(found: Sequence[Stretch], whole_s: float) -> str:
    # waiting while another job runs does not count
    running = [one for one in found if one.kind != "waiting"]
    ran_s = length_of_union((one.begin, one.end) for one in running)
    known_s = length_of_union((one.begin, one.end) for one in found)
    if not running:
        waited = f" in {format_duration(known_s)} of waiting" if known_s > 0 else ""
        return f"No job has run yet{waited}"
    parts = [f"{format_duration(whole_s)} from the first job to the last"]
    if known_s - ran_s >= NOTABLE_WAIT * whole_s:
        parts.append(f"{format_duration(known_s - ran_s)} of it only waiting for nodes")
    if whole_s - known_s >= NOTABLE_WAIT * whole_s:
        parts.append(f"{format_duration(whole_s - known_s)} without a job")
    if stops := sum(one.is_interrupted for one in running):
        parts.append(f"{plural(stops, 'interruption')} of the training")
    return ", ".join(parts)


def _caption(found: Sequence[Stretch], rows: Sequence[str]) -> str:
    text = (
        "One row for each profile job, one for each training with all its jobs. Jobs wait from "
        "their submission, or from the end of their previous run, until they have nodes; time that "
        "may be either counts as running. "
    )
    last = {one.row: one for one in found}.values()
    if any(one.kind == "waiting" for one in last):
        text += (
            "A job that has given no sign yet is drawn as waiting, up to the time of this report "
            "if a command was at work then. "
        )
    if any(one.is_interrupted for one in found):
        text += "A cross marks where a preemption, a time limit or a failure ended a run. "
    if len(last) > len(rows):
        text += f"Of {len(last):,} rows {len(rows)} are drawn, evenly spread. "
    if len(found) > MOST_STRETCHES:
        text += f"Of {len(found):,} waits and runs {MOST_STRETCHES:,} are shown, evenly spread. "
    return text.strip()
