"""plan.json: its records, and the check that it was not edited.

The last key of plan.json is the SHA-256 of the text before it. A plan that was edited afterwards is
refused wherever it is read.
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


# quantities that are fixed multiples of one another
_TIMES = ("train_time_s", "epoch_time_s", "step_time_s")


class Candidate(Record):
    """One configuration with what the models predict for it."""

    # name in [[partitions]]; empty if the cluster has none
    partition: str = ""
    nodes: Nodes
    workers_per_node: WorkersPerNode = 1
    local_batch: Batch
    global_batch: Batch
    # forward passes in which a script takes the local batch; several if memory requires it
    accumulation: int = Field(default=1, ge=1, le=2**31)
    # as measured if this configuration was measured, else as predicted
    step_time_s: float
    # predicted by the fitted model in either case
    model_step_time_s: float
    epoch_time_s: float
    # seconds of all steps, without anything in between
    train_time_s: float
    # expected; with starts, checkpoints and repeated work, without the queue; this is paid for
    wall_time_s: float
    # expected time to the progress that as many epochs with `training.base_batch` make, since a
    # larger batch needs more samples; None: the gradient's noise was not measured
    progress_time_s: float | None = None
    cost: float
    # SU: service units, which are billing units × hours
    currency: Literal["USD", "SU"] = "USD"
    # the site's overhead included; None if the nodes' power is unknown
    energy_kwh: float | None = None
    # minutes between checkpoints that time and cost assume (a training decides by its own
    # measurements); None: a script that saves by itself, or not at all
    checkpoint_minutes: float | None = None
    # parts of wall_time_s: steps, evaluation, checkpoints, starts and ends of jobs, repeated (work
    # that restarts do again)
    wall_parts_s: dict[str, float] = Field(default={})
    # seconds, by the keys of wall_parts_s
    part_intervals_90: dict[str, tuple[float, float]] = Field(default={})
    peak_memory_bytes: int
    # by name of the field
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
        """Return e.g. " in 4 parts" if a script takes several forward passes, else ""."""
        return f" in {self.accumulation} parts" if self.accumulation > 1 else ""

    @property
    def finite_cost(self) -> float | None:
        """Return the cost; None if the training would never end."""
        return None if self.wall_time_s >= FOREVER_S else self.cost

    def predicted(self, quantity: str) -> Interval:
        """Return a predicted quantity with its 90 % interval; no width if the plan has none.

        Step, epoch and training time are multiples of one another, so the interval of one also
        gives those of the others.
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
    # among curves drawn from the fit's uncertainty, those that have a knee
    interval_90: tuple[float, float] | None = None
    # the interval ends where the curves do, e.g. at all samples of the data set; it may go on
    is_cut: bool = False
    # share of all drawn curves
    share_without_knee: float = 0.0

    @property
    def between(self) -> str:
        """The interval in words, e.g. "between 400 and 600"; empty if there is none."""
        if self.interval_90 is None:
            return ""
        low, high = self.interval_90
        end = ", where the curve ends," if self.is_cut else ""
        return f"between {low:,.0f} and {high:,.0f}{end}"


class Remedy(StrEnum):
    """Action that a doubt asks of its reader, the most pressing first."""

    MEASURE = "measure"
    CHANGE = "change"
    # nothing to do
    KNOW = "know"

    @property
    def heading(self) -> str:
        """Return the heading above such doubts."""
        headings = {"measure": "Measure more", "change": "Change a setting", "know": "Good to know"}
        return headings[self]

    def doubts(self, texts: Iterable[str]) -> list[Doubt]:
        """Return these warnings with this remedy."""
        return [Doubt(text, self) for text in texts]


class Doubt(NamedTuple):
    """A warning with the action that it asks of its reader."""

    text: str
    remedy: Remedy


def grouped(doubts: Iterable[Doubt]) -> dict[str, list[str]]:
    """Return the doubts by heading of their remedy; headings without doubts are left out."""
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
    # settings of [objective] that `tula plan --set` changed from the run's sweep.toml
    other_objective: list[str] = Field(default=[])
    chosen: Candidate
    # why this candidate, in one sentence
    reason: str
    candidates: list[Candidate]
    # smaller batches to try after an OOM, in this order
    fallbacks: list[Candidate]
    # next choices by the objective, best first
    runners_up: list[Candidate] = Field(default=[])
    # best candidate with fewer nodes than the chosen one, and best with more
    other_nodes: list[Candidate] = Field(default=[])
    # share of the training's node-seconds that a profile of the chosen configuration would cost, if
    # that is why it was not measured; None if it was, or if a warning says why not
    profile_share: float | None = None
    # constraints that rule out a better candidate
    binding: list[str] = Field(default=[])
    knee: Knee | None = None
    # gradient noise scale in samples: weighted mean of tr(Σ) over weighted mean of |G|²
    critical_batch: float | None = None
    # from a training's metrics, or from profiles at the initial weights
    critical_batch_source: Literal["training", "profile"] | None = None
    # assumptions behind prices and times
    notes: list[str] = Field(default=[])
    # notes that hold only until a training has measured the key's quantity
    provisional: dict[Literal["save", "evaluation", "start"], list[str]] = Field(default={})
    models: dict[str, Any]
    warnings: list[str] = Field(default=[])
    # one for each warning, in the same order
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
        """Return the warnings with their remedies; one without a remedy needs no action."""
        pairs = zip_longest(self.warnings, self.remedies[: len(self.warnings)])
        return [Doubt(text, remedy or Remedy.KNOW) for text, remedy in pairs]

    def find(self, configuration: Configuration, partition: str | None = None) -> Candidate | None:
        """Return a configuration's candidate; if `partition` is None, prefer the chosen one."""
        found = [item for item in self.candidates if item.configuration == configuration]
        if partition is not None:
            return next((item for item in found if item.partition == partition), None)
        return min(found, key=lambda item: item.partition != self.chosen.partition, default=None)

    def with_doubts(self, doubts: Iterable[Doubt]) -> Self:
        """Return the plan with more warnings, in front, as they are about the choice itself."""
        every = [*doubts, *self.doubts]
        warnings = [doubt.text for doubt in every]
        remedies = [doubt.remedy for doubt in every]
        return self.model_copy(update={"warnings": warnings, "remedies": remedies})


_SEAL = re.compile(rb',\s*"sha256":\s*"(\w+)"\s*}\s*$')
SEAL_BYTES = 200


def write_plan(path: Path, plan: Plan) -> None:
    """Write plan.json with the digest of its text.

    Raises:
        StorageError: The file cannot be written.
    """
    text = plan.model_dump_json(by_alias=True, indent=1).removesuffix("\n}")
    digest = sha256(text.encode()).hexdigest()
    write_atomically(path, f'{text},\n "sha256": "{digest}"\n}}')


def read_plan(path: Path, has_trained: Callable[[], bool]) -> Plan:
    """Read plan.json; an error also offers another choice, unless a training `has_trained` with it.

    Raises:
        FileNotFoundError: The file does not exist.
        RunDirectoryError: The file cannot be read, is damaged, or was changed since it was written.
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
            message += f"; for another choice from the same measurements: {again}"
        raise RunDirectoryError(message, source=path)
    return plan
