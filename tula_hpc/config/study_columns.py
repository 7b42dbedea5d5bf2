"""The sweep as each column of its study trains it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from tula_hpc.config.mistakes import explain, shown
from tula_hpc.config.sweep import SweepSpec, check_accuracy
from tula_hpc.config.training import Method
from tula_hpc.errors import InputError


def study_column(sweep: SweepSpec, column: str, *, check_paths: bool = True) -> SweepSpec:
    """The sweep as one column of its study trains it.

    Raises:
        ValidationError: A variant's value is not one that its key takes.
    """
    tables = sweep.model_dump(mode="json", exclude_none=True, exclude={"study"})
    for key, value in (sweep.study.overrides(column) if sweep.study else {}).items():
        section, _, last = key.partition(".")
        tables[section][last] = value
    context = {"check_paths": check_paths}
    changed = SweepSpec.model_validate_json(json.dumps(tables, default=str), strict=True, context=context)
    return changed.model_copy(update={"study": sweep.study})


_STUDY_SETS = {"workload.seed": "study.seeds", "workload.holdout": "study.tuning_holdout"}


def check_columns(sweep: SweepSpec, path: Path, *, check_paths: bool) -> None:
    """What each column of a study comes to.

    Raises:
        InputError: One line per mistake in a variant: file, variant, key, what was expected.
    """
    if sweep.study is None:
        return
    for name, keys in sweep.study.variants.items():
        _check_variant(name, keys, path)
    for name in sweep.study.columns:
        where = f"{path}: study.{'variants' if name in sweep.study.variants else 'methods'}.{name}"
        try:
            check_accuracy(study_column(sweep, name, check_paths=check_paths).workload, sweep.study)
        except ValidationError as error:
            lines = (explain(SweepSpec, where, item) for item in error.errors())
            raise InputError("\n".join(dict.fromkeys(lines))) from None
        except ValueError as error:
            raise InputError(f"{where}: {error}") from None


def _check_variant(name: str, keys: Mapping[str, Any], path: Path) -> None:
    """Only what a training is may vary."""
    for key, value in keys.items():
        section, _, last = key.partition(".")
        where = f"study.variants.{name}.{key}"
        if key in _STUDY_SETS:
            raise InputError(f"is set by {_STUDY_SETS[key]}", source=path, key=where)
        if section not in ("workload", "training") or not last or "." in last:
            message = 'expected a key of [workload] or [training], for example "training.delta" or "workload.lr"'
            raise InputError(message, source=path, key=where)
        if key == "training.method" and name in get_args(Method) and value != name:
            message = f"a variant named after a method has that method; call it otherwise for {shown(value)}"
            raise InputError(message, source=path, key=where)
