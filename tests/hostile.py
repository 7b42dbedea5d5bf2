"""Damaged files of a run, as by a failing disk or an attacker: changed bytes, and JSON with hostile values."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

VALUES: list[Any] = [
    None, True, "x", "", -1, 0, 1, 0.5, -0.5, 1e308, 1e-320, -1e99, 1e99, 1e30, 2**20, 2**62, 2**63 - 1, 10**30,
    float("nan"), float("inf"), [], {}, [1] * 300, [[[[[]]]]], {"a": {"b": [None]}}, "$\\frac{", "<script>", "\u2028\0",
    "a" * 5000, "../../x", "\ud800", "\x1b]0;x\x07\x1b[2J\x9b31m", "\u202etxt\u2066\x7f\r", "[red][/]",
]  # fmt: skip
SNIPPETS = [
    b"\0", b"\xff", b"[", b"{", b'"', b"9" * 30, b"\n", b"NaN", b"[" * 9999, b'{"a":' * 500, b"\x1b[31m", b"\xc2\x9b",
]  # fmt: skip
WHOLES = [b"", b"null", b"[]", b"{}", b"3", b'"x"', b"\xff\xfe", b"\n" * 999, b"0" * 10**6, b"[" * 10**5, b"{}\n" * 999]


def _places(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield place
    items: Any = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _places(inner, (*place, key))


def _changed(value: Any, place: tuple[str | int, ...], new: Any) -> Any:
    if not place:
        return new
    whole = json.loads(json.dumps(value))
    inner = whole
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = new
    return whole


def _one_value(draw: st.DrawFn, text: bytes) -> bytes:
    """Replace one value of a JSON text by a hostile one."""
    value = json.loads(text)
    place = draw(st.sampled_from(list(_places(value))))
    return json.dumps(_changed(value, place, draw(st.sampled_from(VALUES)))).encode()


def _one_line(draw: st.DrawFn, text: bytes) -> bytes:
    lines = text.splitlines()
    number = draw(st.integers(0, len(lines) - 1))
    lines[number] = _one_value(draw, lines[number])
    return b"\n".join(lines) + b"\n"


def _bytes(draw: st.DrawFn, text: bytes) -> bytes:
    """Flip a bit, cut the end off, insert a snippet, or replace the whole text."""
    at = draw(st.integers(0, max(0, len(text) - 1)))
    kind = draw(st.sampled_from(["flip", "cut", "insert", "whole"]))
    if kind == "flip" and text:
        return text[:at] + bytes([text[at] ^ (1 << draw(st.integers(0, 7)))]) + text[at + 1 :]
    if kind == "cut":
        return text[:at]
    return (
        text[:at] + draw(st.sampled_from(SNIPPETS)) + text[at:] if kind == "insert" else draw(st.sampled_from(WHOLES))
    )


@st.composite
def damaged(draw: st.DrawFn, name: str, text: bytes) -> bytes:
    """Damage a file's content in one way that suits its name."""
    if not name.endswith(("json", "jsonl", "notes")) or not text.strip() or draw(st.integers(0, 3)) == 0:
        return _bytes(draw, text)
    return (_one_value if name.endswith(".json") else _one_line)(draw, text)


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 10**12)


# things that may be found in place of a regular file
THINGS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path),
    "an endless file": lambda path: path.symlink_to("/dev/zero"),
    "a terabyte": _sparse,
}


def put(path: Path, content: bytes | str) -> None:
    """Replace a file by other bytes, or by the entry of `THINGS` with this name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        THINGS[content](path)
