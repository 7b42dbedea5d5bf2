"""Data sets by name, their splits and subsets, and the synthetic data set.

Splits and subsets are the same in every run. A synthetic image is a smooth pattern of its class
under noise, made when it is read.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Subset, default_collate

from tula_hpc.batches import tensors_of
from tula_hpc.config import WorkloadSpec
from tula_hpc.config.workload import DATASETS
from tula_hpc.data import cifar
from tula_hpc.data.image_folders import IMAGENET_SCALING, folder_images
from tula_hpc.data.image_tree import (
    ImageTree,
    check_same_classes,
    data_error,
    find_subfolder,
    read_tree,
)
from tula_hpc.data.images import (
    ArraySource,
    Bytes,
    ImageDataset,
    Indices,
    Jitter,
    PixelDataset,
    Scaling,
    below,
    mix,
    samples_of,
)
from tula_hpc.errors import InputError
from tula_hpc.user_code import TRIED_BY_JOBS, describe_error, is_entry_point, own_data

_TEST_SHARE = 0.2
# one split for every sweep, so that results with different seeds are on the same test images
_SPLIT_SEED = 20_150_000
# cosines per channel and class, of at most two periods along an edge
_WAVES = 4
_GREY = 127.5
# amplitude of the pattern, on the scale of 0 to 255
_CONTRAST = 40.0
# standard deviation of each pixel's noise, likewise; the classes overlap but can be distinguished
_NOISE = 50.0
# values in the row from which each image takes its noise: fresh noise costs 100 times as much
_NOISE_VALUES = 2**20
_SYNTHETIC_SAMPLES = 2048
_SYNTHETIC_TEST_SAMPLES = 512
# folder of the archive, and its folder of background images, which is no class
_CALTECH = {
    "caltech101": ("101_ObjectCategories", "BACKGROUND_Google"),
    "caltech256": ("256_ObjectCategories", "257.clutter"),
}


def stratified_split(labels: Indices) -> tuple[Indices, Indices]:
    """Return training and test samples, ascending: a fifth of each class is for testing.

    At least one sample is, if the class has two.
    """
    random = np.random.default_rng(_SPLIT_SEED)
    is_test = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        wanted = max(1, round(_TEST_SHARE * len(members))) if len(members) > 1 else 0
        is_test[members[:wanted]] = True
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def random_order(samples: int, seed: int) -> Indices:
    """Return a fixed random order of a data set; a larger subset contains the smaller ones."""
    return np.random.default_rng((seed, samples)).permutation(samples)


class PatternSource:
    """Images that depend on (seed, position) alone; position p has class p mod `classes`."""

    def __init__(self, seed: int, classes: int, edge: int) -> None:
        self.seed, self.classes = seed, classes
        self._patterns = np.stack([_pattern(seed, label, edge) for label in range(classes)])
        noise = np.random.default_rng((seed, 1)).standard_normal(
            _NOISE_VALUES + 3 * edge * edge, np.float32
        )
        self._noise = (_NOISE * noise).astype(np.int16)

    def read(self, positions: Indices) -> Bytes:
        """Return the images at these positions, (n, 3, edge, edge)."""
        shape = self._patterns.shape[1:]
        starts = below(mix(self.seed, positions), _NOISE_VALUES, stream=0)
        images = np.empty((len(positions), *shape), np.uint8)
        noisy = np.empty(shape, np.int16)
        for image, label, start in zip(images, positions % self.classes, starts, strict=True):
            noise = self._noise[start : start + image.size].reshape(shape)
            np.add(self._patterns[label], noise, out=noisy)
            image[:] = noisy.clip(0, 255, out=noisy)
        return images


def _pattern(seed: int, label: int, edge: int) -> NDArray[np.int16]:
    """Return a sum of cosines around mid-grey, (3, edge, edge)."""
    random = np.random.default_rng((seed, 0, label))
    frequency = random.uniform(-2, 2, (3, _WAVES, 2, 1, 1))
    phase = random.uniform(0, 2 * np.pi, (3, _WAVES, 1, 1))
    y, x = np.mgrid[0 : 1 : 1j * edge, 0 : 1 : 1j * edge]
    waves = np.cos(2 * np.pi * (frequency[:, :, 0] * y + frequency[:, :, 1] * x) + phase)
    pattern: NDArray[np.float64] = _GREY + _CONTRAST / np.sqrt(_WAVES) * waves.sum(axis=1)
    return pattern.astype(np.int16)


class Data(NamedTuple):
    """Training set and test set of a model."""

    train: Dataset[Any]
    test: Dataset[Any]
    classes: int
    image_size: int


def build_data(spec: WorkloadSpec, tried: int = TRIED_BY_JOBS) -> Data:
    """Return training and test set of the workload.

    Raises:
        InputError: The data folder, or the user's function, is not as expected.
    """
    if is_entry_point(spec.dataset):
        data = _own(spec, tried)
    else:
        size = spec.image_size or DATASETS[spec.dataset].image_size
        data = _BUILDERS[spec.dataset](spec, size)
    if spec.classes is not None:
        data = _first_classes(data, spec.classes)
    if spec.samples is not None and spec.dataset != "synthetic":
        data = data._replace(train=_subset(data.train, "training", spec.samples, spec.seed))
    if spec.test_samples is not None and spec.dataset != "synthetic" and not spec.holdout:
        # the same samples for every seed, so that results can be compared
        data = data._replace(test=_subset(data.test, "test", spec.test_samples, 0))
    if spec.holdout:
        return _hold_out(spec, data)
    return data


def training_samples(spec: WorkloadSpec, most: int = 10_000) -> Dataset[Any]:
    """Return at most `most` training samples, not augmented.

    From a larger training set they are a random choice, independent of the training's seed.
    """
    train = build_data(spec.model_copy(update={"augment": False})).train
    return _take(train, random_order(samples_of(train), 0)[:most])


def _hold_out(spec: WorkloadSpec, data: Data) -> Data:
    """Replace the test set by some training samples, not augmented.

    They are the same samples for every seed of a training. With `workload.samples` the seed decides
    which samples there are, and the same positions among them are held out.
    """
    order = random_order(samples_of(data.train), 0)
    held = max(1, round(spec.holdout * len(order)))
    plain = build_data(spec.model_copy(update={"augment": False, "holdout": 0.0}))
    return data._replace(
        train=_take(data.train, order[held:]), test=_take(plain.train, order[:held])
    )


def _first_classes(data: Data, classes: int) -> Data:
    if classes > data.classes:
        raise InputError(f"{classes}, but the data set has {data.classes}", key="workload.classes")
    return data._replace(
        train=_take(data.train, np.flatnonzero(_labels(data.train) < classes)),
        test=_take(data.test, np.flatnonzero(_labels(data.test) < classes)),
        classes=classes,
    )


def _labels(data: Dataset[Any]) -> Indices:
    labels = getattr(data, "labels", None)
    if labels is None:
        message = 'needs a data set with an attribute "labels", the class of each sample'
        raise InputError(message, key="workload.classes")
    return np.asarray(labels)


def _subset(data: Dataset[Any], which: str, samples: int, seed: int) -> Dataset[Any]:
    available = samples_of(data)
    if samples > available:
        key = "workload.samples" if which == "training" else "workload.test_samples"
        raise InputError(f"{samples}, but the {which} set has {available}", key=key)
    return _take(data, random_order(available, seed)[:samples])


def _take(data: Dataset[Any], chosen: Indices) -> Dataset[Any]:
    return data.take(chosen) if isinstance(data, ImageDataset) else Subset(data, chosen.tolist())


def _own(spec: WorkloadSpec, tried: int) -> Data:
    train, test, classes = own_data(spec, tried)
    if spec.loader_workers:
        _refuse_unsendable(spec, "train", train)
        _refuse_unsendable(spec, "test", test)
    inputs, _ = default_collate([test[0]])
    # a tensor of one sample: (1, …)
    first = next(tensors_of(inputs))
    return Data(train, test, classes, spec.image_size or first.shape[-1])


class _Sending(pickle.Pickler):
    """Pickler that discards the bytes; it skips tensors and arrays, which can always be sent."""

    def __init__(self) -> None:
        super().__init__(_Nowhere())

    def reducer_override(self, part: Any) -> Any:
        return (int, ()) if isinstance(part, Tensor | np.ndarray) else NotImplemented


class _Nowhere:
    def write(self, piece: Any) -> int:
        return len(piece)


def _refuse_unsendable(spec: WorkloadSpec, which: str, dataset: Dataset[Any]) -> None:
    """Refuse a set that cannot be pickled for loader processes, which start without a fork."""
    error = _why_unsendable(dataset)
    if error is None:
        return
    # a list, say, has no __dict__
    attributes = getattr(dataset, "__dict__", {})
    found = (name for name, value in attributes.items() if _why_unsendable(value) is not None)
    where = "".join(f"its attribute {name}, " for name in itertools.islice(found, 1))
    message = (
        f"{spec.dataset} returned a {which} set that cannot be sent to loader processes: {where}"
        f"{describe_error(error)}; create that in __getitem__, or at the top of the module, or set "
        "workload.loader_workers = 0"
    )
    raise InputError(message, key="workload.dataset")


def _why_unsendable(sent: Any) -> Exception | None:
    try:
        _Sending().dump(sent)
    # pickling calls the classes' own code, which may raise anything
    except Exception as error:  # noqa: BLE001
        return error
    return None


def _digits(spec: WorkloadSpec, image_size: int) -> Data:
    """Return scikit-learn's 8×8 handwritten digits (E. Alpaydin, C. Kaynak 1998)."""
    grey, labels = _read_digits()
    source = ArraySource(np.repeat(grey[:, None], 3, axis=1))
    every = PixelDataset(
        source, np.arange(len(labels)), labels, scaling=Scaling(white=16.0), image_size=image_size
    )
    for_training, for_testing = stratified_split(labels)
    train = every.take(for_training)
    # no flip, since a mirrored digit is another sign
    train.jitter = Jitter(1, flip=False) if spec.augment else None
    return Data(train, every.take(for_testing), 10, image_size)


# cached, since the file is text, and a profile reads it for each configuration
@functools.cache
def _read_digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return images, (n, 8, 8), 0 to 16, and labels.

    Both are in a file of scikit-learn, whose import would take a second.
    """
    package = importlib.metadata.distribution("scikit-learn")
    file = str(package.locate_file("sklearn/datasets/data/digits.csv.gz"))
    table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)


def _synthetic(spec: WorkloadSpec, image_size: int) -> Data:
    classes = DATASETS["synthetic"].classes or 10
    source = PatternSource(spec.seed, classes, image_size)
    count = spec.samples or _SYNTHETIC_SAMPLES
    positions = np.arange(count + (spec.test_samples or _SYNTHETIC_TEST_SAMPLES))
    every = PixelDataset(
        source, positions, positions % classes, scaling=IMAGENET_SCALING, image_size=image_size
    )
    return Data(every.take(positions[:count]), every.take(positions[count:]), classes, image_size)


def _cifar(spec: WorkloadSpec, image_size: int) -> Data:
    facts = cifar.CIFAR[spec.dataset]
    data_dir = _data_dir(spec)
    folder = cifar.find_binary(facts, data_dir)
    if folder is None:
        cifar.refuse_pickled(facts, data_dir)
        options = {"scaling": facts.scaling, "stored_edge": cifar.EDGE}
        return _split_tree(spec, image_size, test_names=("test",), **options)
    train = cifar.read_binary(facts, folder, facts.train, image_size=image_size)
    train.jitter = Jitter(cifar.EDGE // 8, flip=True) if spec.augment else None
    test = cifar.read_binary(facts, folder, facts.test, image_size=image_size)
    return Data(train, test, facts.classes, image_size)


def _split_tree(
    spec: WorkloadSpec, image_size: int, *, test_names: tuple[str, ...], **options: Any
) -> Data:
    """Return the data of a tree with one folder for training and another for testing."""
    data_dir = _data_dir(spec)
    train = read_tree(find_subfolder(data_dir, "train"))
    test = read_tree(find_subfolder(data_dir, *test_names))
    check_same_classes(train, test)
    return _from_trees(spec, image_size, train, test, **options)


def _caltech(spec: WorkloadSpec, image_size: int) -> Data:
    """Return Caltech-101 or Caltech-256, which come without a split."""
    name, background = _CALTECH[spec.dataset]
    every = read_tree(_caltech_folder(_data_dir(spec), name), leave_out=[background])
    train, test = map(every.take, stratified_split(every.labels))
    return _from_trees(spec, image_size, train, test)


def _caltech_folder(data_dir: Path, name: str) -> Path:
    for folder in (data_dir, data_dir / name, *sorted(data_dir.glob(f"*/{name}"))):
        if folder.name == name and folder.is_dir():
            return folder
    return find_subfolder(data_dir, name)


def _from_trees(
    spec: WorkloadSpec, image_size: int, train: ImageTree, test: ImageTree, **options: Any
) -> Data:
    expected = DATASETS[spec.dataset].classes
    found = len(train.classes)
    if expected is not None and found != expected:
        message = f"expected the {expected} class folders of {spec.dataset}, found {found}"
        raise data_error(train.root, f'{message}; for other trees use dataset = "imagefolder"')
    return Data(
        folder_images(train, image_size=image_size, augment=spec.augment, **options),
        folder_images(test, image_size=image_size, augment=False, **options),
        found,
        image_size,
    )


def _data_dir(spec: WorkloadSpec) -> Path:
    assert spec.data_dir is not None, "the configuration checks this"  # noqa: S101 # an invariant
    return spec.data_dir.expanduser()


_BUILDERS: dict[str, Callable[[WorkloadSpec, int], Data]] = {
    "digits": _digits,
    "synthetic": _synthetic,
    "cifar10": _cifar,
    "cifar100": _cifar,
    "caltech101": _caltech,
    "caltech256": _caltech,
    "imagenet": functools.partial(_split_tree, test_names=("val",)),
    "imagefolder": functools.partial(_split_tree, test_names=("test", "val")),
}
