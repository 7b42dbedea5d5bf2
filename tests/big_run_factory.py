"""Run directories with very many measurements, logged steps or events, written in seconds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.run_factory import MEMORY_LIMIT, STARTED_AT, configurations, make_run, measurement, peak_bytes
from tula_hpc.records import Configuration, EpochMetrics, Event, Measurement, RunDirectory, StepMetrics, parse_record

# distinct lines, drawn at random; further lines repeat them
DRAWN = 200
SAMPLES = ("step", "data", "compute", "optimizer", "update", "allreduce", "forward")
# samples of each kind in a measurement
ROUNDS = 40


def add_measurements(run: RunDirectory, count: int, of: Sequence[Configuration] = ()) -> None:
    """Add `count` measurements with samples, cycling over the configurations `of`, or over all that fit in memory."""
    places = list(of) or [where for where in configurations() if peak_bytes(where.local_batch) <= MEMORY_LIMIT]
    lines = [
        _measurement(place, seed).model_dump_json() for seed in range(max(1, DRAWN // len(places))) for place in places
    ]
    _write(run.profile / "more.jsonl", itertools.islice(itertools.cycle(lines), count))


def _measurement(place: Configuration, seed: int) -> Measurement:
    drawn = random.Random(seed)
    samples = {name: [round(drawn.random(), 7) for _ in range(ROUNDS)] for name in SAMPLES}
    terms = [(drawn.random(), 50 * drawn.random()) for _ in range(4)]
    return measurement(place, seed, samples=samples, noise_samples=4 * place.global_batch, noise_terms=terms)


def add_steps(run: RunDirectory, count: int, epochs: int = 20) -> None:
    """Replace the metrics of the training by `count` steps and the lines of their epochs."""
    old = [line for line in _metrics(run) if b'"kind":"step"' in line]
    steps = [parse_record(StepMetrics, line) for line in old[:DRAWN]]
    ends = [parse_record(EpochMetrics, line) for line in _metrics(run) if b'"kind":"epoch"' in line]
    batch = run.read_plan().chosen.global_batch
    texts = [step.model_dump_json(exclude={"kind", "step", "samples_seen", "epoch"})[1:] for step in steps]
    per_epoch = max(1, count // epochs)

    def lines() -> Iterator[str]:
        for step, text in zip(range(1, count + 1), itertools.cycle(texts), strict=False):
            seen = step * batch
            yield f'{{"kind":"step","step":{step},"samples_seen":{seen},"epoch":{step / per_epoch:.9f},{text}'
            if step % per_epoch == 0:
                epoch = step // per_epoch
                changes = {"epoch": epoch, "step": step, "samples_seen": seen}
                yield ends[(epoch - 1) % len(ends)].model_copy(update=changes).model_dump_json()

    _write(run.train().metrics_file, lines())


def _metrics(run: RunDirectory) -> list[bytes]:
    return run.train().metrics_file.read_bytes().splitlines()


def add_events(run: RunDirectory, count: int) -> None:
    """Append `count` events of the training, preempted and resumed in turn."""
    events = (
        Event(
            time=STARTED_AT + place,
            event="resumed" if place % 2 else "preempted",
            stage="train",
            detail="TERM",
            job_id="21",
            data={"samples_seen": 100 * place},
        )
        for place in range(count)
    )
    _write(run.events_file, (event.model_dump_json() for event in events))


def _write(path: Path, lines: Iterable[str]) -> None:
    """Write the lines to a file; events are appended to those that the run already has."""
    with path.open("a" if path.name == "events.jsonl" else "w") as file:
        file.writelines(f"{line}\n" for line in lines)


def make_big_run(
    root: Path, *, measurements: int = 0, of: Sequence[Configuration] = (), steps: int = 0, events: int = 0
) -> RunDirectory:
    """Make a finished run with this many measurements, steps and events."""
    run = make_run(root)
    if measurements:
        add_measurements(run, measurements, of)
    if steps:
        add_steps(run, steps)
    if events:
        add_events(run, events)
    return run
