"""Run a user's training script as this process's main program, watched from its first line on.

    python -m tula_hpc.attach.child SPEC.json

A job's worker starts such a process anew for each profile or training, see `processes.start`. The
mode (`reporting.Mode`) acts at each step, and judges the script's end.
"""

from __future__ import annotations

import atexit
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tula_hpc.attach import script
from tula_hpc.attach.hangs import answer_where
from tula_hpc.attach.reporting import ChildSpec, Mode, kill_daemons, leave
from tula_hpc.env import be_child_of, loading_libraries
from tula_hpc.launch.job_specs import resolve
from tula_hpc.records import parse_record

# subclass of `Mode` for each mode of a `ChildSpec`
MODES = {
    "profile": "tula_hpc.attach.script_profile:ScriptProfile",
    "look": "tula_hpc.attach.script_profile:ScriptProfile",
    "train": "tula_hpc.attach.train.keeping:KeptTraining",
}
# files of the functions that call the script
CALLERS = (__file__, script.__file__, "<frozen runpy>")


def main(arguments: Sequence[str]) -> int:
    """Run the script; return its exit code where the mode lets it end by itself."""
    (path,) = arguments
    spec = parse_record(ChildSpec, Path(path).read_bytes())
    be_child_of(spec.parent)
    if spec.answers is not None:
        answer_where(spec.answers)
    # this signal is for the worker, which decides what it means
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    with loading_libraries():
        mode = resolve(MODES[spec.mode])(spec)
    mode.begin()
    return _run(mode)


def _run(mode: Mode) -> int:
    # after the script's own exit functions, and before Python waits for daemon processes
    atexit.register(_end_daemons)
    try:
        code = _run_script(mode)
        message = mode.ended(code)
    except BaseException as error:  # noqa: BLE001 # a script may raise anything
        mode.fail(error.with_traceback(_from_script(error.__traceback__)))
    mode.say(message)
    if mode.spec.mode != "train":
        leave(0 if message.state == "done" else 1)
    return code


def _end_daemons() -> None:
    # torch raises wherever the main thread is once its loader is killed
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    kill_daemons()


def _run_script(mode: Mode) -> int:
    try:
        mode.spec.program.run(mode.spec.home)
    except SystemExit as error:
        return _code_of(error)
    return 0


def _from_script(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the script's first line on, as Python itself would show it."""
    part = trace
    while part is not None and part.tb_frame.f_code.co_filename in CALLERS:
        part = part.tb_next
    return part or trace


def _code_of(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    # Python prints any other code, and exits with 1
    sys.stderr.write(f"{error.code}\n")
    return 1


if __name__ == "__main__":
    try:
        exit_code = main(sys.argv[1:])
    except SystemExit:
        raise
    except BaseException:  # noqa: BLE001 # of this package: the worker sees that nothing was said
        sys.stderr.write(traceback.format_exc())
        leave(1)
    sys.exit(exit_code)
