"""Fixtures that run the stories of trainings with faults, and give each test its training."""

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
            item.add_marker(pytest.mark.timeout(1200))  # the first such test waits for all stories


def _waits_for_stories(item: pytest.Item) -> bool:
    return "told" in getattr(item, "fixturenames", ())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the training's events to the report of a failed test: the run directory may be lost with the machine."""
    report = yield
    told = getattr(item, "funcargs", {}).get("told")
    if report.failed and isinstance(told, Training):
        report.sections.append((f"events of {told.name!r}", told.account()))
    return report


@pytest.fixture(scope="session")
def stories(
    request: pytest.FixtureRequest, slurm_cluster: MiniCluster, tmp_path_factory: pytest.TempPathFactory
) -> Stories:
    """The stories that the selected tests need, run to their end, all at the same time."""
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
    """The training whose story the test named with `about`."""
    return stories[request.param]
