"""Figures of gradient norms and variability."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import pytest

from tests.run_factory import make_run, write_training
from tula_hpc.analysis.figures.all import FIGURES, draw_all
from tula_hpc.analysis.figures.drawing import Drawing
from tula_hpc.analysis.figures.gradients import WINDOWS, LoggedCurve, rate_drops
from tula_hpc.analysis.run_contents import RunContents, Training, read_run
from tula_hpc.formatting import in_percent
from tula_hpc.records import EpochMetrics, Metrics


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunContents:
    return read_run(make_run(tmp_path_factory.mktemp("figures") / "run"))


def drawn(contents: RunContents, name: str) -> Drawing:
    result = FIGURES[name](contents)
    assert isinstance(result, Drawing)
    return result


def rows(drawing: Drawing) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(drawing.table.to_csv())))


def with_metrics(contents: RunContents, **changes: object) -> RunContents:
    """Return the run with changed lines in its training's log."""
    training = contents.trainings[0]
    return contents._replace(trainings=[training._replace(metrics=training.metrics._replace(**changes))])  # type: ignore[arg-type]


def with_batch(training: Training, batch: int, factor: float) -> Training:
    """Return the training with another batch and norms multiplied by `factor`."""
    metrics = training.metrics
    steps = [row.model_copy(update={"gradient_norm": factor * (row.gradient_norm or 0)}) for row in metrics.steps]
    epochs = [row.model_copy(update={"global_batch": batch}) for row in metrics.epochs]
    return training._replace(metrics=Metrics(steps, epochs, 0), label=f"b{batch}")


# gradient norm


def test_each_batch_has_one_curve(run: RunContents) -> None:
    main = run.trainings[0]
    batch = main.metrics.epochs[0].global_batch
    three = [main, with_batch(main, 4 * batch, 2.0), with_batch(main, 4 * batch, 9.0), with_batch(main, 2, 3.0)]
    drawing = drawn(run._replace(trainings=three), "gradient_norm")
    norms: dict[int, list[float]] = {}
    for row in rows(drawing):
        norms.setdefault(int(row["global_batch_samples"]), []).append(float(row["norm"]))
    assert list(norms) == [2, batch, 4 * batch]
    first = [row.gradient_norm for row in main.metrics.steps]
    # norms of the first training with that batch
    assert norms[4 * batch] == [2.0 * (norm or 0) for norm in first]
    assert f"at B = {4 * batch:,}" in drawing.title


def test_an_unfinished_epoch_has_its_batch_from_the_steps(run: RunContents) -> None:
    steps = [row for row in run.trainings[0].metrics.steps if 0 < row.epoch < 0.9]
    drawing = drawn(with_metrics(run, epochs=[], steps=steps), "gradient_norm")
    assert {int(row["global_batch_samples"]) for row in rows(drawing)} == {steps[0].samples_seen // steps[0].step}


@pytest.mark.parametrize(("last", "words"), [(1.02, "stayed"), (3.0, "rose from 1 to 3"), (0.5, "fell from 1 to 0.5")])
def test_the_title_says_where_the_norm_went(run: RunContents, last: float, words: str) -> None:
    steps = run.trainings[0].metrics.steps
    half = len(steps) // 2
    changed = [
        row.model_copy(update={"gradient_norm": 1.0 if index < half else last}) for index, row in enumerate(steps)
    ]
    drawing = drawn(with_metrics(run, steps=changed), "gradient_norm")
    assert words in drawing.title
    # the title must not use the ends of the line
    assert "in the title are medians of the first and last tenth" in drawing.caption


def test_a_curve_is_drawn_through_medians_of_all_its_parts() -> None:
    curve = LoggedCurve([float(i) for i in range(1000)], [1.0 + (i % 7) for i in range(1000)])
    medians = curve.medians()
    assert len(medians.epochs) <= WINDOWS
    assert medians.epochs[0] < 25
    assert medians.epochs[-1] > 975
    assert all(3 <= value <= 5 for value in medians.values)
    short = LoggedCurve([0.0, 1.0], [3.0, 4.0])
    assert short.medians() == short


# variability


def test_the_change_of_the_gradient_has_one_name_in_all_figures(run: RunContents) -> None:
    for name in ("gradient_scale", "variability"):
        drawing = drawn(run, name)
        assert drawing.figure.axes[0].get_ylabel().startswith("variability Δ(G)")
        assert "sensitivity" not in f"{drawing.title} {drawing.caption} {drawing.table.to_csv()}"


def test_variability_is_shown_with_accuracy(run: RunContents) -> None:
    table = rows(drawn(run, "variability"))
    metrics = run.trainings[0].metrics
    assert [float(r["value"]) for r in table if r["mark"] == "step"] == [row.sensitivity for row in metrics.steps]
    accuracies = [float(row["value"]) for row in table if row["mark"] == "test_accuracy_percent"]
    assert accuracies == [in_percent(row.test_accuracy) for row in metrics.epochs]


def test_cuts_of_the_rate_are_marked_and_a_cosine_is_not(run: RunContents) -> None:
    steps = run.trainings[0].metrics.steps
    cut = [row.model_copy(update={"lr": 0.1 if row.epoch < 5 else 0.01}) for row in steps]
    (mark,) = rate_drops(cut)
    assert mark.epoch == pytest.approx(5, abs=0.3)
    assert mark.what == "rate × 0.1"
    last = steps[-1].epoch
    cosine = [
        row.model_copy(update={"lr": 0.1 * (1 + math.cos(math.pi * row.epoch / last)) / 2 + 1e-4}) for row in steps
    ]
    assert rate_drops(cosine) == []


# missing data


OF_THE_LOG = ("training", "gradient_scale", "variability", "gradient_norm")


def test_what_nobody_asked_for_is_not_named_as_missing(run: RunContents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tula_hpc.analysis.figures.all.FIGURES", {name: FIGURES[name] for name in OF_THE_LOG})
    training = run.trainings[0]
    fields = ("gradient_norm", "sensitivity", "scale_mean")
    plain = [row.model_copy(update=dict.fromkeys(fields)) for row in training.metrics.steps]
    bare = with_metrics(run, steps=plain)
    assert {item.name for item in draw_all(bare).missing} == {"gradient_scale"}
    assert bare.sweep is not None
    plain_training = bare.sweep.training.model_copy(update={"method": "lbt"})
    plain_sweep = bare.sweep.model_copy(update={"training": plain_training})
    for trainings in (bare.trainings, []):
        missing = draw_all(bare._replace(sweep=plain_sweep, trainings=trainings)).missing
        assert {item.name for item in missing} <= {"training"}


def test_one_logged_epoch_is_drawn(tmp_path: Path) -> None:
    files = make_run(tmp_path / "run", stage="plan")
    write_training(files, epochs_done=1)
    contents = read_run(files)
    assert isinstance(contents.trainings[0].metrics.epochs[0], EpochMetrics)
    for name in ("variability", "gradient_norm"):
        assert drawn(contents, name).svg()
