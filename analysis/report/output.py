"""Figures and page of a report as files in its folder."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tula_hpc.errors import InputError, RunDirectoryError, TulaError
from tula_hpc.files import in_words, mistrust
from tula_hpc.formatting import keep_units, printable
from tula_hpc.python_path import missing_library
from tula_hpc.records import write_atomically

if TYPE_CHECKING:
    import jinja2

    from tula_hpc.analysis.figures.drawing import Drawing


# a figure's own files, and those that have its numbers as a table
SUFFIXES = ("svg", "png", "csv", "txt", "tex")


def figure_files(drawings: Sequence[Drawing], svgs: Sequence[str]) -> dict[str, bytes]:
    """Return each figure as SVG, PNG and CSV, by file name."""
    files: dict[str, bytes] = {}
    for drawing, svg in zip(drawings, svgs, strict=True):
        files[f"{drawing.name}.svg"] = svg.encode()
        files[f"{drawing.name}.png"] = drawing.png()
        files[f"{drawing.name}.csv"] = drawing.table.to_csv().encode()
    return files


def replace_files(folder: Path, figures: Iterable[str], files: Mapping[str, bytes]) -> list[Path]:
    """Write a report's files; delete figures of an earlier report that this one does not have.

    Raises:
        RunDirectoryError: It is no folder, belongs to another user, or is a link to somewhere else.
        StorageError: A file cannot be written.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        message = "is not a folder, or lies below a file; move it away, or name another folder"
        raise RunDirectoryError(message, source=folder) from None
    if reason := mistrust(folder):
        raise RunDirectoryError(reason, source=folder)
    for figure in figures:
        for suffix in SUFFIXES:
            name = f"{figure}.{suffix}"
            if name not in files:
                # it would seem to belong to this report
                (folder / name).unlink(missing_ok=True)
    for name, content in files.items():
        write_atomically(folder / name, content)
    return [folder / name for name in files]


def exit_code_of(action: Callable[[], None], folder: Path) -> int:
    """Run a command over a folder and return its exit code: 0 done, 1 failed, 2 bad input."""
    try:
        action()
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except ModuleNotFoundError as error:
        sys.stderr.write(f"{missing_library(error.name or 'library')}\n")
        return 2
    except TulaError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"{error.filename or folder}: {in_words(error)}\n")
        return 1
    return 0


def render_page(template: str, page: Mapping[str, Any]) -> str:
    """Return HTML from a template beside this file; everything not marked as safe is escaped."""
    return printable(_environment().get_template(template).render(page))


# of a command: its hyphens are no place to end a line
_OPTION = re.compile(r"(?<!\S)--?[a-z][\w-]*")


# cached: compiling a template takes ten times as long as filling it in
@functools.cache
def _environment() -> jinja2.Environment:
    import jinja2
    from markupsafe import Markup, escape

    # late: it computes with NumPy, which a command's --help does without
    from tula_hpc.analysis.report.tables import numbers_as_text

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    def in_one_piece(text: str) -> Markup:
        whole = r'<span class="option">\g<0></span>'
        return Markup(_OPTION.sub(whole, str(escape(keep_units(text)))))  # noqa: S704 - escaped before

    environment.filters["keep_units"] = in_one_piece
    environment.filters["as_text"] = lambda table: numbers_as_text(table.columns, table.rows)
    return environment
