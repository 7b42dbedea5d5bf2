"""Completion of the commands, in shells that have only the script."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

from tula_hpc.__main__ import main
from tula_hpc.cli.commands import COMMANDS
from tula_hpc.cli.completion import script_for

ASK = """
source ./.script
ask() {
    COMP_WORDS=(tula "$@"); COMP_CWORD=$#; COMPREPLY=()
    _shtab_tula tula "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"; echo "${COMPREPLY[*]}"
}
"""
# what is typed so far, and all that may follow
CASES = {
    "st": "study status",
    "sweep ''": "data sub one.toml two.toml",
    "sweep --until ''": "profile plan train report",
    "sweep one.toml --clu": "--cluster",
    "sweep one.toml --cluster t": "two.toml",
    "status s": "sub",
    "plan sub --objective ti": "time",
    "attach ''": "data sub train.py",
    "attach --device c": "cpu cuda",
    "attach train.py s": "sub",
    "init --script t": "train.py",
    "completion ''": "bash zsh",
    "init --partition ''": "",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("one.toml", "two.toml", "train.py", "notes.txt"):
        (tmp_path / name).touch()
    for name in ("data", "sub"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_bash_completes_commands_options_choices_and_files(folder: Path) -> None:
    (folder / ".script").write_text(script_for("bash"))
    asked = ASK + "".join(f"ask {words}\n" for words in CASES)
    done = subprocess.run(["bash", "-c", asked], cwd=folder, capture_output=True, text=True, check=True)
    answers = dict(zip(CASES, (" ".join(line.split()) for line in done.stdout.splitlines()), strict=True))
    assert {words: sorted(found.split()) for words, found in answers.items()} == {
        words: sorted(expected.split()) for words, expected in CASES.items()
    }


def test_every_option_of_every_command_is_completed() -> None:
    scripts = [script_for(shell) for shell in ("bash", "zsh")]
    for command in COMMANDS.values():
        for action in importlib.import_module(command.module)._parser()._actions:
            assert all(flag in script for flag in action.option_strings for script in scripts)


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_script_is_printed_as_it_is(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert capsys.readouterr().out == script_for(shell)


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_disk_that_has_no_room_for_a_script_is_named(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # closing the file writes the rest, and fails again
    with contextlib.suppress(OSError), Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["completion", shell]) == 1
    assert capsys.readouterr().err.startswith("the output: No space left on device")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_takes_the_script(folder: Path) -> None:
    (folder / ".script").write_text(script_for("zsh"))
    ask = 'autoload -Uz compinit && compinit -u -D && eval "$(<.script)" && echo $_comps[tula]'
    done = subprocess.run(["zsh", "-fc", ask], cwd=folder, capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("_shtab_tula", "")


def test_an_interrupt_at_any_moment_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    # for example while libraries are loaded, or a figure is drawn
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    def code_of(command: str) -> int | None:
        try:
            return main([command, "runs/any"])
        except KeyboardInterrupt:
            # otherwise it would end all tests
            return None

    monkeypatch.setattr("tula_hpc.__main__.importlib.import_module", interrupted)
    assert [code_of(command) for command in COMMANDS] == [130] * len(COMMANDS)


INTERRUPTED_AT_AN_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv = ["tula", "plan", "none"]
from tula_hpc.__main__ import main
main()
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("argparse", ""),
        ("tula_hpc.command_errors", ""),
        ("tula_hpc.analysis.plan", "\ninterrupted before anything was begun\n"),
    ],
)
def test_an_interrupt_while_the_command_is_loaded_is_no_traceback(module: str, expected: str) -> None:
    program = INTERRUPTED_AT_AN_IMPORT.format(module=module)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    # the shell reports 130 for both
    assert (done.returncode, done.stderr) == (130 if expected else -signal.SIGINT, expected)


def test_an_interrupt_that_a_library_would_swallow_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def swallowing(_: object) -> SimpleNamespace:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return SimpleNamespace(main=lambda _: 0)

    monkeypatch.setattr("tula_hpc.__main__.importlib.import_module", swallowing)
    monkeypatch.setattr(os, "_exit", sys.exit)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as end:
            main(["report", "runs/any"])
        assert end.value.code == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        # in the background of a script the signal is ignored
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert main(["report", "runs/any"]) == 0
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_command_without_handlers_of_its_own_runs_in_a_thread(tmp_path: Path) -> None:
    codes: list[int] = []
    thread = Thread(target=lambda: codes.append(main(["plan", str(tmp_path / "none")])))
    thread.start()
    thread.join()
    assert codes == [2]


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), ([], 2)])
def test_the_way_to_a_report_is_shown(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    output = capsys.readouterr()
    assert end.value.code == code
    shown = output.err if code else output.out
    places = [
        shown.index(f"\n  tula {words}") for words in ("init", "attach", "check", "sweep", "status", "plan", "report")
    ]
    assert places == sorted(places)
    assert all(f"\n  {name} " in shown for name in COMMANDS)
    assert shown.isascii(), "it is printed before the encoding of the terminal is asked for"
