"""Checkpoints that frameworks write are complete or not used, and none stays that nothing names."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.known import known
from tula_hpc.attach.frameworks.folders import FolderState, batch_of, check_folders, kept_in_folder
from tula_hpc.checkpoint.store import CheckpointStore
from tula_hpc.errors import CheckpointError, InputError


class Writer:
    """A framework, and the keeper of its only worker."""

    def __init__(self, place: Path, restart_count: int = 0) -> None:
        self.store, self.restart_count = CheckpointStore(place), restart_count
        self.progress = SimpleNamespace(samples_seen=0)
        self.text, self.read = "", ""
        self.state = FolderState("made", self.write, self.take, self, batch=64)  # type: ignore[arg-type] # all it needs

    def meet(self) -> bool:
        return True

    def write(self, folder: Path) -> None:
        (folder / "inner").mkdir()
        (folder / "inner" / "weights").write_text(self.text)

    def take(self, folder: Path) -> None:
        self.read = (folder / "inner" / "weights").read_text()

    def save(self, samples: int) -> Path:
        self.progress.samples_seen, self.text = samples, f"after {samples}"
        kept = self.state.state_dict()
        self.store.save({"kept": {"made": kept}}, samples_seen=samples, restart_count=self.restart_count)
        return self.store.folder / str(kept["folder"])

    def load(self) -> str:
        loaded = known(self.store.load_latest(check=lambda state: check_folders(self.store.folder, state)))
        assert batch_of(loaded.state) == 64
        self.state.load_state_dict(loaded.state["kept"]["made"])
        return self.read


def test_several_things_have_a_folder_each_in_one_checkpoint(tmp_path: Path) -> None:
    """Two accelerators, for example, save separately."""
    writer = Writer(tmp_path / "checkpoints")
    second = FolderState("second", writer.write, writer.take, writer, batch=64)  # type: ignore[arg-type]
    kept = {"made": writer.state.state_dict(), "second": second.state_dict()}
    check_folders(writer.store.folder, {"kept": kept})
    assert len({str(each["folder"]) for each in kept.values()}) == 2


@pytest.mark.parametrize("harm", ["changed", "gone"])
def test_a_damaged_folder_is_passed_over(tmp_path: Path, harm: str) -> None:
    writer = Writer(tmp_path / "checkpoints")
    writer.save(10)
    file = writer.save(20) / "inner" / "weights"
    assert writer.load() == "after 20"
    file.write_text("after 99") if harm == "changed" else file.unlink()
    assert writer.load() == "after 10"
    loaded = known(writer.store.load_latest(check=lambda state: check_folders(writer.store.folder, state)))
    assert [str(file) in why for _, why in loaded.rejected] == [True]


def test_folders_are_private_and_go_with_their_checkpoints(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "checkpoints")
    folders = [writer.save(samples) for samples in (10, 20, 20, 30, 40)]
    assert folders[1] != folders[2]
    left = {path for path in writer.store.folder.iterdir() if path.is_dir()}
    # two checkpoints are kept, and what the last save left
    assert set(folders[-2:]) <= left < set(folders)
    assert all(path.stat().st_mode & 0o777 == 0o700 for path in left)


def test_a_left_over_deletes_nothing_of_a_later_restart(tmp_path: Path) -> None:
    early, late = (Writer(tmp_path / "checkpoints", restart) for restart in (1, 2))
    being_written = late.store.folder / late.state.state_dict()["folder"]
    early.state.state_dict()
    assert being_written.exists()
    late.save(40)
    with pytest.raises(CheckpointError, match="left-over"):
        early.save(50)
    assert late.load() == "after 40"


def test_saving_elsewhere_is_refused_in_one_line(tmp_path: Path) -> None:
    accelerator = SimpleNamespace(save_state=lambda folder: None, load_state=lambda folder: None)
    writer: Any = Writer(tmp_path / "checkpoints")
    with pytest.raises(InputError, match="automatic_checkpoint_naming"):
        kept_in_folder("accelerator", accelerator, writer).state_dict()
