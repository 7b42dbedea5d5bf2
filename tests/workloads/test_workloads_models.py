"""Models by name at sizes from 8 to 224 pixels: one of each family, or with TULA_FUZZ all; they suit small images."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from tests.fuzzing import TIMES
from tula_hpc.config import WorkloadSpec
from tula_hpc.config.workload import TORCHVISION_MODELS
from tula_hpc.errors import InputError
from tula_hpc.workloads.torchvision_models import build_model

# the smallest of each family
FAMILIES = (
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "googlenet", "inception_v3", "maxvit_t", "mnasnet0_5",
    "mobilenet_v2", "mobilenet_v3_small", "regnet_y_400mf", "resnet18", "shufflenet_v2_x0_5", "squeezenet1_1", "swin_t",
    "vgg11", "vgg11_bn", "vit_b_16",
)  # fmt: skip
# windows and patches leave nothing of small images; in other families no layer shrinks what is one pixel wide
WINDOWS = (
    "alexnet", "convnext_tiny", "densenet121", "googlenet", "inception_v3", "squeezenet1_1", "swin_t", "vgg11",
    "vit_b_16",
)  # fmt: skip
# at 64 pixels
LARGER = ("convnext_tiny", "maxvit_t", "swin_t", "vit_b_16")
CLASSES = 7
# all models of a family are built by the same code
MODELS = TORCHVISION_MODELS if TIMES else FAMILIES
# a family that is changed for small images, and one that is not
QUICK = ("alexnet", "resnet18")


def each(names: Iterable[str]) -> list[ParameterSet]:
    """Return models as parameters; all but two, which are built quickly, are left to `make test`."""
    return [pytest.param(name, marks=[pytest.mark.processes] * (name not in QUICK)) for name in names]


class MetaParameters(TorchFunctionMode):
    """A mode for parameters without memory; `torch.device("meta")` would also apply to regnet's own arithmetic."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].is_meta and func.__name__.strip("_") + "_" == func.__name__:
            # normal_, uniform_ and the like: nothing to initialise, and on meta they are slow
            return args[0]
        on_meta = {"device": "meta"} if func is torch.empty else {}
        return func(*args, **((kwargs or {}) | on_meta))


@functools.cache
def on_meta(name: str, image_size: int) -> nn.Module:
    """Return a model that no test changes: `functional_call` is given other parameters."""
    with MetaParameters():
        return build_model(WorkloadSpec(model=name), CLASSES, image_size)


def scaled(inputs: Tensor, _mean: object, _variance: object, weight: Tensor, bias: Tensor, *_: object) -> Tensor:
    """Replace a normalization, which takes torch two dozen steps on meta, with the same shape and parameters."""
    return inputs * (weight + bias)[:, None, None]


def meta_forward(model: nn.Module, image_size: int, *, graph: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the scores for two images and the parameters that they come from."""
    parameters = {name: torch.empty_like(p, device="meta", requires_grad=graph) for name, p in model.named_parameters()}
    buffers = {name: torch.empty_like(b, device="meta") for name, b in model.named_buffers()}
    images = torch.empty(2, 3, image_size, image_size, device="meta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "batch_norm", scaled)
        return functional_call(model, parameters | buffers, (images,)), parameters


def reached_by_backward(scores: Tensor) -> set[int]:
    """Return the ids of tensors that a backward pass would give a gradient to, by the graph, as the pass takes long."""
    reached: set[int] = set()
    ahead: list[Any] = [scores.grad_fn]
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        reached |= {id(node.variable)} if hasattr(node, "variable") else set()
        further = {following for following, _ in node.next_functions} - {None} - seen
        seen |= further
        ahead += further
    return reached


@pytest.mark.parametrize("name", each(MODELS))
def test_every_model_builds_with_the_right_number_of_classes(name: str) -> None:
    model = on_meta(name, 32)
    last = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)][-1]
    assert last.weight.shape[0] == CLASSES


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(pytest.param(name, 8, marks=[pytest.mark.processes] * (name not in QUICK)) for name in WINDOWS),
        *(pytest.param(name, 8, marks=pytest.mark.thorough) for name in FAMILIES if name not in (*WINDOWS, "maxvit_t")),
        ("alexnet", 64),
        *(pytest.param(name, 64, marks=pytest.mark.processes) for name in LARGER),
    ],
)
def test_small_images_of_other_sizes_are_accepted(name: str, size: int) -> None:
    assert meta_forward(on_meta(name, size), size)[0].shape == (2, CLASSES)


@pytest.mark.parametrize("name", each(FAMILIES))
def test_32_pixels_keep_their_resolution_and_reach_every_parameter(name: str) -> None:
    """DistributedDataParallel waits for ever for the gradient of a parameter that the loss does not depend on."""
    model = on_meta(name, 32)
    edges: list[int] = []
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    with first.register_forward_hook(lambda module, inputs, output: edges.append(output.shape[-1])):
        scores, parameters = meta_forward(model, 32, graph=True)
    assert scores.shape == (2, CLASSES)
    assert edges[0] == {"vit_b_16": 8, "convnext_tiny": 16, "swin_t": 16}.get(name, 32)
    reached = reached_by_backward(scores)
    assert [key for key, parameter in parameters.items() if id(parameter) not in reached] == []


@pytest.mark.parametrize("name", each(["resnet18", "inception_v3", "vit_b_16", "maxvit_t", "vgg11"]))
def test_large_images_get_the_published_model(name: str) -> None:
    import torchvision

    size = 299 if name == "inception_v3" else 224
    with MetaParameters():
        arguments = {"aux_logits": False, "init_weights": False} if name == "inception_v3" else {}
        published = torchvision.models.get_model(name, num_classes=CLASSES, **arguments)
    model = on_meta(name, size)
    assert {k: v.shape for k, v in model.state_dict().items()} == {
        k: v.shape for k, v in published.state_dict().items()
    }
    assert meta_forward(model, size)[0].shape == (2, CLASSES)


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [
        ("maxvit_t", 8, "the smallest is 32"),
        ("maxvit_t", 100, "multiple of 32"),
        ("vit_b_16", 12, "the smallest is 8"),
        ("vit_b_16", 100, "for example 96 or 112"),
        ("inception_v3", 70, "at least 75"),
    ],
)
def test_an_impossible_size_is_named(name: str, size: int, expected: str) -> None:
    with pytest.raises(InputError, match=expected) as raised:
        on_meta(name, size)
    assert raised.value.key == "workload.image_size"
    assert f"{name} cannot take images of {size} pixels" in str(raised.value)


@pytest.mark.parametrize("name", each(["vgg11", "alexnet", "squeezenet1_1"]))
def test_signals_and_gradients_are_of_a_size_that_trains(name: str) -> None:
    model = build_model(WorkloadSpec(model=name), CLASSES, 32)
    scores = model(torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    torch.autograd.backward(nn.functional.cross_entropy(scores, torch.arange(4)))
    norms = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
    assert 1e-3 < scores.std() < 30
    assert torch.isfinite(norms).all()
    assert norms.norm() > 1e-3


def test_weights_follow_from_the_seed_alone() -> None:
    def weights(seed: int) -> Tensor:
        # numbers drawn before must not matter
        torch.rand(seed + 3)
        return torch.cat(
            [p.flatten() for p in build_model(WorkloadSpec(model="squeezenet1_1", seed=seed), 3, 8).parameters()]
        )

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_building_draws_nothing_from_the_random_numbers_of_others() -> None:
    before = torch.get_rng_state()
    build_model(WorkloadSpec(model="squeezenet1_1"), 3, 8)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_small_vgg_has_no_head_of_a_hundred_million_weights() -> None:
    assert sum(p.numel() for p in on_meta("vgg11", 32).parameters()) < 11e6
    assert sum(p.numel() for p in on_meta("vgg11", 224).parameters()) > 100e6
