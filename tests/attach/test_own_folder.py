from __future__ import annotations

import glob
import os
import shutil
import sqlite3
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from tests.forked import start_workers
from tula_hpc.attach import own_folder as folders
from tula_hpc.attach.own_folder import Saved, last_saved_in, names_saved_in, own_folder, places_saved_in, spare_files
from tula_hpc.own_sources import named_above
from tula_hpc.records import RunDirectory

WRITTEN = (
    "log.txt",
    "notes/run.csv",
    "out/last.pt",
    "out/best.safetensors",
    "out/old.pt",
    "out/cut",
    "out/x.npy",
    "x.db",
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A user's folder with files of earlier trainings."""
    home = tmp_path / "home"
    for name in WRITTEN:
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"the user's {name}\n")
    (home / "x.db").write_bytes(b"")
    (home / "cache" / "deep").mkdir(parents=True)
    (home / "cache" / "deep" / "index").write_text("the user's index")
    return home


def test_a_folder_shows_what_lies_in_the_working_directory_and_keeps_what_is_new(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "data").mkdir(parents=True)
    (home / "data" / "x").write_text("1")
    own = own_folder(tmp_path / "run" / "own", home)
    assert (own / "data" / "x").read_text() == "1"
    (own / "last.pt").write_text("2")
    own_folder(own, home)
    assert [path.name for path in home.iterdir()] == ["data"]
    assert (own / "last.pt").read_text() == "2"


def test_a_folder_of_somebody_else_that_may_not_be_searched_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may search every folder, so the test replaces the kernel's answer."""
    home = tmp_path / "home"
    (home / "private").mkdir(parents=True)
    is_file = Path.is_file

    def refused(path: Path) -> bool:
        if path.parent.name == "private":
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refused)
    own = own_folder(tmp_path / "run" / "own", home)
    assert [path.name for path in own.iterdir()] == ["private"]


def test_files_that_scripts_name_in_the_folder_above_appear_there_and_are_spared(tmp_path: Path) -> None:
    home = tmp_path / "examples" / "mnist"
    for name in ("data/x", "out/last.pt", "others/y"):
        path = home.parent / name
        path.parent.mkdir(parents=True)
        path.write_text("the user's")
    home.mkdir()
    (home / "train.py").write_text('MNIST("../data"); os.path.join("..", "out"); x = "../../of/no", "..", "../none"')
    above = named_above([str(home / "train.py")], ["--data=../more", "../data"])
    assert above == ["data", "more", "none", "out"]
    own = own_folder(tmp_path / "run" / "work", home, above)
    start_workers(1, write_above, own)
    assert sorted(path.name for path in own.parent.iterdir()) == ["data", "out", "saved.jsonl", "work"]
    assert (home.parent / "out" / "last.pt").read_text() == "the user's"
    assert not (home.parent / "data" / "new").exists()


def write_above(_: int, own: Path) -> None:
    os.chdir(own)
    spare_files(own, nowhere)
    assert Path("../data/x").read_text() == "the user's"
    Path("../data/new").touch()
    torch.save({}, "../out/last.pt")


def test_a_folder_below_the_working_directory_does_not_hold_itself(tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine" / "profile" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "weights.pt").write_text("1")
    (tmp_path / "here").symlink_to(tmp_path / "runs")
    for name in ("second", "third"):
        own = own_folder(tmp_path / "here" / "mine" / "profile" / name / "work", tmp_path)
        (own / "runs" / "board").mkdir()
    found = {path.relative_to(own).as_posix() for path in own.rglob("*") if not path.is_relative_to(own / "here")}
    # Python 3.11 follows links to folders here, and later versions do not
    above = "runs/mine/profile"
    assert {"runs/weights.pt", "runs/board", f"{above}/first", f"{above}/third"} <= found
    assert f"{above}/third/work" not in found
    assert not (tmp_path / "runs" / "board").exists()


def test_run_directories_are_not_shown(tmp_path: Path) -> None:
    """Otherwise a script could continue from the newest checkpoint that it finds anywhere below."""
    for name in ("mine", "other"):
        run = RunDirectory(tmp_path / "runs" / name).create()
        run.sweep_file.touch()
        run.log_event("submitted", "profile", job_id="1")
        (run.profile / "last.pt").touch()
    (tmp_path / "runs" / "train").mkdir()
    (tmp_path / "runs" / "train" / "last.pt").touch()
    own = own_folder(tmp_path / "runs" / "mine" / "train" / "work", tmp_path)
    apart = own_folder(tmp_path / "apart", tmp_path / "runs")
    for folder, place in ((own, "runs/train/last.pt"), (apart, "train/last.pt")):
        # through links, as scripts search
        assert glob.glob("**/last.pt", root_dir=folder, recursive=True) == [place]  # noqa: PTH207


def nowhere() -> None:
    """Keep no folder, as in a profile."""


def write_over(_: int, own: Path) -> None:
    """Change existing files in every way that scripts do."""
    os.chdir(own)
    spare_files(own, nowhere)
    for name, mode, text in (("log.txt", "a", "more\n"), ("notes/run.csv", "w", "new")):
        with Path(name).open(mode) as file:
            file.write(text)
    torch.save(obj={"step": 1}, f="out/last.pt")
    safetensors.torch.save_file({"x": torch.ones(1)}, "out/best.safetensors")
    Path("out/old.pt").unlink()
    os.truncate("out/cut", 3)
    np.save("out/x.npy", np.ones(2))
    sqlite3.connect("x.db").execute("create table runs (name)").connection.commit()
    shutil.rmtree("cache")
    Path("out/new").write_text("made by the script")
    Path("latest").symlink_to("out/new")
    with Path("latest").open("a") as file:
        file.write(", twice")


def save_elsewhere(_: int, own: Path) -> None:
    os.chdir(own)
    steps = iter((3, 3, 5))
    spare_files(own, lambda: Saved(at=time.time(), step=next(steps), samples_seen=0, epoch=0, offset=0))
    own.parent.with_name("fetched.part").touch()
    own.parent.with_name("fetched.part").rename(own.parent.with_name("fetched.pt"))
    assert last_saved_in(own) is None
    for name in ("of-any-name", "another", "of-any-name"):
        torch.save({}, own.parent.with_name(name))
    own.parent.with_name("another").rename(own.parent.with_name("last.pt"))
    own.parent.with_name("best.pt").symlink_to("last.pt")
    own.parent.with_name("of-any-name").rename(own.parent.with_name("log.txt"))


def test_a_save_of_a_script_is_noted_wherever_it_was(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    own = own_folder(tmp_path / "own" / "work", tmp_path / "home")
    assert last_saved_in(own) is None
    start_workers(1, save_elsewhere, own)
    assert last_saved_in(own) == pytest.approx((tmp_path / "log.txt").stat().st_mtime, abs=5.0)
    assert [place.step for place in places_saved_in(own)] == [3, 5]
    assert names_saved_in(own) == {"of-any-name", "another", "last.pt", "best.pt"}


def test_overwritten_files_stay_in_the_scripts_folder(home: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    own = own_folder(tmp_path / "run" / "own", home)
    start_workers(1, write_over, own)
    assert {path: path.read_bytes() for path in home.rglob("*") if path.is_file()} == before
    assert (own / "log.txt").read_text() == "the user's log.txt\nmore\n"
    assert (own / "notes" / "run.csv").read_text() == "new"
    assert torch.load(own / "out" / "last.pt", weights_only=True) == {"step": 1}
    assert (own / "out" / "cut").read_text() == "the"
    assert sqlite3.connect(own / "x.db").execute("select count(*) from runs").fetchone() == (0,)
    assert not (own / "out" / "old.pt").exists()
    assert not (own / "cache").exists()
    assert (own / "latest").is_symlink(), "a link that the script made stays a link"
    assert (own / "out" / "new").read_text() == "made by the script, twice"
    assert not list(own.rglob("*.[0-9]*"))


def test_a_folder_of_many_entries_or_one_that_is_hidden_is_the_real_one(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "MOST_ENTRIES", 6)
    (home / ".git").mkdir()
    own = own_folder(tmp_path / "run" / "own", home)
    linked = {path.name for path in own.iterdir() if path.is_symlink()}
    # the first numbers that fit are drawn again, whatever follows
    assert linked == {".git", "log.txt", "out", "x.db"}
    (own / "out" / "new").write_text("1")
    assert (home / "out" / "new").exists()
