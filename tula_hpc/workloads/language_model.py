"""A small language model: data, model, loss and metric, written as a user's own (`user_code`).

It predicts the next character of Python programs, those of the standard library:
`sweeps/language_model.toml`.
"""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from tula_hpc.config import WorkloadSpec

# ASCII; other bytes count as 0
CHARACTERS = 128
# characters of a sample
LENGTH = 64
WIDTH, HEADS, LAYERS = 128, 4, 2
TEST_SAMPLES = 1000


class Texts(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text of `length` characters; the targets are the same text, one place later."""

    def __init__(self, text: NDArray[np.uint8], length: int) -> None:
        pieces = (len(text) - 1) // length
        self.inputs = torch.from_numpy(text[: pieces * length].reshape(pieces, length))
        self.targets = torch.from_numpy(text[1 : pieces * length + 1].reshape(pieces, length))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index].long(), self.targets[index].long()


def programs(spec: WorkloadSpec) -> tuple[Texts, Texts, int]:
    """Return training set, test set (from the last modules by name), and number of characters."""
    text = _standard_library()
    length = spec.image_size or LENGTH
    held_out = TEST_SAMPLES * length + 1
    return Texts(text[:-held_out], length), Texts(text[-held_out:], length), CHARACTERS


@functools.cache
def _standard_library() -> NDArray[np.uint8]:
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(path.read_bytes() for path in paths), np.uint8)
    return np.where(text < CHARACTERS, text, 0).astype(np.uint8)


class Transformer(nn.Module):
    """Scores for the next character at each place, from the characters up to there."""

    def __init__(self, characters: int, length: int) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(characters, WIDTH), nn.Embedding(length, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False
        )
        self.scores = nn.Linear(WIDTH, characters)

    def forward(self, characters: Tensor) -> Tensor:
        """Return scores (batch, length, characters) for characters (batch, length)."""
        length = characters.shape[1]
        hidden = self.embedding(characters) + self.places.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=characters.device)
        scores: Tensor = self.scores(self.layers(hidden, mask=mask, is_causal=True))
        return scores


def transformer(classes: int, image_size: int) -> nn.Module:
    """Build the model, for `workload.model`."""
    return Transformer(classes, image_size)


def next_character_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Return each sample's cross-entropy, the mean over its places; for `workload.loss`."""
    return cross_entropy(scores.movedim(-1, 1), targets, reduction="none").mean(1)


def next_character_right(scores: Tensor, targets: Tensor) -> Tensor:
    """Return each sample's share of correctly predicted characters; for `workload.metric`."""
    return (scores.argmax(-1) == targets).float().mean(1)
