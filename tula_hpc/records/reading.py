"""Reading records, whatever is in the files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from tula_hpc.errors import RunDirectoryError
from tula_hpc.files import in_words, open_regular, read_bounded

MAX_LINE_BYTES = 4_000_000
MAX_LINES_BYTES = 4 * 1024**3  # of a JSON Lines file
MAX_DOCUMENT_BYTES = 64 * 1024**2  # of a file that is one record, as plan.json is
MAX_FLOAT = 1e100  # beyond it products overflow
R = TypeVar("R", bound=BaseModel)


class ReadResult(NamedTuple, Generic[R]):
    """Records that could be read, and how many lines could not."""

    records: list[R]
    skipped: int


def read_records(kind: type[R], paths: Iterable[Path]) -> ReadResult[R]:
    """Read JSON Lines files that exist; lines that are torn or not of this kind are skipped and counted.

    Raises:
        RunDirectoryError: A file is there and cannot be read, or is out of all bounds.
    """
    records: list[R] = []
    skipped = 0
    for path in paths:
        for line in _lines(path):
            try:
                records.append(parse_record(kind, line))
            except ValueError:
                skipped += 1
    return ReadResult(records, skipped)


def _lines(path: Path) -> Iterator[bytes]:
    """Lines that are not blank; of one that is too long only the beginning, which is no record."""
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > MAX_LINES_BYTES:
                raise RunDirectoryError(f"expected at most {MAX_LINES_BYTES:,} bytes", source=path)
            while line := file.readline(MAX_LINE_BYTES):
                if line.strip():
                    yield line
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunDirectoryError(f"cannot be read: {in_words(error)}", source=path) from None


# what may be a number that is none, or too large: worth a closer look
_SUSPECT = re.compile(rb"NaN|Infinity|\d{18}|[eE]\+?\d{3}")


def parse_record(kind: type[R], text: bytes) -> R:
    """A record from JSON.

    Raises:
        ValueError: It is not one, or holds a number that is not finite or out of all bounds.
    """
    record = kind.model_validate_json(text)
    if _SUSPECT.search(text):
        _check_numbers(json.loads(text))
    return record


def _check_numbers(value: Any) -> None:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _check_numbers(item)
    elif isinstance(value, int | float) and not abs(value) <= (MAX_FLOAT if isinstance(value, float) else 2**63):
        raise ValueError(f"holds the number {value:.3g}")


_ANEW = "delete it to have it made anew"


def read_document(kind: type[R], path: Path) -> R:
    """Read a file that is one record.

    Raises:
        FileNotFoundError: There is none.
        RunDirectoryError: It cannot be read, or is damaged.
    """
    try:
        return parse_record(kind, read_bounded(path, MAX_DOCUMENT_BYTES))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RunDirectoryError(f"cannot be read: {in_words(error)}", source=path) from None
    except ValidationError as error:
        raise RunDirectoryError(f"is damaged: {_first_of(error)}; {_ANEW}", source=path) from None
    except ValueError as error:
        raise RunDirectoryError(f"is damaged: {error}; {_ANEW}", source=path) from None


def _first_of(error: ValidationError) -> str:
    """The first of pydantic's complaints in one line."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"][:6]))
    return " ".join(f"{where[:200]}: {first['msg']}".removeprefix(": ").split())[:500]
