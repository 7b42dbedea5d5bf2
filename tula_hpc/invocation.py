"""How a user calls the commands from where he is: what a message tells him to type has to run as it stands."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from tula_hpc.search_path import PROGRAM, start_of_python


def command_line(*words: str) -> str:
    """Return the shell line that runs a command of this very installation, such as `tula status RUN`.

    The script is named with its folder where the shell would not find it, and where there is none
    the interpreter is.

    Args:
        words: The command and its arguments, as the command would get them.
    """
    return shlex.join([*_program(), *words])


def _program() -> list[str]:
    beside, running, found = (
        Path(sys.executable).with_name(PROGRAM),
        Path(sys.argv[0]),
        shutil.which(PROGRAM),
    )
    own = [path for path in (beside, running) if path.name == PROGRAM and path.exists()]
    if found is not None and any(path.samefile(found) for path in own):
        return [PROGRAM]
    if os.access(beside, os.X_OK):
        return [str(beside)]
    return [*start_of_python(), "-m", "tula_hpc"]
