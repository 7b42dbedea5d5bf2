"""What the user sees while stages run: a live line on a terminal, plain lines in a log."""

from __future__ import annotations

import contextlib
import sys
import time
from types import TracebackType
from typing import Protocol

from tula_hpc.printable import printable, printable_output, with_own_escapes

LOG_EVERY_S = 60.0  # in a log an unchanged state is repeated this often, as a sign of life


class StageProgress(Protocol):
    """Shown while one stage runs; a context manager."""

    def __enter__(self) -> StageProgress:
        """Start showing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop showing."""

    def update(self, done: float, total: float, text: str) -> None:
        """How much of the stage is done, and what it is doing."""


def stage_progress(stage: str) -> StageProgress:
    """A bar on a terminal, lines elsewhere."""
    return BarProgress(stage) if sys.stderr.isatty() else LineProgress(stage)


class BarProgress:
    """A rich progress bar on standard error."""

    def __init__(self, stage: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("[bold]{task.fields[stage]:<8}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
        )
        self.bar = Progress(*columns, console=Console(file=with_own_escapes(sys.stderr)))
        self.cleaning = contextlib.ExitStack()
        self.task = self.bar.add_task("", stage=stage, total=None)

    def __enter__(self) -> BarProgress:
        """Start drawing."""
        self.bar.start()
        # rich has put itself in the place of both streams, and takes escapes in what is printed meanwhile for its own
        self.cleaning.enter_context(printable_output())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the bar as it is."""
        self.cleaning.close()
        self.bar.stop()

    def update(self, done: float, total: float, text: str) -> None:
        """Redraw."""
        self.bar.update(self.task, completed=done, total=total, description=printable(text))


class LineProgress:
    """A line on standard error whenever something changes."""

    def __init__(self, stage: str) -> None:
        self.stage, self.last, self.printed_at = stage, "", 0.0

    def __enter__(self) -> LineProgress:
        """Nothing to start."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to stop."""

    def update(self, done: float, total: float, text: str) -> None:
        """Print if it is news, or if nothing was said for long."""
        line = f"{self.stage}: {done:.4g} of {total:.4g}: {text}"
        if line == self.last and time.monotonic() - self.printed_at < LOG_EVERY_S:
            return
        self.last, self.printed_at = line, time.monotonic()
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
