"""What profiling and training share on a node: one process of a DDP job with its model, data, optimizer and step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.distributed_c10d import Store
from torch.nn.parallel import DistributedDataParallel

from tula_hpc.config import ClusterSpec, SweepSpec, TrainingSpec
from tula_hpc.env import WorkerEnvironment
from tula_hpc.optim import TulaOptimizer, local_gradient, reference_gradient
from tula_hpc.records import Configuration
from tula_hpc.workloads import build_workload, make_train_loader
from tula_hpc.workloads.optimizers import base_optimizer, consolidate, shards

# A peer that died is noticed by gloo at once and by srun -K1; this bounds the wait where neither helps.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Worker:
    """One process of a data-parallel job.

    Args:
        sweep: What to train and how.
        cluster: The device and the CPUs that a worker has.
        configuration: Nodes, workers per node and local batch.
        env: This process's place in the job.
    """

    def __init__(
        self, sweep: SweepSpec, cluster: ClusterSpec, configuration: Configuration, env: WorkerEnvironment
    ) -> None:
        self.sweep, self.configuration, self.env = sweep, configuration, env
        self.device = pick_device(cluster, env.local_rank)
        workload = build_workload(sweep.workload)
        self.workload = workload
        self.model = self._place(workload.model)
        self.parallel = self._wrap(self.model)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.samples = len(workload.train)  # type: ignore[arg-type] # checked when the data was built
        self.optimizer = build_optimizer(sweep, self.parameters, configuration, self.samples)
        self.scaler = GradScaler(self.device.type, enabled=sweep.workload.precision == "fp16")
        self.loader = make_train_loader(
            workload.train,
            local_batch=configuration.local_batch,
            rank=env.rank,
            world_size=env.world_size,
            seed=sweep.workload.seed,
            loader_workers=sweep.workload.loader_workers,
            pin_memory=self.device.type == "cuda",
        )

    def _place(self, model: nn.Module) -> nn.Module:
        channels_last = torch.channels_last if self.sweep.workload.channels_last else torch.preserve_format
        return model.to(self.device, memory_format=channels_last)  # type: ignore[call-overload,no-any-return]

    def _wrap(self, model: nn.Module) -> nn.Module:
        if self.env.world_size == 1:
            return model
        devices = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)

    def batches(self, epoch: int = 0, offset: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches on the device, for ever: from `offset` global samples into `epoch`, then the epochs that follow."""
        for inputs, targets in self.loader.stream(epoch, offset):
            yield self.to_device(inputs), targets.to(self.device, non_blocking=True)

    def to_device(self, inputs: Tensor) -> Tensor:
        """A batch of images on the device, in the model's memory format."""
        if self.sweep.workload.channels_last:
            return inputs.to(self.device, non_blocking=True, memory_format=torch.channels_last)
        return inputs.to(self.device, non_blocking=True)

    def autocast(self) -> AbstractContextManager[object]:
        """The workload's precision for a forward pass."""
        dtype = DTYPES[self.sweep.workload.precision]
        return torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)

    def forward_backward(self, inputs: Tensor, targets: Tensor, *, synchronize: bool = True) -> Tensor:
        """Mean loss of the local batch, detached; gradients are all-reduced unless `synchronize` is off."""
        quiet = isinstance(self.parallel, DistributedDataParallel) and not synchronize
        with self.parallel.no_sync() if quiet else contextlib.nullcontext():  # type: ignore[operator]
            with self.autocast():
                loss = self.workload.loss(self.parallel(inputs), targets)
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def reference_gradient(self, inputs: Tensor, targets: Tensor) -> list[Tensor | None]:
        """Gradient of a reference batch, the first part of this batch on every worker, all-reduced."""
        part = reference_share(self.sweep.training, self.configuration)
        return reference_gradient(
            self.model,
            self.workload.loss,
            inputs[:part],
            targets[:part],
            self.parameters,
            autocast=self.autocast(),
            loss_scale=self.scaler.get_scale(),
        )

    def local_gradient(self, inputs: Tensor, targets: Tensor) -> list[Tensor | None]:
        """This worker's own gradient, unscaled, not reduced; `.grad`, buffers and random numbers stay as they are."""
        return local_gradient(
            self.model,
            self.workload.loss,
            inputs,
            targets,
            self.parameters,
            autocast=self.autocast(),
            loss_scale=self.scaler.get_scale(),
        )

    def update_gradscale(self, inputs: Tensor, targets: Tensor) -> None:
        """AGS's UpdateGradScale from the gradients of the last backward pass and this batch's reference part."""
        if isinstance(self.optimizer, TulaOptimizer):
            small = self.reference_gradient(inputs, targets)
            self.optimizer.update_gradscale(small, [p.grad for p in self.parameters])

    def train_step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """One step of Algorithm 1: update the gradient scale if it is due, then forward, backward, gate, optimizer."""
        due = isinstance(self.optimizer, TulaOptimizer) and self.optimizer.update_due
        small = self.reference_gradient(inputs, targets) if due else None
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.forward_backward(inputs, targets)
        self.scaler.unscale_(self.optimizer)
        if small is not None and isinstance(self.optimizer, TulaOptimizer):
            self.optimizer.update_gradscale(small, [p.grad for p in self.parameters])
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def optimizer_state(self) -> dict[str, Any]:
        """The whole optimizer's state on rank 0, where the workers hold parts of it; {} on the others. Collective."""
        consolidate(self.optimizer)
        return self.optimizer.state_dict() if self.env.rank == 0 else {}

    def share_buffers(self) -> None:
        """Give every worker rank 0's BatchNorm statistics, as DDP does before each training step."""
        if self.env.world_size > 1:
            for buffer in self.model.buffers():
                dist.broadcast(buffer, src=0)

    def synchronize_device(self) -> None:
        """Wait until the device has done all that was asked of it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def agree(self, *values: float) -> list[float]:
        """The largest of each value over all workers."""
        if self.env.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [float(value) for value in tensor.tolist()]

    def total(self, *values: float) -> list[float]:
        """The sum of each value over all workers."""
        if self.env.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor.tolist()]


@contextlib.contextmanager
def process_group(cluster: ClusterSpec, env: WorkerEnvironment, store: Store | None = None) -> Iterator[None]:
    """torch.distributed for the length of a job: nccl on GPUs, gloo on CPUs; nothing for a single worker.

    Args:
        cluster: The device.
        env: Who this worker is among those of the group.
        store: Where the workers meet; None: where the job's environment says.
    """
    torch.set_num_threads(cluster.cpus_per_worker)
    if env.world_size == 1:
        yield
        return
    device = pick_device(cluster, env.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    place: dict[str, Any] = {} if store is None else {"store": store, "rank": env.rank, "world_size": env.world_size}
    dist.init_process_group(backend_of(cluster), timeout=COLLECTIVE_TIMEOUT, **place)
    yield
    dist.destroy_process_group()  # not after an error: peers may wait in a collective, and nccl would wait for them


def backend_of(cluster: ClusterSpec) -> str:
    """The collective library for the cluster's device."""
    return "nccl" if cluster.device == "cuda" else "gloo"


def pick_device(cluster: ClusterSpec, local_rank: int) -> torch.device:
    """The worker's own GPU, whether the scheduler shows it all of the node's or only one; or the CPU."""
    if cluster.device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", local_rank % max(1, torch.cuda.device_count()))


def build_optimizer(
    sweep: SweepSpec, parameters: list[nn.Parameter], configuration: Configuration, samples: int
) -> torch.optim.Optimizer:
    """The base optimizer of the workload, inside `TulaOptimizer` unless the method is plain large-batch training.

    Args:
        sweep: Optimizer and gradient scaling.
        parameters: What is trained.
        configuration: Gives the large batch.
        samples: Training samples in an epoch; the scale's update interval is stated in epochs.
    """
    sharded = shards(sweep.workload, configuration.world_size)
    base = base_optimizer(sweep.workload, parameters, sharded=sharded)
    training = sweep.training
    if training.method == "lbt":
        return base
    steps_per_epoch = max(1, samples // configuration.global_batch)
    interval = max(1, round(training.update_interval_epochs * steps_per_epoch))
    reference = reference_share(training, configuration) * configuration.world_size
    return TulaOptimizer(
        base,
        small_batch=min(reference, configuration.global_batch),
        large_batch=configuration.global_batch,
        delta=training.delta,
        granularity=training.granularity,
        s_max=training.s_max,
        s_min=training.s_min,
        static_scale=training.static_scale if training.method == "static" else None,
        update_interval=None if training.method == "static" else interval,
    )


def reference_share(training: TrainingSpec, configuration: Configuration) -> int:
    """Samples that each worker gives to the reference batch; at least 2, since BatchNorm cannot train on one."""
    wanted = max(2, training.small_batch // configuration.world_size)
    return min(wanted, configuration.local_batch)


def describe_versions() -> dict[str, str]:
    """Versions that a measurement depends on."""
    import platform

    versions = {"python": platform.python_version(), "torch": torch.__version__, "kernel": os.uname().release}
    if torch.cuda.is_available():
        versions["cuda"] = str(torch.version.cuda)
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return versions
