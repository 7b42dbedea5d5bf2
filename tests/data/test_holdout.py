"""Samples held out of the training set, and the samples that measure the training accuracy."""

from __future__ import annotations

from typing import Any

import torch

from tula_hpc.config import WorkloadSpec
from tula_hpc.data.datasets import build_data, training_samples


def count(data: Any) -> int:
    return len(data)


def images(data: Any) -> set[bytes]:
    return {image.numpy().tobytes() for image, _ in data.__getitems__(list(range(len(data))))}


def test_held_out_samples_are_training_samples_that_are_not_trained_on() -> None:
    whole = build_data(WorkloadSpec(augment=False))
    parts = build_data(WorkloadSpec(augment=False, holdout=0.2))
    total = count(whole.train)
    assert (count(parts.train), count(parts.test)) == (total - round(0.2 * total), round(0.2 * total))
    train, held = images(parts.train), images(parts.test)
    assert train | held == images(whole.train)
    # digits contain some images twice
    assert len(train & held) <= len(images(whole.train) & images(whole.test))
    assert not held & (images(whole.test) - images(whole.train))


def test_held_out_samples_are_the_same_for_every_seed_and_never_augmented() -> None:
    spec = WorkloadSpec(holdout=0.2)
    held = build_data(spec).test
    assert torch.equal(held[3][0], held[3][0])
    assert images(held) == images(build_data(spec.model_copy(update={"seed": 5})).test)
    assert images(held) == images(build_data(spec.model_copy(update={"augment": False})).test)


def test_accuracy_on_training_samples_is_measured_on_those_that_are_trained_on_as_they_are() -> None:
    spec = WorkloadSpec(holdout=0.2, samples=500, seed=3)
    plain = build_data(spec.model_copy(update={"augment": False})).train
    assert images(training_samples(spec)) == images(plain)
    some = training_samples(spec, most=50)
    assert count(some) == 50
    assert images(some) <= images(plain)
    assert images(some) == images(training_samples(spec, most=50))
