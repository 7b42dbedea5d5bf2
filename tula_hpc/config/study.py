"""`[study]` of a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import Field, field_validator, model_validator

from tula_hpc.config.training import Method
from tula_hpc.config.validation import Name, Spec, nearest, shown

# of a study
MOST_TRAININGS = 100_000
# of optimizers that share a learning rate at a small batch
Family = Literal["all", "sgd", "adamw", "lars", "lamb"]
# of a study: what every method is held against, at the small batch and at the large ones
REFERENCE_COLUMN = "lbt"


class StudyCell(NamedTuple):
    """One training of a study."""

    # a method, or a variant
    column: str
    # global
    batch: int
    seed: int

    @property
    def label(self) -> str:
        """Name of the training inside the run directory."""
        return f"study/{self.column}-b{self.batch}-s{self.seed}"


class StudySpec(Spec):
    """`[study]`: methods × global batches × seeds, each trained once, in place of one planned training."""

    # of training.method, or names of variants; each is a column of the table
    methods: tuple[Name, ...] = ()
    batches: tuple[Annotated[int, Field(ge=1, le=2**30)], ...] = Field(min_length=1)
    seeds: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...] = Field(
        default=(0, 1, 2), min_length=1
    )
    # global batch of the reference, method lbt; 0: none
    small_batch: int = Field(default=128, ge=0, le=2**30)
    # of every training
    nodes: int = Field(default=1, ge=1, le=65_536)
    # accuracy that the table compares
    metric: Literal["top1", "top5"] = "top1"
    # epochs between looks at the test set; the last always
    evaluate_every: int = Field(default=1, ge=1, le=100_000)
    # one is chosen for workload.lr of that family
    base_lrs: dict[
        Family, Annotated[list[Annotated[float, Field(gt=0)]], Field(max_length=100)]
    ] = Field(default={})
    # share of the training samples that the choice is made on
    tuning_holdout: float = Field(default=0.1, gt=0, lt=1)
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
        return {
            name: dict(_dotted(keys)) if isinstance(keys, dict) else keys
            for name, keys in value.items()
        }

    @model_validator(mode="after")
    def _consistent(self) -> StudySpec:
        lists = {key: getattr(self, key) for key in ("methods", "batches", "seeds")}
        for key, values in [
            *lists.items(),
            *(("base_lrs", rates) for rates in self.base_lrs.values()),
        ]:
            if len(
                {f"{value:g}" if isinstance(value, float) else value for value in values}
            ) != len(values):
                raise ValueError(f"{key}: expected each value once")
        if len(self.columns) * len(self.batches) * len(self.seeds) > MOST_TRAININGS:
            raise ValueError(
                f"batches: with methods and seeds more than {MOST_TRAININGS:,} trainings"
            )
        if not self.columns:
            raise ValueError(
                'methods: expected at least one, for example methods = ["lbt", "lrs", "ags"]'
            )
        for name in self.methods:
            self._check_column(name)
        if self.base_lrs and not self.small_batch:
            raise ValueError(
                "base_lrs: the rate is chosen at the small batch, and small_batch = 0 says there is none"
            )
        return self

    def _check_column(self, name: str) -> None:
        known = (*get_args(Method), *self.variants)
        if name not in known:
            raise ValueError(
                f"methods: {shown(name)} is neither a method nor one of [study.variants]{nearest(name, known)}; "
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
