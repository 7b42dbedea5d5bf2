"""A run's records as pandas DataFrames, for notebooks and for analyses of one's own.

    frames = tula_hpc.analysis.frames("runs/quickstart")
    frames.candidates.to_parquet("candidates.parquet")

Nested fields have a name with a dot, as `times.step_time_s`; lists and mappings of free names are
JSON. pandas is an extra, `pip install tula_hpc[pandas]`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

from tula_hpc.analysis.run_contents import leaves, read_run
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

# Unix times, which become dates
TIMES = ("time", "finished_at")
# of free names: a column each would be another one in each run
MAPPINGS = ("data", "versions")


class Frames(NamedTuple):
    """DataFrames of one run; one without rows has its columns all the same."""

    # every profile, whatever came of it
    measurements: Any
    # of the plan, with `chosen`
    candidates: Any
    # logged steps of all trainings, with `training`; of very many evenly spread ones
    metrics: Any
    # of all trainings, with `training`
    epochs: Any
    events: Any


def read_frames(run: str | Path) -> Frames:
    """Read a run directory; see `Frames`, and for errors `tula_hpc.analysis.frames`."""
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
    # of mappings, whose names are known by rows alone
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
    """Yield the columns of a record, whether or not a row has the records within it."""
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
