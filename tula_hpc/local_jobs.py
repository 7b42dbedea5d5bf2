"""Jobs on this machine through submitit's local executor; none is lost where the command is killed meanwhile.

submitit starts a process and then renames the pickle that it waits for: a command that is killed in between leaves a
process that waits in vain, and one that is killed a little later a job that nobody knows. Here a job takes its pickle
itself, by a rename that says which job of the submission it is, and of which process. Where somebody else has taken
the pickle away before, the job never runs.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from signal import SIGKILL
from typing import Any

from submitit import Job
from submitit.core.utils import DelayedSubmission
from submitit.local.local import LocalExecutor

from tula_hpc.job_pickle import job_command, write_pickle
from tula_hpc.local_alive import hold_lock


def take_pickle(folder: Path, index: int) -> list[str]:
    """Shell lines that make `task-<index>.pkl` the shell's own, under the name by which the job looks for it."""
    place = shlex.quote(str(folder))
    return [
        f"exec </dev/null >>{place}/$$_shell.out 2>&1",  # the command's own would stay open until the job ends
        f"mv {place}/task-{index}.pkl {place}/{index}-$$.pkl",
    ]


def run_controller(folder: Path) -> str:
    """A shell line that runs the job under a controller of ours; submitit's own, which would follow, never starts.

    Unless the controller was killed, the job's lock goes, as `was_killed` wants it.
    """
    command = shlex.join([sys.executable, "-m", "tula_hpc.submitit_controller", str(folder)])
    lock = f"{shlex.quote(str(folder))}/$$.lock"
    return f"{{ {command}; code=$?; [ $code -eq {128 + SIGKILL} ] || rm -f {lock}; exit $code; }}"


def begun(folder: Path, count: int) -> list[str]:
    """Ids of a submission's jobs, for a command that goes on; "" for each that has not begun, and now never will."""
    for index in range(count):
        (folder / f"task-{index}.pkl").unlink(missing_ok=True)
    ids = dict(path.stem.split("-") for path in folder.glob("[0-9]*-[0-9]*.pkl"))
    return [ids.get(str(index), "") for index in range(count)]


class TakingExecutor(LocalExecutor):
    """submitit's executor for jobs that take their pickles themselves; all are there before the first job starts."""

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[Job[Any]]:
        for delayed in delayed_submissions:
            delayed.set_timeout(self.parameters["timeout_min"], self.max_num_timeout)
        folder, setup = Path(self.folder), self.parameters["setup"]
        hashes = [write_pickle(folder, index, delayed) for index, delayed in enumerate(delayed_submissions)]
        return [self._start(index, sha256, setup) for index, sha256 in enumerate(hashes)]

    def _start(self, index: int, sha256: str, setup: Sequence[str]) -> Job[Any]:
        folder = Path(self.folder)
        self.parameters["setup"] = [*take_pickle(folder, index), *setup, *hold_lock(folder), run_controller(folder)]
        return self._submit_command(job_command(self.python, folder, index, sha256))
