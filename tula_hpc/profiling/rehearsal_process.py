"""Trial of a workload on the machine of a command, before it submits anything.

`python -m tula_hpc.profiling.rehearsal_process SWEEP.toml CLUSTER.toml [--memory PARTITION ...]`
prints a `Trial` as JSON, in a process of its own, as it imports torch: `stages/rehearsal.py` starts
it, and keeps its output. Mistakes that would end a job in its first minute are found here: wrong
data, images that cannot be decoded, labels of no class, a function that fails or returns something
unexpected, an import that is missing.

- Several items of training and test set are read; own code takes a training step on the CPU.
- A model of more than `LARGEST_BYTES` is laid out without memory, and takes no step.
- Where training is for GPUs and this machine has none, code that asks for one is no mistake.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.data import Dataset, default_collate

from tula_hpc.batches import bytes_of, is_finite, take, tensors_of
from tula_hpc.config import ClusterSpec, SweepSpec, WorkloadSpec, cluster_sizes, load_together
from tula_hpc.data.datasets import Data, build_data
from tula_hpc.data.images import prepared, samples_of
from tula_hpc.data.named_items import NamedItems
from tula_hpc.ddp.process_group import pick_device
from tula_hpc.env import begin_process
from tula_hpc.errors import InputError
from tula_hpc.files import write_out
from tula_hpc.formatting import printable_output
from tula_hpc.own_sources import is_own
from tula_hpc.records import Footprint, Identity, Trial
from tula_hpc.user_code import TRIED_BEFORE, blamed, describe_error, is_entry_point, kind_of, spread
from tula_hpc.workloads.fake_steps import build_without_memory
from tula_hpc.workloads.footprint import estimate_footprint, host_baseline
from tula_hpc.workloads.workload import (
    CPU,
    Workload,
    autocast_on,
    identity_of,
    refuse_unused,
    workload_of,
)

# relative difference up to which losses of a sample count as equal; bfloat16 rounds by 0.4 %
ALIKE = 0.02
# bytes of parameters; a login node is not for larger models
LARGEST_BYTES = 2 * 1024**3
# a data set that takes longer to make is not made twice
AGAIN_S = 5.0
# most warnings that are shown, and most characters of each: nobody reads more
MOST_WARNINGS = 5
MOST_CHARACTERS = 300
_SPEAKS_OF_DEVICE = re.compile(
    r"\b(cuda|gpu|nvidia|cudnn|nccl|triton|cpu)\b|not implemented", re.IGNORECASE
)


class MixedSamplesWarning(UserWarning):
    """The user's loss of a sample depends on the other samples of its batch."""


def try_workload(spec: WorkloadSpec, data: Data, *, for_gpus: bool, several: bool) -> Identity:
    """Try what a job does first, and return the workload's identity.

    If several workers train, every parameter needs a gradient.

    Raises:
        InputError: The workload or its data have a mistake.
    """
    classes = data.classes if spec.loss is None else None
    for which, samples in (("training", data.train), ("test", data.test)):
        named = NamedItems(samples, which, classes)
        with torch.random.fork_rng(devices=[]):
            for index in spread(len(named), TRIED_BEFORE):
                named.item(index)
    light = build_without_memory(spec, data.classes, data.image_size)
    parameters = [p for p in light.parameters() if not is_lazy(p)]
    if bytes_of(parameters) > LARGEST_BYTES:
        return identity_of(spec, light, data)
    try:
        workload = workload_of(spec, data, CPU, TRIED_BEFORE)
        if spec.entry_points:
            _try_step(spec, workload, several=several)
    except InputError as error:
        if not for_gpus or torch.cuda.is_available() or not _SPEAKS_OF_DEVICE.search(str(error)):
            raise
        return identity_of(spec, light, data)
    return workload.identity


def _try_step(spec: WorkloadSpec, workload: Workload, *, several: bool) -> None:
    """Take a forward and backward pass in training mode."""
    train = workload.train
    positions = spread(samples_of(train), TRIED_BEFORE)
    # BatchNorm cannot train on one sample
    if len(positions) == 1:
        return
    words = f"{spec.model} cannot take a training step"
    with torch.random.fork_rng(devices=[]), autocast_on(spec, CPU):
        inputs, targets = default_collate([train[position] for position in positions])
        with blamed("workload.model", words):
            outputs = workload.model.train()(prepared(train, inputs))
        key = "workload.loss" if spec.loss else "workload.model"
        with blamed(key, f"{spec.loss or spec.model} fails in training"):
            loss = workload.criterion.loss(outputs, targets)
        if not torch.isfinite(loss).all():
            _refuse_infinite(spec, inputs, positions)
            message = f"{spec.loss or spec.model}: the untrained model's loss is {float(loss)}"
            raise InputError(f"{message}; expected a finite number", key=key)
        if spec.loss is not None:
            _warn_of_mixed_samples(spec.loss, workload, outputs, targets)
        with blamed("workload.model", words):
            torch.autograd.backward(loss)
    if several:
        refuse_unused(workload.model)


def _warn_of_mixed_samples(name: str, workload: Workload, outputs: Any, targets: Any) -> None:
    """Warn if a sample has another loss alone than in a batch, as where shapes broadcast."""
    try:
        among = workload.criterion.losses(outputs, targets)[:1]
        alone = workload.criterion.losses(*take((outputs, targets), 0, 1))
    except Exception:  # noqa: BLE001 # the user's code may raise anything, of outputs that cannot be cut
        return
    if not torch.allclose(among.float(), alone.float(), rtol=ALIKE, atol=1e-4):
        warnings.warn(
            f"{name} gives a sample another loss in a batch than alone, for outputs of "
            f"{kind_of(outputs)} and targets of {kind_of(targets)}: unless samples are to be "
            "compared with each other, give both the same shape",
            MixedSamplesWarning,
            stacklevel=1,
        )


def _refuse_infinite(spec: WorkloadSpec, inputs: Any, positions: Sequence[int]) -> None:
    for place, position in enumerate(positions):
        if not is_finite(take(inputs, place, place + 1)):
            message = f"{spec.dataset}: training item {position} holds inf or nan"
            raise InputError(message, key="workload.dataset")


def _refuse_other_data(spec: WorkloadSpec, data: Data) -> None:
    """Refuse data sets whose samples change from call to call: each worker makes its own."""
    again = build_data(spec, TRIED_BEFORE)
    found = [f"{samples_of(each.train)} and {samples_of(each.test)}" for each in (data, again)]
    remedy = "all workers have to get the same: split with a generator of a fixed seed"
    if found[0] != found[1]:
        returned = f"{found[0]} training and test samples, and {found[1]} when it is called again"
        message = f"{spec.dataset} returns {returned}; {remedy}"
        raise InputError(message, key="workload.dataset")
    pairs = (("training", data.train, again.train), ("test", data.test, again.test))
    for which, first, second in pairs:
        for position in spread(samples_of(first), TRIED_BEFORE):
            if _is_another(first, second, position):
                returned = f"another {which} item {position} when it is called again"
                message = f"{spec.dataset} returns {returned}; {remedy}"
                raise InputError(message, key="workload.dataset")


def _is_another(first: Dataset[Any], second: Dataset[Any], position: int) -> bool:
    """Tell whether an item differs between two data sets, but not between readings of the first.

    Items that are drawn anew at each reading, such as augmented images, prove nothing.
    """
    reads = [_leaves(each, position, seed) for seed, each in enumerate((first, first, second))]
    return any(
        _is_same(one, same) and not _is_same(one, other)
        for one, same, other in zip(*reads, strict=True)
    )


def _leaves(samples: Dataset[Any], position: int, seed: int) -> list[Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return list(tensors_of(default_collate([samples[position]])))


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(
        one.eq(other).logical_or(one.ne(one) & other.ne(other)).all()
    )


def _trial_of(sweep: SweepSpec, cluster: ClusterSpec, partitions: Sequence[str]) -> Trial:
    if cluster.executor == "local":
        # the jobs will run on this machine
        for part in cluster.parts():
            pick_device(part, 0)
    # measured before the data are loaded
    host_bytes = {name: host_baseline(sweep, cluster.part(name)) for name in partitions}
    began = time.perf_counter()
    data = build_data(sweep.workload, TRIED_BEFORE)
    if is_entry_point(sweep.workload.dataset) and time.perf_counter() - began < AGAIN_S:
        _refuse_other_data(sweep.workload, data)
    for_gpus = any(part.device == "cuda" for part in cluster.parts())
    several = max(_worlds(sweep, cluster), default=1) > 1
    identity = try_workload(sweep.workload, data, for_gpus=for_gpus, several=several)
    found: dict[str, Footprint] = {}
    reasons: dict[str, str] = {}
    for name, host in host_bytes.items():
        part = cluster.part(name)
        try:
            found[name] = estimate_footprint(sweep, part, host_bytes=host, data=data)
        except Exception as error:  # noqa: BLE001 # the user's code may raise anything
            reasons[name] = f"cannot be estimated: {describe_error(error)}"
    return Trial(identity=identity, footprints=found, reasons=reasons)


def _may_be_only_here(error: InputError, cluster: ClusterSpec | None) -> bool:
    """Tell whether this machine may lack something that the nodes have."""
    cause = error.__cause__
    if isinstance(cause, ImportError | OSError) or error.key == "workload.data_dir":
        return not isinstance(cause, IsADirectoryError)
    if cluster is None or _SPEAKS_OF_DEVICE.search(str(cause)) is None:
        return False
    return any(part.device == "cuda" for part in cluster.parts())


@printable_output()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code.

    0: done; 1: the workload cannot be tried here; 2: wrong input; 3: wrong input, unless only this
    machine lacks something.
    """
    options = _parser().parse_args(arguments)
    begin_process()
    code, message = _try(options)
    # printed last: objects of code that failed are gone by now, and may have printed at that
    write_out(f"{message}\n", sys.stderr if code else sys.stdout)
    return code


def _try(options: argparse.Namespace) -> tuple[int, str]:
    """Return the exit code, and the trial as JSON, or the mistake."""
    cluster: ClusterSpec | None = None
    try:
        sweep, cluster = load_together(options.sweep, options.cluster, check_paths=False)
        with warnings.catch_warnings(record=True) as caught, _exits_traced():
            trial = _trial_of(sweep, cluster, options.memory)
    except InputError as error:
        return 3 if _may_be_only_here(error, cluster) else 2, str(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 # the user's code may raise anything
        return 1, describe_error(error)
    trial = trial.model_copy(update={"warnings": tuple(_own_warnings(caught))})
    return 0, trial.model_dump_json()


@contextlib.contextmanager
def _exits_traced() -> Iterator[None]:
    """Have os._exit raise SystemExit in this process, which shows its place; not in children."""
    leave = os._exit
    here = os.getpid()

    def raise_instead(status: int) -> NoReturn:
        if os.getpid() != here:
            leave(status)
        raise SystemExit(f"os._exit({status})")

    os._exit = raise_instead
    try:
        yield
    finally:
        os._exit = leave


def _own_warnings(caught: Sequence[warnings.WarningMessage]) -> Iterator[str]:
    """Yield the warnings of the user's own files, as "mine.py:19: text", and of this module."""
    found = [one for one in caught if one.category is MixedSamplesWarning or is_own(one.filename)]
    for one in found[:MOST_WARNINGS]:
        place = ""
        if one.category is not MixedSamplesWarning:
            place = f"{Path(one.filename).name}:{one.lineno}: "
        yield f"{place}{' '.join(str(one.message).split())[:MOST_CHARACTERS]}"


def _worlds(sweep: SweepSpec, cluster: ClusterSpec) -> list[int]:
    if sweep.study is not None:
        return [sweep.study.nodes * part.workers_per_node for part in cluster.parts()]
    return [
        nodes * part.workers_per_node
        for part in cluster.parts()
        for nodes in cluster_sizes(sweep.search, part)
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tula_hpc.profiling.rehearsal_process", description=__doc__
    )
    parser.add_argument("sweep", type=Path)
    parser.add_argument("cluster", type=Path)
    parser.add_argument("--memory", action="append", default=[], metavar="PARTITION")
    return parser


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # threads of the user's own may never end
    os._exit(code)
