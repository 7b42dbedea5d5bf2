"""Probes of a profile: the gradient's noise scale, and the time of an evaluation's forward pass.

The noise scale compares gradients of parts of a batch with their mean. Parts are the workers' local
batches or, for a single worker, pieces of its own. With k parts of b samples,
`gradients.noise_scale` gives |G|² and tr(Σ) for each pass. Layers that look at a whole batch, such
as BatchNorm, see parts throughout, so that both gradients are of one function.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tula_hpc.batches import Batch, map_tensors, samples_in, take
from tula_hpc.data.loader import SMALLEST_TEST_BATCH
from tula_hpc.ddp.agreement import if_memory_suffices
from tula_hpc.ddp.worker import Worker
from tula_hpc.gradients.noise_scale import gradient_square, noise_scale, noise_trace
from tula_hpc.gradients.reference_gradient import flatten
from tula_hpc.process_memory import out_of_memory
from tula_hpc.profiling.meters import Metered
from tula_hpc.profiling.timing import round_s

# passes for the noise scale; each costs about as much as a training step
PASSES = 4
# most pieces of a single worker's batch
PIECES = 4
# samples; in smaller pieces BatchNorm's statistics are mostly noise of their own
SMALLEST_PIECE = 8

Batches = Iterator[tuple[Batch, Batch]]


class NoiseEstimate(NamedTuple):
    """Noise scale over a few passes."""

    # samples; 0 where noise hides the gradient or memory did not suffice
    noise_scale: float = 0.0
    samples: int = 0
    # |G|² and tr(Σ) of each pass
    terms: tuple[tuple[float, float], ...] = ()


def probe_noise(worker: Worker, batches: Batches) -> NoiseEstimate:
    """Return the noise scale at the worker's weights, the same on every worker. Collective.

    Model and `.grad` stay as they are. Without memory for a second gradient the scale is unknown.
    """
    world, batch = worker.env.world_size, worker.configuration.local_batch
    pieces = 1 if world > 1 else min(PIECES, max(2, batch // SMALLEST_PIECE))
    piece = batch // pieces
    # BatchNorm cannot train on one sample
    if piece < 2:
        return NoiseEstimate()
    norms: list[tuple[float, float]] = []
    for _ in range(PASSES):
        found = _norms(worker, *next(batches), pieces, piece)
        if found is None:
            return NoiseEstimate()
        norms.append(found)
    return estimate_from(norms, piece, piece * pieces * world)


def estimate_from(norms: Sequence[tuple[float, float]], part: int, whole: int) -> NoiseEstimate:
    """Return the estimate from the `shared_norms` of passes over `whole` samples in equal parts."""
    terms = [
        (gradient_square(*each, part, whole), noise_trace(*each, part, whole)) for each in norms
    ]
    if not all(map(math.isfinite, chain.from_iterable(terms))):
        return NoiseEstimate()
    square, trace = map(sum, zip(*terms, strict=True))
    scale = noise_scale(square, trace)
    return NoiseEstimate(0.0 if math.isnan(scale) else scale, whole * len(norms), tuple(terms))


def shared_norms(
    worker: Metered, gradient: Tensor, squares: float, parts: int
) -> tuple[float, float]:
    """Return mean |g|² and |mean g|² over the parts of all workers. Collective.

    `gradient` is the sum of the gradients of this worker's parts, and becomes that of all workers;
    `squares` is the sum of their squared norms.
    """
    if worker.env.world_size > 1:
        dist.all_reduce(gradient)
    parts *= worker.env.world_size
    (total,) = worker.total(squares)
    return total / parts, squared_length(gradient / parts)


def _norms(
    worker: Worker, inputs: Batch, targets: Batch, pieces: int, piece: int
) -> tuple[float, float] | None:
    """Return the parts' mean |g|² and |mean g|²; None if any worker ran out of memory."""
    mine = if_memory_suffices(worker, lambda: _sums(worker, inputs, targets, pieces, piece))
    return None if mine is None else shared_norms(worker, *mine, pieces)


def _sums(
    worker: Worker, inputs: Batch, targets: Batch, pieces: int, piece: int
) -> tuple[Tensor, float]:
    """Return the sum of this worker's gradients, as one vector, and that of their squared norms."""
    parts = (
        take((inputs, targets), start, start + piece) for start in range(0, pieces * piece, piece)
    )
    gradients = (flatten(worker.local_gradient(*part), worker.parameters) for part in parts)
    total = next(gradients)
    squares = squared_length(total)
    for gradient in gradients:
        squares += squared_length(gradient)
        total += gradient
    return total, squares


def squared_length(vector: Tensor) -> float:
    """Return |vector|², summed in double precision."""
    parts = torch.view_as_real(vector) if vector.is_complex() else vector
    return float(parts.square().sum(dtype=torch.float64))


# each takes about a quarter of a training step; the median ignores a first pass with set-up
FORWARD_PASSES = 3


def time_forward(worker: Worker, inputs: Batch, targets: Batch) -> list[float]:
    """Return the seconds of some passes; none if memory does not suffice. Not collective.

    A pass is an evaluation's work on a loaded batch, `Worker.score`. It takes a training batch:
    nothing else has to be loaded, and where a training step fits, a pass without gradients does. A
    batch below `SMALLEST_TEST_BATCH` is repeated until it reaches that, and its share of the time
    counts: small batches pay a cost for each call that an evaluation does not. Weights, buffers,
    modes and random numbers stay as they are.
    """
    gpus = [worker.device.index or 0] if worker.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(gpus), worker.evaluating():
            # moving the batch to the device, in the model's memory format, is part of a pass
            batch = worker.as_loaded(inputs, targets)
            copies = -(-SMALLEST_TEST_BATCH // samples_in(targets))
            if copies > 1:
                batch = map_tensors(lambda tensor: torch.cat([tensor] * copies), batch)
            if gpus:
                batch = map_tensors(Tensor.pin_memory, batch)
            forward = partial(worker.score, *batch)
            return [round_s(worker, forward) / copies for _ in range(FORWARD_PASSES)]
    except (RuntimeError, MemoryError) as error:
        if out_of_memory(error) is None:
            raise
    return []
