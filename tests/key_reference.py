"""Reference of every key of sweep and cluster files, from the types in `tula_hpc.config` and their docstrings.

    python -m tests.key_reference

writes it into sweeps/README.md and slurm_templates/README.md, between the two markers in each file.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from tula_hpc.config import (
    ClusterSpec,
    ContainerSpec,
    ObjectiveSpec,
    PartitionSpec,
    PricingSpec,
    SearchSpec,
    Spec,
    StudySpec,
    SweepSpec,
    TrainingSpec,
    WorkloadSpec,
)

ROOT = Path(__file__).resolve().parent.parent
BEGIN = "<!-- every key, by python -m tests.key_reference -->"
END = "<!-- end of every key -->"
# for each file: the heading of each TOML table, and the class of its keys
TABLES: dict[str, dict[str, type[Spec]]] = {
    "sweeps/README.md": {
        "": SweepSpec,
        "[workload]": WorkloadSpec,
        "[search]": SearchSpec,
        "[objective]": ObjectiveSpec,
        "[training]": TrainingSpec,
        "[study]": StudySpec,
    },
    "slurm_templates/README.md": {
        "": ClusterSpec,
        "[container]": ContainerSpec,
        "[pricing]": PricingSpec,
        "[[partitions]]": PartitionSpec,
    },
}
# unit by the end of a key's name; the first match counts
UNITS = {
    "_gib_hour": "USD per GiB and hour",
    "usd_per_unit": "USD per unit and hour",
    "_node_hour": "USD per node and hour",
    "usd_per_kwh": "USD per kWh",
    "watts_per_node": "W",
    "_minutes": "min",
    "_seconds": "s",
    "_hours": "h",
    "_s": "s",
    "_gb": "GiB",
    "_epochs": "epochs",
    "epochs": "epochs",
    "_steps": "steps",
    "_batch": "samples",
    "batches": "samples",
    "samples": "samples",
    "image_size": "pixels",
    "budget": "USD or SU",
    "cluster_sizes": "nodes",
    "max_nodes": "nodes",
}
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def reference(tables: dict[str, type[Spec]]) -> str:
    """Return the tables of a file's keys, as Markdown."""
    parts: list[str] = []
    for heading, kind in tables.items():
        if heading:
            parts.append(f"`{heading}`\n")
        rows = ["| key | type | default | |", "| --- | --- | --- | --- |", *_rows(kind)]
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def _rows(kind: type[Spec]) -> Iterator[str]:
    documents = attribute_docstrings(kind)
    for key, field in kind.model_fields.items():
        sentence = documents.get(key)
        if sentence is None and kind is PartitionSpec:
            sentence = "As in the cluster file, for this partition."
        if sentence is None:
            raise ValueError(f"{kind.__name__}.{key}: has no docstring")
        cells = (f"`{key}`", _type(key, field), _default(field), sentence)
        yield " | ".join(cell.replace("|", r"\|") for cell in ("", *cells, "")).strip()


def attribute_docstrings(kind: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class, each in one line."""
    (body,) = [node for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef)]
    found: dict[str, str] = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[field.target.id] = " ".join(str(after.value.value).split())
    return found


def _type(key: str, field: FieldInfo) -> str:
    words = _words(field.annotation)
    bounds = _bounds(field.metadata)
    unit = next((unit for end, unit in UNITS.items() if key.endswith(end)), "")
    return ", ".join(filter(None, [f"{words} {bounds}".strip(), unit]))


def _bounds(metadata: list[Any]) -> str:
    found = [
        f"{sign} {_number(value)}"
        for each in metadata
        for name, sign in _BOUNDS.items()
        if (value := getattr(each, name, None)) is not None
    ]
    return " and ".join(found)


def _number(value: float) -> str:
    if isinstance(value, int) and value > 2**20 and value & (value - 1) == 0:
        return f"2^{value.bit_length() - 1}"
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def _words(annotation: Any) -> str:
    """Return the type of a value as TOML names it."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words(inner[0])
    if origin is Literal:
        return " or ".join(f"`{json.dumps(choice)}`" for choice in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_words(each) for each in inner if each is not type(None)))
    if origin in (tuple, list):
        return f"list of {_words(inner[0])}"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, Spec)):
        return "table"
    return {bool: "boolean", int: "integer", float: "number", str: "text", Path: "path"}[annotation]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.default
    if default is None:
        return ""
    if isinstance(default, Spec | dict):
        return "" if isinstance(default, Spec) or not default else f"`{default}`"
    if isinstance(default, tuple):
        default = list(default)
    return f"`{json.dumps(default)}`"


def with_reference(text: str, tables: dict[str, type[Spec]]) -> str:
    """Return the text of a file with the present reference between its markers."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    found = f"{BEGIN}\n{reference(tables)}{END}"
    replaced, times = pattern.subn(lambda _: found, text)
    if times != 1:
        raise ValueError(f"expected the markers {BEGIN} and {END} once")
    return replaced


def main() -> int:
    """Write the reference into the files; return 0."""
    for name, tables in TABLES.items():
        path = ROOT / name
        path.write_text(with_reference(path.read_text(), tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())
