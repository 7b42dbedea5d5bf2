"""`[workload]` of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from tula_hpc.catalog import DATASETS, TORCHVISION_MODELS
from tula_hpc.config.entry_points import known_or_entry_point
from tula_hpc.config.mistakes import shown
from tula_hpc.config.spec import Spec


class WorkloadSpec(Spec):
    """`[workload]`: what is trained, on what, and how."""

    model: str = Field(default="resnet18", max_length=200)
    dataset: str = Field(default="digits", max_length=200)
    loss: str | None = Field(default=None, max_length=200)  # of one's own, for each sample; None: cross-entropy
    metric: str | None = Field(default=None, max_length=200)  # of one's own, share that is right; None: of labels
    data_dir: Path | None = None
    image_size: int | None = Field(default=None, ge=8, le=1024)
    samples: int | None = Field(
        default=None, ge=1, le=2**40
    )  # train on the first so many samples of a fixed random order; None = all
    holdout: float = Field(default=0.0, ge=0, lt=1)  # share of them that is not trained on but tested on
    classes: int | None = Field(default=None, ge=2, le=10**6)  # the first so many classes only; None = all
    epochs: int = Field(default=10, ge=1, le=100_000)
    precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    tf32: bool = True
    cudnn_benchmark: bool = True
    channels_last: bool = False
    activation_checkpointing: bool = False  # keep only the blocks' inputs, compute the rest again in the backward pass
    zero_stage: Literal[0, 1] = 0  # 1: each worker keeps its share of the optimizer's states
    augment: bool = True
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: float = Field(default=0.05, gt=0)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    weight_decay: float = Field(default=5e-4, ge=0)
    schedule: Literal["constant", "step", "cosine"] = "cosine"
    milestones: tuple[Annotated[int, Field(ge=0, le=100_000)], ...] = Field(default=(), max_length=1000)
    gamma: float = Field(default=0.1, gt=0, le=1)
    warmup_epochs: float = Field(default=0.0, ge=0)
    loader_workers: int = Field(default=2, ge=0, le=256)
    seed: int = Field(default=0, ge=0, lt=2**31)

    @field_validator("model")
    @classmethod
    def _model_exists(cls, value: str, info: ValidationInfo) -> str:
        what, given = "a torchvision classification model", ("classes", "image_size")
        return known_or_entry_point(value, TORCHVISION_MODELS, what, given, check_exists=_checks_paths(info))

    @field_validator("dataset")
    @classmethod
    def _dataset_exists(cls, value: str, info: ValidationInfo) -> str:
        return known_or_entry_point(value, DATASETS, "a data set", ("spec",), check_exists=_checks_paths(info))

    @field_validator("loss", "metric")
    @classmethod
    def _function_exists(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None:
            return None
        given = ("outputs", "targets")
        return known_or_entry_point(value, (), "a function", given, check_exists=_checks_paths(info))

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        if value is None:
            return None
        try:
            return value.expanduser().absolute()  # jobs and reports run from other folders
        except RuntimeError:
            raise ValueError(f"no home folder for {value.parts[0][:100]!r}") from None

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> WorkloadSpec:
        if self.schedule == "step" and not self.milestones:
            raise ValueError('milestones: schedule = "step" needs milestones, for example milestones = [50, 75]')
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError("milestones: expected increasing epochs, each once")
        if self.warmup_epochs >= self.epochs:
            raise ValueError(f"warmup_epochs: {self.warmup_epochs:g} leaves nothing of epochs = {self.epochs}")
        facts = DATASETS.get(self.dataset)
        if facts is not None and facts.on_disk and _checks_paths(info):
            _check_data_dir(self.dataset, self.data_dir)
        return self

    @property
    def most_samples(self) -> int | None:
        """At most so many training samples there are, where `samples` or the data set's name tells."""
        facts = DATASETS.get(self.dataset)
        return self.samples or (facts.train_samples if facts else None)

    @property
    def class_count(self) -> int | None:
        """How many classes there are to tell apart, where the data set's name or `classes` tells."""
        facts = DATASETS.get(self.dataset)
        return self.classes or (facts.classes if facts else None)

    @property
    def test_samples(self) -> int | None:
        """Size of the test set, where the data set's name and `classes` tell; its classes are of one size there.

        CIFAR as folders of images may hold other samples than the published ones.
        """
        facts = DATASETS.get(self.dataset)
        if facts is None or facts.test_samples is None:
            return None
        return round(facts.test_samples * (self.classes or 1) / (facts.classes or 1 if self.classes else 1))


def _checks_paths(info: ValidationInfo) -> bool:
    return bool((info.context or {}).get("check_paths", True))


def _check_data_dir(dataset: str, data_dir: Path | None) -> None:
    if data_dir is None:
        raise ValueError(f"data_dir: dataset = {dataset!r} needs the folder that holds it")
    try:
        found = data_dir.is_dir()
    except OSError as error:
        raise ValueError(f"data_dir: {shown(str(data_dir), 400)} cannot be read: {error.strerror}") from None
    if not found:
        raise ValueError(f"data_dir: no such folder: {shown(str(data_dir), 400)}")
