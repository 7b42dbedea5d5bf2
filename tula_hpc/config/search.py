"""`[search]` and `[objective]` of a sweep, and the local batches between the search's bounds."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from tula_hpc.config.validation import Needs, Spec, shown

# Keys that other tools use, each with the end of the message that refuses it in a sweep file: this
# end names the key to use instead.
_BATCH = (
    "; the sweep chooses the batch, between search.min_batch and search.max_batch, and "
    "training.base_batch is the batch that workload.lr was chosen for"
)
_NODES = " (did you mean search.cluster_sizes?)"
FOREIGN_KEYS = {
    **dict.fromkeys(("batch", "batches", "batch_size", "global_batch", "train_batch_size"), _BATCH),
    **dict.fromkeys(("nodes", "num_nodes", "max_nodes"), _NODES),
    **dict.fromkeys(("lr_schedule", "lr_scheduler"), " (did you mean workload.schedule?)"),
    "optimiser": " (did you mean workload.optimizer?)",
}
# time limit of each timed quantity if `max_seconds` is not given; short trainings have a lower
# limit, but not below LEAST_SECONDS
MOST_SECONDS = 60.0
LEAST_SECONDS = 10.0
FormName = Literal[
    "auto", "paper", "ring", "double_tree", "tree", "parameter_server", "reduce_scatter_all_gather"
]


class SearchSpec(Spec):
    """`[search]`: which configurations are candidates, which are profiled, and for how long."""

    cluster_sizes: tuple[Annotated[int, Field(ge=1, le=65_536)], ...] = Field(
        default=(1, 2, 4), min_length=1, max_length=256
    )
    """Candidate numbers of nodes, at most 256 of them."""
    min_batch: int = Field(default=32, ge=1, le=2**30)
    """Smallest candidate global batch (over all workers)."""
    max_batch: int = Field(default=1024, ge=1, le=2**30)
    """Largest candidate global batch; memory may bound it further."""
    mode: Literal["adaptive", "full", "partial"] = "adaptive"
    """Which configurations to measure: those the decision needs, the four corners (partial), or
    all.
    """
    max_profiles: Annotated[int, Needs("mode", ("adaptive",))] = Field(default=8, ge=3, le=100_000)
    """Number of measured configurations after which an adaptive search ends at the latest."""
    form: FormName = "auto"
    """Form of the step-time model: chosen by the data (auto), the paper's plain sum (paper), or the
    model of one collective.
    """
    pack: Literal["auto", "never"] = "auto"
    """Whether one job measures all configurations of one cluster size (auto), or each has a job of
    its own (never).
    """
    nest: bool = False
    """Measure all cluster sizes inside one allocation of the largest; nodes that a smaller cluster
    size does not use are idle meanwhile.
    """
    estimate: bool = True
    """Before any job, try the workload on the machine that runs the command, and estimate its
    memory if a memory limit is known.
    """
    warmup_steps: int = Field(default=5, ge=1, le=10_000)
    """Steps before timing begins; if they are long, only as many as take 5 s, but at least two."""
    min_steps: int = Field(default=15, ge=5, le=100_000)
    """Least number of timed steps of a configuration; a short training with long steps may time
    fewer, but at least five.
    """
    max_steps: int = Field(default=200, ge=5, le=100_000)
    """Largest number of timed steps of a configuration."""
    max_seconds: float | None = Field(default=None, gt=0, le=1e6)
    """Time limit of each timed quantity of a configuration; without it as long as 1.5 % of the
    training's steps take, within 10 s and 60 s.
    """
    ci_width: float = Field(default=0.02, gt=0, lt=1)
    """Timing ends when the 95 % interval of the mean step time is narrower than this share of the
    mean.
    """
    first_step_minutes: float = Field(default=10.0, gt=0, le=1e6)
    """Time without an optimizer step after which a script is given up."""

    @field_validator("cluster_sizes")
    @classmethod
    def _sorted_once(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(value)) != len(value):
            raise ValueError("expected each cluster size once")
        return tuple(sorted(value))

    @field_validator("pack", mode="before")
    @classmethod
    def _without_always(cls, value: object) -> object:
        # files of earlier versions, in which auto was not the same everywhere, may hold it
        return "auto" if value == "always" else value

    @model_validator(mode="after")
    def _ordered(self) -> SearchSpec:
        for low, high in (("min_batch", "max_batch"), ("min_steps", "max_steps")):
            least = getattr(self, low)
            most = getattr(self, high)
            if least > most:
                raise ValueError(
                    f"{low}: {least} is above {high} = {most}; lower it, or raise {high}"
                )
        if self.nest and self.pack == "never":
            raise ValueError(
                'nest: true measures everything in one job, which pack = "never" forbids; '
                "leave one of them out"
            )
        return self

    @property
    def packed(self) -> bool:
        """True if one job measures several configurations."""
        return self.pack != "never"


def local_batches(search: SearchSpec, nodes: int, workers_per_node: int) -> list[int]:
    """Return local batches b = 2^k with a global batch N × workers × b in the bounds, ascending."""
    world = nodes * workers_per_node
    lowest = max(0, math.ceil(math.log2(search.min_batch / world)))
    powers = (2**k for k in range(lowest, search.max_batch.bit_length()))
    return [b for b in powers if search.min_batch <= world * b <= search.max_batch]


def batches_timed_apart(
    search: SearchSpec, nodes: int, workers_per_node: int, local_batch: int
) -> list[int]:
    """Return the smaller local batches of other candidates that a profile also times, ascending.

    A profile times only their computation. That is the same on any number of nodes, so that only
    profiles on the fewest nodes do it. A full search measures every batch anyway. A batch of one
    sample is left out, because BatchNorm may refuse to train on it.
    """
    batches = {size: local_batches(search, size, workers_per_node) for size in search.cluster_sizes}
    fewest = min((size for size, local in batches.items() if local), default=nodes)
    if search.mode == "full" or nodes > fewest:
        return []
    return sorted(b for b in set().union(*batches.values()) if 1 < b < local_batch)


# kinds of objective that choose by a knee of the curve of time over batch
KNEES = frozenset({"knee", "kneedle"})
WEIGHTED = Needs("kind", ("weighted",))


class ObjectiveSpec(Spec):
    """`[objective]`: goal and constraints by which a configuration is chosen."""

    kind: Literal["knee", "kneedle", "time", "progress", "cost", "weighted"] = "knee"
    """Quantity that the plan minimizes: time up to the knee, the paper's knee, time, time to equal
    progress, cost, or a product of time and cost.
    """
    time_weight: Annotated[float, WEIGHTED] = Field(default=1.0, ge=0, le=100)
    """Exponent of time with `kind = "weighted"`."""
    cost_weight: Annotated[float, WEIGHTED] = Field(default=1.0, ge=0, le=100)
    """Exponent of cost with `kind = "weighted"`."""
    deadline_hours: float | None = Field(default=None, gt=0)
    """Upper bound of the expected wall time; also as text: "12h", "90m", "2d"."""
    budget: float | None = Field(default=None, gt=0)
    """Upper bound of the cost."""
    max_global_batch: int | None = Field(default=None, ge=1, le=2**44)
    """Largest global batch that may be chosen; larger ones may still be measured."""

    @property
    def has_knee(self) -> bool:
        """True if the choice depends on a knee of the curve of time over batch."""
        return self.kind in KNEES

    @field_validator("deadline_hours", mode="before")
    @classmethod
    def _with_unit(cls, value: object) -> object:
        return _hours(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _weighs_something(self) -> ObjectiveSpec:
        if self.time_weight + self.cost_weight == 0:
            raise ValueError("time_weight: expected more than 0 here or for cost_weight")
        return self


_HOURS = {"s": 1 / 3600, "m": 1 / 60, "min": 1 / 60, "h": 1.0, "d": 24.0}


def _hours(text: str) -> float:
    """Return the hours of a duration such as "12h", "90 min" or "2d"."""
    match = re.fullmatch(r"\s{0,9}(\d{1,9}(?:\.\d{0,9})?)\s{0,9}(s|m|min|h|d)\s{0,9}", text)
    if match is None:
        raise ValueError(
            f'expected hours, or a duration such as "12h", "90m" or "2d", got {shown(text)}'
        )
    return float(match[1]) * _HOURS[match[2]]
