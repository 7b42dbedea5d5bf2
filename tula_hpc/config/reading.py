"""Reading a sweep file or a cluster file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from tula_hpc.config.cluster import ClusterSpec
from tula_hpc.config.fitting import check_together
from tula_hpc.config.mistakes import explain, line_of
from tula_hpc.config.spec import Spec
from tula_hpc.config.study_columns import check_columns
from tula_hpc.config.sweep import SweepSpec
from tula_hpc.config.toml import override, read_toml
from tula_hpc.errors import InputError

MOST_MISTAKES = 20  # that are named one by one
DEFAULT = "the default cluster (this machine)"
LARGEST = 1e30  # no number of an input is larger
# Keys that earlier versions wrote into the sweep.toml of each run, with the values at which they did nothing.
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

    With `check_paths=False` the data folder and the modules of a user's own entry points need not exist here: for
    planning and reporting over logs that were copied from another machine.

    Raises:
        InputError: One line per mistake: file, key, what was expected.
    """
    return _sweep_of(path, read_toml(path), overrides, check_paths=check_paths)


def load_frozen_sweep(path: Path, overrides: Sequence[str] = (), *, check_paths: bool = False) -> SweepSpec:
    """Read the sweep that a run was made from, without keys that have been removed since; see `load_sweep`."""
    tables = read_toml(path)
    for table, key in REMOVED_KEYS:
        if isinstance(tables.get(table), dict):
            tables[table].pop(key, None)
    return _sweep_of(path, tables, overrides, check_paths=check_paths)


def _sweep_of(path: Path, tables: dict[str, Any], overrides: Sequence[str], *, check_paths: bool) -> SweepSpec:
    sweep = _parse(SweepSpec, path, tables, overrides, check_paths=check_paths)
    check_columns(sweep, path, check_paths=check_paths)
    return sweep


def load_cluster(path: Path, overrides: Sequence[str] = ()) -> ClusterSpec:
    """Read and check a cluster file; see `load_sweep`."""
    return _with_effect(_parse(ClusterSpec, path, read_toml(path), overrides), overrides)


def load_together(
    sweep_file: Path, cluster_file: Path | None, overrides: Sequence[str] = (), *, check_paths: bool = True
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
        _parse(ClusterSpec, DEFAULT, {}, of_cluster) if cluster_file is None else load_cluster(cluster_file, of_cluster)
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
        (others if name == "cluster" or name in sections else mine).append(text.removeprefix("cluster."))
    return mine, others


def _with_effect(cluster: ClusterSpec, overrides: Sequence[str]) -> ClusterSpec:
    """The cluster, if overrides of what its partitions share reach any of them.

    Raises:
        InputError: Every partition has a value of its own.
    """
    for key in (text.partition("=")[0].strip() for text in overrides):
        if cluster.partitions and all(table.has(key) for table in cluster.partitions):
            own = f"changes nothing: every one of [[partitions]] has a value of its own; set partitions.NAME.{key}"
            raise InputError(f"{own}, NAME being {' or '.join(cluster.part_names())}", source="--set", key=key)
    return cluster


def _parse(
    kind: type[S], path: Path | str, tables: dict[str, Any], overrides: Sequence[str], *, check_paths: bool = True
) -> S:
    for text in overrides:
        override(tables, text)
    try:
        context = {"check_paths": check_paths}
        return kind.model_validate_json(_as_json(path, tables), strict=True, context=context)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        inner = {item["loc"][:depth] for item in problems for depth in range(len(item["loc"]))}
        own = [item for item in problems if item["loc"] not in inner]  # not what merely follows from a problem inside
        lines = [explain(kind, path, item) for item in own[:MOST_MISTAKES]]
        more = [f"{path}: and {len(own) - MOST_MISTAKES} more mistakes"] if len(own) > MOST_MISTAKES else []
        # a union complains once for each of its members
        raise InputError("\n".join(dict.fromkeys([*lines, *more]))) from None


def _as_json(path: Path | str, tables: dict[str, Any]) -> str:
    """The tables as JSON, for which pydantic's strict mode knows lists from tuples and paths from text."""
    try:
        text = json.dumps(tables, default=str)
        _refuse_absurd(path, tables)
    except (RecursionError, ValueError) as error:  # tables in tables without end, numbers of 5000 digits
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
