"""The test cluster as a fixture; everything in this folder is marked `slurm`."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.slurm.faulty_training import Training
from tests.slurm.machine import missing_requirement, say
from tests.slurm.telling import Stories
from tests.slurm.testcluster import MiniCluster

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("slurm")
        if _waits_for_stories(item):
            item.add_marker(pytest.mark.timeout(1200))  # the first one waits for all of them
    # last: they want all the CPU there is, which the tests on this machine leave to them when they are through
    items.sort(key=_waits_for_stories)


def _waits_for_stories(item: pytest.Item) -> bool:
    return "told" in getattr(item, "fixturenames", ())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What happened to a training goes with a test of it that fails: its run directory may not outlive the machine."""
    report = yield
    told = getattr(item, "funcargs", {}).get("told")
    if report.failed and isinstance(told, Training):
        report.sections.append((f"events of {told.name!r}", told.account()))
    return report


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[MiniCluster]:
    """The running cluster with its default settings; SLURM_CONF is set, so Slurm's tools and submitit find it."""
    problem = missing_requirement()
    if problem is not None and os.environ.get("TULA_REQUIRE_SLURM") == "1":
        pytest.fail(f"TULA_REQUIRE_SLURM=1, but {problem}", pytrace=False)
    if problem is not None:
        pytest.skip(problem)
    with MiniCluster() as cluster, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        yield cluster


@pytest.fixture(scope="module")
def quick_nodes(slurm_cluster: MiniCluster) -> Iterator[None]:
    """Nodes that take all the CPU there is, for tests to which step times do not matter."""
    with slurm_cluster.cpu_share(200):
        yield


@pytest.fixture
def slurm_env(slurm_cluster: MiniCluster) -> dict[str, str]:
    """The environment for a subprocess that is to use the cluster."""
    return slurm_cluster.environment


@pytest.fixture(scope="session")
def stories(
    request: pytest.FixtureRequest, slurm_cluster: MiniCluster, tmp_path_factory: pytest.TempPathFactory
) -> Stories:
    """Trainings that met faults: those that the chosen tests look at, all told at the same time."""
    here = (item for item in request.session.items if item.path.parent == Path(__file__).parent)
    chosen = (item.callspec.params for item in here if hasattr(item, "callspec"))
    names = {params["told"] for params in chosen if "told" in params}
    folder = tmp_path_factory.mktemp("stories")
    stories = Stories(slurm_cluster, folder, names)
    stories.tell()
    text = json.dumps(stories.figures(), indent=1)
    (folder / "figures.json").write_text(text)
    say(text)
    return stories


@pytest.fixture
def told(request: pytest.FixtureRequest, stories: Stories) -> Training:
    """A training that met a fault, see `about`."""
    return stories[request.param]
