"""Training steps on tensors that have shapes but no contents, to count the bytes that they hold."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import dropout
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tula_hpc.batches import Batch, bytes_of, map_tensors, tensors_of
from tula_hpc.config import WorkloadSpec
from tula_hpc.workloads.activation_checkpointing import checkpoint_activations
from tula_hpc.workloads.criterion import build_criterion
from tula_hpc.workloads.optimizers import base_optimizer, zero_share
from tula_hpc.workloads.torchvision_models import build_model
from tula_hpc.workloads.workload import CPU_DTYPES

# BatchNorm cannot train on one sample
LEAST_BATCH = 2
# glibc's largest mmap threshold: larger blocks are mapped separately, and returned when freed
HEAP_LIMIT_BYTES = 32 * 1024**2


class Peak(NamedTuple):
    """The moment when most bytes were alive."""

    live_bytes: int
    # bytes of each storage alive then and made since `AllocationTracker.watch`
    blocks: tuple[int, ...]


class AllocationTracker(TorchDispatchMode):
    """Count the bytes of storages that operators make while this is active, until they are freed.

    It sees tensors, fake ones as well as real ones, but no memory that a library takes for itself
    inside an operator (convolution workspaces, reordered weights). Views count once, with their
    storage.
    """

    def __init__(self) -> None:
        super().__init__()
        # ids of living storages, which are unique while a storage lives
        self._living: set[int] = set()
        # (number of the block, bytes), with negative bytes when the block is freed
        self._log: list[tuple[int, int]] = []
        self._count = self._live = self._live_at_start = 0

    def watch(self) -> None:
        """Start a new peak from the storages alive now."""
        self._log = []
        self._live_at_start = self._live

    def hold(self, tensor: Tensor) -> None:
        """Count a tensor's storage, once, until it is freed."""
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._living or not size:
            return
        self._count += 1
        self._add(self._count, size)
        self._living.add(key)
        # at the interpreter's end nobody asks any more
        weakref.finalize(storage, self._release, key, self._count, size).atexit = False

    def _release(self, key: int, number: int, size: int) -> None:
        self._living.remove(key)
        self._add(number, -size)

    def _add(self, number: int, size: int) -> None:
        self._live += size
        self._log.append((number, size))

    def peak(self) -> Peak:
        """Return the largest sum of living bytes since `watch`."""
        live = highest = self._live_at_start
        length = 0
        for position, (_, size) in enumerate(self._log):
            live += size
            if live > highest:
                highest, length = live, position + 1
        made: dict[int, int] = {}
        for number, size in self._log[:length]:
            if size > 0:
                made[number] = size
            else:
                made.pop(number, None)
        return Peak(highest, tuple(made.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count the tensors that it returns."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.hold(leaf)
        return result


class Shapes(NamedTuple):
    """Inputs and targets of a model.

    Attributes:
        inputs: A batch of one sample; on the meta device if only shapes and types are known.
        targets: A batch of one target, likewise.
        classes: Width of the output, an argument of the model.
        image_size: Edge of an image, an argument of the model.
        loaded: The inputs as they travel to a GPU, images as bytes.
    """

    inputs: Batch
    targets: Batch
    classes: int
    image_size: int
    loaded: Batch

    @classmethod
    def of_images(cls, image_size: int, classes: int) -> Shapes:
        """Return the shapes of images with three colours, and their labels."""
        image = torch.empty(1, 3, image_size, image_size, device="meta")
        labels = torch.empty(1, dtype=torch.long, device="meta")
        return cls(image, labels, classes, image_size, image.to(torch.uint8))

    def batch(self, samples: int, *, fake: bool, loaded: bool = False) -> tuple[Batch, Batch]:
        """Repeat the sample's inputs and targets; zeros if `fake` or if it has no contents."""

        def repeated(one: Tensor) -> Tensor:
            if fake or one.is_meta:
                return torch.zeros(samples, *one.shape[1:], dtype=one.dtype)
            return one.repeat(samples, *[1] * (one.dim() - 1))

        one_sample = (self.loaded if loaded else self.inputs, self.targets)
        inputs, targets = map_tensors(repeated, one_sample)
        return inputs, targets


class Step(NamedTuple):
    """Most bytes alive in the phases of one training step."""

    # peak of the forward and backward pass
    backward_bytes: int
    # peak of the optimizer's step
    optimizer_bytes: int
    # bytes of the storages that the forward and backward pass made, and that are alive at its peak
    blocks: tuple[int, ...]


class Counts(NamedTuple):
    """Counted bytes of a model and of its training steps."""

    parameters: int
    gradients: int
    optimizer: int
    # local batches of `small` and `large`
    batches: tuple[int, int]
    # step with the smallest batch, where gradients make the peak, not activations
    least: Step
    small: Step
    large: Step

    @property
    def per_sample(self) -> float:
        """Bytes of activations per sample."""
        return max(0.0, self._slope(self.small.backward_bytes, self.large.backward_bytes))

    @property
    def fixed(self) -> float:
        """Bytes at the peak of the backward pass that do not grow with the batch."""
        return self.large.backward_bytes - self.per_sample * self.batches[1]

    def peak(self, local_batch: int) -> float:
        """Return the bytes of tensors at the peak of a step."""
        # inputs live until the step ends
        input_bytes = self._slope(self.small.optimizer_bytes, self.large.optimizer_bytes)
        optimizer = self.large.optimizer_bytes + input_bytes * (local_batch - self.batches[1])
        line = self.fixed + self.per_sample * local_batch
        return max(line, float(self.least.backward_bytes), optimizer)

    def with_step_copies(self, copies: int) -> Counts:
        """Add copies of the trained parameters during the optimizer's step."""
        extra = copies * self.gradients
        least, small, large = (
            step._replace(optimizer_bytes=step.optimizer_bytes + extra)
            for step in (self.least, self.small, self.large)
        )
        return self._replace(least=least, small=small, large=large)

    def _slope(self, low_bytes: int, high_bytes: int) -> float:
        return (high_bytes - low_bytes) / (self.batches[1] - self.batches[0])

    def heap_bytes(self, local_batch: int) -> float:
        """Return bytes at the backward pass's peak in blocks that the C library's heap serves."""
        share = local_batch / self.batches[1]
        return sum(size * share for size in self.large.blocks if size * share < HEAP_LIMIT_BYTES)


def count(
    workload: WorkloadSpec,
    shapes: Shapes,
    world: int,
    device: str,
    batches: tuple[int, int],
    *,
    fake: bool,
) -> Counts:
    """Take training steps at two local batches and count their bytes.

    With several workers gradients live in buckets, and ZeRO divides the optimizer's states.
    Operators keep other tensors on "cuda" than on "cpu". `batches` ascend, and have to be so large
    that activations make the peak. With `fake`, tensors have no contents.
    """
    build = build_without_memory if fake else build_model
    model = build(workload, shapes.classes, shapes.image_size)
    on_gpu = device == "cuda"
    with contextlib.ExitStack() as modes:
        if fake:
            modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        if on_gpu:
            modes.enter_context(_FusedDropout())
        tracker = modes.enter_context(AllocationTracker())
        _track_model(model, workload, tracker, fake=fake)
        if workload.activation_checkpointing:
            checkpoint_activations(model)
        make_batch = partial(shapes.batch, fake=fake)
        steps = _Steps(workload, model, tracker, make_batch, world, on_gpu=on_gpu)
        return steps.count(batches)


class _Steps:
    """Training steps of one worker, as `ddp.worker.Worker` takes them, under the tracker."""

    def __init__(
        self,
        workload: WorkloadSpec,
        model: nn.Module,
        tracker: AllocationTracker,
        batch: Callable[..., tuple[Batch, Batch]],
        world: int,
        *,
        on_gpu: bool,
    ) -> None:
        self.workload, self.model, self.tracker = workload, model, tracker
        self.batch, self.on_gpu = batch, on_gpu
        self.criterion = build_criterion(workload)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        mine = zero_share(self.parameters, world) if workload.zero_stage else self.parameters
        self.optimizer = base_optimizer(workload, mine)
        self.buckets = _gradient_buckets(self.parameters) if world > 1 else []

    def count(self, batches: tuple[int, int]) -> Counts:
        """Take steps with the smallest batch and with `batches`."""
        # optimizer states are made in the first step
        self.step(LEAST_BATCH)
        least, small, large = map(self.step, (LEAST_BATCH, *batches))
        return Counts(
            parameters=bytes_of(self.model.parameters()),
            gradients=bytes_of(self.parameters),
            optimizer=bytes_of(tensors_of(self.optimizer.state)),
            batches=batches,
            least=least,
            small=small,
            large=large,
        )

    def step(self, local_batch: int) -> Step:
        """Take one step."""
        for parameter in self.parameters:
            parameter.grad = None
        inputs, targets = self.batch(local_batch)
        inputs = map_tensors(self._laid_out, inputs)
        # a GPU receives the next batch during the step
        next_batch = self.batch(local_batch, loaded=True) if self.on_gpu else None
        self.tracker.watch()
        precision = self.workload.precision
        with torch.autocast("cpu", CPU_DTYPES[precision], enabled=precision != "fp32"):
            loss = self.criterion.loss(self.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        # the worker returns the loss without its graph
        loss = loss.detach()
        backward = self.tracker.peak()
        self.tracker.watch()
        self.optimizer.step()
        after = self.tracker.peak()
        del next_batch
        return Step(backward.live_bytes, after.live_bytes, backward.blocks)

    def _laid_out(self, inputs: Tensor) -> Tensor:
        # batch, channels, height, width
        if self.workload.channels_last and inputs.dim() == 4:
            return inputs.to(memory_format=torch.channels_last)
        return inputs


def _gradient_buckets(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Keep gradients alive, as DistributedDataParallel does with gradient_as_bucket_view."""
    buckets = [torch.zeros_like(p) for p in parameters]
    for parameter, bucket in zip(parameters, buckets, strict=True):
        parameter.register_post_accumulate_grad_hook(_into(bucket))  # type: ignore[no-untyped-call]
    return buckets


def _into(bucket: Tensor) -> Callable[[Tensor], None]:
    def move(parameter: Tensor) -> None:
        parameter.grad = bucket

    return move


class _WithoutMemory(TorchFunctionMode):
    """Mode that puts parameters on the meta device.

    `torch.device("meta")` would also put arithmetic there that needs values.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
        if in_place and args and isinstance(args[0], Tensor) and args[0].is_meta:
            # normal_, uniform_ and the like: nothing to initialise
            return args[0]
        on_meta = {"device": "meta"} if func is torch.empty else {}
        return func(*args, **((kwargs or {}) | on_meta))


class _FusedDropout(TorchFunctionMode):
    """CUDA's dropout, which keeps a mask of one byte per element; a CPU's has the input's type."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        bound = kwargs or {}
        if func is dropout and bound.get("training") and not bound.get("inplace"):
            return torch.native_dropout(args[0], bound.get("p", 0.5), train=True)[0]
        return func(*args, **bound)


def build_without_memory(workload: WorkloadSpec, classes: int, image_size: int) -> nn.Module:
    """Return the model with parameters on the meta device, or a real one if it needs values."""
    try:
        with _WithoutMemory():
            return build_model(workload, classes, image_size)
    except (RuntimeError, NotImplementedError):
        # the model's own code needs the values of the weights
        return build_model(workload, classes, image_size)


def _track_model(
    model: nn.Module, workload: WorkloadSpec, tracker: AllocationTracker, *, fake: bool
) -> None:
    """Give every parameter and buffer a tensor of the current mode, and count it."""
    if workload.channels_last and not fake:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    # by id, so that a shared parameter stays shared
    made: dict[int, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    made.setdefault(id(tensor), _fake_like(tensor, workload) if fake else tensor)
                    tensors[name] = made[id(tensor)]
                    tracker.hold(made[id(tensor)])
    model.train()


def _fake_like(tensor: Tensor, workload: WorkloadSpec) -> Tensor:
    # as nn.Module.to does: channels_last is for tensors of 4 dimensions
    images = workload.channels_last and tensor.dim() == 4
    memory_format = torch.channels_last if images else torch.contiguous_format
    plain = torch.empty(tensor.shape, dtype=tensor.dtype, memory_format=memory_format)
    return nn.Parameter(plain, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else plain
