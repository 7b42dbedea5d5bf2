"""A script with three added lines, stopped and killed, ends as if undisturbed, bit for bit; real processes, gloo."""

from __future__ import annotations

import functools
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from tests.forked import context_of_workers
from tests.known import known
from tula_hpc.attach import child
from tula_hpc.attach.reporting import ChildSpec, read_message
from tula_hpc.attach.script import Script
from tula_hpc.attach.train import script_training
from tula_hpc.attach.train.keeping import KeptTraining
from tula_hpc.attach.train.loaders import LoaderHistory, OwnBeginnings
from tula_hpc.attach.train.resume_point import TrainSettings
from tula_hpc.attach.train.script_training import ScriptTraining
from tula_hpc.config import SweepSpec
from tula_hpc.ddp.rendezvous import free_port
from tula_hpc.records import RunDirectory, read_metrics

SCRIPT = Path(__file__).parent / "scripts" / "three_lines.py"
SAMPLES = 128
STOPPED, EXITED, KILLED = "stopped", "exited", -signal.SIGKILL
PLACE = {
    "MASTER_ADDR": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCHELASTIC_RUN_ID": "1",
    "ACCELERATE_USE_CPU": "true",
}
Arguments = Sequence[str]


def run_script(place: dict[str, str], spec: ChildSpec, struck: tuple[int, int] | None) -> None:
    """Run the script as a process of torchrun; with `struck`, run it within the project and signal it at a step."""
    os.environ |= place
    # a folder of its own, because the project notes a script's saves in a file next to the script's folder
    folder = spec.message_file.parent / "script"
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    if struck is None:
        spec.program.run(spec.home)
        return
    at, number = struck
    steps = 0
    original = KeptTraining.gradients_ready

    def gradients_ready(training: ScriptTraining) -> None:
        nonlocal steps
        original(training)
        steps += 1
        if steps == at:
            os.kill(os.getpid(), number)

    # at the step of the signal
    script_training.CHECK_EVERY_S = 0.0  # type: ignore[attr-defined] # of this process alone
    KeptTraining.gradients_ready = gradients_ready  # type: ignore[assignment, method-assign] # of this process alone
    spec_file = spec.message_file.with_suffix(".spec")
    spec_file.write_text(spec.model_copy(update={"parent": os.getppid()}).model_dump_json())
    child.main([str(spec_file)])


def ended(spec: ChildSpec) -> str:
    """Return the reason that a process gave for its end; empty if it gave none."""
    message = read_message(spec.message_file)
    return str(message.result["end"]) if message is not None and message.state == "done" else ""


class Scenario:
    """A training of the script, in one or several starts."""

    def __init__(
        self, folder: Path, workers: int, arguments: Arguments, *, around: bool = True, script: Path = SCRIPT
    ) -> None:
        self.run, self.script = RunDirectory(folder), script
        self.log, self.workers, self.around = folder / "log", workers, around
        self.arguments = ["--log", str(self.log), *arguments]
        self.starts = 0
        # the sweep, if its method scales gradients
        self.sweep: dict[str, Any] = {}
        folder.mkdir(mode=0o700)
        if around:
            self.run.make_train()

    def start(
        self, at: int = 0, number: int = signal.SIGTERM, only: int | None = None, batch: int = 8
    ) -> list[str | int | None]:
        """Run all processes to their end; return the reason that each gave for it, or otherwise its exit code."""
        count = str(self.workers)
        place = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": str(free_port())}
        specs = [self.spec(rank, batch) for rank in range(self.workers)]
        self.starts += 1
        processes = []
        for spec in specs:
            struck = (at if only in (None, spec.rank) else 0, number) if self.around else None
            spec.message_file.unlink(missing_ok=True)
            given = (PLACE | place | {"RANK": str(spec.rank), "LOCAL_RANK": str(spec.rank)}, spec, struck)
            processes.append(context_of_workers().Process(target=run_script, args=given))
            processes[-1].start()
        for process in processes:
            process.join(60)
        ends = [ended(spec) or process.exitcode for spec, process in zip(specs, processes, strict=True)]
        for process in processes:
            process.kill()
        return ends

    def spec(self, rank: int, batch: int) -> ChildSpec:
        """Return the specification of one process."""
        settings = TrainSettings(
            root=self.run.root, label="main", job_id="1", samples=SAMPLES, global_batch=batch * self.workers,
            log_interval_steps=1, restart_count=self.starts, between_s=3600.0, fixed_s=1e-6,
            sweep=self.sweep, configuration=(1, self.workers, batch),
        )  # fmt: skip
        arguments = ("--batch-size", str(batch), "--epochs", "2", *self.arguments)
        return ChildSpec(
            mode="train", program=Script(self.script, None, arguments), home=SCRIPT.parent, parent=0,
            message_file=self.run.root / f"{rank}.json", rank=rank, world_size=self.workers,
            settings=settings.model_dump(mode="json"),
        )  # fmt: skip

    def lines(self, rank: int) -> list[str]:
        """Return the lines that a rank wrote for each batch, including repeated batches."""
        return (self.log / f"losses-{rank}.txt").read_text().splitlines()

    def weights(self, rank: int = 0) -> dict[str, torch.Tensor]:
        """Return a rank's weights at the end of the training."""
        weights: dict[str, torch.Tensor] = torch.load(self.log / f"weights-{rank}.pt", weights_only=True)
        return weights


def assert_same(one: Scenario, other: Scenario, *, lines: Callable[[list[str]], object] = list) -> None:
    for rank in range(one.workers):
        mine, others = one.weights(rank), other.weights(rank)
        assert mine.keys() == others.keys()
        for name in mine:
            assert torch.equal(mine[name], others[name]), name
        assert lines(one.lines(rank)) == lines(other.lines(rank))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Scenario]:
    """A function that trains with the script alone, once for each kind of training."""
    known: dict[tuple[object, ...], Scenario] = {}

    def scenario(workers: int, *arguments: str) -> Scenario:
        key = (workers, *arguments)
        if key not in known:
            known[key] = Scenario(tmp_path_factory.mktemp("alone") / "run", workers, arguments, around=False)
            assert known[key].start() == [0] * workers
        return known[key]

    return scenario


@pytest.mark.parametrize(
    ("workers", "arguments", "is_killed"),
    [
        (2, (), True),
        (1, (), False),
        (1, ("--generator", "--loader-workers", "2"), True),
        (2, ("--accumulate", "2"), False),
    ],
    ids=["two workers", "one", "loader processes and a generator", "accumulation"],
)
def test_a_training_that_is_stopped_or_also_killed_ends_as_undisturbed(
    tmp_path: Path, undisturbed: Callable[..., Scenario], workers: int, arguments: Arguments, is_killed: bool
) -> None:
    alone = undisturbed(workers, *arguments)
    scenario = Scenario(tmp_path / "run", workers, arguments)
    # 8 or 16 batches an epoch, or as many pairs
    assert scenario.start(2, only=0) == [STOPPED] * workers
    if is_killed:
        assert KILLED in scenario.start(3, signal.SIGKILL)
        assert scenario.start(2) == [STOPPED] * workers
    assert scenario.start() == [EXITED] * workers
    assert_same(alone, scenario, lines=set if is_killed else list)
    # only the kill caused repeated work
    assert len(scenario.lines(0)) - len(alone.lines(0)) <= 4


def test_more_than_two_workers_add_in_the_same_order_after_a_stop(
    tmp_path: Path, undisturbed: Callable[..., Scenario]
) -> None:
    # above a megabyte DDP has several buckets
    alone = undisturbed(3, "--width", "700", "--samples", "120")
    scenario = Scenario(tmp_path / "run", 3, ("--width", "700", "--samples", "120"))
    assert scenario.start(2) == [STOPPED] * 3
    assert scenario.start() == [EXITED] * 3
    assert_same(alone, scenario)


def assert_scales_go_on(whole: Scenario, cut: Scenario, *, stop: int, accumulation: int = 1) -> int:
    """Train both with `ags`, one of them with a stop; return the number of factors."""
    workload = {"script": whole.script, "arguments": ["{local_batch}"], "samples": SAMPLES, "epochs": 2}
    tables = {"name": "x", "workload": {**workload, "accumulation": accumulation}}
    sweep = SweepSpec.model_validate({**tables, "training": {"method": "ags", "small_batch": 4}})
    whole.sweep = cut.sweep = sweep.model_dump(mode="json")
    assert whole.start() == [EXITED] * 2
    assert cut.start(stop) == [STOPPED] * 2
    assert cut.start() == [EXITED] * 2
    assert_same(whole, cut)
    scales = [
        [row.scale_mean for row in read_metrics(scenario.run.train().metrics_file).steps] for scenario in (whole, cut)
    ]
    assert scales[0] == scales[1]
    return len(set(scales[0]))


@pytest.mark.parametrize(("accumulation", "more"), [(1, ()), (2, ()), (1, ("--partner",))])
def test_a_method_that_scales_goes_on_with_its_averages(tmp_path: Path, accumulation: int, more: Arguments) -> None:
    arguments = ("--accumulate", str(accumulation), *more)
    whole, cut = (Scenario(tmp_path / name, 2, arguments) for name in ("whole", "cut"))
    assert assert_scales_go_on(whole, cut, stop=3, accumulation=accumulation) > 3


def test_a_start_after_the_last_epoch_gives_a_sign_before_any_step(tmp_path: Path) -> None:
    """Its worker would give it up otherwise, as long work may follow, such as an evaluation."""
    script = tmp_path / "evaluates.py"
    script.write_text("""
from pathlib import Path
import torch
import tula_hpc.attach as tula
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
tula.keep(model=model, optimizer=optimizer)
for _ in tula.epochs(1):
    for inputs in tula.batches(torch.randn(2, 8, 2)):
        model(inputs).sum().backward()
        optimizer.step()
Path("../0.json").read_text()
""")
    scenario = Scenario(tmp_path / "run", 1, (), script=script)
    assert scenario.start() == [EXITED]
    assert scenario.start() == [EXITED]


def test_a_script_that_was_changed_since_its_checkpoint_is_refused_with_what_does_not_fit(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path / "run", 1, ())
    assert scenario.start(2) == [STOPPED]
    scenario.arguments += ["--width", "7"]
    assert scenario.start() == [1]
    message = known(read_message(scenario.spec(0, 8).message_file))
    assert message.detail.startswith("tula.keep(model=…): ")
    assert " does not fit; if the script was changed, undo that, or move " in message.detail
    assert (
        f" {scenario.run.train().checkpoints} away to begin anew (RuntimeError: Error(s) in loading" in message.detail
    )
    assert "size mismatch for " in message.detail


def test_with_a_smaller_batch_every_sample_is_seen_once_an_epoch(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path / "run", 2, ())
    assert scenario.start(3) == [STOPPED] * 2
    assert scenario.start(batch=4) == [EXITED] * 2
    seen: Counter[int] = Counter()
    for rank in range(2):
        for line in scenario.lines(rank):
            seen.update(json.loads(line.split(" ", 2)[2]))
    assert seen == dict.fromkeys(range(SAMPLES), 2)
    metrics = read_metrics(scenario.run.train().metrics_file)
    assert [row.samples_seen for row in metrics.epochs] == [SAMPLES, 2 * SAMPLES]


def test_a_script_trains_within_the_project_as_without_it(tmp_path: Path, undisturbed: Callable[..., Scenario]) -> None:
    scenario = Scenario(tmp_path / "run", 2, ())
    assert scenario.start() == [EXITED] * 2
    assert_same(undisturbed(2), scenario)
    metrics = read_metrics(scenario.run.train().metrics_file)
    assert [row.step for row in metrics.steps] == list(range(1, 17))
    assert [row.epoch for row in metrics.steps] == pytest.approx([n / 8 for n in range(1, 17)])
    assert [row.test_accuracy for row in metrics.epochs] == pytest.approx([0.25, 0.35])
    assert [row.lr for row in metrics.steps] == [0.1] * 8 + [0.05] * 8


ODD_LOOPS = SCRIPT.with_name("odd_loops.py")


def odd_loop(folder: Path, case: str, *, around: bool = True) -> Scenario:
    return Scenario(folder / ("kept" if around else "alone"), 1, [case], around=around, script=ODD_LOOPS)


@pytest.fixture(scope="module")
def odd_loop_alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Scenario]:
    """A function that runs a loop without the project, once for each case."""

    @functools.cache
    def scenario(case: str) -> Scenario:
        alone = odd_loop(tmp_path_factory.mktemp("alone"), case, around=False)
        assert alone.start() == [0]
        return alone

    return scenario


@pytest.mark.parametrize(
    ("case", "stops"),
    [
        ("phases", [5]),
        ("phases", [40]),
        ("half", [10]),
        ("numbered", [3]),
        ("numbered", [9]),
        ("shared", [37]),
        # once before it reaches the second loader, and once at the end of one
        ("apart", [37, 3]),
        ("apart", [30, 2]),
        ("twice", [37]),
        ("peek", [20]),
        # loaders that the script iterates itself, with generators of their own
        ("zipped", [5]),
        ("zipped", [20, 10]),
        ("zipped", [25]),
        ("zipped", [30, 15]),
        # when a loader starts its processes, also for an evaluation, it draws a random number, but not once an epoch
        ("persistent", [16]),
        ("persistent", [20]),
        ("carry", [0]),
        # the steps before it belong to no epoch
        ("rate", [20]),
    ],
)
def test_loops_of_other_forms_go_on_as_undisturbed(
    tmp_path: Path, odd_loop_alone: Callable[[str], Scenario], case: str, stops: list[int]
) -> None:
    """Cases are two loops over epochs, loaders with shared or own generators, a loader that is iterated twice, a look
    at a batch, and gradients that are accumulated across the end of an epoch.
    """
    alone, scenario = odd_loop_alone(case), odd_loop(tmp_path, case)
    assert [scenario.start(at) for at in stops] == [[STOPPED]] * len(stops)
    assert scenario.start() == [EXITED]
    assert_same(alone, scenario)


def test_only_what_an_earlier_process_started_takes_no_random_number_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that is made anew for each epoch starts processes each time, and each time draws a number."""
    monkeypatch.setattr(DataLoader, "_get_iterator", DataLoader._get_iterator)
    monkeypatch.setattr(_SingleProcessDataLoaderIter, "_next_data", _SingleProcessDataLoaderIter._next_data)

    def begin() -> bool:
        before = torch.get_rng_state()
        iter(DataLoader(TensorDataset(torch.zeros(4)), num_workers=1, persistent_workers=True))
        return not torch.equal(before, torch.get_rng_state())

    history = LoaderHistory()
    history.install()
    history.begin_epoch()
    once = [begin(), history.moments(None, None)["history"]]
    assert [once[0], begin(), begin()] == [True, True, True]
    history.load_state(str(once[1]))
    # in the first epoch it is begun as it was
    assert begin()
    history.catch_up()
    assert [begin(), begin()] == [False, True]


def test_an_epochs_loop_that_is_left_has_its_last_epoch_and_later_scores(tmp_path: Path) -> None:
    scenario = odd_loop(tmp_path, "early")
    assert scenario.start() == [EXITED]
    rows = read_metrics(scenario.run.train().metrics_file).epochs
    assert [row.test_accuracy for row in rows] == pytest.approx([0.1, 0.2, 0.3])
    assert [row.test_loss for row in rows] == [None, None, 0.5]


def test_scores_of_a_script_that_keeps_nothing_are_those_of_the_epoch_that_is_over(tmp_path: Path) -> None:
    scenario = odd_loop(tmp_path, "not kept")
    assert scenario.start() == [EXITED]
    rows = read_metrics(scenario.run.train().metrics_file).epochs
    assert [(row.epoch, row.test_accuracy) for row in rows] == [(1, 0.1), (2, 0.2)]


def test_a_score_before_the_loop_belongs_to_no_epoch_that_is_over(tmp_path: Path) -> None:
    scenario = odd_loop(tmp_path, "before")
    assert [scenario.start(20), scenario.start()] == [[STOPPED], [EXITED]]
    rows = read_metrics(scenario.run.train().metrics_file).epochs
    assert [(row.epoch, row.test_accuracy) for row in rows] == [(1, 0.1), (2, 0.1)]


def test_stopped_in_its_last_evaluation_it_goes_on_to_its_end(tmp_path: Path) -> None:
    scenario = odd_loop(tmp_path, "late")
    assert scenario.start() == [EXITED]
    rows = read_metrics(scenario.run.train().metrics_file).epochs
    assert [(row.epoch, row.test_accuracy) for row in rows] == [(1, 0.5), (2, 0.5)]


def test_a_start_with_no_epoch_left_goes_on_behind_the_loop_and_has_the_last_epochs_score(
    tmp_path: Path, odd_loop_alone: Callable[[str], Scenario]
) -> None:
    scenario = odd_loop(tmp_path, "final")
    assert [scenario.start(), scenario.start()] == [[KILLED], [EXITED]]
    # numbers that it draws after its loop are the same as in a start without a kill
    assert_same(odd_loop_alone("final"), scenario)
    rows = read_metrics(scenario.run.train().metrics_file).epochs
    assert [(row.epoch, row.test_accuracy) for row in rows] == [(1, None), (2, 0.5)]


def test_a_loader_that_a_script_begins_at_every_step_does_not_let_checkpoints_grow() -> None:
    data = TensorDataset(torch.zeros(4))
    loader = DataLoader(data, 2, shuffle=True, generator=torch.Generator())
    beginnings = OwnBeginnings([])
    sizes = []
    for _ in range(3):
        beginnings.note(loader, 0)
        sizes.append(len(beginnings.state()))
        next(iter(loader))
    assert sizes[0] == sizes[2]
