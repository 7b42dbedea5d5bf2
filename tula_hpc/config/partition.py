"""`[[partitions]]` of a cluster."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tula_hpc.config.spec import MOST_GIB, Spec

# goes into #SBATCH lines: ASCII, no blanks and no line ends
SlurmWord = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.,:/@+=%*&|()\[\]-]{1,200}$")]
PartitionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.,:@+=-]{0,63}$")]  # also goes into file names


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
    pricing: dict[str, Any] = Field(default={})  # keys of [pricing]

    def overrides(self) -> dict[str, Any]:
        """The keys that are given, except the prices."""
        return self.model_dump(exclude_none=True, exclude={"pricing"})

    def has(self, key: str) -> bool:
        """Whether a dotted key of a cluster file is given here."""
        section, _, name = key.partition(".")
        return name.partition(".")[0] in self.pricing if section == "pricing" else section in self.overrides()
