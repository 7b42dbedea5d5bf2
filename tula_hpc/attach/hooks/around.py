"""Call functions of ours before or after those of torch and of a script's models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


def after(thing: Any, name: str, then: Callable[..., None]) -> None:
    """Call a function after a method of an object, or of a class, with the same arguments."""
    original = getattr(thing, name)

    @wraps(original)
    def method(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        then(*args)

    setattr(thing, name, method)


def before(modules: Sequence[Any], name: str, then: Callable[[], None]) -> None:
    """Call a function before one that these modules share."""
    original = getattr(modules[0], name)

    @wraps(original)
    def told(*args: Any, **kwargs: Any) -> Any:
        then()
        return original(*args, **kwargs)

    for module in modules:
        vars(module)[name] = told


def before_forward(model: nn.Module, then: Callable[..., None]) -> RemovableHandle:
    """Call a function before each forward pass, with the module, its arguments and keywords.

    Copies of the module, and files that the script saves it to, are without it.
    """
    return model.register_forward_pre_hook(_Uncopied(then), with_kwargs=True)


def after_forward(model: nn.Module, then: Callable[..., None]) -> RemovableHandle:
    """Call a function after each forward pass, with the module, its arguments and its output."""
    return model.register_forward_hook(_Uncopied(then))


class _Uncopied:
    """Hook of which copies do nothing, and can be loaded where this package is not."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __call__(self, *call: Any) -> None:
        self.function(*call)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # a method of the standard library that takes any three arguments and returns None
        return getattr, (nullcontext(), "__exit__")


def at_first_call(modules: Iterable[nn.Module], then: Callable[..., None]) -> None:
    """Call a function before the first forward pass of any of these modules, with its arguments."""
    handles: list[Any] = []

    def begin(*call: Any) -> None:
        for handle in handles:
            handle.remove()
        then(*call)

    handles += [before_forward(module, begin) for module in modules]
