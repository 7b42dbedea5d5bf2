"""For all tests: one thread for numerics (more would only wait for each other), and what may run beside what."""

from __future__ import annotations

import functools
import gc
import os
import pickle
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
from hypothesis import settings

from tests.fuzzing import TIMES
from tula_hpc.env import loading_libraries

os.environ.setdefault("OMP_NUM_THREADS", "1")
# a module is compiled once, not at every start of a process
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# an example may wait for a processor; others are tried in every run
settings.register_profile("busy machines", deadline=None, max_examples=25 * max(1, TIMES))
settings.load_profile("busy machines")

# those that take longest first; each of the first two has a cluster of its own
JOBS = ("tests/slurm/faults/", "tests/slurm/", "tests/local/", "tests/attach/")
LONGEST = JOBS[:2]  # their tests, one after another, take longest of all
# these fork processes, which is quick where torch has no threads yet: see `forked.context_of_workers`
FORKING = (
    "tests/ddp/test_equal_collectives.py",
    "tests/ddp/test_suspension.py",
    "tests/gradients/test_reference_gradient.py",
    "tests/launch/",
    "tests/records/test_identity.py",
    "tests/workloads/test_own_loss.py",
)
LESS_URGENT = 5  # of 19: a third of a usual claim to a processor
WAIT_FOR_DISK = os.fsync


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Every worker imports all that the tests import."""
    with loading_libraries():
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadscope, tests of a folder that starts jobs run one after another, others file by file."""
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped] # it has no types

    class ByFolder(LoadScopeScheduling):  # type: ignore[misc] # likewise
        """A scope is a folder of jobs, or a file."""

        def _split_scope(self, nodeid: str) -> str:
            return folder_of_jobs(nodeid) or nodeid.partition("::")[0]

    return ByFolder(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker how tests are distributed, which only its master knows."""
    node.workerinput["dist"] = node.config.getvalue("dist")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Jobs first: they take longest, and what else there is can go beside them."""
    items.sort(key=lambda item: not item.nodeid.startswith(FORKING))
    for start in reversed(JOBS):
        items.sort(key=lambda item: not item.nodeid.startswith(start))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """All leave the processors to the tests that everything waits for; no worker comes to these later on."""
    there_is_a_gpu_where_one_is_needed(item)
    beside_others = getattr(item.config, "workerinput", {}).get("dist") == "loadscope"
    if beside_others and folder_of_jobs(item.nodeid) not in LONGEST:
        os.nice(max(0, LESS_URGENT - os.nice(0)))
    # To wait for disks takes a tenth of all time, and nobody pulls the plug here. A full disk has its say then.
    waits = folder_of_jobs(item.nodeid) or "full_disk" in item.nodeid
    vars(os)["fsync"] = WAIT_FOR_DISK if waits else os.fstat
    if not item.nodeid.startswith("tests/slurm/"):
        # of the test cluster, which the worker's earlier tests may have left in the environment
        os.environ.pop("SLURM_CONF", None)


def folder_of_jobs(nodeid: str) -> str:
    return next((folder for folder in JOBS if nodeid.startswith(folder)), "")


def there_is_a_gpu_where_one_is_needed(item: pytest.Item) -> None:
    """Skips, or with TULA_REQUIRE_GPU=1 fails."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        if os.environ.get("TULA_REQUIRE_GPU") == "1":
            pytest.fail("TULA_REQUIRE_GPU=1, but torch sees no GPU", pytrace=False)
        pytest.skip("needs a GPU")


@pytest.fixture(scope="session", autouse=True)
def same_rows_are_fitted_once() -> Iterator[None]:
    """Hundreds of tests plan on a few dozens of tables. A fit follows from its table alone, and is half of a plan."""
    from tula_hpc.analysis.models import memory, step_time_fit
    from tula_hpc.analysis.models import step_time as performance

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(performance, "choose_form", once_a_table(step_time_fit.choose_form))
        patch.setattr(memory, "_best_fit", once_a_table(memory._best_fit))
        yield


def once_a_table(fit: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with the answer of an earlier call where there was one with equal arguments."""

    @functools.cache
    def fitted(pickled: bytes) -> Any:
        return fit(*pickle.loads(pickled))  # noqa: S301 # of this very process

    return lambda *table: fitted(pickle.dumps(table))


@pytest.fixture(scope="module", autouse=True)
def what_stays_is_not_searched_for_garbage() -> None:
    """What is loaded by now stays. To look at all of torch again takes longer than most tests, and profiling does."""
    gc.collect()
    gc.freeze()
