"""Reading a sweep file or a cluster file.

TOML of anybody: bounded in size and depth, and single keys with other values.
"""

from __future__ import annotations

import errno
import json
import math
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from tula_hpc.config.cluster import ClusterSpec
from tula_hpc.config.sweep import SweepSpec, check_columns, check_together
from tula_hpc.config.validation import PARTITIONS, VALUE, Spec, explain, hide, is_hidden, line_of
from tula_hpc.errors import InputError
from tula_hpc.files import read_bounded

# a sweep file is a page; more is a mistake or an attack
MAX_FILE_BYTES = 1_000_000
DAMAGED = "# not shown: it is damaged, and may hold passwords\n"
# of a dotted key: tomllib takes time with their square
MOST_KEY_PARTS = 100


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file.

    Raises:
        InputError: There is none, or it is no TOML of reasonable size.
    """
    try:
        return _tables(read_bounded(path, MAX_FILE_BYTES).decode("utf-8-sig"))
    except FileNotFoundError:
        raise InputError("no such file", source=path) from None
    except OSError as error:
        if error.errno == errno.EOVERFLOW:
            raise InputError(
                f"expected a TOML file under {MAX_FILE_BYTES:,} bytes", source=path
            ) from None
        raise InputError(f"cannot be read: {error.strerror}", source=path) from None
    except UnicodeDecodeError:
        raise InputError("expected UTF-8 text", source=path) from None
    except (ValueError, RecursionError) as error:
        # TOMLDecodeError is a ValueError; so is a number of 5000 digits
        raise InputError(f"is not valid TOML: {_first_words(error)}", source=path) from None


def _first_words(error: Exception) -> str:
    """An error's message in a line, whatever of the file it quotes."""
    text = str(error)
    text = text if text.isprintable() else ascii(text)
    # the place in the file stands at the end
    return text if len(text) <= 200 else f"{text[:120]}...{text[-60:]}"


# a string, or what is left of the line where it does not end: it always goes on behind it, so that
# time is linear
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*+"?|' + r"'[^'\n]*+'?")
_IN_KEY = re.compile(r"[^\[\]{}=,#\n]+")


def _tables(text: str) -> dict[str, Any]:
    """Parse TOML, but no dotted keys of thousands of parts.

    Raises:
        ValueError: It is not TOML.
        RecursionError: It is nested too deeply.
    """
    parts = 0
    for part in _STRING.sub("q", text).split("."):
        parts = parts + 1 if part.strip() and _IN_KEY.fullmatch(part) else 0
        if parts > MOST_KEY_PARTS:
            raise ValueError(f"a key of more than {MOST_KEY_PARTS} parts")
    return tomllib.loads(text)


def without_values(text: str) -> str:
    """Return a cluster file without what may be a password; of one that is damaged, nothing."""
    import tomli_w

    try:
        return tomli_w.dumps(hide(_tables(text)))
    except (ValueError, RecursionError):
        return DAMAGED


def override(tables: dict[str, Any], text: str) -> None:
    """Set one key, from `section.key=value`, or, of one of `[[partitions]]`, `partitions.NAME.key=value`.

    Raises:
        InputError: It is not of that form, or leads through what is no table.
    """
    key, equals, value = text.partition("=")
    left = key.strip()
    if not equals or not left or left.endswith(".") or not text.isprintable():
        given = f"{key}={VALUE}" if equals and is_hidden(key.split(".")) else text
        raise InputError(f"expected section.key=value, got {given[:200]!r}", source="--set")
    while "." in left:
        tables, left = _enter(tables, left, key)
    try:
        tables[left] = _tables(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        # a bare word
        tables[left] = value.strip()


def _enter(tables: dict[str, Any], left: str, key: str) -> tuple[dict[str, Any], str]:
    """The table that what is left of a key begins with, and the rest of it."""
    section, _, rest = left.partition(".")
    if section == PARTITIONS:
        return _enter_partition(tables.get(section), rest, key)
    inner = tables.setdefault(section, {})
    if not isinstance(inner, dict):
        raise InputError(f"{section!r} is not a table", source="--set", key=key)
    return inner, rest


def _enter_partition(tables: object, left: str, key: str) -> tuple[dict[str, Any], str]:
    """The same of a list of tables, each with a name; that may hold dots."""
    named = tables_by_name(tables)
    name = max((name for name in named if left.startswith(f"{name}.")), key=len, default=None)
    if name is None:
        there = ", ".join(filter(str.isprintable, named)) or "no [[partitions]]"
        raise InputError(
            f"expected partitions.NAME.KEY=VALUE; there is {there}", source="--set", key=key
        )
    return named[name], left.removeprefix(f"{name}.")


def tables_by_name(tables: object) -> dict[str, dict[str, Any]]:
    """The tables of `[[partitions]]` by the name of the partition; those that have none are left out."""
    found = (
        [table for table in tables if isinstance(table, dict)] if isinstance(tables, list) else []
    )
    return {table["partition"]: table for table in found if isinstance(table.get("partition"), str)}


# that are named one by one
MOST_MISTAKES = 20
DEFAULT = "the default cluster (this machine)"
# no number of an input is larger
LARGEST = 1e30
# Keys that earlier versions wrote into the sweep.toml of each run, with the values at which they
# did nothing.
REMOVED_KEYS: dict[tuple[str, ...], object] = {
    ("training", "tune_delta"): [],
    ("training", "tune_small_batch"): [],
    ("training", "tune_every_epochs"): 2,
    ("training", "tune_holdout"): 0.05,
    ("training", "max_rollbacks"): 8,
    ("training", "curvature_epochs"): [],
    ("training", "curvature_samples"): 512,
}
S = TypeVar("S", bound=Spec)


def load_sweep(path: Path, overrides: Sequence[str] = (), *, check_paths: bool = True) -> SweepSpec:
    """Read and check a sweep file; `overrides` are `section.key=value`, values in TOML or as bare words.

    With `check_paths=False` the data folder and the modules of a user's own entry points need not
    exist here: for planning and reporting over logs that were copied from another machine.

    Raises:
        InputError: One line per mistake: file, key, what was expected.
    """
    return _sweep_of(path, read_toml(path), overrides, check_paths=check_paths)


def load_frozen_sweep(
    path: Path, overrides: Sequence[str] = (), *, check_paths: bool = False
) -> SweepSpec:
    """Read the sweep that a run was made from, without keys that have been removed since; see `load_sweep`."""
    tables = read_toml(path)
    for table, key in REMOVED_KEYS:
        if isinstance(tables.get(table), dict):
            tables[table].pop(key, None)
    return _sweep_of(path, tables, overrides, check_paths=check_paths)


def _sweep_of(
    path: Path, tables: dict[str, Any], overrides: Sequence[str], *, check_paths: bool
) -> SweepSpec:
    sweep = _parse(SweepSpec, path, tables, overrides, check_paths=check_paths)
    check_columns(sweep, path, check_paths=check_paths)
    return sweep


def load_cluster(path: Path, overrides: Sequence[str] = ()) -> ClusterSpec:
    """Read and check a cluster file; see `load_sweep`."""
    return _with_effect(_parse(ClusterSpec, path, read_toml(path), overrides), overrides)


def load_together(
    sweep_file: Path,
    cluster_file: Path | None,
    overrides: Sequence[str] = (),
    *,
    check_paths: bool = True,
) -> tuple[SweepSpec, ClusterSpec]:
    """Read and check a sweep and a cluster, this machine if None, one by itself and both together; see `load_sweep`.

    Args:
        sweep_file: The sweep.
        cluster_file: The cluster.
        overrides: Of either, see `split_overrides`.
        check_paths: See `load_sweep`.
    """
    of_sweep, of_cluster = split_overrides(overrides)
    sweep = load_sweep(sweep_file, of_sweep, check_paths=check_paths)
    cluster = (
        _parse(ClusterSpec, DEFAULT, {}, of_cluster)
        if cluster_file is None
        else load_cluster(cluster_file, of_cluster)
    )
    check_together(sweep, cluster, sweep_file, cluster_file or DEFAULT)
    return sweep, cluster


def split_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Overrides of the sweep file and of the cluster file: by section, or with `cluster.` in front."""
    sections = ClusterSpec.model_fields.keys() - SweepSpec.model_fields.keys()
    mine: list[str] = []
    others: list[str] = []
    for text in overrides:
        name = text.partition("=")[0].strip().partition(".")[0]
        (others if name == "cluster" or name in sections else mine).append(
            text.removeprefix("cluster.")
        )
    return mine, others


def _with_effect(cluster: ClusterSpec, overrides: Sequence[str]) -> ClusterSpec:
    """The cluster, if overrides of what its partitions share reach any of them.

    Raises:
        InputError: Every partition has a value of its own.
    """
    for key in (text.partition("=")[0].strip() for text in overrides):
        if cluster.partitions and all(table.has(key) for table in cluster.partitions):
            own = f"changes nothing: every one of [[partitions]] has a value of its own; set partitions.NAME.{key}"
            raise InputError(
                f"{own}, NAME being {' or '.join(cluster.part_names())}", source="--set", key=key
            )
    return cluster


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
        context = {"check_paths": check_paths}
        return kind.model_validate_json(_as_json(path, tables), strict=True, context=context)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        inner = {item["loc"][:depth] for item in problems for depth in range(len(item["loc"]))}
        # not what merely follows from a problem inside
        own = [item for item in problems if item["loc"] not in inner]
        lines = [explain(kind, path, item) for item in own[:MOST_MISTAKES]]
        more = (
            [f"{path}: and {len(own) - MOST_MISTAKES} more mistakes"]
            if len(own) > MOST_MISTAKES
            else []
        )
        # a union complains once for each of its members
        raise InputError("\n".join(dict.fromkeys([*lines, *more]))) from None


def _as_json(path: Path | str, tables: dict[str, Any]) -> str:
    """The tables as JSON, for which pydantic's strict mode knows lists from tuples and paths from text."""
    try:
        text = json.dumps(tables, default=str)
        _refuse_absurd(path, tables)
    except (RecursionError, ValueError) as error:
        # tables in tables without end, numbers of 5000 digits
        raise InputError(f"holds a value out of all bounds: {error}", source=path) from None
    return text


def _refuse_absurd(path: Path | str, value: object, place: tuple[str, ...] = ()) -> None:
    """Refuse numbers with which nothing can be computed, wherever they are; some keys have closer bounds.

    Raises:
        InputError: There is one.
    """
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            _refuse_absurd(path, inner, (*place, str(key)))
    elif isinstance(value, int | float) and LARGEST < abs(value) < math.inf:
        raise InputError(line_of(path, place, f"expected numbers within ±{LARGEST:g}"))
