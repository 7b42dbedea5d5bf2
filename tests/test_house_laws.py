"""Laws of the product's source that neither ruff nor mypy know."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted(path for folder in ("tula_hpc", "analysis") for path in (ROOT / folder).rglob("*.py"))
READERS = {path for path in MODULES if path.parent.name == "records"}


def places_that_look_into_events(source: str) -> Iterator[int]:
    """Lines that read the name of an event or its data."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute):
            continue
        name = node.value.id if isinstance(node.value, ast.Name) else ""
        if node.attr == "event" or (node.attr == "data" and name in ("event", "e", "last")):
            yield node.lineno


@pytest.mark.parametrize("text", ["x.event == 'ended'", "event.data['label']", "job.event.stage"])
def test_the_law_knows_what_it_forbids(text: str) -> None:
    assert list(places_that_look_into_events(text)) == [1]


def test_only_records_look_into_events() -> None:
    """What a run's events mean together is asked of `RunHistory`."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in MODULES
        if path not in READERS
        for line in places_that_look_into_events(path.read_text())
    ]
    assert found == []
