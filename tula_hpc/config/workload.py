"""`[workload]` of a sweep, and the models and data sets that it may name.

Neither torch nor a user's module is imported to check a name: the package's own names are listed
here (a test compares the models with torchvision), and a user's function is looked up in its
source.

Instead of model, data and training procedure, a sweep may name the user's own training script. Then
only two groups of keys count: those for scripts (`OF_SCRIPTS`), and those that scripts share with
the built-in training (`OF_BOTH`).
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from tula_hpc.config.validation import (
    MODULE_PATTERN,
    Needs,
    Spec,
    known_or_entry_point,
    nearest,
    shown,
    where_looked,
)
from tula_hpc.own_sources import program_of, source_of


class DatasetFacts(NamedTuple):
    """Facts about a data set that are known before it is opened."""

    # True if the data set needs data_dir
    on_disk: bool
    # default edge of the images, pixels
    image_size: int
    # None: counted in data_dir
    classes: int | None
    # None: counted in data_dir, or a test set is split off the whole data set
    test_samples: int | None = None
    # None: counted in data_dir, which may hold other samples than the published ones
    train_samples: int | None = None


DATASETS: dict[str, DatasetFacts] = {
    "digits": DatasetFacts(
        on_disk=False, image_size=8, classes=10, test_samples=359, train_samples=1438
    ),
    "synthetic": DatasetFacts(
        on_disk=False, image_size=32, classes=10, test_samples=512, train_samples=2048
    ),
    "cifar10": DatasetFacts(on_disk=True, image_size=32, classes=10, test_samples=10_000),
    "cifar100": DatasetFacts(on_disk=True, image_size=32, classes=100, test_samples=10_000),
    "caltech101": DatasetFacts(on_disk=True, image_size=224, classes=101),
    "caltech256": DatasetFacts(on_disk=True, image_size=224, classes=256),
    "imagenet": DatasetFacts(on_disk=True, image_size=224, classes=1000, test_samples=50_000),
    "imagefolder": DatasetFacts(on_disk=True, image_size=224, classes=None),
}

# output of torchvision.models.list_models(module=torchvision.models) in torchvision 0.26
_NAMES = """
    alexnet convnext_base convnext_large convnext_small convnext_tiny densenet121 densenet161
    densenet169 densenet201 efficientnet_b0 efficientnet_b1 efficientnet_b2 efficientnet_b3
    efficientnet_b4 efficientnet_b5 efficientnet_b6 efficientnet_b7 efficientnet_v2_l
    efficientnet_v2_m efficientnet_v2_s googlenet inception_v3 maxvit_t mnasnet0_5 mnasnet0_75
    mnasnet1_0 mnasnet1_3 mobilenet_v2 mobilenet_v3_large mobilenet_v3_small regnet_x_16gf
    regnet_x_1_6gf regnet_x_32gf regnet_x_3_2gf regnet_x_400mf regnet_x_800mf regnet_x_8gf
    regnet_y_128gf regnet_y_16gf regnet_y_1_6gf regnet_y_32gf regnet_y_3_2gf regnet_y_400mf
    regnet_y_800mf regnet_y_8gf resnet101 resnet152 resnet18 resnet34 resnet50 resnext101_32x8d
    resnext101_64x4d resnext50_32x4d shufflenet_v2_x0_5 shufflenet_v2_x1_0 shufflenet_v2_x1_5
    shufflenet_v2_x2_0 squeezenet1_0 squeezenet1_1 swin_b swin_s swin_t swin_v2_b swin_v2_s
    swin_v2_t vgg11 vgg11_bn vgg13 vgg13_bn vgg16 vgg16_bn vgg19 vgg19_bn vit_b_16 vit_b_32 vit_h_14
    vit_l_16 vit_l_32 wide_resnet101_2 wide_resnet50_2
"""
TORCHVISION_MODELS: tuple[str, ...] = tuple(_NAMES.split())


# keys of [workload] that only a script has
OF_SCRIPTS = frozenset({
    "script", "module", "arguments", "resume_arguments", "accumulation", "counted_model",
    "hang_minutes",
})  # fmt: skip
# keys that scripts and the built-in training share
OF_BOTH = frozenset({"metric", "samples", "epochs", "seed"})
# names that a script's arguments may hold in braces, and what replaces each
PLACEHOLDERS = {
    "local_batch": "samples of one forward pass of one worker",
    "global_batch": "samples of a step over all workers",
    "accumulation": "forward passes of a step: workload.accumulation, or more to save memory",
    "nodes": "nodes",
    "workers": "workers on all nodes",
    "epochs": "workload.epochs",
    "steps": "optimizer steps of all epochs at this batch",
    "lr_scale": "factor of the learning rate for this batch, by training.method",
    "seed": "workload.seed",
    "run_dir": "folder of this profile or training",
}
# an option and its value in one argument: no shell splits them
OPTION_WITH_VALUE = re.compile(r"--?[\w-]+\s+\{")
# the arguments have to hold at least one of these placeholders
CARRY_THE_BATCH = frozenset({"local_batch", "global_batch"})
# endings of files of settings, which a script may take instead of options
SETTINGS = (".json", ".yaml", ".yml", ".toml")
# a placeholder with or without a factor; ${...} is not one, but the script's own
PLACEHOLDER = re.compile(r"(?<!\$)\{([A-Za-z_]\w*)(?:\*(\d+(?:\.\d+)?(?:[eE]-?\d+)?))?\}")
# groups of workload.metric, of which it needs at least one
METRIC_GROUPS = ("test_accuracy", "test_loss")
Argument = Annotated[str, Field(max_length=10_000)]
Epoch = Annotated[int, Field(ge=0, le=100_000)]
OF_STEPS = Needs("schedule", ("step",))
# keys that name a function: this package's own names, what it is, and what it is called with
_NAMED: dict[str, tuple[Collection[str], str, tuple[str, ...]]] = {
    "model": (TORCHVISION_MODELS, "a torchvision classification model", ("classes", "image_size")),
    "dataset": (DATASETS, "a data set", ("spec",)),
    "loss": ((), "a function", ("outputs", "targets")),
    "metric": ((), "a function", ("outputs", "targets")),
}


class WorkloadSpec(Spec):
    """`[workload]`: model, data and training procedure, or a script that has all of these."""

    model: str = Field(default="resnet18", max_length=200)
    """A torchvision classifier, or your own as "package.module:function"."""
    dataset: str = Field(default="digits", max_length=200)
    """Data set by name, image folders (imagefolder), or your own as "package.module:function"."""
    loss: str | None = Field(default=None, max_length=200)
    """Your own function for the loss of each sample; without it cross-entropy of labels."""
    # above `metric`, whose check depends on `script` and `module`
    script: Path | None = None
    """Your own training script, in the working directory or beside the sweep file."""
    module: str | None = Field(default=None, max_length=200, pattern=MODULE_PATTERN)
    """Your own training script as a module, run as with `python -m`."""
    arguments: tuple[Argument, ...] = Field(default=(), max_length=1000)
    """Arguments of the script, with names in braces for values that the sweep chooses."""
    resume_arguments: tuple[Argument, ...] | None = Field(default=None, max_length=1000)
    """Arguments appended when the script resumes after an interruption; [] if it needs none.
    Without this key it begins anew.
    """
    accumulation: int = Field(default=1, ge=1, le=2**20)
    """Forward passes in a step of the script, a power of two; with {accumulation} in `arguments`
    the least number.
    """
    counted_model: str | None = Field(default=None, max_length=200)
    """Class of the model whose steps count, if a script has several; without it the largest."""
    hang_minutes: float = Field(default=30.0, ge=0, le=1e6)
    """Minutes without a sign of life after which a script counts as hanging; 0: no limit."""
    metric: str | None = Field(default=None, max_length=200)
    """Your own function for the share of each sample that is right; with a script, a regular
    expression for its output.
    """
    data_dir: Path | None = None
    """Folder of the data; digits and synthetic need none."""
    image_size: int | None = Field(default=None, ge=8, le=1024)
    """Edge of the images; without it the data set's own."""
    samples: int | None = Field(default=None, ge=1, le=2**40)
    """Number of training samples, a fixed random choice; without it all. Required with a script:
    the samples of one epoch.
    """
    test_samples: Annotated[int | None, Needs("holdout", (0.0,))] = Field(
        default=None, ge=1, le=2**40
    )
    """Number of test samples, a fixed random choice; without it all."""
    holdout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the training samples that is left out of training and replaces the test set."""
    classes: int | None = Field(default=None, ge=2, le=10**6)
    """Number of classes to use, the first ones; without it all."""
    epochs: int = Field(default=10, ge=1, le=100_000)
    """Epochs of the whole training."""
    precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Precision of the computation; weights stay fp32."""
    tf32: bool = True
    """Round factors of fp32 products to 10 bits on GPUs since A100, for several times the speed."""
    cudnn_benchmark: bool = True
    """Let cuDNN try its kernels at the first step; false for trainings that repeat bit for bit."""
    channels_last: bool = False
    """Use the memory layout that suits convolutions on new GPUs."""
    activation_checkpointing: bool = False
    """Keep only the blocks' inputs, and compute the rest again in the backward pass."""
    zero_stage: Literal[0, 1] = 0
    """1: each worker keeps only its share of the optimizer's states."""
    augment: bool = True
    """Crop and flip at random, as is usual for the data set."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """Optimizer that the method works with."""
    lr: float = Field(default=0.05, gt=0)
    """Learning rate at `training.base_batch`."""
    momentum: Annotated[float, Needs("optimizer", ("sgd",))] = Field(default=0.9, ge=0, lt=1)
    """Momentum of sgd."""
    weight_decay: float = Field(default=5e-4, ge=0)
    """Weight decay."""
    schedule: Literal["constant", "step", "cosine"] = "cosine"
    """Learning-rate schedule: constant, lowered at milestones (step), or falling to 0 (cosine)."""
    milestones: Annotated[tuple[Epoch, ...], OF_STEPS] = Field(default=(), max_length=1000)
    """Epochs at which `schedule = "step"` multiplies the learning rate by `gamma`."""
    gamma: Annotated[float, OF_STEPS] = Field(default=0.1, gt=0, le=1)
    """Factor of the learning rate at a milestone."""
    warmup_epochs: float = Field(default=0.0, ge=0)
    """Epochs over which the learning rate grows to its value."""
    loader_workers: int = Field(default=2, ge=0, le=256)
    """Loader processes of each worker."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of weights, order and augmentation."""

    @field_validator("model", "dataset", "loss", "metric")
    @classmethod
    def _exists(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None:
            return None
        if info.field_name == "metric" and (info.data.get("script") or info.data.get("module")):
            return _expression(value)
        return known_or_entry_point(value, *_NAMED[str(info.field_name)], info.context)

    @field_validator("data_dir", "script", mode="before")
    @classmethod
    def _not_empty(cls, value: object) -> object:
        if value == "":
            # an empty path would mean the working directory
            raise ValueError("expected a path, got an empty text")
        return value

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return None if value is None else _from_home(value, "folder")

    @field_validator("script")
    @classmethod
    def _in_either_folder(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        sweep_folder = (info.context or {}).get("sweep_folder")
        return None if value is None else find_script(value, sweep_folder)

    @model_validator(mode="after")
    def _script_is_whole(self, info: ValidationInfo) -> WorkloadSpec:
        given = self.model_fields_set
        if not self.is_script:
            for key in sorted(OF_SCRIPTS - {"script", "module"}):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(
                        f"{key}: belongs to a training script; set script or module, or remove it"
                    )
            return self
        if self.script is not None and self.module is not None:
            raise ValueError("module: expected either script or module")
        idle = [key for key in type(self).model_fields if key in given - OF_SCRIPTS - OF_BOTH]
        if idle:
            raise ValueError(
                f"{idle[0]}: the script has its own {' and '.join(idle)}; remove what is set here"
            )
        for key, remedy in (("samples", "as `tula attach` prints it"), ("epochs", "epochs = 90")):
            if key not in given:
                raise ValueError(f"{key}: is required with a script; add it, {remedy}")
        _check_placeholders(self.arguments, self.resume_arguments or ())
        if self.accumulation & (self.accumulation - 1):
            raise ValueError(
                f"accumulation: expected a power of two, as batches are, got {self.accumulation}"
            )
        if _checks_paths(info):
            _check_script(self.script, self.module, (info.context or {}).get("sweep_folder"))
        return self

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> WorkloadSpec:
        if self.schedule == "step" and not self.milestones:
            raise ValueError(
                'milestones: schedule = "step" needs milestones, for example milestones = [50, 75]'
            )
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError("milestones: expected increasing epochs, each once")
        if self.warmup_epochs >= self.epochs:
            raise ValueError(
                f"warmup_epochs: expected less than epochs = {self.epochs}, "
                f"got {self.warmup_epochs:g}"
            )
        facts = DATASETS.get(self.dataset)
        # the user's own data set need not have a folder
        needed = facts.on_disk if facts is not None else self.data_dir is not None
        if needed and not self.is_script and _checks_paths(info):
            _check_data_dir(self.dataset, self.data_dir)
        return self

    @model_serializer(mode="wrap")
    def _own_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # a key that this kind of workload lacks would count as given when the file is read again
        found: dict[str, Any] = handler(self)
        own = OF_SCRIPTS | OF_BOTH if self.is_script else found.keys() - OF_SCRIPTS
        return {key: value for key, value in found.items() if key in own}

    @property
    def is_script(self) -> bool:
        """True if the user's own script is trained."""
        return self.script is not None or self.module is not None

    @property
    def goes_on(self) -> bool:
        """True if a script resumes from its own checkpoint after an interruption."""
        return self.resume_arguments is not None

    @property
    def script_name(self) -> str:
        """Name of the script, for messages."""
        return self.script.name if self.script is not None else str(self.module)

    @property
    def what_is_trained(self) -> str:
        """Name of the script, or of model and data, for headings."""
        if self.is_script:
            return self.script_name
        model, data = (name.rpartition(":")[2] for name in (self.model, self.dataset))
        return f"{model} on {data}"

    @property
    def placeholders(self) -> frozenset[str]:
        """Names in braces that the script's arguments hold."""
        return frozenset(_placeholders_in((*self.arguments, *(self.resume_arguments or ()))))

    @property
    def accumulates(self) -> bool:
        """True if the script's arguments pass it the number of forward passes in a step."""
        return "accumulation" in _placeholders_in(self.arguments)

    @property
    def entry_points(self) -> list[str]:
        """The user's own functions ("package.module:function"), or the script's file or module."""
        if self.is_script:
            return [str(self.script or self.module)]
        named = (self.model, self.dataset, self.loss, self.metric)
        return [name for name in named if name is not None and ":" in name]

    @property
    def names_data(self) -> bool:
        """False if the data set is on disk and no folder is given."""
        facts = DATASETS.get(self.dataset)
        return self.data_dir is not None or facts is None or not facts.on_disk

    @property
    def reads_files(self) -> bool:
        """True if data may be in files: a folder is given or needed, or a script has its own."""
        facts = DATASETS.get(self.dataset)
        on_disk = facts is not None and facts.on_disk
        return self.is_script or self.data_dir is not None or on_disk

    @property
    def most_samples(self) -> int | None:
        """Upper bound of the training set's size, samples; None if unknown."""
        if self.samples or self.dataset not in DATASETS:
            return self.samples
        return DATASETS[self.dataset].train_samples

    @property
    def class_count(self) -> int | None:
        """Number of classes; None if only the data show it."""
        if self.is_script:
            return None
        if self.classes or self.dataset not in DATASETS:
            return self.classes
        return DATASETS[self.dataset].classes

    @property
    def test_set_size(self) -> int | None:
        """Size of the test set or of what is held out; None if only the data show it.

        All classes are taken to have equal size. CIFAR as folders of images may hold other samples
        than the published ones.
        """
        if self.is_script:
            return None
        if self.holdout:
            known = None if self.classes else self.most_samples
            return None if known is None else max(1, round(self.holdout * known))
        if self.test_samples is not None:
            return self.test_samples
        facts = DATASETS.get(self.dataset)
        if facts is None or facts.test_samples is None:
            return None
        if self.classes is None:
            return facts.test_samples
        return round(facts.test_samples * self.classes / (facts.classes or 1))


def find_script(named: Path, sweep_folder: Path | None) -> Path:
    """Look for a script in the working directory, then beside the sweep file.

    Raises:
        ValueError: The path begins with the home folder of an unknown user.
    """
    here = _from_home(named, "file")
    # unlike `Path.exists`, os.access does not raise where it may not look
    if sweep_folder is None or os.access(here, os.F_OK):
        return here
    # normalized, so that ../ does not give one script two paths
    there = Path(os.path.normpath(Path(sweep_folder).absolute() / named))
    return there if os.access(there, os.F_OK) else here


def _from_home(path: Path, what: str) -> Path:
    try:
        # absolute, because jobs and reports run in other folders
        return path.expanduser().absolute()
    except RuntimeError:
        raise ValueError(
            f"no home folder for {path.parts[0][:100]!r}; expected an existing {what}"
        ) from None


def _expression(text: str) -> str:
    try:
        groups = re.compile(text).groupindex
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{shown(text)} is not a regular expression: {error}") from None
    if groups.keys().isdisjoint(METRIC_GROUPS):
        raise ValueError(
            f"{shown(text)}: with a script, expected a regular expression for its output with a "
            r"group named test_accuracy or test_loss, for example 'Acc@1 (?P<test_accuracy>[\d.]+)'"
        )
    return text


def _placeholders_in(arguments: Iterable[str]) -> list[str]:
    return [name for text in arguments for name, _ in PLACEHOLDER.findall(text)]


def _check_placeholders(arguments: Sequence[str], resuming: Sequence[str]) -> None:
    """Refuse unknown names in braces, and arguments that do not carry the batch."""
    known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
    for key, texts in (("arguments", arguments), ("resume_arguments", resuming)):
        for text in texts:
            if OPTION_WITH_VALUE.match(text):
                words = ", ".join(f'"{word}"' for word in text.split())
                raise ValueError(f'{key}: "{text}" is one word with a space; expected {words}')
        for name, factor in itertools.chain.from_iterable(map(PLACEHOLDER.findall, texts)):
            if name == "run_dir" and factor:
                raise ValueError(f"{key}: {{run_dir}} is a folder and takes no factor")
            if name not in PLACEHOLDERS:
                raise ValueError(
                    f"{key}: {{{name}}} is unknown{nearest(name, PLACEHOLDERS)}; known are {known}"
                )
    if CARRY_THE_BATCH.isdisjoint(_placeholders_in(arguments)):
        raise ValueError(
            "arguments: none carries the batch; expected {local_batch} (samples of one forward "
            f"pass of one worker) or {{global_batch}} in one of them; known are {known}"
        )


def _check_script(script: Path | None, module: str | None, sweep_folder: Path | None) -> None:
    """Refuse a script that does not exist or is not valid Python; import nothing."""
    key = "script" if script is not None else "module"
    path = script if script is not None else program_of(str(module))
    if path is None:
        raise ValueError(
            f"module: no module {module!r} that can be run, {where_looked(str(module), sweep_folder)}"
        )
    try:
        if path.is_dir():
            raise ValueError(f"{shown(str(path), 400)} is a folder; expected a training script")
        if not path.is_file():
            raise ValueError(f"no such file: {shown(str(path), 400)}; check the path")
        source_of(path)
    except OSError as error:
        message = f"{shown(str(path), 400)} cannot be read: {error.strerror}"
        raise ValueError(f"{key}: {message}") from None
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _checks_paths(info: ValidationInfo) -> bool:
    return bool((info.context or {}).get("check_paths", True))


def _check_data_dir(dataset: str, data_dir: Path | None) -> None:
    if data_dir is None:
        raise ValueError(
            f"data_dir: dataset = {dataset!r} needs the folder that holds it; set workload.data_dir"
        )
    shown_path = shown(str(data_dir), 400)
    try:
        # the user's own data set may read a single file
        found = data_dir.is_dir() if dataset in DATASETS else data_dir.exists()
    except OSError as error:
        raise ValueError(f"data_dir: {shown_path} cannot be read: {error.strerror}") from None
    if not found:
        where = f"{shown_path} is a file; expected the folder that holds the data"
        if not data_dir.exists():
            where = f"no such folder: {shown_path}; check the path"
        raise ValueError(f"data_dir: {where}")
    if dataset in DATASETS and not os.access(data_dir, os.X_OK):
        raise ValueError(f"data_dir: {shown_path} is not open to you; ask its owner for the right")
