"""A model that fails on the job's second worker, in a process that cannot end at once.

`$LINGERS` names the reason: a "destructor" of a module's object, as NCCL's waits for peers, or a "thread".
"""

from __future__ import annotations

import os
import threading
import time

from torch import Tensor, nn

SECONDS = 600.0
ERRORS = {"MemoryError": MemoryError("of rank 1"), "KeyError": KeyError("of rank 1")}


class Lingerer:
    """An object whose destructor takes long."""

    def __del__(self) -> None:
        time.sleep(SECONDS)


LINGERER = Lingerer() if os.environ.get("LINGERS") == "destructor" else None


class Failing(nn.Module):
    """A linear classifier whose second worker raises `$RAISES` in its first training pass."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(64, classes)
        if os.environ["LINGERS"] == "thread":
            threading.Thread(target=time.sleep, args=(SECONDS,)).start()

    def forward(self, images: Tensor) -> Tensor:
        if self.training and os.environ["RANK"] == "1":
            raise ERRORS[os.environ["RAISES"]]
        output: Tensor = self.head(nn.functional.adaptive_avg_pool2d(images, 8).mean(1).flatten(1))
        return output


def build(classes: int, image_size: int) -> nn.Module:
    """Return a model for `model = "tests.examples.lingering:build"`."""
    return Failing(classes)
