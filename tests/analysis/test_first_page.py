"""First page of the report: sections without repetition, doubts by what to do, and only digits that are known."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.known import known
from tests.planning_data import cluster, ok, sweep, times
from tests.run_factory import make_run, opening_text, write_plan, write_training
from tula_hpc.analysis.plan import make_plan
from tula_hpc.analysis.planning.partitions import name_of
from tula_hpc.analysis.report.first_page import first_page
from tula_hpc.analysis.report.text import as_sentence, assumptions, doubts
from tula_hpc.analysis.run_contents import read_run
from tula_hpc.config import SweepSpec
from tula_hpc.formatting import duration_within, format_duration, format_money, money_within
from tula_hpc.records import Doubt, Plan, Remedy, grouped


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan in which a larger batch on one node is faster and cheaper, but beyond the knee."""
    spec = sweep("knee", cluster_sizes=[1, 2], min_batch=32, max_batch=4096)
    return make_plan(spec, cluster(), [ok(nodes, batch) for nodes in (1, 2) for batch in (32, 128, 512)])


def test_the_page_answers_each_question_once(plan: Plan, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", stage="plan")
    write_plan(run, plan)
    contents = read_run(run)
    page = first_page(contents)
    headings = [section.heading for section in page.sections]
    assert headings == ["What it will take", "How sure", "Why this one", "What would change it", "What to do next"]
    assert page.decision.startswith("Train on ")
    messages = [page.decision, *(text for section in page.sections for text in section.sentences)]
    messages += [*assumptions(contents), *(doubt.text for doubt in doubts(contents))]
    assert [text for text, times in Counter(messages).items() if times > 1] == []
    assert [text for text in messages if not re.match(r"[A-Z\d].*[.!?]$", text, re.DOTALL)] == []
    why = page.sections[headings.index("Why this one")].sentences
    if len(why) > 1:
        assert "would be" in why[1], "the faster and cheaper candidate is named with the reason"


def test_the_page_says_what_would_change_the_choice_or_that_nothing_would(plan: Plan, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", stage="plan")

    def would(**changes: object) -> list[str]:
        write_plan(run, plan.model_copy(update=changes))
        (message,) = (s.sentences for s in first_page(read_run(run)).sections if s.heading == "What would change it")
        return message

    next_best, fastest, cheapest = would(other_nodes=[])
    assert next_best == "The next best is N=1 b=256 (B=256): 20 % slower and 40 % cheaper."
    assert fastest.endswith(", compared above; tula plan RUN --objective time --write chooses it."), (
        "the command is named with the reason"
    )
    assert cheapest.endswith(" cheaper; tula plan RUN --objective cost --write chooses it.")
    worse = {"local_batch": 8, "wall_time_s": 2 * plan.chosen.wall_time_s, "cost": 2 * plan.chosen.cost}
    other = plan.chosen.model_copy(update=worse)
    assert would(other_nodes=[other.model_copy(update={"nodes": 9})])[-1].startswith(
        "The best on more nodes is N=9 b=8 "
    )
    nothing = would(candidates=[plan.chosen, other], runners_up=[], other_nodes=[])
    assert nothing == [
        'Neither objective.kind = "time" nor "cost" would: of all feasible candidates, it is '
        "the fastest and the cheapest."
    ]
    alone = would(candidates=[plan.chosen, other.model_copy(update={"feasible": False})], runners_up=[], other_nodes=[])
    assert alone == ["Nothing within the search: no other candidate is feasible."]


def test_names_in_front_of_a_sentence_keep_their_case() -> None:
    assert as_sentence("objective.budget rules it out") == "objective.budget rules it out."
    assert as_sentence("gpu: it waits", ["gpu"]) == "gpu: it waits."
    assert as_sentence("none. Or 2.5 times") == "None. Or 2.5 times."


def test_a_price_that_nobody_set_is_named_with_the_cost(plan: Plan, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", stage="plan")
    write_plan(run, plan)
    contents = read_run(run)
    message = "the default of pricing.usd_per_node_hour in the cluster file; set your price there."
    for price, is_said in ((1.0, True), (2.5, False)):
        priced = contents._replace(cluster=cluster(pricing={"usd_per_node_hour": price}))
        takes = first_page(priced).sections[0]
        assert takes.heading == "What it will take"
        assert any(text.endswith(message) for text in takes.sentences) == is_said


def test_the_page_says_why_not_half_the_batch_where_it_is_slower(plan: Plan, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", stage="plan")
    contents = read_run(run)
    half = next(c for c in plan.candidates if 2 * c.global_batch == plan.chosen.global_batch)
    for ratio, is_said in ((1.5, True), (0.9, False)):
        changes = {"wall_time_s": ratio * plan.chosen.wall_time_s, "cost": 2 * plan.chosen.cost}
        other = half.model_copy(update=changes)
        alone = {"candidates": [plan.chosen, other], "runners_up": [], "other_nodes": []}
        compared = plan.model_copy(update=alone)
        reasons = next(s for s in first_page(contents._replace(plan=compared)).sections if s.heading == "Why this one")
        message = f"Half the batch takes longer for the same epochs: {name_of(other)} is 50 % slower and "
        assert any(text.startswith(message) for text in reasons.sentences) == is_said
        next_best = compared.model_copy(update={"runners_up": [other]})
        sections = first_page(contents._replace(plan=next_best)).sections
        assert str(sections).count(f"{name_of(other)}: 50 % slower and ") == is_said
        assert message not in str(sections)


@pytest.mark.parametrize(
    ("method", "says", "warns"), [("ags", ", so gradients are scaled (training.method", False), ("lbt", None, True)]
)
def test_the_page_says_what_is_done_for_a_large_batch_or_that_nothing_is(
    method: str, says: str | None, warns: bool, tmp_path: Path
) -> None:
    spec = sweep("time")
    training = spec.training.model_copy(update={"method": method, "base_batch": 64})
    spec = spec.model_copy(update={"training": training})
    planned = make_plan(spec, cluster(), [ok(nodes, batch) for nodes in (1, 4) for batch in (32, 256)])
    run = make_run(tmp_path / "run", stage="plan")
    write_plan(run, planned)
    contents = read_run(run)._replace(sweep=spec)
    times = f"{planned.chosen.global_batch // 64} times training.base_batch"
    assert (f"The batch is {times}{says}" in opening_text(contents)) == (says is not None)
    doubts_of_it = [doubt for doubt in planned.doubts if doubt.text.startswith(f"the batch is {times} (64)")]
    assert [doubt.remedy for doubt in doubts_of_it] == [Remedy.CHANGE] * warns


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_page_does_not_say_that_a_scripts_single_worker_scales_gradients(nodes: int, tmp_path: Path) -> None:
    theirs = {"script": "/train.py", "arguments": ["{local_batch}"], "samples": 4096, "epochs": 2}
    tables = {"name": "x", "workload": theirs, "training": {"method": "ags", "base_batch": 1}}
    spec = SweepSpec.model_validate(tables, context={"check_paths": False})
    contents = read_run(make_run(tmp_path / "run", stage="plan"))._replace(sweep=spec)
    assert contents.plan is not None
    chosen = next(c for c in contents.plan.candidates if c.nodes == nodes)
    page = opening_text(contents._replace(plan=contents.plan.model_copy(update={"chosen": chosen})))
    assert ("so gradients are scaled" in page) == (nodes > 1)


def test_without_a_plan_profiles_that_failed_are_counted(tmp_path: Path) -> None:
    contents = read_run(make_run(tmp_path / "run", stage="profile"))
    good, *rest = contents.ok
    failed = [row.model_copy(update={"status": "failed", "times": None}) for row in rest[:2]]
    memory = [row.model_copy(update={"status": "oom", "times": None}) for row in rest[2:5]]
    for rows, words in (
        ([], "No configuration has been measured so far."),
        ([*failed, *memory], "No configuration has been measured, 3 ran out of memory, 2 failed."),
        ([good, *failed, failed[0]], "1 configuration has been measured, 2 failed."),
        ([good], "1 configuration has been measured so far."),
    ):
        decision = first_page(contents._replace(measurements=rows)).decision
        assert decision.startswith(f"There is no plan yet. {words}")


def test_a_training_that_costs_nothing_has_no_range_of_costs(plan: Plan, tmp_path: Path) -> None:
    contents = read_run(make_run(tmp_path / "run", stage="plan"))
    for usd, words in ((0.0, ""), (2.0, " and costs 1.0 to 3.0 USD")):
        ends = plan.chosen.interval_90 | {"cost": (usd / 2, 1.5 * usd)}
        chosen = plan.chosen.model_copy(update={"cost": usd, "interval_90": ends})
        page = first_page(contents._replace(plan=plan.model_copy(update={"chosen": chosen})))
        (sure,) = [section.sentences[0] for section in page.sections if section.heading == "How sure"]
        assert sure.startswith("With 90 % probability it takes ")
        assert sure.endswith(f"{words}.")
        assert ("costs" in sure) == bool(usd)


def test_the_page_says_where_the_time_of_the_whole_and_of_a_step_goes(plan: Plan, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", stage="plan")
    write_plan(run, plan)
    contents = read_run(run)
    measured = ok(plan.chosen.nodes, plan.chosen.local_batch)
    takes = " ".join(first_page(contents._replace(measurements=[measured])).sections[0].sentences)
    assert "Of the expected time: steps " in takes
    (shares,) = re.findall(r"A step of \S+ m?s is (.*?)\.(?: |$)", takes)
    assert sum(map(int, re.findall(r"(\d+) %", shares))) == pytest.approx(100, abs=2)
    assert "% computation" in shares
    theirs = {"script": "/train.py", "arguments": ["{local_batch}"], "samples": 4096, "epochs": 2}
    script = SweepSpec.model_validate({"name": "x", "workload": theirs}, context={"check_paths": False})
    nodes, _, batch = plan.chosen.configuration
    waits = ok(nodes, batch, times=times(nodes, batch, data_time_s=0.05))
    page = opening_text(contents._replace(measurements=[waits], sweep=script))
    assert "% waiting for data or other work of the script between its steps" in page
    elsewhere = [ok(plan.chosen.nodes, 2 * plan.chosen.local_batch)]
    assert "A step of" not in opening_text(contents._replace(measurements=elsewhere))


def test_the_step_whose_parts_are_named_is_the_plans(plan: Plan, tmp_path: Path) -> None:
    contents = read_run(make_run(tmp_path / "run", stage="plan"))
    nodes, _, batch = plan.chosen.configuration
    repeats = [ok(nodes, batch, times=times(nodes, batch, step_time_s=seconds)) for seconds in (0.8, 0.6, 2.4)]
    page = first_page(contents._replace(plan=plan, measurements=repeats))
    assert "A step of 800 ms is " in " ".join(page.sections[0].sentences)


def test_a_finished_training_has_nothing_left_to_do(tmp_path: Path) -> None:
    page = first_page(read_run(make_run(tmp_path / "run")))
    assert page.sections[-1] == ("What to do next", ["Nothing: the training is done."])


@pytest.mark.parametrize("stage", ["profile", "plan", "train"])
def test_a_command_at_work_is_waited_for_until_the_training_has_ended(tmp_path: Path, stage: str) -> None:
    contents = read_run(make_run(tmp_path / "run", stage=stage))
    (text,) = first_page(contents._replace(seen_at=1.0)).sections[-1].sentences
    assert text.startswith("Nothing: the training is done." if stage == "train" else "Wait: a command is at work; ")


def test_a_run_whose_last_command_failed_is_to_be_fixed_first(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", stage="plan")
    run.log_event("failed", "train", detail="bug in job 7\nTraceback")
    (text,) = first_page(read_run(run)).sections[-1].sentences
    assert text.startswith("Fix what ended the last command, then run: tula sweep RUN/sweep.toml")
    assert "Bug in job 7. If a job failed, tula status RUN names its log." in text
    # as `tula plan --write` does, with a deadline that a candidate can meet
    later = run.events()[-1].time + 1.0
    os.utime(run.plan_file, (later, later))
    (text,) = first_page(read_run(run)).sections[-1].sentences
    assert text.startswith("To train it, without measuring again: ")


def test_a_training_that_failed_is_not_waited_for(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", stage="plan")
    write_training(run, epochs_done=3)
    (text,) = first_page(read_run(run)).sections[-1].sentences
    assert text.startswith("Wait for the training; ")
    run.log_event("failed", "train", job_id="22", detail="hung in step 7", data={"label": "main"})
    (text,) = first_page(read_run(run)).sections[-1].sentences
    assert text.startswith("Fix what ended the training, then run: tula sweep RUN/sweep.toml")
    assert "Hung in step 7. tula status RUN names the log." in text


def test_a_training_is_shown_before_its_first_logged_step(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", stage="plan")
    run.log_event("submitted", "train", job_id="21", data={"label": "main"})
    assert first_page(read_run(run)).sections[-1].sentences[0].startswith("Wait for the training; ")
    for name in ("failed", "ended"):
        run.log_event(name, "train", job_id="21", detail="boom at start", data={"label": "main"})
    sections = dict(first_page(read_run(run)).sections)
    assert sections["What it took"] == ["The training failed before its first logged step."]
    (text,) = sections["What to do next"]
    assert text.startswith("Fix what ended the training, then run: tula sweep RUN/sweep.toml")
    assert "Boom at start." in text


def test_a_training_whose_plan_is_lost_has_its_score_on_the_first_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.plan_file.unlink()
    contents = read_run(run)
    assert "64.5 % test accuracy" in opening_text(contents)
    (training,) = contents.trainings
    # a script without workload.metric has no score
    unscored = training._replace(result=known(training.result).model_copy(update={"test_accuracy": None}))
    assert " the model has no score." in opening_text(contents._replace(trainings=[unscored]))
    assert first_page(contents).sections[-1].sentences[0].startswith("Make the plan again: ")


def test_every_warning_of_a_plan_says_what_to_do(plan: Plan) -> None:
    more = [Doubt("a", Remedy.KNOW), Doubt("b", Remedy.CHANGE), Doubt("c", Remedy.MEASURE)]
    larger = plan.with_doubts(more)
    assert len(larger.remedies) == len(larger.warnings) == len(plan.warnings) + 3
    assert Plan.model_validate_json(larger.model_dump_json(by_alias=True)).doubts == larger.doubts
    assert list(grouped(larger.doubts)) == [remedy.heading for remedy in Remedy]
    without = plan.model_copy(update={"warnings": ["a doubt"], "remedies": []})
    assert without.with_doubts(more[2:]).doubts == [more[2], Doubt("a doubt", Remedy.KNOW)]


SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


def in_seconds(text: str) -> float:
    pairs = re.findall(r"([\d,.]+) (ms|s|min|h|d)\b", text)
    return sum(float(number.replace(",", "")) * SECONDS[unit] for number, unit in pairs)


@given(st.floats(1.0, 1e7), st.floats(0.001, 0.9))
@example(109422.0, 0.00390625)
def test_durations_are_as_exact_as_their_interval_and_no_more(seconds: float, share: float) -> None:
    low, high = seconds * (1 - share), seconds * (1 + share)
    shown = duration_within(seconds, low, high)
    # above a day only whole hours are shown
    half_unit_s = 1800.0 if seconds > SECONDS["d"] / 2 else 0.011 * seconds
    assert abs(in_seconds(shown) - seconds) <= 0.51 * seconds * share + half_unit_s
    assert len(shown) <= len(format_duration(seconds)) + 2


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        (152.0, 138.0, 168.0, "2 min 30 s"), (9.1, 6.4, 12.9, "9.1 s"), (0.217, 0.2, 0.24, "220 ms"),
        (7_990.0, 7_000.0, 9_000.0, "2 h 15 min"), (22.0, 16.0, 32.3, "22 s"), (5.0, 5.0, 5.0, "5.0 s"),
        (1_988_101.0, 1_986_113.0, 1_990_089.0, "23 d"),
        # if rounded to its half width, an end would move by as much
        (0.328, 0.328, 0.544, "330 ms"),
        # two digits, as without an interval
        (4.12, 3.38, 5.76, "4.1 s"), (5.76, 3.38, 5.76, "5.8 s"), (0.0217, 0.005, 0.06, "22 ms"),
    ],
)  # fmt: skip
def test_durations_with_intervals(value: float, low: float, high: float, text: str) -> None:
    assert duration_within(value, low, high) == text


def in_order(first: float, second: float) -> int:
    return (first > second) - (first < second)


@given(st.floats(0.01, 1e7), st.floats(0.001, 3.0), st.floats(0.001, 0.9))
def test_no_end_is_rounded_across_the_value_next_to_it(value: float, neighbour: float, share: float) -> None:
    """It may seem equal to it if the finest digits do not distinguish the two."""
    low, high, taken = value * (1 - share), value * (1 + share), value * neighbour
    for end in (low, high):
        shown = in_seconds(duration_within(end, low, high, taken))
        assert in_order(shown, in_seconds(format_duration(taken))) in (0, in_order(end, taken))
        paid = float(money_within(end, low, high, reference=taken).removesuffix(" USD").replace(",", ""))
        taken_paid = float(format_money(taken).removesuffix(" USD").replace(",", ""))
        assert in_order(paid, taken_paid) in (0, in_order(end, taken))


@pytest.mark.parametrize(
    ("neighbour", "text"), [(None, "1 min 10 s"), (60.0, "1 min 10 s"), (71.0, "1 min 12 s"), (72.2, "1 min 12 s")]
)
def test_digits_are_added_where_the_verdict_would_look_wrong(neighbour: float | None, text: str) -> None:
    assert duration_within(72.4, 40.2, 72.4, neighbour) == text


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        (2.48, 2.1, 2.9, "2.5 USD"), (0.0171, 0.0152, 0.0189, "0.0171 USD"), (1234.0, 900.0, 1600.0, "1,200 USD"),
        (0.0076, 0.005, 0.012, "0.0076 USD"), (0.012, 0.005, 0.012, "0.012 USD"), (2480.0, 900.0, 9000.0, "2,500 USD"),
    ],
)  # fmt: skip
def test_amounts_with_intervals(value: float, low: float, high: float, text: str) -> None:
    assert money_within(value, low, high) == text
