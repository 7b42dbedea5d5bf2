"""`[pricing]` of a cluster."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from tula_hpc.config.spec import MOST_GIB, Spec
from tula_hpc.tres import parse_weights

MOST_WEIGHTS = 2000  # characters of TRES weights
ASSUMED_START_S = 60.0  # where nothing was measured


class PricingSpec(Spec):
    """`[pricing]`: what training costs; `basis` says which of the prices counts."""

    basis: Literal["node-hour", "memory", "tres", "spot", "energy"] = "node-hour"
    usd_per_node_hour: float = Field(default=1.0, ge=0)
    usd_per_gib_hour: float = Field(default=0.15, ge=0)
    # tres: Slurm's billing
    tres_weights: dict[str, float] = Field(default={})  # per core, MiB, GPU, …; as text or table like slurm.conf's
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
    checkpoint_write_s: float = Field(default=5.0, ge=0)  # until a training of the run has measured it
    restart_s: float | None = Field(default=None, ge=0)  # from the start of a job to its first step; None: as profiled

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
    def start_s(self) -> float:
        """Seconds from the start of a job to its first step, as far as they are known here."""
        return ASSUMED_START_S if self.restart_s is None else self.restart_s

    @property
    def currency(self) -> Literal["USD", "SU"]:
        """USD, or SU: service units, that is billing units times hours, where they have no price."""
        return "SU" if self.basis == "tres" and self.usd_per_unit is None else "USD"
