"""Values of a cluster file that are never shown, in no message and no report: they may be keys and passwords."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HIDDEN = ("environment", "setup")
PARTITIONS = "partitions"  # a list of tables, each with a name
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
