from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tula_hpc.analysis.costs.interruptions import under_time_limit
from tula_hpc.analysis.costs.usage import actual_use
from tula_hpc.records import Event, TrainResult


def limited(work_s: float, limit_s: float, interval_s: float, restart_s: float) -> tuple[float, float]:
    time, requeues = under_time_limit(np.array([work_s]), limit_s, np.array([interval_s]), restart_s)
    return float(time[0]), float(requeues[0])


def test_what_fits_into_one_job_with_its_start_is_not_requeued() -> None:
    assert limited(3540, 3600, 300, 60) == (3600, 0)
    assert limited(3541, 3600, 300, 60)[1] == 1


def test_a_requeue_repeats_the_start_and_half_an_interval() -> None:
    assert limited(3541, 3600, 300, 60) == (60 + 3541 + 60 + 150, 1)
    assert limited(10_000, 3600, 300, 60) == (60 + 10_000 + 2 * 210, 2)


@given(st.floats(1, 1e6), st.floats(400, 1e5), st.floats(1, 300), st.floats(0, 120))
def test_all_jobs_together_hold_the_time_and_one_fewer_do_not(
    work_s: float, limit_s: float, interval_s: float, restart_s: float
) -> None:
    time, requeues = limited(work_s, limit_s, interval_s, restart_s)
    assert time <= (requeues + 1) * limit_s * (1 + 1e-9)
    if requeues:
        repeated = restart_s + interval_s / 2
        assert restart_s + work_s + (requeues - 1) * repeated > requeues * limit_s * (1 - 1e-9)


def test_a_limit_that_leaves_no_time_for_work_is_never_met() -> None:
    assert limited(3600, 60, 300, 60)[0] == np.inf
    assert limited(30, 90, 300, 60) == (90, 0)


def result(wall_time_s: float, nodes: int = 2) -> TrainResult:
    numbers = dict.fromkeys(("epochs", "steps", "samples_seen", "workers_per_node", "local_batch", "global_batch"), 1)
    shares = dict.fromkeys(("final_loss", "test_accuracy", "test_top5_accuracy", "train_time_s"), 0.0)
    shares |= {"starts_s": 0.0, "saving_s": 0.0}
    known = {"label": "main", "method": "ags", "nodes": nodes, "wall_time_s": wall_time_s, "restarts": 0}
    return TrainResult.model_validate(known | numbers | shares)


def event(name: str, time: float, **data: float) -> Event:
    return Event.model_validate({"event": name, "time": time, "stage": "train", "data": data})


def test_use_is_node_seconds_of_all_runs_without_the_queue_between_them() -> None:
    events = [event("submitted", 50), event("preempted", 200), event("requeued", 201), event("resumed", 500)]
    events.append(event("finished", 700))
    use = actual_use(events, result(wall_time_s=600))
    assert use == (2 * ((200 - 100) + (700 - 500)), 2, 0, 2)


def test_use_holds_the_starts_where_the_ends_tell_when_their_jobs_began() -> None:
    events = [event("preempted", 200, began_at=60), event("resumed", 500), event("finished", 700, began_at=490)]
    use = actual_use(events, result(wall_time_s=600))
    assert use == (2 * ((200 - 60) + (700 - 490)), 2, 0, 0)


def test_a_job_whose_end_the_command_notes_reports_its_beginning_when_it_resumes() -> None:
    events = [event("preempted", 200, began_at=60), event("resumed", 500, began_at=480), event("failed", 510)]
    events += [event("resumed", 900, began_at=890), event("finished", 1000, began_at=890)]
    assert actual_use(events, result(wall_time_s=900)) == (2 * (140 + 30 + 110), 3, 0, 0)


def test_a_job_that_failed_before_the_training_began_anew_is_not_taken_from_it() -> None:
    ended = event("finished", 700, began_at=490)
    assert actual_use([event("failed", 200), ended], result(wall_time_s=200)) == (2 * 210, 2, 1, 0)
    failed = event("failed", 200, began_at=60)
    assert actual_use([failed, ended], result(wall_time_s=200)) == (2 * (140 + 210), 2, 0, 0)


def test_a_run_that_was_killed_without_a_word_is_counted_as_unknown() -> None:
    events = [event("resumed", 300), event("finished", 400)]
    assert actual_use(events, result(wall_time_s=300)) == (2 * 100, 2, 1, 1)


def test_an_uninterrupted_training_used_its_wall_time() -> None:
    assert actual_use([event("finished", 1000)], result(wall_time_s=400)) == (800, 1, 0, 1)
