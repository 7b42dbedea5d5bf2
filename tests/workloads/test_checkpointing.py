"""Activation checkpointing keeps less memory, and changes nothing else."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tula_hpc.config import WorkloadSpec
from tula_hpc.errors import InputError
from tula_hpc.gradients.reference_gradient import reference_gradient
from tula_hpc.workloads.activation_checkpointing import checkpoint_activations
from tula_hpc.workloads.fake_steps import Shapes, count
from tula_hpc.workloads.torchvision_models import build_model
from tula_hpc.workloads.workload import build_workload

# residual blocks; a list of layers with dropout; stochastic depth; blocks within blocks
MODELS = ("resnet18", "alexnet", "efficientnet_b0", "googlenet")
COMPACT = "tula_hpc.workloads.small_cnns:medium_cnn"
# many small ones, one within another
BLOCKS = f"{__name__}:blocks"
SIZE, CLASSES = 16, 7


def model_of(name: str, *, checkpointed: bool) -> nn.Module:
    model = build_model(WorkloadSpec(model=name), CLASSES, SIZE)
    return checkpoint_activations(model) if checkpointed else model


def batch(samples: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, 3, SIZE, SIZE, generator=generator), torch.arange(samples) % CLASSES


def step(model: nn.Module) -> list[Tensor]:
    """Return the loss, gradients, buffers and the random numbers that come next."""
    inputs, targets = batch()
    torch.manual_seed(3)
    loss = cross_entropy(model(inputs), targets)
    torch.autograd.backward(loss)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), torch.rand(3), *gradients, *model.buffers()]


@pytest.mark.parametrize("name", [*(pytest.param(name, marks=pytest.mark.processes) for name in MODELS), COMPACT])
def test_a_step_is_the_same_bit_for_bit(name: str) -> None:
    plain, checkpointed = (step(model_of(name, checkpointed=on)) for on in (False, True))
    assert len(plain) == len(checkpointed)
    assert all(torch.equal(one, other) for one, other in zip(plain, checkpointed, strict=True))


def test_running_statistics_move_once() -> None:
    model = model_of(BLOCKS, checkpointed=True)
    step(model)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert [int(norm.num_batches_tracked) for norm in norms if norm.num_batches_tracked is not None] == [1] * len(norms)


def test_evaluation_and_names_stay_as_they_are() -> None:
    plain, checkpointed = (model_of("alexnet", checkpointed=on).eval() for on in (False, True))
    assert list(plain.state_dict()) == list(checkpointed.state_dict())
    with torch.no_grad():
        assert torch.equal(plain(batch()[0]), checkpointed(batch()[0]))


def test_a_copy_computes_with_its_own_weights() -> None:
    model = model_of(BLOCKS, checkpointed=True)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    expected = step(model_of(BLOCKS, checkpointed=False))
    assert all(torch.equal(one, another) for one, another in zip(step(other), expected, strict=True))


def test_the_reference_gradient_is_the_same() -> None:
    inputs, targets = batch(4)
    found = []
    for on in (False, True):
        model = model_of(BLOCKS, checkpointed=on)
        before = [buffer.clone() for buffer in model.buffers()]
        gradients = reference_gradient(model, cross_entropy, inputs, targets, list(model.parameters()))
        assert all(torch.equal(old, new) for old, new in zip(before, model.buffers(), strict=True))
        found.append(torch.cat([g.flatten() for g in gradients if g is not None]))
    assert torch.equal(*found)


def blocks(classes: int, image_size: int) -> nn.Module:
    """Return a model for `model = "tests.workloads.test_checkpointing:blocks"`."""
    body = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(8)]
    pairs = [nn.Sequential(*body[i : i + 2]) for i in range(0, len(body), 2)]
    stages = nn.ModuleDict({"one": nn.Sequential(*pairs[:2]), "two": nn.Sequential(*pairs[2:])})
    return nn.Sequential(nn.Conv2d(3, 8, 1), *stages.values(), nn.Flatten(), nn.Linear(8 * image_size**2, classes))


def layers(classes: int, image_size: int) -> nn.Module:
    """Return a model for `model = "tests.workloads.test_checkpointing:layers"`."""
    body = [layer for _ in range(4) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(3, 8, 1), *body, nn.Flatten(), nn.Linear(8 * image_size**2, classes))


@pytest.mark.processes
@pytest.mark.parametrize("name", ["blocks", "layers"])
def test_less_is_kept_for_the_backward_pass(name: str) -> None:
    shapes, model = Shapes.of_images(SIZE, CLASSES), f"{__name__}:{name}"
    specs = [WorkloadSpec(model=model, activation_checkpointing=on) for on in (False, True)]
    plain, checkpointed = (count(spec, shapes, 1, "cpu", (64, 128), fake=True).per_sample for spec in specs)
    assert checkpointed < 0.7 * plain


def test_a_model_without_blocks_is_refused_and_the_key_named() -> None:
    with pytest.raises(InputError, match="Sequential has no blocks") as raised:
        checkpoint_activations(nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2)))
    assert raised.value.key == "workload.activation_checkpointing"


def test_the_option_reaches_the_workload() -> None:
    workload = build_workload(WorkloadSpec(model=COMPACT, dataset="digits", activation_checkpointing=True))
    assert "forward" in vars(workload.model)
