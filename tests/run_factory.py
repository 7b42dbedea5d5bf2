"""Make run directories as a sweep leaves them, from a known model of a cluster, for tests of their readers."""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from tula_hpc.analysis.run_contents import RunContents
from tula_hpc.config import SweepSpec, load_cluster, load_frozen_sweep
from tula_hpc.failure_kinds import Failure
from tula_hpc.records import (
    Candidate,
    Configuration,
    EpochMetrics,
    Knee,
    Measurement,
    MemoryUse,
    Plan,
    RunDirectory,
    StepMetrics,
    StepTimes,
    TrainResult,
    append_record,
    write_atomically,
)
from tula_hpc.stages.context import Sweep

MIB = 1024**2
DATASET_SAMPLES = 50_000
EPOCHS = 20
BATCHES = tuple(2**power for power in range(5, 12))
USD_PER_NODE_HOUR = 2.48
MEMORY_LIMIT = 4 * 1024**3
STARTED_AT = 1_750_000_000.0

SWEEP_TOML = """\
name = "cifar100-vgg11"

[workload]
model = "vgg11"
dataset = "cifar100"
data_dir = "/nowhere/cifar100"
epochs = 20

[search]
cluster_sizes = [1, 2, 4]
min_batch = 32
max_batch = 2048
mode = "full"

[training]
delta = 0.5
"""

CLUSTER_TOML = """\
name = "four-nodes"
executor = "slurm"
device = "cpu"
memory_gb = 4.0
partition = "cpu"

[pricing]
usd_per_node_hour = 2.48
"""


def compute_time_s(local_batch: int) -> float:
    """Return the time of forward and backward pass: affine in b."""
    return 0.004 + 0.0011 * local_batch


def allreduce_time_s(world: int) -> float:
    """Ring: 2(W − 1)/W · bytes / bandwidth + latency · (W − 1)."""
    return 0.0 if world == 1 else 2 * (world - 1) / world * 0.04 + 0.002 * (world - 1)


def step_time_s(configuration: Configuration) -> float:
    """The true step time of the synthetic cluster: a quarter of the synchronization is hidden."""
    b, world = configuration.local_batch, configuration.world_size
    return compute_time_s(b) + 0.75 * allreduce_time_s(world) + 0.003 + 0.00005 * b


def peak_bytes(local_batch: int) -> int:
    """The true peak memory of a worker: linear in b."""
    return int(520 * MIB + 5.4 * MIB * local_batch)


def configurations(cluster_sizes: Iterable[int] = (1, 2, 4), batches: Iterable[int] = BATCHES) -> list[Configuration]:
    """All (N, b) whose global batch is one of `batches`."""
    return [Configuration(n, 1, batch // n) for n in cluster_sizes for batch in batches]


def measurement(configuration: Configuration, seed: int = 0, **changes: object) -> Measurement:
    """A profile of the synthetic cluster with 3 % noise; `changes` overwrite any field."""
    noise = random.Random(f"{configuration} {seed}")
    step = step_time_s(configuration) * noise.lognormvariate(0, 0.03)
    b = configuration.local_batch
    times = StepTimes(
        step_time_s=step,
        step_time_low_s=step * 0.985,
        step_time_high_s=step * 1.02,
        data_time_s=0.003 + 0.00002 * b,
        compute_time_s=compute_time_s(b),
        optimizer_time_s=0.0025,
        allreduce_time_s=allreduce_time_s(configuration.world_size),
        forward_time_s=0.3 * compute_time_s(b),
    )
    fields: dict[str, object] = {
        "status": "ok",
        "nodes": configuration.nodes,
        "workers_per_node": configuration.workers_per_node,
        "local_batch": b,
        "times": times,
        "memory": memory_use(b, noise.lognormvariate(0, 0.02)),
        "steps": 40,
        "converged": True,
        "dataset_samples": DATASET_SAMPLES,
        "parameters": 9_270_000,
        "device": "AMD EPYC 7763",
        "backend": "gloo",
        "hosts": tuple(f"node{index}" for index in range(configuration.nodes)),
        "versions": {"torch": "2.11.0", "python": "3.11.2"},
        "job_id": f"17_{configuration.nodes}",
        "finished_at": STARTED_AT,
        "elapsed_s": 30.0 + 40 * step,
    }
    return Measurement.model_validate(fields | changes)


def memory_use(local_batch: int, noise: float = 1.0) -> MemoryUse:
    """Return the memory of a worker on CPU, whose process needs 300 MiB in addition to the training."""
    whole = int(peak_bytes(local_batch) * noise)
    return MemoryUse(
        peak_bytes=whole - 300 * MIB,
        reserved_bytes=whole,
        baseline_bytes=300 * MIB,
        parameter_bytes=37_080_000,
        gradient_bytes=37_080_000,
        optimizer_bytes=37_080_000,
    )


def oom(configuration: Configuration, detail: str = "killed by the memory limit of the node") -> Measurement:
    """A configuration that ran out of memory."""
    return Measurement(
        status="oom",
        nodes=configuration.nodes,
        workers_per_node=configuration.workers_per_node,
        local_batch=configuration.local_batch,
        failure=Failure.HOST_OOM,
        detail=detail,
        dataset_samples=DATASET_SAMPLES,
        elapsed_s=12.0,
    )


def candidate(configuration: Configuration, *, error: float = 0.02, measured: bool = True) -> Candidate:
    """Return the prediction of a model whose times are too long by the fraction `error`."""
    step = step_time_s(configuration) * (1 + error)
    epoch = DATASET_SAMPLES // configuration.global_batch * step
    train = EPOCHS * epoch
    cost = train / 3600 * configuration.nodes * USD_PER_NODE_HOUR
    peak = peak_bytes(configuration.local_batch)
    fits = peak <= MEMORY_LIMIT * 0.9
    return Candidate(
        nodes=configuration.nodes,
        workers_per_node=configuration.workers_per_node,
        local_batch=configuration.local_batch,
        global_batch=configuration.global_batch,
        step_time_s=step,
        model_step_time_s=step,
        epoch_time_s=epoch,
        train_time_s=train,
        wall_time_s=train,
        progress_time_s=train * (1 + configuration.global_batch / 4000),
        cost=cost,
        peak_memory_bytes=peak,
        interval_90={
            "train_time_s": (train * 0.93, train * 1.08),
            "wall_time_s": (train * 0.93, train * 1.08),
            "cost": (cost * 0.93, cost * 1.08),
        },
        feasible=fits,
        measured=measured,
        why="" if fits else "needs more memory than the limit leaves",
    )


def with_step_time(known: Candidate, step_s: float) -> Candidate:
    """Return the candidate with another step time; its training time and interval change in proportion."""
    factor = step_s / known.step_time_s
    low, high = known.interval_90["train_time_s"]
    update = {"step_time_s": step_s, "train_time_s": factor * known.train_time_s}
    return known.model_copy(update={**update, "interval_90": {"train_time_s": (factor * low, factor * high)}})


def plan(candidates: Sequence[Candidate], **changes: object) -> Plan:
    """Make a plan that chose the largest number of nodes and, there, the second largest batch that fits."""
    candidates = with_front(candidates)
    fitting = sorted((item for item in candidates if item.feasible), key=lambda item: (item.nodes, item.global_batch))
    fields: dict[str, object] = {
        "objective": "knee",
        "chosen": fitting[-2],
        "reason": "Beyond it, doubling the batch saves less than it costs.",
        "candidates": list(candidates),
        "fallbacks": fitting[-4:-2][::-1],
        "models": {
            "step_time": {
                "form": "ring",
                "parameters": {"compute_s_per_sample": 0.0011, "latency_s": 0.004},
                "pinned": ["latency_s"],
                "residual_median": 0.021,
            },
            "memory": {"parameters": {"fixed_bytes": 520 * MIB, "bytes_per_sample": 5.4 * MIB}},
        },
        "knee": Knee(global_batch=420.0, interval_90=(360.0, 500.0)),
        "warnings": [],
        "dataset_samples": DATASET_SAMPLES,
        "epochs": EPOCHS,
        "memory_limit_bytes": MEMORY_LIMIT,
    }
    return Plan.model_validate(fields | changes)


def with_front(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates with those on the Pareto front marked."""
    feasible = [item for item in candidates if item.feasible]
    return [
        item.model_copy(update={"pareto": item.feasible and not any(_beats(other, item) for other in feasible)})
        for item in candidates
    ]


def _beats(other: Candidate, item: Candidate) -> bool:
    return other != item and other.train_time_s <= item.train_time_s and other.cost <= item.cost


def make_run(root: Path, *, stage: str = "train", epochs_done: int = EPOCHS, seed: int = 0) -> RunDirectory:
    """Make a run directory that has reached `stage`: "profile", "plan" or "train" (with `epochs_done` epochs)."""
    run = RunDirectory(root).create()
    write_atomically(run.sweep_file, SWEEP_TOML)
    write_atomically(run.cluster_file, CLUSTER_TOML)
    run.log_event("submitted", "profile", detail="3 arrays", job_id="17")
    for configuration in configurations():
        fits = peak_bytes(configuration.local_batch) <= MEMORY_LIMIT
        record = measurement(configuration, seed) if fits else oom(configuration)
        append_record(run.profile / f"{record.nodes}-{record.local_batch}.jsonl", record)
    if stage in ("plan", "train"):
        write_plan(run, plan([candidate(configuration) for configuration in configurations()]))
    if stage == "train":
        write_training(run, epochs_done=epochs_done)
    return run


@contextlib.contextmanager
def pages_alone(*names: str) -> Iterator[None]:
    """Draw all figures, or those of these names, only as SVG: the files PNG and PDF, which take longest, stay empty."""
    from tula_hpc.analysis.figures import all as figures

    with pytest.MonkeyPatch.context() as patch:
        if names:
            patch.setattr(figures, "FIGURES", {name: figures.FIGURES[name] for name in names})
        patch.setattr("tula_hpc.analysis.figures.drawing.Drawing.png", lambda _: b"")
        patch.setattr("tula_hpc.analysis.figures.drawing.render_pdf", lambda *_: b"%PDF")
        yield


def opening_text(run: RunContents) -> str:
    """Return all sentences of the report's first page, in order."""
    from tula_hpc.analysis.report.first_page import first_page

    page = first_page(run)
    return " ".join([page.decision, *(text for section in page.sections for text in section.sentences)])


def write_plan(run: RunDirectory, made: Plan) -> None:
    """Write plan.json as the planner does."""
    write_atomically(run.plan_file, json.dumps(made.model_dump(mode="json", by_alias=True)))


def write_training(run: RunDirectory, *, epochs_done: int = EPOCHS, label: str = "main") -> None:
    """Write a training of the plan's choice, preempted in its seventh epoch; its result only if all epochs are done."""
    made = run.read_plan()
    chosen = made.chosen
    files = run.train(label)
    files.root.mkdir(parents=True, exist_ok=True)
    per_epoch = made.dataset_samples // chosen.global_batch
    noise = random.Random(1)
    lines: list[StepMetrics | EpochMetrics] = []
    for epoch in range(1, epochs_done + 1):
        lines += [
            _step_line(chosen, (epoch - 1) * per_epoch + step, per_epoch, noise) for step in range(0, per_epoch, 10)
        ]
        lines.append(_epoch_line(chosen, epoch, per_epoch, noise))
    write_atomically(files.metrics_file, "".join(f"{line.model_dump_json()}\n" for line in lines))
    _log_preemption(run, label, chosen, per_epoch)
    if epochs_done == made.epochs:
        last = next(line for line in reversed(lines) if isinstance(line, EpochMetrics))
        files.checkpoints.mkdir(exist_ok=True)
        (files.checkpoints / "checkpoint-r0000-000000000001.tula").touch()
        write_atomically(files.result_file, _result(label, made, last).model_dump_json())


def _step_line(chosen: Candidate, step: int, per_epoch: int, noise: random.Random) -> StepMetrics:
    epoch = step / per_epoch
    spread = min(epoch, 3) / 3
    return StepMetrics(
        step=step,
        samples_seen=step * chosen.global_batch,
        epoch=epoch,
        loss=4.6 * math.exp(-epoch / 8) * noise.lognormvariate(0, 0.05),
        lr=0.01,
        step_time_s=step_time_s(chosen.configuration) * noise.lognormvariate(0, 0.02),
        sensitivity=noise.lognormvariate(-1.4, 0.7),
        gradient_norm=2.0 * noise.lognormvariate(0, 0.2),
        scaled=min(1.0, 0.8 + 0.1 * noise.random()),
        scale_share=0.8,
        scale_mean=1 + 0.9 * spread * noise.lognormvariate(0, 0.06),
        scale_min=1 - 0.6 * spread,
        scale_max=1 + 3 * spread * noise.lognormvariate(0, 0.05),
    )


def _epoch_line(chosen: Candidate, epoch: int, per_epoch: int, noise: random.Random) -> EpochMetrics:
    accuracy = 0.68 * (1 - math.exp(-epoch / 6)) * noise.lognormvariate(0, 0.01)
    complete = epoch != 7
    covered = per_epoch if complete else per_epoch // 2
    return EpochMetrics(
        epoch=epoch,
        step=epoch * per_epoch,
        samples_seen=epoch * per_epoch * chosen.global_batch,
        global_batch=chosen.global_batch,
        train_loss=4.6 * math.exp(-epoch / 8),
        test_loss=1.3 + 3.2 * math.exp(-epoch / 6) * noise.lognormvariate(0, 0.03),
        test_accuracy=accuracy,
        test_top5_accuracy=min(1.0, accuracy * 1.25),
        epoch_time_s=covered * step_time_s(chosen.configuration) * noise.lognormvariate(0, 0.01),
        steps=covered,
        complete=complete,
    )


def _log_preemption(run: RunDirectory, label: str, chosen: Candidate, per_epoch: int) -> None:
    seen = int(6.4 * per_epoch) * chosen.global_batch
    run.log_event("submitted", "train", job_id="21", data={"label": label})
    run.log_event("preempted", "train", job_id="21", detail="TERM", data={"samples_seen": seen})
    run.log_event("resumed", "train", job_id="21", data={"samples_seen": seen})


def _result(label: str, made: Plan, last: EpochMetrics) -> TrainResult:
    chosen = made.chosen
    return TrainResult(
        label=label,
        nodes=chosen.nodes,
        workers_per_node=chosen.workers_per_node,
        local_batch=chosen.local_batch,
        global_batch=chosen.global_batch,
        method="ags",
        epochs=made.epochs,
        steps=last.step,
        samples_seen=last.samples_seen,
        final_loss=last.train_loss,
        test_accuracy=last.test_accuracy,
        test_top5_accuracy=last.test_top5_accuracy,
        train_time_s=made.epochs * last.epoch_time_s,
        wall_time_s=made.epochs * last.epoch_time_s + 180,
        starts_s=0.0,
        saving_s=0.0,
        restarts=1,
    )


# A training that runs out of memory in its third and last epoch; see tests/examples/hungry.py.
LATE_SWEEP = SweepSpec.model_validate(
    {
        "name": "late",
        "workload": {
            "model": "tests.examples.hungry:build_late",
            "dataset": "digits",
            "samples": 1024,
            "epochs": 3,
            "loader_workers": 0,
        },
        "training": {"log_interval_steps": 1, "method": "lbt"},
    }
)


def sweep_of(run: RunDirectory) -> Sweep:
    """Return the sweep of a run by the files in it."""
    return Sweep(load_frozen_sweep(run.sweep_file), load_cluster(run.cluster_file), run)


def script_spec(folder: Path, **workload: object) -> SweepSpec:
    """Return the sweep of a script, which is made in the folder."""
    (folder / "train.py").touch()
    script = {"script": str(folder / "train.py"), "arguments": ["{local_batch}"], "samples": 640, "epochs": 3}
    return SweepSpec.model_validate({"name": "x", "workload": script | workload})


def late_plan() -> Plan:
    """Make a plan of one worker with a batch of 512, which runs out of memory late, and 64 as the fallback."""
    small = [candidate(Configuration(1, 1, local_batch)) for local_batch in (16, 32, 64)]
    large = candidate(Configuration(1, 1, 512)).model_copy(update={"feasible": True})
    return plan([*small, large], chosen=large, fallbacks=[small[2]])
