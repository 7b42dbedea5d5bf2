r"""Foreign text where it leaves: names, errors of models and words of Slurm must not steer a terminal or break a file.

Records on disk keep what was said. What people see shows a control character as what it is, such as `\x1b`.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, cast

MOST_LOG_LINE = 1_000  # characters of a line of a log that is shown
MOST_ERROR_LINE = 20_000  # characters of any line on standard error: a command that cancels many jobs is long

# all but tabs and line ends: C0, DEL and C1; line ends that only some programs know; what turns the direction of
# writing (UAX 9); lone surrogates, which no encoding has; and what XML 1.0 forbids besides
_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def printable(text: str) -> str:
    r"""Return the text with control characters as `\x1b` or `\u009b`; lines stay lines, and JSON stays JSON.

    JSON writes all of C0 as escapes itself, so that only those of the second kind, which it knows, are put into it.
    """
    return _UNPRINTABLE.sub(_escape, text.replace("\r\n", "\n"))


def _escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 0x20 else f"\\u{code:04x}"


def in_short_lines(text: str, most: int = MOST_LOG_LINE) -> str:
    """Return the text with only the beginning of each line that is longer than so many characters."""
    return "\n".join(_shortened(line, most) for line in text.split("\n"))


def _shortened(line: str, most: int) -> str:
    return line if len(line) <= most else f"{line[:most]}… ({len(line) - most:,} more characters)"


class _PrintableStream:
    """A stream for people: what is written to it is cleaned, and shown in whatever encoding it has."""

    def __init__(self, stream: TextIO, most: int | None) -> None:
        self.stream, self.most = stream, most

    def write(self, text: str) -> int:
        """Write it all in a form that can be shown."""
        shown = printable(text)
        shown = shown if self.most is None else in_short_lines(shown, self.most)
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        self.stream.write(shown.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write them one after another."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def printable_output() -> Iterator[None]:
    """Clean all that is written to standard output and error meanwhile; around a command, or as its decorator."""
    before = sys.stdout, sys.stderr
    sys.stdout = cast(TextIO, _PrintableStream(sys.stdout, None))
    sys.stderr = cast(TextIO, _PrintableStream(sys.stderr, MOST_ERROR_LINE))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def with_own_escapes(stream: TextIO) -> TextIO:
    """Return the stream for who draws on a terminal with escapes of its own, and has cleaned what it shows."""
    while isinstance(stream, _PrintableStream):
        stream = stream.stream
    return stream
