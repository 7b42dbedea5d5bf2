"""A model whose profile writes a record of 40 kB and more, because very many libraries seem to be in use."""

from __future__ import annotations

import pytest
from torch import nn

from tula_hpc.profiling import record as profiler
from tula_hpc.workloads.small_cnns import compact_cnn

LIBRARIES = 500


def build(classes: int, image_size: int) -> nn.Module:
    """Return a model for `model = "tests.examples.wordy:build"`."""
    versions = {f"library {number}": "1.0" * 25 for number in range(LIBRARIES)}
    # the change lasts for the life of this process
    pytest.MonkeyPatch().setattr(profiler, "describe_versions", lambda: versions)
    return compact_cnn(classes, image_size)
