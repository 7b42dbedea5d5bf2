"""Lines of steps may wait for others, and never get behind what counts on them."""

from __future__ import annotations

from pathlib import Path

from tula_hpc.attach.train.scores import SCORES
from tula_hpc.checkpoint.safe_points import Progress
from tula_hpc.optim import NoObserver
from tula_hpc.records import read_metrics
from tula_hpc.training.metrics_writer import MetricsWriter, StepWindow


def test_lines_that_wait_are_written_with_an_epochs_and_at_a_flush(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl", 100, 10, 1, hold_s=3600.0)
    progress = Progress()

    def steps_on_file() -> list[int]:
        return [line.step for line in read_metrics(tmp_path / "metrics.jsonl").steps]

    def log() -> None:
        progress.count_step(10)
        window = StepWindow()
        window.add(seconds=0.1)
        writer.write_steps(progress, window, NoObserver(), lr=0.1)

    for _ in range(3):
        log()
    # whoever waits for the first one sees it
    assert steps_on_file() == [1]
    writer.write_epoch(progress, 1, NoObserver(), dict.fromkeys(SCORES))
    assert steps_on_file() == [1, 2, 3]
    log()
    assert steps_on_file() == [1, 2, 3]
    writer.flush()
    writer.flush()
    assert steps_on_file() == [1, 2, 3, 4]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert ["epoch" in line[:20] for line in lines] == [False, False, False, True, False]
