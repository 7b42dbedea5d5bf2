"""Fixtures of the test cluster; every test in this folder is marked `slurm`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.machine import missing_requirement
from tests.slurm.testcluster import MiniCluster

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("slurm")


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
    """Let nodes use all of the machine's CPU, for tests that do not depend on step times."""
    with slurm_cluster.cpu_share(200):
        yield


@pytest.fixture
def slurm_env(slurm_cluster: MiniCluster) -> dict[str, str]:
    """The environment for a subprocess that is to use the cluster."""
    return slurm_cluster.environment
