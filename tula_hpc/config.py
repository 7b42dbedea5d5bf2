"""Typed, validated inputs: one sweep file and one cluster file, both TOML.

Every mistake becomes an `InputError` with one line per problem: the file, the dotted key, what is wrong and what is
expected.
"""

from __future__ import annotations

import ast
import difflib
import errno
import importlib.util
import json
import math
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tula_hpc.catalog import DATASETS, TORCHVISION_MODELS
from tula_hpc.errors import InputError
from tula_hpc.files import read_bounded
from tula_hpc.tres import parse_weights

MAX_FILE_BYTES = 1_000_000  # a sweep file is a page; more is a mistake or an attack
GIB = 1024**3
MOST_GIB = 1e9
MOST_MINUTES = 10**6  # about two years
MOST_TRAININGS = 100_000  # of a study
MOST_WEIGHTS = 2000  # characters of TRES weights
MOST_MISTAKES = 20  # that are named one by one
MOST_KEY_PARTS = 100  # of a dotted key: tomllib takes time with their square
LARGEST = 1e30  # no number of an input is larger
CHECKPOINT_MINUTES = 5.0  # at most between two checkpoints; the plan reckons with it unless there is a spot price

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
# goes into #SBATCH lines: ASCII, no blanks and no line ends
SlurmWord = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.,:/@+=%*&|()\[\]-]{1,200}$")]
# no control characters and none of Unicode's line ends; the tab is allowed
Line = Annotated[str, Field(pattern=r"^[\t\P{Cc}--\x{2028}\x{2029}]*$", max_length=1000)]
# a long option of sbatch, as a word; what this program sets itself is refused, see `_check_sbatch`
SbatchOption = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,63}$")]
PartitionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.,:@+=-]{0,63}$")]  # also goes into file names


class Spec(BaseModel):
    """Base of all input tables: immutable, no unknown keys, no silent conversions of strings to numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class WorkloadSpec(Spec):
    """`[workload]`: what is trained, on what, and how."""

    model: str = Field(default="resnet18", max_length=200)
    dataset: str = Field(default="digits", max_length=200)
    data_dir: Path | None = None
    image_size: int | None = Field(default=None, ge=8, le=1024)
    samples: int | None = Field(
        default=None, ge=1, le=2**40
    )  # train on the first so many samples of a fixed random order; None = all
    holdout: float = Field(default=0.0, ge=0, lt=1)  # share of them that is not trained on but tested on
    classes: int | None = Field(default=None, ge=2, le=10**6)  # the first so many classes only; None = all
    epochs: int = Field(default=10, ge=1, le=100_000)
    precision: Literal["fp32", "fp16", "bf16"] = "fp32"
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
        return _known_or_entry_point(
            value, TORCHVISION_MODELS, "a torchvision classification model", _checks_paths(info)
        )

    @field_validator("dataset")
    @classmethod
    def _dataset_exists(cls, value: str, info: ValidationInfo) -> str:
        return _known_or_entry_point(value, DATASETS, "a data set", _checks_paths(info))

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
        facts = DATASETS.get(self.dataset)
        if facts is not None and facts.on_disk and _checks_paths(info):
            _check_data_dir(self.dataset, self.data_dir)
        return self


class SearchSpec(Spec):
    """`[search]`: which configurations are candidates, which are profiled, and how long each is measured."""

    cluster_sizes: tuple[Annotated[int, Field(ge=1, le=65_536)], ...] = Field(default=(1, 2, 4), min_length=1)
    min_batch: int = Field(default=32, ge=1, le=2**30)  # global batch
    max_batch: int = Field(default=1024, ge=1, le=2**30)  # global batch; memory bounds it further
    mode: Literal["adaptive", "full", "partial"] = "adaptive"
    max_profiles: int = Field(default=8, ge=3, le=100_000)  # adaptive search ends at so many configurations
    form: Literal["auto", "paper", "ring", "double_tree", "tree", "parameter_server", "reduce_scatter_all_gather"] = (
        "auto"  # of the step-time model
    )
    pack: Literal["auto", "always", "never"] = "auto"  # configurations of one N in one job; auto: always
    nest: bool = False  # all N inside one allocation of the largest; the nodes that a smaller N leaves over wait
    estimate: bool = True  # of memory, without running a step, before the first profile where a limit is known
    warmup_steps: int = Field(default=5, ge=1, le=10_000)
    min_steps: int = Field(default=15, ge=5, le=100_000)
    max_steps: int = Field(default=100, ge=5, le=100_000)
    max_seconds: float = Field(default=60.0, gt=0, le=1e6)  # per configuration and timed quantity
    ci_width: float = Field(default=0.02, gt=0, lt=1)  # stop when the median's 95 % interval is narrower, relative
    noise_steps: int = Field(default=0, ge=0, le=10_000)  # train so many before the gradient noise is measured

    @field_validator("cluster_sizes")
    @classmethod
    def _sorted_once(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(value)) != len(value):
            raise ValueError("expected each cluster size once")
        return tuple(sorted(value))

    @model_validator(mode="after")
    def _ordered(self) -> SearchSpec:
        if self.min_batch > self.max_batch:
            raise ValueError(f"min_batch: {self.min_batch} is above max_batch = {self.max_batch}")
        if self.min_steps > self.max_steps:
            raise ValueError(f"min_steps: {self.min_steps} is above max_steps = {self.max_steps}")
        if self.nest and self.pack == "never":
            raise ValueError('nest: true measures everything in one job, which pack = "never" forbids')
        return self

    @property
    def packed(self) -> bool:
        """Whether one job measures several configurations."""
        return self.pack != "never"


class ObjectiveSpec(Spec):
    """`[objective]`: what the chosen configuration minimizes, and the constraints it keeps."""

    kind: Literal["knee", "time", "cost", "weighted"] = "knee"
    time_weight: float = Field(default=1.0, ge=0, le=100)  # exponents of kind = "weighted": least time^a × cost^b
    cost_weight: float = Field(default=1.0, ge=0, le=100)
    deadline_hours: float | None = Field(default=None, gt=0)  # of expected wall time; also "12h", "90m", "2d"
    budget: float | None = Field(default=None, gt=0)  # in the unit of the prices: USD, or SU
    max_global_batch: int | None = Field(default=None, ge=1, le=2**44)

    @field_validator("deadline_hours", mode="before")
    @classmethod
    def _with_unit(cls, value: object) -> object:
        return _hours(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _weighs_something(self) -> ObjectiveSpec:
        if self.time_weight + self.cost_weight == 0:
            raise ValueError("time_weight: expected more than 0 for it or for cost_weight")
        return self


_HOURS = {"s": 1 / 3600, "m": 1 / 60, "min": 1 / 60, "h": 1.0, "d": 24.0}


def _hours(text: str) -> float:
    """Hours from a duration such as "12h", "90 min" or "2d"."""
    match = re.fullmatch(r"\s{0,9}(\d{1,9}(?:\.\d{0,9})?)\s{0,9}(s|m|min|h|d)\s{0,9}", text)
    if match is None:
        raise ValueError(f'expected hours, or a duration such as "12h", "90m" or "2d", got {_shown(text)}')
    return float(match[1]) * _HOURS[match[2]]


Granularity = Literal["element", "tensor", "layer", "model"]
Gate = Literal["paper", "none", "smooth", "smoothed"]
LrScaling = Literal["none", "sqrt", "linear"]
Method = Literal["ags", "static", "lbt", "lrs", "sqrt", "lars", "lamb", "polo", "adascale"]


class AgsOptions(NamedTuple):
    """The form of adaptive gradient scaling: what each switch of `[training]` comes to."""

    small_batch: int  # reference batch b_small, global
    delta: float  # threshold of Δ(G)
    granularity: Granularity  # what shares one factor: an element, a tensor, a layer, or the whole model
    exponent: float  # of the ratio of norms: 1 is the paper's, 2 a gain as AdaScale's
    smoothing: float  # decay of the moving averages of squared norms (of the ratio at "element"), for each update
    scale_warmup_epochs: float  # the factors grow from 1 to their value over so many epochs
    gate: Gate  # which steps are scaled: Δ < δ; all; the less the larger Δ/δ is; Δ of smoothed norms < δ
    exclude_norms: bool  # normalization layers and biases keep the factor 1
    apply: Literal["gradient", "update"]  # scale the gradient, or what the base optimizer makes of it
    lr_scaling: LrScaling  # of the rate, on top, from base_batch to the global batch
    reference: Literal["pass", "free"]  # small gradient: an extra pass; or from the workers' own gradients, no pass
    update_interval_epochs: float  # between two passes, should there be any; 0: as often as 2 % of the samples allow


PAPER = AgsOptions(
    small_batch=32,
    delta=0.5,
    granularity="element",
    exponent=1.0,
    smoothing=0.0,
    scale_warmup_epochs=0.0,
    gate="paper",
    exclude_norms=False,
    apply="gradient",
    lr_scaling="none",
    reference="pass",
    update_interval_epochs=1.0,
)
# What did best in short runs of a small network on a part of CIFAR-100. Its small_batch is a quarter of base_batch.
DEFAULT = AgsOptions(
    small_batch=32,
    delta=0.5,
    granularity="tensor",
    exponent=2.0,
    smoothing=0.95,
    scale_warmup_epochs=5.0,
    gate="none",
    exclude_norms=False,
    apply="gradient",
    lr_scaling="none",
    reference="free",
    update_interval_epochs=0.0,
)


class TrainingSpec(Spec):
    """`[training]`: how the large batch is trained, checkpoints and restarts."""

    method: Method = "ags"
    base_batch: int = Field(default=128, ge=1, le=2**30)  # global; workload.lr was chosen for it: scaling starts there
    warmup_epochs: float | None = Field(default=None, ge=0)  # of the rate; None: 5 where the method needs them
    preset: Literal["default", "paper"] = "default"  # of AGS: what the next twelve keys are where they are left out
    small_batch: int | None = Field(default=None, ge=1, le=2**30)
    delta: float | None = Field(default=None, gt=0)
    granularity: Granularity | None = None
    exponent: float | None = Field(default=None, gt=0, le=4)
    smoothing: float | None = Field(default=None, ge=0, lt=1)
    scale_warmup_epochs: float | None = Field(default=None, ge=0)
    gate: Gate | None = None
    exclude_norms: bool | None = None
    apply: Literal["gradient", "update"] | None = None
    lr_scaling: LrScaling | None = None
    reference: Literal["pass", "free"] | None = None
    update_interval_epochs: float | None = Field(default=None, ge=0)
    s_max: float | None = Field(default=None, gt=0)  # None: (global batch / small_batch)^(exponent / 2)
    s_min: float = Field(default=0.0, ge=0)
    static_scale: float = Field(default=2.0, gt=0)  # the s of method = "static"
    layer_wise: bool = False  # LARS in place of SGD, LAMB in place of AdamW, whatever the method puts around it
    clip_norm: float | None = Field(default=None, gt=0)  # gradients are shortened to this norm, before they are scaled
    log_interval_steps: int = Field(default=10, ge=1, le=10**9)
    checkpoint_minutes: float | None = Field(default=None, gt=0, le=1e6)  # None: from what saving costs, at most 5
    interruption_hours: float = Field(default=24.0, gt=0, le=1e6)  # mean time to the first kill without time to save
    max_requeues: int = Field(default=20, ge=0, le=10**6)
    max_fallbacks: int = Field(default=3, ge=0, le=1000)  # after OOM, relaunch smaller at most so often
    drift: bool = True  # hold measured step times against the plan's prediction
    drift_minutes: float = Field(default=1.0, gt=0, le=1e6)  # beyond its interval for so long: an event says so
    replan_on_drift: bool = False  # after it, a requeue may choose another batch for the same nodes
    # after these epochs (0: before the first step) the largest eigenvalue of the Hessian is measured
    curvature_epochs: tuple[Annotated[int, Field(ge=0, le=100_000)], ...] = Field(default=(), max_length=1000)
    curvature_samples: int = Field(default=512, ge=2, le=65_536)  # of the batch for it, over all workers
    scale_histogram: bool = False  # count the scales that were applied, for each line of metrics.jsonl; costs time
    # other values of delta and small_batch to try while training; whole rounds are run again, so it costs time
    tune_delta: tuple[Annotated[float, Field(gt=0)], ...] = Field(default=(), max_length=16)
    tune_small_batch: tuple[Annotated[int, Field(ge=1, le=2**30)], ...] = Field(default=(), max_length=16)
    tune_every_epochs: int = Field(default=2, ge=1, le=100_000)  # length of a round
    tune_holdout: float = Field(default=0.05, gt=0, le=0.5)  # share of the training samples that judge a round
    max_rollbacks: int = Field(default=8, ge=1, le=10**6)  # so many rounds are run again at most

    @property
    def tunes(self) -> bool:
        """Whether settings are tuned while training, on samples that are held out for that."""
        return bool(self.tune_delta or self.tune_small_batch)

    @property
    def trained_share(self) -> float:
        """Of the training samples: those that tuning does not hold out."""
        return 1.0 - self.tune_holdout if self.tunes else 1.0

    @property
    def ags(self) -> AgsOptions:
        """The preset with the keys that are given."""
        paper = self.preset == "paper" or self.method == "static"
        preset = PAPER if paper else DEFAULT
        if not paper:
            preset = preset._replace(small_batch=max(1, self.base_batch // 4))
        given = {name: getattr(self, name) for name in AgsOptions._fields if getattr(self, name) is not None}
        if given.get("reference") == "pass":
            preset = preset._replace(update_interval_epochs=PAPER.update_interval_epochs)
        return preset._replace(**given)

    @property
    def free_reference(self) -> bool:
        """Whether norms of small gradients are wanted from the workers' own gradients at every step, without a pass."""
        return self.method == "adascale" or (self.method == "ags" and self.ags.reference == "free")

    @property
    def reference_batch(self) -> int:
        """The small batch that gradients are held against, global; AdaScale's is the one that workload.lr is for."""
        return self.base_batch if self.method == "adascale" else self.ags.small_batch

    @property
    def has_trust_ratios(self) -> bool:
        """Whether the base optimizer is LARS or LAMB."""
        return self.layer_wise or self.method in ("lars", "lamb")

    @property
    def gradient_copies(self) -> int:
        """Gradients' worth of memory on top of a plain step's forward and backward pass.

        While AGS updates its scale: the reference gradient, and factors of the same size from the last update where
        each element has its own. In local steps of post-local SGD: gradients of one's own beside DDP's idle buckets.
        """
        if self.method == "polo":
            return 1
        if self.method != "ags" or self.ags.reference == "free":
            return 0
        return 2 if self.ags.granularity == "element" else 1

    @property
    def checkpoint_s(self) -> float:
        """Seconds between two checkpoints that the plan reckons with, and that training keeps where they are given."""
        return 60.0 * (CHECKPOINT_MINUTES if self.checkpoint_minutes is None else self.checkpoint_minutes)

    @model_validator(mode="after")
    def _bounds(self) -> TrainingSpec:
        if self.s_max is not None and self.s_min > self.s_max:
            raise ValueError(f"s_min: {self.s_min} is above s_max = {self.s_max}")
        options = self.ags
        if self.method == "ags" and options.granularity == "element" and options.reference == "free":
            raise ValueError('reference: "free" knows norms only; granularity = "element" needs reference = "pass"')
        if options.reference == "pass" and options.update_interval_epochs == 0 and self.method == "ags":
            raise ValueError("update_interval_epochs: an extra pass at every step doubles the work; expected above 0")
        _check_tuning(self)
        return self


def _check_tuning(training: TrainingSpec) -> None:
    for key in ("tune_delta", "tune_small_batch"):
        values = getattr(training, key)
        if len(set(values)) != len(values):
            raise ValueError(f"{key}: expected each value once")
        if values and training.method != "ags":
            raise ValueError(f'{key}: "{training.method}" has nothing to tune; expected method = "ags"')
    if training.tune_delta and training.ags.gate == "none":
        gates = 'gate = "paper", "smooth" or "smoothed"'
        raise ValueError(f'tune_delta: with gate = "none" every step is scaled, whatever delta is; expected {gates}')


Family = Literal["all", "sgd", "adamw", "lars", "lamb"]  # of optimizers that share a learning rate at a small batch
REFERENCE_COLUMN = "lbt"  # of a study: what every method is held against, at the small batch and at the large ones


class StudyCell(NamedTuple):
    """One training of a study."""

    column: str  # a method, or a variant
    batch: int  # global
    seed: int

    @property
    def label(self) -> str:
        """Name of the training inside the run directory."""
        return f"study/{self.column}-b{self.batch}-s{self.seed}"


class StudySpec(Spec):
    """`[study]`: methods × global batches × seeds, each trained once, in place of one planned training."""

    methods: tuple[Name, ...] = ()  # of training.method, or names of variants; each is a column of the table
    batches: tuple[Annotated[int, Field(ge=1, le=2**30)], ...] = Field(min_length=1)
    seeds: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...] = Field(default=(0, 1, 2), min_length=1)
    small_batch: int = Field(default=128, ge=0, le=2**30)  # global batch of the reference, method lbt; 0: none
    nodes: int = Field(default=1, ge=1, le=65_536)  # of every training
    metric: Literal["top1", "top5"] = "top1"  # accuracy that the table compares
    evaluate_every: int = Field(default=1, ge=1, le=100_000)  # epochs between looks at the test set; the last always
    # one is chosen for workload.lr of that family
    base_lrs: dict[Family, Annotated[list[Annotated[float, Field(gt=0)]], Field(max_length=100)]] = {}
    tuning_holdout: float = Field(default=0.1, gt=0, lt=1)  # share of the training samples that the choice is made on
    # keys of the sweep with other values, by the variant's name
    variants: dict[Name, dict[str, Any]] = Field(default={}, max_length=1000)

    @field_validator("base_lrs", mode="before")
    @classmethod
    def _of_all(cls, value: object) -> object:
        return {"all": value} if isinstance(value, list | tuple) and value else value or {}

    @field_validator("variants", mode="before")
    @classmethod
    def _flat(cls, value: object) -> object:
        """`training.delta = 0.1` without quotes is a table in a table."""
        if not isinstance(value, dict):
            return value
        return {name: dict(_dotted(keys)) if isinstance(keys, dict) else keys for name, keys in value.items()}

    @model_validator(mode="after")
    def _consistent(self) -> StudySpec:
        lists = {key: getattr(self, key) for key in ("methods", "batches", "seeds")}
        for key, values in [*lists.items(), *(("base_lrs", rates) for rates in self.base_lrs.values())]:
            if len({f"{value:g}" if isinstance(value, float) else value for value in values}) != len(values):
                raise ValueError(f"{key}: expected each value once")
        if len(self.columns) * len(self.batches) * len(self.seeds) > MOST_TRAININGS:
            raise ValueError(f"batches: with methods and seeds more than {MOST_TRAININGS:,} trainings")
        if not self.columns:
            raise ValueError('methods: expected at least one, for example methods = ["lbt", "lrs", "ags"]')
        for name in self.methods:
            self._check_column(name)
        if self.base_lrs and not self.small_batch:
            raise ValueError("base_lrs: the rate is chosen at the small batch, and small_batch = 0 says there is none")
        return self

    def _check_column(self, name: str) -> None:
        known = (*get_args(Method), *self.variants)
        if name not in known:
            raise ValueError(
                f"methods: {_shown(name)} is neither a method nor one of [study.variants]{_nearest(name, known)}; "
                f"methods: {', '.join(get_args(Method))}"
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """Methods and variants, in order."""
        return tuple(dict.fromkeys([*self.methods, *self.variants]))

    def overrides(self, column: str) -> dict[str, Any]:
        """Dotted keys of the sweep that a column changes. A variant with the name of a method has that method."""
        own = {"training.method": column} if column in get_args(Method) else {}
        return own | self.variants.get(column, {})

    def rates_of(self, family: str) -> list[float]:
        """Rates to choose from for the optimizers of a family; none: theirs are as given."""
        chosen = {str(name): rates for name, rates in self.base_lrs.items()}
        return chosen.get(family, chosen.get("all", []))

    def cells(self) -> list[StudyCell]:
        """Every training once, seed by seed: with the first seed there is already a whole table."""
        places = [(REFERENCE_COLUMN, self.small_batch)] if self.small_batch else []
        places += [(column, batch) for batch in self.batches for column in self.columns]
        return [StudyCell(*place, seed) for seed in self.seeds for place in dict.fromkeys(places)]


def _dotted(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values in tables within tables, by dotted keys."""
    for key, value in tables.items():
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


class SweepSpec(Spec):
    """A whole sweep file."""

    name: Name
    workload: WorkloadSpec = WorkloadSpec()
    search: SearchSpec = SearchSpec()
    objective: ObjectiveSpec = ObjectiveSpec()
    training: TrainingSpec = TrainingSpec()
    study: StudySpec | None = None  # the sweep is a study then: nothing is profiled or planned

    @model_validator(mode="after")
    def _method_fits(self) -> SweepSpec:
        method, work = self.training.method, self.workload
        needed = {"lars": "sgd", "lamb": "adamw"}.get(method, work.optimizer)
        if work.optimizer != needed:
            message = f'"{method}" is {needed} with a rate of its own for each layer'
            raise ValueError(f'training.method: {message}; expected workload.optimizer = "{needed}", and its lr')
        if method == "polo" and work.zero_stage:
            message = "every worker has an optimizer of its own"
            raise ValueError(f'training.method: in "polo" {message}; expected workload.zero_stage = 0')
        if self.training.layer_wise and method in ("ags", "static") and self.scale_applies_to == "gradient":
            message = "LARS and LAMB divide by the gradient's size"
            raise ValueError(f'training.layer_wise: {message}; expected apply = "update"')
        return self

    @property
    def scale_applies_to(self) -> Literal["gradient", "update"]:
        """`training.apply`; left out, the update where the optimizer divides by the gradient's size."""
        training = self.training
        cancels = self.workload.optimizer == "adamw" or training.has_trust_ratios
        left_out = training.apply is None and training.preset == "default"
        return "update" if training.method in ("ags", "static") and left_out and cancels else training.ags.apply

    @property
    def step_copies(self) -> int:
        """Parameters' worth of memory on top of a plain optimizer's step: those before it, where updates are scaled."""
        scales = self.training.method in ("ags", "static") and self.scale_applies_to == "update"
        return int(scales or self.training.method == "adascale")

    @property
    def updates_per_epoch(self) -> float:
        """How often AGS updates its scale, on average: the first time after a whole interval, and not after the end."""
        options = self.training.ags
        if self.training.method != "ags" or options.reference == "free":
            return 0.0  # no update costs a pass
        return max(0.0, 1.0 / options.update_interval_epochs - 1.0 / self.workload.epochs)


class PricingSpec(Spec):
    """`[pricing]`: what training costs; `basis` says which of the prices counts."""

    basis: Literal["node-hour", "memory", "tres", "spot", "energy"] = "node-hour"
    usd_per_node_hour: float = Field(default=1.0, ge=0)
    usd_per_gib_hour: float = Field(default=0.15, ge=0)
    # tres: Slurm's billing
    tres_weights: dict[str, float] = {}  # per core, MiB, GPU, …; as text or table like slurm.conf's
    max_tres: bool = False  # PriorityFlags=MAX_TRES
    usd_per_unit: float | None = Field(default=None, ge=0)  # of a billing unit and hour; None: cost in service units
    node_cpus: int | None = Field(default=None, ge=1, le=10**6)  # what a whole node has, for exclusive jobs
    node_memory_gb: float | None = Field(default=None, gt=0, le=MOST_GIB)
    node_gpus: int | None = Field(default=None, ge=0, le=10**6)
    # spot
    usd_per_spot_node_hour: float = Field(default=0.3, ge=0)
    preemption_hours: float = Field(default=24.0, gt=0)  # mean time between preemptions
    preempted: Literal["node", "job"] = "node"  # whether that time is of a node or of the whole job
    # energy
    watts_per_node: float | None = Field(default=None, gt=0)  # of a whole node under load; goes before measurements
    usd_per_kwh: float = Field(default=0.15, ge=0)
    pue: float = Field(default=1.2, ge=1)  # power usage effectiveness: all that the site draws over what the nodes draw
    # interruptions, whatever the basis
    checkpoint_write_s: float = Field(default=5.0, ge=0)
    restart_s: float = Field(default=60.0, ge=0)  # from the start of a job to its first step

    @field_validator("tres_weights", mode="before")
    @classmethod
    def _as_in_slurm_conf(cls, value: object) -> object:
        if isinstance(value, str | dict) and len(value) > MOST_WEIGHTS:
            raise ValueError(f"expected at most {MOST_WEIGHTS:,} characters or entries")
        return parse_weights(value) if isinstance(value, str | dict) else value

    @model_validator(mode="after")
    def _billable(self) -> PricingSpec:
        if self.basis == "tres" and not self.tres_weights:
            example = '"CPU=1.0,Mem=0.25G,GRES/gpu=2.0", as `scontrol show partition` has them'
            raise ValueError(f'tres_weights: basis = "tres" needs the billing weights, for example {example}')
        return self

    @property
    def currency(self) -> str:
        """USD, or SU: service units, that is billing units times hours, where they have no price."""
        return "SU" if self.basis == "tres" and self.usd_per_unit is None else "USD"


class PartitionSpec(Spec):
    """`[[partitions]]`: one kind of nodes; what is left out is as in the rest of the cluster file."""

    partition: PartitionName
    device: Literal["cpu", "cuda"] | None = None
    max_nodes: int | None = Field(default=None, ge=1, le=65_536)
    workers_per_node: int | None = Field(default=None, ge=1, le=64)
    cpus_per_worker: int | None = Field(default=None, ge=1, le=1024)
    memory_gb: float | None = Field(default=None, gt=0, le=MOST_GIB)
    device_memory_gb: float | None = Field(default=None, gt=0, le=MOST_GIB)
    account: SlurmWord | None = None
    qos: SlurmWord | None = None
    gres: SlurmWord | None = None
    constraint: SlurmWord | None = None
    pricing: dict[str, Any] = {}  # keys of [pricing]

    def overrides(self) -> dict[str, Any]:
        """The keys that are given, except the prices."""
        return self.model_dump(exclude_none=True, exclude={"pricing"})


# Options of sbatch that [sbatch] may not hold: jobs would not be found again, or not be what was asked for
_OWN_OPTIONS = {
    "array": "array_parallelism",
    "chdir": "",
    "dependency": "",
    "error": "",
    "input": "",
    "job-name": "the sweep's name",
    "nodes": "search.cluster_sizes",
    "ntasks": "workers_per_node",
    "ntasks-per-node": "workers_per_node",
    "open-mode": "",
    "output": "",
    "parsable": "",
    "quiet": "",
    "signal": "signal_delay_s",
    "test-only": "",
    "time": "profile_minutes and train_minutes",
    "wait": "",
    "wrap": "setup",
}


class ClusterSpec(Spec):
    """A whole cluster file: where and how jobs run."""

    name: Name = "local"
    executor: Literal["local", "slurm"] = "local"
    device: Literal["cpu", "cuda"] = "cpu"
    max_nodes: int = Field(default=64, ge=1, le=65_536)
    workers_per_node: int = Field(default=1, ge=1, le=64)
    cpus_per_worker: int = Field(default=1, ge=1, le=1024)
    memory_gb: float | None = Field(default=None, gt=0, le=MOST_GIB)  # host memory per node; Slurm enforces it
    device_memory_gb: float | None = Field(default=None, gt=0, le=MOST_GIB)  # per GPU
    memory_margin: float = Field(default=0.1, ge=0, lt=1)  # share of the limit that plans leave free
    partition: SlurmWord | None = None
    account: SlurmWord | None = None
    qos: SlurmWord | None = None
    gres: SlurmWord | None = None
    constraint: SlurmWord | None = None
    exclusive: bool = True
    profile_minutes: int = Field(default=20, ge=1, le=MOST_MINUTES)
    train_minutes: int = Field(default=24 * 60, ge=1, le=MOST_MINUTES)
    array_parallelism: int = Field(default=1, ge=1, le=10_000)
    controller_partition: SlurmWord | None = None  # of the jobs that carry on after --detach; None: as `partition`
    controller_minutes: int = Field(default=30, ge=2, le=MOST_MINUTES)
    controller_memory_gb: float | None = Field(default=None, gt=0, le=MOST_GIB)
    signal_delay_s: int = Field(default=90, ge=1, le=65_535)  # USR2 this long before the time limit; Slurm's most
    srun_args: tuple[Line, ...] = Field(default=("-K1",), max_length=100)
    setup: tuple[Line, ...] = Field(default=(), max_length=1000)
    # further sbatch options, by long name
    sbatch: dict[SbatchOption, SlurmWord | Annotated[int, Field(ge=-(2**31), lt=2**31)] | bool] = Field(
        default={}, max_length=100
    )
    environment: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")], Line] = Field(
        default={}, max_length=1000
    )
    pricing: PricingSpec = PricingSpec()
    # several kinds of nodes, each planned with its own measurements
    partitions: tuple[PartitionSpec, ...] = Field(default=(), max_length=100)

    @field_validator("setup")
    @classmethod
    def _shell_only(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for line in value:
            if re.match(r"\s*#\s*(SBATCH|PBS|BSUB)", line, re.IGNORECASE):
                raise ValueError(f"expected lines for the shell, got {_shown(line)}; sbatch's options go into [sbatch]")
        return value

    @field_validator("srun_args")
    @classmethod
    def _options_only(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for word in value:
            if not re.match(r"--?[A-Za-z]", word):  # srun would take it for the program that it is to run
                expected = 'options with their values in one word, for example "--mpi=pmix"'
                raise ValueError(f"expected {expected}, got {_shown(word)}")
        return value

    @field_validator("sbatch")
    @classmethod
    def _not_ours(cls, value: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
        for key in value:
            name = key.replace("_", "-")
            for own, instead in _OWN_OPTIONS.items():
                if own.startswith(name):  # sbatch takes options that are cut short, too
                    raise ValueError(f"{key} is set by this program{instead and f'; see {instead}'}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> ClusterSpec:
        if self.partitions:
            _check_partitions(self)
            return self
        if (
            self.device == "cuda"
            and self.executor == "slurm"
            and self.gres is None
            and "gpus-per-node" not in self.sbatch
        ):
            raise ValueError('gres: device = "cuda" on Slurm needs gres, for example gres = "gpu:1"')
        shortest_s = 60 * min(self.profile_minutes, self.train_minutes)
        if self.executor == "slurm" and self.signal_delay_s >= shortest_s:
            raise ValueError(f"signal_delay_s: {self.signal_delay_s} leaves nothing of a time limit of {shortest_s} s")
        return self

    def parts(self) -> tuple[ClusterSpec, ...]:
        """One complete cluster for each of `partitions`; itself where there are none."""
        return tuple(_part(self, table) for table in self.partitions) or (self,)

    def controller(self) -> ClusterSpec:
        """The place of controller jobs: one core of a node that others may share, and no GPU."""
        first = self.parts()[0]
        fields = {
            "device": "cpu",
            "partitions": (),
            "partition": self.controller_partition or first.partition,
            "memory_gb": self.controller_memory_gb,
            "workers_per_node": 1,
            "cpus_per_worker": 1,
            "gres": None,
            "constraint": None,
            "exclusive": False,
            "account": first.account,
            "qos": first.qos,
            "sbatch": {key: value for key, value in self.sbatch.items() if not key.startswith("gpu")},
        }
        return self.model_copy(update=fields)

    def part(self, name: str) -> ClusterSpec:
        """The part of that partition, "" for a cluster without `partitions`, as `Candidate.partition` has it.

        Raises:
            InputError: There is no such partition.
        """
        if not name and not self.partitions:
            return self
        for table in self.partitions:
            if table.partition == name:
                return _part(self, table)
        raise InputError(f"no partition {name!r} among the [[partitions]]", key="partitions")

    def part_names(self) -> tuple[str, ...]:
        """What `Measurement.partition` and `Candidate.partition` say, in the order of `parts()`."""
        return tuple(table.partition for table in self.partitions) or ("",)

    @property
    def memory_limit_bytes(self) -> int | None:
        """What one worker may use, bytes: the GPU's memory, or its share of the node's; None where unknown."""
        if self.device == "cuda":
            return None if self.device_memory_gb is None else int(self.device_memory_gb * GIB)
        return None if self.memory_gb is None else int(self.memory_gb * GIB / self.workers_per_node)


def _part(cluster: ClusterSpec, table: PartitionSpec) -> ClusterSpec:
    """The cluster as one partition sees it.

    Raises:
        ValueError: A mistake in the table (pydantic's ValidationError is one).
    """
    own = cluster.model_dump(exclude={"partitions", "pricing"}) | table.overrides()
    pricing = cluster.pricing.model_dump() | table.pricing
    return ClusterSpec.model_validate(own | {"pricing": pricing})


def _check_partitions(cluster: ClusterSpec) -> None:
    names = cluster.part_names()
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"partitions: {twice!r} stands there twice")
    currencies = set()
    for table in cluster.partitions:
        try:
            currencies.add(_part(cluster, table).pricing.currency)
        except ValidationError as error:
            raise ValueError(_mistake_in(table.partition, error.errors()[0])) from None
    if len(currencies) > 1:
        raise ValueError("partitions: some are priced in USD and some in SU, which cannot be compared")


def _mistake_in(partition: str, item: Mapping[str, Any]) -> str:
    """One line for one pydantic error in what a table of `partitions` comes to."""
    location, words = [str(part) for part in item["loc"]], _words(item)
    if item["type"] == "extra_forbidden":
        valid = _fields_at(ClusterSpec, location[:-1])
        words = f"{words}{_nearest(location[-1], valid)}; valid keys: {', '.join(valid)}"
    return ": ".join(filter(None, ["partitions", partition, ".".join(location), words]))


S = TypeVar("S", bound=Spec)


def load_sweep(path: Path, overrides: Sequence[str] = (), *, check_paths: bool = True) -> SweepSpec:
    """Read and check a sweep file; `overrides` are `section.key=value`, values in TOML or as bare words.

    With `check_paths=False` the data folder and the modules of a user's own entry points need not exist here: for
    planning and reporting over logs that were copied from another machine.

    Raises:
        InputError: One line per mistake: file, key, what was expected.
    """
    sweep = _parse(SweepSpec, path, overrides, check_paths=check_paths)
    _check_columns(sweep, path, check_paths=check_paths)
    return sweep


def load_cluster(path: Path, overrides: Sequence[str] = ()) -> ClusterSpec:
    """Read and check a cluster file; see `load_sweep`."""
    return _parse(ClusterSpec, path, overrides)


def check_together(sweep: SweepSpec, cluster: ClusterSpec, sweep_file: Path | str, cluster_file: Path | str) -> None:
    """Refuse a sweep that the cluster cannot run.

    Raises:
        InputError: Too many nodes, a precision that the device lacks, no candidate between the batch bounds, or a batch
            of a study that the workers cannot share.
    """
    if sweep.study is not None:
        _check_study(sweep, sweep.study, cluster, sweep_file, cluster_file)
        return
    parts = cluster.parts()
    largest, allowed = max(sweep.search.cluster_sizes), max(part.max_nodes for part in parts)
    if largest > allowed:
        message = f"{largest} nodes, but {cluster_file} has max_nodes = {allowed}"
        raise InputError(message, source=sweep_file, key="search.cluster_sizes")
    if sweep.workload.precision == "fp16" and any(part.device == "cpu" for part in parts):
        message = 'fp16 needs device = "cuda"; on CPU use "bf16" or "fp32"'
        raise InputError(message, source=sweep_file, key="workload.precision")
    samples, share = sweep.workload.samples, sweep.training.trained_share
    if samples is not None and sweep.search.max_batch > samples * share:
        held = "" if share == 1 else f" less training.tune_holdout = {sweep.training.tune_holdout}"
        message = f"{sweep.search.max_batch} is above workload.samples = {samples}{held}"
        raise InputError(message, source=sweep_file, key="search.max_batch")
    for part in parts:
        for nodes in cluster_sizes(sweep.search, part):
            if not local_batches(sweep.search, nodes, part.workers_per_node):
                message = (
                    f"no batch between {sweep.search.min_batch} and {sweep.search.max_batch} gives each of "
                    f"{nodes * part.workers_per_node} workers a power of two; widen the bounds or drop {nodes} nodes"
                )
                raise InputError(message, source=sweep_file, key="search.min_batch")


def _check_study(
    sweep: SweepSpec, study: StudySpec, cluster: ClusterSpec, sweep_file: Path | str, cluster_file: Path | str
) -> None:
    part = study_part(study, cluster)
    if part is None:
        message = f"{study.nodes} nodes, but {cluster_file} has max_nodes = {max(p.max_nodes for p in cluster.parts())}"
        raise InputError(message, source=sweep_file, key="study.nodes")
    for name, column in {name: study_column(sweep, name, check_paths=False) for name in study.columns}.items():
        work, workers = column.workload, study.nodes * part[1].workers_per_node
        if column.training.method == "polo" and workers == 1:
            message = "polo averages the models of several workers; with one it is lbt"
            raise InputError(message, source=sweep_file, key="study.nodes")
        if work.precision == "fp16" and part[1].device == "cpu":
            message = f'fp16 of {name} needs device = "cuda"; on CPU use "bf16" or "fp32"'
            raise InputError(message, source=sweep_file, key="workload.precision")
        for batch in sorted({cell.batch for cell in study.cells()}):
            key = "study.batches" if batch in study.batches else "study.small_batch"
            _check_batch(batch, column, workers, sweep_file, key)


def _check_batch(batch: int, sweep: SweepSpec, workers: int, source: Path | str, key: str) -> None:
    if batch % workers:
        raise InputError(f"{batch} cannot be shared equally among {workers} workers", source=source, key=key)
    work, share = sweep.workload, (1 - sweep.workload.holdout) * sweep.training.trained_share
    if work.samples is not None and batch > work.samples * share:
        raise InputError(f"{batch} is above workload.samples = {work.samples}", source=source, key=key)


def study_part(study: StudySpec, cluster: ClusterSpec) -> tuple[str, ClusterSpec] | None:
    """Name and specification of the first part of the cluster that has nodes enough for a study; None without."""
    named = zip(cluster.part_names(), cluster.parts(), strict=True)
    return next(((name, part) for name, part in named if part.max_nodes >= study.nodes), None)


def study_column(sweep: SweepSpec, column: str, *, check_paths: bool = True) -> SweepSpec:
    """The sweep as one column of its study trains it.

    Raises:
        ValidationError: A variant's value is not one that its key takes.
    """
    tables = sweep.model_dump(mode="json", exclude_none=True, exclude={"study"})
    for key, value in (sweep.study.overrides(column) if sweep.study else {}).items():
        section, _, last = key.partition(".")
        tables[section][last] = value
    context = {"check_paths": check_paths}
    changed = SweepSpec.model_validate_json(json.dumps(tables, default=str), strict=True, context=context)
    return changed.model_copy(update={"study": sweep.study})


_STUDY_SETS = {"workload.seed": "study.seeds", "workload.holdout": "study.tuning_holdout"}


def _check_columns(sweep: SweepSpec, path: Path, *, check_paths: bool) -> None:
    """What each column of a study comes to.

    Raises:
        InputError: One line per mistake in a variant: file, variant, key, what was expected.
    """
    if sweep.study is None:
        return
    for name, keys in sweep.study.variants.items():
        _check_variant(name, keys, path)
    for name in sweep.study.columns:
        where = f"{path}: study.{'variants' if name in sweep.study.variants else 'methods'}.{name}"
        try:
            study_column(sweep, name, check_paths=check_paths)
        except ValidationError as error:
            lines = (_explain(SweepSpec, where, item) for item in error.errors())
            raise InputError("\n".join(dict.fromkeys(lines))) from None


def _check_variant(name: str, keys: Mapping[str, Any], path: Path) -> None:
    """Only what a training is may vary."""
    for key, value in keys.items():
        section, _, last = key.partition(".")
        where = f"study.variants.{name}.{key}"
        if key in _STUDY_SETS:
            raise InputError(f"is set by {_STUDY_SETS[key]}", source=path, key=where)
        if section not in ("workload", "training") or not last or "." in last:
            message = 'expected a key of [workload] or [training], for example "training.delta" or "workload.lr"'
            raise InputError(message, source=path, key=where)
        if key == "training.method" and name in get_args(Method) and value != name:
            message = f"a variant named after a method has that method; call it otherwise for {_shown(value)}"
            raise InputError(message, source=path, key=where)


def cluster_sizes(search: SearchSpec, part: ClusterSpec) -> tuple[int, ...]:
    """The cluster sizes of a search that a partition has nodes for; perhaps none."""
    return tuple(nodes for nodes in search.cluster_sizes if nodes <= part.max_nodes)


def sweep_for(sweep: SweepSpec, part: ClusterSpec) -> SweepSpec | None:
    """The sweep with the cluster sizes that a partition has nodes for; None where it has too few for any."""
    sizes = cluster_sizes(sweep.search, part)
    if sizes == sweep.search.cluster_sizes:
        return sweep
    search = sweep.search.model_copy(update={"cluster_sizes": sizes})
    return sweep.model_copy(update={"search": search}) if sizes else None


def local_batches(search: SearchSpec, nodes: int, workers_per_node: int) -> list[int]:
    """Local batches b = 2^k whose global batch N × workers × b lies within the bounds, ascending."""
    world = nodes * workers_per_node
    lowest = max(0, math.ceil(math.log2(search.min_batch / world)))
    powers = (2**k for k in range(lowest, search.max_batch.bit_length()))
    return [b for b in powers if search.min_batch <= world * b <= search.max_batch]


def _parse(kind: type[S], path: Path, overrides: Sequence[str], *, check_paths: bool = True) -> S:
    tables = _read_toml(path)
    for text in overrides:
        _override(tables, text)
    try:
        context = {"check_paths": check_paths}
        return kind.model_validate_json(_as_json(path, tables), strict=True, context=context)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        inner = {item["loc"][:depth] for item in problems for depth in range(len(item["loc"]))}
        own = [item for item in problems if item["loc"] not in inner]  # not what merely follows from a problem inside
        lines = [_explain(kind, path, item) for item in own[:MOST_MISTAKES]]
        more = [f"{path}: and {len(own) - MOST_MISTAKES} more mistakes"] if len(own) > MOST_MISTAKES else []
        # a union complains once for each of its members
        raise InputError("\n".join(dict.fromkeys([*lines, *more]))) from None


def _as_json(path: Path, tables: dict[str, Any]) -> str:
    """The tables as JSON, for which pydantic's strict mode knows lists from tuples and paths from text."""
    try:
        text = json.dumps(tables, default=str)
        _refuse_absurd(path, tables)
    except (RecursionError, ValueError) as error:  # tables in tables without end, numbers of 5000 digits
        raise InputError(f"holds a value out of all bounds: {error}", source=path) from None
    return text


def _refuse_absurd(path: Path, value: object, place: tuple[str, ...] = ()) -> None:
    """Refuse numbers with which nothing can be computed, wherever they are; some keys have closer bounds.

    Raises:
        InputError: There is one.
    """
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            _refuse_absurd(path, inner, (*place, str(key)))
    elif isinstance(value, int | float) and LARGEST < abs(value) < math.inf:
        raise InputError(_line(path, place, f"expected numbers within ±{LARGEST:g}"))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return _tables(read_bounded(path, MAX_FILE_BYTES).decode("utf-8-sig"))
    except FileNotFoundError:
        raise InputError("no such file", source=path) from None
    except OSError as error:
        if error.errno == errno.EOVERFLOW:
            raise InputError(f"expected a TOML file under {MAX_FILE_BYTES:,} bytes", source=path) from None
        raise InputError(f"cannot be read: {error.strerror}", source=path) from None
    except UnicodeDecodeError:
        raise InputError("expected UTF-8 text", source=path) from None
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError; so is a number of 5000 digits
        raise InputError(f"is not valid TOML: {_first_words(error)}", source=path) from None


def _first_words(error: Exception) -> str:
    """An error's message in a line, whatever of the file it quotes."""
    text = str(error)
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= 200 else f"{text[:120]}...{text[-60:]}"  # the place in the file stands at the end


# a string, or what is left of the line where it does not end: it always goes on behind it, so that time is linear
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*+"?|' + r"'[^'\n]*+'?")
_IN_KEY = re.compile(r"[^\[\]{}=,#\n]+")


def _tables(text: str) -> dict[str, Any]:
    """Parse TOML, but no dotted keys of thousands of parts.

    Raises:
        ValueError: It is not TOML.
        RecursionError: It is nested too deeply.
    """
    parts = 0
    for part in _STRING.sub("q", text).split("."):
        parts = parts + 1 if part.strip() and _IN_KEY.fullmatch(part) else 0
        if parts > MOST_KEY_PARTS:
            raise ValueError(f"a key of more than {MOST_KEY_PARTS} parts")
    return tomllib.loads(text)


def _override(tables: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    *sections, last = key.strip().split(".")
    if not equals or not last or not text.isprintable():
        raise InputError(f"expected section.key=value, got {text[:200]!r}", source="--set")
    for section in sections:
        tables = tables.setdefault(section, {})
        if not isinstance(tables, dict):
            raise InputError(f"{section!r} is not a table", source="--set", key=key)
    try:
        tables[last] = _tables(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        tables[last] = value.strip()  # a bare word


# pydantic's error types in the words of a TOML file
_EXPECTED = {
    "extra_forbidden": "unknown key",
    "model_type": "expected a table",
    "dict_type": "expected a table",
    "tuple_type": "expected a list in brackets",
    "string_type": "expected text in quotes",
    "int_type": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_type": "expected a number",
    "finite_number": "expected a finite number",
    "bool_type": "expected true or false",
    "literal_error": "expected {expected}",
    "greater_than": "expected more than {gt:g}",
    "greater_than_equal": "expected at least {ge}",
    "less_than": "expected less than {lt}",
    "less_than_equal": "expected at most {le}",
    "too_short": "expected at least {min_length} value",
    "too_long": "expected at most {max_length} values",
    "string_too_long": "expected at most {max_length} characters",
}
_UNION_MEMBERS = ("constrained-str", "constrained-int", "int", "bool")  # of `sbatch`: pydantic adds them to the place


def _explain(kind: type[Spec], path: Path | str, item: Mapping[str, Any]) -> str:
    """One line for one pydantic error: file: key: what is wrong."""
    location = [str(part) for part in item["loc"]]
    if location[:1] == ["sbatch"] and location[-1] in _UNION_MEMBERS:
        return _line(
            path, location[:-1], f"expected a word, a whole number, true or false, got {_shown(item['input'])}"
        )
    if item["type"] == "extra_forbidden":
        valid = _fields_at(kind, location[:-1])
        return _line(path, location, f"unknown key{_nearest(location[-1], valid)}; valid keys: {', '.join(valid)}")
    if item["type"] == "missing":
        return _line(path, location, "is required")
    if item["type"] == "value_error":
        return _line(path, *_own_words(location, str(item["msg"]).removeprefix("Value error, ")))
    if "pattern" in item["type"]:
        if location[-1] == "[key]":
            location = location[:-2]  # what follows names the key
        message = f"{_shown(item['input'])} holds characters that are not allowed here"
        return _line(path, location, f"{message} (pattern {item['ctx']['pattern']})")
    return _line(path, location, f"{_words(item)}, got {_shown(item['input'])}")


def _words(item: Mapping[str, Any]) -> str:
    """What was expected, or a validator's own words."""
    words = _EXPECTED.get(item["type"])
    expected = item["msg"] if words is None else words.format(**item.get("ctx", {}))
    return str(expected).removeprefix("Value error, ")


def _line(path: Path | str, location: Sequence[str], message: str) -> str:
    key = ".".join(_named(part) for part in location)
    return str(InputError(message, source=path, key=key))


def _named(part: str) -> str:
    """A part of a key as it stands in TOML, or its beginning."""
    part = part if part and part.isprintable() else ascii(part)
    return part if len(part) <= 100 else f"{part[:97]}..."


def _own_words(location: list[str], message: str) -> tuple[list[str], str]:
    """A model validator names the key that is wrong in front of its message."""
    field, colon, rest = message.partition(": ")
    return ([*location, field], rest) if colon and field.isidentifier() else (location, message)


def _shown(value: object, most: int = 80) -> str:
    """A value as it stands in TOML, or its beginning."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    text = text if text.isprintable() else json.dumps(value, default=str)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _fields_at(kind: type[BaseModel], location: Iterable[str]) -> list[str]:
    for part in location:
        if part.isdigit():  # place in a list of tables
            continue
        annotation = kind.model_fields[part].annotation
        for inner in (annotation, *get_args(annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                kind = inner
    return list(kind.model_fields)


def _nearest(word: str, valid: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, valid, n=1) if len(word) <= 100 else []
    return f" (did you mean {close[0]!r}?)" if close else ""


def _checks_paths(info: ValidationInfo) -> bool:
    return bool((info.context or {}).get("check_paths", True))


def _known_or_entry_point(value: str, known: Iterable[str], what: str, check_exists: bool) -> str:
    if ":" in value:
        if check_exists:
            _check_entry_point(value)
        return value
    if value not in known:
        names = ", ".join(known)
        raise ValueError(
            f'{value!r} is not {what}{_nearest(value, known)}; expected "package.module:function" or one of: {names}'
        )
    return value


class _Source(NamedTuple):
    path: Path
    names: set[str]


def _check_entry_point(value: str) -> None:
    """Make sure that module and function exist, from the source text: importing could pull in torch."""
    module, _, function = value.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), function]):
        raise ValueError(f'{value!r}: expected "package.module:function"')
    source = _find_source(module)
    if source is None:
        raise ValueError(f"{value!r}: no module {module!r} in the working directory or the installed packages")
    if function not in source.names and "*" not in source.names:
        raise ValueError(f"{value!r}: {source.path} defines no {function!r}")


def _find_source(module: str) -> _Source | None:
    relative = Path(*module.split("."))
    for folder in _module_folders(module.partition(".")[0]):
        for path in (folder / relative.with_suffix(".py"), folder / relative / "__init__.py"):
            if path.is_file():
                return _Source(path, _top_level_names(path))
    return None


def _module_folders(package: str) -> Iterator[Path]:
    """Where modules are looked for, and where the finder of an editable install says that the package lies."""
    yield from (Path.cwd(), *map(Path, sys.path))
    try:
        spec = importlib.util.find_spec(package)  # imports nothing, as the name has no dot
    except ValueError:  # __main__
        return
    for location in (spec and spec.submodule_search_locations) or ():
        yield Path(location).parent


def _top_level_names(path: Path) -> set[str]:
    try:
        return set(_names(ast.parse(path.read_text(encoding="utf-8")).body))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid Python: {error}") from None


def _names(statements: Iterable[ast.stmt]) -> Iterator[str]:
    """Names that statements of a module bind, those below `if` and `try` included."""
    for node in statements:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.If | ast.Try):
            yield from _names([*node.body, *node.orelse])
            yield from _names(inner for handler in getattr(node, "handlers", ()) for inner in handler.body)


def _check_data_dir(dataset: str, data_dir: Path | None) -> None:
    if data_dir is None:
        raise ValueError(f"data_dir: dataset = {dataset!r} needs the folder that holds it")
    try:
        found = data_dir.is_dir()
    except OSError as error:
        raise ValueError(f"data_dir: {_shown(str(data_dir), 400)} cannot be read: {error.strerror}") from None
    if not found:
        raise ValueError(f"data_dir: no such folder: {_shown(str(data_dir), 400)}")
