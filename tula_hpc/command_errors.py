"""Turn errors of a command into one clear line and an exit code."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable

from tula_hpc.env import begin_process
from tula_hpc.errors import InputError, TulaError
from tula_hpc.files import drop_output, in_words

# of a command that says itself what it leaves once it works
NOTHING_BEGUN = "interrupted before anything was begun"


def exit_code_of(
    run: Callable[[argparse.Namespace], int], options: argparse.Namespace, interrupted: str = ""
) -> int:
    """Run a command and return its exit code.

    0: done; 1: a stage failed; 2: bad input; 130: interrupted; 141: the output was closed.

    Args:
        run: The command.
        options: Its argument.
        interrupted: Is said where nothing in the command takes the interrupt.
    """
    begin_process()
    # a killed login session ends like Ctrl-C: nothing is lost
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = run(options)
        sys.stdout.flush()
        return code
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except TulaError as error:
        # of the commands that work on a run
        kept = "; finished work is kept" if hasattr(options, "run_dir") else ""
        sys.stderr.write(f"{error}\nFix the cause and run the same command again{kept}.\n")
        return 1
    except BrokenPipeError:
        drop_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        sys.stderr.write(
            f"{where}{in_words(error)}\nFix the cause and run the same command again.\n"
        )
        return 1
    except KeyboardInterrupt:
        if interrupted:
            sys.stderr.write(f"\n{interrupted}\n")
        return 130
