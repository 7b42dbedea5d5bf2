"""`python -m tula_hpc.check` on one machine: what applies there, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forked_jobs import forking_jobs
from tula_hpc.check.__main__ import main

CLUSTER = """
name = "here"
workers_per_node = 2
[environment]
GLOO_SOCKET_IFNAME = "{interface}"
"""
SWEEP = 'name = "checked"\n[workload]\ndataset = "digits"\nloader_workers = 0\n'


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep.toml").write_text(SWEEP)
    return tmp_path


def test_one_machine_is_checked_as_far_as_that_applies(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "cluster.toml").write_text(CLUSTER.format(interface="lo"))
    with forking_jobs():
        assert main(["cluster.toml", "--sweep", "sweep.toml"]) == 0
    printed = capsys.readouterr().out
    for topic in ("workers", "cores", "interfaces", "all-reduce", "loader"):
        assert f"\nok       {topic} " in f"\n{printed}"
    for topic in ("partition", "signal", "requeue"):
        assert topic not in printed
    assert list((here / "runs").iterdir()) == []


def test_a_missing_interface_and_data_folder_are_lines_and_not_a_crash(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "cluster.toml").write_text(CLUSTER.format(interface="none7"))
    missing = here / "nowhere"
    (here / "sweep.toml").write_text(SWEEP.replace("digits", "cifar10") + f'data_dir = "{missing}"\n')
    with forking_jobs():
        assert main(["cluster.toml", "--sweep", "sweep.toml", "--json"]) == 1
    output = json.loads(capsys.readouterr().out)
    (partition,) = output["partitions"]
    failed = {each["topic"] for each in partition["verdicts"] if each["level"] == "failed"}
    assert failed == {"data folder here", "data folder", "interfaces", "all-reduce", "loader"}
    assert output["exit_code"] == 1
    assert [rank["finished"] for rank in partition["ranks"]] == [True, True]


def test_what_cannot_be_waited_for_or_written_to_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "cluster.toml").write_text("")
    for minutes in ("-3", "nan", "inf"):
        with pytest.raises(SystemExit, match="2"):
            main(["cluster.toml", f"--wait-minutes={minutes}"])
        assert f"expected 0 minutes or more, got {minutes}" in capsys.readouterr().err
    (here / "runs").touch()
    assert main(["cluster.toml"]) == 2
    assert capsys.readouterr().err == f"{here / 'runs'}: is not a folder; move it away\n"


@pytest.mark.parametrize(
    ("text", "named"), [(None, "cluster.toml"), ("workers = 2\n", "workers"), ('executor = "pbs"\n', "executor")]
)
def test_a_mistake_in_the_file_is_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], text: str | None, named: str
) -> None:
    if text is not None:
        (here / "cluster.toml").write_text(text)
    assert main(["cluster.toml"]) == 2
    output = capsys.readouterr()
    assert (output.out, len(output.err.splitlines())) == ("", 1)
    assert named in output.err
    assert not (here / "runs").exists()


def test_without_slurm_the_command_says_so(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    (here / "cluster.toml").write_text('executor = "slurm"\n')
    assert main(["cluster.toml"]) == 1
    message = " ".join(capsys.readouterr().out.split())
    assert "is not on PATH" in message
    assert 'executor = "local"' in message
