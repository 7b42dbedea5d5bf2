"""The study: its table in the sweep file, its cells, and the results from their accuracies."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.known import known
from tula_hpc import study as study_command
from tula_hpc import sweep as sweep_command
from tula_hpc.analysis.report.study_text import verdicts
from tula_hpc.analysis.study_results import (
    CellOutcome,
    Entry,
    StudyTable,
    answer,
    make_table,
    marks_of,
    seed_mean,
    signed,
    within_one_deviation,
)
from tula_hpc.config import ClusterSpec, StudyCell, StudySpec, SweepSpec, check_together, load_sweep, study_column
from tula_hpc.errors import InputError, StageError
from tula_hpc.records import RateTrial, RunDirectory
from tula_hpc.stages.context import Sweep
from tula_hpc.stages.study import cell_spec, choose, describe_study, family, study_stage, trial_specs
from tula_hpc.stages.train_many import most_at_once
from tula_hpc.study import main
from tula_hpc.sweep import main as sweep_main

PLAIN = """
name = "small"
[search]
estimate = false
[workload]
dataset = "digits"
"""
STUDY = PLAIN + '[study]\nmethods = ["lbt", "lrs"]\nbatches = [256, 512]\n'
VARIANT = "[study.variants.mine]\n"


def loaded(folder: Path, text: str) -> SweepSpec:
    path = folder / "sweep.toml"
    path.write_text(text)
    return load_sweep(path)


# the table in the sweep file


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (PLAIN + "[study]\n", "study.batches: is required"),
        (PLAIN + "[study]\nbatches = [256]\n", "study.methods: expected at least one"),
        (STUDY.replace('"lrs"', '"lrz"'), 'study.methods: "lrz" is neither a method nor one of [study.variants] (did'),
        (STUDY.replace("512", "256"), "study.batches: expected each value once"),
        (STUDY.replace("256", '"256"'), 'study.batches.0: expected a whole number, got "256"'),
        (STUDY + "seed = [1]\n", "study.seed: unknown key (did you mean 'seeds'?)"),
        (STUDY + "small_batch = 0\nbase_lrs = [0.1]\n", "study.base_lrs: the rate is chosen at the small batch"),
        (
            STUDY + VARIANT + "training.delta = -1\n",
            "study.variants.mine: training.delta: expected more than 0, got -1",
        ),
        (STUDY + VARIANT + '"training.detla" = 1\n', "study.variants.mine: training.detla: unknown key (did you mean"),
        (STUDY + VARIANT + 'training.method = "agz"\n', "study.variants.mine: training.method: expected 'ags'"),
        (STUDY + VARIANT + 'workload.model = "resnet19"\n', "study.variants.mine: workload.model: 'resnet19' is not a"),
        (STUDY + VARIANT + "workload.seed = 3\n", "study.variants.mine.workload.seed: is set by study.seeds"),
        (STUDY + VARIANT + "delta = 3\n", "study.variants.mine.delta: expected a key of [workload] or [training]"),
        (STUDY + VARIANT + "search.min_batch = 3\n", "study.variants.mine.search.min_batch: expected a key of [work"),
        (STUDY + "[study.variants]\nmine = 3\n", "study.variants.mine: expected a table, got 3"),
        (STUDY + '[study.variants."a/b"]\n', "expected at most 64 letters"),
        (
            STUDY + '[study.variants.lars]\ntraining.method = "lamb"\n',
            "study.variants.lars.training.method: a variant named after a method has that method",
        ),
    ],
)
def test_a_mistake_is_one_line_with_file_key_and_what_was_expected(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        loaded(tmp_path, text)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}/sweep.toml: study.")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "cluster", "words"),
    [
        (STUDY + "nodes = 65\n", {}, "study.nodes: 65 nodes, but c.toml has max_nodes = 64"),
        (STUDY + "nodes = 3\n", {}, "study.small_batch: 128 cannot be shared equally among 3 workers"),
        (STUDY + "small_batch = 0\n", {"workers_per_node": 3}, "study.batches: 256 cannot be shared equally"),
        (
            STUDY.replace('"digits"', '"digits"\nsamples = 300'),
            {},
            "study.batches: 512 is above workload.samples = 300",
        ),
        (
            STUDY.replace("batches = [256, 512]", "batches = [256, 2048]"),
            {},
            "study.batches: 2048 is above the 1438 training samples of 'digits'; lower",
        ),
        (
            STUDY + "small_batch = 1400\nbase_lrs = [0.1, 0.2]\n",
            {},
            "study.small_batch: 1400 is above the 1438 training samples of 'digits', of which 10 % are held out; lower",
        ),
        (STUDY.replace('"lrs"', '"polo"'), {}, "study.nodes: polo averages models of several workers"),
        (STUDY + VARIANT + 'workload.precision = "fp16"\n', {}, "workload.precision: fp16 of mine needs device"),
    ],
)
def test_a_study_that_the_cluster_cannot_run_is_refused(
    tmp_path: Path, text: str, cluster: dict[str, object], words: str
) -> None:
    with pytest.raises(InputError) as caught:
        check_together(loaded(tmp_path, text), ClusterSpec.model_validate(cluster), "s.toml", "c.toml")
    assert words in str(caught.value)


def test_bounds_of_the_search_do_not_matter_to_a_study(tmp_path: Path) -> None:
    spec = loaded(tmp_path, STUDY.replace('"digits"', '"digits"\nsamples = 600'))
    # search.max_batch is 1024
    check_together(spec, ClusterSpec(), "s.toml", "c.toml")


def test_keys_of_a_variant_with_and_without_quotes_are_the_same(tmp_path: Path) -> None:
    bare = loaded(tmp_path, STUDY + VARIANT + "training.delta = 0.1\nworkload.lr = 0.2\n")
    quoted = loaded(tmp_path, STUDY + VARIANT + '"training.delta" = 0.1\n"workload.lr" = 0.2\n')
    assert bare == quoted
    column = study_column(bare, "mine")
    assert (column.training.ags.delta, column.workload.lr, column.training.method) == (0.1, 0.2, "ags")


def test_a_variant_with_the_name_of_a_method_has_that_method_with_other_keys(tmp_path: Path) -> None:
    spec = loaded(tmp_path, STUDY + "[study.variants.lars]\nworkload.lr = 2.0\n")
    assert known(spec.study).columns == ("lbt", "lrs", "lars")
    column = study_column(spec, "lars")
    assert (column.training.method, column.workload.lr) == ("lars", 2.0)


def test_a_frozen_study_reads_as_it_was(tmp_path: Path) -> None:
    import tomli_w

    spec = loaded(tmp_path, STUDY + VARIANT + "training.delta = 0.1\nworkload.milestones = [3, 5]\n")
    again = loaded(tmp_path, tomli_w.dumps(spec.model_dump(mode="json", exclude_none=True)))
    assert again == spec


# cells


def study(**keys: object) -> StudySpec:
    return StudySpec.model_validate({"methods": ("lbt", "lrs"), "batches": (256, 512), **keys})


def test_every_cell_is_there_once_and_the_first_seed_makes_a_whole_table() -> None:
    spec = study(seeds=(3, 4))
    cells = spec.cells()
    wanted = {("lbt", 128)} | {(column, batch) for column in ("lbt", "lrs") for batch in (256, 512)}
    assert {(cell.column, cell.batch) for cell in cells[:5]} == wanted
    assert {cell.seed for cell in cells[:5]} == {3}
    assert len(cells) == len(set(cells)) == len({cell.label for cell in cells}) == 10


def test_the_reference_is_not_trained_twice_where_the_table_has_it() -> None:
    assert len(study(batches=(128, 256), seeds=(0,)).cells()) == 4
    assert len(study(methods=("lrs",), batches=(128, 256), seeds=(0,)).cells()) == 3
    assert len(study(small_batch=0, seeds=(0,)).cells()) == 4


def sweep(**keys: object) -> SweepSpec:
    return SweepSpec.model_validate({"name": "s", "workload": {"lr": 0.3}, "study": study(**keys).model_dump()})


def test_a_cell_is_its_column_with_its_seed_and_the_chosen_rate() -> None:
    spec = sweep(variants={"fast": {"workload.lr": 0.9}, "adam": {"workload.optimizer": "adamw"}}, small_batch=64)
    rates = {"sgd": 0.1, "adamw": 0.001}
    lrs = cell_spec(spec, StudyCell("lrs", 256, 7), rates)
    assert (lrs.training.method, lrs.workload.seed, lrs.workload.lr) == ("lrs", 7, 0.1)
    # the batch for which the rate was chosen
    assert lrs.training.base_batch == 64
    assert cell_spec(spec, StudyCell("fast", 256, 7), rates).workload.lr == 0.9
    assert cell_spec(spec, StudyCell("adam", 256, 7), rates).workload.lr == 0.001
    untuned = cell_spec(spec, StudyCell("lrs", 256, 7), {})
    assert (untuned.workload.lr, untuned.training.base_batch) == (0.3, 128)


def test_rates_are_tried_once_for_each_family_on_held_out_samples_of_one_seed() -> None:
    columns = {"adam": {"workload.optimizer": "adamw"}, "fast": {"workload.lr": 0.9, "training.method": "lamb"}}
    spec = sweep(methods=("lbt", "lrs", "ags", "lars"), variants=columns, base_lrs=(0.1, 0.2), seeds=(5, 6))
    trials = trial_specs(spec)
    # not lamb: its only column has a rate of its own
    assert {(family(t), t.workload.lr) for t in trials.values()} == {
        (name, rate) for name in ("sgd", "adamw", "lars") for rate in (0.1, 0.2)
    }
    assert all(t.workload.seed == 5 and t.workload.holdout == 0.1 for t in trials.values())
    assert {t.training.method for t in trials.values()} == {"lbt", "lars"}


def test_the_best_finished_rate_is_chosen_and_the_smaller_of_equals() -> None:
    seen = [("sgd", 0.4, None), ("sgd", 0.2, 0.7), ("sgd", 0.1, 0.7), ("sgd", 0.05, 0.6), ("lars", 2.0, 0.1)]
    trials = [RateTrial(family=name, lr=rate, accuracy=accuracy) for name, rate, accuracy in seen]
    assert choose(iter(trials)).rates == {"sgd": 0.1, "lars": 2.0}
    with pytest.raises(StageError, match="sgd diverged with every one"):
        choose(iter(trials[:1]))


def test_locally_as_many_run_as_there_are_cores_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert most_at_once(ClusterSpec(), 1) == 8
    assert most_at_once(ClusterSpec(), 3) == 2
    assert most_at_once(ClusterSpec(cpus_per_worker=16), 1) == 1
    # the cluster file says so
    assert most_at_once(ClusterSpec(array_parallelism=4), 1) == 4
    # all would take the first GPU
    assert most_at_once(ClusterSpec(device="cuda"), 1) == 1
    assert most_at_once(ClusterSpec(device="cuda", array_parallelism=4), 1) == 4


# the numbers

accuracies = st.lists(st.floats(0, 1), min_size=1, max_size=6)


@given(accuracies)
def test_mean_and_deviation_over_seeds(values: list[float]) -> None:
    found = known(seed_mean(values))
    assert min(values) - 1e-12 <= found.mean <= max(values) + 1e-12
    assert found.runs == len(values)
    assert found.deviation == (None if len(values) == 1 else pytest.approx(statistics.stdev(values)))


def table(reached: Mapping[tuple[str, int], Sequence[float | None]], **keys: object) -> StudyTable:
    """Return a table of these test accuracies by column and batch, one for each seed; None: diverged."""
    outcomes = [
        CellOutcome(StudyCell(*place, seed), "diverged" if value is None else "finished", value)
        for place, values in reached.items()
        for seed, value in enumerate(values)
    ]
    columns = tuple(dict.fromkeys(column for column, batch in reached if batch != 128))
    batches = tuple(dict.fromkeys(batch for _, batch in reached if batch != 128))
    return make_table(study(methods=columns, batches=batches, **keys), outcomes)


@given(st.floats(0.3, 0.9), st.floats(0.02, 0.3), st.floats(-0.2, 0.2))
def test_recovered_is_0_for_plain_1_for_the_small_batch_and_linear_between(
    small: float, lost: float, shift: float
) -> None:
    levels: dict[tuple[str, int], list[float | None]] = {
        ("lbt", 128): [small],
        ("lbt", 512): [small - lost],
        ("ags", 512): [small + shift * lost],
    }
    found = table({**levels, ("lrs", 512): [small - lost / 2]}).entries
    assert found["lbt", 512].recovered == pytest.approx(0.0)
    assert found["ags", 512].recovered == pytest.approx(1 + shift)
    assert found["lrs", 512].recovered == pytest.approx(0.5)


def test_nothing_is_recovered_where_nothing_was_lost_or_nothing_is_known() -> None:
    unhurt = table({("lbt", 128): [0.7], ("lbt", 512): [0.695], ("ags", 512): [0.71]})
    assert unhurt.entries["ags", 512].recovered is None
    assert table({("lbt", 512): [0.6], ("ags", 512): [0.7]}).entries["ags", 512].recovered is None


@pytest.mark.parametrize(
    ("lost", "test_samples", "known"),
    [(0.014, None, True), (0.014, 359, False), (0.014, 10_000, True), (0.02, 359, True), (0.009, 10_000, False)],
)
def test_nothing_is_recovered_of_a_loss_that_counting_test_samples_cannot_tell(
    lost: float, test_samples: int | None, known: bool
) -> None:
    reached = {("lbt", 128): 0.1, ("lbt", 512): 0.1 - lost, ("ags", 512): 0.139}
    outcomes = [CellOutcome(StudyCell(*place, 0), "finished", value) for place, value in reached.items()]
    made = make_table(study(methods=("lbt", "ags"), batches=(512,)), outcomes, test_samples)
    assert (made.entries["ags", 512].recovered is not None) == known
    assert ("lost hardly anything" in verdicts(made)[0]) != known


@pytest.mark.parametrize("diverged", [("lbt", 128), ("lbt", 512), ("ags", 512)])
def test_nothing_is_said_to_be_recovered_where_only_some_runs_came_through(diverged: tuple[str, int]) -> None:
    levels: dict[tuple[str, int], list[float | None]] = {
        ("lbt", 128): [0.7, 0.7],
        ("lbt", 512): [0.5, 0.5],
        ("ags", 512): [0.6, 0.6],
        ("lrs", 512): [0.65, 0.65],
    }
    assert table(levels).entries["ags", 512].recovered == pytest.approx(0.5)
    levels[diverged] = [*levels[diverged], None]
    found = table(levels).entries
    assert found["ags", 512].recovered is None
    assert found["lrs", 512].recovered == (pytest.approx(0.75) if diverged[0] == "ags" else None)


def test_diverged_runs_are_counted_not_averaged_and_never_the_best() -> None:
    found = table({("lrs", 512): [0.9, None, 0.8], ("lbt", 512): [0.5, 0.5, 0.5], ("ags", 512): [0.4, 0.4, 0.4]})
    lrs = found.entries["lrs", 512]
    assert (lrs.diverged, lrs.mark) == (1, "")
    assert known(lrs.test).mean == pytest.approx(0.85)
    assert found.best(512) == found.entries["lbt", 512]
    assert found.entries["ags", 512].mark == "worst"
    assert found.number_of("diverged") == 1
    # for the marks a diverged run counts as 0, which gives 0.35
    assert table({("lrs", 512): [0.7, None], ("lbt", 512): [0.5, 0.5]}).entries["lrs", 512].mark == "worst"


def test_equal_results_are_marked_alike_and_named_together() -> None:
    found = table({("lbt", 512): [0.7, 0.6], ("ags", 512): [0.6, 0.7], ("lrs", 512): [0.4], ("lars", 512): [0.4]})
    marks = {column: entry.mark for (column, _), entry in found.entries.items()}
    assert marks == {"lbt": "best", "ags": "best", "lrs": "worst", "lars": "worst"}
    (message,) = verdicts(found)
    assert "Best are lbt and ags with 65.0 ± 7.1 %, 25.0 points above lrs." in message
    assert "Within one standard deviation" not in message
    assert "Worst are lrs and lars with 40.0 %." in message


def verdict_of(small: Sequence[float | None], plain: Sequence[float | None], **others: Sequence[float | None]) -> str:
    """Return the verdict on a batch of 512."""
    rows = {("lbt", 128): small, ("lbt", 512): plain, **{(name, 512): values for name, values in others.items()}}
    (message,) = verdicts(table({place: values for place, values in rows.items() if values}))
    return message


@pytest.mark.parametrize(
    ("small", "plain", "expected"),
    [
        ([0.7], [0.65], "plain large-batch training (65.0 %) lost 5.0 points against the 70.0 % of B = 128."),
        ([0.7], [0.704], "plain large-batch training (70.4 %) lost hardly anything against the 70.0 % of B = 128."),
        ([0.7], [0.76], "plain large-batch training (76.0 %) came out 6.0 points above the 70.0 % of B = 128."),
        ([0.7], [None, None], "plain large-batch training diverged in 2 of 2 runs; B = 128 reached 70.0 %."),
        (
            [0.7],
            [None, 0.6, 0.6],
            "plain large-batch training diverged in 1 of 3 runs; the others (60.0 ± 0.0 %) lost 10.0 points against "
            "the 70.0 % of B = 128.",
        ),
        (
            [0.7],
            [None, 0.75],
            "plain large-batch training diverged in 1 of 2 runs; the other (75.0 %) came out 5.0 points above the "
            "70.0 % of B = 128.",
        ),
        (
            [None, 0.7],
            [0.6],
            "plain large-batch training (60.0 %) lost 10.0 points against the 70.0 % of B = 128, which diverged in 1 "
            "of 2 runs.",
        ),
        ([None], [0.6], "plain large-batch training (60.0 %) cannot be compared: B = 128 diverged in 1 of 1 run."),
        ([None], [None], "plain large-batch training diverged in 1 of 1 run; B = 128 diverged in 1 of 1 run."),
        ([], [0.6], "there is no small batch to compare with."),
        ([0.7], [], "there is no plain large-batch training to compare with."),
        ([], [None], "plain large-batch training diverged in 1 of 1 run; there is no small batch to compare with."),
    ],
)
def test_the_verdict_begins_with_what_became_of_plain_training(
    small: list[float | None], plain: list[float | None], expected: str
) -> None:
    assert verdict_of(small, plain, ags=[0.2]).startswith(f"B = 512: {expected}")


def test_runs_that_diverged_are_reported_once_in_whole_sentences() -> None:
    message = verdict_of([0.7, 0.7], [None, 0.6], ags=[0.66, 0.66], lrs=[None, 0.65])
    assert (message.count("diverged"), message.count("lrs diverged in 1 of 2 runs.")) == (2, 1)
    several = verdict_of([0.7, 0.7], [0.6, 0.6], ags=[None, 0.66], lrs=[None, 0.65], lars=[None, None])
    assert several.endswith("ags and lrs each diverged in 1 of 2 runs. lars diverged in 2 of 2 runs.")
    assert "Recovered" not in message
    assert "  " not in message


def test_a_lead_that_rounds_to_zero_is_not_called_zero() -> None:
    message = verdict_of([0.7], [0.6], ags=[0.6502], lrs=[0.65])
    assert "Best is ags with 65.0 %, less than 0.1 points above lrs. How much of that" in message


def test_a_share_that_rounds_to_zero_has_no_sign() -> None:
    assert [signed(share) for share in (-0.002, -0.12, 0.58)] == ["0 %", "−12 %", "58 %"]


def test_where_no_method_came_through_nothing_is_said_to_be_missing() -> None:
    partly = {("lbt", 512): [None, 0.6], ("ags", 512): [0.7, None]}
    equal = {("lbt", 512): [0.6], ("ags", 512): [0.6]}
    for reached, why in (
        (partly, "each diverged in some run"),
        (equal, "all are equal"),
        # plain training with the small batch is no method of the table
        (equal | {("lbt", 128): [None]}, "all are equal"),
        ({("lbt", 512): [None, None], ("ags", 512): [None]}, "all diverged"),
        (partly | {("lbt", 256): [0.6], ("ags", 256): [0.6]}, "all are equal, or each diverged in some run"),
    ):
        assert answer(table(reached)) == f"No method is best at any batch: {why}."
    alone = table({("lbt", 512): [0.6], ("ags", 512): []})
    assert answer(alone) == "No batch has two methods with results."
    entries = {place: entry._replace(missing=1) for place, entry in alone.entries.items()}
    assert answer(alone._replace(entries=entries)) == "No batch has two methods with results yet."


def test_no_deviation_is_given_for_one_seed() -> None:
    alone = answer(table({("lbt", 512): [0.6], ("ags", 512): [0.7]}))
    assert alone == "ags is best at the one batch that can be judged."


def test_equals_and_single_methods_have_no_marks() -> None:
    assert {entry.mark for entry in table({("lbt", 512): [0.5], ("lrs", 512): [0.5]}).entries.values()} == {""}
    assert table({("lbt", 512): [0.5]}).best(512) is None


levels = st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=1, max_size=4)


@given(st.lists(levels, min_size=2, max_size=6))
def test_the_best_is_best_of_those_that_did_not_diverge_and_the_worst_is_below_all(
    rows: list[list[float | None]],
) -> None:
    entries = []
    for number, values in enumerate(rows):
        known = [value for value in values if value is not None]
        entries.append(Entry(f"m{number}", 512, seed_mean(known), None, len(values) - len(known), 0, 0))
    # any of several equal ones will do
    marks = {mark: column for column, mark in marks_of(entries).items()}
    means = {entry.column: entry.test.mean for entry in entries if entry.test and not entry.diverged}
    levels = {f"m{number}": statistics.fmean(value or 0.0 for value in values) for number, values in enumerate(rows)}
    if "best" in marks:
        assert means[marks["best"]] == max(means.values())
        assert marks["best"] != marks["worst"]
    if "worst" in marks:
        assert levels[marks["worst"]] == pytest.approx(min(levels.values()))


def test_within_one_deviation_of_the_best() -> None:
    found = table({("ags", 512): [0.68, 0.72], ("lrs", 512): [0.68, 0.68], ("lbt", 512): [0.6, 0.6]})
    best = known(found.best(512))
    # its deviation is 2.8 points
    assert best.column == "ags"
    assert within_one_deviation(found.entries["lrs", 512], best)
    assert not within_one_deviation(found.entries["lbt", 512], best)


# the command


def test_dry_run_says_what_would_be_trained_and_creates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    loaded(tmp_path, STUDY + "base_lrs = [0.1, 0.2]\n")
    (tmp_path / "c.toml").write_text('name = "c"\nexecutor = "slurm"\ntrain_minutes = 30\narray_parallelism = 3\n')
    assert main(["sweep.toml", "--cluster", "c.toml", "--dry-run", "--detach"]) == 0
    out = capsys.readouterr().out
    assert "15 trainings of 10 epochs on 1 x 1 workers" in out
    assert "before them 2 trainings to choose the learning rate at B = 128" in out
    assert "at most 8.50 node-hours" in out
    assert "#SBATCH --array=0-14%3" in out
    assert "# ---- controller, N=1, 1 task ----" in out
    assert main(["sweep.toml", "--set", "study.base_lrs=[0.1]", "--dry-run"]) == 0
    assert "before them 1 training to choose" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"sweep.toml", "c.toml"}


def test_what_has_a_result_is_not_submitted_again(tmp_path: Path) -> None:
    spec = loaded(tmp_path, STUDY + "base_lrs = [0.1, 0.2]\n")
    run = RunDirectory(tmp_path / "run").create()
    cluster = ClusterSpec(executor="slurm", train_minutes=30)
    labels = [*trial_specs(spec), *(cell.label for cell in known(spec.study).cells())]
    for label in labels[:-2]:
        run.make_train(label).result_file.touch()
    shown = describe_study(spec, cluster, run.root)
    assert "13 of them have a result and are not trained again" in shown.words
    assert "at most 1.00 node-hours (30 min is the limit of each)" in shown.words
    assert not any("learning rate" in line for line in shown.words)
    (script,) = shown.scripts
    assert "#SBATCH --array=0-1%1" in script.text
    for label in labels[-2:]:
        run.make_train(label).result_file.touch()
    over = describe_study(spec, cluster, run.root)
    assert (over.words[-1], over.scripts) == ("all have a result: nothing is submitted", [])


def test_a_study_shows_as_many_tasks_as_it_submits_at_once(tmp_path: Path) -> None:
    spec = loaded(tmp_path, STUDY + f"seeds = {list(range(200))}\n")
    shown = describe_study(spec, ClusterSpec(executor="slurm"), tmp_path / "run")
    assert "500 at a time" in shown.words
    assert "#SBATCH --array=0-499%1" in shown.scripts[0].text


def test_the_failure_of_a_study_as_a_whole_is_on_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path / "run").create()
    spec = loaded(tmp_path, STUDY + "base_lrs = [0.1]\n")

    def diverge(*_: object) -> None:
        choose(iter([RateTrial(family="sgd", lr=0.1, accuracy=None)]))

    monkeypatch.setattr("tula_hpc.stages.study._choose_rates", diverge)
    with pytest.raises(StageError) as caught:
        study_stage(Sweep(spec, ClusterSpec(), run))
    failure = known(run.history().stage_failure())
    assert failure.detail == str(caught.value)


@pytest.mark.parametrize("command", ["sweep", "study"])
def test_a_sweep_with_a_study_runs_the_study_under_both_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    loaded(tmp_path, STUDY)
    chosen = {"sweep": sweep_command, "study": study_command}[command]
    assert chosen.main(["sweep.toml", "--dry-run"]) == 0
    assert "15 trainings" in capsys.readouterr().out


def test_a_study_has_no_plan_and_a_sweep_without_the_table_is_no_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    loaded(tmp_path, STUDY)
    assert sweep_main(["sweep.toml", "--until", "plan"]) == 2
    assert "a sweep with [study] has no stage 'plan'" in capsys.readouterr().err
    loaded(tmp_path, PLAIN)
    assert main(["sweep.toml"]) == 2
    assert "sweep.toml: expected a [study] table" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"sweep.toml"}
