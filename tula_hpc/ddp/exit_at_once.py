"""End a failed worker at once, without waiting for destructors and threads.

At the interpreter's end NCCL's destructors wait for peers that may not come, for up to the time
limit of a collective. Python waits for every thread that is not a daemon. Meanwhile the process is
alive, so neither `srun -K1` nor its peers notice the failure. The record and the traceback, which
must be kept, are on disk by then.
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
    """End the process of a worker with peers right after the block's exception is printed.

    The exception propagates, and Python prints it before the interpreter shuts down.
    """
    try:
        yield
    except BaseException as error:
        if has_peers():
            _leave_with_the_interpreter(_exit_code(error))
        raise


def _exit_code(error: BaseException) -> int:
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1


def _leave_with_the_interpreter(exit_code: int) -> None:
    """Exit before Python waits for threads and before it calls any other exit function.

    Python calls exit functions only after it has waited for threads. So a daemon thread exits, too,
    as soon as the main thread has ended.
    """
    atexit.register(_leave, exit_code)

    def leave_after_the_main_thread() -> None:
        threading.main_thread().join()
        _leave(exit_code)

    # at the limit on processes no thread can start; that must not hide the first error
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
