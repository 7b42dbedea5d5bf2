"""The predicted time and cost of a training, compared with the actual ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.known import known
from tests.run_factory import DATASET_SAMPLES, EPOCHS, candidate, plan
from tula_hpc.analysis.costs.evaluation import END_SHARE
from tula_hpc.analysis.costs.spread import TimePart
from tula_hpc.analysis.costs.training_bill import Compared, PromiseVerdict, Source, TrainingBill, training_bill
from tula_hpc.analysis.report.bill_text import bill_sentences, bill_table, steps_off
from tula_hpc.analysis.run_contents import Training
from tula_hpc.records import Candidate, Configuration, EpochMetrics, Event, JobAccount, Metrics, TrainResult

WHERE = Configuration(2, 1, 64)
PARTS_S = {"steps": 100.0, "evaluation": 20.0, "checkpoints": 2.0, "starts": 8.0, "ends": 1.5, "repeated": 0.0}
# the actual training
TIMED: dict[str, Any] = {"starts_s": 9.0, "evaluation_s": 21.0, "saving_s": 1.0, "train_time_s": 105.0}


def promised(**changes: Any) -> Candidate:
    """Return a candidate whose whole and whose parts may each be 10 % off; the whole costs 2 USD."""
    whole_s = sum(PARTS_S.values())
    fields: dict[str, Any] = {
        "wall_parts_s": PARTS_S,
        "wall_time_s": whole_s,
        "cost": 2.0,
        "part_intervals_90": {part: (0.9 * s, 1.1 * s) for part, s in PARTS_S.items()},
        "interval_90": {"wall_time_s": (0.9 * whole_s, 1.1 * whole_s), "cost": (1.8, 2.2)},
    }
    return candidate(WHERE).model_copy(update=fields | changes)


def result(**changes: Any) -> TrainResult:
    counts = {"steps": 8000, "samples_seen": EPOCHS * DATASET_SAMPLES, "epochs": EPOCHS, "restarts": 0}
    where = WHERE._asdict() | {"global_batch": WHERE.global_batch, "label": "main", "method": "ags"}
    scores = dict.fromkeys(("final_loss", "test_accuracy", "test_top5_accuracy"), 0.5)
    return TrainResult.model_validate(counts | where | scores | {"wall_time_s": 127.0} | TIMED | changes)


def accounted(*elapsed_s: float) -> list[JobAccount]:
    fields = {"job_id": "7", "stage": "train", "state": "COMPLETED", "over": True, "nodes": 2}
    return [JobAccount.model_validate({**fields, "elapsed_s": s}) for s in elapsed_s]


def billed(*elapsed_s: float, plan: dict[str, Any] | None = None, events: list[Event] | None = None) -> TrainingBill:
    return known(training_bill(promised(**(plan or {})), result(), events or [], accounted(*elapsed_s)))


def event(name: str, time: float) -> Event:
    return Event.model_validate({"event": name, "time": time, "stage": "train"})


@given(st.floats(0.0, 10.0), st.floats(0.0, 5.0), st.floats(0.0, 5.0))
def test_the_verdict_says_on_which_side_of_its_interval_a_value_lies(actual: float, low: float, width: float) -> None:
    found = Compared(1.0, (low, low + width), actual).verdict
    assert (found is PromiseVerdict.WITHIN) == (low <= actual <= low + width)
    assert (found is PromiseVerdict.MORE) == (actual > low + width)
    assert Compared(1.0, None, actual).verdict is Compared(1.0, (low, low), None).verdict is PromiseVerdict.UNKNOWN


def test_accounting_gives_the_whole_and_the_price_is_the_plans() -> None:
    bill = billed(140.0)
    assert (bill.source, bill.starts) == (Source.ACCOUNTING, 1)
    assert bill.whole.actual == 140.0
    assert bill.cost.actual == pytest.approx(2.0 * 140.0 / sum(PARTS_S.values()))
    assert bill.whole.verdict is PromiseVerdict.WITHIN
    assert billed(150.0).whole.verdict is billed(150.0).cost.verdict is PromiseVerdict.MORE
    assert billed(110.0).whole.verdict is billed(110.0).cost.verdict is PromiseVerdict.LESS
    # Slurm may have accounted for only a part of a failed node's job
    assert billed(40.0).source is Source.NOTES


def test_the_parts_add_up_to_the_whole() -> None:
    bill = billed(140.0)
    assert sum(row.actual or 0.0 for row in bill.parts.values()) == pytest.approx(140.0)
    assert bill.parts[TimePart.ENDS].actual == pytest.approx(140.0 - 136.0)
    assert TimePart.REPEATED not in bill.parts, "repeated work was neither expected nor seen"


def test_after_interruptions_what_nobody_timed_was_repeated() -> None:
    bill = known(training_bill(promised(), result(restarts=1), [], accounted(60.0, 140.0)))
    assert (bill.whole.actual, bill.starts) == (200.0, 2)
    assert bill.parts[TimePart.ENDS].actual is None
    assert bill.parts[TimePart.REPEATED].actual == pytest.approx(200.0 - 136.0 - 9.0 * END_SHARE)
    assert bill.parts_off()[0] is TimePart.REPEATED
    late = known(training_bill(promised(), result(restarts=1, starts_s=60.0), [], accounted(60.0, 140.0)))
    assert "start-up 1 min in 2 starts (predicted " in " ".join(bill_sentences(late))
    assert ("start-up", "1 min\nin 2 starts") in [(row[0], row[2]) for row in bill_table(late).rows]


def test_a_job_that_failed_before_is_no_end_of_the_one_that_finished() -> None:
    first, second = accounted(60.0, 140.0)
    jobs = [first.model_copy(update={"job_id": "6"}), second]
    bill = known(training_bill(promised(), result(), [], jobs))
    assert bill.parts[TimePart.FAILED].actual == 60.0
    assert bill.parts[TimePart.ENDS].actual == pytest.approx(140.0 - 136.0)
    assert "jobs that failed before 1 min (none predicted)" in " ".join(bill_sentences(bill))
    assert bill.starts == 1, "a failed job's start belongs to the time that failed"


@pytest.mark.parametrize(("samples", "failed_s"), [(0, 60.0), (640, None)])
def test_the_jobs_before_one_that_begins_anew_have_failed(samples: int, failed_s: float | None) -> None:
    first, second = accounted(60.0, 140.0)
    jobs = [first.model_copy(update={"job_id": "6"}), second]
    resumed = event("resumed", 70.0).model_copy(update={"job_id": "7", "data": {"samples_seen": samples}})
    bill = known(training_bill(promised(), result(restarts=1), [resumed], jobs))
    assert (TimePart.FAILED in bill.parts, TimePart.REPEATED in bill.parts) == (samples == 0, samples > 0)
    if failed_s is not None:
        assert bill.parts[TimePart.FAILED].actual == failed_s
        assert bill.parts[TimePart.ENDS].actual == pytest.approx(140.0 - 136.0)


def test_a_first_job_without_a_checkpoint_has_failed_though_a_later_one_was_interrupted() -> None:
    lost, first, second = accounted(60.0, 100.0, 140.0)
    jobs = [lost.model_copy(update={"job_id": "5"}), first.model_copy(update={"job_id": "6"}), second]
    events = [
        event("checkpoint", 70.0).model_copy(update={"job_id": "6"}),
        event("resumed", 90.0).model_copy(update={"job_id": "7", "data": {"samples_seen": 64}}),
    ]
    bill = known(training_bill(promised(), result(restarts=1), events, jobs))
    assert bill.parts[TimePart.FAILED].actual == 60.0
    assert bill.parts[TimePart.REPEATED].actual == pytest.approx(240.0 - 136.0 - 9.0 * END_SHARE)


def test_the_first_run_of_a_requeued_job_that_begins_anew_has_failed() -> None:
    resumed = event("resumed", 70.0).model_copy(update={"job_id": "7", "data": {"samples_seen": 0}})
    bill = known(training_bill(promised(), result(restarts=1), [resumed], accounted(60.0, 140.0)))
    assert bill.parts[TimePart.FAILED].actual == 60.0
    assert bill.parts[TimePart.ENDS].actual == pytest.approx(140.0 - 136.0)
    # accounting that lacks a run is not used at all
    short = known(training_bill(promised(), result(restarts=1), [resumed], accounted(10.0, 40.0)))
    assert TimePart.FAILED not in short.parts


def test_a_run_that_left_no_event_makes_none_of_the_others_a_failed_one() -> None:
    without_job = [
        event("checkpoint", 70.0),
        event("resumed", 150.0).model_copy(update={"data": {"samples_seen": 640}}),
    ]
    events = [each.model_copy(update={"job_id": "7"}) for each in without_job]
    bill = known(training_bill(promised(), result(restarts=1), events, accounted(100.0, 8.0, 60.0)))
    assert TimePart.FAILED not in bill.parts, "the run that saved may be the first or the second"
    assert bill.parts[TimePart.REPEATED].actual == pytest.approx(168.0 - 136.0 - 9.0 * END_SHARE)


def test_without_accounting_the_notes_count() -> None:
    events = [event("preempted", 60.0), event("resumed", 200.0), event("finished", 327.0)]
    bill = known(training_bill(promised(), result(wall_time_s=317.0, restarts=1), events))
    assert (bill.source, bill.starts) == (Source.NOTES, 2)
    # the runs from 10 to 60 and from 200 to 327, with their starts and ends
    assert bill.whole.actual == pytest.approx(50.0 + 127.0 + 9.0 * (1 + END_SHARE))
    assert bill.parts[TimePart.ENDS].actual is None
    sooner = training_bill(
        promised(), result(wall_time_s=317.0, restarts=1), [event("ended", 61.0), *events, event("ended", 327.5)]
    )
    assert sooner is not None
    assert sooner.whole.actual == pytest.approx(50.0 + 127.0 + 9.0 + 0.5)
    assert "by the run's own records" in " ".join(bill_sentences(bill))


def test_notes_that_were_lost_leave_the_results_own_time() -> None:
    bill = known(training_bill(promised(), result(), []))
    assert bill.whole.actual == pytest.approx(127.0 + 9.0 * (1 + END_SHARE))


@pytest.mark.parametrize("whole_s", [0.0, 1e12])
def test_a_plan_without_a_whole_promises_none(whole_s: float | None) -> None:
    assert training_bill(promised(wall_time_s=whole_s), result(), [], accounted(1.0)) is None


def test_parts_that_were_off_are_named_once_they_matter() -> None:
    message = " ".join(bill_sentences(billed(150.0)))
    assert "longer than the 90 % interval of the predicted 2 min 10 s (" in message
    assert "by Slurm's accounting" in message
    assert "2.0 USD was predicted (1.8 USD to 2.2 USD)." in message
    assert "Outside their intervals: end of the job 14.0 s (predicted 1.50 s)." in message, (
        "a difference of a second is not worth a line"
    )
    assert billed(150.0).parts_off() == [TimePart.ENDS]
    assert billed(150.0).parts[TimePart.STARTS].verdict is PromiseVerdict.MORE


def test_where_no_part_is_off_by_itself_the_one_that_moved_the_whole_is_named() -> None:
    sure = {"interval_90": {"wall_time_s": (131.0, 132.0), "cost": (1.8, 2.2)}}
    slow = result(**TIMED | {"train_time_s": 109.0})
    bill = known(training_bill(promised(**sure), slow, [], accounted(109.0 + 31.0 + 1.5)))
    message = " ".join(bill_sentences(bill))
    assert "Most of the difference: steps 1 min 49 s (predicted 1 min 40 s)." in message
    assert "Most of the difference" not in " ".join(bill_sentences(billed(133.0)))


def test_a_plan_without_parts_has_promised_the_steps() -> None:
    old = promised(wall_parts_s={}, part_intervals_90={}, train_time_s=100.0)
    steps = known(training_bill(old, result(), [], accounted(140.0))).parts[TimePart.STEPS]
    assert (steps.expected, steps.actual) == (100.0, 105.0)


def test_the_table_has_every_part_and_its_verdict() -> None:
    table = bill_table(billed(150.0))
    names, _, actual, verdicts = zip(*table.rows, strict=True)
    assert names[0] == "whole training"
    assert (names[1], names[-1]) == ("start-up", "cost")
    assert verdicts[0] == "more than predicted"
    assert actual[0] == "2 min 30 s"
    assert all(len(row) == len(table.columns) for row in table.rows)


@pytest.mark.parametrize(
    ("epoch_s", "drifts", "expected"),
    [
        (11.0, ["drifted"], ""),
        (
            20.0,
            [],
            "2 times as long as predicted, outside of the 90 % interval: the median epoch took 20.0 s, "
            "not 9.0 s to 12 s.",
        ),
        (12.04, ["drifted", "recovered"], "; its drift events point to waiting for data."),
        (
            8.0,
            [],
            "20 % shorter than predicted, outside of the 90 % interval: the median epoch took 8.0 s, "
            "not 9.0 s to 12 s.",
        ),
    ],
)
def test_steps_off_the_plan_are_reported_with_their_likely_cause(
    epoch_s: float, drifts: list[str], expected: str
) -> None:
    chosen = promised(epoch_time_s=10.0, interval_90={"epoch_time_s": (9.0, 12.0)})
    line = dict.fromkeys(EpochMetrics.model_fields, 1) | {"kind": "epoch", "epoch_time_s": epoch_s}
    line |= {"global_batch": WHERE.global_batch}
    metrics = Metrics([], [EpochMetrics.model_validate(line)], 0)
    training = Training("main", metrics, result(train_time_s=10 * epoch_s, steps=1000, global_batch=1000))
    data = {"label": "main", "ratio": 2.0, "part": "loader"}
    events = [event(name, at).model_copy(update={"data": data}) for at, name in enumerate(drifts)]
    found = " ".join(steps_off(plan([chosen, chosen]), events, training))
    assert found.endswith(expected)
    assert found.startswith("The steps of the training were ") == bool(expected)
    if not drifts and epoch_s > 12.0:
        short = training._replace(result=result(train_time_s=10 * epoch_s, steps=20, global_batch=50_000))
        (words,) = steps_off(plan([chosen, chosen]), events, short)
        assert words.endswith("s; with only 20 steps in all, the slow first ones weigh heavily.")
        # the median of three epochs differs from the first one
        rows = [metrics.epochs[0].model_copy(update={"epoch": epoch}) for epoch in (1, 2, 3)]
        (words,) = steps_off(plan([chosen, chosen]), events, short._replace(metrics=Metrics([], rows, 0)))
        assert "first" not in words
    planned = EPOCHS * DATASET_SAMPLES
    twice = training._replace(result=result(samples_seen=2 * planned))
    (words,) = steps_off(plan([chosen, chosen]), events, twice)
    assert words.startswith(f"The training went through {2 * planned:,} samples, but was planned for {planned:,}, ")
    assert words.endswith("epochs of workload.samples: correct that key, and measure again with another --run-dir.")
    restarted = training._replace(result=result(samples_seen=2 * planned, restarts=1))
    (words,) = steps_off(plan([chosen, chosen]), events, restarted)
    assert f": about {EPOCHS} epochs more, trained twice after a restart, for example because the script's" in words
    larger = training._replace(result=result(steps=planned // (2 * WHERE.global_batch)))
    (words,) = steps_off(plan([chosen, chosen]), events, larger)
    assert words.startswith(
        f"The training took steps of {2 * WHERE.global_batch:,} samples on average, but was planned"
    )
    folds = training._replace(result=result(further_steps=9999))
    (words,) = steps_off(plan([chosen, chosen]), events, folds)
    assert words.startswith("The training was followed by 9,999 steps of other optimizers, as in further folds ")
    hardly_felt = training._replace(result=result(train_time_s=103.0))
    assert not list(steps_off(plan([chosen, chosen]), events, hardly_felt))


def test_a_time_just_outside_of_its_interval_does_not_read_like_its_end() -> None:
    chosen = promised(epoch_time_s=0.93, interval_90={"epoch_time_s": (0.839, 1.02)})
    line = dict.fromkeys(EpochMetrics.model_fields, 1) | {"kind": "epoch", "epoch_time_s": 1.04}
    metrics = Metrics([], [EpochMetrics.model_validate(line | {"global_batch": WHERE.global_batch})], 0)
    training = Training("main", metrics, result(train_time_s=1000.0, steps=1000, global_batch=1000))
    (words,) = steps_off(plan([chosen, chosen]), [], training)
    assert words.endswith("the median epoch took 1.04 s, not 840 ms to 1.02 s.")


@given(st.lists(st.floats(0.0, 1e6), max_size=3), st.floats(0.0, 1e6), st.integers(0, 3))
def test_any_measured_training_has_its_sentences(elapsed_s: list[float], starts_s: float, restarts: int) -> None:
    outcome = result(starts_s=starts_s, restarts=restarts)
    bill = known(training_bill(promised(), outcome, [event("finished", 5.0)], accounted(*elapsed_s)))
    assert all(row.actual is None or row.actual >= 0.0 for row in bill.parts.values())
    assert bill_table(bill).rows
    assert all(sentence.endswith(".") for sentence in bill_sentences(bill))
