"""plan.json, and whether it is as it was written.

A plan ends with the SHA-256 of its text above that: one that was edited since is refused wherever
it is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from enum import StrEnum
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import ConfigDict, Field

from tula_hpc.errors import RunDirectoryError
from tula_hpc.files import read_bounded
from tula_hpc.formatting import FOREVER_S, command_line
from tula_hpc.records.base import Batch, Configuration, Nodes, Record, WorkersPerNode
from tula_hpc.records.storage import MAX_DOCUMENT_BYTES, read_document, write_atomically


class Interval(NamedTuple):
    """A number with the ends of its interval, in the unit of the quantity."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Interval:
        """Multiply all three, for a change of unit."""
        return Interval(self.value * factor, self.low * factor, self.high * factor)


# multiples of one another
_TIMES = ("train_time_s", "epoch_time_s", "step_time_s")


class Candidate(Record):
    """One configuration with the predictions of the models."""

    # which of [[partitions]]; empty where the cluster has none
    partition: str = ""
    nodes: Nodes
    workers_per_node: WorkersPerNode = 1
    local_batch: Batch
    global_batch: Batch
    # forward passes in which a script takes the local batch, as memory forbids it at once
    accumulation: int = Field(default=1, ge=1, le=2**31)
    # as measured, where it was
    step_time_s: float
    # of the fitted model, measured or not
    model_step_time_s: float
    epoch_time_s: float
    # steps alone
    train_time_s: float
    # expected, with starts, checkpoints and what restarts repeat; not the queue. This is paid for
    wall_time_s: float
    # expected, to the progress of as many epochs with `training.base_batch`: a larger batch needs
    # more samples; None: the gradient's noise was not measured
    progress_time_s: float | None = None
    cost: float
    # SU: service units, that is billing units times hours
    currency: Literal["USD", "SU"] = "USD"
    # of the site, its overhead included; None where no power is known
    energy_kwh: float | None = None
    # between two checkpoints, as time and cost reckon; training measures anew. None: of a script that
    # saves nothing
    checkpoint_minutes: float | None = None
    # of wall_time_s: steps, evaluation, checkpoints, starts and ends of jobs, repeated (what restarts
    # do again)
    wall_parts_s: dict[str, float] = Field(default={})
    # of each of them, seconds
    part_intervals_90: dict[str, tuple[float, float]] = Field(default={})
    peak_memory_bytes: int
    interval_90: dict[str, tuple[float, float]] = Field(default={})
    feasible: bool = True
    measured: bool = False
    # why it is not feasible
    why: str = ""
    # no feasible candidate is both faster and cheaper
    pareto: bool = False

    @property
    def configuration(self) -> Configuration:
        """Return the configuration alone."""
        return Configuration(self.nodes, self.workers_per_node, self.local_batch)

    @property
    def in_parts(self) -> str:
        """Return " in 4 parts" where a script takes its batch so; else ""."""
        return f" in {self.accumulation} parts" if self.accumulation > 1 else ""

    @property
    def finite_cost(self) -> float | None:
        """Return the cost; None where the training would never end."""
        return None if self.wall_time_s >= FOREVER_S else self.cost

    def predicted(self, quantity: str) -> Interval:
        """Return a predicted quantity with its 90 % interval, where the plan has one.

        Step, epoch and training time are multiples of one another: the interval of one gives those
        of the others.
        """
        value = float(getattr(self, quantity))
        same_spread = _TIMES if quantity in _TIMES else ()
        for known in (quantity, *same_spread):
            base = float(getattr(self, known, 0.0))
            if known in self.interval_90 and base > 0:
                low, high = self.interval_90[known]
                return Interval(value, value * low / base, value * high / base)
        return Interval(value, value, value)


class Knee(Record):
    """Knee of training time against global batch, with its confidence."""

    # None: the curve has no knee
    global_batch: float | None
    # over curves drawn from the fit's uncertainty, of those with a knee
    interval_90: tuple[float, float] | None = None
    # whether it reaches the curves' end, as at the samples of the data set: it might go on beyond
    is_cut: bool = False
    # of those curves
    share_without_knee: float = 0.0

    @property
    def between(self) -> str:
        """The interval in words, "between 400 and 600"; empty without one."""
        if self.interval_90 is None:
            return ""
        low, high = self.interval_90
        end = ", where the curve ends," if self.is_cut else ""
        return f"between {low:,.0f} and {high:,.0f}{end}"


class Remedy(StrEnum):
    """Action that a doubt asks of its reader, the most pressing first."""

    MEASURE = "measure"
    CHANGE = "change"
    # nothing
    KNOW = "know"

    @property
    def heading(self) -> str:
        """Return what such doubts are headed with."""
        headings = {"measure": "Measure more", "change": "Change a setting", "know": "Good to know"}
        return headings[self]

    def doubts(self, texts: Iterable[str]) -> list[Doubt]:
        """Return warnings that this would settle."""
        return [Doubt(text, self) for text in texts]


class Doubt(NamedTuple):
    """A warning with the action that it asks of its reader."""

    text: str
    remedy: Remedy


def grouped(doubts: Iterable[Doubt]) -> dict[str, list[str]]:
    """Return the doubts under the headings of their remedies; none without any."""
    found: dict[str, list[str]] = {}
    listed = list(doubts)
    for remedy in Remedy:
        texts = [doubt.text for doubt in listed if doubt.remedy is remedy]
        if texts:
            found[remedy.heading] = texts
    return found


class Plan(Record):
    """plan.json: the chosen configuration, every candidate, and the fallbacks."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    objective: str
    # what of [objective] is not as in the run's sweep.toml, as `tula plan --set` asked for it
    other_objective: list[str] = Field(default=[])
    chosen: Candidate
    # one sentence: why this one
    reason: str
    candidates: list[Candidate]
    # ranked smaller batches for OOM, first to be tried first
    fallbacks: list[Candidate]
    # what would have been chosen next, best first
    runners_up: list[Candidate] = Field(default=[])
    # what would have been chosen of all with fewer nodes, and of all with more
    other_nodes: list[Candidate] = Field(default=[])
    # share of the training's node-seconds that a profile of the chosen configuration would cost,
    # which is why it was not measured; None where it was, or a warning has another reason
    profile_share: float | None = None
    # constraints that rule out a better candidate
    binding: list[str] = Field(default=[])
    knee: Knee | None = None
    # samples; gradient noise scale, weighted mean of tr(Σ) over that of |G|²
    critical_batch: float | None = None
    # the training's metrics, or the first weights
    critical_batch_source: Literal["training", "profile"] | None = None
    # what prices and times assume
    notes: list[str] = Field(default=[])
    # those of them that hold until a training has measured this
    provisional: dict[Literal["save", "evaluation", "start"], list[str]] = Field(default={})
    models: dict[str, Any]
    warnings: list[str] = Field(default=[])
    # of each of them, in their order
    remedies: list[Remedy] = Field(default=[])
    dataset_samples: int
    epochs: int
    memory_limit_bytes: int | None = None

    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)

    @property
    def pareto(self) -> list[Candidate]:
        """Return the Pareto front of expected wall time and cost, fastest first."""
        front = (candidate for candidate in self.candidates if candidate.pareto)
        return sorted(front, key=lambda candidate: (candidate.wall_time_s, candidate.cost))

    @property
    def doubts(self) -> list[Doubt]:
        """Return the warnings with their remedies; without one there is nothing to do."""
        pairs = zip_longest(self.warnings, self.remedies[: len(self.warnings)])
        return [Doubt(text, remedy or Remedy.KNOW) for text, remedy in pairs]

    def find(self, configuration: Configuration, partition: str | None = None) -> Candidate | None:
        """Return the candidate of a configuration; without a partition the chosen one's first."""
        found = [item for item in self.candidates if item.configuration == configuration]
        if partition is not None:
            return next((item for item in found if item.partition == partition), None)
        return min(found, key=lambda item: item.partition != self.chosen.partition, default=None)

    def with_doubts(self, doubts: Iterable[Doubt]) -> Self:
        """Return the plan with more warnings at the end."""
        every = [*self.doubts, *doubts]
        warnings = [doubt.text for doubt in every]
        remedies = [doubt.remedy for doubt in every]
        return self.model_copy(update={"warnings": warnings, "remedies": remedies})


_SEAL = re.compile(rb',\s*"sha256":\s*"(\w+)"\s*}\s*$')
SEAL_BYTES = 200


def write_plan(path: Path, plan: Plan) -> None:
    """Write plan.json with the digest of its text.

    Raises:
        StorageError: It cannot be written.
    """
    text = plan.model_dump_json(by_alias=True, indent=1).removesuffix("\n}")
    digest = sha256(text.encode()).hexdigest()
    write_atomically(path, f'{text},\n "sha256": "{digest}"\n}}')


def read_plan(path: Path, has_trained: Callable[[], bool]) -> Plan:
    """Read plan.json.

    Args:
        path: The file.
        has_trained: Tells whether a training has begun; until then the choice is free.

    Raises:
        FileNotFoundError: There is none.
        RunDirectoryError: It cannot be read, is damaged, or was changed since it was written.
    """
    plan = read_document(Plan, path)
    content = read_bounded(path, MAX_DOCUMENT_BYTES)
    seal = _SEAL.search(content, max(0, len(content) - SEAL_BYTES))
    if seal is not None and sha256(content[: seal.start()]).hexdigest() != seal[1].decode():
        message = (
            "was changed since it was written, perhaps by hand; delete it, and the command of the "
            "sweep makes it again"
        )
        if not has_trained():
            again = command_line(
                "plan", str(path.parent), "--set", "objective.KEY=VALUE", "--write"
            )
            message += f"; for another choice over the same measurements: {again}"
        raise RunDirectoryError(message, source=path)
    return plan
