"""Data sets of images as bytes, their augmentation, and the model's inputs made from them.

Bytes take a quarter of the room of floats: in the loader's queue, in pinned memory, and on the bus.
`loader` decides what turns them into floats: a GPU, which receives bytes, does so itself; for a CPU
the process that loads does.

Small images are stored decoded: a whole batch is read and augmented with plain array operations. A
transform per image costs some 100 µs, as much as a small network's step; here it is a few µs.
Random bits are a function of (seed, epoch, index): they depend neither on the order of calls nor on
the process.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from tula_hpc.batches import Batch
from tula_hpc.errors import InputError

Bytes = NDArray[np.uint8]
Indices = NDArray[np.int64]
Keys = NDArray[np.uint64]


def scramble(values: Keys) -> Keys:
    """Return 64 well mixed bits for each counter: SplitMix64's output function.

    Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, with their
    64-bit constants.
    """
    # NumPy's arrays overflow without a warning, and the function needs the overflow
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def mix(*parts: ArrayLike) -> Keys:
    """Return 64 bits for each combination of the parts, which are broadcast to at least (1,)."""
    mixed = np.zeros(1, np.uint64)
    for part in parts:
        mixed = scramble(mixed ^ np.atleast_1d(np.asarray(part)).astype(np.uint64))
    return mixed


def below(keys: Keys, limit: int, stream: int) -> NDArray[np.int64]:
    """Return an integer in [0, limit) for each key; streams are independent of each other."""
    return (mix(keys, stream) % np.uint64(limit)).astype(np.int64)


class PixelSource(Protocol):
    """Storage of decoded images."""

    def read(self, positions: Indices) -> Bytes:
        """Return the images at these positions, (n, 3, edge, edge)."""


class ArraySource(NamedTuple):
    """Images in memory, (n, 3, edge, edge)."""

    images: Bytes

    def read(self, positions: Indices) -> Bytes:
        """Return a copy of the images at these positions."""
        return self.images[positions]


class Jitter(NamedTuple):
    """Augmentation: a random crop after zero padding, and a mirror image half of the time."""

    # pixels on each side; the image moves by up to this much
    padding: int
    flip: bool

    def apply(self, images: Bytes, keys: Keys) -> Bytes:
        """Augment (n, 3, edge, edge); each image by its own key alone."""
        p, edge = self.padding, images.shape[-1]
        padded = np.pad(images, ((0, 0), (0, 0), (p, p), (p, p)))
        down = below(keys, 2 * p + 1, 0).tolist()
        right = below(keys, 2 * p + 1, 1).tolist()
        mirrored = below(keys, 2, 2).tolist() if self.flip else [0] * len(keys)
        result = np.empty_like(images)
        for i, (y, x, mirror) in enumerate(zip(down, right, mirrored, strict=True)):
            crop = padded[i, :, y : y + edge, x : x + edge]
            result[i] = crop[:, :, ::-1] if mirror else crop
        return result


class Scaling(NamedTuple):
    """Scaling of bytes to a model's floats: (byte / white − mean) / deviation, by channel."""

    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    deviation: tuple[float, float, float] = (1.0, 1.0, 1.0)
    white: float = 255.0
    # Whether floats are rounded after each of the three operations, as by torchvision's transforms;
    # otherwise the divisions are done beforehand.
    stepwise: bool = False

    def apply(self, images: Tensor) -> Tensor:
        """Scale bytes (n, 3, edge, edge) on their device to the same float32 bits everywhere."""
        subtracted, divisor_or_factor = _by_channel(self, images.device)
        floats = _room_for(images).copy_(images)
        if self.stepwise:
            return floats.mul_(1 / self.white).sub_(subtracted).div_(divisor_or_factor)
        return floats.mul_(divisor_or_factor).sub_(subtracted)


def _room_for(images: Tensor) -> Tensor:
    """Return memory for the images as floats; a loader process shares it with its owner."""
    if get_worker_info() is None:
        return torch.empty(images.shape, device=images.device)
    # torch's own collate function does the same; else the floats would be copied to shared memory
    size_bytes = 4 * images.numel()
    shared: Any = torch.UntypedStorage._new_shared(size_bytes)  # type: ignore[no-untyped-call]
    return torch.empty(0).set_(shared).view(images.shape)


# cached, since a GPU waits for each copy from the host
@functools.cache
def _by_channel(scaling: Scaling, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the subtrahend and the divisor (stepwise) or factor, (3, 1, 1)."""
    mean = torch.tensor(scaling.mean).view(3, 1, 1)
    deviation = torch.tensor(scaling.deviation).view(3, 1, 1)
    if scaling.stepwise:
        return mean.to(device), deviation.to(device)
    return (mean / deviation).to(device), (1 / (scaling.white * deviation)).to(device)


class Preprocessing(NamedTuple):
    """Conversion of images as bytes to a model's inputs."""

    scaling: Scaling
    # edge that the model wants, pixels; other images are resized (bilinear)
    image_size: int

    def apply(self, inputs: Batch) -> Batch:
        """Scale and resize bytes (n, 3, edge, edge) on their device; return other inputs as is."""
        if not isinstance(inputs, Tensor) or inputs.dtype != torch.uint8:
            return inputs
        with torch.autocast(inputs.device.type, enabled=False):
            floats = self.scaling.apply(inputs)
            if floats.shape[-1] == self.image_size:
                return floats
            size: Any = (self.image_size, self.image_size)
            return torch.nn.functional.interpolate(floats, size, mode="bilinear", antialias=True)


class ImageDataset(Dataset[tuple[Tensor, int]]):
    """Labelled images as bytes, (3, edge, edge), with their preprocessing."""

    preprocessing: Preprocessing

    def take(self, indices: Indices) -> ImageDataset:
        """Return the data set of these samples only."""
        raise NotImplementedError


def samples_of(dataset: Dataset[Any]) -> int:
    """Return the number of samples: ours have a length, and the user's were checked."""
    return len(dataset)  # type: ignore[arg-type] # torch declares none


def prepared(dataset: Dataset[Any], inputs: Batch) -> Batch:
    """Return a model's inputs for collated inputs; those of a user's own data set stay as is."""
    return dataset.preprocessing.apply(inputs) if isinstance(dataset, ImageDataset) else inputs


class PixelDataset(ImageDataset):
    """Small labelled images, stored decoded: position in the source and class of each, (n,)."""

    def __init__(
        self,
        source: PixelSource,
        positions: Indices,
        labels: Indices,
        *,
        scaling: Scaling,
        image_size: int,
        jitter: Jitter | None = None,
    ) -> None:
        self.source, self.positions, self.labels = source, positions, labels
        self.preprocessing, self.jitter = Preprocessing(scaling, image_size), jitter

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        """Return items, augmented by torch's default random numbers."""
        keys = np.zeros(len(indices), np.uint64)
        if self.jitter:
            keys = torch.randint(2**62, (len(indices),)).numpy().astype(np.uint64)
        return self.keyed_items(np.asarray(indices), keys)

    def keyed_items(self, indices: Indices, keys: Keys) -> list[tuple[Tensor, int]]:
        """Return items, augmented by these keys, (n,), and nothing else."""
        images = self.source.read(self.positions[indices])
        if self.jitter:
            images = self.jitter.apply(images, keys)
        labels = self.labels[indices].tolist()
        return list(zip(torch.from_numpy(images).unbind(0), labels, strict=True))

    def take(self, indices: Indices) -> PixelDataset:
        """Return the data set of these samples only."""
        taken = copy.copy(self)
        taken.positions = self.positions[indices]
        taken.labels = self.labels[indices]
        return taken


def open_rgb(path: Path) -> Image.Image:
    """Decode a file; grey images, palettes and transparency become RGB.

    Raises:
        InputError: The file is no image, is PostScript or damaged, claims to be absurdly large, or
            has more than 8 bits a channel.
    """
    try:
        with Image.open(path) as image:
            if image.format == "EPS":
                # decoding it would have Ghostscript run it
                raise InputError("is a program in PostScript; expected an image", source=path)
            if image.mode.startswith(("I", "F")):
                # brighter values than 255 would all become white
                raise InputError(
                    "has more than 8 bits a channel; convert the images to 8 bits first",
                    source=path,
                )
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(f"cannot be decoded: {error}", source=path) from None


def to_square(image: Image.Image, edge: int) -> Bytes:
    """Resize the short edge to `edge` and cut out the centre; (3, edge, edge)."""
    fitted = ImageOps.fit(image, (edge, edge), Image.Resampling.BILINEAR)
    return np.asarray(fitted).transpose(2, 0, 1)
