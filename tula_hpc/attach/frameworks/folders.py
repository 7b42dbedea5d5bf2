"""Keep checkpoints that a framework writes by itself, each in a folder that one of ours names.

The folder lies among our checkpoints and is named after the one that it belongs to. Ours is written
when the folder is complete, with the size and the digest of each file: a training goes on from a
folder only if our checkpoint is on disk and every file is as it was. Interval, fencing and the fall
back to an older checkpoint are those of `checkpoint.store`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tula_hpc.checkpoint.store import file_name, sync_folder
from tula_hpc.errors import CheckpointError, InputError
from tula_hpc.files import in_words, make_private

if TYPE_CHECKING:
    from tula_hpc.attach.train.keeping import Keeper

_KEYS = frozenset(("folder", "batch", "files"))
_NAME = re.compile(r"checkpoint-r(\d{4,})-\d{12,}\.\w+")


@dataclass
class FolderState:
    """State that a framework keeps in a folder, with the two methods of what is kept."""

    # name of the framework's object, one word
    kind: str
    # writes into an existing empty folder; all workers call it
    save: Callable[[Path], object]
    # loads from such a folder
    load: Callable[[Path], object]
    holder: Keeper
    # global batch of the training, if the framework counts its progress in batches; 0: it does not
    batch: int = 0
    # saves by this process: at an epoch's end the same number of samples may be saved once more
    saves: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Save, and return the folder and its files; {} on other ranks than 0. Collective.

        Raises:
            CheckpointError: The folder cannot be made or read.
            InputError: The framework wrote to another place.
        """
        holder = self.holder
        place = holder.store.folder
        name = Path(file_name(holder.restart_count, holder.progress.samples_seen)).stem
        folder = place / f"{name}.{self.kind}{self.saves}"
        self.saves += 1
        is_main = holder.meet()
        try:
            if is_main:
                _make(folder, holder.restart_count)
            holder.meet()
            self.save(folder)
            if not holder.meet():
                return {}
            inside = sorted(folder.rglob("*"))
            saved = filter(Path.is_file, inside)
            files = {str(file.relative_to(folder)): _noted(file) for file in saved}
            for each in (folder, *filter(Path.is_dir, inside)):
                sync_folder(each)
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be saved: {in_words(error)}") from error
        if not files:
            raise InputError(
                f"the {self.kind} has not saved to {folder}, as it was asked to; leave the naming "
                "of checkpoints to tula (accelerate: no automatic_checkpoint_naming)",
                source="tula.keep",
            )
        return {"folder": folder.name, "batch": self.batch, "files": files}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the folder that a `state_dict` names."""
        self.load(self.holder.store.folder / state["folder"])


def kept_in_folder(name: str, kept: Any, holder: Keeper) -> Any:
    """Return the state of accelerate's Accelerator as a folder, anything else as it is."""
    methods = (getattr(kept, method, None) for method in ("save_state", "load_state"))
    if not all(map(callable, methods)):
        return kept
    return FolderState(
        name,
        lambda folder: kept.save_state(str(folder)),
        lambda folder: kept.load_state(str(folder)),
        holder,
    )


def check_folders(place: Path, state: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose folders have changed since.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    for kept in _folders_of(state):
        folder = place / Path(kept["folder"]).name
        for name, noted in kept["files"].items():
            try:
                now = _noted(folder / name)
            except OSError as error:
                raise CheckpointError(f"{folder / name}: {in_words(error)}") from error
            if now != noted:
                raise CheckpointError(f"{folder / name} is damaged")


def batch_of(state: Mapping[str, Any]) -> int:
    """Return the global batch in which a framework's checkpoint counts progress; 0: in none."""
    return max((int(kept["batch"]) for kept in _folders_of(state)), default=0)


def _folders_of(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    kept = state.get("kept", {}).values()
    return [each for each in kept if isinstance(each, dict) and each.keys() == _KEYS]


def _make(folder: Path, restart_count: int) -> None:
    """Make a folder anew, and delete folders that belong to no checkpoint."""
    make_private(folder.parent)
    for other in folder.parent.iterdir():
        found = _NAME.fullmatch(other.name)
        # a later restart may be writing its own folder just now
        is_mine = found is not None and int(found[1]) <= restart_count
        # the checkpoint that is being written may have several folders, made one after the other
        is_new = other.stem == folder.stem
        if is_mine and not is_new and other.is_dir() and not other.with_suffix(".tula").exists():
            shutil.rmtree(other)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)


def _noted(file: Path) -> list[Any]:
    """Flush a file to disk, and return its size and digest."""
    with file.open("rb") as content:
        os.fsync(content.fileno())
        return [file.stat().st_size, hashlib.file_digest(content, "sha256").hexdigest()]
