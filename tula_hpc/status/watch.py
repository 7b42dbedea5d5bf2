"""`tula status RUN --watch`: the state of a run, shown again and again until it has ended.

On a terminal the state is redrawn in place. Elsewhere, as in a log, a line is printed whenever
something has changed, and every few minutes as a sign of life.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext

from tula_hpc.env import can_redraw
from tula_hpc.errors import RunDirectoryError
from tula_hpc.files import write_out
from tula_hpc.formatting import format_left, plural, printable, with_own_escapes
from tula_hpc.status.jobs import JobPhase, JobStatus, work_in
from tula_hpc.status.run_status import RunStatus, State
from tula_hpc.status.text import status_text

# seconds between two looks; more for Slurm, whose controller serves others, too
PAUSE_S = 2.0
SLURM_PAUSE_S = 10.0
# seconds after which an unchanged state is repeated in a log
LOG_EVERY_S = 300.0
# states in which nothing goes on by itself
ENDED: frozenset[State] = frozenset({"finished", "failed", "stopped", "over"})
# looks in a row that must find such a state: between two jobs nothing may run for a moment
ENDED_LOOKS = 2
# further looks at a run that cannot be read, as while its file server does not answer
FURTHER_LOOKS = 5


def watch(look: Callable[[], RunStatus], pause: Callable[[float], None] = time.sleep) -> int:
    """Show the state until the run has ended, or Ctrl-C; return the last state's exit code.

    Raises:
        RunDirectoryError: The directory holds no run, or still cannot be read after some looks.
    """
    last = 0
    try:
        with ScreenDisplay() if can_redraw(sys.stdout) else nullcontext(LogDisplay()) as display:
            looks = 0
            status = look()
            while True:
                last = status.exit_code
                display.show(status)
                looks = looks + 1 if status.state in ENDED else 0
                if status.state == "finished" or looks >= ENDED_LOOKS:
                    return last
                on_slurm = status.scheduler.executor == "slurm"
                pause_s = SLURM_PAUSE_S if on_slurm else PAUSE_S
                pause(pause_s)
                status = _look_again(look, pause, pause_s)
    except KeyboardInterrupt:
        return last


def _look_again(
    look: Callable[[], RunStatus], pause: Callable[[float], None], pause_s: float
) -> RunStatus:
    for _ in range(FURTHER_LOOKS):
        try:
            return look()
        except RunDirectoryError:
            pause(pause_s)
    return look()


class ScreenDisplay:
    """Display that rich redraws in place on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=with_own_escapes(sys.stdout), highlight=False, markup=False)
        self.live = Live(console=console, auto_refresh=False, transient=True)
        self.last: RunStatus | None = None

    def __enter__(self) -> ScreenDisplay:
        self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the last state on the screen, in full length."""
        self.live.stop()
        if self.last is not None:
            write_out(status_text(self.last, shutil.get_terminal_size((110, 40)).columns))

    def show(self, status: RunStatus) -> None:
        """Draw a state."""
        from rich.text import Text

        self.last = status
        text = status_text(status, self.live.console.width)
        self.live.update(Text(printable(text.rstrip("\n"))), refresh=True)


class LogDisplay:
    """Display that prints a line on standard output whenever something has changed."""

    def __init__(self) -> None:
        self.last = ""
        self.printed_at = 0.0

    def show(self, status: RunStatus) -> None:
        """Print a state if it has changed apart from the time left, or after `LOG_EVERY_S`."""
        line = state_line(status)
        if line == self.last and time.monotonic() - self.printed_at < LOG_EVERY_S:
            return
        self.last = line
        self.printed_at = time.monotonic()
        clock = time.strftime("%H:%M:%S", time.localtime(status.asked_at))
        # not `write_out`: if the reader is gone, as with `| head`, this raises and ends the command
        sys.stdout.write(f"{clock} {', '.join([line, *left_of(status)])}\n")
        sys.stdout.flush()


def left_of(status: RunStatus) -> list[str]:
    """Say how long the present stage still takes; empty if unknown."""
    training = status.training
    profile = status.profile
    if training is not None and training.stand == "running":
        return [] if training.left_s is None else [format_left(training.left_s)]
    if profile is None or profile.left_s is None:
        return []
    return [format_left(profile.left_s, is_most=profile.wanted is not None)]


def state_line(status: RunStatus) -> str:
    """Describe a state in one line: what it means, the progress, and why jobs wait."""
    parts = [f"{status.state}: {status.words}"]
    if status.study is not None:
        ended = status.study.finished + status.study.diverged
        parts.append(f"{ended} of {plural(status.study.cells, 'training')} done")
    elif status.training is not None:
        of = f" of {status.training.epochs}" if status.training.epochs else ""
        parts.append(f"{round(status.training.epoch, 1):g}{of} epochs done")
    elif status.profile is not None:
        parts.append(f"{plural(status.profile.measured, 'configuration')} measured")
    if waiting := work_in(status.jobs, JobPhase.WAITING):
        parts.append(_waits(waiting[0], len(waiting)))
    return ", ".join(parts)


def _waits(job: JobStatus, count: int) -> str:
    why = job.waits_for or job.reason
    waiting = f"{plural(count, 'job')} waiting"
    if not why:
        return waiting
    if job.stuck:
        why += "; this does not go away by itself"
    return f"{waiting} ({why})"
