"""How a worker leaves a job in which it has failed: at once, whatever destructors and threads would wait for.

At the interpreter's end NCCL's destructors wait for peers that may not come, for up to the time
limit of a collective, and Python waits for every thread that is not a daemon. All the while the
process lives, so that neither `srun -K1` nor its peers notice the failure. What must be kept is on
disk by then: the record and the traceback.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator

from tula_hpc.env import has_peers


@contextlib.contextmanager
def leaving_at_once() -> Iterator[None]:
    """Have the process of a worker with peers end right after what the block raises has been reported.

    The exception goes on its way: Python prints it before the interpreter's end begins.
    """
    try:
        yield
    except BaseException as error:
        if has_peers():
            _leave_with_the_interpreter(_exit_code(error))
        raise


def _exit_code(error: BaseException) -> int:
    """Return the code that Python would end with."""
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1


def _leave_with_the_interpreter(exit_code: int) -> None:
    """Arrange for it before threads are waited for, and before any other function that is called at exit.

    Python offers a hook for the latter only. It waits for threads before, after the main one has
    ended.
    """
    atexit.register(_leave, exit_code)

    def leave_after_the_main_thread() -> None:
        threading.main_thread().join()
        _leave(exit_code)

    # no thread can be had where the limit on processes is reached: the error must not get lost for
    # that
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=leave_after_the_main_thread, daemon=True, name="leaving").start()


def _leave(exit_code: int) -> None:
    try:
        for process in multiprocessing.active_children():
            process.kill()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(exit_code)
