"""Files that stand beside another one, by their names."""

from __future__ import annotations

from pathlib import Path


def rank_file(path: Path, rank: int) -> Path:
    """The file of one rank beside rank 0's: appending from several clients of a network file system is not atomic."""
    return path if rank == 0 else path.with_name(f"{path.stem}-r{rank}.jsonl")


def with_rank_files(path: Path) -> list[Path]:
    """Rank 0's file and those that other ranks wrote beside it."""
    return [path, *sorted(path.parent.glob(f"{path.stem}-r*.jsonl"))]


def notes_file(path: Path) -> Path:
    """The notes of the job that writes measurements to `path`."""
    return path.with_suffix(".notes")
