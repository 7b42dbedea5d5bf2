"""Settings for all tests: one thread for numerics (more would wait for each other), and the order of the tests."""

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
# commands and jobs follow these variables of the user's shell
for name in [name for name in os.environ if name.startswith(("SBATCH_", "SRUN_"))]:
    del os.environ[name]
# let Python keep compiled modules, which else every new process would compile again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# no deadline, because an example may have to wait for a processor; every run draws other examples
settings.register_profile("busy machines", deadline=None, max_examples=15 * max(1, TIMES))
settings.load_profile("busy machines")

# folders whose tests start jobs, the slowest first; each of the first two starts a test cluster of its own
JOBS = ("tests/slurm/faults/", "tests/slurm/", "tests/local/", "tests/attach/")
# run one after another, the tests of these folders decide how long the whole run takes
LONGEST = JOBS[:2]
# Tests that fork processes. Forking is quick as long as torch has no threads: see `forked.context_of_workers`.
FORKING = (
    "tests/ddp/test_equal_collectives.py",
    "tests/ddp/test_suspension.py",
    "tests/gradients/test_reference_gradient.py",
    "tests/launch/",
    "tests/records/test_identity.py",
    "tests/workloads/test_own_loss.py",
)
# niceness (at most 19) that leaves a process a third of the usual share of a processor
LESS_URGENT = 5
WAIT_FOR_DISK = os.fsync


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Pause garbage collection during collection, in which every worker imports the modules of all tests."""
    with loading_libraries():
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadscope, run the tests of a folder of `JOBS` one after another, and the others file by file."""
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped] # it has no types

    class ByFolder(LoadScopeScheduling):  # type: ignore[misc] # likewise
        """Scheduler whose scopes are the folders of `JOBS` and, for all other tests, files."""

        def _split_scope(self, nodeid: str) -> str:
            return folder_of_jobs(nodeid) or nodeid.partition("::")[0]

    return ByFolder(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Pass the value of --dist, which only the main process knows, to a worker."""
    node.workerinput["dist"] = node.config.getvalue("dist")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that start jobs first: they take longest, and the other tests can run in parallel to them."""
    items.sort(key=lambda item: not item.nodeid.startswith(FORKING))
    for start in reversed(JOBS):
        items.sort(key=lambda item: not item.nodeid.startswith(start))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Lower the priority of all tests but the slowest; a worker never runs one of the slowest after others."""
    require_gpu_if_marked(item)
    beside_others = getattr(item.config, "workerinput", {}).get("dist") == "loadscope"
    if beside_others and folder_of_jobs(item.nodeid) not in LONGEST:
        os.nice(max(0, LESS_URGENT - os.nice(0)))
    # Waiting for fsync takes a tenth of the whole time, and no test cuts the power. Tests of full disks need it.
    waits = folder_of_jobs(item.nodeid) or "full_disk" in item.nodeid
    vars(os)["fsync"] = WAIT_FOR_DISK if waits else os.fstat
    if not item.nodeid.startswith("tests/slurm/"):
        # earlier tests of the same worker may have left the test cluster's variable in the environment
        os.environ.pop("SLURM_CONF", None)


def folder_of_jobs(nodeid: str) -> str:
    return next((folder for folder in JOBS if nodeid.startswith(folder)), "")


def require_gpu_if_marked(item: pytest.Item) -> None:
    """Skip a test marked `gpu` on a machine without a GPU, or fail it if TULA_REQUIRE_GPU=1."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        if os.environ.get("TULA_REQUIRE_GPU") == "1":
            pytest.fail("TULA_REQUIRE_GPU=1, but torch sees no GPU", pytrace=False)
        pytest.skip("needs a GPU")


@pytest.fixture(scope="session", autouse=True)
def cache_fits() -> Iterator[None]:
    """Cache fits by their table: hundreds of tests plan on a few dozen tables, and fits take half of that time."""
    from tula_hpc.analysis.models import memory, step_time_fit
    from tula_hpc.analysis.models import step_time as performance

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(performance, "choose_form", cached_by_table(step_time_fit.choose_form))
        patch.setattr(memory, "_best_fit", cached_by_table(memory._best_fit))
        yield


def cached_by_table(fit: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a cache whose key is the pickled arguments."""

    @functools.cache
    def fitted(pickled: bytes) -> Any:
        table, named = pickle.loads(pickled)  # noqa: S301 # pickled by this process
        return fit(*table, **named)

    return lambda *table, **named: fitted(pickle.dumps((table, named)))


@pytest.fixture(scope="module", autouse=True)
def freeze_loaded_objects() -> None:
    """Exclude what is loaded by now from garbage collection: scanning all of torch takes longer than most tests."""
    gc.collect()
    gc.freeze()
