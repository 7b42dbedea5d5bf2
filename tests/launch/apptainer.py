"""A stand-in for `apptainer exec`: accept the options in use, write down the arguments, and run the command."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    """Check every argument and mount; then run the command in this process, with the variables that apptainer sets."""
    notes, *arguments = sys.argv[1:]
    given: dict[str, list[str]] = {"exec": [], "--nv": [], "--bind": [], "--pwd": [], "--writable-tmpfs": []}
    while arguments[0].partition("=")[0] in given:
        name, _, value = arguments.pop(0).partition("=")
        given[name].append(value)
    image, python, *command = arguments
    for mount in given["--bind"]:
        assert Path(mount.partition(":")[0]).exists(), f"no such folder: {mount}"
    assert Path(image).is_file(), image
    handed = {name[13:]: value for name, value in os.environ.items() if name.startswith("APPTAINERENV_")}
    rank = os.environ.get("SLURM_PROCID", "0")
    note = {"given": given, "python": python, "command": command, "environment": handed}
    Path(notes, f"{rank}.json").write_text(json.dumps(note))
    os.chdir(given["--pwd"][0])
    # the login node's virtual environment is not in the image
    os.environ.pop("VIRTUAL_ENV", None)
    os.environ |= handed
    os.execvp(python, [python, *command])  # noqa: S606 - as apptainer does


def make(folder: Path) -> tuple[Path, Path]:
    """Put the stand-in into a folder; return the folder for PATH and the one for the ranks' notes."""
    programs, notes = folder / "bin", folder / "notes"
    programs.mkdir()
    notes.mkdir()
    program = programs / "apptainer"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} {notes} "$@"\n')
    program.chmod(0o755)
    return programs, notes


if __name__ == "__main__":
    main()
