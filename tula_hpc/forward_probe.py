"""How long a forward pass of the evaluation takes, timed at profiling.

A pass is what training does with a batch of test samples once it is loaded: `Worker.score`. The batch is the training
batch that is at hand, of the configuration's local batch: nothing else has to be loaded, and where a training step fits
a pass without gradients does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tula_hpc.memory_errors import out_of_memory
from tula_hpc.nested import Batch, map_tensors
from tula_hpc.timing import round_s
from tula_hpc.worker import Worker

PASSES = 3  # each takes about a quarter of a training step; the median sheds a first one that has something to set up


def time_forward(worker: Worker, inputs: Batch, targets: Batch) -> list[float]:
    """Seconds of each pass; none where memory does not suffice. Not collective.

    Weights, buffers, modes and random numbers are afterwards what they were.

    Args:
        worker: Whose model to use.
        inputs: A batch on the device.
        targets: Its targets.
    """
    gpus = [worker.device.index or 0] if worker.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(gpus), worker.evaluating():
            # The way to the device, and into the model's memory format, is part of a pass.
            batch = worker.as_loaded(inputs, targets)
            if gpus:
                batch = map_tensors(Tensor.pin_memory, batch)
            return [round_s(worker, lambda: worker.score(*batch)) for _ in range(PASSES)]
    except (RuntimeError, MemoryError) as error:
        if out_of_memory(error) is None:
            raise
    return []
