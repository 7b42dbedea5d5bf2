"""What happened to trainings that met faults, for the tests that look at it."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.slurm.faults.faulty_training import Training
from tests.slurm.faults.telling import Stories
from tests.slurm.machine import say
from tests.slurm.testcluster import MiniCluster

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _waits_for_stories(item):
            item.add_marker(pytest.mark.timeout(1200))  # the first one waits for all of them


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
def stories(
    request: pytest.FixtureRequest, slurm_cluster: MiniCluster, tmp_path_factory: pytest.TempPathFactory
) -> Stories:
    """Trainings that met faults: those that the chosen tests look at, all told at the same time."""
    here = (item for item in request.session.items if item.path.parent == HERE)
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
