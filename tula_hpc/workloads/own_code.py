"""Running the user's code: what it raises is a mistake of the user's, told in a line, unless memory ran out."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import default_collate

from tula_hpc.errors import InputError
from tula_hpc.memory_errors import out_of_memory
from tula_hpc.nested import Batch

_CALLERS = ("entry_points.py", "fitting.py", "own_code.py")  # errors of the user's code come through, not from them


@contextlib.contextmanager
def blamed(key: str, words: str, hint: str = "") -> Iterator[None]:
    """What the block raises becomes one line.

    Args:
        key: Of the sweep file.
        words: Before what was raised.
        hint: After it.

    Raises:
        InputError: For whatever was raised, but for want of memory, which is no mistake and has remedies of its own.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if out_of_memory(error) is not None:
            raise
        raise InputError(f"{words}: {told(error)}{hint}", key=key) from error


def told(error: Exception) -> str:
    """What an error of the user's code says, in a line: its kind, its words, and the place."""
    words = str(error).strip().partition("\n")[0]
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [(path, line) for path, line in frames if "site-packages" not in path.parts and path.name not in _CALLERS]
    place = f" ({own[-1][0].name}:{own[-1][1]})" if own else ""
    return f"{type(error).__name__}{': ' if words else ''}{words}{place}"


def collate(items: list[Any], what: str = "has samples") -> Batch:
    """A batch of samples.

    Raises:
        InputError: They are not built alike.
    """
    words = f"{what} that cannot be put into one batch"
    with blamed("workload.dataset", words, "; expected the same shapes, padded or cut"):
        return default_collate(items)
