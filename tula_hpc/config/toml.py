"""TOML of anybody: bounded in size and depth, and single keys with other values."""

from __future__ import annotations

import errno
import re
import tomllib
from pathlib import Path
from typing import Any

from tula_hpc.config.hidden import PARTITIONS, VALUE, hide, is_hidden
from tula_hpc.errors import InputError
from tula_hpc.files import read_bounded

MAX_FILE_BYTES = 1_000_000  # a sweep file is a page; more is a mistake or an attack
DAMAGED = "# not shown: it is damaged, and may hold passwords\n"
MOST_KEY_PARTS = 100  # of a dotted key: tomllib takes time with their square


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
            raise InputError(f"expected a TOML file under {MAX_FILE_BYTES:,} bytes", source=path) from None
        raise InputError(f"cannot be read: {error.strerror}", source=path) from None
    except UnicodeDecodeError:
        raise InputError("expected UTF-8 text", source=path) from None
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError; so is a number of 5000 digits
        raise InputError(f"is not valid TOML: {_first_words(error)}", source=path) from None


def _first_words(error: Exception) -> str:
    """An error's message in a line, whatever of the file it quotes."""
    text = str(error)
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= 200 else f"{text[:120]}...{text[-60:]}"  # the place in the file stands at the end


# a string, or what is left of the line where it does not end: it always goes on behind it, so that time is linear
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
        tables[left] = value.strip()  # a bare word


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
        raise InputError(f"expected partitions.NAME.KEY=VALUE; there is {there}", source="--set", key=key)
    return named[name], left.removeprefix(f"{name}.")


def tables_by_name(tables: object) -> dict[str, dict[str, Any]]:
    """The tables of `[[partitions]]` by the name of the partition; those that have none are left out."""
    found = [table for table in tables if isinstance(table, dict)] if isinstance(tables, list) else []
    return {table["partition"]: table for table in found if isinstance(table.get("partition"), str)}
