"""Patch functions of torch and of a script so that ours are called before or after them."""

from __future__ import annotations

import importlib
import itertools
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from functools import partial, wraps
from threading import get_ident
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader, dataloader
from torch.utils.hooks import RemovableHandle

from tula_hpc.batches import tensors_of
from tula_hpc.ddp.rendezvous import LOOPBACK


def after(holder: Any, name: str, then: Callable[..., None]) -> None:
    """Call a function after each call of an object's or a class's method, with its arguments."""
    original = getattr(holder, name)

    @wraps(original)
    def method(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        then(*args)

    setattr(holder, name, method)


def before(modules: Sequence[Any], name: str, then: Callable[[], None]) -> None:
    """Call a function before each call of a function that all these modules have."""
    original = getattr(modules[0], name)

    @wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        then()
        return original(*args, **kwargs)

    for module in modules:
        vars(module)[name] = patched


def refuse_other_workers(refuse: Callable[[str], None]) -> None:
    """Refuse workers that the script starts itself, and those that may take fewer steps than others.

    Under torch's `Join` a worker without data left waits for the steps of the others, which agree
    with it at each step whether to go on.
    """
    # both modules have the function; torch.multiprocessing.spawn as an attribute is no module
    starting = [sys.modules[f"torch.multiprocessing{end}"] for end in ("", ".spawn")]
    why = (
        "starts workers of its own (torch.multiprocessing.spawn); here each worker is a process "
        "already, as under torchrun: call the function that trains without spawn, with RANK, "
        "LOCAL_RANK and WORLD_SIZE from the environment"
    )
    before(starting, "start_processes", partial(refuse, why))

    def check(join: Join, *_: object) -> None:
        if join._enable and dist.get_world_size(join._process_group) > 1:
            refuse(
                "lets workers run out of data before others (torch's Join); here all take the same "
                "steps: give each as many batches, by DistributedSampler, or by even_batches=True "
                "in accelerate, and leave Join (join_uneven_inputs) out"
            )

    after(Join, "__init__", check)


def on_loopback_alone() -> None:
    """Make torch's store listen on the loopback interface only, if that is the store's address.

    By default the store listens on all interfaces and serves everybody who connects.
    """
    # imported by name, as the attribute `torch.distributed.rendezvous` is a function
    module = importlib.import_module("torch.distributed.rendezvous")
    original = module.TCPStore

    @wraps(original)
    def make_store(*place: Any, **given: Any) -> Any:
        given |= zip(
            ("host_name", "port", "world_size", "is_master", "timeout"), place, strict=False
        )
        if given["is_master"] and given["host_name"] in ("localhost", LOOPBACK):
            # an earlier store of this process may hold the port; torch then shares that store
            with suppress(OSError):
                listener = socket.create_server((LOOPBACK, given["port"]), backlog=1024)
                given["master_listen_fd"] = listener.detach()
        return original(**given)

    vars(module)["TCPStore"] = make_store


def before_forward(model: nn.Module, then: Callable[..., None]) -> RemovableHandle:
    """Call a function before each forward pass, with the module, its arguments and keywords.

    Copies of the module, and files that the script saves it to, do not have the hook.
    """
    return model.register_forward_pre_hook(_Uncopied(then), with_kwargs=True)


def after_forward(model: nn.Module, then: Callable[..., None]) -> RemovableHandle:
    """Call a function after each forward pass, with the module, its arguments and its output."""
    return model.register_forward_hook(_Uncopied(then))


class _Uncopied(partial[None]):
    """Hook whose copies do nothing, and can be loaded where this package is not installed."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # this method of the standard library takes any three arguments and returns None
        return getattr, (nullcontext(), "__exit__")


def at_first_call(
    modules: Iterable[nn.Module], then: Callable[..., None], around: Iterable[nn.Module] = ()
) -> None:
    """Call a function before the first forward pass of any of these modules, with its arguments.

    A pass of a module `around` all of them is taken instead once it has ended, if it has used their
    parameters without calling them: its class may go through the layers of an `nn.Sequential`
    itself, and calls inside what torch.compile returns go by unnoticed.
    """
    inner = list(modules)
    handles: list[Any] = []

    def begin(*call: Any) -> None:
        for handle in handles:
            handle.remove()
        then(*call)

    def end(module: nn.Module, args: object, kwargs: object, output: object) -> None:
        if reaches(output, {p for each in inner for p in each.parameters()}):
            begin(module, args, kwargs)

    handles += [before_forward(module, begin) for module in inner]
    handles += [each.register_forward_hook(_Uncopied(end), with_kwargs=True) for each in around]


def reaches(output: object, parameters: set[Tensor]) -> bool:
    """Tell whether a backward pass from a module's output comes to any of these parameters."""
    left = [tensor.grad_fn for tensor in tensors_of(output)]
    known = set[object]()
    while left:
        node = left.pop()
        if node is None or node in known:
            continue
        known.add(node)
        if getattr(node, "variable", None) in parameters:
            return True
        left += [each for each, _ in node.next_functions]
    return False


def after_closure(args: tuple[Any, ...], kwargs: Any, then: Callable[[int], None]) -> Any:
    """Call a function after each call of the closure in a step's arguments; return the new ones.

    The function gets the number of calls so far. Without a closure it is called at once, with 0.
    """
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        then(0)
        return None
    calls = itertools.count(1)

    @wraps(closure)
    def watched_closure() -> Any:
        loss = closure()
        then(next(calls))
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": watched_closure}
    return (args[0], watched_closure, *args[2:]), kwargs


def around_next(note: Callable[[object, object], None], listener: Any) -> None:
    """Note each batch of torch's loaders, and report the wait for it to a `Listener`.

    A thread that loads ahead of the script's steps, as prefetch_generator's does, waits for batches
    while the script computes: its waits are not the training's, which has waits of its own.
    """
    kind = dataloader._BaseDataLoaderIter
    original = kind.__next__
    clock = time.perf_counter
    wanted = listener.handler("batch_wanted")
    loaded = listener.batch_loaded
    of_script = get_ident()

    @wraps(original)
    def following(self: Any) -> Any:
        # no call of the listener, which is at work in the script's own thread
        if get_ident() != of_script:
            batch = original(self)
            note(self, batch)
            return batch
        if wanted is not None:
            wanted()
        started = clock()
        batch = original(self)
        note(self, batch)
        loaded(self, clock() - started)
        return batch

    kind.__next__ = following  # type: ignore[method-assign] # to note each batch


def watch_beginnings(then: Callable[[object], None]) -> None:
    """Call a function with each loader of torch before an iterator is made of it."""
    original = DataLoader.__iter__

    @wraps(original)
    def begin(self: DataLoader[Any]) -> Any:
        then(self)
        return original(self)

    DataLoader.__iter__ = begin  # type: ignore[method-assign] # to note each


def after_index(iterator: Any, then: Callable[[], None]) -> None:
    """Call a function once the sampler has drawn what belongs to an iterator's next batch."""
    original = iterator._next_index

    def next_index() -> Any:
        index = original()
        del iterator._next_index
        then()
        return index

    iterator._next_index = next_index
