r"""Format numbers and foreign text for reports, figures and the terminal.

Names, errors of models and messages of Slurm must not steer a terminal or break a file. Records on
disk keep them as they are; for people a control character is shown in a form such as `\x1b`. A
command that a message suggests can be run as printed (`command_line`).
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import math
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

from tula_hpc.python_path import PROGRAM, start_of_python

MINUTE_S = 60
HOUR_S = 3600
DAY_S = 86_400
# Times from here on, 30,000 years, are shown as "never". Plans cap longer ones here, so that they
# can be written down.
FOREVER_S = 1e12
UNKNOWN = "–"

_SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_duration(seconds: float | None) -> str:
    """Format seconds in at most two units: 0.012 → "12 ms", 750 → "12 min 30 s"."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 0:
        return f"−{format_duration(-seconds)}"
    if seconds < 0.9995:
        return f"{format_number(seconds * 1000, 2 if seconds < 0.1 else 3)} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    return _long_duration(seconds)


def _long_duration(seconds: float) -> str:
    if seconds >= FOREVER_S:
        return "never"
    whole = round(seconds)
    if whole < HOUR_S:
        return _two(whole, MINUTE_S, "min", 1, "s")
    if whole < DAY_S:
        return _two(whole, HOUR_S, "h", MINUTE_S, "min")
    return _two(whole, DAY_S, "d", HOUR_S, "h")


def _two(whole_s: int, large_s: int, large: str, small_s: int, small: str) -> str:
    # the small unit is rounded first, so that 59.6 of it carries into the large one
    smalls = math.floor(whole_s / small_s + 0.5)
    per_large = large_s // small_s
    first, rest = divmod(smalls, per_large)
    if not rest:
        return f"{first:,} {large}"
    return f"{first:,} {large} {rest} {small}"


def format_left(seconds: float, *, is_most: bool = False) -> str:
    """Format an estimate of the time left: "about 4 min left", or "up to about 4 min left"."""
    minutes = round(seconds / MINUTE_S)
    if minutes < 1:
        return "less than a minute left"
    up_to = "up to " if is_most else ""
    return f"{up_to}about {format_duration(float(MINUTE_S * minutes))} left"


# seconds to which durations are rounded
_STEPS_S = (
    *(1, 5, 10, 30),
    *(MINUTE_S * step for step in (1, 5, 10, 30)),
    *(HOUR_S * step for step in (1, 6)),
    *(DAY_S * step for step in (1, 5, 10, 50, 100)),
)


# (limit, unit), both in seconds: below the limit `format_duration` rounds to the unit
_UNITS_S = ((0.01, 1e-4), (0.9995, 1e-3), (59.95, 0.1), (HOUR_S, 1.0), (DAY_S, 60.0))


def duration_within(seconds: float, low: float, high: float, reference: float | None = None) -> str:
    """Format seconds with the digits that an interval justifies: 152 in 138 to 168 → "2 min 30 s".

    Below ten seconds these are two at least, so that other places do not seem to contradict them.
    `reference` is a time that `format_duration` shows next to the interval: rounding never moves an
    end of the interval past it, but takes more digits instead.
    """
    half = (high - low) / 2
    if half <= 0 or not math.isfinite(half + seconds):
        return format_duration(seconds)
    if half < 1:
        # at most three digits, unless a value shown next to the interval lies just outside it
        coarsest = _power_of_ten(max(half / 2, abs(low) / 300, abs(high) / 300))
        steps = [coarsest, coarsest / 10, coarsest / 100]
    else:
        # a coarser step would round an end of the interval past values well inside it
        steps = [step for step in reversed(_STEPS_S) if step <= max(half / 2, 1)]
    if reference is None:
        return _within(seconds, steps[0])
    unit = next((unit for limit, unit in _UNITS_S if abs(reference) < limit), HOUR_S)
    for step in steps:
        shown = [_rounded_s(end, step) for end in (low, high)]
        if _keeps_order(shown, (low, high), reference, unit):
            return _within(seconds, step)
    return format_duration(seconds)


def _within(seconds: float, step: float) -> str:
    rounded = _rounded_s(seconds, step)
    step = _own_step_s(seconds, step)
    if step >= 1 and 0 <= rounded < MINUTE_S:
        return f"{rounded:.0f} s"
    if step >= 1 or abs(rounded) >= MINUTE_S:
        return format_duration(rounded)
    if abs(rounded) >= 1:
        return f"{rounded:.{max(0, -round(math.log10(step)))}f} s"
    return f"{format_number(1000 * rounded, 3)} ms"


def _rounded_s(seconds: float, step: float) -> float:
    step = _own_step_s(seconds, step)
    return step * round(seconds / step)


def _own_step_s(seconds: float, step: float) -> float:
    # round to whole minutes at least if the time is shown in hours, to whole hours if in days
    if step >= 1 and abs(seconds) >= DAY_S:
        return max(step, HOUR_S)
    if step >= 1 and abs(seconds) >= HOUR_S:
        return max(step, MINUTE_S)
    return _with_two_digits(seconds, step) if abs(seconds) < 10 else step


def _with_two_digits(value: float, step: float) -> float:
    """Return a step that leaves a value two digits, as it has without an interval."""
    return min(step, _power_of_ten(abs(value)) / 10) if abs(value) >= 1e-6 else step


def _keeps_order(
    shown: Iterable[float], ends: Iterable[float], reference: float, unit: float
) -> bool:
    """Tell whether rounded ends lie on the same sides of the rounded value as before rounding."""
    seen = unit * round(reference / unit)
    pairs = zip(shown, ends, strict=True)
    return all((rounded - seen) * (end - reference) > 0.0 for rounded, end in pairs)


def _power_of_ten(value: float) -> float:
    return 10.0 ** math.floor(math.log10(value))


def money_within(
    amount: float, low: float, high: float, currency: str = "USD", reference: float | None = None
) -> str:
    """Format an amount with the digits that its interval justifies: 2.48 in 2.1 to 2.9 → "2.5 USD".

    These are two at least. `reference` is an amount that `format_money` shows next to the interval;
    see `duration_within`.
    """
    half = (high - low) / 2
    if half <= 0 or not math.isfinite(half + amount):
        return format_money(amount, currency)
    step = _power_of_ten(max(half / 2, abs(low) / 300, abs(high) / 300))
    if reference is not None:
        steps = [_with_two_digits(end, step) for end in (low, high)]
        shown = [each * round(end / each) for end, each in zip((low, high), steps, strict=True)]
        unit = 0.01
        if abs(reference) < 0.0995:
            unit = _power_of_ten(abs(reference) or 1.0) / 10
        if not _keeps_order(shown, (low, high), reference, unit):
            return format_money(amount, currency)
    step = _with_two_digits(amount, step)
    decimals = max(0, -round(math.log10(step)))
    return f"{step * round(amount / step):,.{decimals}f} {currency}"


def in_comparison(
    ratio: float,
    more: str = "longer",
    less: str = "shorter",
    multiple: str = "as long",
    other: str = "",
) -> str:
    """Compare two values by their ratio: "3 % longer than `other`", "4.4 times as long as `other`"."""
    if ratio >= 2.0:
        return f"{format_number(ratio, 2)} times {multiple}{other and f' as {other}'}"
    percent = 100 * abs(ratio - 1.0)
    share = f"{format_number(percent, 2 if percent >= 1 else 1)} %"
    if percent < 0.1:
        share = "less than 0.1 %"
    return f"{share} {more if ratio >= 1.0 else less}{other and f' than {other}'}"


def format_bytes(count: float | None) -> str:
    """Format bytes in binary units with two or three digits: 2_040_109_465 → "1.9 GiB"."""
    if count is None or not math.isfinite(count):
        return UNKNOWN
    value = abs(float(count))
    power = 0
    while value >= 1023.5 and power < len(_SIZE_UNITS) - 1:
        value /= 1024
        power += 1
    decimals = 1 if power and value < 9.95 else 0
    sign = "−" if count < 0 else ""
    return f"{sign}{value:,.{decimals}f} {_SIZE_UNITS[power]}"


def format_money(amount: float | None, currency: str = "USD") -> str:
    """Format an amount with cents, below ten cents with two significant digits: "0.070 USD"."""
    if amount is None or not math.isfinite(amount):
        return UNKNOWN
    if 0 < abs(amount) < 1e-6:
        return f"{format_number(amount, 2)} {currency}"
    if 1e-6 <= abs(amount) < 0.0995:
        decimals = 1 - math.floor(math.log10(abs(float(f"{amount:.1e}"))))
        return f"{amount:.{decimals}f} {currency}"
    decimals = 2 if abs(amount) < 9_999.5 else 0
    return f"{amount:,.{decimals}f} {currency}"


def format_percent(share: float | None, *, signed: bool = False) -> str:
    """Format a share of 1 in percent: 0.0834 → "8.3 %"; `signed` writes the plus, too."""
    if share is None or not math.isfinite(share):
        return UNKNOWN
    percent = 100 * share
    decimals = 1 if abs(percent) < 99.95 else 0
    text = f"{abs(percent):,.{decimals}f}"
    sign = "+" if signed else ""
    if percent < 0:
        sign = "−"
    if text == "0.0":
        sign = ""
    return f"{sign}{text} %"


def in_samples(batch: float) -> str:
    """Format a batch that need not be whole: "150 samples", "less than one sample"."""
    if batch >= 1.0:
        return plural(round(batch), "sample")
    return "less than one sample"


def in_percent(share: float | None) -> float | None:
    """Return a share in percent, for an axis or a table."""
    return None if share is None else 100 * share


def format_score(accuracy: float | None, loss: float | None) -> str:
    """Format a test result: "64.5 % test accuracy", or "test loss 1.93" without an accuracy."""
    if accuracy is not None:
        return f"{format_percent(accuracy)} test accuracy"
    if loss is not None:
        return f"test loss {format_number(loss, 3)}"
    return "no score"


def format_number(value: float, digits: int = 4) -> str:
    """Format a number with `digits` significant digits and separated thousands.

    An exponent is used only below 1e-6 and from 1e15 on.
    """
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return UNKNOWN
    if not 1e-6 <= abs(value) < 1e15:
        return f"{value:.{digits}g}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    text = f"{round(value, decimals):,.{max(0, decimals)}f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return text


def keep_units(text: str) -> str:
    """Put no-break spaces within "8 s", "N = 8", "N=2 b=4 (B=8)" and `kind = "time"`."""
    return re.sub(r"(?<=\d) (?=[A-Za-z%]|\(B=)| (?== [\d\"])|(?<= =) (?=[\d\"])", "\u00a0", text)


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: "1 node", "4 nodes"; sibilants take "es": "2 batches"."""
    if count == 1:
        return f"1 {noun}"
    ending = "es" if noun.endswith(("s", "x", "tch", "sh")) else "s"
    return f"{count:,} {noun}{ending}"


def first_line(text: str) -> str:
    """Return the first line that is not empty, "" if there is none."""
    return text.strip().partition("\n")[0]


def last_line(text: str) -> str:
    """Return the last line that is not empty, "" if there is none."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def listed(names: Sequence[str]) -> str:
    """Return for example "a, b and c"; "" for none."""
    *others, last = names or ("",)
    return f"{', '.join(others)} and {last}" if others else last


def aligned(
    rows: Sequence[Sequence[str]], justify: Callable[[str, int], str] = str.ljust
) -> list[str]:
    """Return rows of cells as lines of text with aligned columns."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return ["  ".join(map(justify, row, widths)).rstrip() for row in rows]


def in_short(names: Sequence[str], most: int = 3) -> str:
    """List the first `most` names, and say how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


# characters shown of a line of a log
MOST_LOG_LINE = 1_000
# characters shown of a line on standard error, where a command that cancels many jobs is long
MOST_ERROR_LINE = 20_000

# C0 except tabs and line ends, DEL and C1; line ends that only some programs know; characters that
# change the direction of writing (UAX 9); lone surrogates, which no encoding has; and the others
# that XML 1.0 forbids
_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def printable(text: str) -> str:
    r"""Show control characters as `\x1b` or `\u009b`; lines stay lines, and JSON stays JSON.

    JSON itself escapes all of C0, and knows escapes of the second kind.
    """
    return _UNPRINTABLE.sub(_escape, text.replace("\r\n", "\n"))


def _escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 0x20 else f"\\u{code:04x}"


def _in_json_escapes(error: UnicodeError) -> tuple[str, int]:
    r"""Show characters that an encoding lacks as `\u2013`, so that JSON stays JSON."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


IN_ESCAPES = "tula_hpc.in_json_escapes"
codecs.register_error(IN_ESCAPES, _in_json_escapes)


def in_short_lines(text: str, most: int = MOST_LOG_LINE) -> str:
    """Cut each line after `most` characters."""
    lines = text.split("\n")
    for index, line in enumerate(lines):
        if len(line) > most:
            lines[index] = f"{line[:most]}… ({len(line) - most:,} more characters)"
    return "\n".join(lines)


@contextlib.contextmanager
def _named_output() -> Iterator[None]:
    """Name the output in an error that names no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or "the output"
        raise


class _PrintableStream:
    """Stream for people: its text is cleaned, and shown in whatever encoding the stream has.

    Of each line `most` characters are shown; None: all.
    """

    def __init__(self, stream: TextIO, most: int | None) -> None:
        self.stream = stream
        self.most = most

    def write(self, text: str) -> int:
        """Write a text in a form that can be shown."""
        shown = printable(text)
        if self.most is not None:
            shown = in_short_lines(shown, self.most)
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        with _named_output():
            self.stream.write(shown.encode(encoding, IN_ESCAPES).decode(encoding))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write texts one after another."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the underlying stream."""
        with _named_output():
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def wrapped(head: str, text: str, width: int, indent: int) -> list[str]:
    """Wrap foreign text into lines: the first follows `head`, the others `indent` blanks."""
    return in_lines(in_short_lines(printable(text.replace("\n", " "))), width, head, indent)


def in_lines(text: str, width: int, head: str = "", indent: int = 2) -> list[str]:
    """Wrap text of our own into lines, see `wrapped`; a number and its unit stay together."""
    lines = textwrap.wrap(
        keep_units(text),
        width,
        initial_indent=head,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\u00a0", " ") for line in lines]


@contextlib.contextmanager
def printable_output() -> Iterator[None]:
    """Clean all output of a command, on standard output and error; also a decorator."""
    before = sys.stdout, sys.stderr
    # replaces a stream that the shell has closed, as by >&-
    with os.fdopen(os.open(os.devnull, os.O_WRONLY), "w") as nowhere:
        sys.stdout = cast(TextIO, _PrintableStream(sys.stdout or nowhere, None))
        sys.stderr = cast(TextIO, _PrintableStream(sys.stderr or nowhere, MOST_ERROR_LINE))
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


def with_own_escapes(stream: TextIO) -> TextIO:
    """Return the raw stream, for clean output with terminal escapes of its own.

    From now on, characters that its encoding lacks are escaped as in JSON.
    """
    while isinstance(stream, _PrintableStream):
        stream = stream.stream
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors=IN_ESCAPES)
    return stream


def command_line(*words: str) -> str:
    """Return the shell line of a command of this very installation, such as `tula status RUN`.

    The script is named with its folder if the shell would not find it; without a script, the
    interpreter is named.
    """
    return shlex.join([*_program(), *words])


def _program() -> list[str]:
    script = Path(sys.executable).with_name(PROGRAM)
    running = Path(sys.argv[0])
    on_path = shutil.which(PROGRAM)
    own = [path for path in (script, running) if path.name == PROGRAM and path.exists()]
    if on_path is not None and any(path.samefile(on_path) for path in own):
        return [PROGRAM]
    if os.access(script, os.X_OK):
        return [str(script)]
    return [*start_of_python(), "-m", "tula_hpc"]
