"""The working directory of a command may be a stranger's: nothing in it is imported or obeyed."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tula_hpc
from tests.analysis.test_damaged_runs import SMALL_STUDY
from tests.run_factory import make_run
from tests.study_factory import make_study
from tula_hpc import command_errors
from tula_hpc.__main__ import main
from tula_hpc.cli.commands import COMMANDS
from tula_hpc.formatting import command_line
from tula_hpc.python_path import is_found_elsewhere

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = {"pydantic", "numpy", "scipy", "matplotlib", "jinja2", "markupsafe", "rich", "kneed", "submitit", "torch"}
NAMES = (sys.stdlib_module_names | LIBRARIES | {"analysis", "tests", "sitecustomize"}) - {"antigravity", "this"}
PACKAGES = Path(np.__file__).parents[1]
SCRIPT = "import sys\nfrom tula_hpc.__main__ import main\nsys.exit(main())\n"


def loaded_by_python_itself() -> set[str]:
    """Return what `python -m` imports, or tries to, before it reaches the module; no package can change that."""
    code = "import runpy, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    of_other_systems = {name for name in sys.stdlib_module_names if find_spec(name) is None}
    return {*done.stdout.split(), *of_other_systems}


@contextlib.contextmanager
def trapped(folder: Path, names: Iterable[str]) -> Iterator[None]:
    """Put modules of these names there for a while; none of them may be run."""
    sprung = folder.parent / f"{folder.name}-sprung"
    text = f"print(__name__, file=open({str(sprung)!r}, 'a'))\nraise SystemExit(77)\n"
    files = {folder / f"{name}.py": text.encode() for name in names}
    # matplotlib would end with an error
    files[folder / "matplotlibrc"] = b"backend: module://evil\ntext.usetex: True\n\xff\n"
    for path, content in files.items():
        path.write_bytes(content)
    sprung.write_text("")
    try:
        yield
    finally:
        for path in files:
            path.unlink()
    assert sprung.read_text() == ""


def run(command: Iterable[object], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    # without PATH no Slurm is found, so only the files count
    given = ("PATH", "PYTHONPATH", "PYTHONSAFEPATH")
    clean = {key: value for key, value in os.environ.items() if key not in given}
    words = [sys.executable, *map(str, command)]
    return subprocess.run(words, cwd=folder, env=clean | environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    above = tmp_path_factory.mktemp("runs")
    profile, few = make_run(above / "profile", stage="profile"), ("1-32", "1-64", "2-32", "2-64")
    for path in profile.profile.glob("*.jsonl"):
        if path.stem not in few:
            path.unlink()
    return {
        "profile": profile.root,
        "run": make_run(above / "run", epochs_done=2).root,
        "study": make_study(above / "study", SMALL_STUDY).root,
    }


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A command's script as pip writes it."""
    path = tmp_path_factory.mktemp("bin") / "tula"
    path.write_text(f"#!{sys.executable}\n{SCRIPT}")
    path.chmod(0o755)
    return path


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "module", "options", "code"),
    [
        ("run", "status", [], 4),
        # their modules are in the next one, too
        pytest.param("profile", "analysis.plan", ["--objective", "time"], 0, marks=pytest.mark.thorough),
        pytest.param("profile", "analysis.report", [], 0, marks=pytest.mark.thorough),
        ("study", "analysis.study", [], 0),
        ("run", "__main__", [], 2),
    ],
)
def test_commands_as_modules_import_nothing_of_a_run(
    folders: dict[str, Path], name: str, module: str, options: list[str], code: int
) -> None:
    with trapped(folders[name], NAMES - loaded_by_python_itself()):
        done = run(["-m", f"tula_hpc.{module}", ".", *options], folders[name])
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.processes
def test_the_script_imports_nothing_of_a_run(folders: dict[str, Path], script: Path) -> None:
    with trapped(folders["profile"], {*NAMES, "tula_hpc"}):
        done = run([script, "plan", "--json", "."], folders["profile"])
    assert done.returncode == 0, done.stderr


@pytest.mark.processes
def test_python_without_its_working_directory_works_as_well(folders: dict[str, Path]) -> None:
    with trapped(folders["run"], {*NAMES, "tula_hpc"}):
        assert run(["-P", "-m", "tula_hpc", "status", "."], folders["run"]).returncode == 4


@pytest.mark.processes
def test_an_empty_entry_of_pythonpath_adds_no_strangers_folder(folders: dict[str, Path], script: Path) -> None:
    with trapped(folders["run"], NAMES - loaded_by_python_itself() - {"sitecustomize"}):
        assert run([script, "status", "."], folders["run"], PYTHONPATH=":/nowhere:.:").returncode == 4


@pytest.mark.processes
def test_a_folder_that_pythonpath_names_in_full_is_used(tmp_path: Path) -> None:
    (tmp_path / "pydantic.py").write_text("raise SystemExit(77)")
    assert run(["-m", "tula_hpc.status", "."], tmp_path, PYTHONPATH=str(tmp_path)).returncode == 77


@pytest.mark.processes
def test_a_program_that_only_uses_the_package_keeps_its_path(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("import tula_hpc")
    (tmp_path / "mine" / "__main__.py").write_text("import beside")
    (tmp_path / "beside.py").write_text("print('found')")
    for command in (["-m", "mine"], ["-c", "import tula_hpc, beside"]):
        done = run(command, tmp_path)
        assert done.stdout == "found\n", done.stderr


@pytest.mark.processes
def test_a_copy_that_is_not_installed_runs_from_its_own_folder(tmp_path: Path, folders: dict[str, Path]) -> None:
    (tmp_path / "tula_hpc").symlink_to(ROOT / "tula_hpc")
    # without site, no editable install is known
    libraries = {"PYTHONPATH": str(PACKAGES)}
    done = run(["-S", "-m", "tula_hpc", "status", folders["run"]], tmp_path, **libraries)
    assert done.returncode == 4, done.stderr
    # its jobs have to find it, too
    code = "from tula_hpc.python_path import start_of_python; print(start_of_python()[1:])"
    assert run(["-S", "-c", code], tmp_path, **libraries).stdout == "[]\n"
    assert is_found_elsewhere()
    assert run(["-c", code], tmp_path).stdout == "['-P']\n"


# --- a Python that the package was not installed with


def test_a_python_without_the_libraries_gives_one_line_before_any_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tula"])
    # like the system's Python in a folder with a copy of the package
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(sys, "path", [str(ROOT)])
    with pytest.raises(SystemExit) as ended:
        importlib.reload(tula_hpc)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"this Python ({sys.executable}) has no pydantic, which tula_hpc needs: use the tula of the")


def test_a_library_that_a_command_misses_later_gives_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def need(*_: object) -> Any:
        importlib.import_module("no_such_library.part")

    assert command_errors.exit_code_of(need, argparse.Namespace()) == 2
    for line in capsys.readouterr().err.splitlines():
        assert ") has no no_such_library, which tula_hpc needs: use the tula of the" in line


# --- the commands under one name


def test_the_script_is_what_pyproject_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["tula"].partition(":")
    assert getattr(importlib.import_module(module), function) is main
    assert project["scripts"].keys() == {"tula"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_answers_to_its_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: tula {name} ")


@pytest.mark.parametrize("words", [[], ["stat"], ["--"], ["--run"]])
def test_what_is_no_command_is_refused_with_those_that_are(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    # without any argument it is the whole page
    assert ("see tula --help" if words else "usage: tula ") in capsys.readouterr().err


def test_a_misspelt_option_is_one_line_with_the_one_that_is_near(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sweep", "train.toml", "--dryrun"])
    assert ended.value.code == 2
    complaint = "tula sweep: unrecognized arguments: --dryrun (did you mean --dry-run?)"
    assert capsys.readouterr().err == f"{complaint}; see tula sweep --help\n"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    output = capsys.readouterr().out
    assert all(f"\n  {name} " in output for name in COMMANDS)


@pytest.fixture
def no_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An interpreter with another name, in a folder without a script."""
    python = tmp_path / "no script" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))


@pytest.mark.processes
@pytest.mark.parametrize("where", ["nowhere", "elsewhere", "beside the interpreter", "on PATH"])
def test_the_commands_that_messages_name_run_as_they_stand(
    where: str, script: Path, folders: dict[str, Path], no_script: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script of another installation must not be used."""
    path = script.parent if where in ("elsewhere", "on PATH") else Path("/nowhere")
    monkeypatch.setenv("PATH", f"{path}:/usr/bin:/bin")
    if where == "on PATH":
        monkeypatch.setattr(sys, "argv", [str(script)])
    if where == "beside the interpreter":
        shutil.copy(script, Path(sys.executable).with_name("tula"))
    line = command_line("status", "a b;$HOME")
    assert line.startswith("tula status ") == (where == "on PATH")
    assert ("-m tula_hpc" in line) == (where in ("nowhere", "elsewhere"))
    assert shlex.split(line)[-1] == "a b;$HOME"
    with trapped(folders["run"], NAMES):
        typed = ["sh", "-c", command_line("--version")]
        output = subprocess.run(typed, cwd=folders["run"], capture_output=True, text=True, check=False)
    assert output.stdout == "tula 0.1.0\n", output.stderr
