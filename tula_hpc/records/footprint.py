"""An estimate of memory, before any profile."""

from __future__ import annotations

import bisect
from typing import Literal

from pydantic import Field

from tula_hpc.records.record import Batch, Record


class Footprint(Record):
    """An estimate of one worker's memory from counting, before any step was run; bytes.

    `fixed_bytes + activation_bytes_per_sample × b` is what tensors hold at the peak of a step with local batch b, once
    b is so large that the peak lies in the backward pass. `peaks` is what the limit counts, at the powers of two.
    """

    schema_version: Literal[1] = 1
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int  # of one worker, its share under ZeRO
    activation_bytes_per_sample: int
    fixed_bytes: int
    host_baseline_bytes: int = 0  # CPU: the process with its libraries, before the model
    scaling_bytes: int = (
        0  # AGS: reference gradient and scale factors, on top of `peaks` once training has updated them
    )
    checkpoint_bytes: int = 0  # host memory of the copy that a checkpoint is written from, on the first node
    peaks: dict[Batch, int] = Field(min_length=1)  # by local batch
    limit_bytes: int | None = None  # of one worker, the margin taken off
    largest_local_batch: int | None = None  # of `peaks`, within the limit; None: no limit, 0: none fits
    world_size: int = 1  # workers that were assumed: the fewest of the search
    counted_at: tuple[int, ...] = ()  # local batches
    method: Literal["fake", "real"] = "fake"  # real: counted on small real batches, since the model needs values
    assumptions: tuple[str, ...] = ()
    seconds: float = 0.0

    def peak_bytes(self, local_batch: int) -> float:
        """The estimate at any local batch: straight lines between the powers of two and beyond the last two."""
        known = sorted(self.peaks)
        right = min(max(1, bisect.bisect_left(known, local_batch)), len(known) - 1)
        low, high = known[right - 1], known[right]
        slope = (self.peaks[high] - self.peaks[low]) / (high - low) if high > low else 0.0
        return max(float(self.peaks[known[0]]), self.peaks[low] + slope * (local_batch - low))
