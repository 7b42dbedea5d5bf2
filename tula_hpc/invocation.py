"""Command lines for messages: a command that a message suggests has to run as it stands."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from tula_hpc.python_path import PROGRAM, start_of_python


def command_line(*words: str) -> str:
    """Return the shell line of a command of this very installation, such as `tula status RUN`.

    The script is named with its folder where the shell would not find it; without a script, the
    interpreter is named.

    Args:
        words: The command and its arguments, unquoted.
    """
    return shlex.join([*_program(), *words])


def _program() -> list[str]:
    script = Path(sys.executable).with_name(PROGRAM)
    running = Path(sys.argv[0])
    on_path = shutil.which(PROGRAM)
    own = [path for path in (script, running) if path.name == PROGRAM and path.exists()]
    if on_path is not None and any(path.samefile(on_path) for path in own):
        return [PROGRAM]
    if os.access(script, os.X_OK):
        return [str(script)]
    return [*start_of_python(), "-m", "tula_hpc"]
