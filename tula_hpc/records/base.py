"""Base class of all records, and the types that they share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

# the bounds of the input files: this program writes no larger number
Nodes = Annotated[int, Field(ge=1, le=2**20)]
WorkersPerNode = Annotated[int, Field(ge=1, le=2**12)]
Batch = Annotated[int, Field(ge=1, le=2**44)]
# restricted, since it becomes part of commands and file names
JobId = Annotated[str, Field(pattern=r"^(\w[\w.,:%+\[\]-]{0,99})?$")]


class Record(BaseModel):
    """Base of all records: immutable; unknown keys of newer versions are ignored.

    Fields called `time` or `…_at` are Unix times in seconds.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)


class Configuration(NamedTuple):
    """Nodes N, workers on each node and local batch b of one profile or training."""

    nodes: Nodes
    workers_per_node: WorkersPerNode
    local_batch: Batch

    @property
    def world_size(self) -> int:
        """Number of workers (processes)."""
        return self.nodes * self.workers_per_node

    @property
    def global_batch(self) -> int:
        """Samples per step over all workers, B."""
        return self.world_size * self.local_batch

    @property
    def short(self) -> str:
        """Nodes and global batch, in the form that figures and tables show."""
        return f"N = {self.nodes}, B = {self.global_batch:,}"

    def __str__(self) -> str:
        return f"N={self.nodes} b={self.local_batch} (B={self.global_batch})"


def corners(configurations: Iterable[Configuration]) -> list[Configuration]:
    """Return the smallest and largest batch on the fewest and on the most nodes, ascending."""
    by_nodes: dict[int, list[Configuration]] = {}
    for configuration in sorted(configurations):
        by_nodes.setdefault(configuration.nodes, []).append(configuration)
    if not by_nodes:
        return []
    fewest = by_nodes[min(by_nodes)]
    most = by_nodes[max(by_nodes)]
    return sorted({fewest[0], fewest[-1], most[0], most[-1]})
