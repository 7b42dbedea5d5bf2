"""Secrets of a cluster file, in its environment or its setup, are visible only to the job."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.batch_scripts import FewLines
from tests.run_factory import make_run, pages_alone
from tula_hpc.analysis import plan
from tula_hpc.analysis.report.page import write_report
from tula_hpc.cli.changed_inputs import freeze
from tula_hpc.config import ClusterSpec, load_cluster, without_values
from tula_hpc.errors import InputError
from tula_hpc.launch.job_files import SETUP_FILE, run_setup, write_setup
from tula_hpc.launch.launcher import Launcher
from tula_hpc.records import RunDirectory
from tula_hpc.sweep import main

SECRET = "5ecret"
HIDDEN: dict[str, Any] = {"environment": {"TOKEN": SECRET}, "setup": (f"export KEY={SECRET}",)}
SWEEP = 'name = "s"\n[search]\ncluster_sizes = [1]\nmin_batch = 32\nmax_batch = 32\nmode = "full"\nestimate = false\n'


@pytest.fixture
def no_umask() -> Iterator[None]:
    """Set no umask, so that files are private only because they are created so."""
    before = os.umask(0)
    yield
    os.umask(before)


def write_variables(path: Path) -> Callable[[], None]:
    """Make a job that waits for a file, and writes down the variables that it sees."""

    def job() -> None:
        (path / "in job").touch()
        while not (path / "leave job").exists():
            time.sleep(0.02)
        (path / "variables").write_text(f"{os.environ['TOKEN']} {os.environ['KEY']}")

    return job


def command_lines() -> list[bytes]:
    """Return the command lines of all processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:
            continue
    return found


def look(folder: Path, stage: str) -> list[bytes]:
    """Return the command lines while a job is at a stage, and let it go on."""
    deadline = time.monotonic() + 30
    while not (folder / f"in {stage}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    seen = command_lines()
    (folder / f"leave {stage}").touch()
    return seen


@pytest.mark.processes
def test_no_command_line_of_a_job_on_this_machine_shows_a_secret(tmp_path: Path, no_umask: None) -> None:
    waits = f"touch '{tmp_path}/in setup'; while [ ! -e '{tmp_path}/leave setup' ]; do sleep 0.02; done"
    cluster = ClusterSpec(setup=(f"export KEY={SECRET}", waits), environment={"TOKEN": SECRET}, workers_per_node=2)
    launcher = Launcher(cluster, RunDirectory(tmp_path / "run").create(), "tula-x")
    (job,) = launcher.submit([write_variables(tmp_path)], stage="train", nodes=1, minutes=1)
    # the shell; its controller and two workers
    for stage, processes in {"setup": 1, "job": 4}.items():
        seen = look(tmp_path, stage)
        assert len([line for line in seen if str(job.folder).encode() in line]) >= processes
        assert [line for line in seen if SECRET.encode() in line] == []
    launcher.wait([job])
    assert (tmp_path / "variables").read_text() == f"{SECRET} {SECRET}"
    assert (job.folder / SETUP_FILE).stat().st_mode & 0o777 == 0o600
    assert {path.stat().st_mode & 0o777 for path in job.folder.glob("*.pkl")} == {0o600}


@pytest.mark.processes
def test_a_batch_script_has_no_secret_and_its_job_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = FewLines(tmp_path, monkeypatch, **HIDDEN)
    folder = there.submit(write_variables(tmp_path))
    (tmp_path / "leave job").touch()
    assert there.run()[0] == 0
    assert (tmp_path / "variables").read_text() == f"{SECRET} {SECRET}"
    assert SECRET not in there.script
    assert "1 line of setup; variables OMP_NUM_THREADS, PYTHONHASHSEED, PYTHONSAFEPATH, TOKEN" in there.script
    assert (folder / SETUP_FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("executor", "setup", "code"),
    [
        ("slurm", "false", 0),
        ("local", "false", 1),
        ("slurm", "if", 1),
        ("local", "if", 2),
        ("slurm", "exit 3", 3),
        ("local", "exit 3", 3),
        ("slurm", ": <<'X'", 1),
        ("local", "# a comment", 1),
        ("slurm", "# a comment", 0),
        ("slurm", "set -eu", 0),
    ],
)
def test_setup_that_does_not_come_to_its_end_ends_the_job(tmp_path: Path, executor: str, setup: str, code: int) -> None:
    cluster = ClusterSpec.model_validate({"executor": executor, "setup": [setup]})
    lines = [*run_setup(tmp_path, write_setup(tmp_path, cluster)), "echo $OMP_NUM_THREADS"]
    shell, between = ("bash", "\n") if executor == "slurm" else ("sh", " && ")
    done = subprocess.run([shell, "-c", between.join(lines)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, "" if code else "1\n")


@pytest.mark.parametrize("executor", ["slurm", "local"])
def test_the_shell_reads_environment_values_as_they_were_given(tmp_path: Path, executor: str) -> None:
    values = ["$(id)", "`id`", "a'b", 'a"b', "a b", "\\", "!x", "*", "~", "$HOME", ";id", "#x", "", "ü\t→", "-n", "%s"]
    variables = {f"V{number}": value for number, value in enumerate(values)}
    cluster = ClusterSpec.model_validate({"executor": executor, "environment": variables})
    lines = run_setup(tmp_path, write_setup(tmp_path, cluster))
    shown = "; ".join(f'printf "%s\\0" "$V{number}"' for number in range(len(values)))
    shell, between = ("bash", "\n") if executor == "slurm" else ("sh", " && ")
    done = subprocess.run([shell, "-c", between.join([*lines, shown])], capture_output=True, text=True, check=True)
    assert done.stdout.split("\0")[:-1] == values


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("sweep.toml").write_text(SWEEP)
    Path("cluster.toml").write_text(tomli_w.dumps({"executor": "slurm", **HIDDEN}))
    return tmp_path


DRY = ("sweep.toml", "--cluster", "cluster.toml", "--dry-run")


def test_a_dry_run_shows_names_only(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([*DRY])
    output = capsys.readouterr()
    assert SECRET not in output.out + output.err
    assert "1 line of setup; variables OMP_NUM_THREADS, PYTHONHASHSEED, PYTHONSAFEPATH, TOKEN" in output.out


def test_a_report_shows_names_only(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", epochs_done=5)
    cluster = load_cluster(run.cluster_file).model_copy(update=HIDDEN)
    run.cluster_file.write_text(freeze(cluster))
    with pages_alone("memory"):
        files = [*write_report(run), run.plan_file]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    shown = files[0].read_text()
    assert "TOKEN = " in shown
    assert "line 1" in shown


def test_of_a_damaged_cluster_file_a_report_shows_nothing() -> None:
    for end in ("[", f"x = 0x{'f' * 9000}", f"{'a.' * 9000}b = 1", f"x = {'[' * 9000}"):
        assert SECRET not in without_values(f'{end}\n[environment]\nTOKEN = "{SECRET}"\n')
    assert SECRET not in without_values(f'[[partitions]]\nsetup = ["{SECRET}"]\n')
    assert without_values("") == ""


@pytest.mark.parametrize(
    "wrong",
    [
        {"environment": SECRET},
        {"environment": [SECRET]},
        {"environment": {"TOKEN": [SECRET]}},
        {"environment": {"TOKEN": f"{SECRET}\n"}},
        {"environment": {"TOKEN": SECRET * 1000}},
        {"environment": {"TOKEN": {"KEY": SECRET}}},
        {"setup": SECRET},
        {"setup": [[SECRET]]},
        {"setup": [f"{SECRET}\n"]},
        {"setup": [f"#SBATCH --x={SECRET}"]},
        {"setup": {"x": SECRET}},
        {"partitions": [{"partition": "a", "environment": {"TOKEN": SECRET}}]},
    ],
    ids=range(12),
)
def test_no_message_shows_a_value(tmp_path: Path, wrong: dict[str, object]) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(tomli_w.dumps(wrong))
    with pytest.raises(InputError) as caught:
        load_cluster(path)
    assert SECRET not in str(caught.value)


def test_differences_from_a_run_are_reported_by_name(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(here / "run", epochs_done=5)
    before = load_cluster(run.cluster_file)
    run.cluster_file.write_text(freeze(before.model_copy(update={"environment": {"TOKEN": f"old {SECRET}", "A": "1"}})))
    Path("cluster.toml").write_text(freeze(before.model_copy(update=HIDDEN)))
    assert main([str(run.sweep_file), *DRY[1:], "--run-dir", "run"]) == 2
    assert plan.main(["run", "--set", f"environment.TOKEN={SECRET}"]) == 2
    output = capsys.readouterr().err
    assert SECRET not in output
    for line in ("environment.TOKEN: one value before, another now", "environment.A: set before, not set now"):
        assert line in output
    assert "measured with another value; to measure with this one, start a sweep with a new --run-dir" in output


@pytest.mark.parametrize(
    ("key", "is_told"),
    [
        ("cluster.environment.TOKEN", True),
        ("environment.TOKEN", True),
        ("setup", True),
        ("cluster.partitions.a.environment.TOKEN", True),
        ("cluster.account", False),
    ],
)
def test_set_says_that_the_command_line_is_visible(
    here: Path, capsys: pytest.CaptureFixture[str], key: str, is_told: bool
) -> None:
    main([*DRY, "--set", f"{key}={SECRET}"])
    output = capsys.readouterr().err
    assert SECRET not in output
    lines = [line for line in output.splitlines() if line.startswith("warning: --set: ")]
    assert len(lines) == is_told
    assert not is_told or lines[0].startswith(f"warning: --set: {key}: a command line is visible to everybody")


def test_a_cluster_in_a_traceback_shows_no_value() -> None:
    assert SECRET not in repr(ClusterSpec.model_validate(HIDDEN))
