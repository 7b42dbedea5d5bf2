"""A disk that is full, a quota or a file size limit: a clear error, nothing half-written, and on it goes with space."""

from __future__ import annotations

import argparse
import errno
import fcntl
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.known import known
from tests.run_factory import CLUSTER_TOML, SWEEP_TOML
from tula_hpc import command_errors, records
from tula_hpc.analysis.report.output import replace_files
from tula_hpc.checkpoint.store import CheckpointStore
from tula_hpc.command_errors import exit_code_of
from tula_hpc.config import ClusterSpec
from tula_hpc.errors import CheckpointError, RunDirectoryError, StorageError
from tula_hpc.failure_kinds import Failure
from tula_hpc.files import full_disk
from tula_hpc.launch.diagnosis import informative_line
from tula_hpc.launch.job_files import Submitted
from tula_hpc.launch.launcher import Launcher
from tula_hpc.records import Event, RunDirectory, append_record, read_records, write_atomically
from tula_hpc.sweep import main

# bytes of the small disk
SPACE = 2_000_000
QUOTA = 4_000_000


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """Let the kernel refuse writes beyond this file size, as a full disk does; needs no root."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of `SPACE` bytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = f"size={SPACE},mode=0700"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a small disk needs the right to mount one")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def small_quota(tmp_path: Path) -> Iterator[Path]:
    """A folder with a quota of `QUOTA` bytes on a disk with room: btrfs in a file, since its quotas bind root, too."""
    disk, folder, image = tmp_path / "disk", tmp_path / "disk" / "limited", tmp_path / "image"
    disk.mkdir()
    with image.open("wb") as file:
        # mkfs.btrfs needs at least this size
        file.truncate(120_000_000)
    make = ["mkfs.btrfs", "--quiet", str(image)], ["mount", "-o", "loop", str(image), str(disk)]
    made = shutil.which("mkfs.btrfs") and all(
        subprocess.run(step, capture_output=True, check=False).returncode == 0 for step in make
    )
    if not made:
        pytest.skip("a quota needs btrfs-progs, and the right to mount")
    try:
        for step in (f"quota enable {disk}", f"subvolume create {folder}", f"qgroup limit {QUOTA} {folder}"):
            done = subprocess.run(["btrfs", *step.split()], check=False, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"no quota: {done.stderr.strip()}")
        folder.chmod(0o700)
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(folder: Path) -> Path:
    """Fill the disk to the last byte; deleting the file makes space."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        size = 65_536
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
    return ballast


def event(detail: str) -> Event:
    return Event(time=1.0, event="resumed", stage="train", detail=detail)


def details(path: Path) -> list[str]:
    found, skipped, _ = read_records(Event, [path])
    assert skipped == 0
    return [record.detail for record in found]


@pytest.mark.parametrize("room", [0, 1, 40, 99])
def test_half_a_line_is_removed_again(tmp_path: Path, room: int) -> None:
    path = tmp_path / "events.jsonl"
    append_record(path, event("before"))
    whole = path.read_bytes()
    with no_file_above(len(whole) + room), pytest.raises(StorageError) as raised:
        append_record(path, event("x" * 200))
    message = (
        "File too large: raise the file size limit (ulimit -f), which jobs inherit from the shell that submits them"
    )
    assert str(raised.value) == f"{path}: cannot be written: {message}"
    assert path.read_bytes() == whole
    append_record(path, event("after"))
    assert details(path) == ["before", "after"]


def test_half_a_line_stays_where_another_writer_went_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Truncating the file would remove the other writer's lines; the half line is skipped and counted as torn."""
    path = tmp_path / "events.jsonl"
    path.touch()
    # the other writer meets this one's lock
    monkeypatch.setattr("tula_hpc.records.storage.LOCK_S", 0.05)
    real = os.write

    def fill_up(descriptor: int, data: bytes) -> int:
        monkeypatch.setattr(os, "write", refuse)
        return real(descriptor, data[:20])

    def refuse(descriptor: int, data: bytes) -> int:
        monkeypatch.setattr(os, "write", real)
        append_record(path, event("other"))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", fill_up)
    with pytest.raises(StorageError, match="No space left on device; make space"):
        append_record(path, event("mine"))
    found, skipped, _ = read_records(Event, [path])
    assert ([record.detail for record in found], skipped) == (["other"], 1)


def test_a_short_write_that_goes_on_is_a_whole_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = tmp_path / "events.jsonl", os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:7]))
    append_record(path, event("slow"))
    assert details(path) == ["slow"]


@pytest.mark.parametrize("content", ["x" * 10_000, b"x" * 10_000], ids=["text", "bytes"])
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "plan.json"
    write_atomically(path, "old")
    with (
        no_file_above(4096),
        pytest.raises(StorageError, match=r"plan\.json: cannot be written: File too large: raise"),
    ):
        write_atomically(path, content)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    write_atomically(path, content)
    assert path.stat().st_size == 10_000


def test_a_checkpoint_is_saved_whole_or_not_at_all(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    kept = store.save({"x": torch.ones(10)}, samples_seen=1)
    large = {"x": torch.ones(100_000)}
    with no_file_above(50_000), pytest.raises(CheckpointError, match="cannot be saved: File too large: raise"):
        store.save(large, samples_seen=2)
    assert list(store.folder.iterdir()) == [kept]
    assert store.load_latest() is not None
    store.save(large, samples_seen=2)
    loaded = known(store.load_latest())
    assert loaded.samples_seen == 2


def test_a_report_is_left_as_it_was(tmp_path: Path) -> None:
    replace_files(tmp_path / "report", [], {"report.html": b"old"})
    with no_file_above(4096), pytest.raises(StorageError, match=r"report\.html: cannot be written"):
        replace_files(tmp_path / "report", [], {"report.html": b"x" * 10_000})
    assert [path.read_text() for path in (tmp_path / "report").iterdir()] == ["old"]


# --- a real disk that is full


def actions(run: RunDirectory) -> dict[str, Callable[[], object]]:
    store = CheckpointStore(run.make_train().checkpoints)
    store.save({"x": torch.ones(10)}, samples_seen=1)
    return {
        "event": lambda: run.log_event("resumed", "train", detail="x" * 20_000),
        "record": lambda: append_record(run.profile / "new.jsonl", event("x")),
        "plan": lambda: write_atomically(run.plan_file, "x" * 20_000),
        "checkpoint": lambda: store.save({"x": torch.ones(10_000)}, samples_seen=2),
    }


def everything(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("place", "words"), [("small_disk", "No space left on device"), ("small_quota", "Disk quota exceeded")]
)
def test_a_full_disk_is_named_leaves_nothing_half_written_and_with_space_it_goes_on(
    request: pytest.FixtureRequest, place: str, words: str
) -> None:
    disk: Path = request.getfixturevalue(place)
    run = RunDirectory(disk / "run").create()
    run.log_event("resumed", "train", detail="before")
    todo = actions(run)
    ballast = fill(disk)
    assert words == ("Disk quota exceeded" if os.statvfs(disk).f_bavail else "No space left on device")
    assert words in full_disk(disk)
    before = everything(run.root)
    for name, action in todo.items():
        with pytest.raises((StorageError, CheckpointError), match=f"{words}; make space") as raised:
            action()
        assert str(run.root) in str(raised.value), name
    assert {path: data for path, data in everything(run.root).items() if data} == before
    assert not [path for path in run.root.rglob("*") if path.name.startswith(".")]
    ballast.unlink()
    assert full_disk(disk) == ""
    for action in todo.values():
        action()
    assert len(run.events()) == 2
    loaded = known(CheckpointStore(run.train().checkpoints).load_latest())
    assert loaded.samples_seen == 2


def test_a_job_whose_log_breaks_off_on_a_full_disk_is_said_to_have_had_no_space(small_disk: Path) -> None:
    run = RunDirectory(small_disk / "run").create()
    # no process has this number
    job = Submitted("99999999", run.slurm / "profile-1")
    job.folder.mkdir()
    (job.folder / "99999999_0_log.err").write_text('Traceback (most recent call last):\n  File "/somewh')
    launcher = Launcher(ClusterSpec(), run, "test")
    assert launcher.wait([job])[0].failure is Failure.BUG
    fill(small_disk)
    end = launcher.wait([job])[0]
    assert end.failure is Failure.NO_SPACE
    assert informative_line(end.log_tail).endswith("No space left on device; make space there or have the quota raised")


def test_a_command_on_a_full_disk_says_so_and_later_goes_on(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At every free byte count: however far the command came, the same command goes on once there is space."""
    (tmp_path / "s.toml").write_text(SWEEP_TOML.replace("/nowhere/cifar100", str(tmp_path)))
    (tmp_path / "c.toml").write_text(CLUSTER_TOML)
    # this machine may have no Slurm
    monkeypatch.setattr("tula_hpc.sweep.refuse_impossible", lambda *_: None)
    monkeypatch.setattr("tula_hpc.cli.open_run.work", lambda sweep, until, detach=False, here=False: _use(sweep.run))
    arguments = [str(tmp_path / "s.toml"), "--cluster", str(tmp_path / "c.toml"), "--run-dir", str(small_disk / "run")]
    ballast, failed = fill(small_disk), 0
    for _ in range(50):
        if main(arguments) == 0:
            break
        output = capsys.readouterr().err
        assert "No space left on device; make space there or have the quota raised" in output, output
        assert "Traceback" not in output
        failed += 1
        os.truncate(ballast, max(0, ballast.stat().st_size - 4096))
    assert failed > 1
    assert {path.name for path in (small_disk / "run").iterdir()} >= {"sweep.toml", "cluster.toml", ".lock", "profile"}
    assert main(arguments) == 0


def _use(run: RunDirectory) -> int:
    with run.locked():
        run.log_event("resumed", "train")
    return 0


def test_the_lock_names_its_holder_or_the_reason_why_that_is_unknown(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run").create()
    with (
        no_file_above(0),
        pytest.raises(StorageError, match=r"\.lock: cannot be written: File too large"),
        run.locked(),
    ):
        pass
    with run.locked():
        assert f"process {os.getpid()} on" in (run.root / ".lock").read_text()
        with pytest.raises(RunDirectoryError, match=f"is in use by process {os.getpid()}"), run.locked():
            pass


def test_where_nothing_can_be_locked_the_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    run = RunDirectory(tmp_path / "run").create()
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StorageError, match=rf"{run.root}/\.lock: cannot be locked: .*with flock"), run.locked():
        pass


def test_whatever_else_the_system_refuses_is_a_line_with_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(_: argparse.Namespace) -> int:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/somewhere/file")

    assert exit_code_of(refuse, argparse.Namespace()) == 1
    words = f"/somewhere/file: {os.strerror(errno.EDQUOT)}; make space there or have the quota raised\n"
    assert capsys.readouterr().err == f"{words}Fix the cause and run the same command again.\n"


def test_a_write_that_names_no_file_is_reported_with_the_folder_that_is_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: argparse.Namespace) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(command_errors, "full_disk", lambda folder: f"{folder}: full" if folder == tmp_path else "")
        assert exit_code_of(refuse, argparse.Namespace(run_dir=tmp_path)) == 1
    assert capsys.readouterr().err.startswith(f"{tmp_path}: full\n")
    assert exit_code_of(refuse, argparse.Namespace(run_dir=tmp_path)) == 1
    assert capsys.readouterr().err.startswith("No space left on device; make space there or have the quota raised\n")


def test_every_write_of_a_run_goes_through_one_of_these() -> None:
    """Files are appended to or replaced; code that writes in another way must handle a full disk itself."""
    package = Path(records.__file__).parent.parent
    writers = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any(word in path.read_text() for word in (".write_text(", ".write_bytes(", 'open("w', 'open("a', "mkstemp("))
    }
    assert writers == {
        # opens the file of a script's own output
        "attach/processes.py",
        # a lock
        "data/image_tree.py",
        "files.py",
        # /proc/self/clear_refs
        "process_memory.py",
        # its log; a failure there ends only the follower
        "tracking/follow.py",
    }
