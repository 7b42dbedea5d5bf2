"""Run one process of a DDP job: its model, data, optimizer and step, in profiles and trainings."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from tula_hpc import process_memory
from tula_hpc.batches import Batch, map_tensors, samples_in, take
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.data.images import ImageDataset, prepared
from tula_hpc.data.loader import StreamCopies, make_train_loader, one_ahead
from tula_hpc.ddp.methods import ReferenceBatch, build_stepper
from tula_hpc.ddp.norms_per_step import small_norms
from tula_hpc.ddp.process_group import check_kernels, check_precision, choose_kernels, pick_device
from tula_hpc.env import WorkerEnvironment
from tula_hpc.gradients.reference_gradient import local_gradient, reference_gradient
from tula_hpc.records import Configuration
from tula_hpc.user_code import seed_random_numbers
from tula_hpc.workloads.optimizers import consolidate
from tula_hpc.workloads.workload import autocast_on, build_workload, refuse_unused

# Smallest normal number of float16. GradScaler halves the loss scale at each overflow; below this
# scale ordinary losses lose their digits, so that no smaller one helps.
LEAST_LOSS_SCALE = 2.0**-14


class Worker:
    """One process of a data-parallel job; `env` is its place among the others."""

    def __init__(
        self,
        sweep: SweepSpec,
        cluster: ClusterSpec,
        configuration: Configuration,
        env: WorkerEnvironment,
    ) -> None:
        self.sweep, self.configuration, self.env = sweep, configuration, env
        self.device = pick_device(cluster, env.local_rank)
        if self.device.type == "cpu":
            process_memory.keep_freed()
        else:
            check_kernels(self.device)
            check_precision(self.device, sweep.workload.precision)
            choose_kernels(sweep.workload)
        self.workload = workload = build_workload(sweep.workload, self.device)
        self.model = self._move_to_device(workload.model)
        self.parallel = self._wrap(self.model)
        # whether unused parameters were looked for, which a single worker may have
        self.unused_sought = self.parallel is self.model
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.samples = len(workload.train)  # type: ignore[arg-type] # checked when the data was built
        self.optimizer, self.observer, self.averager = build_stepper(
            sweep, self.model, self.parameters, configuration, self.samples
        )
        # in the optimizer's order, in which it expects gradients: layer-wise rates change the order
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.norms = small_norms(
            sweep.training, self.parallel, self.parameters, configuration.local_batch
        )
        if self.norms.are_given:
            self.observer.expect_small_norms()
        self.reference = ReferenceBatch(sweep, configuration, self.samples)
        self.scaler = GradScaler(self.device.type, enabled=sweep.workload.precision == "fp16")
        self.loader = make_train_loader(
            workload.train,
            local_batch=configuration.local_batch,
            rank=env.rank,
            world_size=env.world_size,
            seed=sweep.workload.seed,
            loader_workers=sweep.workload.loader_workers,
            pin_memory=self.device.type == "cuda",
            classes=self.labelled_classes,
        )

    @property
    def labelled_classes(self) -> int | None:
        """Return the number of classes, None if the user's own loss may know no labels."""
        return self.workload.classes if self.sweep.workload.loss is None else None

    def _move_to_device(self, model: nn.Module) -> nn.Module:
        memory_format = torch.preserve_format
        if self.sweep.workload.channels_last:
            memory_format = torch.channels_last
        return model.to(self.device, memory_format=memory_format)  # type: ignore[call-overload,no-any-return]

    def _wrap(self, model: nn.Module) -> nn.Module:
        if self.env.world_size == 1:
            return model
        devices = [self.device.index] if self.device.type == "cuda" else None
        # while workers step by themselves, as in post-local SGD, rank 0's BatchNorm statistics must
        # not replace theirs
        broadcast = self.sweep.training.method != "polo"
        return DistributedDataParallel(
            model, device_ids=devices, gradient_as_bucket_view=True, broadcast_buffers=broadcast
        )

    def batches(self, epoch: int = 0, offset: int = 0) -> Iterator[tuple[Batch, Batch]]:
        """Yield batches on the device endlessly, from `offset` global samples into `epoch` on."""
        stream: Iterator[Batch] = self.loader.stream(epoch, offset)
        if self.device.type == "cuda":
            stream = one_ahead(stream, StreamCopies(self.device))
        # not a generator function, which would hold the loaded batch during the step
        return itertools.starmap(self.to_device, stream)

    def to_device(self, inputs: Batch, targets: Batch) -> tuple[Batch, Batch]:
        """Move a batch to the device as the model takes it: scaled, in its memory format."""
        inputs, targets = map_tensors(
            lambda tensor: tensor.to(self.device, non_blocking=True), (inputs, targets)
        )
        inputs, targets = map_tensors(
            self._laid_out, (prepared(self.workload.train, inputs), targets)
        )
        return inputs, targets

    def _laid_out(self, tensor: Tensor) -> Tensor:
        if self.sweep.workload.channels_last and tensor.dim() == 4:
            return tensor.to(memory_format=torch.channels_last)
        return tensor

    def as_loaded(self, inputs: Batch, targets: Batch) -> tuple[Batch, Batch]:
        """Return a batch on the host as loaders yield it, like the given batch on the device.

        Images, which are copied to a GPU as bytes, become one image of the test set, repeated.
        """
        inputs, targets = map_tensors(lambda tensor: tensor.cpu().contiguous(), (inputs, targets))
        if self.device.type == "cuda" and isinstance(self.workload.test, ImageDataset):
            image, _ = self.workload.test[0]
            inputs = image.repeat(len(inputs), 1, 1, 1)
        return inputs, targets

    @property
    def parts(self) -> int:
        """Return the number of micro-batches into which a step splits its local batch."""
        return self.norms.count

    def forward_backward(
        self, inputs: Batch, targets: Batch, *, synchronize: bool = True, whole: bool = False
    ) -> Tensor:
        """Return the mean loss of the local batch, detached, and leave gradients in `.grad`.

        Gradients are all-reduced if `synchronize`. If `whole`, the batch is taken at once even
        where a step splits it into micro-batches.
        """
        quiet = isinstance(self.parallel, DistributedDataParallel) and not synchronize
        with self.parallel.no_sync() if quiet else contextlib.nullcontext():  # type: ignore[operator]
            if whole or self.norms.count == 1:
                loss = self._backward(inputs, targets)
            else:
                parts = self.norms.parts(inputs, targets)
                loss = torch.stack([self._backward(*part) for part in parts]).sum()
        if not (self.unused_sought or quiet):
            self.unused_sought = True
            refuse_unused(self.model)
        return loss

    def _backward(self, inputs: Batch, targets: Batch, share: float = 1.0) -> Tensor:
        with autocast_on(self.sweep.workload, self.device):
            loss = self.workload.criterion.loss(self.parallel(inputs), targets) * share
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Run the block in evaluation mode without gradients; then restore each module's mode."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, training in modes:
                module.training = training

    def score(self, inputs: Batch, targets: Batch) -> Tensor:
        """Return sums over a batch of test samples, (4,): loss, samples, and `Criterion.hits`.

        As in training, loss and hits are computed within autocast. Outputs that are one tensor are
        converted to full precision first.
        """
        criterion, count = self.workload.criterion, samples_in(targets)
        with autocast_on(self.sweep.workload, self.device):
            inputs, targets = self.to_device(inputs, targets)
            outputs = self.model(inputs)
            if isinstance(outputs, Tensor):
                outputs = outputs.float()
            loss, hits = criterion.loss(outputs, targets), criterion.hits(outputs, targets)
        total = (loss.to(torch.promote_types(loss.dtype, torch.float32)) * count).double()
        return torch.cat([torch.stack([total, torch.full_like(total, count)]), hits])

    def reference_gradient(self, inputs: Batch, targets: Batch) -> list[Tensor | None]:
        """Return the all-reduced gradient of a reference batch, a part of every worker's batch."""
        workers = self.configuration.world_size
        part = self.sweep.training.reference_share(self.configuration.local_batch, workers)
        inputs, targets = take((inputs, targets), 0, part)
        return self._gradient(reference_gradient, inputs, targets)

    def local_gradient(self, inputs: Batch, targets: Batch) -> list[Tensor | None]:
        """Return this worker's own unscaled gradient; keep `.grad`, buffers and random numbers."""
        return self._gradient(local_gradient, inputs, targets)

    def _gradient(
        self, gradient: Callable[..., list[Tensor | None]], inputs: Batch, targets: Batch
    ) -> list[Tensor | None]:
        loss_scale = self.scaler.get_scale()
        if self.scaler.is_enabled():
            # in a mean over fewer samples each gradient weighs more, which float16 may not hold
            loss_scale *= samples_in(targets) / self.configuration.local_batch
        return gradient(
            self.model,
            self.workload.criterion.loss,
            inputs,
            targets,
            self.parameters,
            autocast=autocast_on(self.sweep.workload, self.device),
            loss_scale=loss_scale,
        )

    def update_gradscale(self, inputs: Batch, targets: Batch) -> None:
        """Update AGS's scale from the last backward pass and this batch's reference part."""
        small = self.reference_gradient(inputs, targets)
        self.observer.update_gradscale(small, [p.grad for p in self.parameters])

    def train_step(self, inputs: Batch, targets: Batch) -> Tensor:
        """Take one step of Algorithm 1; return the mean loss of the local batch.

        Update the gradient scale if it is due, then forward, backward, gate, optimizer.
        """
        is_local = self.is_local
        small = None
        if self.observer.update_due:
            small = self.reference_gradient(inputs, targets)
        self.optimizer.zero_grad(set_to_none=True)
        self.observer.begin_step(is_local=is_local)
        loss = self.forward_backward(inputs, targets, synchronize=not is_local)
        self.scaler.unscale_(self.optimizer)
        if small is not None:
            self.observer.update_gradscale(small, [p.grad for p in self.parameters])
        clipping = self._clip()
        if not is_local:
            self.norms.report(self.observer, self._loss_scale(), clipping)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def _clip(self) -> Tensor | float:
        """Clip the gradient to training.clip_norm; return the factor, on the device."""
        limit = self.sweep.training.clip_norm
        if limit is None:
            return 1.0
        norm = nn.utils.clip_grad_norm_(self.parameters, limit)
        # the factor by which torch multiplies
        factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
        self.observer.observe_clipping(factor)
        return factor

    def _loss_scale(self) -> Tensor | float:
        """Return the loss scale as a tensor: `get_scale` would wait for the device."""
        if not self.scaler.is_enabled():
            return 1.0
        return self.scaler.scale(torch.ones((), device=self.device))

    @property
    def steps_are_skipped(self) -> bool:
        """True if gradients are not finite at the smallest useful loss scale: no step is taken.

        Waits for the device.
        """
        return self.scaler.is_enabled() and self.scaler.get_scale() < LEAST_LOSS_SCALE

    def release(self) -> None:
        """Let go of the model after its last step, so that it is freed if the process goes on."""
        self.norms.release()

    def seed(self, seed: int) -> None:
        """Seed the random numbers that a model may draw: Python's, NumPy's and torch's."""
        seed_random_numbers(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    @property
    def is_local(self) -> bool:
        """True while this worker steps by itself, as in post-local SGD after its first epochs."""
        return self.averager.local

    def set_position(self, start: float, end: float) -> None:
        """Set how many epochs are seen before and after the next step, as fractions. Collective.

        After the last step of an epoch the number is whole.
        """
        if self.norms.are_given:
            self.observer.set_reference(self.reference.after(start))
        self.averager.set_position(start, end)
        if self.averager.begins:
            # workers that step by themselves start with the same buffers
            self.share_buffers()

    def model_state(self) -> dict[str, Any]:
        """Return the model's state dict, and the buffers not in it, which training may change."""
        model = self.model.state_dict()
        others = {n: b.detach() for n, b in self.model.named_buffers() if n not in model}
        return {"model": model, "buffers": others} if others else {"model": model}

    @torch.no_grad()
    def load_model_state(self, state: dict[str, Any]) -> None:
        """Restore a `model_state`."""
        self.model.load_state_dict(state["model"])
        saved = state.get("buffers", {})
        for name, buffer in self.model.named_buffers():
            # a buffer of another shape is a cache, which grows with the model's inputs
            if name in saved and saved[name].shape == buffer.shape:
                buffer.copy_(saved[name])

    def own_state(self) -> dict[str, Any]:
        """Return the state that only this worker has while `is_local`."""
        return {
            **self.model_state(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Restore `own_state`, or rank 0's checkpoint."""
        self.load_model_state(state)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])

    def optimizer_state(self) -> dict[str, Any]:
        """Gather the optimizer's whole state on rank 0; return {} on the others. Collective."""
        consolidate(self.optimizer)
        return self.optimizer.state_dict() if self.env.rank == 0 else {}

    def share_buffers(self) -> None:
        """Give every worker rank 0's BatchNorm statistics, as DDP does before each step."""
        if self.env.world_size > 1:
            for buffer in self.model.buffers():
                # of a strided view gloo would also send the memory between its elements
                whole = buffer.contiguous()
                dist.broadcast(whole, src=0)
                if whole is not buffer:
                    buffer.copy_(whole)

    def synchronize_device(self) -> None:
        """Wait until the device's queue is empty."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def agree(self, *values: float) -> list[float]:
        """Return the largest of each value over all workers. Collective."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def total(self, *values: float) -> list[float]:
        """Return the sum of each value over all workers. Collective."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def _reduced(self, values: Sequence[float], how: dist.ReduceOp.RedOpType) -> list[float]:
        if self.env.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=how)
        return list(map(float, tensor.tolist()))


# DDP's default size of a bucket
BUCKET_BYTES = 25 * 1024**2


def bare_all_reduce(parameters: Sequence[Tensor]) -> Callable[[], None]:
    """Return a function that all-reduces as many bytes as their gradients have, in DDP's buckets.

    The loader is idle meanwhile. In training, an all-reduce takes longer if the loader's processes
    and the collective's threads share cores; the times of whole steps include that.
    """
    counts: Counter[torch.dtype] = Counter()
    for parameter in parameters:
        counts[parameter.dtype] += parameter.numel()
    flats = [
        torch.ones(count, dtype=dtype, device=parameters[0].device)
        for dtype, count in counts.items()
    ]
    # as in DDP, no bucket holds two types
    buckets = [
        bucket
        for flat in flats
        for bucket in torch.split(flat, BUCKET_BYTES // flat.element_size())
    ]

    def step() -> None:
        handles = [dist.all_reduce(bucket, async_op=True) for bucket in buckets]
        for handle in handles:
            if handle is not None:
                handle.wait()
        # otherwise the sums overflow after some hundred steps
        for flat in flats:
            flat.fill_(1.0)

    return step
