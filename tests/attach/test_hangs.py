"""Which silence of a script's workers counts as a hang, and where they hang."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined] # documented, though not in __all__

from tests.known import known
from tula_hpc.attach import hangs
from tula_hpc.attach.hangs import HangWatch, Place
from tula_hpc.attach.processes import WorkerPeers

LEAST_S = 60.0


class Script:
    """A script with a given time of its last sign of life."""

    def __init__(self) -> None:
        self.now = self.sign_at = 0.0
        self.has_stepped = True

    def monotonic(self) -> float:
        return self.now

    @property
    def silent_s(self) -> float | None:
        return self.now - self.sign_at if self.has_stepped else None


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    made = Script()
    monkeypatch.setattr(hangs, "time", made)
    return made


def silent_for(seconds: int, script: Script, *watches: HangWatch) -> tuple[int, str] | None:
    """Stay silent; return the seconds until a watch reports, and its text. None: no report, then a sign of life."""
    for silent in range(seconds):
        script.now += 1.0
        silences = [watch.look(script.silent_s) for watch in watches]
        if any(silences):
            return silent + 1, next(filter(None, silences))
    script.sign_at = script.now
    return None


def test_silence_far_beyond_the_longest_so_far_is_a_hang(script: Script) -> None:
    watch = HangWatch(WorkerPeers(None, "x"), 0, 1, LEAST_S)
    assert silent_for(20, script, watch) is None
    # a hang is ten times the longest silence so far
    found = known(silent_for(1000, script, watch))
    assert 10 * 19 < found[0] < 10 * 22
    assert "no step, batch, evaluation or output of its worker for 3 min" in found[1]


def test_short_silence_is_no_hang_however_quick_the_steps_were(script: Script) -> None:
    watch = HangWatch(WorkerPeers(None, "x"), 0, 1, LEAST_S)
    assert silent_for(1, script, watch) is None
    assert silent_for(60, script, watch) is None
    found = known(silent_for(1000, script, HangWatch(WorkerPeers(None, "x"), 0, 1, LEAST_S)))
    assert found[0] == 61


def test_a_worker_that_waits_for_another_does_not_hang(script: Script) -> None:
    store, other = HashStore(), Script()
    waiting, busy = (HangWatch(WorkerPeers(store, "x"), rank, 2, LEAST_S) for rank in range(2))
    for _ in range(500):
        script.now += 1.0
        # evaluation
        other.now = other.sign_at = script.now
        assert (waiting.look(script.silent_s), busy.look(other.silent_s)) == (None, None)
    found = None
    for _ in range(500):
        script.now += 1.0
        other.now = script.now
        found = found or waiting.look(script.silent_s) or busy.look(other.silent_s)
    assert found is not None
    assert "any of its 2 workers" in found


def test_before_the_first_step_after_a_suspension_and_switched_off_nothing_hangs(script: Script) -> None:
    watch = HangWatch(WorkerPeers(None, "x"), 0, 1, LEAST_S)
    script.has_stepped = False
    assert silent_for(500, script, watch) is None
    script.has_stepped = True
    script.now += 5000.0
    assert silent_for(50, script, watch) is None
    assert silent_for(500, script, HangWatch(WorkerPeers(None, "x"), 0, 1, 0.0)) is None


SCRIPT = str(Path(__file__))
TORCH = "/opt/lib/python3.11/site-packages/torch"


@pytest.mark.parametrize(
    ("called", "is_collective"),
    [
        (["distributed/distributed_c10d.py", "distributed/c10d_logger.py"], True),
        (["autograd/graph.py", "_tensor.py"], True),
        (["nn/parallel/distributed.py", "nn/modules/module.py"], True),
        (["nn/modules/linear.py", "nn/parallel/distributed.py"], False),
        (["utils/data/dataloader.py"], False),
    ],
)
def test_frames_say_where_a_process_is_and_whether_it_waits_for_others(called: list[str], is_collective: bool) -> None:
    """Frames are given with the innermost first; the last one in the user's code counts."""
    frames = [(f"{TORCH}/{name}", 9) for name in called]
    found = hangs._innermost([*frames, (SCRIPT, 1), (SCRIPT, 99)])
    assert found == Place(file=Path(SCRIPT), line=1, is_collective=is_collective)
    assert str(found).startswith("test_hangs.py:1, `")
    assert hangs._innermost(frames) is None
