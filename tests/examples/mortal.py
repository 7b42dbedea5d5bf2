"""A model whose process is killed once, as by the kernel for its memory."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from torch import Tensor, nn

LOCAL_BATCH = 32


class Mortal(nn.Module):
    """A linear classifier; the first process that sees `LOCAL_BATCH` images makes the file `$VICTIM` and is killed."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(64, classes)

    def forward(self, images: Tensor) -> Tensor:
        victim = Path(os.environ["VICTIM"])
        if len(images) == LOCAL_BATCH and not victim.exists():
            victim.touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
        output: Tensor = self.head(nn.functional.adaptive_avg_pool2d(images, 8).mean(1).flatten(1))
        return output


def build(classes: int, image_size: int) -> nn.Module:
    """Return a model for `model = "tests.examples.mortal:build"`."""
    return Mortal(classes)
