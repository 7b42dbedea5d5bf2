"""A histogram of the scale that was really applied, each element of a gradient counted once a step.

Bins are evenly spaced in log2: the middle one is centred on 1, and so are others on every power of √2, where factors
are clamped. The first and the last bin hold all that lies beyond (0 as well). Everything stays on the device until it
is read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BINS_PER_OCTAVE = 6
OCTAVES = 6  # on each side of 1
ONE = OCTAVES * BINS_PER_OCTAVE + 1  # the bin of factor 1; before it one for all factors that are too small
BINS = 2 * ONE + 1
PIECE_ELEMENTS = 2**22  # counted at a time: bounds the extra memory, and float32 counts so far exactly


class ScaleHistogram:
    """Counts applied factors over elements and steps."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None  # (BINS,), float64: exact up to 2^53
        self._unscaled = 0  # elements × steps without any factor
        self._sizes: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}

    def observe(
        self, factors: Sequence[Tensor | None], sizes: Sequence[int], gate: Tensor | float | None = None
    ) -> None:
        """Take in one step. Does not wait for the device.

        Args:
            factors: For each gradient one factor for all its elements or one for each; None stands for 1.
            sizes: Elements of each gradient.
            gate: How much of the factors counts: 1 + gate·(factor − 1) was applied. 0-dim; None: all of it.
        """
        shared: dict[torch.device, list[tuple[Tensor, int]]] = {}
        for factor, size in zip(factors, sizes, strict=True):
            if factor is None:
                self._unscaled += size
            elif factor.numel() == size:
                self._count_elements(factor.detach(), gate)
            else:
                shared.setdefault(factor.device, []).append((factor.detach(), size))
        for pairs in shared.values():
            self._count_shared([factor for factor, _ in pairs], tuple(size for _, size in pairs), gate)

    def read(self) -> list[int]:
        """Elements × steps in each of the `BINS` bins since the last reading. Waits for the device."""
        counts = [0.0] * BINS if self._counts is None else self._counts.tolist()
        counts[ONE] += self._unscaled
        self._counts, self._unscaled = None, 0
        return [round(count) for count in counts]

    def _count_elements(self, factors: Tensor, gate: Tensor | float | None) -> None:
        for piece in torch.split(factors.reshape(-1), PIECE_ELEMENTS):
            self._add(torch.histc(_bins(piece, gate), bins=BINS, min=-0.5, max=BINS - 0.5))

    def _count_shared(self, factors: Sequence[Tensor], sizes: tuple[int, ...], gate: Tensor | float | None) -> None:
        bins = _bins(torch.stack([factor.reshape(()).float() for factor in factors]), gate)
        key = (bins.device, sizes)
        if key not in self._sizes:  # copied to the device once: a copy waits for it
            self._sizes[key] = torch.tensor(sizes, dtype=torch.float64, device=bins.device)
        empty = torch.zeros(BINS, dtype=torch.float64, device=bins.device)
        self._add(empty.index_add_(0, bins.long(), self._sizes[key]))

    def _add(self, counts: Tensor) -> None:
        known = self._counts
        self._counts = counts.double() if known is None else known + counts.to(known.device, known.dtype)


def _bins(factors: Tensor, gate: Tensor | float | None) -> Tensor:
    """Each factor's bin as a float; not finite factors fall into the ends."""
    applied = factors.float()
    if gate is not None:
        weight = gate.to(applied.device, applied.dtype) if isinstance(gate, Tensor) else gate
        applied = 1 + weight * (applied - 1)
    places = (applied.abs().log2() * BINS_PER_OCTAVE).round() + ONE
    return places.nan_to_num(nan=BINS - 1.0).clamp_(0, BINS - 1)
