"""Differences between the inputs of a command and of a run directory, and which are allowed."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tomli_w

from tula_hpc.config import (
    MAX_FILE_BYTES,
    ClusterSpec,
    SweepSpec,
    is_hidden,
    load_frozen_cluster,
    load_frozen_sweep,
    tables_by_name,
)
from tula_hpc.config.changes import FREE_OF_WORKLOAD, MEASURED_OF_TRAINING
from tula_hpc.errors import RunDirectoryError, TulaError
from tula_hpc.files import in_words, read_bounded

# Keys of a cluster file, or of its partitions, that only say how jobs are submitted. They may
# change at any time, as no measurement or training depends on them: a project's hours may be used
# up, or a time limit too short.
OF_SUBMISSION = frozenset({
    "account", "qos", "profile_minutes", "train_minutes", "array_parallelism",
    "controller_minutes", "controller_partition", "controller_memory_gb", "on_event",
    "signal_delay_s",
})  # fmt: skip
# further keys that may change at any time
FREE = (("workload", "data_dir"), ("training", "log_to"))
# number of differences that are listed
SHOWN_LINES = 40
# characters of each, which may hold two paths
SHOWN_CHARACTERS = 500
# stands for the value of a missing key
NOT_SET = "not set"
# parts of a TOML key; for a partition: "partitions", its name, and the key there
Key = tuple[str, ...]
# by key: value in the run directory, and present value
Changes = dict[Key, tuple[Any, Any]]


def freeze(spec: SweepSpec | ClusterSpec) -> str:
    """Return the resolved input as TOML."""
    return tomli_w.dumps(spec.model_dump(mode="json", exclude_none=True))


def changes_of(path: Path, inputs: SweepSpec | ClusterSpec) -> Changes:
    """Return the keys that differ from a run's file; empty if the file does not exist.

    Raises:
        RunDirectoryError: The file cannot be read.
    """
    if not path.exists():
        return {}
    old, new = _keys(_read(path)), _keys(freeze(inputs))
    # a file by an earlier version lacks newer keys; that version behaved like their defaults
    defaults = _keys(freeze(_filled(path, inputs))) if old else {}
    every = sorted(old.keys() | new.keys())
    differing = (key for key in every if old.get(key, defaults.get(key)) != new.get(key))
    return {key: _shown(key, old.get(key, NOT_SET), new.get(key, NOT_SET)) for key in differing}


def _filled(path: Path, inputs: SweepSpec | ClusterSpec) -> SweepSpec | ClusterSpec:
    """Return a run's file with this version's defaults; only defaults if it cannot be read."""
    load = load_frozen_sweep if isinstance(inputs, SweepSpec) else load_frozen_cluster
    try:
        return load(path)
    except TulaError:
        return type(inputs)(name=inputs.name)


def _shown(key: Key, was: Any, now: Any) -> tuple[Any, Any]:
    if not is_hidden(key):
        return _as_in_toml(was), _as_in_toml(now)
    if NOT_SET in (was, now):
        return (NOT_SET, "set") if was == NOT_SET else ("set", NOT_SET)
    return "one value", "another"


def _as_in_toml(value: Any) -> str:
    """Return a value as it is written in TOML, but strings without quotes."""
    if isinstance(value, str):
        return value
    # JSON writes numbers, booleans and lists as TOML does
    return json.dumps(value, ensure_ascii=False, default=str)


def that_matter(changes: Changes) -> Changes:
    """Return the changes on which a measurement or a training depends."""
    return {
        key: (was, now)
        for key, (was, now) in changes.items()
        if not is_of_submission(key) and key not in FREE and not _was_moved(key, was, now)
    }


def _was_moved(key: Key, was: str, now: str) -> bool:
    """Tell whether it is the same script in another place: moved, or copied with the run."""
    old = Path(was)
    new = Path(now)
    if key != ("workload", "script") or old.name != new.name:
        return False
    try:
        return read_bounded(old, MAX_FILE_BYTES) == read_bounded(new, MAX_FILE_BYTES)
    except OSError:
        # if the old file is gone, the new one is later compared with what was measured
        return not old.exists()


def sets_time(changes: Iterable[Key]) -> bool:
    """Tell whether a change affects how long a job may train, which plans take into account."""
    return any(_place(key) in (("", "train_minutes"), ("", "signal_delay_s")) for key in changes)


def is_of_submission(key: Key) -> bool:
    """Tell whether a key only affects how jobs are submitted."""
    table, name = _place(key)
    return not table and name in OF_SUBMISSION


def is_unmeasured(key: Key) -> bool:
    """Tell whether no measurement depends on a key: it may change until a training begins."""
    table, name = _place(key)
    free = {"workload": name in FREE_OF_WORKLOAD, "training": name not in MEASURED_OF_TRAINING}
    return free.get(table, table in ("objective", "pricing", "search"))


def is_between_nodes(key: Key) -> bool:
    """Tell whether only measurements on several nodes depend on a key."""
    table, name = _place(key)
    return table == "environment" and name.endswith("_SOCKET_IFNAME")


def only_prices(changes: Iterable[Key]) -> bool:
    """Tell whether only objective and prices differ, so that planning again is enough."""
    return all(_place(key)[0] in ("objective", "pricing") for key in changes)


def in_lines(changes: Changes) -> list[str]:
    """Describe the differences, one line for each key."""
    lines = [
        shown_line(f"  {name_of(key)}: {was} before, {now} now")
        for key, (was, now) in changes.items()
    ]
    return [*lines[:SHOWN_LINES], "  ..."] if len(lines) > SHOWN_LINES else lines


def name_of(key: Key) -> str:
    """Return the dotted key."""
    return ".".join(key)


def shown_line(line: str) -> str:
    """Shorten a text to one printable line."""
    return (line if line.isprintable() else ascii(line))[:SHOWN_CHARACTERS]


def _place(key: Key) -> tuple[str, str]:
    """Split a key into table and name; a partition's key is treated as the cluster's."""
    own = key[2:] if key[0] == "partitions" and len(key) > 2 else key
    return (own[0], own[1]) if len(own) > 1 else ("", own[0])


def _read(path: Path) -> str:
    try:
        return read_bounded(path, MAX_FILE_BYTES).decode(errors="replace")
    except OSError as error:
        raise RunDirectoryError(f"cannot be read: {in_words(error)}", source=path) from None


def _keys(toml: str) -> dict[Key, Any]:
    """Return every value by its key; empty if the text is not TOML."""
    try:
        return dict(_flat(tomllib.loads(toml), ()))
    except (ValueError, RecursionError):
        return {}


def _flat(table: dict[str, Any], place: Key) -> Iterator[tuple[Key, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, (*place, key))
        elif key == "partitions" and (named := tables_by_name(value)):
            # the order of partitions matters: a study runs on the first that is large enough
            yield (*place, key), list(named)
            yield from _flat(named, (*place, key))
        else:
            yield (*place, key), value
