"""How many random cases the tests try: by default a few hundred, the same ones in every run. The command

    TULA_FUZZ=50 python -m pytest --ignore tests/local --ignore tests/slurm -k 'fuzz or damaged or strangers or config
        or workloads_models or performance or adaptive or printable'

tries fifty times as many, and other ones each time.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("TULA_FUZZ", "0"))


def fuzz(examples: int) -> settings:
    """Return Hypothesis settings for a test that tries `examples` cases by default, TULA_FUZZ times as many if set."""
    return settings(
        max_examples=examples * max(1, TIMES),
        derandomize=not TIMES,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
