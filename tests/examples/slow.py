"""A model whose training takes as long as a test wants, without work for the processor."""

from __future__ import annotations

import os
import time
from pathlib import Path

from torch import Tensor, nn

from tula_hpc.workloads.small_cnns import compact_cnn

# environment variable: a file with the seconds of a training pass, which may change
PACE_FILE = "PACE_FILE"


# an evaluation pass, where it takes time, takes as long as this many training passes
EVALUATION_PACES = 10


class Slow(nn.Module):
    """A small network with dropout and BatchNorm that sleeps in every training pass, without effect on its numbers."""

    def __init__(self, classes: int, image_size: int, evaluation_paces: int = 0) -> None:
        super().__init__()
        self.evaluation_paces = evaluation_paces
        self.network, self.dropout = compact_cnn(classes, image_size), nn.Dropout(0.1)

    def forward(self, images: Tensor) -> Tensor:
        paces = 1 if self.training else self.evaluation_paces
        # empty for a moment while a test writes another pace
        time.sleep(paces * float(Path(os.environ[PACE_FILE]).read_text() or 0))
        output: Tensor = self.network(self.dropout(images))
        return output


def build(classes: int, image_size: int) -> nn.Module:
    """Return a model for `model = "tests.examples.slow:build"`."""
    return Slow(classes, image_size)


def build_slow_to_evaluate(classes: int, image_size: int) -> nn.Module:
    """Return a model that sleeps in evaluation passes, too."""
    return Slow(classes, image_size, EVALUATION_PACES)
