"""No text of a model, a log, a record or Slurm controls a terminal, or breaks a file of the report."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzzing import fuzz
from tests.hostile_words import COLOURS, CONTROL, HOSTILE, WORDS, spoil
from tests.run_factory import make_run, pages_alone
from tests.study_factory import make_study
from tula_hpc.analysis import plan
from tula_hpc.analysis.figures import all as figures
from tula_hpc.analysis.figures import all as figures_study
from tula_hpc.analysis.report import __main__ as report
from tula_hpc.cli.pipeline import print_summary
from tula_hpc.command_errors import exit_code_of
from tula_hpc.errors import InputError, LaunchError
from tula_hpc.failure_kinds import Failure
from tula_hpc.formatting import MOST_ERROR_LINE, in_short_lines, printable, printable_output, with_own_escapes
from tula_hpc.records import RunDirectory
from tula_hpc.stages.context import BarProgress
from tula_hpc.status import __main__ as status

ANY = st.text(st.one_of(st.characters(), st.sampled_from("\0\x1b\x7f\x9b\u2028\u202e\u2066\ud800\udfff\uffff\r\n\t")))


@given(text=ANY)
@fuzz(300)
def test_any_text_can_be_shown_and_is_changed_once(text: str) -> None:
    shown = printable(text)
    assert not CONTROL.search(shown)
    assert printable(shown) == shown
    assert shown.count("\n") == text.count("\n")
    shown.encode()


@given(text=ANY, key=ANY)
@fuzz(300)
def test_json_stays_the_same_json(text: str, key: str) -> None:
    value = {key: [text]}
    for ascii_only in (True, False):
        assert json.loads(printable(json.dumps(value, ensure_ascii=ascii_only))) == value


def test_text_without_control_characters_stays_as_it_is() -> None:
    text = "naïve 北京 😀 العربية\ta \\x1b C:\\new\n"
    assert printable(text) == text
    assert printable("one\r\ntwo\r\n") == "one\ntwo\n"
    assert printable("\x1b[31m\x9b\u202e") == r"\x1b[31m\u009b\u202e"


def test_only_lines_that_are_too_long_are_cut() -> None:
    assert in_short_lines(f"{'a' * 9}\n{'b' * 1234}", 10) == f"{'a' * 9}\n{'b' * 10}… (1,224 more characters)"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_terminal_of_any_encoding_shows_all_of_it(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    with printable_output():
        sys.stdout.write(f"− 北 \ud800 {HOSTILE}\n")
    shown = stream.buffer.getvalue().decode(encoding)
    assert not CONTROL.search(shown)
    assert "txt.exe" in shown


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_json_stays_json_whatever_the_encoding_lacks(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    text = "ü – 北 😀"
    with printable_output():
        for output in (sys.stdout, with_own_escapes(sys.stdout)):
            output.write(f"{json.dumps(text, ensure_ascii=False)}\n")
    lines = stream.buffer.getvalue().decode(encoding).splitlines()
    assert list(map(json.loads, lines)) == [text, text]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_plan_and_a_bar_are_shown_on_a_terminal_that_lacks_their_dashes(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = {}
    for name in ("stdout", "stderr"):
        shown[name] = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
        monkeypatch.setattr(sys, name, shown[name])
    with printable_output():
        with_own_escapes(sys.stdout).write("1 – 2 ×\n")
        with BarProgress("train") as bar:
            bar.update(1, 2, "1 – 2")
    dash = r"\u2013"
    for name, stream in shown.items():
        assert f"1 {dash} 2" in stream.buffer.getvalue().decode(encoding), name


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run with such text in all of its records; only a report is written into it."""
    run = make_run(tmp_path_factory.mktemp("spoiled") / "run", epochs_done=20)
    run.log_event("submitted", "train", job_id="21", data={"folder": "slurm/train-1", "nodes": 4})
    run.log_event("failed", "train", job_id="21", failure=Failure.BUG, detail="x")
    assert spoil(run) > 100
    return run


def check_shown(capsys: pytest.CaptureFixture[str], *, colours: bool = False) -> str:
    printed, errors = capsys.readouterr()
    shown = COLOURS.sub("", printed) if colours else printed
    assert not CONTROL.search(shown), CONTROL.findall(shown)
    assert not CONTROL.search(errors)
    assert "Traceback" not in errors
    return shown + errors


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_status_sends_nothing_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    run = make_run(tmp_path / "run", stage="plan")
    run.log_event("submitted", "train", job_id="21", data={"folder": "slurm/train-1", "nodes": 4})
    run.log_event("failed", "train", job_id="21", failure=Failure.BUG, detail="x")
    spoil(run)
    status.main([str(run.root), *options])
    shown = check_shown(capsys)
    assert "[red]" in shown
    if options:
        assert json.dumps(HOSTILE) in json.dumps(json.loads(shown)), "JSON has the original text"


@pytest.mark.parametrize("colours", ["", "1"])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_plan_sends_nothing_but_its_own_colours_to_the_terminal(
    run: RunDirectory,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    colours: str,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", colours)
    plan.main([str(run.root), *options])
    shown = check_shown(capsys, colours=bool(colours) and not options)
    if options and not shown.startswith(str(run.root)):
        json.loads(shown)


def test_a_summary_takes_no_markup_and_sends_nothing_to_the_terminal(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    with printable_output():
        print_summary(run.read_plan(), run.measurements().records, None, HOSTILE)
    assert "[red][/][link=file:///]x[/link]" in check_shown(capsys, colours=True)


def test_a_bar_takes_no_markup_and_lines_printed_meanwhile_are_cleaned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "300")
    with printable_output():
        before = sys.stderr
        with BarProgress("train") as bar:
            bar.update(1, 2, HOSTILE)
            sys.stderr.write(f"{HOSTILE}\n")
        assert sys.stderr is before
    output = capsys.readouterr().err
    for sent in ("\x1b]0;", "\x1b[2Jred", "\x07", "\x9b", "\u202e", "\x00"):
        assert sent not in output
    assert "[link=file:///]" in output


def test_streams_that_the_shell_has_closed_take_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    with printable_output():
        for stream in (sys.stdout, sys.stderr):
            stream.write("x")
            stream.flush()
            assert not stream.isatty()


def test_a_full_output_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # otherwise closing it would write the rest
    with suppress(OSError), Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with printable_output():
            sys.stdout.write("x")
            with pytest.raises(OSError, match=r"No space left on device: 'the output'"):
                sys.stdout.flush()


def test_an_error_sends_nothing_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_: object) -> int:
        raise LaunchError(f"{HOSTILE}\n{'x' * 10**6}")

    with printable_output():
        assert exit_code_of(fail, argparse.Namespace()) == 1
    output = check_shown(capsys)
    assert "txt.exe" in output
    assert max(map(len, output.splitlines())) < MOST_ERROR_LINE + 100


def written(folder: Path) -> Iterator[tuple[Path, str]]:
    for path in folder.iterdir():
        if path.suffix in (".html", ".svg", ".csv", ".tex"):
            yield path, path.read_bytes().decode()


def check_report(folder: Path) -> None:
    for path, text in written(folder):
        assert not CONTROL.search(text), (path.name, CONTROL.findall(text))
        # a CSV file is no markup
        assert path.suffix == ".csv" or "<script" not in text
        if path.suffix == ".svg":
            ElementTree.fromstring(text)  # noqa: S314 - ours
    assert list(folder.glob("*.html"))


@pytest.mark.processes
def test_a_report_holds_no_control_characters(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    with pages_alone():
        code = report.main([str(run.root)])
    shown = check_shown(capsys)
    assert code == 0, shown
    check_report(run.report)
    page = (run.report / "report.html").read_text()
    assert "could not be drawn" not in page
    assert r"\x1b]0;owned\x07" in page


@pytest.mark.processes
def test_a_figure_is_drawn_whatever_its_text() -> None:
    """XML cannot contain some of these characters."""
    from matplotlib.figure import Figure

    from tula_hpc.analysis.figures.drawing import Drawing, Table, TitlePage, render_pdf
    from tula_hpc.analysis.figures.style import styled

    with styled():
        figure = Figure()
        axes = figure.subplots()
        for each in (*WORDS, "a\ud800b", "\ufffe\uffff"):
            axes.plot([1, 2], label=each)
            figure.text(0.5, 0.5, each)
        words = f"{HOSTILE} a\ud800b \ufffe\uffff"
        axes.set(title=words, xlabel=words)
        axes.legend()
        figure.text(0, 1, words, gid="title")
    drawing = Drawing("x", words, words, figure, Table((words,), [(words,)]))
    svg = drawing.svg()
    drawing.png()
    for text in (svg, drawing.inline_svg(svg), drawing.table.to_csv()):
        assert not CONTROL.search(text)
    page = TitlePage(words, words, words, (words,), [(words,)], {words: [words]})
    assert render_pdf(page, [drawing]).startswith(b"%PDF")


def test_a_studys_report_holds_no_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.analysis.test_damaged_runs import SMALL_STUDY

    monkeypatch.setattr(figures_study, "draw_study", lambda *_: figures.Figures([], []))
    run = make_study(tmp_path / "study", SMALL_STUDY)
    run.log_event("failed", "train", job_id="21", failure=Failure.BUG, detail=HOSTILE)
    spoil(run)
    assert report.main([str(run.root)]) == 0
    check_shown(capsys)
    check_report(run.report)


def test_records_keep_the_original_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.log_event("failed", "train", detail=HOSTILE)
    assert run.events()[-1].detail == HOSTILE


@pytest.mark.parametrize("currency", ["EUR", "\x1b[31m", "usd", ""])
def test_a_currency_is_one_of_two(tmp_path: Path, currency: str) -> None:
    run = make_run(tmp_path / "run")
    text = json.loads(run.plan_file.read_text())
    text["chosen"]["currency"] = currency
    run.plan_file.write_text(json.dumps(text))
    with pytest.raises(InputError, match=r"plan\.json: is damaged: chosen\.currency: .*'USD' or 'SU'.*") as raised:
        run.read_plan()
    assert str(raised.value).isprintable()


def test_drawing_on_a_terminal_uses_the_stream_itself(capsys: pytest.CaptureFixture[str]) -> None:
    there = sys.stdout
    with printable_output(), printable_output():
        assert with_own_escapes(sys.stdout) is there
    assert sys.stdout is there
