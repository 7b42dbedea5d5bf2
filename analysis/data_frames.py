"""Read a run's records into pandas DataFrames, for notebooks and your own analyses.

    frames = tula_hpc.analysis.frames("runs/quickstart")
    frames.candidates.to_parquet("candidates.parquet")

Nested fields become columns with dotted names, for example `times.step_time_s`. Lists, and mappings
whose keys differ from run to run, are JSON. pandas is an extra, `pip install tula_hpc[pandas]`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

from tula_hpc.analysis.run_contents import read_run
from tula_hpc.config import leaves
from tula_hpc.errors import InputError
from tula_hpc.records import (
    Candidate,
    EpochMetrics,
    Event,
    Measurement,
    Record,
    RunDirectory,
    StepMetrics,
)

# columns of Unix times, which become dates
TIMES = ("time", "finished_at")
# mappings whose keys differ from run to run; each stays one column of JSON
MAPPINGS = ("data", "versions", "sources")


class Frames(NamedTuple):
    """DataFrames of one run; a frame without rows still has its columns."""

    # every profile, failed ones included
    measurements: Any
    # the plan's candidates; the column `chosen` marks the plan's choice
    candidates: Any
    # logged steps of all trainings, named in the column `training`; very many are thinned evenly
    metrics: Any
    # epochs of all trainings, named in the column `training`
    epochs: Any
    events: Any


def read_frames(run: str | Path) -> Frames:
    """Read a run directory into frames; `tula_hpc.analysis.frames` lists the errors."""
    try:
        pandas = importlib.import_module("pandas")
    except ImportError as error:
        message = f"frames need pandas: pip install 'tula_hpc[pandas]' ({error})"
        raise InputError(message) from None
    contents = read_run(RunDirectory(Path(run)))
    plan = contents.plan
    steps = []
    epochs = []
    for training in contents.trainings:
        own = {"training": training.label}
        steps += [own | _flat(row) for row in training.metrics.steps]
        epochs += [own | _flat(row) for row in training.metrics.epochs]
    candidates = []
    if plan:
        candidates = [_flat(item) | {"chosen": item == plan.chosen} for item in plan.candidates]
    return Frames(
        _frame(pandas, map(_flat, contents.measurements), Measurement),
        _frame(pandas, candidates, Candidate, "chosen"),
        _frame(pandas, steps, StepMetrics, "training"),
        _frame(pandas, epochs, EpochMetrics, "training"),
        _frame(pandas, map(_flat, contents.events), Event),
    )


def _frame(pandas: Any, rows: Iterable[dict[str, object]], of: type[Record], *more: str) -> Any:
    frame = pandas.DataFrame(list(rows))
    # keys of mappings are known from the rows alone
    others = [name for name in frame.columns if "." in name]
    known = [
        name for name in _names(of) if not any(other.startswith(f"{name}.") for other in others)
    ]
    frame = frame.reindex(columns=dict.fromkeys([*known, *others, *more]))
    for name in TIMES:
        if name in frame:
            frame[name] = pandas.to_datetime(frame[name], unit="s", utc=True)
    return frame


def _names(of: type[Record], prefix: str = "") -> Iterator[str]:
    """Yield the columns of a record; those of nested records even if no row has such a record."""
    for name, field in of.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Record)]
        if inner:
            yield from _names(inner[0], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _flat(record: Record) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in leaves(record.model_dump(mode="json"), whole=MAPPINGS):
        found[name] = json.dumps(value) if isinstance(value, (Mapping, list)) else value
    return found
