"""A model that some workers use only in part."""

from __future__ import annotations

from torch import Tensor, nn


class Branches(nn.Module):
    """A model that uses its second branch only for inputs whose first element is positive, and its third never."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.always(x)
        return out + self.sometimes(x) if x[0, 0] > 0 else out
