"""Batches of several parts keep their structure, and every part is cut at the same samples."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate

from tula_hpc.batches import map_tensors, samples_in, split, take, tensors_of


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


def batch_of(samples: int) -> object:
    rows = torch.arange(samples)
    return {"words": rows[:, None].expand(-1, 3), "more": [rows, (rows, Pair(rows, rows))], "name": "x", "none": None}


def test_the_structure_stays() -> None:
    doubled = map_tensors(lambda tensor: 2 * tensor, batch_of(3))
    assert list(doubled) == ["words", "more", "name", "none"]
    assert (doubled["name"], doubled["none"]) == ("x", None)
    rows, (again, pair) = doubled["more"]
    assert isinstance(pair, Pair)
    assert all(part.tolist() == [0, 2, 4] for part in (rows, again, pair.left, pair.right))
    assert len(list(tensors_of(doubled))) == 5


def test_what_the_loader_makes_of_samples_is_a_batch() -> None:
    batch = default_collate([({"a": 1, "b": torch.ones(2)}, (2.0, [3])), ({"a": 2, "b": torch.zeros(2)}, (1.0, [4]))])
    assert samples_in(batch) == 2
    assert [tensor.shape[0] for tensor in tensors_of(batch)] == [2, 2, 2, 2]


@pytest.mark.parametrize("samples", [2, 3, 7, 8])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_parts_are_those_of_torch(samples: int, count: int) -> None:
    parts = split(batch_of(samples), count)
    for place, expected in enumerate(torch.arange(samples).tensor_split(count)):
        assert all(torch.equal(t if t.dim() == 1 else t[:, 0], expected) for t in tensors_of(parts[place]))


def test_parts_are_views() -> None:
    rows = torch.zeros(4)
    take([rows], 1, 3)[0].fill_(1.0)
    assert rows.tolist() == [0, 1, 1, 0]
