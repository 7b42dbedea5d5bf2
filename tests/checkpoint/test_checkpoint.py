"""Checkpoints: whole or not at all, verified before anything is unpickled, fenced against left-over processes."""

from __future__ import annotations

import errno
import functools
import hashlib
import io
import os
import pickletools
import shutil
import signal
import sys
import time
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.fuzzing import fuzz
from tests.known import known
from tula_hpc import files
from tula_hpc.checkpoint import payload as bounds
from tula_hpc.checkpoint import store as checkpoint
from tula_hpc.checkpoint.store import CheckpointStore, load_model
from tula_hpc.errors import CheckpointError, DataError

Store = CheckpointStore


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "run" / "checkpoints")


def state_of(samples: int) -> dict[str, Any]:
    return {"samples": samples, "weights": torch.full((100,), float(samples))}


def save(store: Store, samples: int, restart: int = 0) -> Path:
    return store.save(state_of(samples), samples_seen=samples, restart_count=restart)


def latest_samples(store: Store) -> int:
    loaded = known(store.load_latest())
    assert loaded.state["weights"].eq(loaded.state["samples"]).all()
    return int(loaded.state["samples"])


def forge(path: Path, payload: bytes) -> Path:
    """Write a checkpoint file with a correct checksum around any payload."""
    header = checkpoint._HEADER.pack(
        checkpoint.MAGIC, checkpoint.VERSION, len(payload), hashlib.sha256(payload).digest()
    )
    path.write_bytes(header + payload)
    path.chmod(0o600)
    return path


def torch_bytes(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


# --- what is saved is what is loaded


def equal(one: Any, two: Any) -> bool:
    """Compare values and types, with NaN equal to itself and tensors bit for bit."""
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and one.shape == two.shape and torch_bits(one) == torch_bits(two)
    if isinstance(one, dict):
        return list(map(repr, one)) == list(map(repr, two)) and all(equal(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(equal, one, two))
    return bool(one == two) or str(one) == str(two) == "nan"


def torch_bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


tensors = st.builds(
    lambda size, dtype: torch.arange(size).to(dtype),
    st.integers(0, 5),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8]),
)
scalars = st.none() | st.booleans() | st.integers(-(2**1999), 2**1999) | st.floats() | st.text() | tensors
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=4).map(OrderedDict)
        | st.dictionaries(st.integers(0, 9), st.integers(0, 9), max_size=4).map(Counter)
    ),
    max_leaves=12,
)


@fuzz(8)
@given(st.dictionaries(st.text(), values, max_size=4))
def test_accepted_states_come_back_the_same(state: dict[str, Any]) -> None:
    checkpoint._check_storable(state, "state")
    assert equal(checkpoint._unpickle(Path("memory"), torch_bytes(state)), state)


def counted(state: dict[str, Any]) -> tuple[int, int]:
    """Return how many instructions a state takes in its pickle, and how many bytes."""
    with zipfile.ZipFile(io.BytesIO(torch_bytes(state))) as archive:
        pickled = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    return sum(1 for _ in pickletools.genops(pickled)), len(pickled)


def check_count(state: dict[str, Any]) -> None:
    most = checkpoint._check_storable(state, "state") + bounds.REFERENCES
    instructions, size = counted(state)
    assert instructions <= most
    assert size <= most * bounds.TEXT_BYTES


@fuzz(8)
@given(st.dictionaries(st.text(), values, max_size=4))
def test_a_state_is_never_larger_than_it_is_counted_when_it_is_saved(state: dict[str, Any]) -> None:
    check_count(state)


def test_long_lists_and_whole_trainings_are_counted_and_not_much_too_large() -> None:
    assert bounds.MAX_INSTRUCTIONS * bounds.TEXT_BYTES <= bounds.MAX_PICKLE_BYTES
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(200)))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.autograd.backward(model(torch.randn(4, 3)).sum())
    optimizer.step()
    training = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    numbers = {"losses": [0.5] * 5000, "steps": dict.fromkeys(map(str, range(5000)), 1), "text": "x" * 99_999}
    shapes = {str(n): nn.Parameter(torch.zeros([1] * n)) for n in range(7)}
    for state in (training, numbers, shapes):
        check_count(state)
    assert checkpoint._check_storable(training, "state") < 1.2 * counted(training)[0]


def test_a_state_that_has_grown_too_large_to_be_loaded_is_not_saved(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "MAX_INSTRUCTIONS", 1000)
    save(store, 1)
    for grown in ([0.5] * 1000, "x" * 1000 * bounds.TEXT_BYTES):
        with pytest.raises(CheckpointError, match="the state holds too many names and numbers; keep long lists"):
            store.save({"grown": grown}, samples_seen=2)
    assert latest_samples(store) == 1
    assert len(list(store.folder.iterdir())) == 1


def test_everything_a_training_needs_can_be_saved(store: Store) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedulers = [
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 4]),
        torch.optim.lr_scheduler.OneCycleLR(momentum, max_lr=0.1, total_steps=10),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        torch.optim.lr_scheduler.LambdaLR(momentum, lambda step: 1.0),
    ]
    torch.autograd.backward(model(torch.randn(4, 3)).sum())
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedulers": [scheduler.state_dict() for scheduler in schedulers],
        "scaler": torch.amp.grad_scaler.GradScaler("cpu").state_dict(),
        "rng": torch.get_rng_state(),
    }
    loaded = Store.load(store.save(state, samples_seen=1))
    assert equal(loaded, state)
    assert loaded["model"]._metadata == state["model"]._metadata  # type: ignore[attr-defined]  # torch's own attribute


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth else []


class Colour(StrEnum):
    RED = "red"


def self_containing() -> list[Any]:
    inner: list[Any] = []
    inner.append(inner)
    return inner


def with_attribute() -> torch.Tensor:
    tensor = torch.zeros(1)
    tensor.note = {1, 2}  # type: ignore[attr-defined]  # attributes of tensors are saved too
    return tensor


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (np.float64(1.0), r"state\['x'\]\[0\]: an object of type numpy\.float64"),
        (Colour.RED, "Colour"),
        (b"bytes", "type bytes"),
        ({1, 2}, "type set"),
        (Path(), "PosixPath"),
        (print, "builtin_function"),
        pytest.param(1 << 3000, "3001 bits", id="huge integer"),
        ({(1, 2): 3}, "tuple cannot be saved as a key"),
        (self_containing(), "contains itself"),
        (with_attribute(), r"state\['x'\]\[0\]\.note: an object of type set"),
        (nn.Linear(1, 1), "Linear"),
        (torch.ones(2).to_sparse(), "without a plain storage"),
        (torch.ones(2, device="meta"), "without a plain storage"),
        (torch.ones(2, dtype=torch.uint16), r"torch\.uint16"),
        (torch.ones(1).expand(5), "an expanded tensor"),
        (nested(99), "nested deeper"),
    ],
)
def test_a_state_that_could_not_be_loaded_is_refused_when_saved(store: Store, value: object, place: str) -> None:
    with pytest.raises(CheckpointError, match=place):
        store.save({"x": [value]}, samples_seen=1)
    assert not store.folder.exists()


def test_only_a_dict_is_saved(store: Store) -> None:
    with pytest.raises(CheckpointError, match="expected a dict"):
        store.save([1], samples_seen=1)  # type: ignore[arg-type]  # the mistake is the test


# --- which file is the newest, and which go


def test_nothing_saved_is_not_an_error(store: Store) -> None:
    assert store.load_latest() is None
    assert store.paths() == []


def test_keeps_the_newest_and_says_what_they_are(store: Store) -> None:
    paths = [save(store, samples) for samples in (128, 12_800, 1_280_000)]
    assert store.paths() == paths[1:]
    assert paths == sorted(paths), "the order of names is the order of ages"
    loaded = known(store.load_latest())
    assert loaded[1:] == (paths[2], [], 1_280_000, 0)


@given(st.lists(st.integers(0, 10**14), min_size=2, max_size=5, unique=True).map(sorted))
@settings(max_examples=20)
def test_order_is_by_number_whatever_the_number_of_digits(samples: list[int]) -> None:
    names = [Path(checkpoint.file_name(0, number)) for number in samples]
    assert sorted(names, key=checkpoint._age) == names


def test_folder_and_files_are_private(store: Store) -> None:
    store.folder.mkdir(parents=True, mode=0o755)
    path = save(store, 1)
    assert store.folder.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600


def test_saving_again_at_the_same_place_replaces(store: Store) -> None:
    assert save(store, 5) == save(store, 5)
    assert len(store.paths()) == 1


def test_left_over_process_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, 100, restart=1)
    with monkeypatch.context() as patch:
        # refused before anything is written
        patch.delattr(checkpoint, "_write_checkpoint")
        refusal = "restart 1 has already saved; this process of restart 0 is a left-over"
        with pytest.raises(CheckpointError, match=refusal):
            save(store, 200, restart=0)
    assert [path.name for path in store.paths()] == ["checkpoint-r0001-000000000100.tula"]
    save(store, 150, restart=1)
    save(store, 150, restart=2)


def test_a_partner_keeps_its_file_however_many_come_after_it(store: Store) -> None:
    """Such a file is a worker's own state; it must stay if rank 0 could not save its part of the later ones."""
    states = Store(store.folder / "worker", keep=3, partners=store.folder)
    save(states, 100)
    save(store, 100)
    for seen in range(200, 700, 100):
        save(states, seen)
    assert [path.name[-8:-5] for path in states.paths()] == ["100", "400", "500", "600"]


def test_a_start_after_a_damaged_newest_file_is_no_left_over(store: Store) -> None:
    save(store, 100, restart=2)
    damaged = save(store, 200, restart=5)
    damaged.write_bytes(damaged.read_bytes()[:-3])
    # by a newly submitted job, which counts its restarts from 0
    loaded = known(store.load_latest())
    assert (loaded.samples_seen, loaded.restart_count) == (100, 5)
    save(store, 150, restart=loaded.restart_count + 1)


def test_left_over_process_is_refused_even_when_it_began_to_write_before(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Store(store.folder)
    real = checkpoint._write_checkpoint

    def slow_write(*args: Any) -> None:
        monkeypatch.setattr(checkpoint, "_write_checkpoint", real)
        save(other, 100, restart=1)
        real(*args)

    monkeypatch.setattr(checkpoint, "_write_checkpoint", slow_write)
    with pytest.raises(CheckpointError, match="left-over"):
        save(store, 200, restart=0)
    assert latest_samples(store) == 100
    assert len(list(store.folder.iterdir())) == 1


def test_a_restart_that_went_back_is_newer_than_what_it_abandoned(store: Store) -> None:
    save(store, 100)
    save(store, 200)
    save(store, 150, restart=1)
    assert latest_samples(store) == 150


def test_temporary_files_of_killed_saves_go_but_not_those_of_a_later_restart(store: Store) -> None:
    save(store, 1)
    stale, later, foreign = (
        store.folder / name
        for name in (
            ".checkpoint-r0000-000000000002.tula.abc.tmp",
            ".checkpoint-r0001-000000000002.tula.abc.tmp",
            "notes",
        )
    )
    for path in (stale, later, foreign):
        path.write_bytes(b"half")
    save(store, 2)
    assert [path.exists() for path in (stale, later, foreign)] == [False, True, True]


# --- damage and malice


def damage_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def replace_by(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        path.rename(path.parent / "moved away")
        make(path)

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "bit flipped": (damage_bit, "checksum"),
    "truncated": (lambda path: os.truncate(path, path.stat().st_size - 1), "truncated"),
    "header only": (lambda path: os.truncate(path, 30), "truncated: 30 bytes"),
    "empty": (lambda path: path.write_bytes(b""), "truncated: 0 bytes"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"x"), "damaged"),
    "text": (lambda path: path.write_text("x" * 1000), "not a checkpoint"),
    "plain torch file": (lambda path: path.write_bytes(torch_bytes({})), "not a checkpoint"),
    "gone": (lambda path: path.unlink(), "No such file"),
    "group writable": (lambda path: path.chmod(0o620), "others may write"),
    "world writable": (lambda path: path.chmod(0o602), "others may write"),
    "folder": (replace_by(lambda path: path.mkdir()), "Is a directory"),
    "pipe": (replace_by(os.mkfifo), "not a regular file"),
    "link": (replace_by(lambda path: path.symlink_to(path.parent / "moved away")), "symbolic link"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_file_is_named_and_the_one_before_is_used(store: Store, kind: str) -> None:
    damage, reason = DAMAGES[kind]
    good, bad = save(store, 1), save(store, 2)
    damage(bad)
    with pytest.raises(CheckpointError, match=rf"^{bad}: .*{reason}"):
        Store.load(bad)
    loaded = known(store.load_latest())
    assert (loaded.path, loaded.samples_seen) == (good, 1)
    if kind != "gone":
        ((rejected, why),) = loaded.rejected
        assert rejected == bad
        assert reason in why
        assert str(bad) not in why


@pytest.fixture(scope="module")
def sound_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = save(Store(tmp_path_factory.mktemp("sound")), 1)
    return path, path.read_bytes()


@given(position=st.integers(0, 2**16), bit=st.integers(0, 7))
@settings(max_examples=80)
def test_any_flipped_bit_is_found(sound_file: tuple[Path, bytes], position: int, bit: int) -> None:
    path, content = sound_file
    data = bytearray(content)
    data[position % (len(data) if position % 2 else checkpoint._HEADER.size)] ^= 1 << bit
    path.write_bytes(data)
    with pytest.raises(CheckpointError):
        Store.load(path)


def test_another_users_folder_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(store, 1)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(CheckpointError, match="belongs to user id"):
        Store.load(path)
    with pytest.raises(CheckpointError, match="belongs to user id"):
        save(store, 2)


def test_a_newer_format_is_named(store: Store) -> None:
    path = save(store, 1)
    data = bytearray(path.read_bytes())
    data[11] += 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="format version 2; this program reads version 1"):
        Store.load(path)


def test_no_usable_file_at_all_is_an_error_and_not_a_new_beginning(store: Store) -> None:
    for path in (save(store, 1), save(store, 2)):
        damage_bit(path)
    with pytest.raises(CheckpointError, match=r"no usable checkpoint: .*000000000002.tula is.*000000000001.tula is"):
        store.load_latest()


def test_files_that_an_earlier_run_replaces_meanwhile_are_left_to_the_next_job(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process may go on saving on a node that Slurm has lost."""
    save(store, 1)
    save(store, 2)
    listed = store.paths()
    other = Store(store.folder)
    for samples in (3, 4):
        save(other, samples)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "paths", lambda _: listed)
        with pytest.raises(DataError, match=r"no usable checkpoint: .*000002.tula cannot be read: No such file"):
            store.load_latest()
    assert latest_samples(store) == 4


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_files_that_the_file_system_does_not_give_this_time_are_left_to_the_next_job(
    store: Store, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    save(store, 1)

    def refuse(path: Path) -> bytes:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(checkpoint, "_read_verified", refuse)
    with pytest.raises(DataError, match="no usable checkpoint: "):
        store.load_latest()


def test_damaged_files_do_not_push_out_good_ones(store: Store) -> None:
    good, bad = save(store, 1), save(store, 9)
    damage_bit(bad)
    assert latest_samples(store) == 1
    newer = save(store, 5, restart=1)
    assert good in store.paths(), "otherwise the new file has only a damaged one as its predecessor"
    assert latest_samples(store) == 5
    newest = save(store, 6, restart=1)
    assert store.paths() == [newer, newest]


def test_a_damaged_file_that_was_saved_anew_counts_again(store: Store) -> None:
    save(store, 1)
    bad = save(store, 9)
    damage_bit(bad)
    assert latest_samples(store) == 1
    assert save(store, 9) == bad
    newest = save(store, 10)
    assert store.paths() == [bad, newest]


class Hostile:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.system, (f"mkdir {self.folder}",)


def test_hostile_pickle_with_a_right_checksum_is_not_executed(store: Store, tmp_path: Path) -> None:
    save(store, 1)
    canary = tmp_path / "canary"
    path = forge(store.folder / "checkpoint-r0000-000000000002.tula", torch_bytes({"x": Hostile(canary)}))
    with pytest.raises(CheckpointError, match=r"holds what may not be loaded: a reference to (posix|nt)\.system"):
        Store.load(path)
    assert latest_samples(store) == 1
    assert not canary.exists()


def zipped(pickled: bytes, *, packed: bool = False, more: dict[str, bytes] | None = None) -> bytes:
    """Return an archive as torch.save makes it around a pickle."""
    file = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    with zipfile.ZipFile(file, "w", method) as made:
        for name, content in {"archive/data.pkl": pickled, "archive/version": b"3\n", **(more or {})}.items():
            made.writestr(name, content)
    return file.getvalue()


def load_or_refuse(payload: bytes) -> str:
    """Return the error message, empty if the payload is a loadable dict; anything else fails the test."""
    try:
        assert isinstance(checkpoint._unpickle(Path("memory"), payload), dict)
    except CheckpointError as error:
        return str(error)
    return ""


@given(st.binary(max_size=60), st.sampled_from([bytes, zipped, b"PK\x03\x04".__add__]))
@settings(max_examples=80)
def test_any_payload_is_loaded_or_refused_in_one_line(content: bytes, wrap: Callable[[bytes], bytes]) -> None:
    refusal = load_or_refuse(wrap(content))
    assert "\n" not in refusal
    assert refusal.startswith("memory: ") or wrap is zipped


@given(position=st.integers(0, 2**16), byte=st.integers(0, 255))
@settings(max_examples=80)
def test_a_forged_payload_is_loaded_or_refused_in_one_line(position: int, byte: int) -> None:
    payload = bytearray(torch_bytes({"a": [1, 2.5, "x", None], "w": torch.ones(3), "o": OrderedDict(b=(1, 2))}))
    payload[position % len(payload)] = byte
    assert "\n" not in load_or_refuse(bytes(payload))


def test_out_of_memory_says_nothing_about_the_file(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, 1)

    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(torch.OutOfMemoryError):
        store.load_latest()


# --- faults while saving


@pytest.mark.parametrize("call", ["fsync", "replace", "write"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_full_disk_leaves_the_old_ones_and_nothing_half_written(
    store: Store, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    kept = [save(store, 1), save(store, 2)]

    def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    targets: dict[str, tuple[Any, str]] = {
        "fsync": (os, "fsync"),
        "replace": (Path, "replace"),
        "write": (checkpoint, "_write_checkpoint"),
    }
    monkeypatch.setattr(*targets[call], fail)
    with pytest.raises(CheckpointError, match=f"000000000003.tula: cannot be saved: {os.strerror(code)}"):
        save(store, 3)
    monkeypatch.undo()
    assert sorted(store.folder.iterdir()) == kept
    assert latest_samples(store) == 2


def forked(action: Callable[[], object]) -> int:
    """Run `action` in a forked child and return its process id at once."""
    child = os.fork()
    if not child:
        try:
            # ends the child if it hangs
            signal.alarm(60)
            # OpenMP's threads do not survive a fork
            torch.set_num_threads(1)
            action()
            os._exit(0)
        finally:  # an exception must not let the child go on as a second test session
            os._exit(1)
    return child


def in_child(action: Callable[[], object]) -> int:
    """Run `action` in a forked child and return its wait status."""
    return os.waitpid(forked(action), 0)[1]


def test_file_size_limit_in_the_middle_of_the_payload(store: Store) -> None:
    """The kernel refuses a real write: the error passes through torch's C++ writer."""
    import resource

    kept, ballast = save(store, 1), torch.zeros(10**6)

    def save_too_much() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        with pytest.raises(CheckpointError, match=f"cannot be saved: {os.strerror(errno.EFBIG)}"):
            store.save({"ballast": ballast}, samples_seen=2)

    assert in_child(save_too_much) == 0
    assert list(store.folder.iterdir()) == [kept]


def test_a_failed_deletion_does_not_spoil_the_save(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for samples in (1, 2):
        save(store, samples)
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(PermissionError()))
    save(store, 3)
    monkeypatch.undo()
    assert len(store.paths()) == 3
    save(store, 4)
    assert len(store.paths()) == 2


@pytest.mark.parametrize("name", ["iterdir", "exists"])
def test_files_that_cannot_be_looked_at_after_a_save_do_not_spoil_it(
    store: Store, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A file system may fail for a moment: the list of the folder, or a namesake of a worker's state."""
    states, prune = Store(store.folder / "worker", partners=store.folder), Store._prune

    def refused(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def failing(self: Store) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Path, name, refused)
            prune(self)

    save(states, 1)
    monkeypatch.setattr(Store, "_prune", failing)
    for samples in (2, 3, 4):
        save(states, samples)
    assert latest_samples(states) == 4
    monkeypatch.setattr(Store, "_prune", prune)
    save(states, 5)
    assert len(states.paths()) == 2


# functions that touch the disk; kills between the many small writes are tested below, by time
STAGES = {"save", "_prepare_folder", "_remove_temporaries", "_write", "whole_file", "_write_checkpoint", "_prune"}


def killed_after(lines: int, action: Callable[[], object]) -> bool:
    """Run `action` in a child that is killed after this many lines of `STAGES`; return whether it came so far."""

    def traced() -> None:
        left = lines

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal left
            is_own = frame.f_code.co_filename in (checkpoint.__file__, files.__file__)
            if not is_own or frame.f_code.co_name not in STAGES:
                return None
            left -= event == "line"
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        action()

    status = in_child(traced)
    assert status in (0, signal.SIGKILL)
    return status != 0


@pytest.mark.processes
def test_killed_at_any_line_of_a_save_the_old_or_the_new_one_loads(store: Store, tmp_path: Path) -> None:
    """Kill at every second line, from the first to the last."""
    for samples in (1, 2):
        save(store, samples)
    outcomes = []
    for lines in range(0, 1000, 2):
        struck = Store(shutil.copytree(store.folder, tmp_path / str(lines)))
        killed = killed_after(lines, functools.partial(save, struck, 3))
        outcomes.append(latest_samples(struck))
        save(struck, 4)
        names = [path.name for path in struck.folder.iterdir()]
        assert len(names) == 2, f"after {lines} lines: {names}"
        if not killed:
            break
    assert outcomes == sorted(outcomes), "a new file that is there must stay"
    assert set(outcomes) == {2, 3}
    assert len(outcomes) > 15


@pytest.mark.processes
def test_killed_at_random_times_during_large_saves(store: Store) -> None:
    save(store, 1)
    ballast = torch.zeros(2_000_000)

    def save_from(first: int) -> None:
        for samples in range(first, 10**6):
            store.save({**state_of(samples), "ballast": ballast}, samples_seen=samples)

    seen = 1
    for delay_s in (0.0, 0.007, 0.013, 0.029):
        child = forked(functools.partial(save_from, seen + 1))
        # until the child has saved once
        while store.paths()[-1].name <= checkpoint.file_name(0, seen):
            time.sleep(0.001)
        time.sleep(delay_s)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        before, seen = seen, latest_samples(store)
        assert seen > before
    save(store, 10**6, restart=1)
    assert all(path.suffix == ".tula" for path in store.folder.iterdir())


def test_older_files_stay_until_the_new_one_is_durable(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for samples in (1, 2):
        save(store, samples)
    events: list[str] = []
    real: dict[str, Callable[..., Any]] = {"fsync": os.fsync, "replace": Path.replace, "unlink": Path.unlink}

    def note(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name != "unlink" or not args[0].name.startswith("."):
                events.append(name)
            return real[name](*args, **kwargs)

        return call

    monkeypatch.setattr(os, "fsync", note("fsync"))
    monkeypatch.setattr(Path, "replace", note("replace"))
    monkeypatch.setattr(Path, "unlink", note("unlink"))
    save(store, 3)
    # file, name, folder; then the oldest
    assert events == ["fsync", "replace", "fsync", "unlink"]


def test_weights_are_found_by_the_run_or_by_a_file_of_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "train" / "main" / "checkpoints")
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        load_model(tmp_path)
    model = torch.nn.Linear(2, 3)
    path = store.save({"model": model.state_dict(), "step": 1}, samples_seen=8)
    for place in (tmp_path, path):
        other = torch.nn.Linear(2, 3)
        other.load_state_dict(load_model(place))
        assert torch.equal(other.weight, model.weight)
    newest = store.save({"kept": {}}, samples_seen=16)
    with pytest.raises(CheckpointError, match="a script loads its own state"):
        load_model(tmp_path)
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"{newest}: .*; the one before it is {path}"):
        load_model(tmp_path)


def test_of_a_studys_many_models_one_has_to_be_named(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "train" / "study" / "lbt-b64-s0" / "checkpoints")
    path = store.save({"model": {"w": torch.ones(2)}}, samples_seen=8)
    with pytest.raises(
        CheckpointError, match=f"belongs to a study, which trains many models; name one, such as {path}$"
    ):
        load_model(tmp_path)
    assert load_model(path).keys() == {"w"}
