"""Every command on a run directory with a damaged file works or says what is wrong, never with a traceback."""

from __future__ import annotations

import genericpath
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzzing import TIMES, fuzz
from tests.hostile import THINGS, damaged, put
from tests.hostile_words import CONTROL
from tests.run_factory import SWEEP_TOML
from tests.study_factory import SWEEP as STUDY
from tests.study_factory import make_study
from tests.test_fuzz import whole_run
from tula_hpc import files, study, sweep
from tula_hpc.analysis import plan
from tula_hpc.analysis.figures import all as figures
from tula_hpc.analysis.figures import all as figures_study
from tula_hpc.analysis.report import __main__ as report
from tula_hpc.cli.changed_inputs import freeze
from tula_hpc.config import ClusterSpec, load_sweep
from tula_hpc.errors import LaunchError
from tula_hpc.launch import launcher as launch
from tula_hpc.launch import local_executor as local_alive
from tula_hpc.records import RateTrial, TunedRates, write_atomically
from tula_hpc.status import __main__ as status

pytestmark = pytest.mark.processes
SMALL_STUDY: dict[str, Any] = {
    **STUDY,
    "study": {"methods": ["lbt", "ags"], "batches": [256], "seeds": [0, 1], "small_batch": 128, "base_lrs": [0.1]},
}


@pytest.fixture(scope="module", autouse=True)
def no_jobs_and_no_drawings() -> Iterator[None]:
    """Only reading is tested: figures have tests of their own, and a damaged run must not start anything."""

    def refuse(*_: object, **__: object) -> None:
        raise LaunchError("no jobs here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch.Launcher, "submit", refuse)
        patch.setattr("tula_hpc.stages.rehearsal.run_apart", lambda *_: "is not tried here")
        patch.setattr("tula_hpc.analysis.figures.drawing.render_pdf", lambda *_: b"")
        patch.setattr(local_alive, "EXEC_POLLS", 1)
        if not TIMES:
            patch.setattr(figures, "draw_all", lambda _: figures.Figures([], []))
            patch.setattr(figures_study, "draw_study", lambda *_: figures.Figures([], []))
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Path, bytes]]:
    """A finished sweep and a finished study with the inputs that they were made from, and the bytes of all files."""
    folder = tmp_path_factory.mktemp("damaged")
    make_runs(folder)
    return folder, {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(whole: tuple[Path, dict[Path, bytes]]) -> Iterator[Path]:
    restore(*whole)
    yield whole[0]
    restore(*whole)


def restore(folder: Path, files: dict[Path, bytes]) -> None:
    """Put back all files, since commands write, too; the plan last, because it is newer than the measurements."""
    for path in folder.rglob("*"):
        if path not in files and not path.is_dir():
            path.unlink()
    for path in sorted(files, key=lambda path: path.name == "plan.json"):
        same = path.is_file() and not path.is_symlink() and path.stat().st_size == len(files[path])
        if not same or path.read_bytes() != files[path] or path.name == "plan.json":
            put(path, files[path])


def make_runs(folder: Path) -> None:
    digits = SWEEP_TOML.replace('"cifar100"\ndata_dir = "/nowhere/cifar100"', '"digits"')
    (folder / "run.toml").write_text(digits)
    run = whole_run(folder / "run")
    run.log_event("submitted", "train", job_id="21", data={"folder": "slurm/train-1", "nodes": 4})
    write_atomically(run.sweep_file, freeze(load_sweep(folder / "run.toml")))
    write_atomically(run.cluster_file, freeze(ClusterSpec()))
    done = make_study(folder / "study", SMALL_STUDY)
    (folder / "study.toml").write_bytes(done.sweep_file.read_bytes())
    write_atomically(done.cluster_file, freeze(ClusterSpec()))
    rates = TunedRates(rates={"sgd": 0.1}, trials=[RateTrial(family="sgd", lr=0.1, accuracy=0.5)])
    write_atomically(done.rates_file, rates.model_dump_json())
    done.log_event("submitted", "train", job_id="9", data={"label": "study/ags-b256-s0", "folder": "slurm/a"})


Command = Callable[[Path], int]
SWEEP_COMMANDS: dict[str, Command] = {
    "sweep": lambda at: sweep.main([str(at / "run.toml"), "--run-dir", str(at / "run"), "--until", "train"]),
    "plan": lambda at: plan.main([str(at / "run")]),
    "report": lambda at: report.main([str(at / "run")]),
    "status": lambda at: status.main([str(at / "run")]),
    "status as JSON": lambda at: status.main([str(at / "run"), "--json"]),
}
STUDY_COMMANDS: dict[str, Command] = {
    "study": lambda at: study.main([str(at / "study.toml"), "--run-dir", str(at / "study")]),
    "study report": lambda at: report.main([str(at / "study")]),
    "study status": lambda at: status.main([str(at / "study")]),
}
SWEEP_FILES = (
    "sweep.toml", "cluster.toml", "plan.json", "events.jsonl", "accounting.jsonl", "footprint.json",
    "profile/4-8.jsonl", "profile/4-8.notes", "train/main/metrics.jsonl", "train/main/result.json",
    "train/main/drift.json", ".lock",
)  # fmt: skip
PLAN_FILES = ("profile/4-8.jsonl", "footprint.json", "sweep.toml", "profile/4-8.notes", "train/main/metrics.jsonl")
STUDY_FILES = (
    "sweep.toml", "cluster.toml", "events.jsonl", "study_rates.json", "train/study/ags-b256-s0/result.json",
    "train/study/ags-b256-s0/metrics.jsonl",
)  # fmt: skip


class Case(NamedTuple):
    """A command, its run directory, and the files that it reads."""

    run: Command
    files: tuple[str, ...]
    where: str


# 3 and 4 are of `status`: nothing goes on, and unknown
CODES = range(5)
CASES = {name: Case(run, SWEEP_FILES, "run") for name, run in SWEEP_COMMANDS.items()}
CASES["plan"] = CASES["plan"]._replace(files=PLAN_FILES)
CASES |= {name: Case(run, STUDY_FILES, "study") for name, run in STUDY_COMMANDS.items()}
commands = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


def run_command(command: Command, at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the command; an exception fails the test."""
    capsys.readouterr()
    code = command(at)
    printed, errors = capsys.readouterr()
    assert code in CODES
    assert "Traceback" not in errors
    assert not CONTROL.search(printed + errors)
    assert len(errors) < 20_000
    assert not code or errors.strip() or printed.strip(), "the command ended without a message"


@commands
def test_an_undamaged_run_is_fine(folder: Path, capsys: pytest.CaptureFixture[str], case: Case) -> None:
    assert case.run(folder) == 0, capsys.readouterr().err


@commands
@given(data=st.data())
@fuzz(4)
def test_a_damaged_file_is_no_traceback(
    whole: tuple[Path, dict[Path, bytes]], capsys: pytest.CaptureFixture[str], case: Case, data: st.DataObject
) -> None:
    folder, files = whole
    restore(folder, files)
    name = data.draw(st.sampled_from(case.files))
    path = folder / case.where / name
    put(path, data.draw(damaged(name, files.get(path, b""))))
    run_command(case.run, folder, capsys)


@commands
@pytest.mark.parametrize("thing", THINGS)
def test_what_stands_in_the_place_of_files_is_no_traceback(
    whole: tuple[Path, dict[Path, bytes]], capsys: pytest.CaptureFixture[str], case: Case, thing: str
) -> None:
    folder, files = whole
    start = 0 if TIMES else sorted(THINGS).index(thing) % 3
    for name in case.files[start :: 1 if TIMES else 4]:
        restore(folder, files)
        put(folder / case.where / name, thing)
        run_command(case.run, folder, capsys)


@pytest.mark.parametrize("room", ["profile", "train", "slurm", "report", "train/main"])
@pytest.mark.parametrize("name", [name for name in SWEEP_COMMANDS if name != "plan" or TIMES])
def test_a_file_in_the_place_of_a_folder_is_no_traceback(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, room: str
) -> None:
    place, aside = folder / "run" / room, folder / "aside"
    existed = place.exists()
    if existed:
        place.rename(aside)
    place.touch()
    try:
        run_command(SWEEP_COMMANDS[name], folder, capsys)
    finally:
        place.unlink()
        if existed:
            aside.rename(place)


def test_a_file_that_may_not_be_read_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read everything, so the test replaces the kernel's answer."""

    def refuse(path: str, flags: int) -> int:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(files, "_without_waiting", refuse)
    for name, command in SWEEP_COMMANDS.items():
        if name != "status as JSON":
            assert command(folder) in CODES
            output = capsys.readouterr()
            assert "Permission denied" in output.err + output.out, name


@pytest.mark.parametrize("is_hidden", [False, True], ids=["raises", "returns False, as from Python 3.14 on"])
def test_a_run_that_may_not_be_read_is_bad_input_for_every_command(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *, is_hidden: bool
) -> None:
    """Root may read everything, so the test replaces the kernel's answer."""
    stat = os.stat

    def refuse(path: Any, *rest: Any, **options: Any) -> os.stat_result:
        if Path(folder, "run") in Path(path if isinstance(path, str | Path) else "").parents:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *rest, **options)

    monkeypatch.setattr(os, "stat", refuse)
    if is_hidden:
        monkeypatch.setattr(Path, "exists", genericpath.exists)
        monkeypatch.setattr(Path, "is_file", genericpath.isfile)
    for name, command in SWEEP_COMMANDS.items():
        capsys.readouterr()
        assert command(folder) == 2, name
        assert "cannot be read: Permission denied" in capsys.readouterr().err, name


def test_a_path_that_is_no_run_directory_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (plan.main, report.main, status.main):
        for path in (tmp_path / "gone", Path("/dev/null"), tmp_path):
            assert command([str(path)]) == 2
            assert len(capsys.readouterr().err.splitlines()) == 1
