"""Follow metrics.jsonl, and pass on each line once to the trackers of `training.log_to`.

    python -m tula_hpc.tracking RUN LABEL TRACKER...

Rank 0 of a training's job starts the follower as a process of its own (`following`). So no tracker
takes time or memory from a step, or can end a training. Neither the built-in training nor scripts
know of it: all write the same metrics.jsonl. It ends when it is asked to, or when the process that
started it is gone, after it has passed on the last line. How far each tracker has come is in
trackers.json: a requeued training goes on in the same run of the tracker, and the steps that it
repeats are left out.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from pydantic import Field

from tula_hpc.env import begin_process
from tula_hpc.errors import RunDirectoryError
from tula_hpc.python_path import start_of_python
from tula_hpc.records import (
    AnyMetrics,
    Record,
    RunDirectory,
    TrainDirectory,
    read_document,
    write_atomically,
)
from tula_hpc.records.metrics import parse_metrics
from tula_hpc.tracking.trackers import TRACKERS, Position, Tracker

POLL_S = 2.0
# longest wait for the follower of an earlier job, which may not have noticed that job's end
LOCK_S = 60.0
# longest wait for the last lines: at the end of a training, and where its job has to leave
END_S = 60.0
LEAVE_S = 5.0
MODULE = "tula_hpc.tracking"


class Positions(Record):
    """Content of trackers.json."""

    of: dict[str, Position] = Field(default={})


class Lines:
    """Whole lines of a growing metrics.jsonl, each once; the file may come late or be replaced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.first_line = ""
        self._inode = 0
        self._offset = 0

    def new(self) -> list[AnyMetrics]:
        """Return the lines since the last call; all lines of a file that replaces the former."""
        try:
            with self.path.open("rb") as file:
                return self._read(file)
        except FileNotFoundError:
            return []

    def _read(self, file: IO[bytes]) -> list[AnyMetrics]:
        inode = os.fstat(file.fileno()).st_ino
        if inode != self._inode:
            first_line = file.readline()
            if not first_line.endswith(b"\n"):
                # the line is still being written
                return []
            self._inode = inode
            self._offset = 0
            self.first_line = hashlib.sha256(first_line).hexdigest()[:16]
        file.seek(self._offset)
        rows = []
        for line in file:
            # the last line is still being written
            if not line.endswith(b"\n"):
                break
            self._offset += len(line)
            with contextlib.suppress(ValueError):
                rows.append(parse_metrics(line))
        return rows


class Follower:
    """Follower of one training, which passes on its lines."""

    def __init__(self, files: TrainDirectory, trackers: Mapping[str, Tracker]) -> None:
        self.lines = Lines(files.metrics_file)
        self.trackers = dict(trackers)
        self.file = files.root / "trackers.json"
        self.positions: dict[str, Position] = {}
        with contextlib.suppress(FileNotFoundError, RunDirectoryError):
            self.positions = dict(read_document(Positions, self.file).of)
        self._begun: set[tuple[str, str]] = set()

    def pass_on(self) -> None:
        """Pass on the new lines; a tracker that fails is left out from then on."""
        rows = self.lines.new()
        if not rows:
            return
        for name, tracker in list(self.trackers.items()):
            try:
                self._pass_on(name, tracker, rows)
            except Exception as error:  # noqa: BLE001 - a tracker may raise anything
                del self.trackers[name]
                sys.stderr.write(
                    f"{name}: {type(error).__name__}: {error}; nothing more is passed on to it\n"
                )

    def _pass_on(self, name: str, tracker: Tracker, rows: Sequence[AnyMetrics]) -> None:
        first_line = self.lines.first_line
        position = self.positions.get(name, Position())
        if position.first_line not in ("", first_line):
            position = Position()
        if (name, first_line) not in self._begun:
            position = tracker.begin(position).model_copy(update={"first_line": first_line})
            self._begun.add((name, first_line))
        points = []
        after = position
        for row in rows:
            after, point = after.after(row)
            if point is not None:
                points.append(point)
        if points:
            tracker.write(points, position)
        self.positions[name] = after
        write_atomically(self.file, Positions(of=self.positions).model_dump_json(indent=1))

    def close(self) -> None:
        """End the trackers."""
        for name, tracker in self.trackers.items():
            try:
                tracker.close()
            except Exception as error:  # noqa: BLE001 - a tracker may raise anything
                sys.stderr.write(f"{name}: {type(error).__name__}: {error}\n")


def main(arguments: Sequence[str]) -> int:
    """Follow until the end; see the module. Returns the exit code."""
    # these signals are for the training, which saves, and then says when it is over
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    begin_process()
    root, label, *names = arguments
    files, parent = RunDirectory(Path(root)).make_train(label), os.getppid()
    with _locked(files.root / ".trackers.lock"):
        trackers = {name: TRACKERS[name](Path(root), label, files) for name in names}
        follower = Follower(files, trackers)
        is_over = False
        while not is_over:
            asked, _, _ = select.select([sys.stdin], [], [], POLL_S)
            # lines are passed on once more after the end
            is_over = bool(asked) or os.getppid() != parent
            follower.pass_on()
        follower.close()
    return int(len(follower.trackers) < len(names))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait for the follower of an earlier job; go on without a lock if none can be had."""
    deadline = time.monotonic() + LOCK_S
    with path.open("a") as file:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.5)
            except OSError:
                break
        yield


@contextlib.contextmanager
def following(root: Path, label: str, names: Sequence[str]) -> Iterator[None]:
    """Follow a training's metrics while the block runs, and for a while after it."""
    log_file = RunDirectory(root).make_train(label).root / "trackers.log"
    command = [*start_of_python(), "-m", MODULE, str(root), label, *names]
    try:
        with log_file.open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
    except OSError as error:
        sys.stderr.write(f"training.log_to: the follower could not be started: {error}\n")
        yield
        return
    # if the block raises, the job has to leave, or has failed
    patience_s = LEAVE_S
    try:
        yield
        patience_s = END_S
    finally:
        _end(process, patience_s, log_file)


def _end(process: subprocess.Popen[bytes], patience_s: float, log_file: Path) -> None:
    try:
        # to close the pipe is not enough while loader processes have it open, too
        process.communicate(b"end\n", timeout=patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.returncode:
        sys.stderr.write(f"training.log_to: not all metrics were passed on; see {log_file}\n")
