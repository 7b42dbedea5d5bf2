"""Titles of figures claim no more than their data show: each case here would make a careless title false."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.run_factory import candidate, configurations, make_run, plan
from tests.study_factory import SWEEP, make_study
from tula_hpc.analysis.figures.all import FIGURES
from tula_hpc.analysis.figures.drawing import Drawing
from tula_hpc.analysis.figures.scaling_panels import finding
from tula_hpc.analysis.figures.study.accuracy import draw_study_delta
from tula_hpc.analysis.figures.study.scales import draw_study_scale
from tula_hpc.analysis.node_scaling import ScalingCurve, ScalingRow
from tula_hpc.analysis.run_contents import RunContents, read_run
from tula_hpc.analysis.study_results import make_table, read_study
from tula_hpc.config import StudyCell
from tula_hpc.records import Configuration, Interval


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunContents:
    """A finished run, which no test changes."""
    return read_run(make_run(tmp_path_factory.mktemp("titles") / "run"))


def title_of(contents: RunContents, name: str) -> str:
    result = FIGURES[name](contents)
    assert isinstance(result, Drawing)
    return result.title


def logged(contents: RunContents, field: str, values: Sequence[float]) -> RunContents:
    """Return the run with these values in its training's log, each for the same number of steps."""
    (training,) = contents.trainings
    steps = training.metrics.steps
    changed = [
        row.model_copy(update={field: values[index * len(values) // len(steps)]}) for index, row in enumerate(steps)
    ]
    return contents._replace(trainings=[training._replace(metrics=training.metrics._replace(steps=changed))])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([0.2, 0.003, 1.1, 0.2], "varied between 0.003 and 1.1, and ended where it began, at 0.2"),
        ([0.2, 0.21, 0.19, 0.2], "stayed at about 0.2"),
        ([1.0, 50.0, 3.0], "rose from 1 to 3 (peak 50)"),
        ([3.0, 0.01, 1.0], "fell from 3 to 1 (low 0.01)"),
        ([1.0, 2.0, 3.0], "rose from 1 to 3"),
    ],
)
def test_values_with_equal_ends_are_not_called_constant(run: RunContents, values: list[float], words: str) -> None:
    assert title_of(logged(run, "gradient_norm", values), "gradient_norm") == f"The gradient's norm {words}"
    title = title_of(logged(run, "sensitivity", values), "variability")
    assert title.startswith(f"Gradient variability {words} while test accuracy")


@pytest.mark.parametrize(("values", "words"), [([0.1, 1.9], "(0.1 to 1.9)"), ([1.02, 1.0], "average")])
def test_a_mean_scale_is_shown_with_its_range(run: RunContents, values: list[float], words: str) -> None:
    """The mean of 0.1 and 1.9 is 1, as without any scaling, so a mean alone would mislead."""
    contents = logged(logged(run, "scale_mean", values), "scale_share", [1.0])
    assert title_of(contents, "gradient_scale").endswith(words)


def test_of_several_trainings_the_title_names_its_own(run: RunContents) -> None:
    (training,) = run.trainings
    both = run._replace(trainings=[training, training._replace(label="other")])
    assert title_of(both, "training").startswith("main: ")
    assert not title_of(run, "training").startswith("main")


def test_the_errors_of_fitted_measurements_are_called_those_of_the_fit(run: RunContents) -> None:
    assert run.plan is not None
    contents = run._replace(trainings=[])
    title = title_of(contents, "prediction_error")
    assert title.startswith("The model fits its own measurements to ")
    assert "predict" not in title
    trained = title_of(run, "prediction_error")
    assert trained.startswith("The model fits its own measurements to ")
    assert "; the training's epochs were predicted " in trained


def test_measurements_after_the_plan_are_distinguished_from_those_that_it_was_fitted_to(run: RunContents) -> None:
    planned = [candidate(item, error=0.3 if late else 0.01, measured=not late) for item, late in BY_TIME.items()]
    contents = run._replace(plan=plan(planned), trainings=[])
    result = FIGURES["prediction_error"](contents)
    assert isinstance(result, Drawing)
    fit, later, *_ = result.title.split("; ")
    assert fit.startswith("The model fits its own measurements to ")
    assert float(fit.split()[-3]) < 5
    assert later.startswith("measurements after the plan were predicted ")
    assert float(later.split()[-4]) > 20
    assert later.endswith(" % off (median)")
    assert "Hollow markers were measured after the plan" in result.caption
    place = result.table.columns.index("fitted")
    shown = [row[place] for row in result.table.rows if row[0] == "profiled_step"]
    assert shown.count(False) == sum(BY_TIME[item.configuration] for item in run.ok)


# whether it was measured after the plan was made
BY_TIME = {item: item.nodes == 4 for item in configurations()}


def scaled_on(nodes: int, measured_s: float | None) -> ScalingRow:
    item = candidate(Configuration(nodes, 1, 32), measured=measured_s is not None)
    factor = Interval(0.8 * nodes, 0.7 * nodes, 0.9 * nodes)
    return ScalingRow(item, "measured" if measured_s else "predicted", factor, factor.times(1 / nodes), measured_s)


@pytest.mark.parametrize(
    ("base_s", "last_s", "words"), [(1.0, 0.4, "are"), (None, 0.4, "would be"), (1.0, None, "would be")]
)
def test_only_measured_nodes_are_as_fast_as_the_title_says(
    base_s: float | None, last_s: float | None, words: str
) -> None:
    curve = ScalingCurve("strong", 128, [scaled_on(1, base_s), scaled_on(4, last_s)])
    assert finding(curve) == f"Strong scaling of batch 128: 4 nodes {words} 3.2 times as fast as 1 (efficiency 80 %)"


def test_nodes_that_gain_nothing_process_as_many_samples() -> None:
    even = scaled_on(2, None)._replace(speed_up=Interval(1.004, 0.9, 1.1), efficiency=Interval(0.5, 0.45, 0.55))
    words = finding(ScalingCurve("weak", 256, [scaled_on(1, 1.0), even]))
    assert words.endswith("2 nodes would process as many samples as 1 (efficiency 50 %)")


def test_of_a_wide_interval_the_title_gives_both_ends() -> None:
    vague = scaled_on(2, 0.6)._replace(speed_up=Interval(2.6, 1.3, 5.0), efficiency=Interval(1.3, 0.65, 2.5))
    words = finding(ScalingCurve("strong", 256, [scaled_on(1, 1.0), vague]))
    assert words.endswith("2 nodes are 1.3 to 5 times as fast as 1 (efficiency 65 to 250 %)")


DELTAS = {f"d{delta}": {"training": {"method": "ags", "delta": delta}} for delta in (0.1, 0.4, 2.0)}


def ablation(root: Path, reached: dict[str, Sequence[float | None]]) -> str:
    study = {"methods": ["lbt"], "batches": [256], "seeds": [0, 1, 2], "small_batch": 128, "variants": DELTAS}
    contents = read_study(make_study(root, {**SWEEP, "study": study}, lambda cell: reached_by(cell, reached)))
    drawn = draw_study_delta(contents, make_table(contents.study, contents.outcomes))
    assert isinstance(drawn, Drawing)
    return drawn.title


def reached_by(cell: StudyCell, reached: dict[str, Sequence[float | None]]) -> float | None:
    return reached.get(cell.column, (0.5, 0.5, 0.5))[cell.seed]


@pytest.mark.parametrize(
    ("reached", "title"),
    [
        # a lead so small that the seeds alone explain it
        (
            {"d0.1": (0.70, 0.74, 0.72), "d0.4": (0.71, 0.73, 0.719), "d2.0": (0.5, 0.5, 0.5)},
            "At B = 256, d0.1 with δ = 0.1 has the highest of 3 means; 1 other is within its standard deviation",
        ),
        # the mean without diverged runs
        (
            {"d0.1": (0.99, None, None), "d0.4": (0.7, 0.7, 0.7), "d2.0": (0.5, 0.5, 0.5)},
            "At B = 256, d0.4 with δ = 0.4 has the highest of 3 means",
        ),
    ],
)
def test_a_lead_within_the_seeds_deviation_is_no_best(
    tmp_path: Path, reached: dict[str, Sequence[float | None]], title: str
) -> None:
    assert ablation(tmp_path / "run", reached) == title


def test_a_studys_mean_factor_is_shown_with_its_range(tmp_path: Path) -> None:
    study = {"methods": ["lbt", "ags"], "batches": [256, 1024], "seeds": [0, 1], "small_batch": 128}
    contents = read_study(make_study(tmp_path / "run", {**SWEEP, "study": study}))
    drawn = draw_study_scale(contents, make_table(contents.study, contents.outcomes))
    assert isinstance(drawn, Drawing)
    assert drawn.title.count(" to ") == drawn.title.count("ags")
