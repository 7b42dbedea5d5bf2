"""Fixtures that run the scenarios of trainings with faults, and give each test its training."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.slurm.faults.faulty_training import Training
from tests.slurm.faults.scenario_runs import ScenarioRuns
from tests.slurm.machine import say
from tests.slurm.testcluster import MiniCluster

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _waits_for_scenarios(item):
            # the first such test waits for all scenarios
            item.add_marker(pytest.mark.timeout(1200))


def _waits_for_scenarios(item: pytest.Item) -> bool:
    return "ended" in getattr(item, "fixturenames", ())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the training's events to the report of a failed test: the run directory may be lost with the machine."""
    report = yield
    ended = getattr(item, "funcargs", {}).get("ended")
    if report.failed and isinstance(ended, Training):
        report.sections.append((f"events of {ended.name!r}", ended.account()))
    return report


@pytest.fixture(scope="session")
def scenarios(
    request: pytest.FixtureRequest, slurm_cluster: MiniCluster, tmp_path_factory: pytest.TempPathFactory
) -> ScenarioRuns:
    """The scenarios that the selected tests need, run to their end, all at the same time."""
    here = (item for item in request.session.items if item.path.parent == HERE)
    chosen = (item.callspec.params for item in here if hasattr(item, "callspec"))
    names = {params["ended"] for params in chosen if "ended" in params}
    folder = tmp_path_factory.mktemp("scenarios")
    scenarios = ScenarioRuns(slurm_cluster, folder, names)
    scenarios.run()
    text = json.dumps(scenarios.figures(), indent=1)
    (folder / "figures.json").write_text(text)
    say(text)
    return scenarios


@pytest.fixture
def ended(request: pytest.FixtureRequest, scenarios: ScenarioRuns) -> Training:
    """The training whose scenario the test named with `about`."""
    return scenarios[request.param]
