"""Run stories at the same time on the test cluster; tests then check what they left behind."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.slurm.faults.faulty_training import Training
from tests.slurm.faults.stories import OTHERS_ARE_OVER, SETTINGS, STORIES, Story
from tests.slurm.testcluster import MiniCluster

CPU_SHARE_PERCENT = 200  # more than usual: no step times are checked, and the trainings sleep most of the time


class Told:
    """A story that runs in a thread of its own."""

    def __init__(self, story: Story, training: Training) -> None:
        self.story, self.training = story, training
        self.error: BaseException | None = None
        self.took_s = 0.0
        self.thread = threading.Thread(target=self._tell, daemon=True, name=training.name)

    def _tell(self) -> None:
        began = time.monotonic()
        try:
            self.story.tell(self.training)
        except BaseException as error:  # noqa: BLE001 # raised in the test that asks for this story
            self.error = error
            self.training.cancel()
        self.took_s = time.monotonic() - began


class Stories:
    """The stories with these names, and the undisturbed ones with which they are compared.

    Args:
        cluster: The test cluster.
        folder: Folder for the run directories.
        names: Keys of `STORIES`.
    """

    def __init__(self, cluster: MiniCluster, folder: Path, names: set[str]) -> None:
        self.cluster = cluster
        wanted = names | {STORIES[name].reference for name in names} - {""}
        self.told = {
            name: Told(story, Training(name, cluster, folder / name.replace(" ", "_"), story.settings))
            for name, story in STORIES.items()
            if name in wanted
        }

    def __getitem__(self, name: str) -> Training:
        """Return the training of a story that has ended.

        Raises:
            BaseException: The error with which the story failed.
        """
        told = self.told[name]
        if told.error is not None:
            raise told.error
        return told.training

    def reference(self, name: str) -> Training:
        """Return the uninterrupted training that this one must equal."""
        return self[STORIES[name].reference]

    def tell(self) -> None:
        """Run all stories to their end, in parallel; those that disturb the controller start after the others."""
        with self.cluster.cpu_share(CPU_SHARE_PERCENT):
            self._begin([told for told in self.told.values() if not told.story.disturbs])
            self._wait([told for told in self.told.values() if not (told.story.disturbs or told.story.anytime)])
            disturbing = [told for told in self.told.values() if told.story.disturbs]
            if disturbing:
                with SETTINGS, self.cluster.changed(accounting=False, requeue=False):
                    self._begin(disturbing)
                    self._wait([told for name, told in self.told.items() if name != "controller gone"])
                    OTHERS_ARE_OVER.set()
                    self._wait(disturbing)
            self._wait(list(self.told.values()))

    @staticmethod
    def _begin(stories: list[Told]) -> None:
        for told in stories:
            told.thread.start()
            time.sleep(0.3)  # lets Slurm start the jobs in this order

    @staticmethod
    def _wait(stories: list[Told]) -> None:
        for told in stories:
            told.thread.join()

    def figures(self) -> dict[str, dict[str, object]]:
        """Return the cost of each fault: seconds, repeated steps and jobs."""
        return {
            name: {
                "took_s": round(told.took_s, 1),
                "steps_redone": told.training.redone_steps(),
                "resumed_after_s": [round(seconds, 1) for seconds in told.training.resume_times_s()],
                "jobs": len(told.training.events("submitted")),
            }
            for name, told in self.told.items()
        }


def about(*names: str) -> pytest.MarkDecorator:
    """Parametrize a test by these stories: its argument `told` is the training of each."""
    marks = {name: [pytest.mark.thorough] if STORIES[name].thorough else [] for name in names}
    return pytest.mark.parametrize("told", [pytest.param(name, marks=marks[name]) for name in names], indirect=True)
