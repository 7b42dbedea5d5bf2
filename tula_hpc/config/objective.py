"""`[objective]` of a sweep."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from tula_hpc.config.mistakes import shown
from tula_hpc.config.spec import Spec


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
        raise ValueError(f'expected hours, or a duration such as "12h", "90m" or "2d", got {shown(text)}')
    return float(match[1]) * _HOURS[match[2]]
