"""Run scenarios at the same time on the test cluster; tests then check what they left behind."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.slurm.faults.faulty_training import Training
from tests.slurm.faults.scenarios import OTHERS_ARE_OVER, SCENARIOS, SETTINGS, Scenario
from tests.slurm.testcluster import MiniCluster

# more than usual: no step times are checked, and the trainings sleep most of the time
CPU_SHARE_PERCENT = 200


class ScenarioRun:
    """A scenario that runs in a thread of its own."""

    def __init__(self, scenario: Scenario, training: Training) -> None:
        self.scenario, self.training = scenario, training
        self.error: BaseException | None = None
        self.took_s = 0.0
        self.thread = threading.Thread(target=self._run, daemon=True, name=training.name)

    def _run(self) -> None:
        began = time.monotonic()
        try:
            self.scenario.run(self.training)
        except BaseException as error:  # noqa: BLE001 # raised in the test that asks for this scenario
            self.error = error
            self.training.cancel()
        self.took_s = time.monotonic() - began


class ScenarioRuns:
    """The scenarios with these names, and the undisturbed ones with which they are compared.

    Args:
        cluster: The test cluster.
        folder: Folder for the run directories.
        names: Keys of `SCENARIOS`.
    """

    def __init__(self, cluster: MiniCluster, folder: Path, names: set[str]) -> None:
        self.cluster = cluster
        wanted = names | {SCENARIOS[name].reference for name in names} - {""}
        self.runs = {
            name: ScenarioRun(scenario, Training(name, cluster, folder / name.replace(" ", "_"), scenario.settings))
            for name, scenario in SCENARIOS.items()
            if name in wanted
        }

    def __getitem__(self, name: str) -> Training:
        """Return the training of a scenario that has ended.

        Raises:
            BaseException: The error with which the scenario failed.
        """
        run = self.runs[name]
        if run.error is not None:
            raise run.error
        return run.training

    def reference(self, name: str) -> Training:
        """Return the uninterrupted training that this one must equal."""
        return self[SCENARIOS[name].reference]

    def run(self) -> None:
        """Run all scenarios to their end, in parallel; those that disturb the controller start after the others."""
        with self.cluster.cpu_share(CPU_SHARE_PERCENT):
            self._begin([run for run in self.runs.values() if not run.scenario.disturbs])
            self._wait([run for run in self.runs.values() if not (run.scenario.disturbs or run.scenario.anytime)])
            disturbing = [run for run in self.runs.values() if run.scenario.disturbs]
            if disturbing:
                with SETTINGS, self.cluster.changed(accounting=False, requeue=False):
                    self._begin(disturbing)
                    self._wait([run for name, run in self.runs.items() if name != "controller gone"])
                    OTHERS_ARE_OVER.set()
                    self._wait(disturbing)
            self._wait(list(self.runs.values()))

    @staticmethod
    def _begin(runs: list[ScenarioRun]) -> None:
        for run in runs:
            run.thread.start()
            # lets Slurm start the jobs in this order
            time.sleep(0.3)

    @staticmethod
    def _wait(runs: list[ScenarioRun]) -> None:
        for run in runs:
            run.thread.join()

    def figures(self) -> dict[str, dict[str, object]]:
        """Return the cost of each fault: seconds, repeated steps and jobs."""
        return {
            name: {
                "took_s": round(run.took_s, 1),
                "steps_redone": run.training.redone_steps(),
                "resumed_after_s": [round(seconds, 1) for seconds in run.training.resume_times_s()],
                "jobs": len(run.training.events("submitted")),
            }
            for name, run in self.runs.items()
        }


def about(*names: str) -> pytest.MarkDecorator:
    """Parametrize a test by these scenarios: its argument `ended` is the training of each."""
    marks = {name: [pytest.mark.thorough] if SCENARIOS[name].thorough else [] for name in names}
    return pytest.mark.parametrize("ended", [pytest.param(name, marks=marks[name]) for name in names], indirect=True)
