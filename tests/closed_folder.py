"""A folder that may not be entered, also for root, who may enter every folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def close_folder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse to look at what is in folders of this name, in place of the kernel."""
    stat = Path.stat

    def refused(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if path.parent.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", refused)
