"""Slurm's trackable resources (TRES) as text: what a job asks for, and slurm.conf's TRESBillingWeights.

"CPU=1.0,Mem=0.25G,GRES/gpu=2.0" bills each core with 1, each GiB with 0.25 and each GPU with 2. Weights count per base
unit: one core, one GPU, one node, and for memory (also "vmem" and burst buffers "bb/…") one MiB. A suffix K, M, G, T or
P divides the weight by what lies between the base unit and that unit, in powers of 1024: "0.25G" of memory is 0.25 /
1024 per MiB. A suffix at or below the base unit changes nothing, so that "Mem=1K" is 1 per MiB (slurm.conf(5);
`get_convert_unit_val` in Slurm's source).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

SUFFIXES = "KMGTP"
MIB_BASED = ("mem", "vmem", "bb")  # types whose base unit is MiB, the second suffix
_WEIGHT = re.compile(r"(\+?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)([KMGTP]?)", re.IGNORECASE)
_NAME = re.compile(r"[a-z]\w*(/[\w.:-]+)?")
_SOCKETS = re.compile(r"\([^()]*\)")  # behind a count, as Slurm shows them: gpu:4(S:0-1)


def parse_weights(weights: str | Mapping[str, object]) -> dict[str, float]:
    """Weights per base unit by TRES name in lower case, from slurm.conf's own text or a table of the same.

    Args:
        weights: "CPU=1.0,Mem=0.25G", or {"CPU": 1.0, "Mem": "0.25G"}; empty for none.

    Raises:
        ValueError: An entry is not NAME=WEIGHT, a weight is negative, or a TRES stands there twice.
    """
    entries = _split(weights) if isinstance(weights, str) else list(weights.items())
    found: dict[str, float] = {}
    for name, value in entries:
        key = name.strip().lower()
        if not _NAME.fullmatch(key):
            raise ValueError(f'{name!r} is no TRES; expected for example "CPU=1.0,Mem=0.25G,GRES/gpu=2.0"')
        if key in found:
            raise ValueError(f"{name!r} stands there twice")
        found[key] = _weight(key, value)
    return found


def _split(text: str) -> list[tuple[str, object]]:
    pairs = [item.partition("=") for item in text.split(",") if item.strip()]
    wrong = next((name for name, equals, _ in pairs if not equals), None)
    if wrong is not None:
        raise ValueError(f'{wrong.strip()!r} has no weight; expected for example "CPU=1.0,Mem=0.25G,GRES/gpu=2.0"')
    return [(name, value) for name, _, value in pairs]


def _weight(key: str, value: object) -> float:
    match = _WEIGHT.fullmatch(str(value).strip()) if isinstance(value, int | float | str) else None
    if match is None or math.isinf(float(match[1])):
        expected = "a number of 0 or more, perhaps with one of the suffixes K M G T P"
        raise ValueError(f"{key}: expected {expected}, got {value!r}")
    unit = SUFFIXES.index(match[2].upper()) + 1 if match[2] else 0
    base = SUFFIXES.index("M") + 1 if key.partition("/")[0] in MIB_BASED else 0
    return float(match[1]) / 1024.0 ** max(0, unit - base)


def requested_gres(gres: str) -> Iterator[tuple[str, str, float]]:
    """Yield name, type ("" for none) and count of each item of `name[[:type]:count],…`, in lower case.

    Types may begin with a digit, as in "gpu:2080ti:4" and "gpu:1g.5gb": a count is a last field of digits alone.
    """
    for item in _SOCKETS.sub("", gres).lower().split(","):
        name, *fields = item.removeprefix("gres:").split(":")
        count = float(fields.pop()) if fields and fields[-1].isdecimal() else 1.0
        if name:
            yield name, ":".join(filter(None, fields)), count
