"""Numbers as people write them: durations, sizes, money, percentages. For the report, its figures and the terminal."""

from __future__ import annotations

import math
import re

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
