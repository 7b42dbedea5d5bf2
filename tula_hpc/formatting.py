r"""Numbers as people write them: durations, sizes, money, percentages. For the report, its figures and the terminal.

Foreign text where it leaves: names, errors of models and words of Slurm must not steer a terminal
or break a file.

Records on disk keep what was said. What people see shows a control character as what it is, such as
`\x1b`.
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, cast

MINUTE_S = 60
HOUR_S = 3600
DAY_S = 86_400
UNKNOWN = "–"

_SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_duration(seconds: float | None) -> str:
    """Seconds as two units at most: 0.012 → "12 ms", 4.26 → "4.3 s", 750 → "12 min 30 s", 98000 → "1 d 3 h"."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 0:
        return f"−{format_duration(-seconds)}"
    if seconds < 0.9995:
        return f"{format_number(seconds * 1000, 3 if seconds >= 0.1 else 2)} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    return _long_duration(seconds)


def _long_duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < HOUR_S:
        return _two(whole, MINUTE_S, "min", 1, "s")
    if whole < DAY_S:
        return _two(whole, HOUR_S, "h", MINUTE_S, "min")
    return _two(whole, DAY_S, "d", HOUR_S, "h")


def _two(whole_s: int, large_s: int, large: str, small_s: int, small: str) -> str:
    """Large and small unit; the small one is rounded first, so that 59.6 of it carries into the large one."""
    smalls = math.floor(whole_s / small_s + 0.5)
    per_large = large_s // small_s
    first, rest = divmod(smalls, per_large)
    return f"{first:,} {large} {rest} {small}" if rest else f"{first:,} {large}"


def format_bytes(count: float | None) -> str:
    """Bytes in binary units with two or three digits: 2_040_109_465 → "1.9 GiB"."""
    if count is None or not math.isfinite(count):
        return UNKNOWN
    value, power = abs(float(count)), 0
    while value >= 1023.5 and power < len(_SIZE_UNITS) - 1:
        value, power = value / 1024, power + 1
    text = f"{value:.1f}" if power and value < 9.95 else f"{value:,.0f}"
    return f"{'−' if count < 0 else ''}{text} {_SIZE_UNITS[power]}"


def format_money(amount: float | None, currency: str = "USD") -> str:
    """An amount with cents; below ten cents with two digits that count: 0.00423 → "0.0042 USD"."""
    if amount is None or not math.isfinite(amount):
        return UNKNOWN
    if 0 < abs(amount) < 0.0995:
        return f"{format_number(amount, 2)} {currency}"
    return f"{amount:,.2f} {currency}" if abs(amount) < 9_999.5 else f"{amount:,.0f} {currency}"


def format_percent(share: float | None, *, signed: bool = False) -> str:
    """A share of 1 in percent: 0.0834 → "8.3 %"; `signed` writes the plus too, for errors and changes."""
    if share is None or not math.isfinite(share):
        return UNKNOWN
    percent = 100 * share
    text = f"{abs(percent):.1f}" if abs(percent) < 99.95 else f"{abs(percent):,.0f}"
    if float(text.replace(",", "")) == 0:
        return f"{text} %"
    sign = "−" if percent < 0 else "+" if signed else ""
    return f"{sign}{text} %"


def in_samples(batch: float) -> str:
    """A batch that need not be whole: "150 samples", "less than one sample"."""
    return plural(round(batch), "sample") if batch >= 1.0 else "less than one sample"


def in_percent(share: float | None) -> float | None:
    """A share for an axis or a table in percent."""
    return None if share is None else 100 * share


def format_score(accuracy: float | None, loss: float | None) -> str:
    """What a model reaches on the test set: "64.5 % test accuracy", or "test loss 1.93" where there is no accuracy."""
    if accuracy is None and loss is not None:
        return f"test loss {format_number(loss, 3)}"
    return f"{format_percent(accuracy)} test accuracy"


def format_number(value: float, digits: int = 4) -> str:
    """A plain decimal number with so many significant digits, thousands separated, no exponent unless it must be."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else UNKNOWN
    if not 1e-6 <= abs(value) < 1e15:
        return f"{value:.{digits}g}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    text = f"{round(value, decimals):,.{max(0, decimals)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def keep_units(text: str) -> str:
    """The text with no-break spaces between a number and what follows it, and within "N = 8": no line ends there."""
    return re.sub(r"(?<=\d) (?=[A-Za-z%])| (?== \d)|(?<= =) (?=\d)", "\u00a0", text)


def plural(count: int, noun: str) -> str:
    """A count with its noun: "1 node", "4 nodes"; sibilants take "es": "2 batches"."""
    ending = "" if count == 1 else "es" if noun.endswith(("s", "x", "tch", "sh")) else "s"
    return f"{count:,} {noun}{ending}"


# characters of a line of a log that is shown
MOST_LOG_LINE = 1_000
# characters of any line on standard error: a command that cancels many jobs is long
MOST_ERROR_LINE = 20_000

# all but tabs and line ends: C0, DEL and C1; line ends that only some programs know; what turns the
# direction of writing (UAX 9); lone surrogates, which no encoding has; and what XML 1.0 forbids
# besides
_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def printable(text: str) -> str:
    r"""Return the text with control characters as `\x1b` or `\u009b`; lines stay lines, and JSON stays JSON.

    JSON writes all of C0 as escapes itself, so that only those of the second kind, which it knows,
    are put into it.
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
