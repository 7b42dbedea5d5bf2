"""Data sets from folder trees of images: small ones decoded once, large ones at each read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from tula_hpc.data.image_cache import decoded, fits
from tula_hpc.data.image_tree import ImageTree
from tula_hpc.data.images import (
    ImageDataset,
    Indices,
    Jitter,
    PixelDataset,
    Preprocessing,
    Scaling,
    open_rgb,
)

if TYPE_CHECKING:
    from torchvision.transforms import v2

# mean and deviation of ImageNet's training images by channel (torchvision's documentation)
IMAGENET_SCALING = Scaling((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# pixels; larger images are decoded at each read
LARGEST_CACHED_EDGE = 64
# the short edge is resized to this multiple of the crop's (Krizhevsky et al. 2012)
_EVALUATION_RESIZE = 256 / 224


class DecodedOnRead(ImageDataset):
    """Images of a tree, decoded and transformed at each read.

    `transform` turns a PIL image into bytes, (3, edge, edge); its random parts draw from torch's
    random numbers.
    """

    def __init__(
        self, tree: ImageTree, transform: v2.Transform, preprocessing: Preprocessing
    ) -> None:
        self.tree, self.transform, self.preprocessing = tree, transform, preprocessing

    @property
    def labels(self) -> Indices:
        """Class of each sample, (n,)."""
        return self.tree.labels

    def __len__(self) -> int:
        return len(self.tree)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(open_rgb(self.tree.path(index))), int(self.tree.labels[index])

    def take(self, indices: Indices) -> DecodedOnRead:
        """Return the data set of these samples only."""
        return DecodedOnRead(self.tree.take(indices), self.transform, self.preprocessing)


def folder_images(
    tree: ImageTree,
    *,
    image_size: int,
    augment: bool,
    scaling: Scaling = IMAGENET_SCALING,
    stored_edge: int | None = None,
) -> Dataset[Any]:
    """Return a data set of a tree's images.

    Images of up to 64 pixels that take up to 2 GiB in all are decoded once: short edge resized,
    centre kept. Augmentation is a crop after padding by an eighth (4 pixels at 32, as in the CIFAR
    literature), and a flip. Others are decoded at each read: a random crop of 8 to 100 % of the area
    and a flip for training, the centre of a slightly larger image for evaluation (as for ImageNet).

    Images whose files have edges of `stored_edge` are resized to `image_size` after augmentation.
    """
    edge = stored_edge or image_size
    if edge > LARGEST_CACHED_EDGE or not fits(tree, edge):
        preprocessing = Preprocessing(scaling._replace(stepwise=True), image_size)
        return DecodedOnRead(tree, _transform(image_size, augment), preprocessing)
    jitter = Jitter(edge // 8, flip=True) if augment else None
    return PixelDataset(
        decoded(tree, edge),
        np.arange(len(tree)),
        tree.labels,
        scaling=scaling,
        image_size=image_size,
        jitter=jitter,
    )


def _transform(image_size: int, augment: bool) -> v2.Transform:
    from torchvision.transforms import v2

    if augment:
        crop: list[v2.Transform] = [v2.RandomResizedCrop(image_size), v2.RandomHorizontalFlip()]
    else:
        crop = [v2.Resize(math.ceil(image_size * _EVALUATION_RESIZE)), v2.CenterCrop(image_size)]
    return v2.Compose([*crop, v2.PILToTensor()])
