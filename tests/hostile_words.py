"""Text that controls terminals and breaks file formats, put into every text field of a run's records."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from tests.hostile import _changed, _places
from tula_hpc.records import Event, JobNote, Measurement, Plan, RunDirectory, TrainResult

# terminal codes (title, clear, color); right-to-left text; markup of rich; a matplotlib formula; XML and HTML; Excel
WORDS = (
    "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x9b31m\x7f\x00\x08\r",
    "\u202etxt.exe\u2066\u2069\u2028",
    "[red][/][link=file:///]x[/link]",
    "$\\frac{1}{$",
    "<script>]]>&amp;--><svg onload='x'>",
    "=cmd|'/c calc'!A0",
)
HOSTILE = " ".join(WORDS)
# all characters that must not reach users' screens; tabs and line ends may
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def spoil(run: RunDirectory, words: str = HOSTILE) -> int:
    """Put the words into every text field of a run's records that still validates; return the number of fields."""
    documents: list[tuple[type[BaseModel], Iterable[Path]]] = [
        (Plan, [run.plan_file]),
        (TrainResult, run.root.glob("train/*/*/result.json")),
        (TrainResult, run.root.glob("train/*/result.json")),
    ]
    count = 0
    for kind, paths in documents:
        for path in paths:
            if path.exists():
                text, places = _spoiled(kind, path.read_text(), words)
                path.write_text(text)
                count += places
    lines: list[tuple[type[BaseModel], Iterable[Path]]] = [
        (Measurement, run.profile.glob("*.jsonl")),
        (JobNote, run.profile.glob("*.notes")),
        (Event, [run.root / "events.jsonl"]),
    ]
    for kind, paths in lines:
        for path in paths:
            if path.exists():
                spoiled = [_spoiled(kind, line, words) for line in path.read_text().strip().split("\n")]
                path.write_text("".join(f"{json.dumps(json.loads(line))}\n" for line, _ in spoiled))
                count += sum(places for _, places in spoiled)
    return count


def _spoiled(kind: type[BaseModel], text: str, words: str) -> tuple[str, int]:
    count = 0
    for place in list(_places(json.loads(text))):
        document = json.loads(text)
        if place[-1:] == ("partition",):
            # readers refuse a partition that the cluster does not have
            continue
        if isinstance(_at(document, place), str):
            changed = json.dumps(_changed(document, place, words))
            try:
                kind.model_validate_json(changed)
            except ValidationError:
                continue
            text, count = changed, count + 1
    return text, count


def _at(value: Any, place: tuple[str | int, ...]) -> Any:
    for key in place:
        value = value[key]
    return value
