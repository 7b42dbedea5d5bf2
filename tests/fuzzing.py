"""How much is tried: the same few hundred cases in every run of the tests, or others, and as many as one likes.

    TULA_FUZZ=50 python -m pytest --ignore tests/local --ignore tests/slurm -k 'fuzz or damaged or strangers or config
        or workloads_models or performance or adaptive or printable'

tries fifty times as many, and different ones each time.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("TULA_FUZZ", "0"))


def fuzz(examples: int) -> settings:
    """Settings for a test that takes so many examples in a usual run."""
    return settings(
        max_examples=examples * max(1, TIMES),
        derandomize=not TIMES,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
