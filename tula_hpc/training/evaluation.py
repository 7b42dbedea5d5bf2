"""Evaluation of a model on samples that all workers share."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tula_hpc.batches import Batch, samples_in, split
from tula_hpc.data.datasets import training_samples
from tula_hpc.data.loader import SMALLEST_TEST_BATCH, make_test_loader, most_batches
from tula_hpc.ddp.agreement import Agreement, until_stopped
from tula_hpc.ddp.stop_signals import StopRequest
from tula_hpc.process_memory import out_of_memory
from tula_hpc.training.metrics_writer import finite_or_none
from tula_hpc.training.progress import Training


class Evaluation(NamedTuple):
    """Loss and accuracies over a set of samples."""

    loss: float
    # None: there is no accuracy for targets of this kind
    accuracy: float | None
    top5_accuracy: float | None
    # seconds that it took
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """Loss or accuracy as an event shows it."""
        if self.accuracy is None:
            return f"test loss {self.loss:.4g}"
        return f"test accuracy {self.accuracy:.4f}"


NO_EVALUATION = Evaluation(0.0, 0.0, 0.0)


class Evaluator:
    """Evaluation by one worker of its share of the samples; every worker has one."""

    def __init__(self, training: Training, stop: StopRequest) -> None:
        self.training = training
        self.stop = stop
        self.local_batch = training.job.configuration.local_batch
        # the same on every worker
        self.batch = max(SMALLEST_TEST_BATCH, self.local_batch)
        # most samples of a forward pass: fewer once memory did not suffice for so many
        self.most = self.batch
        self.test_loader = self._loader(training.worker.workload.test)

    def test(self) -> Evaluation:
        """Evaluate the test set. Collective.

        Raises:
            EvaluationStopped: All workers agreed to stop.
        """
        # work that the device has in its queue by now belongs to the steps
        self.training.worker.synchronize_device()
        started = time.perf_counter()
        evaluation = self._evaluate(self.test_loader)
        return evaluation._replace(seconds=time.perf_counter() - started)

    def score_training_samples(self) -> Evaluation:
        """Evaluate a fixed choice of training samples without augmentation. Collective.

        Raises:
            EvaluationStopped: All workers agreed to stop.
        """
        return self._evaluate(self._loader(training_samples(self.training.job.sweep.workload)))

    def _loader(self, samples: Dataset[Any]) -> DataLoader[Any]:
        job, env = self.training.job, self.training.env
        return make_test_loader(
            samples,
            batch=self.batch,
            rank=env.rank,
            world_size=env.world_size,
            loader_workers=job.sweep.workload.loader_workers,
            pin_memory=self.training.worker.device.type == "cuda",
            classes=self.training.worker.labelled_classes,
        )

    def _evaluate(self, loader: DataLoader[Any]) -> Evaluation:
        worker = self.training.worker
        worker.share_buffers()
        sums = torch.zeros(4, dtype=torch.float64, device=worker.device)
        # a checkpoint that is due, or has failed, can wait for the end of the evaluation
        agreement = Agreement(worker, self.stop)
        most = most_batches(loader, self.training.env.world_size)
        with worker.evaluating():
            for inputs, targets in until_stopped(loader, most, agreement):
                sums += self._score(inputs, targets)
        loss, count, right, among_best = worker.total(*sums.tolist())
        return Evaluation(
            loss / count, finite_or_none(right / count), finite_or_none(among_best / count)
        )

    def _score(self, inputs: Batch, targets: Batch) -> Tensor:
        """Return `Worker.score` of a batch, in parts if memory does not suffice for all of it."""
        samples = samples_in(targets)
        if samples <= self.most:
            sums = self._score_at_once(inputs, targets)
            if sums is not None:
                return sums
            self.most = max(self.local_batch, samples // 2)
        first, second = split((inputs, targets), 2)
        return self._score(*first) + self._score(*second)

    def _score_at_once(self, inputs: Batch, targets: Batch) -> Tensor | None:
        """Return `Worker.score`; None if memory does not suffice, but may for fewer samples."""
        try:
            return self.training.worker.score(inputs, targets)
        except (RuntimeError, MemoryError) as error:
            # Training takes steps of this many samples, which need more memory: smaller parts would
            # not help.
            if samples_in(targets) <= self.local_batch or out_of_memory(error) is None:
                raise
        return None
