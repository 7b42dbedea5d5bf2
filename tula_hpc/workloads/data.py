"""Data sets by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset, Subset, default_collate

from tula_hpc.catalog import DATASETS
from tula_hpc.config import WorkloadSpec
from tula_hpc.errors import InputError
from tula_hpc.nested import tensors_of
from tula_hpc.workloads import cifar
from tula_hpc.workloads.entry_points import is_entry_point, own_data
from tula_hpc.workloads.folder_images import IMAGENET_SCALING, folder_images
from tula_hpc.workloads.patterns import PatternSource
from tula_hpc.workloads.pixels import ArraySource, Indices, Jitter, PixelDataset, Scaling
from tula_hpc.workloads.splits import random_order, stratified_split
from tula_hpc.workloads.trees import ImageTree, check_same_classes, data_error, find_part, read_tree

_SYNTHETIC_SAMPLES = 2048
_SYNTHETIC_TEST_SAMPLES = 512


class Data(NamedTuple):
    """What a model is trained and tested on."""

    train: Dataset[Any]
    test: Dataset[Any]
    classes: int
    image_size: int


@runtime_checkable
class _Takes(Protocol):
    def take(self, indices: Indices) -> Dataset[Any]: ...


def build_data(spec: WorkloadSpec) -> Data:
    """Training and test set of the workload.

    Raises:
        InputError: The data folder is not as expected, or the user's function is not.
    """
    data = _own(spec) if is_entry_point(spec.dataset) else _BUILDERS[spec.dataset](spec, _image_size(spec))
    if spec.classes is not None:
        data = _first_classes(data, spec.classes)
    if spec.samples is not None and spec.dataset != "synthetic":
        data = data._replace(train=_first(data.train, spec.samples, spec.seed))
    return _hold_out(spec, data) if spec.holdout else data


def training_samples(spec: WorkloadSpec, most: int = 10_000) -> Dataset[Any]:
    """Those that a model is trained on, as they are, not augmented; a fixed random choice where there are more.

    The choice does not depend on the seed of the training.

    Args:
        spec: The data.
        most: At most so many.
    """
    train = build_data(spec.model_copy(update={"augment": False})).train
    return _some(train, random_order(_length(train), 0)[:most])


def _hold_out(spec: WorkloadSpec, data: Data) -> Data:
    """Some of the training samples in place of the test set, as they are; the same ones for every seed of a training.

    With `samples` the seed decides which samples there are; of these the same places are held out.
    """
    order = random_order(_length(data.train), 0)
    held = max(1, round(spec.holdout * len(order)))
    plain = build_data(spec.model_copy(update={"augment": False, "holdout": 0.0}))
    return data._replace(train=_some(data.train, order[held:]), test=_some(plain.train, order[:held]))


def _first_classes(data: Data, classes: int) -> Data:
    if classes > data.classes:
        raise InputError(f"{classes}, but the data set has {data.classes}", key="workload.classes")
    train, test = (_some(part, np.flatnonzero(_labels(part) < classes)) for part in (data.train, data.test))
    return data._replace(train=train, test=test, classes=classes)


def _labels(data: Dataset[Any]) -> Indices:
    labels = getattr(data, "labels", None)
    if labels is None:
        message = 'needs a data set with an attribute "labels", the class of each sample'
        raise InputError(message, key="workload.classes")
    return np.asarray(labels)


def _first(train: Dataset[Any], samples: int, seed: int) -> Dataset[Any]:
    available = _length(train)
    if samples > available:
        raise InputError(f"{samples}, but the training set has {available}", key="workload.samples")
    return _some(train, random_order(available, seed)[:samples])


def _some(data: Dataset[Any], chosen: Indices) -> Dataset[Any]:
    return data.take(chosen) if isinstance(data, _Takes) else Subset(data, chosen.tolist())


def _length(data: Dataset[Any]) -> int:
    return len(data)  # type: ignore[arg-type] # all of ours have a length, and the user's were checked


def _image_size(spec: WorkloadSpec) -> int:
    return spec.image_size or DATASETS[spec.dataset].image_size


def _own(spec: WorkloadSpec) -> Data:
    train, test, classes = own_data(spec)
    inputs, _ = default_collate([test[0]])
    first = next(tensors_of(inputs))  # of one sample: (1, …)
    return Data(train, test, classes, spec.image_size or first.shape[-1])


def _digits(spec: WorkloadSpec, image_size: int) -> Data:
    """8×8 grey images of handwritten digits (E. Alpaydin, C. Kaynak 1998), as scikit-learn ships them."""
    grey, labels = _read_digits()
    source = ArraySource(np.repeat(grey[:, None], 3, axis=1))
    every = PixelDataset(source, np.arange(len(labels)), labels, scaling=Scaling(white=16.0), image_size=image_size)
    split = stratified_split(labels)
    train = every.take(split.train)
    train.jitter = Jitter(1, flip=False) if spec.augment else None  # a mirrored digit is another sign
    return Data(train, every.take(split.test), 10, image_size)


@functools.cache  # it is text, and a profile asks for it at each configuration
def _read_digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images, (n, 8, 8), 0 to 16, and labels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return digits.images.astype(np.uint8), digits.target.astype(np.int64)


def _synthetic(spec: WorkloadSpec, image_size: int) -> Data:
    classes = DATASETS["synthetic"].classes or 10
    source = PatternSource(spec.seed, classes, image_size)
    count = spec.samples or _SYNTHETIC_SAMPLES
    positions = np.arange(count + _SYNTHETIC_TEST_SAMPLES)
    every = PixelDataset(source, positions, positions % classes, scaling=IMAGENET_SCALING, image_size=image_size)
    return Data(every.take(positions[:count]), every.take(positions[count:]), classes, image_size)


def _cifar(spec: WorkloadSpec, image_size: int) -> Data:
    facts, data_dir = cifar.CIFAR[spec.dataset], _data_dir(spec)
    folder = cifar.find_binary(facts, data_dir)
    if folder is None:
        cifar.refuse_pickled(facts, data_dir)
        return _split_tree(spec, image_size, ("test",), scaling=facts.scaling, stored_edge=cifar.EDGE)
    train = cifar.read_binary(facts, folder, facts.train, image_size=image_size)
    train.jitter = Jitter(cifar.EDGE // 8, flip=True) if spec.augment else None
    test = cifar.read_binary(facts, folder, facts.test, image_size=image_size)
    return Data(train, test, facts.classes, image_size)


def _imagenet(spec: WorkloadSpec, image_size: int) -> Data:
    return _split_tree(spec, image_size, ("val",))


def _imagefolder(spec: WorkloadSpec, image_size: int) -> Data:
    return _split_tree(spec, image_size, ("test", "val"))


def _split_tree(spec: WorkloadSpec, image_size: int, test_names: tuple[str, ...], **options: Any) -> Data:
    """A tree with a folder for training and one for testing."""
    data_dir = _data_dir(spec)
    train = read_tree(find_part(data_dir, "train"))
    test = read_tree(find_part(data_dir, *test_names))
    check_same_classes(train, test)
    return _from_trees(spec, image_size, train, test, **options)


def _caltech(spec: WorkloadSpec, image_size: int) -> Data:
    """Caltech-101 and Caltech-256 come without a split; their folder of background images is no class."""
    name, background = _CALTECH[spec.dataset]
    every = read_tree(_caltech_folder(_data_dir(spec), name), leave_out=[background])
    split = stratified_split(every.labels)
    return _from_trees(spec, image_size, every.take(split.train), every.take(split.test))


def _caltech_folder(data_dir: Path, name: str) -> Path:
    for folder in (data_dir, data_dir / name, *sorted(data_dir.glob(f"*/{name}"))):
        if folder.name == name and folder.is_dir():
            return folder
    return find_part(data_dir, name)


def _from_trees(spec: WorkloadSpec, image_size: int, train: ImageTree, test: ImageTree, **options: Any) -> Data:
    _check_class_count(spec, train)
    return Data(
        folder_images(train, image_size=image_size, augment=spec.augment, **options),
        folder_images(test, image_size=image_size, augment=False, **options),
        len(train.classes),
        image_size,
    )


def _check_class_count(spec: WorkloadSpec, tree: ImageTree) -> None:
    expected, found = DATASETS[spec.dataset].classes, len(tree.classes)
    if expected is not None and found != expected:
        message = f"expected the {expected} class folders of {spec.dataset}, found {found}"
        raise data_error(tree.root, f'{message}; for other trees use dataset = "imagefolder"')


def _data_dir(spec: WorkloadSpec) -> Path:
    assert spec.data_dir is not None, "the configuration checks this"  # noqa: S101 # an invariant, not input
    return spec.data_dir.expanduser()


_CALTECH = {
    "caltech101": ("101_ObjectCategories", "BACKGROUND_Google"),
    "caltech256": ("256_ObjectCategories", "257.clutter"),
}
_BUILDERS: dict[str, Callable[[WorkloadSpec, int], Data]] = {
    "digits": _digits,
    "synthetic": _synthetic,
    "cifar10": _cifar,
    "cifar100": _cifar,
    "caltech101": _caltech,
    "caltech256": _caltech,
    "imagenet": _imagenet,
    "imagefolder": _imagefolder,
}
