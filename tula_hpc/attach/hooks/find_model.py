"""Find the models of a script by nothing but the parameters that its optimizers hold."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator, Sequence
from inspect import isfunction
from typing import TypeVar

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tula_hpc.attach.hooks.patches import before

T = TypeVar("T")
NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)
WRAPPERS = (DistributedDataParallel, nn.DataParallel)
# attributes in which the wrappers of torch.compile and Lightning's Fabric hold the model
WRAPPED = ("_orig_mod", "_forward_module")
# modules and optimizers that a script has frozen, by id
FROZEN = weakref.WeakValueDictionary[int, object]()


def size_of(model: nn.Module) -> int:
    """Return the number of elements in all parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters())


def modules_with(owned: set[Tensor]) -> list[nn.Module]:
    """Return the modules that have all of these parameters and the fewest others, inner ones first.

    A wrapper has the same parameters as the module inside it, but one module more.
    """
    holders = _holders_of(owned)
    return [module for size, module in holders if size == holders[0][0]]


def larger_than(model: nn.Module) -> list[nn.Module]:
    """Return the modules that have all of a model's parameters and others, the smallest first."""
    holders = _holders_of(set(model.parameters()))
    return [module for size, module in holders if size > holders[0][0]]


def _holders_of(owned: set[Tensor]) -> list[tuple[int, nn.Module]]:
    """Return the modules that have these parameters, by their sizes, inner ones first."""
    holders = []
    for module in _called():
        if owned <= set(module.parameters()):
            holders.append((size_of(module), len(list(module.modules())), module))
    holders.sort(key=lambda each: each[:2])
    return [(size, module) for size, _, module in holders]


def parts_with(owned: set[Tensor]) -> list[nn.Module]:
    """Return the largest modules that have no parameters but these, inner ones first.

    An optimizer may train several models that no common module holds, as a CycleGAN's does.
    """
    parts = [module for module in _called() if owned.issuperset(module.parameters())]
    largest = max(parts, key=size_of, default=None)
    if largest is None or not size_of(largest):
        return []
    return modules_with(set(largest.parameters()))


def _called() -> Iterator[nn.Module]:
    """Yield all existing modules that a script may call."""
    return (each for each in objects_of(nn.Module) if not issubclass(type(each), NEVER_CALLED))


def watch_freezing() -> None:
    """Note modules and optimizers whenever `gc.freeze` is about to hide them.

    Scripts call it before they start processes, so that these share their memory.
    """
    before((gc,), "freeze", _note_frozen)


def _note_frozen() -> None:
    for kind in (nn.Module, Optimizer):
        for instance in objects_of(kind):
            FROZEN[id(instance)] = instance


def objects_of(kind: type[T]) -> Iterator[T]:
    """Yield all existing objects of a class."""
    known = set[int]()
    for instance in itertools.chain(list(FROZEN.values()), gc.get_objects()):
        # not isinstance: it asks for `__class__`, which makes lazy objects of libraries load
        if issubclass(type(instance), kind) and id(instance) not in known:
            known.add(id(instance))
            yield instance


def name_of(model: nn.Module) -> str:
    """Return the class name of a model, by the outermost module around it that is no wrapper."""
    if isinstance(model, DistributedDataParallel):
        return type(_unwrapped(model.module)).__name__
    for module in reversed(modules_with(set(model.parameters()))):
        if not isinstance(module, WRAPPERS) and _inner_of(module) is None:
            return type(module).__name__
    return type(model).__name__


def _unwrapped(model: nn.Module) -> nn.Module:
    inner = _inner_of(model)
    return model if inner is None else _unwrapped(getattr(model, inner))


def _inner_of(model: nn.Module) -> str | None:
    """Return the attribute in which a wrapper holds the model; None: it is no such wrapper."""
    return next((name for name in WRAPPED if hasattr(model, name)), None)


def as_wrapped(model: nn.Module) -> nn.Module:
    """Return the module that several workers would wrap: Lightning wraps all of its module.

    That may hold other models with optimizers of their own, as a GAN does.
    """
    if isinstance(model, DistributedDataParallel):
        return model
    owned = set(model.parameters())
    trained = filter(_is_in_lightning, objects_of(nn.Module))
    around = (each for each in trained if owned <= set(each.parameters()))
    return max(around, key=size_of, default=model)


def _is_in_lightning(module: nn.Module) -> bool:
    """Tell whether Lightning's Trainer trains a module."""
    kinds = {kind.__name__ for kind in type(module).__mro__}
    return "LightningModule" in kinds and getattr(module, "_trainer", None) is not None


def methods_of(model: nn.Module) -> list[str]:
    """Return the public methods that a class of the script's own adds to those of `nn.Module`."""
    kind = type(model)
    if kind.__module__.startswith("torch."):
        return []
    found = [name for name, value in vars(kind).items() if isfunction(value)]
    return [name for name in found if not (name.startswith("_") or hasattr(nn.Module, name))]


def is_sharded(model: nn.Module) -> bool:
    """Tell whether FSDP shards a model or a part of it, or wraps it."""
    modules = (*modules_with(set(model.parameters())), *model.modules())
    names = {each.__name__ for module in modules for each in type(module).__mro__}
    return not names.isdisjoint({"FullyShardedDataParallel", "FSDPModule"})


def model_of(optimizer: Optimizer) -> str:
    """Return the name of the model that an optimizer changes; "": no module has all parameters."""
    found = modules_with(parameters_of(optimizer))
    return name_of(found[0]) if found else ""


def parameters_of(optimizer: Optimizer) -> set[Tensor]:
    """Return the parameters that an optimizer changes."""
    return {p for group in optimizer.param_groups for p in group["params"]}


def trained_parameters() -> set[Tensor]:
    """Return the parameters of all optimizers, whether these have stepped or not."""
    return set[Tensor]().union(*map(parameters_of, objects_of(Optimizer)))


def trained_apart(known: Sequence[Optimizer | None], owned: set[Tensor]) -> Iterator[set[Tensor]]:
    """Yield the parameters of each optimizer that is not `known` and has none of `owned`."""
    for each in objects_of(Optimizer):
        others = parameters_of(each)
        # frozen parameters may stay so for long, as those below a head that is trained first
        is_frozen = not any(parameter.requires_grad for parameter in others)
        if not is_frozen and owned.isdisjoint(others) and all(each is not one for one in known):
            yield others


def wrapped_and_trained(counted: str | None) -> list[DistributedDataParallel]:
    """Return the wrapped models that may count and that any optimizer trains."""
    trained = trained_parameters()
    models = (each for each in objects_of(DistributedDataParallel) if is_named(each, counted))
    return [each for each in models if not trained.isdisjoint(each.parameters())]


def is_named(model: DistributedDataParallel, name: str | None) -> bool:
    """Tell whether a wrapped model has a class of this name; None: any model has."""
    return name in (None, type(model.module).__name__, name_of(model))


def why_unheld(optimizer: Optimizer) -> str:
    """Return why the steps of an optimizer are not counted; "" if any module is trained.

    Without gradients it trains nothing, as where its steps only show a schedule of learning rates.
    """
    if all(parameter.grad is None for parameter in parameters_of(optimizer)):
        return ""
    trained = trained_parameters()
    if not all(trained.isdisjoint(module.parameters()) for module in objects_of(nn.Module)):
        return ""
    return (
        f"trains by {type(optimizer).__name__} only parameters that no torch.nn.Module has; have a "
        "module hold them, and call it; if a model is trained later, name it by "
        "workload.counted_model"
    )


def why_repeated(optimizer: str) -> str:
    """Return why an optimizer of this class, which evaluates the loss repeatedly, is refused."""
    return (
        f"has an optimizer, {optimizer}, that calls its closure several times in a step; expected "
        "one that calls it once, as SGD or AdamW do"
    )


def trained_in(model: nn.Module) -> list[Tensor]:
    """Return the trained parameters of a model, without those of a teacher inside it."""
    able: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    owned = trained_parameters()
    # none is found where the optimizer holds copies of the parameters
    return [p for p in able if p in owned] or able
