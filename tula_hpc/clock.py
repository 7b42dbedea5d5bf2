"""Unix time for stamps whose differences are durations: within a process it neither jumps nor goes back."""

from __future__ import annotations

import time

# unlike CLOCK_MONOTONIC it goes on while the machine sleeps
_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_began_at = time.time() - time.clock_gettime(_STEADY)


def unix_time() -> float:
    """Return the seconds since 1970 as this process's first look at the clock has them, whatever was set since."""
    return _began_at + time.clock_gettime(_STEADY)
