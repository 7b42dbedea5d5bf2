from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tula_hpc.formatting import (
    UNKNOWN,
    format_bytes,
    format_duration,
    format_money,
    format_number,
    format_percent,
    in_comparison,
    keep_units,
    plural,
    wrapped,
)

UNIT_S = {"ms": 0.001, "s": 1, "min": 60, "h": 3600, "d": 86_400}
UNIT_BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}


def read_duration(text: str) -> float:
    parts = re.findall(r"([\d.,]+) (\w+)", text)
    return sum(float(number.replace(",", "")) * UNIT_S[unit] for number, unit in parts)


@given(st.floats(min_value=1e-4, max_value=1e8))
def test_a_duration_reads_back_within_its_rounding(seconds: float) -> None:
    text = format_duration(seconds)
    assert read_duration(text) == pytest.approx(seconds, rel=0.05)
    assert len(re.findall(r"\d+ [a-z]+", text)) <= 2


@given(st.floats(min_value=60, max_value=1e8))
def test_the_small_unit_of_a_duration_never_reaches_the_large_one(seconds: float) -> None:
    numbers = {
        unit: int(number.replace(",", "")) for number, unit in re.findall(r"([\d,]+) (\w+)", format_duration(seconds))
    }
    assert numbers.get("s", 0) < 60
    assert numbers.get("min", 0) < 60
    assert "d" not in numbers or numbers.get("h", 0) < 24


@given(st.integers(min_value=1, max_value=2**55))
def test_bytes_read_back_within_their_rounding(count: int) -> None:
    number, unit = format_bytes(count).split(" ")
    assert float(number.replace(",", "")) * UNIT_BYTES[unit] == pytest.approx(count, rel=0.06)


@given(st.floats(min_value=1e-6, max_value=1e12))
def test_money_reads_back_within_its_rounding(amount: float) -> None:
    number, currency = format_money(amount, "EUR").split(" ")
    assert currency == "EUR"
    assert float(number.replace(",", "")) == pytest.approx(amount, rel=0.06)


@given(st.floats(min_value=1e-12, max_value=1e14), st.integers(min_value=1, max_value=6))
def test_a_number_keeps_its_significant_digits(value: float, digits: int) -> None:
    assert float(format_number(value, digits).replace(",", "")) == pytest.approx(value, rel=0.51 * 10 ** (1 - digits))


def test_examples_of_the_documentation() -> None:
    assert format_duration(750) == "12 min 30 s"
    assert format_bytes(2_040_109_465) == "1.9 GiB"
    assert format_money(0.99) == "0.99 USD"
    assert [format_money(each) for each in (0.07, 0.0096, 0.0042)] == ["0.070 USD", "0.0096 USD", "0.0042 USD"]
    assert format_percent(0.0834) == "8.3 %"
    assert format_percent(-0.0834, signed=True) == "−8.3 %"
    assert format_percent(0.0834, signed=True) == "+8.3 %"


def test_the_small_unit_is_rounded_and_carried() -> None:
    assert format_duration(2 * 3600 + 59.6 * 60) == "3 h"
    assert format_duration(2 * 3600 + 29.6 * 60) == "2 h 30 min"


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_what_is_no_number_becomes_a_dash(value: float | None) -> None:
    assert {format_duration(value), format_bytes(value), format_money(value), format_percent(value)} == {UNKNOWN}


def test_a_change_of_nothing_has_no_sign() -> None:
    assert format_percent(-0.0001, signed=True) == format_percent(0.0, signed=True) == "0.0 %"


def test_a_noun_follows_its_number() -> None:
    assert [plural(1, "node"), plural(4, "node"), plural(2, "batch"), plural(20, "epoch")] == [
        "1 node",
        "4 nodes",
        "2 batches",
        "20 epochs",
    ]


def test_units_stay_with_their_numbers() -> None:
    assert keep_units("batch 64 takes 12 min 30 s") == "batch 64\u00a0takes 12\u00a0min 30\u00a0s"
    assert keep_units("hardly any at N = 8, B = 1,024") == "hardly any at N\u00a0=\u00a08, B\u00a0=\u00a01,024"
    kept = 'N=2\u00a0b=16\u00a0(B=32); objective.kind\u00a0=\u00a0"cost" chooses it'
    assert keep_units(kept.replace("\u00a0", " ")) == kept
    assert wrapped("time  ", "about 12 min", 14, 8) == ["time  about", "        12 min"]


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (4.44, "4.4 times as long"),
        (1.124, "12 % longer"),
        (0.9437, "5.6 % shorter"),
        (1.00634, "0.6 % longer"),
        (0.9996, "less than 0.1 % shorter"),
    ],
)
def test_a_comparison_has_no_more_digits_than_anybody_needs(ratio: float, words: str) -> None:
    assert in_comparison(ratio) == words


@pytest.mark.parametrize(
    ("ratio", "words"), [(2.1, "2.1 times as expensive as before"), (1.5, "50 % dearer than before")]
)
def test_a_multiple_compares_with_the_other_value_as_a_whole(ratio: float, words: str) -> None:
    """The words "2.1 times dearer" could also mean 3.1 times as much."""
    assert in_comparison(ratio, "dearer", "cheaper", "as expensive", "before") == words
