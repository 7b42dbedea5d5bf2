"""Turn errors of a command into one clear line and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from tula_hpc.env import begin_process
from tula_hpc.errors import (
    CancelledJobError,
    DivergedError,
    InputError,
    StorageError,
    TrialError,
    TulaError,
)
from tula_hpc.files import NO_SPACE, drop_output, full_disk, in_words
from tula_hpc.formatting import printable_output
from tula_hpc.python_path import missing_library

# last line of a failed command that works on a run, and of its controller job (`cli/detached.py`)
TRY_AGAIN_ON_A_RUN = "Fix the cause and run the same command again; finished work is kept."
# last line of any other failed command
TRY_AGAIN = "Fix the cause and run the same command again."
# happens after `rm -r` and a new clone, or when a site cleans its scratch file system
FOLDER_DELETED = (
    "the working directory has been deleted: cd to a folder that exists, even if it has the same "
    "name\n"
)
# exit code that a shell reports for a command that SIGINT ended
INTERRUPTED = 128 + signal.SIGINT
# printed on an interrupt before the command starts its work; later it says itself what it leaves
NOTHING_BEGUN = "interrupted before anything was begun"


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """End the process on Ctrl-C in this block, until a command in it takes over (`exit_code_of`).

    TERM does the same if it has the handler of Ctrl-C. Compiled modules, those of scipy and
    pydantic among them, and the import of any module may swallow a KeyboardInterrupt, or turn it
    into an error of their own.
    """
    # a script's background job ignores SIGINT, and only the main thread may set handlers
    can_take = threading.current_thread() is threading.main_thread()
    taken = [
        each
        for each in (signal.SIGINT, signal.SIGTERM)
        if can_take and signal.getsignal(each) is signal.default_int_handler
    ]
    if can_take and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        # set while `tula` was loading
        taken.append(signal.SIGINT)
    for each in taken:
        signal.signal(each, _end)
    try:
        yield
    finally:
        for each in taken:
            signal.signal(each, signal.default_int_handler)


def _end(_number: int, _frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"\n{NOTHING_BEGUN}\n".encode())
    os._exit(INTERRUPTED)


def _take_interrupts() -> None:
    # only the main thread may set handlers
    if threading.current_thread() is not threading.main_thread():
        return
    # the end of a login session sends TERM: like after Ctrl-C, nothing is lost
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# argparse's message on a word that is none of an argument's choices; with quotes until Python 3.11
_NO_CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)")


class CommandParser(argparse.ArgumentParser):
    """Command-line parser that reports a mistake in one line and suggests the closest option."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register("type", Path, _path)

    def parse_args(  # type: ignore[override] # the standard library has overloads for other namespaces
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        """Parse arguments; exit with 2 on a mistake, or if the working directory is deleted."""
        options: argparse.Namespace
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            meant = _meant(unknown[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        try:
            Path.cwd()
        except FileNotFoundError:
            self.exit(2, FOLDER_DELETED)
        return options

    def error(self, message: str) -> NoReturn:
        """Print a mistake and how to list the options, without argparse's usage block."""
        if wrong := _NO_CHOICE.search(message):
            message += _meant(wrong[1], re.findall(r"[\w-]+", wrong[2]))
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add `--set`, for keys of a sweep and its cluster."""
    parser.add_argument(
        "--set",
        type=_assignment,
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override a key of the sweep; cluster.KEY=VALUE for a key of the cluster, and "
        "cluster.partitions.NAME.KEY=VALUE for one of a partition; repeatable",
    )


def _assignment(text: str) -> str:
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"expected section.key=value in one word, got {text!r}")
    return text


def _path(text: str) -> Path:
    # Path("") is the working directory, which nobody means by an unset shell variable
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got an empty text")
    return Path(text)


def _meant(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def command(
    parser: Callable[[], argparse.ArgumentParser],
    run: Callable[[argparse.Namespace], int],
    interrupted: str = "",
) -> Callable[..., int]:
    """Return a command's `main`, from its arguments (default: the process's) to the exit code."""

    @printable_output()
    def main(arguments: Sequence[str] | None = None) -> int:
        return exit_code_of(run, parser().parse_args(arguments), interrupted)

    return main


def exit_code_of(
    run: Callable[[argparse.Namespace], int],
    options: argparse.Namespace,
    interrupted: str = "",
    *,
    again: bool = True,
) -> int:
    """Run a command and return its exit code.

    0: done; 1: a stage failed; 2: bad input; 130: interrupted; 141: the output was closed.

    `interrupted` is printed on an interrupt that nothing in the command handles. `again`: a failure
    ends with the advice to run the command again.
    """
    begin_process()
    _take_interrupts()
    try:
        code = run(options)
        sys.stdout.flush()
        return code
    except (InputError, ModuleNotFoundError) as error:
        sys.stderr.write(f"{_mistake(error, options)}\n")
        return 2
    except TulaError as error:
        sys.stderr.write(f"{error}\n{_what_to_do(error, options) if again else ''}")
        return 1
    except BrokenPipeError:
        drop_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        words = in_words(error)
        if error.filename:
            words = f"{error.filename}: {words}"
        elif error.errno in NO_SPACE:
            words = _full_folder(options) or words
        is_mistake = isinstance(error, PermissionError) and _is_given(error.filename, options)
        again = again and not is_mistake
        sys.stderr.write(f"{words}\n{TRY_AGAIN}\n" if again else f"{words}\n")
        return 2 if is_mistake else 1
    except KeyboardInterrupt:
        if interrupted:
            sys.stderr.write(f"\n{interrupted}\n")
        return INTERRUPTED


def _mistake(error: InputError | ModuleNotFoundError, options: argparse.Namespace) -> str:
    if isinstance(error, ModuleNotFoundError):
        return missing_library(error.name or "library")
    if isinstance(error, TrialError):
        # a trial does not know the file of its sweep
        return f"{options.sweep}: {error}"
    return str(error)


def _what_to_do(error: TulaError, options: argparse.Namespace) -> str:
    is_gone = isinstance(error, StorageError) and error.is_folder_gone
    # the error itself says what to do
    if is_gone or isinstance(error, DivergedError):
        return ""
    if isinstance(error, CancelledJobError):
        return "Run the same command again to go on; finished work is kept.\n"
    again = TRY_AGAIN_ON_A_RUN if hasattr(options, "run_dir") else TRY_AGAIN
    return f"{again}\n"


def _is_given(path: str | None, options: argparse.Namespace) -> bool:
    """Tell whether a path is an argument of the command."""
    given: list[Path] = []
    for value in vars(options).values():
        several = value if isinstance(value, list) else [value]
        given += [Path(each).absolute() for each in several if isinstance(each, str | Path)]
    return path is not None and Path(path).absolute() in given


def _full_folder(options: argparse.Namespace) -> str:
    """Name the full folder, which a failed write does not name; "" if all of them have space."""
    named = [getattr(options, name, None) for name in ("run_dir", "run")]
    named += getattr(options, "runs", ())
    folders = [*filter(None, named), Path("runs"), Path()]
    # gettempdir() raises if it finds no folder with space
    with contextlib.suppress(OSError):
        folders.append(Path(tempfile.gettempdir()))
    return next(filter(None, map(full_disk, folders)), "")
