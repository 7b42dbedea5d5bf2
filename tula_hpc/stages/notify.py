"""Run the user's command `on_event` when something happens that a person wants to know.

The command is a text in the cluster file, which a shell evaluates; it gets the event in its
environment only: TULA_EVENT, TULA_RUN (the run directory) and TULA_MESSAGE (a sentence). Events:

    stage_ended            the message names the stage
    training_started, training_preempted, training_failed, training_finished
    sweep_ended, sweep_failed

The process that waits for the jobs runs it: `tula`, or a detached sweep's controller job, which
starts when jobs are over. It runs once for each event. If it fails, or does not end in time, the
sweep goes on, and one warning says so.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager

from pydantic import Field

from tula_hpc.env import with_variables
from tula_hpc.errors import LaunchError, RunDirectoryError, StorageError
from tula_hpc.formatting import first_line, printable
from tula_hpc.launch.bounded_command import run as run_command
from tula_hpc.records import MAIN_LABEL, Record, read_document, write_atomically
from tula_hpc.records.storage import in_turn
from tula_hpc.stages.context import Sweep

TIME_LIMIT_S = 10.0
# longest message, in characters
MOST_WORDS = 500
# on_event is in a variable: everybody on the machine can see arguments, but not the environment
SHELL = ("/bin/sh", "-c", 'eval "$TULA_ON_EVENT"')


class Notifications(Record):
    """told.json: the notifications so far."""

    # number of events of events.jsonl, from its beginning, that have been handled
    events: int
    # keys of the notifications that are sent only once; see `notify`
    said: list[str] = Field(default=[])
    # whether the user was warned that on_event fails
    complained: bool = False


def notify(sweep: Sweep, event: str, message: str, name: str = "") -> None:
    """Run on_event for an event, unless that was done for the same name and the same jobs.

    `name` distinguishes events of the same kind.
    """
    if sweep.cluster.on_event is None:
        return
    with _in_turn(sweep):
        sent = _read(sweep)
        jobs = len(sweep.run.history().submissions("profile", "train"))
        key = f"{event} {name} {jobs}"
        said = [*sent.said, key]
        if key in sent.said or not _keep(sweep, sent.model_copy(update={"said": said})):
            return
    _run(sweep, event, message)


def notify_of_news(sweep: Sweep, running: int = 0) -> None:
    """Run on_event for all events that trainings have logged since the last call.

    `running` is the number of running jobs of the plan's training.
    """
    if sweep.cluster.on_event is None:
        return
    if running:
        notify(sweep, "training_started", "the training runs")
    with _in_turn(sweep):
        sent = _read(sweep)
        history = sweep.run.history()
        news = history.news(sent.events)
        events = len(history.events)
        if events == sent.events or not _keep(sweep, sent.model_copy(update={"events": events})):
            return
    for each in news:
        is_main = each.label == MAIN_LABEL
        # a study has many trainings, so only their failures are news
        if is_main or each.kind == "training_failed":
            _run(sweep, each.kind, each.text if is_main else f"{each.label}: {each.text}")


def _in_turn(sweep: Sweep) -> AbstractContextManager[None]:
    """Keep another command or controller from finding the same news, which it would send, too."""
    return in_turn(sweep.run.root / ".told.lock")


def _read(sweep: Sweep) -> Notifications:
    try:
        return read_document(Notifications, sweep.run.notifications_file)
    except (FileNotFoundError, RunDirectoryError):
        # events from before this command are no news
        before = [e for e in sweep.run.history().events if e.time < sweep.started_at]
        return Notifications(events=len(before))


def _keep(sweep: Sweep, sent: Notifications) -> bool:
    """Record a notification before it is sent, so that none is sent twice after a kill."""
    try:
        write_atomically(sweep.run.notifications_file, sent.model_dump_json())
    except StorageError as error:
        sys.stderr.write(f"on_event: not run: {error}\n")
        return False
    return True


def _run(sweep: Sweep, event: str, message: str) -> None:
    variables = {
        "TULA_ON_EVENT": sweep.cluster.on_event or "",
        "TULA_EVENT": event,
        "TULA_RUN": str(sweep.run.root),
        "TULA_MESSAGE": f"{sweep.spec.name}: {printable(first_line(message))[:MOST_WORDS]}",
    }
    try:
        done = run_command(SHELL, TIME_LIMIT_S, environment=with_variables(variables))
        problem = first_line(done.complaint) if done.code else ""
    except LaunchError:
        problem = f"did not end within {TIME_LIMIT_S:g} s, and was killed"
    if not problem:
        return
    with _in_turn(sweep):
        sent = _read(sweep)
        if not sent.complained:
            _keep(sweep, sent.model_copy(update={"complained": True}))
            sys.stderr.write(f"warning: on_event, for {event}: {problem}; the sweep goes on\n")
