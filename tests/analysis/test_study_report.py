"""A study's report: made from its run directory alone, at any stage, with every number of its figures as CSV."""

from __future__ import annotations

import csv
import itertools
import re
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle
from matplotlib.transforms import Bbox

from tests.known import known
from tests.run_factory import pages_alone
from tests.study_factory import STUDY, SWEEP, accuracy, make_study
from tula_hpc.analysis.figures.drawing import Drawing, Missing
from tula_hpc.analysis.figures.study.accuracy import (
    column_key,
    column_keys,
    delta_groups,
    draw_study_accuracy,
    draw_study_delta,
    draw_study_epochs,
)
from tula_hpc.analysis.figures.study.results_table import draw_study_table
from tula_hpc.analysis.figures.study.scales import density, draw_study_scale, used_scales
from tula_hpc.analysis.figures.style import ALERT, INK, SIZES, styled
from tula_hpc.analysis.report import __main__ as report
from tula_hpc.analysis.report.study_page import write_study_report
from tula_hpc.analysis.report.study_text import cautions, latex, verdicts
from tula_hpc.analysis.study import main
from tula_hpc.analysis.study_results import answer, make_table, read_study
from tula_hpc.config import StudyCell, SweepSpec
from tula_hpc.errors import RunDirectoryError
from tula_hpc.records import Metrics, RunDirectory, StepMetrics, TunedRates


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    made = make_study(tmp_path_factory.mktemp("study") / "run")
    with pages_alone():
        write_study_report(made)
    return made


def rows(run: RunDirectory, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((run.report / name).read_text().splitlines()))


def test_all_files_are_there(run: RunDirectory) -> None:
    names = {path.name for path in run.report.iterdir()}
    figures = ("study_table", "study_accuracy", "study_epochs", "study_delta", "study_scale")
    wanted = {f"{figure}.{suffix}" for figure in figures for suffix in ("svg", "png", "csv")}
    assert names == wanted | {"study.html", "study_table.tex", "study_runs.csv"}


def test_the_page_holds_table_verdicts_and_figures_and_asks_the_network_for_nothing(run: RunDirectory) -> None:
    page = (run.report / "study.html").read_text()
    assert page.count("<figure ") == 5
    assert "B = 1,024: plain large-batch training" in page.replace("\u00a0", " ")
    assert "lrs diverged in 1 of 3 runs." in page.replace("\u00a0", " ")
    assert not re.search(r'(src|href)="(https?:)?//', page)
    assert "{{" not in page


def test_the_table_as_csv(run: RunDirectory) -> None:
    found = rows(run, "study_table.csv")
    assert [(row["kind"], row["method"], row["global_batch_samples"]) for row in found[:1]] == [
        ("small batch", "lbt", "128")
    ]
    assert len(found) == 1 + 6 * 3
    diverged = [row for row in found if row["diverged"] != "0"]
    assert [(row["method"], row["global_batch_samples"], row["runs"]) for row in diverged] == [("lrs", "1024", "2")]
    plain = next(row for row in found if row["method"] == "lbt" and row["global_batch_samples"] == "1024")
    assert float(plain["recovered_percent"]) == 0.0


def test_every_training_is_in_the_list(run: RunDirectory) -> None:
    found = rows(run, "study_runs.csv")
    assert len(found) == 3 * (1 + 6 * 3)
    assert [row["status"] for row in found].count("diverged") == 1


def test_latex_marks_one_best_and_one_worst_a_batch(run: RunDirectory) -> None:
    text = (run.report / "study_table.tex").read_text()
    assert text.count(r"\textbf{") == text.count(r"\underline{") == 3
    assert r"$^{1\times}$" in text
    body = [line for line in text.splitlines() if "&" in line and "multicolumn" not in line]
    # one column a batch
    assert {line.count("&") for line in body} == {3}
    assert text.count("{") == text.count("}")
    underscored = {**SWEEP, "study": {"methods": ["lbt"], "batches": [256], "variants": {"a_b": {}}}}
    spec = SweepSpec.model_validate(underscored)
    assert spec.study is not None
    assert r"a\_b" in latex(make_table(spec.study, []))


def test_columns_that_differ_in_delta_alone_are_one_ablation(run: RunDirectory) -> None:
    (group,) = delta_groups(read_study(run))
    # not lrs, which is another method; ags has the threshold of the preset
    assert group == {0.1: "ags-d0.1", 0.5: "ags", 2.0: "ags-d2"}
    assert {row["delta"] for row in rows(run, "study_delta.csv")} == {"0.1", "0.5", "2.0"}


def test_without_a_gate_the_threshold_does_nothing_and_there_is_no_ablation(run: RunDirectory) -> None:
    contents = read_study(run)
    training = contents.sweep.training.model_copy(update={"gate": "none"})
    assert delta_groups(contents._replace(sweep=contents.sweep.model_copy(update={"training": training}))) == []


def test_a_report_before_the_first_result_says_what_is_missing(tmp_path: Path) -> None:
    run = make_study(tmp_path / "run")
    for path in (run.root / "train").rglob("*.json*"):
        path.unlink()
    write_study_report(run)
    page = (run.report / "study.html").read_text().replace("\u00a0", " ")
    assert "57 trainings of the study have no result yet." in page
    assert page.count("<figure ") == 0
    assert "ablation of δ: no two columns" in page


def test_a_failed_training_is_shown_with_its_reason_until_it_is_submitted_again(tmp_path: Path) -> None:
    run = make_study(tmp_path / "run")
    label = "study/ags-b512-s1"
    run.train(label).result_file.unlink()
    run.log_event("failed", "train", failure="host_oom", detail="killed", data={"label": label})
    outcome = next(o for o in read_study(run).outcomes if o.cell.label == label)
    assert (outcome.status, outcome.why) == ("failed", "host oom: killed")
    run.log_event("submitted", "train", data={"label": label})
    assert next(o for o in read_study(run).outcomes if o.cell.label == label).status == "missing"


def test_a_training_without_test_accuracy_is_not_in_the_mean_of_training_accuracies(tmp_path: Path) -> None:
    run = make_study(tmp_path / "run")
    file = run.train("study/lbt-b256-s0").result_file
    file.write_text(re.sub(r'"test_accuracy":[\d.]+', '"test_accuracy":null', file.read_text()))
    contents = read_study(run)
    entry = make_table(contents.study, contents.outcomes).entries["lbt", 256]
    assert entry.failed == 1
    assert known(entry.test).runs == known(entry.train).runs == 2


def test_captions_name_the_small_batch_only_where_it_is_drawn(tmp_path: Path) -> None:
    for small in (0, 128):
        tables = {**SWEEP, "study": {"methods": ["lbt"], "batches": [256, 512], "seeds": [0], "small_batch": small}}
        contents = read_study(make_study(tmp_path / str(small), tables))
        table = make_table(contents.study, contents.outcomes)
        for draw in (draw_study_accuracy, draw_study_epochs):
            drawing = draw(contents, table)
            assert isinstance(drawing, Drawing)
            assert ("plain training with the small batch" in drawing.caption) == bool(small)


@pytest.mark.parametrize("seeds", [[0], [0, 1, 2]])
def test_captions_name_deviations_and_hollow_marks_only_where_they_are_drawn(tmp_path: Path, seeds: list[int]) -> None:
    contents = read_study(make_study(tmp_path, {**SWEEP, "study": {**STUDY, "seeds": seeds}}))
    table = make_table(contents.study, contents.outcomes)
    captions = []
    for draw in (draw_study_accuracy, draw_study_delta):
        drawing = draw(contents, table)
        assert isinstance(drawing, Drawing)
        captions.append(drawing.caption)
        assert ("standard deviation" in drawing.caption) == (len(seeds) > 1)
    # seed 2 of lrs diverges
    assert ("Hollow" in captions[0]) == (len(seeds) > 1)


def test_the_small_batch_among_the_batches_is_not_compared_with_itself(tmp_path: Path) -> None:
    tables = {**SWEEP, "study": {"methods": ["lbt", "ags"], "batches": [128, 256], "seeds": [0], "small_batch": 128}}
    contents = read_study(make_study(tmp_path / "run", tables, lambda cell: 0.7 if cell.column == "lbt" else 0.6))
    of_small, of_large = verdicts(make_table(contents.study, contents.outcomes))
    assert of_small.startswith("B = 128: the small batch itself, which reached 70.0 %. Best is lbt with 70.0 %")
    assert "lost hardly anything against the 70.0 % of B = 128" in of_large


def test_a_training_that_diverged_at_its_first_step_is_in_the_singular(tmp_path: Path) -> None:
    run = make_study(tmp_path / "run", outcome=lambda cell: None)
    file = run.train("study/lbt-b256-s0").result_file
    file.write_text(file.read_text().replace('"steps":100', '"steps":1'))
    outcome = next(o for o in read_study(run).outcomes if o.cell.label == "study/lbt-b256-s0")
    assert outcome.why == "the loss was not finite after 1 step"


def test_the_command_for_runs_makes_a_studys_own_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_study(tmp_path / "run")
    for path in (run.root / "train").rglob("*.json*"):
        path.unlink()
    assert report.main([str(run.root)]) == 0
    assert capsys.readouterr().out == f"{run.report / 'study.html'}\n"
    assert {path.name for path in run.report.iterdir()} == {"study.html", "study_table.tex", "study_runs.csv"}


def test_a_study_without_its_sweep_file_is_refused_with_the_advice_to_put_it_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_study(tmp_path / "run")
    run.log_event("submitted", "train", job_id="1", data={"label": "study/ags-b512-s1"})
    run.sweep_file.unlink()
    assert report.main([str(run.root)]) == 2
    assert f"{run.sweep_file}: is missing; it says what was measured or trained: put it back" in capsys.readouterr().err


def test_what_is_no_study_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunDirectoryError, match=r"no sweep\.toml"):
        read_study(RunDirectory(tmp_path))
    (tmp_path / "sweep.toml").write_text('name = "x"\n')
    assert main([str(tmp_path)]) == 2
    assert "holds no study" in capsys.readouterr().err


def test_the_verdict_names_the_loss_the_best_and_what_came_back(run: RunDirectory) -> None:
    contents = read_study(run)
    table = make_table(contents.study, contents.outcomes)
    last = verdicts(table)[-1]
    best = known(table.best(1024))
    assert best.column == "ags"
    # 15 points by the formula
    assert "lost 1" in last
    assert "Best is ags with" in last
    assert re.search(r"ags \d\d %", last)
    assert answer(table) == "ags is best, or within one standard deviation of the best, at 3 of 3 batches."


def test_cautions_tell_of_short_trainings_few_seeds_and_rates_at_the_edge(run: RunDirectory) -> None:
    contents = read_study(run)
    table = make_table(contents.study, contents.outcomes)
    assert cautions(contents, table) == []
    rising = contents.metrics.copy()
    for cell, metrics in contents.metrics.items():
        linear = [e.model_copy(update={"test_accuracy": e.epoch / 100}) for e in metrics.epochs]
        rising[cell] = metrics._replace(epochs=linear)
    study = contents.study.model_copy(update={"seeds": (0, 1), "base_lrs": {"all": [0.1, 0.2]}})
    rates = TunedRates(rates={"sgd": 0.2}, trials=[])
    found = "\n".join(cautions(contents._replace(metrics=rising, study=study, rates=rates), table))
    assert "still gained 2.0 points from epoch 18 to 20: it needs more epochs" in found
    assert "Only 2 seeds: the deviations say little." in found
    # as of a script that does not print its accuracy after every epoch
    for cell, metrics in rising.items():
        some = [e.model_copy(update={} if e.epoch % 4 == 0 else {"test_accuracy": None}) for e in metrics.epochs]
        rising[cell] = metrics._replace(epochs=some)
    found = "\n".join(cautions(contents._replace(metrics=rising, study=study, rates=rates), table))
    assert "still gained 4.0 points from epoch 16 to 20" in found
    alone = contents.study.model_copy(update={"seeds": (0,)})
    assert cautions(contents._replace(study=alone), table) == ["Only 1 seed: differences may be chance."]
    assert "rate of sgd, 0.2, is at the edge of study.base_lrs: a larger one may be better" in found


@pytest.mark.parametrize(("level", "guessed"), [(0.139, True), (0.3, False)])
def test_a_study_of_guesses_has_a_caution(tmp_path: Path, level: float, guessed: bool) -> None:
    """Even in a study of guesses some method is ahead of the others."""
    contents = read_study(make_study(tmp_path / "run", outcome=lambda cell: level if cell.column == "ags" else 0.1))
    messages = cautions(contents, make_table(contents.study, contents.outcomes))
    assert any("No training is clearly better than guessing" in doubt for doubt in messages) == guessed


@pytest.mark.parametrize(
    ("came_through", "words"),
    [
        ((), "The small batch itself diverged in 3 of 3 runs: lower workload.lr"),
        ((128,), None),
        ((256,), "The small batch itself diverged"),
    ],
)
def test_where_all_diverged_nothing_is_said_to_come_and_what_to_do(
    tmp_path: Path, came_through: tuple[int, ...], words: str | None
) -> None:
    contents = read_study(make_study(tmp_path / "run", outcome=lambda c: 0.5 if c.batch in came_through else None))
    table = make_table(contents.study, contents.outcomes)
    messages = [doubt for doubt in cautions(contents, table) if "diverged" in doubt]
    assert [doubt[: len(words or "")] for doubt in messages] == ([words] if words else [])
    drawn = [draw_study_accuracy(contents, table), draw_study_epochs(contents, table)]
    reasons = [missing.why for missing in drawn if isinstance(missing, Missing)]
    assert reasons == ([] if 256 in came_through else ["all trainings are over without a result: 54 diverged"] * 2)


def test_one_seed_has_no_deviation(tmp_path: Path) -> None:
    tables = {**SWEEP, "study": {"methods": ["lbt", "ags"], "batches": [256], "seeds": [0]}}
    contents = read_study(make_study(tmp_path / "run", tables))
    drawn = draw_study_table(contents, make_table(contents.study, contents.outcomes))
    assert isinstance(drawn, Drawing)
    assert "at the end of 20 epochs, of one seed; below it" in drawn.caption


def test_a_column_that_never_scaled_is_said_to_have_done_nothing(run: RunDirectory) -> None:
    """The column equals lbt to the last digit, which must not pass for a finding."""
    contents = read_study(run)
    table, batch = make_table(contents.study, contents.outcomes), contents.study.batches[-1]
    idle = contents.metrics.copy()
    for cell, metrics in contents.metrics.items():
        if (cell.column, cell.batch) == ("ags", batch):
            ones = {"scale_mean": 1.0, "scale_min": 1.0, "scale_max": 1.0}
            idle[cell] = metrics._replace(steps=[row.model_copy(update=ones) for row in metrics.steps])
    messages = cautions(contents._replace(metrics=idle), table)
    assert [words.split(": no gradient was scaled")[0] for words in messages] == [f"ags at B = {batch:,}"]


@pytest.mark.parametrize(
    ("values", "idle"),
    [
        ({"scale_min": 1.0, "scale_max": 1.0, "scaled": 1.0, "scale_share": 1.0}, True),
        # rounding alone
        ({"scale_min": 0.9999993, "scale_max": 1.0, "scaled": 1.0, "scale_share": 1.0}, True),
        ({"scale_min": 0.999, "scale_max": 1.0, "scaled": 1.0, "scale_share": 1.0}, False),
        # the gate let nothing through
        ({"scale_min": 1.0, "scale_max": 2.0, "scaled": 0.0, "scale_share": 0.0}, True),
        ({"scale_min": 1.0, "scale_max": 2.0, "scaled": 0.0}, True),
        ({"scale_min": 1.0, "scale_max": 2.0, "scaled": 0.5, "scale_share": 0.1}, False),
        # a method that scales no gradients
        ({}, False),
    ],
)
def test_a_training_scaled_nothing_where_no_step_used_any_scale(values: dict[str, float], idle: bool) -> None:
    row = StepMetrics(step=1, samples_seen=1, epoch=1, loss=1, lr=1, step_time_s=1, **values)
    assert Metrics([row], [], 0).scaled_nothing == idle
    used = row.model_copy(update={"scale_max": 2.0, "scaled": 1.0, "scale_share": 1.0})
    assert not Metrics([row, used], [], 0).scaled_nothing


def test_runs_that_failed_or_have_just_begun_cut_no_curve_short_and_raise_no_caution(tmp_path: Path) -> None:
    run = make_study(tmp_path / "run")
    begun = run.train("study/lbt-b128-s1")
    begun.result_file.unlink()
    begun.metrics_file.write_text("".join(begun.metrics_file.read_text().splitlines(keepends=True)[:3]))
    contents = read_study(run)
    assert [len(metrics.epochs) for metrics in contents.of("lbt", 128)] == [20, 20]
    for seed in (0, 2):
        run.train(f"study/lbt-b128-s{seed}").result_file.unlink()
    contents = read_study(run)
    assert sorted(len(metrics.epochs) for metrics in contents.of("lbt", 128)) == [3, 20, 20]
    # these are under way: only their beginning is left
    for seed in (0, 2):
        contents.metrics[StudyCell("lbt", 128, seed)] = contents.metrics[StudyCell("lbt", 128, 1)]
    assert not any(
        "needs more epochs" in doubt for doubt in cautions(contents, make_table(contents.study, contents.outcomes))
    )


def test_the_curves_are_of_the_studys_metric(tmp_path: Path) -> None:
    tables = {**SWEEP, "study": {"methods": ["lbt"], "batches": [256], "small_batch": 0, "metric": "top5"}}
    contents = read_study(make_study(tmp_path / "run", tables))
    drawn = draw_study_epochs(contents, make_table(contents.study, contents.outcomes))
    assert isinstance(drawn, Drawing)
    assert {row[3] for row in drawn.table.rows} == {90.0}


def test_curves_of_a_single_epoch_are_seen(run: RunDirectory) -> None:
    contents = read_study(run)
    short = {cell: metrics._replace(epochs=metrics.epochs[-1:]) for cell, metrics in contents.metrics.items()}
    drawn = draw_study_epochs(contents._replace(metrics=short), make_table(contents.study, contents.outcomes))
    assert isinstance(drawn, Drawing)
    assert {line.get_marker() for axes in drawn.figure.axes for line in axes.get_lines()} == {"_"}


def test_methods_and_batches_of_which_nothing_can_be_drawn_have_no_key_and_no_panel(tmp_path: Path) -> None:
    def outcome(cell: StudyCell) -> float | None:
        return None if cell.column == "lars" or cell.batch == 512 else accuracy(cell)

    contents = read_study(make_study(tmp_path / "run", outcome=outcome))
    drawn = draw_study_epochs(contents, make_table(contents.study, contents.outcomes))
    assert isinstance(drawn, Drawing)
    batches = list(dict.fromkeys(row[1] for row in drawn.table.rows))
    assert batches == [contents.study.small_batch, 256, 1024], "the dashed curve is in the numbers, too"
    legend = known(drawn.figure.axes[0].get_legend())
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["lbt", "lrs", "ags", "ags-d0.1", "ags-d2", "small batch"]
    assert [axes.get_ylabel().split("\n")[1] for axes in drawn.figure.axes] == ["B = 256", "B = 1,024"]


def test_the_table_frames_what_its_title_counts_and_explains_its_marks(tmp_path: Path) -> None:
    # ags is ahead by very little
    reached = {"lbt": (0.6, 0.9, 0.6), "ags": (0.9, 0.6, 0.601), "lrs": (0.3, 0.3, 0.3)}
    tables = {**SWEEP, "study": {"methods": list(reached), "batches": [256], "small_batch": 128}}

    def outcome(cell: StudyCell) -> float:
        return 0.95 if cell.batch == 128 else reached[cell.column][cell.seed]

    contents = read_study(make_study(tmp_path / "run", tables, outcome))
    drawn = draw_study_table(contents, make_table(contents.study, contents.outcomes))
    assert isinstance(drawn, Drawing)
    assert drawn.title.startswith("lbt and ags are best, or within one standard deviation")
    (axes,) = drawn.figure.axes
    frames = [patch.get_edgecolor() for patch in axes.patches if not patch.get_fill()]
    assert frames == [to_rgba(colour.light) for colour in (INK, INK, ALERT)]
    legend = known(axes.get_legend())
    assert len(legend.get_texts()) == 3
    assert any(text.get_text().startswith("back: ") for text in axes.texts)


@pytest.mark.parametrize("count", [4, *(pytest.param(count, marks=pytest.mark.processes) for count in (1, 5, 13))])
def test_what_cells_of_the_table_say_stays_in_them(tmp_path: Path, count: int) -> None:
    batches = [256 * 2**number for number in range(count)]
    seeds = {"seeds": [0, 1, 2, 3], "small_batch": 128}
    tables = {**SWEEP, "study": {"methods": ["lbt", "ags"], "batches": batches, **seeds}}
    run = make_study(tmp_path / "run", tables, lambda cell: [0.7, 0.5 + 0.01 * len(cell.column), None, 0.6][cell.seed])
    for batch in batches:
        # one training is missing
        shutil.rmtree(run.train(f"study/ags-b{batch}-s3").root)
    contents = read_study(run)
    drawn = draw_study_table(contents, make_table(contents.study, contents.outcomes))
    assert isinstance(drawn, Drawing)
    with styled():
        drawn.figure.draw_without_rendering()
    (axes,) = drawn.figure.axes
    cells = [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_fill()]
    assert len(cells) == 2 * count
    for cell in cells:
        boxes = [text.get_window_extent() for text in axes.texts if cell.get_bbox().contains(*text.get_position())]
        assert len(boxes) >= 3
        within = cell.get_window_extent()
        # pixels
        assert Bbox.union([within, *boxes]).bounds == pytest.approx(within.bounds, abs=1.0)
        assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


@pytest.mark.parametrize(
    "small", [0.72, *(pytest.param(it, marks=pytest.mark.processes) for it in (0.70, 0.745, 0.76))]
)
def test_names_of_methods_lie_neither_on_the_small_batchs_line_nor_on_its_words(tmp_path: Path, small: float) -> None:
    def outcome(cell: StudyCell) -> float:
        return small if cell.batch == 128 else 0.7 + 0.01 * len(cell.column)

    contents = read_study(make_study(tmp_path / "run", SWEEP, outcome))
    drawn = draw_study_accuracy(contents, make_table(contents.study, contents.outcomes))
    assert isinstance(drawn, Drawing)
    with styled():
        drawn.figure.draw_without_rendering()
    (axes,) = drawn.figure.axes
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    line = axes.transData.transform((256, 100 * small))[1]
    assert not any(box.y0 < line < box.y1 for box in boxes)


@pytest.mark.parametrize(
    ("columns", "long", "at_lines"),
    [
        pytest.param(8, "", True, marks=pytest.mark.processes),
        pytest.param(9, "", False, marks=pytest.mark.processes),
        (4, "-of-a-long-name", False),
    ],
)
def test_methods_are_named_in_a_legend_where_line_ends_have_no_room(
    tmp_path: Path, columns: int, long: str, at_lines: bool
) -> None:
    variants = {f"ags-variant{long}-{place}": {"training": {"delta": 0.1 + place}} for place in range(columns - 1)}
    tables = {**SWEEP, "study": {"methods": ["lbt"], "batches": [256, 512], "variants": variants}}
    contents = read_study(make_study(tmp_path / "run", tables, lambda _: 0.7))
    drawn = draw_study_accuracy(contents, make_table(contents.study, contents.outcomes))
    assert isinstance(drawn, Drawing)
    (axes,) = drawn.figure.axes
    legend = axes.get_legend()
    named = [text.get_text() for text in (axes.texts if legend is None else legend.get_texts())]
    assert (legend is None) == at_lines
    assert set(named) >= {"lbt", *variants}


@pytest.mark.parametrize("count", [3, pytest.param(9, marks=pytest.mark.processes)])
def test_many_batches_are_named_in_a_legend_with_the_thresholds(tmp_path: Path, count: int) -> None:
    batches = [256 * 2**place for place in range(count)]
    variants = {f"d{delta}": {"training": {"method": "ags", "delta": delta}} for delta in (0.1, 0.4, 2.0)}
    tables = {**SWEEP, "study": {"methods": ["lbt"], "batches": batches, "variants": variants}}
    contents = read_study(make_study(tmp_path / "run", tables, lambda cell: 0.7 - cell.batch / 1e6))
    drawn = draw_study_delta(contents, make_table(contents.study, contents.outcomes))
    assert isinstance(drawn, Drawing)
    (axes,) = drawn.figure.axes
    legend = axes.get_legend()
    named = [text.get_text() for text in (axes.texts if legend is None else legend.get_texts())]
    assert (legend is None) == (count == 3)
    assert sorted(named) == sorted(f"B = {batch:,}" for batch in batches)


def test_names_of_thresholds_do_not_run_into_one_another(tmp_path: Path) -> None:
    deltas = [0.1, *(0.1 + number for number in range(1, 9))]
    variants = {f"d{number}": {"training": {"method": "ags", "delta": delta}} for number, delta in enumerate(deltas)}
    tables = {**SWEEP, "study": {"methods": ["lbt"], "batches": [256], "variants": variants}}
    contents = read_study(make_study(tmp_path / "run", tables, lambda _: 0.7))
    drawn = draw_study_delta(contents, make_table(contents.study, contents.outcomes))
    assert isinstance(drawn, Drawing)
    with styled():
        drawn.figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in drawn.figure.axes[0].get_xticklabels()]
    assert len(boxes) >= 4
    # pixels between two names
    assert all(after.x0 - before.x1 > 3.0 for before, after in itertools.pairwise(boxes))


def test_batches_are_in_order_whatever_the_files_order(tmp_path: Path) -> None:
    tables = {**SWEEP, "study": {"methods": ["lbt", "ags"], "batches": [1024, 256, 512]}}
    contents = read_study(make_study(tmp_path / "run", tables))
    table = make_table(contents.study, contents.outcomes)
    assert table.batches == (256, 512, 1024)
    drawn = draw_study_accuracy(contents, table)
    assert isinstance(drawn, Drawing)
    assert drawn.title.startswith("At B = 1,024 ags reaches")


def test_more_methods_than_colours_and_long_names_can_be_distinguished() -> None:
    names = ["lbt", *(f"m{i}" for i in range(len(SIZES) + 1))]
    shapes = [column_key(names, name).marker for name in names]
    assert shapes.count(column_key(names, "lbt").marker) == 1
    looks = {(key.colour, key.line) for key in column_keys(names, names)}
    assert len(looks) == len(names)


def test_the_scale_used_is_1_where_the_gate_left_the_gradient_alone() -> None:
    row = StepMetrics(step=1, samples_seen=1, epoch=1, loss=1, lr=1, step_time_s=1, scale_mean=3.0, scale_share=0.5)
    assert row.applied_scale == pytest.approx(2.0)
    assert row.model_copy(update={"scale_share": 0.25}).applied_scale == pytest.approx(1.5), (
        "only a part of the scale was used"
    )
    assert row.model_copy(update={"scale_share": 0.0}).applied_scale == 1.0
    assert row.model_copy(update={"scale_mean": None}).applied_scale is None
    run = Metrics([row.model_copy(update={"scale_share": 0.0}), row], [], 0)
    assert list(used_scales([run])) == [1.0, 2.0]


@pytest.mark.parametrize(("largest", "scale"), [(3.0, "linear"), (300.0, "log")])
def test_factors_of_several_sizes_are_drawn_by_their_logarithms(run: RunDirectory, largest: float, scale: str) -> None:
    """With a logarithmic axis the areas of all methods are equally large and can be seen."""
    contents = read_study(run)
    table = make_table(contents.study, contents.outcomes)
    factors = np.geomspace(1.5, largest, 50)
    with mock.patch("tula_hpc.analysis.figures.study.scales.used_scales", return_value=factors):
        drawn = draw_study_scale(contents, table)
    assert isinstance(drawn, Drawing)
    assert ("logarithm" in drawn.caption) == (scale == "log")
    for axes in drawn.figure.axes:
        assert axes.get_xscale() == scale
        x, heights = (np.asarray(values, dtype=np.float64) for values in axes.lines[0].get_data())
        low, high = axes.get_xlim()
        assert low <= x[0] < x[-1] <= high
        assert max(heights[0], heights[-1]) < 0.02 * heights.max(), "a curve is cut"
        assert np.trapezoid(heights, np.log(x) if scale == "log" else x) == pytest.approx(1.0, abs=0.05)


def test_a_density_has_an_area_of_1() -> None:
    values = 2.0 + 0.5 * np.random.default_rng(0).standard_normal(500)
    at = np.linspace(-1, 5, 2001)
    found = density(values, at)
    assert np.trapezoid(found, at) == pytest.approx(1.0, abs=0.01)
    assert np.trapezoid(found * at, at) == pytest.approx(values.mean(), abs=1e-6)


def test_a_density_is_as_wide_as_its_values_and_their_bells_together() -> None:
    """By Scott's bandwidth σ n^(−1/5), the variance of the density is σ² (1 + n^(−2/5))."""
    values = 2.0 + 0.3 * np.random.default_rng(0).standard_normal(200)
    at = np.linspace(-2, 6, 4001)
    variance = np.trapezoid(density(values, at) * (at - values.mean()) ** 2, at)
    assert variance == pytest.approx(values.var() + values.var(ddof=1) * 200**-0.4, rel=1e-6)


def test_a_study_whose_trainings_have_no_accuracy_says_so_in_place_of_curves(tmp_path: Path) -> None:
    run = make_study(tmp_path / "run")
    for file in run.root.glob("train/study/*/*"):
        if file.suffix in (".json", ".jsonl"):
            unscored = re.sub(r'"test_accuracy":[\d.]+', '"test_accuracy":null', file.read_text())
            file.write_text(unscored)
    contents = read_study(run)
    missing = draw_study_epochs(contents, make_table(contents.study, contents.outcomes))
    assert isinstance(missing, Missing)
    assert missing.why.startswith("all trainings are over without a result: ")
