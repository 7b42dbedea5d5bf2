"""The loss's curvature in mid-training: the Hessian's largest eigenvalue on a batch that stays the same.

The batch depends on the seed alone, not on the workers or the batch that is trained with, so that curves of different
trainings can be compared. It is measured in full precision, and in the mode that the model is in: in training
BatchNorm sees each worker's part, as in a step.
"""

from __future__ import annotations

import math

import torch
from torch.utils.data import default_collate

from tula_hpc.memory_errors import out_of_memory
from tula_hpc.nested import Batch
from tula_hpc.optim import Curvature, LocalHessian, measure_curvature, start_vector
from tula_hpc.records import CurvatureMetrics
from tula_hpc.worker import Worker

SMALLEST_PART = 2  # samples of a worker: BatchNorm cannot train on one


def fixed_batch(worker: Worker, samples: int) -> tuple[Batch, Batch]:
    """This worker's part of so many training samples, always the same ones, augmented always in the same way.

    Args:
        worker: Data, seed and device.
        samples: Over all workers; a few fewer where they cannot be divided evenly.
    """
    part, rank = samples_of_a_worker(worker, samples), worker.env.rank
    generator = torch.Generator().manual_seed(worker.sweep.workload.seed)
    order = torch.randperm(worker.samples, generator=generator).tolist()
    own = order[rank * part : (rank + 1) * part]
    inputs, targets = default_collate([worker.loader.dataset[(0, index)] for index in own])
    return worker.to_device(inputs, targets)


def samples_of_a_worker(worker: Worker, samples: int) -> int:
    """The workers' equal parts of a batch, as far as there are samples."""
    world = worker.env.world_size
    return min(max(samples // world, SMALLEST_PART), worker.samples // world)


def probe_curvature(worker: Worker, samples: int) -> Curvature | None:
    """Measure at the worker's weights; training does not notice. Collective; the same result on every worker.

    Returns:
        None where a worker has too little memory for it, or the model an operator without a second derivative.
    """
    hessian = None
    try:
        hessian = _hessian(worker, samples)
    except (RuntimeError, MemoryError) as error:
        if out_of_memory(error) is None and not _lacks_second_derivative(error):
            raise
    (failed,) = worker.agree(float(hessian is None))  # whoever went on alone would wait for ever
    return None if failed or hessian is None else measure_curvature(hessian)


def _hessian(worker: Worker, samples: int) -> LocalHessian:
    """With one product on trial: it needs memory and derivatives as all that follow do."""
    inputs, targets = fixed_batch(worker, samples)
    model, loss = worker.model, worker.workload.criterion.loss
    hessian = LocalHessian(model, loss, inputs, targets, worker.parameters, seed=worker.sweep.workload.seed)
    hessian.product(start_vector(worker.parameters))
    return hessian


def _lacks_second_derivative(error: BaseException) -> bool:
    """In the words of torch, for its own operators and for functions that are once differentiable."""
    return any(words in str(error) for words in ("derivative for", "once_differentiable", "is not implemented"))


def curvature_line(worker: Worker, samples: int, *, epoch: int, step: int, samples_seen: int) -> CurvatureMetrics:
    """Measure, and the line of metrics.jsonl about it. Collective."""
    found = probe_curvature(worker, samples)
    size = samples_of_a_worker(worker, samples) * worker.env.world_size
    line = CurvatureMetrics(epoch=epoch, step=step, samples_seen=samples_seen, samples=size)
    numbers = {} if found is None else _numbers(found)
    return line.model_copy(update={name: value for name, value in numbers.items() if math.isfinite(value)})


def _numbers(found: Curvature) -> dict[str, float]:
    dominant = found.dominant
    return {
        "eigenvalue": dominant.value,
        "residual": dominant.residual,
        "iterations": dominant.iterations,
        "largest_eigenvalue": found.largest.value,
        "largest_residual": found.largest.residual,
        "gradient_norm": found.gradient_norm,
    }
