"""Trainings of scripts in real local jobs of two workers: scores, stops, requeues, failures."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.forked_jobs import children_of, forking_jobs
from tests.known import known
from tests.run_factory import candidate, measurement, plan, write_plan
from tula_hpc.analysis.costs.usage import actual_use
from tula_hpc.attach.processes import ProcessEnd
from tula_hpc.attach.reporting import ProcessMessage
from tula_hpc.attach.train.resume_point import Start, _look_for_saved
from tula_hpc.attach.train.script_job import ScriptJob
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.ddp.stop_signals import StopRequest
from tula_hpc.env import WorkerEnvironment
from tula_hpc.failure_kinds import Failure
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.launch.launcher import Ended, Launcher
from tula_hpc.records import Configuration, RunDirectory, StepMetrics, TrainResult, append_record, read_metrics
from tula_hpc.records.events import JobFailure, StopReason
from tula_hpc.stages.context import Sweep
from tula_hpc.stages.train import train_stage

TRAINING = {"log_interval_steps": 1, "checkpoint_minutes": 1e-6}
SCRIPTS = Path(__file__).parent / "scripts"
CLUSTER = ClusterSpec(workers_per_node=2)
# a minute, and Slurm signals half a minute before its end or earlier
LIMIT = {"train_minutes": 1, "signal_delay_s": 30}
OWN: dict[str, Any] = {
    "script": SCRIPTS / "own_checkpoints.py",
    "arguments": ["--batch-size", "{local_batch}", "--epochs", "{epochs}"],
    "samples": 64,
    "epochs": 3,
    "metric": r"Acc@1 (?P<test_accuracy>[\d.]+) loss (?P<test_loss>[\d.]+)",
}
# enough for the workers to agree on a stop, even on a busy machine
LONG = {"epochs": 14}
KEPT: dict[str, Any] = {
    "script": SCRIPTS / "three_lines.py",
    "arguments": ["--batch-size", "{local_batch}", "--epochs", "{epochs}", "--log", "{run_dir}/log", "--pause", "0.1"],
    "samples": 128,
    "epochs": 2,
}


@pytest.fixture(autouse=True)
def forked() -> Iterator[None]:
    """Fork the jobs: starting them for real is tested in `tests/local/test_sweep.py`, for scripts in `tests/slurm`."""
    with forking_jobs():
        yield


def train(
    root: Path, workload: dict[str, Any], strike: Callable[[RunDirectory, int], None] | None = None, **training: Any
) -> tuple[RunDirectory, Ended]:
    """Train in a job; return the run and the job's end. `strike` gets the run and the process id of the job's shell."""
    spec = SweepSpec.model_validate({"name": "x", "workload": workload, "training": TRAINING | training})
    run = RunDirectory(root)
    run = run if root.exists() else run.create()
    run.make_train()
    launcher = Launcher(CLUSTER, run, "tula-script")
    jobs = launcher.submit([TrainJob(spec, CLUSTER, Configuration(1, 2, 8), root)], stage="train", nodes=1, minutes=5)
    if strike is not None:
        strike(run, int(jobs[0].job_id))
    (ended,) = launcher.wait(jobs)
    return run, ended


def at_step(
    step: int, number: int, *, of_script: bool = False, worker: int = -1
) -> Callable[[RunDirectory, int], None]:
    """Return a `strike` that signals a worker, or its script's process, once training has reached the step."""

    def strike(run: RunDirectory, shell: int) -> None:
        deadline = time.monotonic() + 120
        while not (steps := read_metrics(run.train().metrics_file).steps) or steps[-1].step < step:
            assert time.monotonic() < deadline, "training did not get that far"
            time.sleep(0.02)
        workers = [worker for each in children_of(shell) for worker in children_of(each)]
        os.kill(children_of(workers[worker])[0] if of_script else workers[worker], number)

    return strike


def begun(folder: Path) -> tuple[RunDirectory, Path]:
    """Return a run whose training has begun, and the folder of its script."""
    run = RunDirectory(folder / "run").create()
    work = run.make_train().root / "script" / "work"
    work.mkdir(parents=True)
    run.train().metrics_file.touch()
    return run, work


def result_of(run: RunDirectory, ended: Ended) -> TrainResult:
    assert run.train().result_file.exists(), ended.log_tail
    return TrainResult.model_validate_json(run.train().result_file.read_text())


def details(run: RunDirectory, name: str) -> list[str]:
    return [event.detail for event in run.events() if event.event == name]


def test_a_script_trains_and_its_output_has_the_scores(tmp_path: Path) -> None:
    began = time.time()
    run, ended = train(tmp_path / "run", OWN)
    result = result_of(run, ended)
    assert (result.epochs, result.steps, result.samples_seen) == (3, 12, 192)
    assert (result.test_accuracy, result.test_loss, result.final_loss) == (0.7, 0.3333, None)
    # time before the first step, which belongs to no other time
    assert result.starts_s is not None
    assert result.starts_s > 0.0
    assert result.starts_s + result.wall_time_s < time.time() - began
    metrics = read_metrics(run.train().metrics_file)
    assert [row.epoch for row in metrics.steps] == pytest.approx([n / 4 for n in range(1, 13)])
    assert [row.test_accuracy for row in metrics.epochs] == [0.5, 0.6, 0.7]
    assert [row.steps for row in metrics.epochs] == [4, 4, 4]
    # waits for data are not part of an epoch's first step
    assert all(row.epoch_time_s >= 3 * 0.1 for row in metrics.epochs)
    assert 0.6 * result.train_time_s < sum(row.step_time_s for row in metrics.steps) < 1.1 * result.train_time_s


def test_a_script_that_took_its_given_number_of_steps_has_trained_all_epochs(tmp_path: Path) -> None:
    """Its pass ends with a shorter batch, so that as many full batches would have seen more samples."""
    script = tmp_path / "steps.py"
    script.write_text("""
import sys, torch
torch.distributed.init_process_group("gloo")
data = torch.utils.data.TensorDataset(torch.randn(40, 2))
sampler = torch.utils.data.DistributedSampler(data)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
left = int(sys.argv[2])
while left:
    for inputs, in torch.utils.data.DataLoader(data, int(sys.argv[1]), sampler=sampler):
        if left:
            model(inputs).sum().backward()
            optimizer.step()
            left -= 1
""")
    workload = {"script": script, "arguments": ["{local_batch}", "{steps}"], "samples": 40, "epochs": 8}
    run, ended = train(tmp_path / "run", workload)
    result = result_of(run, ended)
    assert (result.epochs, result.steps) == (8, 8 * 40 // 16)


def test_nodes_of_a_graph_are_not_counted_as_samples(tmp_path: Path) -> None:
    script = tmp_path / "draws.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "batch, epochs = map(int, sys.argv[1:])\n"
        "dist.init_process_group('gloo')\n"
        "model = DistributedDataParallel(torch.nn.Linear(4, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for step in range(epochs * 4):\n"
        "    model(torch.randn(100 + step, 4))[:batch].square().mean().backward()\n"
        "    optimizer.step()\n"
    )
    work = OWN | {"script": script, "arguments": ["{local_batch}", "{epochs}"]}
    run, ended = train(tmp_path / "run", work)
    result = result_of(run, ended)
    assert (result.epochs, result.steps, result.samples_seen) == (3, 12, 192)


def test_memory_that_a_step_frees_is_kept_for_the_next_as_in_its_profile(tmp_path: Path) -> None:
    workload = {**OWN, "script": SCRIPTS / "page_faults.py", "epochs": 1, "metric": r"faults (?P<test_loss>[\d.]+)"}
    run, ended = train(tmp_path / "run", {**workload, "samples": 256})
    faults = known(result_of(run, ended).test_loss)
    # hundreds if the C library returns the pages of activations and gradients
    assert faults < 100


@pytest.mark.parametrize(
    ("option", "resuming", "expected"),
    [
        ("--handler", ["--resume=checkpoints/*.pt"], "--resume=checkpoints/last.pt"),
        ("--auto-resume", [], "the same arguments"),
    ],
)
def test_a_stopped_script_resumes_from_its_own_checkpoint(
    tmp_path: Path, option: str, resuming: list[str], expected: str
) -> None:
    began = time.time()
    workload = {**OWN, "arguments": [*OWN["arguments"], option], "resume_arguments": resuming}
    run, ended = train(tmp_path / "run", workload | LONG, at_step(6, signal.SIGUSR2))
    result = result_of(run, ended)
    assert (result.epochs, result.steps, result.restarts, result.test_accuracy) == (14, 56, 1, 1.8)
    # the first epoch's steps and the first job's start are counted as useful
    assert result.train_time_s == pytest.approx(
        sum(row.epoch_time_s for row in read_metrics(run.train().metrics_file).epochs)
    )
    assert result.train_time_s > 3 * 0.1 + 13 * 3 * 0.02
    # it contains the starts of both jobs, once each
    use = actual_use(run.events(), result)
    assert use.without_start == 0
    assert result.starts_s is not None
    assert result.train_time_s + result.starts_s < use.node_seconds < time.time() - began
    assert all("; the script ended at step " in detail for detail in details(run, "preempted"))
    assert details(run, "resumed") == [f"goes on by itself, with {expected}"]
    output = "".join(path.read_text() for path in (run.train().root / "script").glob("*.log"))
    assert output.count("resumed at epoch") == 2
    # the other worker may have lost its peer before
    assert ("handled" in output) == (option == "--handler")


def test_options_to_go_on_come_before_a_rest_that_its_parser_takes_as_it_is(tmp_path: Path) -> None:
    """Detectron2 takes pairs of a key and a value as the rest."""
    script = tmp_path / "train_net.py"
    own = 'parser.add_argument("opts", nargs=argparse.REMAINDER)\n    return parser'
    script.write_text((SCRIPTS / "own_checkpoints.py").read_text().replace("return parser", own))
    arguments = [*OWN["arguments"], "SOLVER.LR", "0.1"]
    workload = {**OWN, **LONG, "script": script, "arguments": arguments, "resume_arguments": ["--auto-resume"]}
    run, ended = train(tmp_path / "run", workload, at_step(6, signal.SIGUSR2))
    assert result_of(run, ended).steps == 56
    output = "".join(path.read_text() for path in (run.train().root / "script").glob("*.log"))
    assert output.count("resumed at epoch") == 2


def test_an_epoch_that_is_repeated_counts_once(tmp_path: Path) -> None:
    going_on = {"arguments": [*OWN["arguments"], "--repeats"], "resume_arguments": ["--resume=checkpoints/*.pt"]}
    workload = {**OWN, **LONG, **going_on}
    run, ended = train(tmp_path / "run", workload, at_step(6, signal.SIGUSR2))
    result = result_of(run, ended)
    assert (result.epochs, result.steps, result.samples_seen) == (14, 56, 896)


@pytest.mark.parametrize("how", [[], ["--epoch-anew"]])
def test_a_script_that_saves_within_an_epoch_continues_there_or_repeats_that_epoch(
    tmp_path: Path, how: list[str]
) -> None:
    """It saves after 3, 6 and 9 steps, and epochs have 4; no step counts twice."""
    arguments = [*OWN["arguments"], "--save-steps", "3", *how]
    workload = {**OWN, **LONG, "arguments": arguments, "resume_arguments": ["--resume=checkpoints/last.pt"]}
    run, ended = train(tmp_path / "run", workload, at_step(6, signal.SIGUSR2))
    (resumed,) = (event for event in run.events() if event.event == "resumed")
    # at the latest when the agreement to stop came
    step = resumed.data["step"]
    assert step % 3 == 0
    began = resumed.data.pop("began_at")
    assert resumed.time - 60.0 < began < resumed.time
    assert resumed.data == {"step": step, "samples_seen": 16 * step, "epoch": step // 4}
    result = result_of(run, ended)
    assert (result.epochs, result.steps, result.samples_seen, result.restarts) == (14, 56, 896, 1)
    # includes the slow steps before the stop
    assert result.train_time_s > 6 * 0.1 + 50 * 0.02
    # the interrupted epoch has the time of both its parts
    if not how:
        assert all(row.epoch_time_s > 3 * 0.02 for row in read_metrics(run.train().metrics_file).epochs)


def test_a_script_killed_right_after_a_save_continues_with_the_next_epoch(tmp_path: Path) -> None:
    workload = {**OWN, "resume_arguments": ["--resume", "checkpoints/last.pt"]}
    run, ended = train(tmp_path / "run", workload, at_step(4, signal.SIGKILL, of_script=True, worker=0))
    assert ended.failure is Failure.KILLED, ended.log_tail
    assert read_metrics(run.train().metrics_file).steps[-1].step == 4
    result = result_of(*train(run.root, workload))
    assert (result.epochs, result.steps, result.samples_seen) == (3, 12, 192)


def test_a_script_stopped_without_arguments_to_resume_begins_anew(tmp_path: Path) -> None:
    run, ended = train(tmp_path / "run", OWN | LONG, at_step(6, signal.SIGTERM))
    assert result_of(run, ended).steps == 56
    how = "begins anew: workload.resume_arguments are not set, and the script keeps nothing"
    assert details(run, "resumed") == [how]
    assert [row.epoch for row in read_metrics(run.train().metrics_file).epochs] == [*range(1, 15)]


def test_a_script_stopped_before_its_first_save_begins_anew(tmp_path: Path) -> None:
    """Its option takes the newest checkpoint, which may be another training's."""
    longer = {"samples": 1024, "epochs": 1, "arguments": [*OWN["arguments"], "--samples", "1024"]}
    workload = {**OWN, **longer, "resume_arguments": ["--no-such-option"]}
    run, ended = train(tmp_path / "run", workload, at_step(6, signal.SIGUSR2))
    assert result_of(run, ended).restarts == 1
    assert details(run, "resumed") == ["begins anew: the script has saved nothing yet"]


def test_a_script_that_cannot_resume_begins_anew_the_next_time(tmp_path: Path) -> None:
    """An option may require a checkpoint before the script has saved one, here in its second epoch."""
    arguments = [*OWN["arguments"], "--save-steps", "1000"]
    workload = {**OWN, **LONG, "arguments": arguments, "resume_arguments": ["--no-such-option"]}
    run, ended = train(tmp_path / "run", workload, at_step(6, signal.SIGUSR2))
    assert ended.failure is not None
    # as the command does
    run.log_event("failed", "train", job_id=ended.job.job_id, failure=ended.failure, data={"label": "main"})
    run, ended = train(run.root, workload)
    assert result_of(run, ended).epochs == 14
    assert [words.partition(":")[0] for words in details(run, "resumed")] == [
        "goes on by itself, with --no-such-option",
        "begins anew",
    ]


@pytest.mark.parametrize(
    ("named", "goes_on", "without_events"),
    [
        # from another training
        (["last.pt"], False, True),
        (["*.ckpt"], False, True),
        (["out/checkpoint-*"], False, True),
        (["out"], False, True),
        (["gone/last.pt"], False, False),
        (["own.pt"], True, True),
        (["below.pt"], True, True),
        # saved in a folder that the script knows itself
        (["elsewhere.pt"], True, True),
        # the script has saved under another name
        (["other.pt"], False, False),
        (["latest.pt"], True, True),
        # a link to a file that the script, or the user, has deleted
        (["o*.pt"], True, True),
        # one is an input, one is wanted by the user
        (["settings.yaml", "own.pt"], True, True),
        (["conf", "own.pt"], True, True),
        (["{folder}/last.pt"], True, True),
    ],
)
def test_a_users_file_from_before_the_training_does_not_count_as_saved(
    tmp_path: Path, named: list[str], goes_on: bool, without_events: bool
) -> None:
    """The script's folder has links to the contents of the working directory."""
    run, work = begun(tmp_path)
    # folders are made anew
    (tmp_path / "out" / "checkpoint-5").mkdir(parents=True)
    (tmp_path / "conf").mkdir()
    (work / "out" / "checkpoint-5").mkdir(parents=True)
    (work / "conf").mkdir()
    for name in ("last.pt", "old.ckpt", "settings.yaml", "out/checkpoint-5/model.safetensors", "conf/a.yaml"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1, 1))
        (work / name).symlink_to(tmp_path / name)
    run.log_event("submitted", "train", job_id="1", data={"label": "main"})
    (work / "own.pt").touch()
    (work / "saved").mkdir()
    (work / "saved" / "below.pt").touch()
    (work / "latest.pt").symlink_to("own.pt")
    (work / "old.pt").symlink_to("deleted.pt")
    append_record(work.with_name("saved.jsonl"), {"name": "elsewhere.pt"})
    resuming = [argument for name in named for argument in ("--file", name.replace("{folder}", str(tmp_path)))]
    sweep = SweepSpec.model_validate({"name": "x", "workload": {**OWN, "resume_arguments": resuming}})
    job = TrainJob(sweep, CLUSTER, Configuration(1, 2, 8), run.root)
    start = Start()
    how, saved_at = _look_for_saved(start, job, work, is_first=False)
    assert start.resumes == goes_on == how.startswith("goes on"), how
    # older than own.pt
    assert (saved_at is not None) == goes_on
    # without events nothing is known to be older
    run.events_file.unlink()
    how, _ = _look_for_saved(Start(), job, work, is_first=False)
    assert how.startswith("goes on") == without_events


@pytest.mark.parametrize(("noted", "how"), [("other.pt", "begins anew"), ("", "goes on")])
def test_a_save_without_a_name_may_be_the_wanted_one(tmp_path: Path, noted: str, how: str) -> None:
    run, work = begun(tmp_path)
    append_record(work.with_name("saved.jsonl"), {"name": noted})
    sweep = SweepSpec.model_validate({"name": "x", "workload": {**OWN, "resume_arguments": ["--file", "last.pt"]}})
    job = TrainJob(sweep, CLUSTER, Configuration(1, 2, 8), run.root)
    found, _ = _look_for_saved(Start(), job, work, is_first=False)
    assert found.startswith(how)


@pytest.mark.parametrize(
    ("resuming", "goes_on"),
    [
        # words by which a script looks for its newest checkpoint, as those of diffusers do
        (["--resume_from_checkpoint", "latest"], False),
        (["--resume=auto"], False),
        # it may have saved in a format that is not known here
        (["--auto-resume"], True),
        (["--auto_resume=True"], True),
        ([], True),
    ],
)
def test_a_word_for_the_newest_checkpoint_resumes_no_script_that_has_saved_nothing(
    tmp_path: Path, resuming: list[str], goes_on: bool
) -> None:
    run, work = begun(tmp_path)
    sweep = SweepSpec.model_validate({"name": "x", "workload": {**OWN, "resume_arguments": resuming}})
    job = TrainJob(sweep, CLUSTER, Configuration(1, 2, 8), run.root)
    how, saved_at = _look_for_saved(Start(), job, work, is_first=False)
    assert (how.startswith("goes on"), saved_at) == (goes_on, None), how
    assert goes_on or how == "begins anew: the script has saved nothing yet"
    # a checkpoint of any format and in any place counts
    work.with_name("saved.jsonl").touch()
    how, saved_at = _look_for_saved(Start(), job, work, is_first=False)
    assert how.startswith("goes on by itself")
    assert saved_at is not None


@pytest.mark.parametrize("how", ["trains further", "trains further, is kept", "handles TERM"])
def test_a_worker_that_does_not_notice_that_another_has_stopped_is_ended(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each obeys a stop by itself there, and another may wait for it, as in a collective of NCCL's."""
    monkeypatch.setitem(globals(), "CLUSTER", CLUSTER.model_copy(update={"signal_delay_s": 1}))
    script = tmp_path / "probes.py"
    script.write_text("""
import signal, sys, time, torch
from pathlib import Path
import tula_hpc.attach as tula
torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
epochs, batches = range, iter
if "is kept" in sys.argv[2]:
    tula.keep(model=model, optimizer=optimizer)
    epochs, batches = tula.epochs, tula.batches
for _ in epochs(1):
    for _ in batches(range(4)):
        model(torch.randn(int(sys.argv[1]), 2)).sum().backward()
        optimizer.step()
rank, begun = torch.distributed.get_rank(), Path("begun")
torch.distributed.barrier()
if begun.exists():
    sys.exit()
if sys.argv[2] == "handles TERM":
    signal.signal(signal.SIGTERM, signal.SIG_IGN if rank else lambda *_: sys.exit())
torch.distributed.barrier()
begun.touch()
if rank:
    time.sleep(40)
    begun.with_name("waited").touch()
probe = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(probe.parameters(), 0.1)
while True:
    probe(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    time.sleep(0.001)
""")
    # the handler ends a script that has more to do
    epochs = 2 if how == "handles TERM" else 1
    workload = {"script": script, "arguments": ["{local_batch}", how], "samples": 64, "epochs": epochs}

    def strike(run: RunDirectory, shell: int) -> None:
        while not (run.train().root / "script" / "work" / "begun").exists():
            time.sleep(0.02)
        at_step(4, signal.SIGTERM)(run, shell)

    run, ended = train(tmp_path / "run", workload, strike)
    assert result_of(run, ended).steps == 4
    saved = "saved" if "is kept" in how else "the script ended"
    assert details(run, "preempted") == [f"stop requested (TERM); {saved} at step 4"]
    assert not (run.train().root / "script" / "work" / "waited").exists()


def test_what_is_known_of_earlier_starts_outlives_a_start_that_a_signal_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, work = begun(tmp_path)
    row = StepMetrics(step=6, samples_seen=96, epoch=1.5, loss=None, lr=0.1, step_time_s=0.1)
    append_record(run.train().metrics_file, row)
    work.with_name("saved.jsonl").touch()
    sweep = SweepSpec.model_validate({"name": "x", "workload": {**OWN, "resume_arguments": ["--auto-resume"]}})
    alone = WorkerEnvironment(0, 1, 0, 0, "1", 0, ("here",), on_slurm=False)
    allocation: Any = SimpleNamespace(env=alone, store=None, broadcast=lambda decide: decide())
    stop = StopRequest()
    stop.received = signal.SIGTERM
    job = ScriptJob(TrainJob(sweep, CLUSTER, Configuration(1, 1, 8), run.root), allocation, stop)
    job.start_file.write_text(json.dumps(asdict(Start(starts_s=7.0))))
    killed = ProcessMessage(state="failed", failure=Failure.KILLED, detail="ended by SIGTERM")
    monkeypatch.setattr(job, "_watch", lambda *_: ProcessEnd(rank=0, message=killed, log="log"))
    monkeypatch.setattr(job, "_leave", lambda: "stopped")
    assert job.run() == "stopped"
    kept = Start(**json.loads(job.start_file.read_text()))
    assert (kept.restarts, kept.starts_s) == (1, 7.0)


def test_a_script_at_its_time_limit_does_not_begin_anew_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "CLUSTER", CLUSTER.model_copy(update=LIMIT))
    run, ended = train(tmp_path / "run", OWN | LONG, at_step(6, signal.SIGUSR2, worker=0))
    assert not run.train().result_file.exists()
    (why,) = details(run, "failed")
    assert re.fullmatch(r"the time limit ended the script at step \d+, and another job would begin anew", why)
    assert run.history().job(ended.job.job_id).own_failure == JobFailure(None, why, StopReason.LIMIT_IN_VAIN)


def test_a_kept_script_resumes_after_a_time_limit_and_ends_as_undisturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "CLUSTER", CLUSTER.model_copy(update=LIMIT))
    whole, ended = train(tmp_path / "whole", KEPT)
    results = [result_of(whole, ended)]
    cut, ended = train(tmp_path / "cut", KEPT, at_step(5, signal.SIGUSR2, worker=0))
    results.append(result_of(cut, ended))
    assert [(result.steps, result.restarts) for result in results] == [(16, 0), (16, 1)]
    weights = [torch.load(log_of(run) / "weights-0.pt", weights_only=True) for run in (whole, cut)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    losses = [(log_of(run) / "losses-1.txt").read_text().splitlines() for run in (whole, cut)]
    assert losses[0] == losses[1]
    (stopped,) = [event for event in cut.events() if event.event == "preempted"]
    (resumed,) = [event for event in cut.events() if event.event == "resumed"]
    assert stopped.data["samples_seen"] == resumed.data["samples_seen"] == 16 * resumed.data["step"]


def test_a_kept_script_with_its_own_handler_is_not_said_to_have_saved_at_its_end(tmp_path: Path) -> None:
    """Its handler replaces ours, and ends the script without a checkpoint."""
    script = tmp_path / "handles.py"
    script.write_text(
        "import runpy, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))\n"
        f"runpy.run_path({str(KEPT['script'])!r}, run_name='__main__')\n"
    )
    run, ended = train(tmp_path / "run", KEPT | {"script": script}, at_step(5, signal.SIGTERM))
    assert result_of(run, ended).steps == 16
    (why,) = details(run, "preempted")
    assert re.fullmatch(r"stop requested \(\w+\); the script ended at step \d+", why)


def log_of(run: RunDirectory) -> Path:
    return run.train().root / "script" / "work" / "log"


def test_a_script_that_fails_ends_the_job_with_one_line(tmp_path: Path) -> None:
    _, ended = train(tmp_path / "run", {**OWN, "arguments": [*OWN["arguments"], "--fails", "exit"]})
    assert ended.failure is Failure.BAD_INPUT
    assert "own_checkpoints.py ended with exit code 7 after 6 steps" in ended.log_tail
    # a script that finds the checkpoint of a finished training
    _, ended = train(tmp_path / "over", {**OWN, "arguments": ["--batch-size", "{local_batch}", "--epochs", "0"]})
    assert ended.failure is Failure.BAD_INPUT
    assert "own_checkpoints.py ended without an optimizer step; if it goes on from a file of an" in ended.log_tail


def test_weights_that_are_nan_end_the_training_after_its_epoch(tmp_path: Path) -> None:
    arguments = ["--batch-size", "{local_batch}", "--epochs", "{epochs}", "--samples", "64", "--lr", "nan"]
    workload = {**OWN, "script": SCRIPTS / "plain.py", "arguments": arguments}
    run, ended = train(tmp_path / "run", workload)
    assert ended.failure is Failure.DIVERGED
    assert "weights of the model are nan after 4 steps; lower the learning rate" in ended.log_tail
    assert not run.train().result_file.exists()


def test_steps_that_take_longer_than_planned_are_reported(tmp_path: Path) -> None:
    """All workers time the all-reduce during training, and continue."""
    run = RunDirectory(tmp_path / "run").create()
    known = candidate(Configuration(1, 2, 8)).model_copy(update={"step_time_s": 0.001, "interval_90": {}})
    write_plan(run, plan([known] * 4, chosen=known, fallbacks=[]))
    append_record(run.profile / "1.jsonl", measurement(known.configuration))
    _, ended = train(run.root, {**KEPT, "epochs": 5}, drift_minutes=0.01)
    assert result_of(run, ended).steps == 5 * 8
    (event,) = (event for event in run.events() if event.event == "drifted")
    assert event.data["ratio"] > 50
    # it pauses once it has its batch
    assert event.data["part"] == "compute"
    assert event.data["parts"]["measured"]["allreduce_time_s"] > 0


def test_a_script_that_hangs_is_ended_in_one_line(tmp_path: Path) -> None:
    workload = {**OWN, "arguments": [*OWN["arguments"], "--fails", "hang"], "hang_minutes": 0.05}
    _, ended = train(tmp_path / "run", workload)
    assert ended.failure is Failure.BUG
    assert "own_checkpoints.py hangs: no step, batch, evaluation or output of any of its 2 workers" in ended.log_tail


def test_out_of_memory_falls_back_to_the_next_smaller_batch(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run").create()
    large, small = (candidate(Configuration(1, 2, batch)).model_copy(update={"feasible": True}) for batch in (8, 4))
    workload = {**KEPT, "arguments": [*KEPT["arguments"], "--largest-batch", "4"]}
    spec = SweepSpec.model_validate({"name": "x", "workload": workload, "training": TRAINING})
    result = train_stage(Sweep(spec, CLUSTER, run), plan([large, small], chosen=large, fallbacks=[small]))
    assert (result.local_batch, result.epochs, result.samples_seen) == (4, 2, 2 * 128)
    failed = [(m.local_batch, m.stage, m.failure) for m in run.measurements().records if m.status == "oom"]
    # either worker may be the first
    assert set(failed) == {(8, "train", Failure.DEVICE_OOM)}
    events = [event.event for event in run.events() if event.event not in ("checkpoint", "ended", "oom")]
    assert events == ["submitted", "fell_back", "submitted", "resumed", "finished"]
    seen: Counter[int] = Counter()
    for rank in range(2):
        for line in (log_of(run) / f"losses-{rank}.txt").read_text().splitlines():
            seen.update(json.loads(line.split(" ", 2)[2]))
    # counts the steps after the last save again
    assert seen.keys() == set(range(128))
    assert set(seen.values()) <= {2, 3}
    assert sum(seen.values()) <= 2 * 128 + 3 * 16
