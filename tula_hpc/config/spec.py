"""What all input tables have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

GIB = 1024**3
MOST_GIB = 1e9
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class Spec(BaseModel):
    """Base of all input tables: immutable, no unknown keys, no silent conversions of strings to numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
