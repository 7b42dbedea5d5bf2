"""Listings of folder trees are made once, renewed when they are old, and ignored when they are damaged."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tula_hpc.data.image_tree import ImageTree, read_tree
from tula_hpc.errors import InputError

HOURS_AGO_NS = 1_700_000_000_000_000_000


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "temporary"))
    return tmp_path / "cache" / "tula_hpc"


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list of the folders that are listed from now on."""
    found: list[str] = []
    scandir = os.scandir

    def counting(path: Any = ".") -> Any:
        found.append(os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", counting)
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tree of two classes, one of them with a folder in it, last changed long ago."""
    root = tmp_path / "data" / "train"
    for name in ("cat/0.png", "cat/1.png", "dög/old/0.jpg", "dög/old/1.txt"):
        write(root / name)
    return settle(root)


def write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")


def settle(root: Path) -> Path:
    for folder in (root, *(path for path in root.rglob("*") if path.is_dir())):
        if abs(folder.stat().st_mtime_ns - HOURS_AGO_NS) > 1e12:
            os.utime(folder, ns=(HOURS_AGO_NS, HOURS_AGO_NS + len(list(folder.iterdir()))))
    return root


def same(one: ImageTree, other: ImageTree) -> bool:
    arrays = np.array_equal(one.names, other.names) and np.array_equal(one.labels, other.labels)
    return arrays and (one.root, one.classes) == (other.root, other.classes)


def test_the_second_use_lists_no_folder(root: Path, listed: list[str], cache: Path) -> None:
    first = read_tree(root)
    assert len(listed) == 4
    assert first.classes == ("cat", "dög")
    assert [first.path(index) for index in range(3)] == [root / "cat/0.png", root / "cat/1.png", root / "dög/old/0.jpg"]
    assert first.labels.tolist() == [0, 0, 1]
    listed.clear()
    assert same(read_tree(root), first)
    assert listed == []
    assert cache.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("new", ["cat/2.png", "dög/old/2.png", "fox/0.png", "cat/wild/0.png"])
def test_a_changed_tree_is_listed_anew(root: Path, new: str, listed: list[str]) -> None:
    read_tree(root)
    write(root / new)
    assert new in [os.fsdecode(name) for name in read_tree(root).names.tolist()]
    settle(root)
    again = read_tree(root)
    listed.clear()
    assert same(read_tree(root), again)
    assert listed == []


def test_a_removed_image_and_a_removed_folder_are_noticed(root: Path) -> None:
    assert len(read_tree(root)) == 3
    (root / "cat" / "1.png").unlink()
    assert len(read_tree(root)) == 2
    (root / "dög" / "old" / "0.jpg").unlink()
    (root / "dög" / "old" / "1.txt").unlink()
    (root / "dög" / "old").rmdir()
    with pytest.raises(InputError, match=r"dög: expected images of this class"):
        read_tree(root)


def test_a_tree_that_has_just_been_changed_is_not_kept(root: Path, cache: Path) -> None:
    write(root / "cat" / "2.png")
    read_tree(root)
    assert not list(cache.glob("*.listing"))


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "another file": lambda _: b"nonsense" * 100,
    "cut short": lambda whole: whole[:-9],
    "another byte": lambda whole: whole[:99] + bytes([whole[99] ^ 1]) + whole[100:],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_listing_is_replaced(
    root: Path, cache: Path, damage: Callable[[bytes], bytes], listed: list[str]
) -> None:
    first = read_tree(root)
    (file,) = cache.glob("*.listing")
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert same(read_tree(root), first)
    listed.clear()
    assert same(read_tree(root), first)
    assert listed == []


def test_what_is_left_out_is_part_of_the_question(root: Path) -> None:
    assert read_tree(root).classes == ("cat", "dög")
    assert read_tree(root, leave_out=["cat"]).classes == ("dög",)
    assert read_tree(root).classes == ("cat", "dög")


def test_a_link_that_leads_to_another_tree_is_noticed(tmp_path: Path, root: Path) -> None:
    write(tmp_path / "other" / "owl" / "0.png")
    settle(tmp_path / "other")
    link = tmp_path / "link"
    link.symlink_to(root)
    assert read_tree(link).classes == ("cat", "dög")
    link.unlink()
    link.symlink_to(tmp_path / "other")
    assert read_tree(link).classes == ("owl",)


def test_workers_that_start_together_list_once(root: Path, listed: list[str]) -> None:
    with ThreadPoolExecutor(4) as workers:
        found = list(workers.map(read_tree, [root] * 4))
    assert len(listed) == 4
    assert all(same(tree, found[0]) for tree in found)


def test_a_folder_that_others_may_write_to_is_not_believed(
    tmp_path: Path, root: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read_tree(root)
    cache.chmod(0o775)
    (listing,) = cache.glob("*.listing")
    read_tree(root)
    assert f"cannot be kept in {cache}: others may write to it; chmod go-w it" in capsys.readouterr().err
    assert cache.stat().st_mode & 0o777 == 0o775
    (other,) = tmp_path.glob(f"temporary/*/{listing.name}")
    assert other.parent.stat().st_mode & 0o777 == 0o700


def test_a_tree_is_listed_even_without_a_folder_for_its_listing(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "file"))
    assert len(read_tree(root)) == 3
