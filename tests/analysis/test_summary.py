"""What a sweep prints at its end, and how its tables fit the width of a terminal."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.run_factory import make_run
from tula_hpc.analysis.report.output import GAP, TextColumn, fitted
from tula_hpc.analysis.run_contents import read_run
from tula_hpc.cli.pipeline import print_summary
from tula_hpc.formatting import printable_output

texts = st.text("abc ◆漢\n", max_size=20)


@given(
    st.lists(st.tuples(texts, texts, st.none() | st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=8),
    st.integers(1, 120),
)
def test_columns_are_left_out_until_the_rest_can_be_read(
    drawn: list[tuple[str, str, int | None, int]], width: int
) -> None:
    columns = [TextColumn(heading, [cell], narrow=narrow, spare=spare) for heading, cell, narrow, spare in drawn]
    kept = fitted(columns, width)
    used = sum(characters for _, characters in kept) + GAP * (len(kept) - 1)
    assert all(column.least <= characters <= max(column.least, column.most) for column, characters in kept)
    assert [column for column in columns if not column.spare] == [column for column, _ in kept if not column.spare]
    assert used <= width or not any(column.spare for column, _ in kept)
    left_out = [column.spare for column in columns if column not in [column for column, _ in kept]]
    assert all(column.spare <= min(left_out, default=9) for column, _ in kept)


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_summary_fits_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    # rich then writes as to a terminal
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    run = make_run(tmp_path / "run")
    (training,) = read_run(run).trainings
    print_summary(run.read_plan(), run.measurements().records, training)
    text = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert all(len(line) <= width for line in text.splitlines())
    assert "…" not in text
    for word in ("configuration", "predicted", "cost", "accuracy", "chosen", "smaller batch"):
        assert word in text
    assert ("memory" in text) == (width == 140)


def test_the_escapes_of_the_table_reach_the_terminal_and_are_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    run = make_run(tmp_path / "run")
    with printable_output():
        print_summary(run.read_plan(), run.measurements().records, None)
    output = capsys.readouterr().out
    assert "\x1b[" in output
    assert r"\x1b" not in output


def test_an_output_that_was_closed_is_reported_to_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself, rich would end the process silently with code 1."""
    run = make_run(tmp_path / "run")
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", buffering=1) as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        with pytest.raises(BrokenPipeError):
            print_summary(run.read_plan(), run.measurements().records, None)
        monkeypatch.undo()
        # otherwise it would be written again at the end of the process
        os.dup2(os.open(os.devnull, os.O_WRONLY), writing)


def test_the_summary_does_not_call_the_steps_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    print_summary(run.read_plan(), run.measurements().records, None)
    heading = capsys.readouterr().out.splitlines()[1]
    assert "steps" in heading
    assert "training" not in heading
