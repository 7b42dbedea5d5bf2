"""From an image file to pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from tula_hpc.errors import InputError
from tula_hpc.workloads.pixels import Bytes


def open_rgb(path: Path) -> Image.Image:
    """Decode a file; grey images, palettes and transparency become RGB.

    Raises:
        InputError: The file is no image, is damaged, or claims to be absurdly large.
    """
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, UnidentifiedImageError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(f"cannot be decoded: {error}", source=path) from None


def to_square(image: Image.Image, edge: int) -> Bytes:
    """Short edge resized to `edge`, centre cut out; (3, edge, edge)."""
    if image.size != (edge, edge):
        short = min(image.size)
        left, top = ((length - short) / 2 for length in image.size)
        box = (left, top, left + short, top + short)
        image = image.resize((edge, edge), Image.Resampling.BILINEAR, box=box)
    return np.asarray(image).transpose(2, 0, 1)
