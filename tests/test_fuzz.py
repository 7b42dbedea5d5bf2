"""Whatever a file of a run contains, its readers return what is credible, or raise one of our errors in one line."""

from __future__ import annotations

import contextlib
import os
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzzing import fuzz
from tests.hostile import THINGS, damaged, put
from tests.run_factory import make_run, measurement
from tula_hpc.analysis.costs.usage import job_runs
from tula_hpc.check.site import ask_site
from tula_hpc.config import ClusterSpec
from tula_hpc.env import begin_process
from tula_hpc.errors import InputError, LaunchError, TulaError
from tula_hpc.launch import bounded_command, slurm
from tula_hpc.launch.launcher import Launcher
from tula_hpc.launch.slurm import accounted_runs
from tula_hpc.records import (
    Configuration,
    Drift,
    Footprint,
    JobAccount,
    JobNote,
    Measurement,
    Plan,
    RateTrial,
    RunDirectory,
    StepParts,
    TrainResult,
    TunedRates,
    append_record,
    read_document,
    read_metrics,
    read_records,
    write_atomically,
)
from tula_hpc.records.storage import MAX_LINE_BYTES
from tula_hpc.training.drift import read_drift


def whole_run(root: Path) -> RunDirectory:
    """Make a run directory with a file of every kind."""
    run = make_run(root, epochs_done=20)
    for note in ("began", "ready", "ended"):
        fields = {"note": note, "time": 1.75e9, "job_id": "1", "allocated_nodes": 4, "configuration": (4, 1, 8)}
        append_record(run.profile / "4-8.notes", JobNote.model_validate(fields))
    sizes = {"parameter_bytes": 4, "gradient_bytes": 4, "optimizer_bytes": 4, "activation_bytes_per_sample": 9}
    footprint = Footprint.model_validate({**sizes, "fixed_bytes": 99, "peaks": {32: 400, 64: 700}})
    write_atomically(run.footprint_file(), footprint.model_dump_json())
    parts = StepParts(data_time_s=0.1, compute_time_s=0.2, allreduce_time_s=0.3)
    where = {"nodes": 4, "workers_per_node": 1, "local_batch": 64, "part": "network"}
    drift = Drift.model_validate({**where, "measured_s": 1.0, "predicted_s": 0.5, "measured": parts, "expected": parts})
    write_atomically(run.train().drift_file, drift.model_dump_json())
    account = JobAccount(job_id="17_0", stage="profile", state="COMPLETED", over=True, nodes=4, elapsed_s=90.0)
    append_record(run.accounting_file, account)
    rates = TunedRates(rates={"sgd": 0.1}, trials=[RateTrial(family="sgd", lr=0.1, accuracy=0.5)])
    write_atomically(run.rates_file, rates.model_dump_json())
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return whole_run(tmp_path_factory.mktemp("fuzz") / "run")


READERS: dict[str, Callable[[RunDirectory], object]] = {
    "events.jsonl": lambda run: run.events(),
    "accounting.jsonl": lambda run: [account.node_seconds for account in run.accounts()],
    "plan.json": lambda run: run.read_plan(),
    "study_rates.json": lambda run: run.read_rates(),
    "footprint.json": lambda run: [found.peak_bytes(48) for found in run.footprints([""]).values()],
    "profile/4-8.jsonl": lambda run: run.measurements(),
    "profile/4-8.notes": lambda run: run.job_notes(),
    "train/main/metrics.jsonl": lambda run: read_metrics(run.train().metrics_file),
    "train/main/result.json": lambda run: run.train().read_result(),
    "train/main/drift.json": lambda run: read_drift(run.train().drift_file),
}


def read_somehow(run: RunDirectory, name: str) -> None:
    try:
        READERS[name](run)
    except TulaError as error:
        line = str(error)
        assert line.startswith(str(run.root / name)), line
        assert line.isprintable(), line
        assert len(line) < 1000


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
@fuzz(15)
def test_a_damaged_file_is_read_as_far_as_it_can_be_believed(run: RunDirectory, name: str, data: st.DataObject) -> None:
    good = (run.root / name).read_bytes()
    put(run.root / name, data.draw(damaged(name, good)))
    try:
        read_somehow(run, name)
    finally:
        put(run.root / name, good)


@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize("name", READERS)
def test_what_stands_in_the_place_of_a_file_is_neither_waited_for_nor_read_to_its_end(
    run: RunDirectory, name: str, thing: str
) -> None:
    good = (run.root / name).read_bytes()
    put(run.root / name, thing)
    try:
        read_somehow(run, name)
    finally:
        put(run.root / name, good)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e400", "1e101", "9" * 30, "9" * 5000])
@pytest.mark.parametrize("field", ["elapsed_s", "dataset_samples", "noise_scale"])
def test_a_number_out_of_all_bounds_is_not_believed(tmp_path: Path, field: str, number: str) -> None:
    good = measurement(Configuration(1, 1, 32)).model_dump_json()
    line = re.sub(rf'"{field}":[^,}}]+', f'"{field}":{number}', good)
    assert number in line
    (tmp_path / "m.jsonl").write_text(line + "\n")
    assert read_records(Measurement, [tmp_path / "m.jsonl"])[:2] == ([], 1)


@pytest.mark.parametrize("words", ["the loss is NaN", "Infinity", "123456789012345678901234567890", "1e999"])
def test_words_are_not_numbers(tmp_path: Path, words: str) -> None:
    path = tmp_path / "m.jsonl"
    append_record(path, measurement(Configuration(1, 1, 32), detail=words))
    assert [record.detail for record in read_records(Measurement, [path]).records] == [words]


@pytest.mark.parametrize("counts", [(0, 1, 8), (2**21, 1, 8), (1, 5000, 8), (1, 1, 2**45), (1, 1, -8)])
def test_counts_that_no_input_allows_are_not_believed(tmp_path: Path, counts: tuple[int, int, int]) -> None:
    keys = ("nodes", "workers_per_node", "local_batch")
    fields = measurement(Configuration(1, 1, 32)).model_dump(mode="json") | dict(zip(keys, counts, strict=True))
    append_record(tmp_path / "m.jsonl", fields)
    note = {"note": "measuring", "time": 1.0, "configuration": counts}
    append_record(tmp_path / "m.notes", note)
    assert read_records(Measurement, [tmp_path / "m.jsonl"])[:2] == ([], 1)
    assert read_records(JobNote, [tmp_path / "m.notes"])[:2] == ([], 1)


def test_a_line_without_an_end_takes_no_more_memory_than_a_long_one(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    append_record(path, measurement(Configuration(1, 1, 32)))
    # zeros without a line end
    os.truncate(path, 20 * MAX_LINE_BYTES)
    append_record(path, measurement(Configuration(1, 1, 64)))
    tracemalloc.start()
    records, skipped, _ = read_records(Measurement, [path])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert ([record.local_batch for record in records], skipped) == ([32, 64], 1)
    assert peak < 5 * MAX_LINE_BYTES


@pytest.mark.parametrize("kind", [Plan, TrainResult, TunedRates, Drift, Footprint])
def test_a_damaged_document_says_what_to_do(tmp_path: Path, kind: type[Plan]) -> None:
    (tmp_path / "x.json").write_text('{"candidates": 3}')
    with pytest.raises(InputError, match=r"x\.json: is damaged: .*; delete it, and the command of .* makes it again$"):
        read_document(kind, tmp_path / "x.json")


SLURM_SAYS = (
    "JOBID|STATE|REASON\n12_[0-3,7%2]|PENDING|Resources\n12_4|RUNNING|None\n12_5|COMPLETING|None\n",
    "12_0|x-train-1|PREEMPTED|30|2\n12_0|x-train-1|CANCELLED by 0|70|2\n",
    "12_0|FAILED|1:0\n12_0.batch|FAILED|1:0\n12_0.0|OUT_OF_MEMORY|0:125\n",
    "JobId=12 JobName=x JobState=PREEMPTED Restarts=1 ExcNodeList=n9 PreemptTime=2026-11-23T23:08:52 WorkDir=/a b\n",
    "AccountingStorageEnforce = limits\nMaxArraySize            = 4001\n",
    "PartitionName=cpu Default=YES MaxNodes=4 MaxTime=2-00:00:00 State=UP TotalNodes=100 DefMemPerCPU=4000\n",
    "20|40+|192000|gpu:4(S:0-1)|mixed*|v100\n",
    "ml|cpu|normal,long|1-00:00:00|cpu=4,node=4\n",
    "12_0|2|n[1-2],m3\n",
)
PIECES = (
    *("\n", "|", "||", "=", " ", "-", "[", "]", ":", "_", ",", "%", "\0", "\x1b[2J", "\u202e", "\ud800", "é"),
    *("9" * 20, "9" * 5000, "٣", "-1", "1e9", "12_[0-999999999]", "12_[-]", "JobId=", "Restarts=x", "UNLIMITED"),
    *("Welcome to Example | 2026", "42|all|day", "JOBID|STATE", "7", "a" * 5000),
)
ASKED: tuple[Callable[[], object], ...] = (
    lambda: slurm.queue(["12_0", "12_4"]),
    lambda: slurm.named("x-train-1"),
    slurm.own_jobs,
    lambda: slurm.steps(["12_0"]),
    lambda: slurm.hosts_of("12_0"),
    lambda: slurm.leaving("12"),
    lambda: slurm.avoid_host("12", "12_0", "n1", 5),
    slurm.largest_array,
    lambda: accounted_runs({"12_0": "train"}, name_prefix="x-", since=1e9, timeout_s=5),
    lambda: ask_site(Launcher(ClusterSpec(executor="slurm", partition="cpu"), RunDirectory(Path("/nowhere")), "x"), 2),
)


@given(data=st.data())
@fuzz(150)
def test_whatever_slurm_prints_is_read_or_one_of_our_errors(data: st.DataObject) -> None:
    """Real answers with arbitrary changes are given to every function that asks."""
    printed = data.draw(st.sampled_from(SLURM_SAYS))
    for _ in range(data.draw(st.integers(0, 4))):
        at, piece = data.draw(st.integers(0, len(printed))), data.draw(st.sampled_from(PIECES))
        printed = printed[:at] + piece + printed[at + data.draw(st.integers(0, 3)) :]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tula_hpc.launch.slurm.run_command", lambda *_: printed)
        patch.setattr("tula_hpc.launch.slurm_executor.run", lambda *_, **__: bounded_command.Done(0, "", printed))
        for ask in ASKED:
            with contextlib.suppress(LaunchError):
                ask()


@given(printed=st.binary(max_size=200), code=st.sampled_from([0, 1, -9, 127]))
@fuzz(100)
def test_whatever_bytes_a_command_prints_are_words(printed: bytes, code: int) -> None:
    shown = printed.decode(errors="backslashreplace")
    done = bounded_command.Done(code, shown, shown)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded_command, "run", lambda *_, **__: done)
        if code == 0:
            assert slurm.run_command(["squeue"]) == shown
            return
        with pytest.raises(LaunchError) as raised:
            slurm.run_command(["squeue"])
    line = slurm.in_one_line(raised.value)
    assert line.startswith("squeue failed: ")
    assert len(line.splitlines()) == 1


LIMIT_S = 60.0 * ClusterSpec().profile_minutes


@given(
    times=st.lists(st.floats(0, 1e11), min_size=1, max_size=6),
    began_at=st.floats(0, 1e11),
    killed_at=st.floats(0, 1e11),
)
@fuzz(100)
def test_whatever_clocks_say_a_job_costs_no_more_than_its_limit(
    times: list[float], began_at: float, killed_at: float
) -> None:
    fields = {"job_id": "1", "allocated_nodes": 4, "began_at": began_at, "submitted_at": times[-1]}
    kinds = ["began", *["ready"] * (len(times) > 1), *["measuring"] * (len(times) - 2)]
    notes = [
        JobNote.model_validate({**fields, "note": kind, "time": at}) for kind, at in zip(kinds, times, strict=True)
    ]
    killed = measurement(Configuration(4, 1, 8)).model_copy(update={"job_id": "1", "finished_at": killed_at})
    for run in job_runs(notes, [killed], ClusterSpec()):
        assert 0.0 <= run.node_seconds <= 4 * LIMIT_S * (1 + 1e-6)
        assert 0.0 <= run.startup_s <= LIMIT_S * (1 + 1e-6)


@given(umask=st.integers(0, 0o777))
@fuzz(50)
def test_whatever_the_umask_nobody_else_may_write(umask: int) -> None:
    before = os.umask(umask)
    try:
        begin_process()
        assert os.umask(0) == umask | 0o022
    finally:
        os.umask(before)
