"""Scores in a script's output: which lines count, and for which epoch."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tula_hpc.attach.train.scores import MOST_LINE_BYTES, Scores
from tula_hpc.env import unix_time
from tula_hpc.records import EpochMetrics, TrainDirectory, append_record, read_metrics

PATTERN = r"Acc@1 (?P<test_accuracy>[\d.nan]+)(?: loss (?P<test_loss>[\d.]+))?"


@pytest.fixture
def files(tmp_path: Path) -> TrainDirectory:
    return TrainDirectory(tmp_path)


@pytest.fixture
def scores(files: TrainDirectory) -> Scores:
    return Scores(PATTERN, files, io.BytesIO())


def end_epoch(files: TrainDirectory, epoch: int) -> None:
    row = EpochMetrics(
        epoch=epoch, step=4 * epoch, samples_seen=64 * epoch, global_batch=16, train_loss=None, test_loss=None,
        test_accuracy=None, test_top5_accuracy=None, epoch_time_s=1.0, steps=4, ended_at=unix_time(),
    )  # fmt: skip
    append_record(files.metrics_file, row)


def known(files: TrainDirectory) -> list[tuple[int, float | None, float | None]]:
    return [(row.epoch, row.test_accuracy, row.test_loss) for row in read_metrics(files.metrics_file).epochs]


def test_a_score_is_of_the_epoch_that_was_over_when_it_was_printed(files: TrainDirectory, scores: Scores) -> None:
    scores.take(b"Acc@1 10\n")
    end_epoch(files, 1)
    scores.take(b"nothing\n * Acc@1 50.5 loss 0.25\n")
    end_epoch(files, 2)
    scores.take(b"Acc@1 60\n")
    # both lines are read late
    scores.write()
    assert known(files) == [(1, 0.505, 0.25), (2, 0.6, None)]
    end_epoch(files, 3)
    scores.take(b"Acc@1 70 loss 3\nAcc@1 80\n")
    scores.write()
    assert known(files)[-1] == (3, 0.8, 3.0)


@pytest.mark.parametrize(
    ("printed", "accuracies"),
    [
        (["Acc@1 0.75", "Acc@1 12.5", "Acc@1 0.5"], [0.0075, 0.125, 0.005]),
        (["Acc@1 0.75 %", "Acc@1 0.5 %"], [0.0075, 0.005]),
        (["Acc@1 0.75 loss 7.0", "Acc@1 1.0"], [0.75, 1.0]),
        # a mean in single precision
        (["Acc@1 0.75", "Acc@1 1.0000001"], [0.75, 1.0]),
    ],
)
def test_accuracies_are_percent_if_one_is_above_1_or_has_the_sign(
    files: TrainDirectory, scores: Scores, printed: list[str], accuracies: list[float]
) -> None:
    for epoch, line in enumerate(printed, 1):
        end_epoch(files, epoch)
        scores.take(f"{line}\n".encode())
        scores.write()
    assert [row[1] for row in known(files)] == pytest.approx(accuracies)


def test_a_group_may_include_the_sign(files: TrainDirectory) -> None:
    scores = Scores(r"acc=(?P<test_accuracy>\S+)( loss=(?P<test_loss>\S+))?", files, io.BytesIO())
    end_epoch(files, 1)
    scores.take(b"acc=0.75%\n")
    scores.write()
    assert known(files)[-1][1] == pytest.approx(0.0075)


def test_scores_of_a_killed_start_become_percent_once_a_later_start_shows_that(files: TrainDirectory) -> None:
    for epoch, printed in enumerate(["0.75", "12.5", "0.5"], 1):
        start = Scores(PATTERN, files, io.BytesIO())
        end_epoch(files, epoch)
        start.take(f"Acc@1 {printed} loss 0.5\n".encode())
        start.write()
    assert known(files) == [(1, 0.0075, 0.5), (2, 0.125, 0.5), (3, 0.005, 0.5)]


def test_other_groups_of_the_expression_are_the_users_own(files: TrainDirectory) -> None:
    scores = Scores(r"Epoch (?P<epoch>\d+) step (?P<step>\d+) Acc@1 (?P<test_accuracy>\d+)", files, io.BytesIO())
    end_epoch(files, 1)
    scores.take(b"Epoch 0 step 3 Acc@1 50\n")
    scores.write()
    assert known(files) == [(1, 0.5, None)]
    assert read_metrics(files.metrics_file).epochs[0].step == 4


def test_a_score_that_is_written_late_takes_no_epoch_back(files: TrainDirectory, scores: Scores) -> None:
    end_epoch(files, 1)
    scores.take(b"Acc@1 10\n")
    end_epoch(files, 2)
    scores.write()
    scores.take(b"Acc@1 20\n")
    scores.write()
    assert known(files) == [(1, 0.1, None), (2, 0.2, None)]


def test_a_score_that_comes_while_an_epochs_line_is_written_is_not_of_that_epoch(
    files: TrainDirectory, scores: Scores
) -> None:
    end_epoch(files, 1)
    size = files.metrics_file.stat().st_size
    end_epoch(files, 2)
    whole = files.metrics_file.read_bytes()
    files.metrics_file.write_bytes(whole[: size + 20])
    scores.take(b"Acc@1 10\n")
    files.metrics_file.write_bytes(whole)
    scores.write()
    assert known(files) == [(1, 0.1, None), (2, None, None)]


def test_a_loss_that_is_printed_at_each_step_makes_no_line_for_each(files: TrainDirectory, scores: Scores) -> None:
    end_epoch(files, 1)
    for number in range(100):
        scores.take(f"Acc@1 {number / 2} loss {number}\n".encode())
        scores.look()
    assert len(files.metrics_file.read_bytes().splitlines()) == 2
    scores.write()
    assert known(files) == [(1, 0.495, 99.0)]


def test_half_a_line_of_an_epoch_is_passed_over(files: TrainDirectory, scores: Scores) -> None:
    """A node that lost power while it wrote leaves such a line."""
    end_epoch(files, 1)
    whole = files.metrics_file.read_bytes()
    files.metrics_file.write_bytes(whole + whole[:40])
    scores.take(b"Acc@1 50\n")
    scores.write()
    scores.take(b"Acc@1 60\n")
    scores.write()
    assert known(files) == [(1, 0.6, None)]


def test_a_score_before_the_first_step_is_of_no_epoch(files: TrainDirectory, scores: Scores) -> None:
    scores.take(b"Acc@1 10\n")
    scores.write()
    end_epoch(files, 1)
    assert known(files) == [(1, None, None)]


@pytest.mark.parametrize(("epochs", "expected"), [(1, [0.6]), (2, [None, None])])
def test_the_last_score_within_a_single_epoch_is_its_own(
    files: TrainDirectory, scores: Scores, epochs: int, expected: list[float | None]
) -> None:
    files.metrics_file.write_text('{"kind":"step"}\n')
    for line in (b"Acc@1 50\n", b"Acc@1 60\n"):
        scores.take(line)
        scores.write()
    for epoch in range(epochs):
        end_epoch(files, epoch + 1)
    scores.close()
    assert [accuracy for _, accuracy, _ in known(files)] == expected


def test_a_score_that_comes_while_others_are_written_waits_for_its_epoch(
    files: TrainDirectory, scores: Scores, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_epoch(files, 1)
    scores.take(b"Acc@1 10\n")
    read = Path.read_bytes

    def read_and_go_on(path: Path) -> bytes:
        content = read(path)
        monkeypatch.undo()
        end_epoch(files, 2)
        scores.take(b"Acc@1 20\n")
        return content

    monkeypatch.setattr(Path, "read_bytes", read_and_go_on)
    scores.write()
    assert known(files) == [(1, 0.1, None), (2, None, None)]
    scores.write()
    assert known(files) == [(1, 0.1, None), (2, 0.2, None)]


def test_lines_are_complete_however_they_arrive(files: TrainDirectory, scores: Scores) -> None:
    end_epoch(files, 1)
    for part in (b"Ac", b"c@1 4", b"0\rprogress", b"\n", b"\xff\xfe \n"):
        scores.take(part)
    scores.write()
    assert known(files) == [(1, 0.4, None)]


def test_text_that_is_no_number_is_no_score(files: TrainDirectory, scores: Scores) -> None:
    end_epoch(files, 1)
    scores.take(b"Acc@1 nan\nAcc@1 1.2.3\n")
    scores.write()
    assert known(files) == [(1, None, None)]


def test_a_line_without_end_takes_little_memory(files: TrainDirectory, scores: Scores) -> None:
    end_epoch(files, 1)
    for _ in range(100):
        scores.take(b"x" * MOST_LINE_BYTES)
    assert len(scores._rest) <= MOST_LINE_BYTES
    scores.take(b"\nAcc@1 30\n")
    scores.write()
    assert known(files) == [(1, 0.3, None)]
