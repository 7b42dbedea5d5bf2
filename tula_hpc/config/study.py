"""`[study]` of a sweep: methods × batches × seeds."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import Field, field_validator, model_validator

from tula_hpc.config.training import Method
from tula_hpc.config.validation import Name, Needs, Spec, leaves, nearest, shown
from tula_hpc.config.workload import DATASETS, WorkloadSpec

MOST_TRAININGS = 100_000
# groups of optimizers, each with learning rates of its own at the small batch; "all": one group
Family = Literal["all", "sgd", "adamw", "lars", "lamb"]
# column that every method is compared with, both at the small batch and at the large batches
REFERENCE_COLUMN = "lbt"


class StudyCell(NamedTuple):
    """One training of a study."""

    # name of a method or of a variant
    column: str
    # global batch
    batch: int
    seed: int

    @property
    def label(self) -> str:
        """Name of the training inside the run directory."""
        return f"study/{self.column}-b{self.batch}-s{self.seed}"


class StudySpec(Spec):
    """`[study]`: train each combination of method, global batch and seed once; plan nothing."""

    methods: tuple[Name, ...] = ()
    """Columns of the table: values of `training.method`, or names of variants."""
    batches: tuple[Annotated[int, Field(ge=1, le=2**30)], ...] = Field(min_length=1)
    """Global batches at which every method is trained."""
    seeds: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...] = Field(
        default=(0, 1, 2), min_length=1
    )
    """Seeds of weights, order and augmentation; each seed is a training of its own."""
    small_batch: int = Field(default=128, ge=0, le=2**30)
    """Global batch of the reference training (method lbt); 0: no reference."""
    nodes: int = Field(default=1, ge=1, le=65_536)
    """Number of nodes of every training."""
    metric: Literal["top1", "top5"] = "top1"
    """Accuracy that the study compares."""
    evaluate_every: int = Field(default=1, ge=1, le=100_000)
    """Epochs between two evaluations on the test set; the last epoch is always evaluated."""
    base_lrs: dict[
        Family, Annotated[list[Annotated[float, Field(gt=0)]], Field(max_length=100)]
    ] = Field(default={})
    """Candidate values of `workload.lr`, as a list or a table by optimizer; the best one at the
    small batch is used.
    """
    tuning_holdout: Annotated[float, Needs("base_lrs")] = Field(default=0.1, gt=0, lt=1)
    """Share of the training samples that is held out to choose among `base_lrs`."""
    variants: dict[Name, dict[str, Any]] = Field(default={}, max_length=1000)
    """Further columns by name, each with the keys of [workload] and [training] that it changes."""

    @field_validator("base_lrs", mode="before")
    @classmethod
    def _of_all(cls, value: object) -> object:
        if isinstance(value, list | tuple) and value:
            return {"all": value}
        return value or {}

    @field_validator("variants", mode="before")
    @classmethod
    def _flat(cls, value: object) -> object:
        # TOML reads the key `training.delta = 0.1` without quotes as a table in a table
        if not isinstance(value, dict):
            return value
        return {
            name: dict(leaves(keys)) if isinstance(keys, dict) else keys
            for name, keys in value.items()
        }

    @model_validator(mode="after")
    def _consistent(self) -> StudySpec:
        for key in ("methods", "batches", "seeds"):
            _check_once(key, list(map(str, getattr(self, key))))
        for rates in self.base_lrs.values():
            _check_once("base_lrs", [f"{rate:g}" for rate in rates])
        if len(self.columns) * len(self.batches) * len(self.seeds) > MOST_TRAININGS:
            raise ValueError(
                f"batches: methods × batches × seeds are more than {MOST_TRAININGS:,} trainings; "
                "leave some out"
            )
        if not self.columns:
            raise ValueError(
                'methods: expected at least one, for example methods = ["lbt", "lrs", "ags"]'
            )
        for name in self.methods:
            self._check_column(name)
        if self.base_lrs and not self.small_batch:
            raise ValueError(
                "base_lrs: the rate is chosen at the small batch, and small_batch = 0 leaves none; "
                "expected a small_batch above 0, or no base_lrs"
            )
        return self

    def _check_column(self, name: str) -> None:
        known = (*get_args(Method), *self.variants)
        if name not in known:
            raise ValueError(
                f"methods: {shown(name)} is neither a method nor one of [study.variants]"
                f"{nearest(name, known)}; methods: {', '.join(get_args(Method))}"
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """Methods and variants, in order."""
        return tuple(dict.fromkeys([*self.methods, *self.variants]))

    def overrides(self, column: str) -> dict[str, Any]:
        """Return the dotted keys that a column changes; a method's name sets the method."""
        own = {"training.method": column} if column in get_args(Method) else {}
        return own | self.variants.get(column, {})

    def rates_of(self, family: str) -> list[float]:
        """Return the candidate rates of a family of optimizers; an empty list keeps workload.lr."""
        chosen = {str(name): rates for name, rates in self.base_lrs.items()}
        return chosen.get(family, chosen.get("all", []))

    def cells(self) -> list[StudyCell]:
        """Return every training once, seed by seed: the first seed already fills the table."""
        pairs = [(REFERENCE_COLUMN, self.small_batch)] if self.small_batch else []
        pairs += [(column, batch) for batch in self.batches for column in self.columns]
        return [StudyCell(*pair, seed) for seed in self.seeds for pair in dict.fromkeys(pairs)]


def check_accuracy(work: WorkloadSpec, study: StudySpec) -> None:
    """Refuse a workload that does not give the accuracy that the study compares."""
    if work.is_script:
        _check_script_study(work, study)
        return
    if work.loss is not None and work.metric is None and work.dataset not in DATASETS:
        raise ValueError(
            "workload.metric: a study compares accuracies, and your own data with your own loss "
            "may have none; expected a function that returns the share of each sample that is right"
        )
    if work.metric is not None and study.metric == "top5":
        raise ValueError(
            'study.metric: "top5" cannot be computed with workload.metric; expected "top1"'
        )


def _check_script_study(work: WorkloadSpec, study: StudySpec) -> None:
    """Refuse keys that a study cannot compare or set in a training script from outside."""
    if study.base_lrs:
        raise ValueError("study.base_lrs: a script has its own learning rate; remove this key")
    if study.evaluate_every != 1:
        raise ValueError("study.evaluate_every: a script evaluates by itself; remove this key")
    if len(study.seeds) > 1 and "seed" not in work.placeholders:
        raise ValueError(
            "study.seeds: the trainings of all seeds would be the same; expected {seed} in "
            "workload.arguments, or one seed"
        )
    needed = "test_top5_accuracy" if study.metric == "top5" else "test_accuracy"
    # without workload.metric the script may pass its accuracy to `tula.report`
    if work.metric is not None and needed not in re.compile(work.metric).groupindex:
        raise ValueError(
            f"workload.metric: a study compares accuracies; expected a group named {needed}"
        )


def _check_once(key: str, values: list[str]) -> None:
    if len(set(values)) != len(values):
        raise ValueError(f"{key}: expected each value once")
