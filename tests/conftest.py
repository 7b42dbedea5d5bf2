"""For all tests: one thread for numerics (more would only wait for each other), and what may run beside what."""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadscope, tests of one folder run one after another: in two folders they start jobs."""
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped] # it has no types

    class ByFolder(LoadScopeScheduling):  # type: ignore[misc] # likewise
        """A scope is a folder."""

        def _split_scope(self, nodeid: str) -> str:
            return nodeid.partition("::")[0].rpartition("/")[0]

    return ByFolder(config, log)


@pytest.fixture(scope="session", autouse=True)
def same_rows_are_fitted_once() -> Iterator[None]:
    """Hundreds of tests plan on a few dozens of tables. A fit follows from its table alone, and is half of a plan."""
    from tula_hpc.analysis import performance, step_time_fit

    choose_form = step_time_fit.choose_form

    @functools.cache
    def fitted(pickled: bytes) -> Any:
        return choose_form(*pickle.loads(pickled))  # noqa: S301 # of this very process

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(performance, "choose_form", lambda *table: fitted(pickle.dumps(table)))
        yield
