"""Values that have to be there."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def known(value: T | None) -> T:
    """Return a value that has to be there."""
    assert value is not None
    return value
