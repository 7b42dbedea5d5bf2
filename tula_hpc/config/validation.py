"""Validate tables of a sweep or cluster file: the base of all, the words for a mistake, values that are hidden."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field

from tula_hpc.errors import InputError

GIB = 1024**3
MOST_GIB = 1e9
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class Spec(BaseModel):
    """Base of all input tables: immutable, no unknown keys, no silent conversions of strings to numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


HIDDEN = ("environment", "setup")
# a list of tables, each with a name
PARTITIONS = "partitions"
VALUE = "a value that is not shown"


def is_hidden(key: Sequence[str]) -> bool:
    """Whether the value of a key is never shown; its parts as in TOML, of a partition: "partitions", its name, key."""
    # the name may hold dots, and be several parts of a key that was typed
    own = key[2:] if key and key[0] == PARTITIONS else key[:1]
    return any(part in HIDDEN for part in own)


def hide(value: Any) -> Any:
    """Return tables with the names of variables, and a line for each line of `setup`, wherever they are."""
    if isinstance(value, list):
        return [hide(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    return {key: _names_of(inner) if key in HIDDEN else hide(inner) for key, inner in value.items()}


def _names_of(value: Any) -> Any:
    if isinstance(value, dict):
        return dict.fromkeys(value, "not shown")
    if isinstance(value, list):
        return [f"not shown, line {number}" for number in range(1, len(value) + 1)]
    return "not shown"


def told_by_set(overrides: Sequence[str]) -> str:
    """Return a warning of hidden values that `--set` has put on the command line; empty where there are none."""
    keys = [text.partition("=")[0].strip() for text in overrides]
    open_keys = [key for key in keys if is_hidden(key.removeprefix("cluster.").split("."))]
    if not open_keys:
        return ""
    names = ", ".join(key if key.isprintable() else ascii(key) for key in open_keys)
    return f"--set: {names}: a command line is visible to everybody on this machine; put secrets into the cluster file"


# pydantic's error types in the words of a TOML file
_EXPECTED = {
    "extra_forbidden": "unknown key",
    "model_type": "expected a table",
    "dict_type": "expected a table",
    "tuple_type": "expected a list in brackets",
    "string_type": "expected text in quotes",
    "int_type": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_type": "expected a number",
    "finite_number": "expected a finite number",
    "bool_type": "expected true or false",
    "literal_error": "expected {expected}",
    "greater_than": "expected more than {gt:g}",
    "greater_than_equal": "expected at least {ge}",
    "less_than": "expected less than {lt}",
    "less_than_equal": "expected at most {le}",
    "too_short": "expected at least {min_length} value",
    "too_long": "expected at most {max_length} values",
    "string_too_long": "expected at most {max_length} characters",
}
# of `sbatch`: pydantic adds them to the place
_UNION_MEMBERS = ("constrained-str", "constrained-int", "int", "bool")


def explain(kind: type[Spec], path: Path | str, item: Mapping[str, Any]) -> str:
    """One line for one pydantic error: file: key: what is wrong."""
    location = [str(part) for part in item["loc"]]
    if location[:1] == ["sbatch"] and location[-1] in _UNION_MEMBERS:
        return line_of(
            path,
            location[:-1],
            f"expected a word, a whole number, true or false, got {shown(item['input'])}",
        )
    if item["type"] == "extra_forbidden":
        valid = fields_at(kind, location[:-1])
        return line_of(
            path,
            location,
            f"unknown key{nearest(location[-1], valid)}; valid keys: {', '.join(valid)}",
        )
    if item["type"] == "missing":
        return line_of(path, location, "is required")
    if item["type"] == "value_error":
        return line_of(path, *_own_words(location, str(item["msg"]).removeprefix("Value error, ")))
    got = _shown_unless_hidden(location, item["input"])
    if "pattern" in item["type"]:
        if location[-1] == "[key]":
            # what follows names the key
            location = location[:-2]
        message = f"{got} holds characters that are not allowed here"
        return line_of(path, location, f"{message} (pattern {item['ctx']['pattern']})")
    meant = _tables_meant(kind, location, item["input"])
    return line_of(path, location, f"{words_of(item)}{meant}, got {got}")


def _shown_unless_hidden(location: Sequence[str], value: object) -> str:
    # what stands there of a key that is no name is the key itself
    return VALUE if is_hidden(location) and location[-1] != "[key]" else shown(value)


def _tables_meant(kind: type[Spec], location: Sequence[str], value: object) -> str:
    """The key that was meant, as a question, where [[tables]] stand for one that holds none."""
    if (
        len(location) > 1
        or not isinstance(value, list)
        or not any(isinstance(table, dict) for table in value)
    ):
        return ""
    return nearest(location[0], kind.model_fields.keys() - {location[0]}, "[[{}]]")


def words_of(item: Mapping[str, Any]) -> str:
    """What was expected, or a validator's own words."""
    words = _EXPECTED.get(item["type"])
    expected = item["msg"] if words is None else words.format(**item.get("ctx", {}))
    return str(expected).removeprefix("Value error, ")


def line_of(path: Path | str, location: Sequence[str], message: str) -> str:
    """One line for one mistake: file: key: what is wrong."""
    key = ".".join(_named(part) for part in location)
    return str(InputError(message, source=path, key=key))


def _named(part: str) -> str:
    """A part of a key as it stands in TOML, or its beginning."""
    part = part if part and part.isprintable() else ascii(part)
    return part if len(part) <= 100 else f"{part[:97]}..."


def _own_words(location: list[str], message: str) -> tuple[list[str], str]:
    """A model validator names the key that is wrong in front of its message."""
    field, colon, rest = message.partition(": ")
    return ([*location, field], rest) if colon and field.isidentifier() else (location, message)


def shown(value: object, most: int = 80) -> str:
    """A value as it stands in TOML, or its beginning."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    text = text if text.isprintable() else json.dumps(value, default=str)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def fields_at(kind: type[BaseModel], location: Iterable[str]) -> list[str]:
    """The keys that a table may hold, by its place in the file."""
    for part in location:
        # place in a list of tables
        if part.isdigit():
            continue
        annotation = kind.model_fields[part].annotation
        for inner in (annotation, *get_args(annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                kind = inner
    return list(kind.model_fields)


def nearest(word: str, valid: Iterable[str], form: str = "{!r}") -> str:
    """The valid word that was meant, as a question, in this form; nothing where none is near."""
    close = difflib.get_close_matches(word, valid, n=1) if len(word) <= 100 else []
    return f" (did you mean {form.format(close[0])}?)" if close else ""
