"""Several runs on one page: decisions, predicted and actual times, common curves, and clear refusals."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.run_factory import SWEEP_TOML, make_run
from tests.study_factory import make_study
from tula_hpc.analysis.figures.drawing import Drawing
from tula_hpc.analysis.figures.run_curves import RunCurve, draw_run_curves, falling
from tula_hpc.analysis.report.__main__ import main
from tula_hpc.analysis.report.several.runs_page import differences, read_runs, runs_table
from tula_hpc.errors import InputError
from tula_hpc.records import Interval, RunDirectory


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunDirectory]:
    """A finished run, one that is only planned with another learning rate, and one that is only measured."""
    root = tmp_path_factory.mktemp("runs")
    made = [
        make_run(root / "first"),
        make_run(root / "second", stage="plan"),
        make_run(root / "third", stage="profile"),
    ]
    made[1].sweep_file.write_text(SWEEP_TOML.replace("epochs = 20", "epochs = 20\nlr = 0.25"))
    return made


def test_all_runs_stand_on_one_page_with_their_curves(
    runs: list[RunDirectory], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main([*(str(run.root) for run in runs), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out / "runs.html")
    text = (out / "runs.html").read_text()
    assert text.count("<svg ") == 1
    assert (text.count("Trained on 4"), text.count("Train on 4")) == (1, 1)
    for words in ("first", "second", "third", "There is no plan yet", "workload.lr", "0.25"):
        assert words in text
    with (out / "run_curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["run"] for row in rows} == {"first", "second", "third"}
    assert {row["run"] for row in rows if row["quantity"] == "test_accuracy_percent"} == {"first"}
    assert {row["run"] for row in rows if row["quantity"] == "chosen_epoch_s"} == {"first", "second"}


def test_the_title_compares_the_epochs_as_the_numbers_do() -> None:
    def chosen(name: str, seconds: float, low: float, high: float) -> RunCurve:
        return RunCurve(name, {64: seconds}, {}, (64, Interval(seconds, low, high)), [], has_accuracy=False)

    curves = [chosen("a", 0.144, 0.12, 0.17), chosen("b", 0.137, 0.12, 0.16), chosen("c", 0.143, 0.142, 0.144)]
    titles = [drawn.title for few in (curves, curves[:1]) if isinstance(drawn := draw_run_curves(few), Drawing)]
    assert titles == [
        "Epoch times of the chosen configurations: b 137 ms, c 143 ms, a 144 ms",
        "Epoch time of the chosen configuration: a 144 ms",
    ]
    many = draw_run_curves([chosen(f"run {number}", 0.1 + number / 100, 0.1, 0.3) for number in range(9)])
    assert isinstance(many, Drawing)
    assert many.title.endswith("run 3 130 ms and 5 more")
    # the fastest that was measured need not be the fastest that is predicted
    assert "on the fastest number that was measured, which may be another." in many.caption


def test_batches_of_another_number_of_nodes_make_no_zigzag_of_the_least_times() -> None:
    # 384 is a batch of 3 nodes alone, 256 and 512 are batches of 4
    assert falling({512: 10.0, 256: 15.0, 384: 17.0, 1024: 10.0}) == [(256, 15.0), (512, 10.0), (1024, 10.0)]
    assert falling({}) == []


def test_the_table_has_a_column_for_each_run_and_no_empty_row(runs: list[RunDirectory]) -> None:
    table = runs_table(read_runs(runs))
    assert table.columns == ("", "first", "second", "third")
    assert [row[0] for row in table.rows][:2] == ["chosen", "objective"]
    assert all(set(row[1:]) != {"–"} for row in table.rows)
    whole = next(row for row in table.rows if row[0] == "whole training, predicted (90 %)")
    assert [cell == "–" for cell in whole[1:]] == [False, False, True], "the third run has no plan"
    predicted = next(row for row in table.rows if row[0].startswith("epoch, predicted"))
    assert predicted[1].startswith("17.2 s"), "times have the digits by which runs are compared"
    knee = next(row for row in table.rows if row[0] == "knee (90 %)")
    assert knee[1] == "B = 420\n360 – 500"
    score = next(row for row in table.rows if row[0] == "score")
    assert score[1].endswith("test accuracy")
    assert score[2:] == ("–", "–")


def test_differing_settings_are_the_users_own_and_hold_no_secret(tmp_path: Path) -> None:
    made = [make_run(tmp_path / name, stage="profile") for name in ("plain", "other")]
    # keys come before the first table
    hidden = 'on_event = "curl https://ntfy.sh/my-topic"\nsetup = ["export TOKEN=my-topic"]\n'
    own = (
        '[environment]\nTOKEN = "my-topic"\n[[partitions]]\npartition = "gpu"\npricing = { usd_per_node_hour = 2.0 }\n'
    )
    made[1].cluster_file.write_text(f"{hidden}{made[1].cluster_file.read_text()}{own}")
    table = differences(read_runs(made))
    assert table.columns == ("setting", "plain", "other")
    found = {setting: value for setting, _, value in table.rows}
    assert found["cluster.partitions"] == '[{"partition": "gpu", "pricing": {"usd_per_node_hour": 2.0}}]'
    assert "my-topic" not in str(table.rows)


def test_runs_of_one_name_are_distinguished(runs: list[RunDirectory], tmp_path: Path) -> None:
    other = make_run(tmp_path / "first", stage="plan")
    names = [run.name for run in read_runs([runs[0], other])]
    assert len(set(names)) == 2
    assert all(name.endswith("/first") for name in names)


def test_other_work_is_no_comparison(runs: list[RunDirectory], tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", stage="plan")
    other.sweep_file.write_text(SWEEP_TOML.replace('"vgg11"', '"resnet18"'))
    with pytest.raises(InputError, match="it trains resnet18 on cifar100 here and vgg11 on cifar100 there"):
        read_runs([runs[0], other])
    other.sweep_file.write_text(SWEEP_TOML.replace("epochs = 20", "epochs = 20\nsamples = 3500"))
    with pytest.raises(InputError, match=r"workload\.samples is 3500 here and not set there"):
        read_runs([runs[0], other])
    script = 'script = "train.py"\narguments = ["{local_batch}"]\nsamples = 3500\nepochs = 20'
    built_in = SWEEP_TOML[SWEEP_TOML.index("model =") : SWEEP_TOML.index("\n\n[search]")]
    other.sweep_file.write_text(SWEEP_TOML.replace(built_in, script).replace("delta = 0.5", ""))
    with pytest.raises(InputError, match=r"it trains train\.py here and vgg11 on cifar100 there"):
        read_runs([runs[0], other])


def test_a_file_where_the_report_belongs_is_refused_before_anything_is_drawn(
    runs: list[RunDirectory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def draw(*_: object) -> None:
        raise AssertionError("drawn")

    for name in ("all.draw_all", "all.draw_study", "drawing.attempt"):
        monkeypatch.setattr(f"tula_hpc.analysis.figures.{name}", draw)
    file = tmp_path / "file"
    file.touch()
    run = make_run(tmp_path / "run")
    study = make_study(tmp_path / "study")
    for folder in (run.report, study.report):
        folder.touch()
    out = [str(runs[0].root), str(runs[1].root), "--out", str(file)]
    for arguments, place in (out, file), ([str(run.root)], run.report), ([str(study.root)], study.report):
        assert main(arguments) == 2
        assert capsys.readouterr().err.startswith(f"{place}: is not a folder, or lies below a file; ")


def test_a_refusal_is_one_line(runs: list[RunDirectory], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = str(runs[0].root)
    study = make_run(tmp_path / "study", stage="profile")
    study.sweep_file.write_text(SWEEP_TOML + '[study]\nmethods = ["lbt"]\nbatches = [64]\nseeds = [0]\n')
    for other in (first, str(study.root), str(tmp_path / "nowhere")):
        assert main([first, other]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below"):
        assert main([*(str(run.root) for run in runs[1:]), "--out", str(tmp_path / place)]) == 2
        assert "is not a folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([first, "--out", str(tmp_path / "out")])
    assert "RUN/report" in capsys.readouterr().err
