"""Frameworks with one line: stopped twice and killed once they end as undisturbed, bit for bit. Real processes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

# here once, not in every process that is forked
import accelerate  # noqa: F401
import lightning
import pytest
import transformers

from tests.attach.test_keeping import EXITED, KILLED, STOPPED, Story, assert_same
from tula_hpc.attach import lightning_callback, trainer_callback
from tula_hpc.records import read_metrics

SCRIPTS = Path(__file__).parent / "scripts"
TRAINER, LIGHTNING, ACCELERATE = (SCRIPTS / f"on_{name}.py" for name in ("trainer", "lightning", "accelerate"))
Alone = Callable[..., Story]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """A training by the script alone, for each way of it."""
    known: dict[tuple[object, ...], Story] = {}

    def story(script: Path, workers: int, *arguments: str) -> Story:
        key = (script, workers, *arguments)
        if key not in known:
            folder = tmp_path_factory.mktemp("alone") / "run"
            known[key] = Story(folder, workers, arguments, around=False, script=script)
            assert known[key].start() == [0] * workers
        return known[key]

    return story


class Case(NamedTuple):
    script: Path
    workers: int
    # of 8 a whole epoch: the first stop is within one, or where it ends
    first: int
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.script.stem, str(self.workers), str(self.first), *self.arguments))


CASES = [
    Case(TRAINER, 2, 3),
    Case(TRAINER, 2, 8, ("--accumulate", "2", "--samples", "256")),
    Case(LIGHTNING, 2, 3),
    Case(LIGHTNING, 2, 8),
    Case(LIGHTNING, 1, 3, ("--by-hand", "--samples", "64")),
    Case(ACCELERATE, 2, 3),
    Case(ACCELERATE, 2, 8, ("--accumulate", "2", "--samples", "256")),
    Case(ACCELERATE, 1, 3, ("--samples", "64")),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_stopped_twice_and_killed_once_it_ends_as_undisturbed(tmp_path: Path, alone: Alone, case: Case) -> None:
    script, workers, first, arguments = case
    whole = alone(script, workers, *arguments)
    story = Story(tmp_path / "run", workers, arguments, script=script)
    assert story.start(first, only=0) == [STOPPED] * workers
    # in the second epoch
    assert KILLED in story.start(11 - first, signal.SIGKILL)
    assert story.start(2) == [STOPPED] * workers
    assert story.start() == [EXITED] * workers
    assert_same(whole, story, lines=set)
    # only the kill had work done again
    assert 0 <= len(story.lines(0)) - len(whole.lines(0)) <= 4
    metrics = read_metrics(story.run.train().metrics_file)
    assert [row.epoch for row in metrics.epochs] == [1, 2]
    assert [row.samples_seen for row in metrics.epochs] == [n * 8 * 8 * workers for n in (1, 2)] or arguments
    assert all(row.test_accuracy is not None for row in metrics.epochs)
    details = [event.detail for event in story.run.events() if event.event == "resumed"]
    assert len(details) == 3
    # what no checkpoint names any more is deleted at the next save
    checkpoints = story.run.train().checkpoints
    assert len(list(checkpoints.glob("*.tula"))) == 2
    assert 2 <= sum(path.is_dir() for path in checkpoints.iterdir()) <= 4


def test_without_tula_around_the_callbacks_are_the_frameworks_own() -> None:
    assert type(trainer_callback()) is transformers.TrainerCallback
    assert type(lightning_callback()) is lightning.Callback
