"""Keep the working directory, which may be a stranger's run, off the path that Python searches.

`python -m` puts that directory first, as does an empty entry of PYTHONPATH: a `json.py` there would
run in place of the library's. Modules that Python itself imports before this package cannot be
protected here: in some set-ups `warnings` and `contextlib` are among them. The script `tula` and
`python -P` leave the working directory out from the beginning.
"""

# Import only modules that every Python has loaded by now: any other, `__future__` included, could
# come from the working directory.
import os
import sys

PROGRAM = "tula"
_HERE = os.path.dirname(__file__)
_PACKAGE = __name__.partition(".")[0]
_STANDARD_LIBRARY = os.path.dirname(os.__file__)


def starts_a_command() -> bool:
    """Tell whether this process is `tula` or `python -m tula_hpc…`, not a user's own program."""
    # runpy's placeholder while it looks for the module
    if sys.argv[:1] == ["-m"]:
        module = sys.orig_argv[-len(sys.argv)]
        module = module.partition("m")[2] if module.startswith("-") else module
        return module.partition(".")[0] == _PACKAGE
    return bool(sys.argv) and os.path.basename(sys.argv[0]) == PROGRAM


def drop_working_directory() -> None:
    """Take the working directory off the path, here and for the processes that this one starts.

    It stays if PYTHONPATH names it in full, or if this very package is found nowhere else: a user
    who runs an uninstalled copy from its own folder trusts that folder.
    """
    path = _without_working_directory()
    if not _finds_this_package(path):
        return
    sys.path[:] = path
    named = _named_in_environment()
    kept = [entry for entry in named if os.path.isabs(entry) or not _is_working_directory(entry)]
    if kept != named:
        os.environ["PYTHONPATH"] = os.pathsep.join(kept)


def refuse_without_libraries() -> None:
    """End a command if this Python lacks pydantic, which each command and each job imports.

    Raises:
        SystemExit: pydantic is missing; the exit code is that of bad input.
    """
    if not _file_of("pydantic"):
        sys.stderr.write(missing_library("pydantic") + "\n")
        raise SystemExit(2)


def missing_library(name: str) -> str:
    """Say in one line that this Python lacks a library, and name the remedy."""
    return (
        f"this Python ({sys.executable}) has no {name}, which tula_hpc needs: use the tula of the "
        "environment that has it, such as .venv/bin/tula, or install tula_hpc here (README.md)"
    )


def is_found_elsewhere() -> bool:
    """Tell whether Python finds this package without the working directory, as when installed."""
    return bool(sys.flags.safe_path) or _finds_this_package(_without_working_directory())


def start_of_python() -> list[str]:
    """Return the arguments that start Python, without the working directory wherever possible."""
    return [sys.executable, "-P"] if is_found_elsewhere() else [sys.executable]


def _without_working_directory() -> list[str]:
    for entry in _named_in_environment():
        if os.path.isabs(entry) and _is_working_directory(entry):
            return list(sys.path)
    # entries before the standard library come from the command line and from PYTHONPATH
    given = sys.path.index(_STANDARD_LIBRARY) if _STANDARD_LIBRARY in sys.path else len(sys.path)
    kept = [entry for entry in sys.path[:given] if not _is_working_directory(entry)]
    return kept + sys.path[given:]


def _named_in_environment() -> list[str]:
    # an empty entry, as after a last colon, is the working directory
    value = os.environ.get("PYTHONPATH", "")
    return value.split(os.pathsep) if value else []


def _is_working_directory(entry: str) -> bool:
    try:
        return os.path.abspath(entry) == os.getcwd()
    # the working directory is deleted: nothing can be imported from it
    except OSError:
        return False


def _finds_this_package(path: list[str]) -> bool:
    file = _file_of(_PACKAGE, path)
    return bool(file) and os.path.samefile(os.path.dirname(file), _HERE)


def _file_of(package: str, path: list[str] | None = None) -> str:
    """Return the file that an import of a package would run first; "" if it would find none."""
    for finder in sys.meta_path:
        spec = finder.find_spec(package, path) if hasattr(finder, "find_spec") else None
        if spec is not None:
            return spec.origin or ""
    return ""
