"""A training set with an item that holds nan."""

from __future__ import annotations

from typing import Any

import pytest

from tula_hpc.data.loader import EpochDataset, Key


def spoil_item(monkeypatch: pytest.MonkeyPatch, position: int) -> None:
    """Let every training set have nan in its item at this position."""
    items = EpochDataset.items

    def spoiled(self: EpochDataset, indices: list[Key]) -> list[Any]:
        pairs = zip(indices, items(self, indices), strict=True)
        return [(item[0] * float("nan"), item[1]) if key[1] == position else item for key, item in pairs]

    monkeypatch.setattr(EpochDataset, "items", spoiled)
