"""A training set with a NaN in one item."""

from __future__ import annotations

from typing import Any

import pytest

from tula_hpc.data.loader import EpochDataset, Key


def spoil_item(monkeypatch: pytest.MonkeyPatch, position: int) -> None:
    """Put NaN into the item at this position of every training set."""
    items = EpochDataset.items

    def spoiled(self: EpochDataset, indices: list[Key]) -> list[Any]:
        pairs = zip(indices, items(self, indices), strict=True)
        return [(item[0] * float("nan"), item[1]) if key[1] == position else item for key, item in pairs]

    monkeypatch.setattr(EpochDataset, "items", spoiled)
