"""Runs with very many measurements, logged steps and events keep memory, report and figures within bounds."""

from __future__ import annotations

import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.big_run_factory import add_steps, make_big_run
from tests.known import known
from tests.planning_data import ok
from tests.run_factory import configurations, make_run, measurement, oom
from tula_hpc.analysis import plan
from tula_hpc.analysis.report import __main__ as report
from tula_hpc.analysis.run_contents import MOST_DRAWN, MOST_ROWS, drawn, ends, evenly
from tula_hpc.errors import RunDirectoryError
from tula_hpc.records import append_record, read_metrics
from tula_hpc.records import metrics as metrics_records
from tula_hpc.records import storage as reading
from tula_hpc.records.metrics import MAX_STEPS, Metrics, StepMetrics, parse_metrics
from tula_hpc.records.run_directory import MAX_SAMPLED_BYTES
from tula_hpc.status import __main__ as status

MB = 1_000_000
# the space between a number and its unit on a page
NARROW = "\u00a0"
# pictures and most figures have the same size whatever they show; these show most
FEWER = """
from tula_hpc.analysis.figures import all as figures
from tula_hpc.analysis.figures.drawing import Drawing
from tula_hpc.analysis.node_scaling import no_scaling
Drawing.png = lambda _: b''
figures.node_scaling_of = lambda _: no_scaling("it is not looked at")
figures.FIGURES = {name: figures.FIGURES[name] for name in ("training", "step_breakdown", "gradient_scale")}
"""
# enough measurements for the size from which on samples are not kept
MANY = 2_500
EARLIER_LIMIT = "from tula_hpc.records import run_directory as runs; runs.MAX_SAMPLED_BYTES //= 4"
# the command reports its own peak, because a child's peak as its parent sees it includes the parent
PEAK = """
import pathlib, runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_module(sys.argv[0], run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
line = next(line for line in pathlib.Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(int(line.split()[1]) * 1024, file=sys.stderr)
"""


def peak_mb(module: str, root: Path, before: str = "") -> float:
    """Return the peak memory of a command in a process of its own, after `before` was run there."""
    command = [sys.executable, "-c", f"{before}\n{PEAK}", f"tula_hpc.{module}", str(root)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stderr.split()[-1]) / MB


# keep fewer steps where their number does not matter, because the file is then read sooner
HELD = 1_000


@pytest.fixture
def few_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_records, "MAX_STEPS", HELD)
    monkeypatch.setattr(metrics_records, "FEW_STEPS", HELD // 4)


def read_and_held_mb(file: Path) -> tuple[Metrics, float]:
    """Return what is read, and the peak memory of Python's objects meanwhile."""
    tracemalloc.start()
    try:
        return read_metrics(file), tracemalloc.get_traced_memory()[1] / MB
    finally:
        tracemalloc.stop()


@pytest.mark.processes
def test_a_plan_and_status_of_very_many_measurements_take_little_memory(tmp_path: Path) -> None:
    run = make_big_run(tmp_path / "run", measurements=MANY, of=configurations()[:1])
    assert (run.profile / "more.jsonl").stat().st_size > MAX_SAMPLED_BYTES / 4

    # a small run takes 71 MB, this one with samples 105
    assert peak_mb("status", run.root, EARLIER_LIMIT) < 90
    # a small run takes 116 MB, this one with samples 156
    assert peak_mb("analysis.plan", run.root, EARLIER_LIMIT) < 140


def test_of_very_many_measurements_all_but_the_samples_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", stage="profile")
    row = run.measurements().records[0]
    changes = {
        "smaller_computes": ((row.local_batch // 2, 0.1),),
        "samples": {"step": [1.0] * 40, f"compute of {row.local_batch // 2}": [0.1, 0.3]},
        "round_steps": {f"compute of {row.local_batch // 2}": 5},
    }
    whole = row.model_copy(update=changes)
    append_record(run.profile / "z.jsonl", whole)
    # a line whose samples alone are damaged
    (run.profile / "y.jsonl").write_text(whole.model_dump_json().replace("0.1,0.3", "0.1,\0\0\0") + "\n")
    before = run.measurements()
    monkeypatch.setattr("tula_hpc.records.run_directory.MAX_SAMPLED_BYTES", 0)

    after = run.measurements()

    assert before.records[-1].samples == changes["samples"]
    assert after.records[-1] == before.records[-1].model_copy(update={"samples": {}})
    assert (after.skipped, len(after.damage)) == (before.skipped, len(before.damage)) == (1, 1)


@pytest.mark.usefixtures("few_are_held")
def test_many_steps_are_read_in_little_memory_and_some_of_them_evenly_chosen(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    add_steps(run, 5 * HELD)

    found, held_mb = read_and_held_mb(run.train().metrics_file)

    assert found.logged == 5 * HELD
    assert HELD / 2 <= len(found.steps) <= HELD
    assert len(found.epochs) == 20
    steps = [row.step for row in found.steps]
    assert (steps[0], steps[-1]) == (1, 5 * HELD)
    assert max(np.diff(steps)) <= 64
    assert np.median(np.diff(steps)) <= 16
    assert min(np.diff(steps)) > 0
    # with all records it would be 8
    assert held_mb < 4


def logged_line(step: int, **more: float) -> str:
    known = {"step": step, "samples_seen": 64 * step, "epoch": step / 100, "loss": 1.0, "lr": 0.1, "step_time_s": 0.1}
    return StepMetrics.model_validate(known | more).model_dump_json() + "\n"


@pytest.mark.usefixtures("few_are_held")
@pytest.mark.parametrize("every", [8, 10])
def test_what_comes_at_equal_distances_is_neither_missed_nor_doubled(tmp_path: Path, every: int) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(logged_line(step, lr=float(step % every == 1)) for step in range(1, 5 * HELD)))

    found = read_metrics(file)

    assert np.mean([row.lr for row in found.steps]) == pytest.approx(1 / every, abs=0.03)
    assert found == read_metrics(file)


@pytest.mark.usefixtures("few_are_held")
def test_a_step_that_had_seen_absurdly_many_samples_leaves_the_others(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = [logged_line(step) for step in range(1, 9 * HELD // 5)]
    # where the number of steps exceeds the limit,
    lines.insert(HELD, logged_line(HELD, samples_seen=10**14))
    file.write_text("".join(lines))

    # half of those before it and half of those after it are kept
    assert len(read_metrics(file).steps) > 3 * HELD / 4


def test_after_a_rollback_no_step_of_before_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_records, "MAX_STEPS", 10)
    monkeypatch.setattr(metrics_records, "FEW_STEPS", 2)
    file = tmp_path / "metrics.jsonl"
    again = [logged_line(step, loss=9.0) for step in range(40, 71)]
    file.write_text("".join([*map(logged_line, range(1, 101)), "{torn\n", *again]))

    found = read_metrics(file)

    assert (found.steps[0].step, found.steps[-1].step, found.skipped, found.logged) == (1, 70, 1, 131)
    assert len(found.steps) <= 11
    assert all((row.loss == 9.0) == (row.step >= 40) for row in found.steps)


def test_after_a_rollback_over_most_steps_the_new_ones_are_held_as_from_the_start_and_the_old_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_records, "MAX_STEPS", 40)
    monkeypatch.setattr(metrics_records, "FEW_STEPS", 10)
    file = tmp_path / "metrics.jsonl"
    again = [logged_line(step, loss=9.0) for step in range(200, 1801)]
    file.write_text("".join([*map(logged_line, range(1, 2001)), *again[:30]]))
    assert [row.step for row in read_metrics(file).steps if row.loss == 9.0] == list(range(200, 230))
    file.write_text("".join([*map(logged_line, range(1, 2001)), *again]))
    found = read_metrics(file)
    assert (found.logged, len(found.steps) <= 41) == (3601, True)
    assert max(np.diff([row.step for row in found.steps])) <= 256


def test_steps_that_are_suddenly_far_apart_are_held_as_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_records, "MAX_STEPS", 40)
    monkeypatch.setattr(metrics_records, "FEW_STEPS", 10)
    file = tmp_path / "metrics.jsonl"
    rare = [logged_line(step, samples_seen=10**7 * step) for step in range(69, 300)]
    file.write_text("".join([*map(logged_line, range(1, 69)), *rare]))
    assert 20 <= len(read_metrics(file).steps) <= 41


@pytest.mark.usefixtures("few_are_held")
def test_steps_with_a_reading_of_the_noise_are_chosen_first(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    rare = 50
    steps = range(1, 5 * HELD + 1)
    lines = [logged_line(step, **({"noise_trace": 1.0} if step % rare == 0 else {})) for step in steps]
    file.write_text("".join(lines))

    found = read_metrics(file)

    assert sum(row.noise_trace is not None for row in found.steps) == 5 * HELD / rare
    assert all(row.noise_trace is None or row.step % rare == 0 for row in found.steps)


@pytest.mark.usefixtures("few_are_held")
def test_all_steps_count_for_whether_gradients_were_scaled(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    add_steps(run, 3 * HELD)
    rows = [parse_metrics(line) for line in run.train().metrics_file.read_bytes().splitlines()]
    steps = [row for row in rows if isinstance(row, StepMetrics)]
    lines = [row.model_copy(update={"scaled": 0.0}).model_dump_json() for row in steps]
    run.train().metrics_file.write_text("\n".join(lines) + "\n")
    assert read_metrics(run.train().metrics_file).scaled_nothing
    chosen = {row.step for row in read_metrics(run.train().metrics_file).steps}
    place, other = next((place, row) for place, row in enumerate(steps) if row.step not in chosen)
    lines[place] = other.model_copy(update={"scaled": 1.0, "scale_share": 1.0}).model_dump_json()

    run.train().metrics_file.write_text("\n".join(lines) + "\n")

    assert not read_metrics(run.train().metrics_file).scaled_nothing


@pytest.mark.processes
def test_the_report_of_a_big_run_is_small_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    run = make_big_run(tmp_path / "run", measurements=MANY, steps=8_000, events=3_000)

    # a small run takes 164 MB, this one 197, and with samples 228
    assert peak_mb("analysis.report", run.root, f"{FEWER}\n{EARLIER_LIMIT}") < 213

    page = (run.report / "report.html").read_text().replace(NARROW, " ")
    assert len(page) < 5 * MB
    assert f"Of 2,521 measurements figures show the medians of each configuration ({MOST_DRAWN} at most)." in page
    held = len(read_metrics(run.train().metrics_file).steps)
    assert f"Of 8,000 logged steps in train/main/metrics.jsonl {held:,} are shown, evenly spread." in page
    events = len(run.events())
    assert f"Events ({events})" in page
    assert page.count("<td>preempted</td>") <= MOST_ROWS
    assert f"{events - MOST_ROWS:,} more in events.jsonl" in page
    rows = {path.stem: path.read_text().count("\n") for path in run.report.glob("*.csv")}
    assert {"gradient_scale", "step_breakdown", "training"} <= rows.keys()
    assert max(rows.values()) <= MAX_STEPS + 100
    assert rows["step_breakdown"] == 1 + len({row.configuration for row in run.measurements().records if row.times})
    assert all(path.stat().st_size < 2 * MB for path in run.report.iterdir() if path.suffix in (".svg", ".csv", ".pdf"))


def test_a_figure_of_repeats_shows_their_medians() -> None:
    where, short = configurations()[:2]
    rows = [measurement(where, seed) for seed in range(MOST_DRAWN)] + [oom(short)] * 30
    random.Random(1).shuffle(rows)

    shown = drawn(rows)

    assert [(row.configuration, row.status) for row in shown] == [(where, "ok"), (short, "oom")]
    times = [row.times.step_time_s for row in rows if row.times]
    assert known(shown[0].times).step_time_s == pytest.approx(np.median(times))
    assert drawn(rows[:MOST_DRAWN]) == rows[:MOST_DRAWN]


def test_rows_that_are_left_out_are_in_the_middle() -> None:
    assert ends(list(range(10)), 4) == [0, 1, 8, 9]
    assert ends(list(range(4)), 4) == [0, 1, 2, 3]
    assert evenly(list(range(11)), 3) == [0, 5, 10]
    assert evenly([1, 2], 3) == [1, 2]


@pytest.mark.parametrize("main", [plan.main, report.main, status.main])
def test_more_records_than_are_held_are_one_clear_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    main: Callable[[list[str]], int],
) -> None:
    run = make_big_run(tmp_path / "run", measurements=500)
    monkeypatch.setattr(reading, "MAX_RECORDS", 400)

    assert main([str(run.root)]) == 2

    size = (run.profile / "more.jsonl").stat().st_size / MB
    words = (
        f"has {size:.1f} MB; expected at most 400 records up to this file; "
        "move what is not needed out of the run directory"
    )
    assert capsys.readouterr().err == f"{run.profile / 'more.jsonl'}: {words}\n"


@pytest.mark.processes
def test_records_that_need_too_much_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty lists in an event take thirty times their bytes in memory."""
    run = make_run(tmp_path / "run")
    inside = ",".join(["[]"] * 200_000)
    line = f'{{"time":1.0,"event":"resumed","stage":"train","data":{{"lists":[{inside}]}}}}\n'
    with run.events_file.open("a") as file:
        file.writelines([line] * 8)
    monkeypatch.setattr(reading, "MAX_HELD_BYTES", 50 * MB)

    with pytest.raises(
        RunDirectoryError, match=r"events\.jsonl: has 4\.8 MB; expected records that take at most 50 MB of memory"
    ):
        run.events()


def test_metrics_of_too_many_lines_are_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run")
    add_steps(run, 6_000)
    monkeypatch.setattr("tula_hpc.records.metrics.MAX_LINES", 5_000)

    with pytest.raises(RunDirectoryError, match=r"expected at most 5,000 lines; a larger training\.log_interval_steps"):
        read_metrics(run.train().metrics_file)


def test_numbers_out_of_bounds_are_found_and_long_fractions_are_none() -> None:
    for text in (b"[NaN]", b"-Infinity", b"[1e400]", b'{"a":-1E+0400}', b"[ -9999999999999999999.5]", b"1e100"):
        assert reading._is_suspect(text)
    assert not reading._is_suspect(b'{"a":0.014285714285714285,"b":[1e99,-3.0000000000000000001,17]}')


def test_a_configuration_in_several_numbers_of_passes_has_medians_of_each() -> None:
    rows = [ok(1, 64, accumulation=passes) for passes in (1, 2) for _ in range(MOST_DRAWN)]
    assert [row.accumulation for row in drawn(rows)] == [1, 2]
