"""Data sets: their contents, how they are split and augmented, and the message about a folder that is wrong."""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from torch.utils.data import TensorDataset

from tula_hpc.config import WorkloadSpec
from tula_hpc.data import image_cache as decoded_cache
from tula_hpc.data.datasets import Data, _read_digits, build_data, random_order, stratified_split
from tula_hpc.data.image_tree import EXTENSIONS
from tula_hpc.data.images import Bytes, Jitter, PixelDataset, Preprocessing, Scaling, below, mix, open_rgb, prepared
from tula_hpc.errors import InputError

Paint = Callable[[int], np.ndarray[Any, Any]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path / "cache" / "tula_hpc"


def noise(seed: int, edge: int = 8, channels: int = 3) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, (edge, edge, channels), np.uint8)


def write_tree(root: Path, classes: list[str], images: int = 2, edge: int = 8) -> Path:
    """Write `images` random PNG files for each class, and return the root."""
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(images):
            Image.fromarray(noise(label * images + i, edge)).save(root / name / f"{i}.png")
    return root


def write_both(root: Path, classes: list[str], test: str = "test", **options: Any) -> Path:
    write_tree(root / "train", classes, **options)
    write_tree(root / test, classes, **options)
    return root


def build(dataset: str, data_dir: Path | None = None, **options: Any) -> Data:
    return build_data(WorkloadSpec(dataset=dataset, data_dir=data_dir, **options))


def items(dataset: Any) -> list[tuple[Tensor, int]]:
    return [dataset[i] for i in range(len(dataset))]


def seen(dataset: Any, index: int) -> Tensor:
    """Return an image as a model gets it."""
    image: Tensor = prepared(dataset, dataset[index][0][None])[0]
    return image


def labels(dataset: Any) -> list[int]:
    return [label for _, label in items(dataset)]


# digits and synthetic


def test_digits_are_real_images_split_by_class() -> None:
    data = build("digits", augment=False)
    train, test = items(data.train), items(data.test)
    assert (data.classes, data.image_size, len(train) + len(test)) == (10, 8, 1797)
    images = prepared(data.train, torch.stack([image for image, _ in train]))
    assert images.shape[1:] == (3, 8, 8)
    assert (float(images.min()), float(images.max())) == (0, 1)
    assert torch.equal(images[:, 0], images[:, 2])
    share = np.bincount(labels(data.test)) / (np.bincount(labels(data.train)) + np.bincount(labels(data.test)))
    assert np.allclose(share, 0.2, atol=0.01)


@pytest.mark.processes
def test_digits_and_kinds_of_files_are_those_of_the_libraries_that_are_not_loaded_for_them() -> None:
    from sklearn.datasets import load_digits

    digits, (images, found) = load_digits(), _read_digits()
    assert np.array_equal(digits.images, images)
    assert np.array_equal(digits.target, found)
    from torchvision.datasets.folder import IMG_EXTENSIONS

    assert set(EXTENSIONS) == set(IMG_EXTENSIONS)


ALL_BYTES = torch.arange(256, dtype=torch.uint8).repeat(2, 3, 1).reshape(2, 3, 16, 16)
SCALING = Scaling((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def test_stepwise_scaling_has_the_bits_of_torchvisions_transforms() -> None:
    from torchvision.transforms import v2

    floats = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(SCALING.mean, SCALING.deviation)])
    assert torch.equal(SCALING._replace(stepwise=True).apply(ALL_BYTES), floats(ALL_BYTES))


@pytest.mark.parametrize("stepwise", [False, True])
def test_bytes_are_scaled_by_channel_and_in_full_precision_whatever_surrounds_it(stepwise: bool) -> None:
    mean, deviation = (np.array(part)[:, None, None] for part in (SCALING.mean, SCALING.deviation))
    with torch.autocast("cpu", torch.bfloat16):
        found = Preprocessing(SCALING._replace(stepwise=stepwise), 16).apply(ALL_BYTES)
    assert found.dtype == torch.float32
    assert np.allclose(found.numpy(), (ALL_BYTES.numpy() / 255 - mean) / deviation, atol=1e-6)


@pytest.mark.parametrize("image_size", [16, 24])
def test_a_batch_is_prepared_as_its_images_are(image_size: int) -> None:
    preprocessing = Preprocessing(SCALING, image_size)
    assert torch.equal(preprocessing.apply(ALL_BYTES)[1:], preprocessing.apply(ALL_BYTES[1:]))


def test_bytes_of_a_users_own_data_stay_what_they_are() -> None:
    own = TensorDataset(ALL_BYTES)
    assert prepared(own, ALL_BYTES) is ALL_BYTES


def test_no_digit_is_both_trained_and_tested_on() -> None:
    data = build("digits")
    assert isinstance(data.train, PixelDataset)
    assert isinstance(data.test, PixelDataset)
    assert not set(data.train.positions.tolist()) & set(data.test.positions.tolist())


def test_the_split_does_not_depend_on_the_seed() -> None:
    assert labels(build("digits", seed=1).test) == labels(build("digits", seed=2).test)


def test_digits_are_shifted_and_never_mirrored() -> None:
    train = build("digits").train
    assert isinstance(train, PixelDataset)
    assert train.jitter == Jitter(1, flip=False)
    assert not torch.equal(train[3][0], train[3][0]) or not torch.equal(train[3][0], train[3][0])


def test_another_image_size_is_resized_to() -> None:
    image = seen(build("digits", image_size=32, augment=False).train, 0)
    small = seen(build("digits", augment=False).train, 0)
    assert image.shape == (3, 32, 32)
    assert torch.allclose(image.mean(), small.mean(), atol=0.02)


def test_synthetic_images_can_be_learned() -> None:
    """The nearest class mean of the training set classifies images that were not trained on."""
    data = build("synthetic", samples=300, image_size=16)
    train, test = ([(image.float(), label) for image, label in items(part)] for part in (data.train, data.test))
    means = torch.stack([torch.stack([x for x, y in train if y == label]).mean(0) for label in range(data.classes)])
    guesses = [int((means - image).flatten(1).norm(dim=1).argmin()) for image, _ in test]
    assert np.mean([guess == label for guess, (_, label) in zip(guesses, test, strict=True)]) > 0.95
    assert len(train) == 300


def test_synthetic_images_follow_from_the_seed() -> None:
    def image(seed: int, index: int = 5) -> Tensor:
        found: Tensor = build("synthetic", samples=20, image_size=12, seed=seed).train[index][0]
        return found

    assert torch.equal(image(1), image(1))
    assert not torch.equal(image(1), image(2))
    # of the same class
    assert not torch.equal(image(1), image(1, index=15))


def test_a_subset_is_a_fixed_random_choice_that_grows() -> None:
    def chosen(samples: int, seed: int = 0) -> list[int]:
        train = build("digits", samples=samples, seed=seed).train
        assert isinstance(train, PixelDataset)
        return list(train.positions.tolist())

    assert chosen(50) == chosen(100)[:50]
    assert chosen(50) != chosen(50, seed=1)
    assert len(set(chosen(100))) == 100


def test_a_limited_test_set_is_the_same_for_every_seed_and_grows() -> None:
    def chosen(samples: int, **keys: Any) -> list[int]:
        test = build("digits", test_samples=samples, **keys).test
        assert isinstance(test, PixelDataset)
        return list(test.positions.tolist())

    whole = build("digits").test
    assert isinstance(whole, PixelDataset)
    assert chosen(50) == chosen(100, seed=1)[:50]
    assert len(set(chosen(100))) == 100
    assert set(chosen(100)) <= set(whole.positions.tolist())
    assert chosen(50, holdout=0.2) == chosen(51, holdout=0.2), "held-out samples are tested on instead"
    with pytest.raises(InputError, match=r"workload\.test_samples: 360, but the test set has 359"):
        build("digits", test_samples=360)


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_how_many_samples_there_are_is_known_before_they_are_read(name: str) -> None:
    assert WorkloadSpec(dataset=name).most_samples == len(build(name).train)  # type: ignore[arg-type] # it has one
    assert WorkloadSpec(dataset=name, samples=50).most_samples == 50


def test_more_samples_than_there_are_is_an_error() -> None:
    with pytest.raises(InputError, match=r"workload\.samples: 2000, but the training set has 1438"):
        build("digits", samples=2000)


def test_only_the_first_classes_are_trained_and_tested() -> None:
    workload = build("digits", classes=3, samples=50)
    assert workload.classes == 3
    assert len(workload.train) == 50  # type: ignore[arg-type] # ours have a length
    for part in (workload.train, workload.test):
        assert isinstance(part, PixelDataset)
        assert set(part.labels) == {0, 1, 2}


def test_more_classes_than_there_are_is_an_error() -> None:
    with pytest.raises(InputError, match=r"workload\.classes: 11, but the data set has 10"):
        build("digits", classes=11)


# preparation and augmentation


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60))
@settings(max_examples=50)
def test_a_stratified_split_is_one(classes: list[int]) -> None:
    every = np.array(classes)
    train, test = stratified_split(every)
    assert sorted([*train, *test]) == list(range(len(classes)))
    for label in set(classes):
        tested, total = np.sum(every[test] == label), classes.count(label)
        assert tested == (0 if total == 1 else max(1, round(total / 5)))


@given(st.integers(1, 4), st.integers(0, 2**31), st.booleans())
@settings(max_examples=30)
def test_jitter_moves_an_image_by_at_most_its_padding(padding: int, seed: int, flip: bool) -> None:
    image = 1 + noise(seed, 8).transpose(2, 0, 1) // 2
    moved = Jitter(padding, flip).apply(image[None], mix(seed))[0]
    padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (8, 8), axis=(1, 2)).transpose(1, 2, 0, 3, 4)
    found = (windows == moved).all(axis=(2, 3, 4)).any()
    mirrored = (windows[..., ::-1] == moved).all(axis=(2, 3, 4)).any()
    assert found or (flip and mirrored)


def test_jitter_takes_every_place_and_mirrors_half() -> None:
    keys = mix(0, np.arange(4000))
    image = np.zeros((1, 3, 3, 4), np.uint8)[:, :, :, :3] + np.array([1, 2, 3], np.uint8)
    moved = Jitter(1, flip=True).apply(np.repeat(image, 4000, axis=0), keys)
    counts = np.unique(moved.reshape(4000, -1), axis=0, return_counts=True)[1]
    assert len(counts) == 3 * 3 * 2
    assert counts.min() > 4000 / 18 * 0.7


@given(st.integers(0, 2**63), st.integers(0, 10_000), st.integers(2, 40))
@settings(max_examples=50)
def test_hashed_numbers_are_even_and_independent(seed: int, epoch: int, limit: int) -> None:
    keys = mix(seed, epoch, np.arange(limit * 200))
    assert len(np.unique(keys)) == len(keys)
    first, second = below(keys, limit, 0), below(keys, limit, 1)
    assert first.min() >= 0
    assert np.bincount(first, minlength=limit).min() > 100
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.25
    assert random_order(30, seed % 1000).tolist() == random_order(30, seed % 1000).tolist()


# CIFAR


def write_cifar100(folder: Path, images: int = 5) -> Bytes:
    """Write random records of the binary layout: coarse label, fine label, 3072 bytes."""
    folder.mkdir(parents=True)
    records = np.random.default_rng(0).integers(0, 256, (images, 3074), np.uint8)
    records[:, 1] = np.arange(images) * 19
    for part in ("train", "test"):
        (folder / f"{part}.bin").write_bytes(records.tobytes())
    return records


@pytest.mark.parametrize("folder", ["", "cifar-100-binary"])
def test_binary_cifar100_is_read_as_it_lies(tmp_path: Path, folder: str) -> None:
    records = write_cifar100(tmp_path / "data" / folder)
    data = build("cifar100", tmp_path / "data", augment=False)
    assert labels(data.train) == [0, 19, 38, 57, 76]
    assert (data.classes, data.image_size) == (100, 32)
    mean, deviation = np.array([0.5071, 0.4865, 0.4409]), np.array([0.2673, 0.2564, 0.2762])
    expected = (records[3, 2:].reshape(3, 32, 32) / 255 - mean[:, None, None]) / deviation[:, None, None]
    assert np.allclose(seen(data.train, 3).numpy(), expected, atol=1e-5)


def test_binary_cifar10_is_five_files(tmp_path: Path) -> None:
    for i, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        records = np.full((2, 3073), i, np.uint8)
        (tmp_path / f"{name}.bin").write_bytes(records.tobytes())
    data = build("cifar10", tmp_path, augment=False)
    assert labels(data.train) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert seen(data.train, 9)[0, 0, 0] == pytest.approx((4 / 255 - 0.4914) / 0.2470, abs=1e-4)


def test_the_data_set_travels_without_its_pixels(tmp_path: Path) -> None:
    write_cifar100(tmp_path / "data", images=6)
    train = build("cifar100", tmp_path / "data", augment=False).train
    before = items(train)
    copy = pickle.dumps(train)
    del train
    # closes its files, so that the copy has to open them itself, as in another process
    gc.collect()
    assert len(copy) < 3000
    assert torch.equal(items(pickle.loads(copy))[4][0], before[4][0])  # noqa: S301 # our own, made a few lines above


def test_the_pickled_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cifar-100-python").mkdir()
    with pytest.raises(InputError, match=r"pickled.*expected the binary version, cifar-100-binary/"):
        build("cifar100", tmp_path)


@pytest.mark.parametrize(
    ("size", "expected"), [(3073, "multiple of 3074 bytes, found 3073"), (0, "multiple of 3074 bytes, found 0")]
)
def test_an_incomplete_download_is_noticed(tmp_path: Path, size: int, expected: str) -> None:
    write_cifar100(tmp_path / "data")
    (tmp_path / "data" / "train.bin").write_bytes(bytes(size))
    with pytest.raises(InputError, match=expected):
        build("cifar100", tmp_path / "data")


def test_labels_out_of_range_are_noticed(tmp_path: Path) -> None:
    write_cifar100(tmp_path / "data", images=8)
    with pytest.raises(InputError, match="label 133; expected labels from 0 to 99"):
        build("cifar100", tmp_path / "data")


def test_a_file_that_shrinks_meanwhile_is_noticed(tmp_path: Path) -> None:
    write_cifar100(tmp_path / "data")
    train = build("cifar100", tmp_path / "data").train
    (tmp_path / "data" / "train.bin").write_bytes(bytes(3074))
    with pytest.raises(InputError, match=r"train\.bin: ends before image 2"):
        train[2]


def test_cifar_as_a_folder_tree_equals_its_files(tmp_path: Path) -> None:
    data_dir = write_both(tmp_path / "data", [f"{i:03}" for i in range(100)], images=1, edge=32)
    data = build("cifar100", data_dir, augment=False)
    assert labels(data.train) == list(range(100))
    pixels = np.asarray(Image.open(data_dir / "train" / "042" / "0.png"))
    green = (pixels[:, :, 1] / 255 - 0.4865) / 0.2564
    assert np.allclose(seen(data.train, 42)[1].numpy(), green, atol=1e-5)
    assert seen(build("cifar100", data_dir, image_size=64).train, 0).shape == (3, 64, 64)


# folder trees


def count_decoded(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    decoded: list[Path] = []

    def counting(path: Path) -> Image.Image:
        decoded.append(path)
        return open_rgb(path)

    monkeypatch.setattr(decoded_cache, "open_rgb", counting)
    return decoded


def test_small_trees_are_decoded_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = count_decoded(monkeypatch)
    data_dir = write_both(tmp_path / "data", ["a", "b"])
    first = items(build("imagefolder", data_dir, image_size=8).test)
    assert len(decoded) == 8
    again = items(build("imagefolder", data_dir, image_size=8).test)
    assert len(decoded) == 8
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
    assert cache.stat().st_mode & 0o777 == 0o700
    assert all(np.load(file, allow_pickle=False).dtype == np.uint8 for file in cache.glob("*.npy"))


def test_workers_that_start_together_decode_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = count_decoded(monkeypatch)
    data_dir = write_both(tmp_path / "data", [str(i) for i in range(20)])
    with ThreadPoolExecutor(4) as workers:
        found = list(workers.map(lambda _: labels(build("imagefolder", data_dir, image_size=8).test), range(4)))
    assert len(decoded) == 80
    assert found[1:] == found[:-1]


def test_a_changed_tree_is_decoded_anew(tmp_path: Path) -> None:
    data_dir = write_both(tmp_path / "data", ["a", "b"])
    before = build("imagefolder", data_dir, image_size=8).test[0][0]
    file = data_dir / "test" / "a" / "0.png"
    Image.fromarray(noise(99)).save(file)
    # the clock may be too coarse to show so quick a change
    os.utime(file, ns=(1, 1))
    assert not torch.equal(build("imagefolder", data_dir, image_size=8).test[0][0], before)


def test_an_image_that_is_gone_is_named(tmp_path: Path) -> None:
    data_dir = write_both(tmp_path / "data", ["a", "b"])
    (data_dir / "test" / "a" / "9.png").symlink_to(data_dir / "nowhere")
    with pytest.raises(InputError, match=r"9\.png.*cannot be read: No such file"):
        build("imagefolder", data_dir, image_size=8)


def test_what_a_killed_writer_has_left_is_removed_after_a_day(tmp_path: Path, cache: Path) -> None:
    data_dir = write_both(tmp_path / "data", ["a", "b"])
    build("imagefolder", data_dir, image_size=8)
    old, new = cache / ".writing-old", cache / ".writing-new"
    for left in (old, new):
        left.write_bytes(b"part")
    os.utime(old, (1, 1))
    for file in cache.glob("*.npy"):
        file.unlink()
    build("imagefolder", data_dir, image_size=8)
    assert (old.exists(), new.exists()) == (False, True)


def test_a_damaged_cache_is_not_used(tmp_path: Path, cache: Path) -> None:
    data_dir = write_both(tmp_path / "data", ["a", "b"])
    before = items(build("imagefolder", data_dir, image_size=8).test)
    for damage in (b"", b"nonsense", b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (4,)}"):
        for file in cache.glob("*.npy"):
            file.write_bytes(damage)
        after = items(build("imagefolder", data_dir, image_size=8).test)
        assert all(torch.equal(a[0], b[0]) for a, b in zip(before, after, strict=True))


def test_without_a_cache_folder_there_are_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_dir = write_both(tmp_path / "data", ["a", "b"])
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(items(build("imagefolder", data_dir, image_size=8).train)) == 4
    assert len(list((tmp_path / "temporary").glob("*/*.npy"))) == 2


def test_a_cache_folder_that_is_a_link_is_not_used(tmp_path: Path, cache: Path) -> None:
    data_dir = write_both(tmp_path / "data", ["a", "b"])
    (tmp_path / "elsewhere").mkdir()
    cache.parent.mkdir()
    cache.symlink_to(tmp_path / "elsewhere")
    build("imagefolder", data_dir, image_size=8)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_no_room_anywhere_is_one_clear_line(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_dir = write_both(tmp_path / "data", ["a", "b"])

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(decoded_cache, "_write_array", full)
    with pytest.raises(InputError, match=r"1 MB of decoded images.*No space left.*set XDG_CACHE_HOME"):
        build("imagefolder", data_dir, image_size=8)
    assert not [file for file in cache.iterdir() if file.suffix not in (".lock", ".listing")]


def test_large_images_are_decoded_when_read(tmp_path: Path, cache: Path) -> None:
    data_dir = write_both(tmp_path / "data", ["a", "b"], edge=90)
    data = build("imagefolder", data_dir, image_size=72)
    assert data.train[0][0].shape == (3, 72, 72)
    assert not torch.equal(data.train[0][0], data.train[0][0])
    assert torch.equal(data.test[0][0], data.test[0][0])
    assert not list(cache.glob("*.npy"))


def test_trees_too_large_to_be_kept_are_decoded_when_read(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoded_cache, "MAX_BYTES", 100)
    data = build("imagefolder", write_both(tmp_path / "data", ["a", "b"]), image_size=8)
    assert data.train[0][0].shape == (3, 8, 8)
    assert not list(cache.glob("*.npy"))


@pytest.mark.parametrize("size", [8, 96])
@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1"])
def test_images_of_every_mode_become_rgb(tmp_path: Path, mode: str, size: int) -> None:
    data_dir = write_both(tmp_path / "data", ["a", "b"], edge=size)
    kind = "jpg" if mode == "CMYK" else "png"
    for part in ("train", "test"):
        Image.new(mode, (size, size)).save(data_dir / part / "a" / f"0.{kind}")
    assert build("imagefolder", data_dir, image_size=size).test[0][0].shape == (3, size, size)


@pytest.mark.parametrize("size", [8, 96])
@pytest.mark.parametrize("mode", ["I;16", "F"])
def test_images_of_more_than_8_bits_are_refused(tmp_path: Path, mode: str, size: int) -> None:
    """With 8 bits, all but the darkest of their values would be white."""
    path = write_both(tmp_path / "data", ["a", "b"], edge=size) / "test" / "a" / "0.png"
    Image.new(mode, (size, size), 4000).save(path, "TIFF" if mode == "F" else "PNG")
    with pytest.raises(InputError, match=r"0\.png: has more than 8 bits a channel; convert"):
        items(build("imagefolder", path.parents[2], image_size=size).test)


@pytest.mark.parametrize("size", [8, 96])
def test_a_damaged_image_is_named(tmp_path: Path, size: int) -> None:
    data_dir = write_both(tmp_path / "data", ["a", "b"])
    (data_dir / "test" / "a" / "0.png").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"0\.png: cannot be decoded"):
        items(build("imagefolder", data_dir, image_size=size).test)


@pytest.mark.parametrize("size", [8, 96])
def test_postscript_under_the_name_of_an_image_is_refused(tmp_path: Path, size: int) -> None:
    path = write_both(tmp_path / "data", ["a", "b"], edge=size) / "test" / "a" / "0.png"
    Image.new("RGB", (size, size)).save(path, "EPS")
    with pytest.raises(InputError, match=r"0\.png: is a program in PostScript"):
        items(build("imagefolder", path.parents[2], image_size=size).test)


def test_oblong_images_lose_their_ends(tmp_path: Path) -> None:
    data_dir = write_both(tmp_path / "data", ["a"])
    stripes = np.zeros((8, 24, 3), np.uint8)
    stripes[:, 8:16] = 255
    Image.fromarray(stripes).save(data_dir / "test" / "a" / "0.png")
    image = seen(build("imagefolder", data_dir, image_size=8).test, 0)
    assert image[0].min() == pytest.approx((1 - 0.485) / 0.229, abs=1e-3)


def test_augmentation_can_be_turned_off(tmp_path: Path) -> None:
    data_dir = write_both(tmp_path / "data", ["a", "b"], edge=40)
    for size in (16, 80):
        train = build("imagefolder", data_dir, image_size=size, augment=False).train
        assert torch.equal(train[1][0], train[1][0])


def test_validation_may_be_called_val(tmp_path: Path) -> None:
    data_dir = write_both(tmp_path / "data", ["a", "b"], test="val")
    assert labels(build("imagefolder", data_dir, image_size=8).test) == [0, 0, 1, 1]


def test_other_files_do_not_count(tmp_path: Path) -> None:
    data_dir = write_both(tmp_path / "data", ["a", "b"])
    (data_dir / "train" / ".ipynb_checkpoints").mkdir()
    (data_dir / "train" / "README").write_text("")
    (data_dir / "train" / "a" / "notes.txt").write_text("")
    (data_dir / "train" / "a" / "._0.png").write_text("")
    assert labels(build("imagefolder", data_dir, image_size=8).train) == [0, 0, 1, 1]


def test_imagenet_is_train_and_val(tmp_path: Path) -> None:
    data_dir = write_both(tmp_path / "data", ["n1", "n2"], test="val")
    with pytest.raises(InputError, match=r'expected the 1000 class folders of imagenet, found 2.*"imagefolder"'):
        build("imagenet", data_dir, image_size=8)


@pytest.mark.parametrize(
    ("dataset", "folder", "background", "classes"),
    [
        ("caltech101", "101_ObjectCategories", "BACKGROUND_Google", 101),
        pytest.param("caltech256", "256_ObjectCategories", "257.clutter", 256, marks=pytest.mark.processes),
    ],
)
def test_caltech_is_split_by_class(tmp_path: Path, dataset: str, folder: str, background: str, classes: int) -> None:
    data_dir = tmp_path / "data"
    write_tree(data_dir / dataset / folder, [*(f"{i:03}.thing" for i in range(classes)), background], images=2)
    data = build(dataset, data_dir, image_size=8)
    assert data.classes == classes
    assert labels(build(dataset, data_dir / dataset, image_size=8).test) == list(range(classes))
    assert labels(data.train) == labels(data.test) == list(range(classes))
    assert not any(torch.equal(a[0], b[0]) for a, b in zip(items(data.train), items(data.test), strict=True))


def nothing(root: Path) -> None:
    root.mkdir()


def only_train(root: Path) -> None:
    write_tree(root / "train", ["a"])


def no_classes(root: Path) -> None:
    write_both(root, ["a"])
    (root / "train" / "a").rename(root / "a")


def empty_class(root: Path) -> None:
    write_both(root, ["a"])
    (root / "train" / "b").mkdir()


def other_classes(root: Path) -> None:
    write_tree(root / "train", ["a", "b", "c"])
    write_tree(root / "test", ["a", "x"])


@pytest.mark.parametrize(
    ("write", "dataset", "expected"),
    [
        (nothing, "imagefolder", "data: expected a folder train/ in it, found: nothing"),
        (nothing, "imagenet", "data: expected a folder train/ in it"),
        (nothing, "cifar10", "data: expected a folder train/ in it"),
        (nothing, "caltech101", "data: expected a folder 101_ObjectCategories/ in it"),
        (only_train, "imagefolder", "data: expected a folder test/ or val/ in it, found: train"),
        (only_train, "imagenet", "data: expected a folder val/ in it, found: train"),
        (no_classes, "imagefolder", "train: expected one folder for each class"),
        (empty_class, "imagefolder", r"train/b: expected images of this class \(.jpg, .*found none"),
        (
            other_classes,
            "imagefolder",
            "test: expected the 3 class folders of train/; missing: b, c; not in training: x",
        ),
    ],
)
def test_the_mistake_in_a_folder_is_named(
    tmp_path: Path, write: Callable[[Path], None], dataset: str, expected: str
) -> None:
    write(tmp_path / "data")
    with pytest.raises(InputError, match=expected) as raised:
        build(dataset, tmp_path / "data", image_size=8)
    assert raised.value.key == "workload.data_dir"
    assert "\n" not in str(raised.value)
