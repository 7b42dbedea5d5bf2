"""Workloads other than image classification: inputs and targets of several parts, and losses of the user's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from tula_hpc.config import WorkloadSpec

# kind of the inputs, which a test may replace
KIND: Any = dict


class Points(Dataset[tuple[dict[str, Any], tuple[Tensor, float]]]):
    """Places on a plane with a group, and as targets a vector and a number that follow from them.

    Args:
        samples: Number of places.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[dict[str, Any], tuple[Tensor, float]]:
        place = torch.tensor([index % 16, index // 16]) / 16 - 0.5
        return KIND({"place": place, "group": index % 4}), (place.flip(0), float(index % 4))


def points(spec: WorkloadSpec) -> tuple[Points, Points, int]:
    """Return data for `dataset`."""
    return Points(256), Points(65), 4


class Regression(nn.Module):
    """A model of a vector and a number for each place and group; with dropout, so that random numbers matter."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups, self.hidden, self.out = nn.Embedding(groups, 8), nn.Linear(2, 8), nn.Linear(8, 3)
        self.dropout = nn.Dropout(0.1)

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        hidden = self.dropout(torch.tanh(self.hidden(inputs["place"]) + self.groups(inputs["group"])))
        found = self.out(hidden)
        return {"vector": found[:, :2], "number": found[:, 2]}


def regression(classes: int, image_size: int) -> nn.Module:
    """Return a model for `model`."""
    return Regression(classes)


def with_unused(classes: int, image_size: int) -> nn.Module:
    """Return the same model with a layer that is not used."""
    model = Regression(classes)
    model.spare = nn.Linear(2, 2)
    return model


def squared_error(outputs: dict[str, Tensor], targets: list[Tensor]) -> Tensor:
    """Return a loss for `loss`."""
    vector, number = targets
    return (outputs["vector"] - vector).square().sum(1) + (outputs["number"] - number).square().float()


def near(outputs: dict[str, Tensor], targets: list[Tensor]) -> Tensor:
    """Return for `metric` whether the number is nearly right."""
    return ((outputs["number"] - targets[1]).abs() < 0.5).float()


def smoothed(scores: Tensor, labels: Tensor) -> Tensor:
    """Return a loss of a classification for `loss`."""
    return cross_entropy(scores, labels, reduction="none", label_smoothing=0.1)
