"""Folder in which a script runs: it finds the user's files there, and what it writes stays there.

Small folders are made anew, with links to their files; a folder with many entries holds data, and
becomes a single link. Before the script writes to one of the user's files, a copy takes the place
of its link: a profile of some steps must not replace what a training of days has saved. Run
directories are not shown: a script that looks for its newest checkpoint would find a profile's
there. What the script names in the folder above, as `../data`, is shown beside its own folder.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import importlib
import itertools
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tula_hpc.errors import StorageError
from tula_hpc.records import RunDirectory, append_record, read_records
from tula_hpc.records.base import Record

# most entries in all folders that are made anew together; the other folders hold data
MOST_ENTRIES = 1000
# bytes; a larger file is not copied before the script changes it, as that would take too long
MOST_BYTES = 2**30
# endings of files in which scripts save their state
OF_WEIGHTS = (".pt", ".pth", ".ckpt", ".tar", ".bin", ".safetensors", ".pkl", ".distcp")
# file beside a script's folder with a line for each time that the script saves, wherever it does
SAVED = "saved.jsonl"
# functions that open a file without Python's `open`, and the name of their second argument, the file
WRITERS = (("torch", "save", "f"), ("safetensors.torch", "save_file", "filename"))
# audit events by which a file gets a further name, their second argument
RENAMING = ("os.rename", "os.link", "os.symlink")


class Saved(Record):
    """Point of a training at which its script has saved."""

    # Unix time
    at: float
    step: int
    samples_seen: int
    # epochs completed, and samples seen of the current one
    epoch: int
    offset: int


class SavedAs(Record):
    """Name of a file in which a script has saved, in any folder."""

    # "": unknown, as of a stream that a library uploads
    name: str


def own_folder(path: Path, home: Path, above: Iterable[str] = ()) -> Path:
    """Make a folder that shows the entries of the working directory, and return it.

    Those entries of the folder above that `above` names appear beside it. An entry that contains
    the folder itself, as `runs` does, becomes a folder with links to the rest: to walk through a
    link to it would never end.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    home = home.resolve()
    own = path.resolve()
    _show(path, _shown_of(home), own, MOST_ENTRIES)
    named = [home.parent / name for name in above if name != path.name]
    _show(path.parent, [entry for entry in named if entry.exists()], own, MOST_ENTRIES)
    return path


def newest_in(folder: Path, pattern: str) -> str:
    """Return the newest file or folder that matches a pattern; without one, the pattern."""
    names = glob.glob(pattern, root_dir=folder)  # noqa: PTH207 # Path.glob takes no absolute pattern
    # a link may lead to a file that is gone
    found = [name for name in names if (folder / name).exists()]
    return max(found, key=lambda name: ((folder / name).stat().st_mtime, name), default=pattern)


def last_saved_in(folder: Path) -> float | None:
    """Return the Unix time at which a script in this folder last saved; None: it has not."""
    weights = (path for path in folder.rglob("*") if path.suffix in OF_WEIGHTS)
    # the script may have saved outside this folder, too
    files = [*weights, folder.with_name(SAVED)]
    # a link leads to a file that was there before
    own = (path for path in files if path.is_file() and not path.is_symlink())
    return max((path.stat().st_mtime for path in own), default=None)


def places_saved_in(folder: Path) -> list[Saved]:
    """Return the points at which a training in this folder has saved, as far as they were noted."""
    # lines with names are skipped
    return read_records(Saved, [folder.with_name(SAVED)]).records


def names_saved_in(folder: Path) -> set[str]:
    """Return the names that a script in this folder has given to its files of weights anywhere."""
    return {each.name for each in read_records(SavedAs, [folder.with_name(SAVED)]).records}


def _show(path: Path, entries: Iterable[Path], own: Path, room: int) -> None:
    for entry in entries:
        if entry == own:
            continue
        shown = path / entry.name
        # another worker has been faster, or the script has made an entry of this name
        with contextlib.suppress(FileExistsError):
            if own.is_relative_to(entry):
                shown.mkdir(mode=0o700, exist_ok=True)
                _show(shown, _shown_of(entry), own, room=0)
                continue
            count = _entries_of(entry, own, room)
            if count > room:
                shown.symlink_to(entry)
            else:
                room -= count
                _make_anew(shown, entry)


def _shown_of(folder: Path) -> list[Path]:
    return [entry for entry in sorted(folder.iterdir()) if not _is_run(RunDirectory(entry))]


def _is_run(run: RunDirectory) -> bool:
    try:
        return run.events_file.is_file() and run.sweep_file.is_file()
    except OSError:
        # somebody else's folder, which may not be searched
        return False


def _entries_of(entry: Path, own: Path, most: int) -> int:
    """Count all entries below a folder, up to `most` + 1; return that for a file as well."""
    is_visible = not entry.name.startswith(".") and entry.is_dir()
    if not is_visible or own.is_relative_to(entry.resolve()):
        return most + 1
    try:
        return sum(1 for _ in itertools.islice(_walk(entry), most + 1))
    except OSError:
        # the folder may not be readable
        return most + 1


def _walk(folder: str | Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path)


def _make_anew(path: Path, folder: Path) -> None:
    path.mkdir(mode=0o700, exist_ok=True)
    for entry in _shown_of(folder):
        with contextlib.suppress(FileExistsError):
            if entry.is_dir() and not entry.is_symlink():
                _make_anew(path / entry.name, entry)
            else:
                (path / entry.name).symlink_to(entry)


def spare_files(folder: Path, place: Callable[[], Saved | None]) -> None:
    """Keep this process, until it ends, from writing through links to the user's files.

    When the script saves, `place` is called for the point of its training; None: it has none.
    """
    sparing = _Sparing(folder, place)
    sys.addaudithook(sparing)
    for module, name, argument in WRITERS:
        with contextlib.suppress(ImportError):
            library = importlib.import_module(module)
            setattr(library, name, sparing.around(getattr(library, name), argument))


class _Sparing:
    """Audit hook (PEP 578), and wrapper of functions that open files in other ways."""

    def __init__(self, folder: Path, place: Callable[[], Saved | None]) -> None:
        self._folder = folder.resolve().parent
        self._saved = folder.with_name(SAVED)
        self._place = place
        self._noted: int | None = None
        self._names = set[str]()

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR):
                self.spare(path, is_read=not flags & os.O_TRUNC)
                if _name_of(path).endswith(OF_WEIGHTS):
                    self._note_saved(path)
        elif event in ("os.truncate", "sqlite3.connect"):
            self.spare(arguments[0], is_read=True)
        elif event in RENAMING and self._names:
            # before it has saved anything, the script renames only files that it fetches
            name = _name_of(arguments[1])
            if name.endswith(OF_WEIGHTS):
                self._note_name(name)

    def around(self, write: Any, argument: str) -> Any:
        @functools.wraps(write)
        def spared(*given: Any, **named: Any) -> Any:
            file = given[1] if len(given) > 1 else named.get(argument)
            self.spare(file, is_read=False)
            self._note_saved(file)
            return write(*given, **named)

        return spared

    def _note_saved(self, file: Any) -> None:
        place = self._place()
        with contextlib.suppress(OSError, StorageError):
            if place is None or place.step == self._noted:
                self._saved.touch()
            else:
                append_record(self._saved, place, durable=False)
                self._noted = place.step
        self._note_name(_name_of(file))

    def _note_name(self, name: str) -> None:
        # ValueError: the name is no Unicode text
        with contextlib.suppress(OSError, StorageError, ValueError):
            if name not in self._names:
                append_record(self._saved, SavedAs(name=name), durable=False)
                self._names.add(name)

    def spare(self, file: Any, *, is_read: bool) -> None:
        """Put a file of the script's own in the place of a link to one of the user's files.

        The content is copied if `is_read`. A `file` that is no path, as a descriptor, is ignored.
        """
        if not isinstance(file, str | bytes | os.PathLike):
            return
        # an error here is left for the script to meet itself
        with contextlib.suppress(OSError, ValueError):
            link = Path(os.fsdecode(file)).absolute()
            if not link.is_symlink() or not self._is_inside(link.parent):
                return
            target = link.resolve()
            is_large = is_read and target.stat().st_size > MOST_BYTES
            if self._is_inside(target) or not target.is_file() or is_large:
                return
            copy = link.with_name(f"{link.name}.{os.getpid()}")
            if is_read:
                shutil.copyfile(target, copy)
            else:
                copy.touch()
            shutil.copymode(target, copy)
            copy.replace(link)

    def _is_inside(self, path: Path) -> bool:
        return path.resolve().is_relative_to(self._folder)


def _name_of(file: Any) -> str:
    """Return the name of a path or of an open file, without its folder; "": it has none."""
    path = file if isinstance(file, str | bytes | os.PathLike) else getattr(file, "name", "")
    return Path(os.fsdecode(path)).name if isinstance(path, str | bytes | os.PathLike) else ""
