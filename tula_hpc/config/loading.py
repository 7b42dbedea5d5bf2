"""Read and check sweep and cluster files, and override single keys.

The files may come from anybody: their size and depth are bounded. `validation.py` says in which
order and where keys are checked.
"""

from __future__ import annotations

import errno
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from tula_hpc.config.cluster import ClusterSpec
from tula_hpc.config.sweep import SweepSpec, check_columns, check_together
from tula_hpc.config.validation import (
    PARTITIONS,
    VALUE,
    Spec,
    explain,
    given_keys,
    hide,
    is_hidden,
    line_of,
    nearest,
    printable_part,
)
from tula_hpc.errors import InputError
from tula_hpc.files import read_bounded
from tula_hpc.formatting import command_line

# a sweep file has about a page; a file above this is a mistake or an attack
MAX_FILE_BYTES = 1_000_000
# what to do if an input file of a run is missing or damaged
PUT_BACK = (
    "it says what was measured or trained: put it back as it was (a copy of your own file will "
    "do), or use another --run-dir"
)
DAMAGED = "# not shown: it is damaged, and may hold passwords\n"
# tomllib's messages, in words for people who do not write parsers
TOMLLIB_WORDS = {
    "Cannot overwrite a value": "a key is given twice",
    "Invalid value": "expected a number, true, false, a list or a text in quotes",
    "Expected newline or end of document after a statement": (
        "expected nothing more on this line; a list is written [1, 2], a text in quotes"
    ),
    "Expected '=' after a key in a key/value pair": "expected = after a key",
    "Invalid statement": "expected a key, as in epochs = 10, or a [table]",
    "Unterminated string": "a text lacks its last quote",
    r"Illegal character '\n'": "a text lacks its last quote",
    'Expected "\'"': "a text lacks its last quote",
    "Unescaped '\\' in a string": r"a \ in a text is written twice, or the text in single quotes",
    "Unclosed array": "a list lacks a comma, or its last ]",
}
# the same key as two tables, or as a value, such as `partitions = []`, and a table
GIVEN_TWICE = r"Cannot (declare|(mutate immutable|redefine) namespace) \(.*\)( twice)?(?= \(at )"
# bounded, because tomllib's time grows with the square of the number of parts of a dotted key
MOST_KEY_PARTS = 100


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a file.

    Raises:
        InputError: The file is missing, unreadable, too large or not valid TOML.
    """
    try:
        return _tables(read_bounded(path, MAX_FILE_BYTES).decode("utf-8-sig"))
    except FileNotFoundError:
        raise InputError("no such file; check the path", source=path) from None
    except IsADirectoryError:
        inside = ", as sweep.toml and cluster.toml in it" if (path / "sweep.toml").exists() else ""
        raise InputError(f"is a folder; expected a TOML file{inside}", source=path) from None
    except OSError as error:
        if error.errno == errno.EOVERFLOW:
            raise InputError(
                f"expected a TOML file under {MAX_FILE_BYTES:,} bytes", source=path
            ) from None
        raise InputError(f"cannot be read: {error.strerror}", source=path) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        message = f"line {line} has a byte that is not UTF-8; save the file as UTF-8"
        raise InputError(message, source=path) from None
    except (ValueError, RecursionError) as error:
        # TOMLDecodeError is a ValueError; a number of 5000 digits also raises one
        text = re.sub(GIVEN_TWICE, "a table is given twice", _one_line(error))
        for words, meaning in TOMLLIB_WORDS.items():
            text = text.replace(words, meaning)
        if path.suffix == ".py":
            command = command_line("init", "--script", str(path))
            text = f"it is a script, for which {command} writes a sweep file"
        raise InputError(f"is not valid TOML: {text}", source=path) from None


def _one_line(error: Exception) -> str:
    # leave out Python's advice to allow numbers of any length: it does not help here
    text = str(error).partition("; use sys.")[0]
    # the message may quote anything from the file
    if not text.isprintable():
        text = ascii(text)
    # keep the end of the message, which names the place in the file
    if len(text) > 200:
        return f"{text[:120]}...{text[-60:]}"
    return text


# A string or, if its quote is not closed, the rest of the line: each character is read once, so
# that the time is linear.
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*+"?|' + r"'[^'\n]*+'?")
_IN_KEY = re.compile(r"[^\[\]{}=,#\n]+")


def _tables(text: str) -> dict[str, Any]:
    """Parse TOML; raise ValueError if it is invalid, RecursionError if nested too deeply."""
    parts = 0
    for part in _STRING.sub("q", text).split("."):
        parts = parts + 1 if part.strip() and _IN_KEY.fullmatch(part) else 0
        if parts > MOST_KEY_PARTS:
            raise ValueError(f"a key of more than {MOST_KEY_PARTS} parts")
    return tomllib.loads(text)


def without_values(text: str) -> str:
    """Return a cluster file's text without possible passwords, or `DAMAGED` if it is damaged."""
    import tomli_w

    try:
        return tomli_w.dumps(hide(_tables(text)))
    except (ValueError, RecursionError):
        return DAMAGED


def override(tables: dict[str, Any], text: str) -> None:
    """Set one key from `section.key=value`, or `partitions.NAME.key=value` in `[[partitions]]`.

    Raises:
        InputError: The text has another form, or part of the key names a value that is no table.
    """
    key, equals, value = text.partition("=")
    left = key.strip()
    if not equals or not left or left.endswith(".") or not text.isprintable():
        given = f"{key}={VALUE}" if equals and is_hidden(key.split(".")) else text
        raise InputError(f"expected section.key=value, got {given[:200]!r}", source=OPTION)
    while "." in left:
        tables, left = _enter(tables, left, key)
    try:
        tables[left] = _tables(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        # not TOML: a bare word, taken as text
        tables[left] = value.strip()


def _enter(tables: dict[str, Any], left: str, key: str) -> tuple[dict[str, Any], str]:
    """Return the table of the first part of `left`, and the remaining parts."""
    section, _, rest = left.partition(".")
    if section == PARTITIONS:
        return _enter_partition(tables.get(section), rest, key)
    inner = tables.setdefault(section, {})
    if not isinstance(inner, dict):
        message = f"{section!r} is not a table; expected section.key=value"
        raise InputError(message, source=OPTION, key=key)
    return inner, rest


def _enter_partition(tables: object, left: str, key: str) -> tuple[dict[str, Any], str]:
    named = tables_by_name(tables)
    # partition names may hold dots: the longest name that fits counts
    name = max((name for name in named if left.startswith(f"{name}.")), key=len, default=None)
    if name is None:
        there = ", ".join(filter(str.isprintable, named)) or "no [[partitions]]"
        raise InputError(
            f"expected partitions.NAME.KEY=VALUE; there is {there}", source=OPTION, key=key
        )
    return named[name], left.removeprefix(f"{name}.")


def tables_by_name(tables: object) -> dict[str, dict[str, Any]]:
    """Return the tables of `[[partitions]]` by name; tables without a name are left out."""
    named: dict[str, dict[str, Any]] = {}
    for table in tables if isinstance(tables, list) else []:
        name = table.get("partition") if isinstance(table, dict) else None
        if isinstance(name, str):
            named[name] = table
    return named


# largest number of mistakes that are listed one by one
MOST_MISTAKES = 20
DEFAULT = "the default cluster (this machine)"
# largest absolute value of any number in an input file
LARGEST = 1e30
OPTION = "--set"
S = TypeVar("S", bound=Spec)
Loaded = TypeVar("Loaded")


def load_sweep(path: Path, overrides: Sequence[str] = (), *, check_paths: bool = True) -> SweepSpec:
    """Read and check a sweep file, with overrides `section.key=value` in TOML or bare words.

    With `check_paths=False` the data folder and the modules of a user's own functions need not
    exist here: logs may come from another machine.

    Raises:
        InputError: One line per mistake: file, key, expected value.
    """
    tables = read_toml(path)
    if "executor" in tables and "workload" not in tables:
        raise InputError(
            "is a cluster file (it has executor); expected a sweep file, see sweeps/", source=path
        )
    sweep = _parse(SweepSpec, path, tables, overrides, check_paths=check_paths)
    check_columns(sweep, path, check_paths=check_paths)
    return sweep


def load_frozen_sweep(path: Path, overrides: Sequence[str] = ()) -> SweepSpec:
    """Read the sweep of a run, whose data may be on another machine."""
    return _naming_overrides(lambda given: load_sweep(path, given, check_paths=False), overrides)


# keys that only affect Slurm jobs
_OF_SLURM = (
    "partition", "account", "qos", "gres", "constraint", "sbatch", "controller_partition",
    "partitions",
)  # fmt: skip
# keys that affect nothing but Slurm jobs, not even prices as gres may; a file for this machine may
# hold them
_OF_SLURM_ALONE = (
    "partition", "account", "qos", "constraint", "srun_args", "controller_partition",
    "controller_minutes", "controller_memory_gb",
)  # fmt: skip


def idle_cluster_keys(cluster: ClusterSpec) -> Iterator[tuple[str, str]]:
    """Yield keys of a cluster file that were given but change nothing, with the reason."""
    given = dict(given_keys(cluster))
    of_slurm = ", ".join(key for key in given if key in _OF_SLURM_ALONE)
    if cluster.executor == "local" and of_slurm:
        why = 'executor = "local" does not use Slurm; set executor = "slurm", or remove this'
        yield of_slurm, why
    if "device_memory_gb" in given and all(part.device == "cpu" for part in cluster.parts()):
        why = 'device = "cpu" has no memory of its own; see memory_gb, or remove this'
        yield "device_memory_gb", why


def load_cluster(path: Path, overrides: Sequence[str] = ()) -> ClusterSpec:
    """Read and check a cluster file; see `load_sweep`."""
    tables = read_toml(path)
    if isinstance(tables.get("workload"), dict):
        message = "is a sweep file (it has [workload]); expected a cluster file"
        raise InputError(f"{message}, see slurm_templates/", source=path)
    cluster = _parse(ClusterSpec, path, tables, overrides)
    _refuse_without_effect(cluster, overrides)
    of_slurm = [key for key in _OF_SLURM if key in cluster.model_fields_set]
    if of_slurm and "executor" not in cluster.model_fields_set:
        message = f'is missing, and {of_slurm[0]} is for Slurm; add executor = "slurm"'
        raise InputError(
            f'{message}, or "local" to run everything on this machine', source=path, key="executor"
        )
    return cluster


def load_frozen_cluster(path: Path, overrides: Sequence[str] = ()) -> ClusterSpec:
    """Read the cluster of a run."""
    return _naming_overrides(lambda given: load_cluster(path, given), overrides)


def load_together(
    sweep_file: Path,
    cluster_file: Path | None,
    overrides: Sequence[str] = (),
    *,
    check_paths: bool = True,
) -> tuple[SweepSpec, ClusterSpec]:
    """Read and check a sweep and a cluster, each by itself and both together.

    The overrides may be for either file, see `split_overrides`. Without a cluster file, the cluster
    is this machine.

    Raises:
        InputError: As from `load_sweep`, or the cluster cannot run the sweep.
    """

    def load(given: Sequence[str]) -> tuple[SweepSpec, ClusterSpec]:
        of_sweep, of_cluster = split_overrides(given)
        sweep = load_sweep(sweep_file, of_sweep, check_paths=check_paths)
        if cluster_file is None:
            cluster = _parse(ClusterSpec, DEFAULT, {}, of_cluster)
        else:
            cluster = load_cluster(cluster_file, of_cluster)
        check_together(sweep, cluster, sweep_file, cluster_file or DEFAULT)
        return sweep, cluster

    return _naming_overrides(load, overrides)


def _naming_overrides(load: Callable[[Sequence[str]], Loaded], overrides: Sequence[str]) -> Loaded:
    """Load inputs; a mistake that vanishes without one of the overrides also names the override."""
    try:
        return load(overrides)
    except InputError as error:
        mistakes = str(error).splitlines()
    without: dict[str, list[str]] = {}
    for text in overrides:
        try:
            load([other for other in overrides if other != text])
            without[text] = []
        except InputError as error:
            without[text] = str(error).splitlines()
    lines = []
    for mistake in mistakes:
        line = mistake
        file, colon, rest = mistake.partition(": ")
        culprits = [_as_typed(text) for text, left in without.items() if mistake not in left]
        if culprits and colon and file != OPTION:
            line = f"{file} with {' '.join(culprits)}: {rest}"
        lines.append(line)
    raise InputError("\n".join(lines))


def _as_typed(override: str) -> str:
    key = override.partition("=")[0]
    value = override
    if is_hidden(key.strip().removeprefix("cluster.").split(".")):
        value = f"{key}={VALUE}"
    return f"{OPTION} {printable_part(value)}"


def split_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split overrides into those of the sweep file and of the cluster file.

    The section decides; a key that begins with `cluster.` is always for the cluster file.

    Raises:
        InputError: A section is probably a misspelt `cluster`.
    """
    sections = ClusterSpec.model_fields.keys() - SweepSpec.model_fields.keys()
    of_sweep: list[str] = []
    of_cluster: list[str] = []
    for text in overrides:
        section = text.partition("=")[0].strip().partition(".")[0]
        meant = nearest(section, ["cluster"])
        if section == "cluster" or section in sections:
            of_cluster.append(text.removeprefix("cluster."))
        elif meant:
            raise InputError(f"unknown key{meant}", source=OPTION, key=section)
        else:
            of_sweep.append(text)
    return of_sweep, of_cluster


def _refuse_without_effect(cluster: ClusterSpec, overrides: Sequence[str]) -> None:
    """Refuse an override of a key that every partition overrides."""
    for text in overrides:
        key = text.partition("=")[0].strip()
        if cluster.partitions and all(table.has(key) for table in cluster.partitions):
            message = (
                "changes nothing: each of [[partitions]] has a value of its own; set "
                f"partitions.NAME.{key}, NAME being {' or '.join(cluster.part_names())}"
            )
            raise InputError(message, source=OPTION, key=key)


def _parse(
    kind: type[S],
    path: Path | str,
    tables: dict[str, Any],
    overrides: Sequence[str],
    *,
    check_paths: bool = True,
) -> S:
    for text in overrides:
        override(tables, text)
    try:
        context: dict[str, Any] = {"check_paths": check_paths}
        if isinstance(path, Path):
            context["sweep_folder"] = path.parent
        return kind.model_validate_json(_as_json(path, tables), strict=True, context=context)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        # leave out a table's problem that only follows from a problem inside the table
        outer: set[tuple[int | str, ...]] = set()
        for item in problems:
            for depth in range(len(item["loc"])):
                outer.add(item["loc"][:depth])
        own = [item for item in problems if item["loc"] not in outer]
        given = tuple(f"{text.partition('=')[0].strip()}." for text in overrides)
        lines: dict[object, str] = {}
        for item in own[:MOST_MISTAKES]:
            key = ".".join(map(str, item["loc"]))
            is_set = f"{key}.".startswith(given)
            line = explain(kind, OPTION if is_set else path, item)
            # One line per cause: a union reports a problem for each of its members, and several
            # functions may name the same faulty module.
            is_own = item["type"] == "value_error"
            cause = (item["loc"][:-1], item["msg"]) if is_own else line
            lines.setdefault(cause, line)
        listed = list(lines.values())
        if len(own) > MOST_MISTAKES:
            listed.append(f"{path}: and {len(own) - MOST_MISTAKES} more mistakes")
        raise InputError("\n".join(listed)) from None


def _as_json(path: Path | str, tables: dict[str, Any]) -> str:
    # from JSON, pydantic's strict mode accepts lists as tuples and text as paths
    try:
        text = json.dumps(tables, default=str)
        _refuse_absurd(path, tables)
    except (RecursionError, ValueError) as error:
        # for example tables nested very deeply, or a number of 5000 digits
        raise InputError(
            f"holds a value outside all bounds: {_one_line(error)}", source=path
        ) from None
    return text


def _refuse_absurd(path: Path | str, value: object, place: tuple[str, ...] = ()) -> None:
    """Refuse numbers beyond `LARGEST` anywhere in the tables; many keys have closer bounds."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            _refuse_absurd(path, inner, (*place, str(key)))
    elif isinstance(value, int | float) and LARGEST < abs(value) < math.inf:
        raise InputError(line_of(path, place, f"expected numbers within ±{LARGEST:g}"))
