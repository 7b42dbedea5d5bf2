"""Profiles of scripts: complete records, and scripts that notice nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.attach.script_runs import QUICK, SCRIPTS, measurement_of, profiled
from tests.forked_jobs import forking_scripts
from tests.known import known
from tula_hpc.attach.hooks import step_times
from tula_hpc.attach.hooks.step_times import LongGaps, Pause, between_epochs_s
from tula_hpc.attach.measured_steps import MeasuredSteps, _synchronize_again
from tula_hpc.attach.processes import ProcessEnd
from tula_hpc.attach.reporting import ChildSpec
from tula_hpc.attach.script import Script, batch_share, typical_batch
from tula_hpc.attach.script_course import captured
from tula_hpc.attach.train.first_pass import rehearse_first_pass
from tula_hpc.config import TrainingSpec
from tula_hpc.env import WorkerEnvironment
from tula_hpc.profiling.timing import halves_of
from tula_hpc.records import Configuration, Measurement
from tula_hpc.records.measurement import is_usable


@pytest.mark.parametrize(
    ("pauses", "seconds"),
    [
        ([], None),
        ([Pause(30, 5.0, ends_epoch=True)], 5.0),
        ([Pause(20, 5.0)], 10.0),
        ([Pause(60, 5.0)], 10.0),
        ([Pause(20, 9.0), Pause(70, 2.0), Pause(120, 2.0), Pause(170, 2.0)], 4.0),
        ([Pause(50, 0.25, is_gap=True), Pause(100, 5.0, ends_epoch=True), Pause(150, 0.25, is_gap=True)], 5.25),
    ],
)
def test_an_epoch_has_as_many_pauses_as_were_seen(pauses: list[Pause], seconds: float | None) -> None:
    """Of 80 steps or more: a script that pauses every 50 of them does so twice in an epoch of 100."""
    steps = max([80, *(pause.steps for pause in pauses)])
    assert between_epochs_s(pauses, 100, steps) == seconds


def test_a_long_gap_is_a_pause_only_if_it_is_rare() -> None:
    gaps = LongGaps()
    found = []
    for step in range(100):
        gap_s = 50.0 if step % 25 == 24 else 0.5
        found.append(gaps.pause_s(gap_s))
        gaps.step_ends(1.0)
    assert [step for step, pause_s in enumerate(found) if pause_s] == [24, 49, 74, 99]
    assert {*found} == {0.0, 50.0}
    often = LongGaps()
    for step in range(100):
        assert not often.pause_s(50.0 if step % 10 == 9 else 0.5)
        often.step_ends(1.0)


class GpuMark(NamedTuple):
    """An event of a GPU that finishes its work at a given second."""

    done_at: float

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: GpuMark) -> float:
        return 1e3 * (later.done_at - self.done_at)


def test_a_gap_on_a_gpu_is_as_long_as_the_device_was_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the gap after 30 steps is the host's wait for the device's remaining work; the next gap is a real one."""
    marks = iter([*map(GpuMark, [1.0] * 30 + [30.0, 30.5] + [31.0] * 30 + [61.0, 91.0])])
    monkeypatch.setattr(step_times, "device_mark", lambda device: next(marks))
    gaps = LongGaps()
    gaps.gpu = torch.device("cuda")
    for gap_s, pause_s in ((29.0, 0.0), (40.0, 30.0)):
        for _ in range(31):
            assert not gaps.pause_s(0.0)
            gaps.step_ends(1.0)
        assert gaps.pause_s(gap_s) == pause_s


def test_a_script_that_pauses_now_and_then_is_charged_for_it_in_every_epoch(tmp_path: Path) -> None:
    """It sleeps after every 40th of 250 steps, as a policy that plays, so that few rounds contain a pause."""
    never_settled = QUICK.model_copy(update={"min_steps": 100, "max_steps": 100, "ci_width": 1e-9})
    (outcome,) = profiled(SCRIPTS / "misbehaving.py", ("sleeps now and then", "4"), tmp_path, search=never_settled)
    measured = measurement_of(outcome)
    assert known(measured.times).step_time_s < 0.5 / 40
    assert measured.between_epochs_s == pytest.approx(6 * 0.5, rel=0.2)


def test_gradients_of_complex_weights_are_captured_whole() -> None:
    """A Fourier neural operator has such weights."""
    weight = nn.Parameter(torch.tensor([1 + 2j, 3 + 4j]))
    with captured([weight]) as found:
        torch.autograd.backward(weight.abs().square().sum())
    assert found[0] is not None
    assert found[0].tolist() == known(weight.grad).tolist() == [2 + 4j, 6 + 8j]


def test_separate_passes_at_every_step_do_not_belong_to_an_epochs_end(tmp_path: Path) -> None:
    """Such passes compute features of the same batch; those of the first steps look like evaluations."""
    never_settled = QUICK.model_copy(update={"max_steps": 10, "ci_width": 1e-9})
    (outcome,) = profiled(SCRIPTS / "misbehaving.py", ("looks twice", "4"), tmp_path, search=never_settled)
    assert measurement_of(outcome).between_epochs_s is None


class Rounds(MeasuredSteps):
    """Measured rounds of two steps, whose waits are taken at their ends."""

    def __init__(self, folder: Path) -> None:
        program = Script(folder / "train.py", None, ())
        spec = ChildSpec(mode="profile", program=program, home=folder, message_file=folder / "message", parent=0)
        super().__init__(spec, WorkerEnvironment(0, 1, 0, 0, "1", 0, ("here",), False), "cpu")
        self.taken: list[float] = []

    def after_step(self) -> None:
        if self.steps % 2 == 0:
            self.taken.append(self.waits.take())

    def synchronize_device(self) -> None:
        pass

    def step(self, waited_s: float) -> None:
        self.batch_loaded(None, waited_s)
        self.forward_begins(8)
        self.step_ends()


def test_an_evaluation_after_a_round_does_not_restore_its_waits(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path)
    for _ in range(4):
        for _ in range(4):
            rounds.step(1.0)
        rounds.batch_loaded(None, 50.0)
        rounds.evaluating()
    # the wait for training's batch after an evaluation is left out, too
    assert rounds.taken == [2.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0]


class Halves(nn.Module):
    """A model of which each pass uses one part, as a GAN in one wrapper, or one that leaves out layers."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
        self.steps_within: DistributedDataParallel | None = None

    def forward(self, inputs: Tensor, part: int) -> Tensor:
        if self.steps_within is not None:
            _synchronize_again(self.steps_within)
            assert not self.steps_within.require_backward_grad_sync, (
                "the pass ends without synchronization, as it began"
            )
        output: Tensor = self.parts[part](inputs)
        return output


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process alone."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("within", [False, True], ids=["after a pass", "within a pass, as in Lightning"])
def test_passes_without_synchronization_leave_nothing_to_the_next_one(*, within: bool) -> None:
    halves = Halves()
    model = DistributedDataParallel(halves, find_unused_parameters=True)
    # the hooks of a profile have one, too
    model.register_forward_pre_hook(lambda *_: None)
    model.require_backward_grad_sync = False
    torch.autograd.backward(model(torch.ones(3, 2), 0).sum())
    if within:
        halves.steps_within = model
        model(torch.ones(3, 2), 0)
        halves.steps_within = None
    else:
        _synchronize_again(model)
    assert model.require_backward_grad_sync
    model.zero_grad()
    torch.autograd.backward(model(torch.ones(3, 2), 1).sum())
    assert [part.weight.grad is None for part in halves.parts] == [True, False]


@pytest.mark.parametrize(
    ("case", "is_told"),
    [
        # torch's own loader, iterated anew in each epoch
        ("shared", False),
        ("persistent", False),
        ("peek", False),
        ("look", False),
        # a loader without an end, started before the first epoch
        ("infinite", True),
        ("one iterator", True),
        # nothing is kept
        ("not kept", False),
    ],
)
def test_one_iterator_over_a_loader_for_all_epochs_is_noticed(tmp_path: Path, case: str, *, is_told: bool) -> None:
    arguments = ("--batch-size", "4", "--epochs", "100", "--log", str(tmp_path / "log"), case)
    (outcome,) = profiled(SCRIPTS / "odd_loops.py", arguments, tmp_path)
    assert measurement_of(outcome).one_iterator is is_told


class Following(nn.Module):
    """A model with a step count and a copy that follows the trained layer in each forward, as a momentum encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Linear(2, 1)
        self.copy = nn.Parameter(torch.zeros(1, 2), requires_grad=False)
        self.changed = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.count: Tensor
        self.register_buffer("count", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.copy.data = self.copy.data + self.trained.weight.data
            self.changed.add_(1)
        self.count = self.count + 1
        output: Tensor = self.trained(inputs)
        return output


@pytest.mark.usefixtures("alone")
def test_the_first_pass_of_a_resumed_script_changes_its_model_once() -> None:
    following = Following()
    rehearsed: list[float] = []
    model = DistributedDataParallel(following)
    rehearse_first_pass(model, lambda: rehearsed.append(following.count.item()))
    model(torch.ones(3, 2))
    assert rehearsed == [0.0]
    assert torch.equal(following.copy, following.trained.weight)
    assert (following.changed.item(), following.count.item()) == (1.0, 1.0)


@pytest.mark.usefixtures("alone")
def test_the_first_pass_of_a_resumed_script_does_not_go_back_through_another_model() -> None:
    model, other = DistributedDataParallel(nn.Linear(2, 1)), nn.Linear(2, 2)
    rehearse_first_pass(model, lambda: None)
    torch.autograd.backward(model(other(torch.ones(3, 2)).square()).sum())
    assert other.weight.grad is not None


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    with forking_scripts():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("averaging")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> list[ProcessEnd]:
    """The ends of a profile on two workers, with accumulation, bf16, clipping, and an average of weights."""
    arguments = ("--batch-size", "8", "--accumulate", "2")
    script, configuration = SCRIPTS / "averaging.py", Configuration(2, 1, 16)
    return profiled(script, arguments, folder, world=2, configuration=configuration, forward_batch=8, accumulation=2)


@pytest.fixture(scope="module")
def measured(outcomes: list[ProcessEnd]) -> Measurement:
    return measurement_of(outcomes[0])


def test_a_record_is_whole(measured: Measurement) -> None:
    assert is_usable(measured)
    times, memory = measured.times, measured.memory
    assert times is not None
    assert memory is not None
    for seconds in (times.compute_time_s, times.optimizer_time_s, times.allreduce_time_s):
        assert 0 < seconds < 10
    parameters = 33 * 32 + 33 * 4
    assert (measured.parameters, memory.gradient_bytes) == (parameters, 4 * parameters)
    # AdamW has two moments
    assert memory.optimizer_bytes >= 2 * memory.parameter_bytes
    assert measured.configuration == Configuration(2, 1, 16)
    assert (measured.dataset_samples, measured.epoch_samples) == (1000, 8192)
    assert measured.identity is not None
    assert measured.start_s == 0.0


def test_noise_is_of_gradients_before_they_are_clipped(measured: Measurement) -> None:
    """After clipping to one length, the workers' gradients would be as long as any other."""
    assert measured.noise_samples == 4 * 32
    assert sum(trace for _, trace in measured.noise_terms) > 1


def test_the_workers_measured_the_same_steps(outcomes: list[ProcessEnd]) -> None:
    first, second = (measurement_of(outcome) for outcome in outcomes)
    assert outcomes[0].message.steps == outcomes[1].message.steps
    assert first.memory == second.memory
    assert first.noise_terms == second.noise_terms
    assert first.steps == second.steps == 5


def test_a_script_notices_nothing(outcomes: list[ProcessEnd], folder: Path) -> None:
    """Its rates follow its schedule, and its weights are what they would be without a profile."""
    lines = [line.split() for line in (folder / "work" / "steps-0.txt").read_text().splitlines()]
    rates = [float(rate) for rate, _ in lines]
    assert len(rates) == outcomes[0].message.steps > 20
    assert rates == pytest.approx([1e-3 * 0.5 ** (step // 10) for step in range(len(rates))])
    assert len({weights for _, weights in lines}) == 1


def test_what_was_seen_is_told(outcomes: list[ProcessEnd]) -> None:
    seen = outcomes[0].message.result
    assert {key: seen[key] for key in ("model", "optimizer", "accumulation", "forward_batch", "wrapped")} == {
        "model": "Sequential", "optimizer": "AdamW", "accumulation": 2, "forward_batch": 8, "wrapped": True,
    }  # fmt: skip


def test_epochs_and_evaluations_are_left_out_of_steps(tmp_path: Path) -> None:
    """An epoch has four steps and is followed by an evaluation of four batches."""
    arguments = ("--batch-size", "4", "--samples", "16", "--epochs", "1000")
    never_settled = QUICK.model_copy(update={"max_steps": 10, "ci_width": 1e-9})
    (outcome,) = profiled(SCRIPTS / "plain.py", arguments, tmp_path, search=never_settled)
    measured = measurement_of(outcome)
    assert measured.times is not None
    assert measured.times.step_time_s > measured.times.data_time_s
    halves = (measured.times.first_half_s, measured.times.second_half_s, measured.times.halves_scatter_s)
    assert halves == pytest.approx(halves_of(measured.samples["step"]), rel=1e-3, abs=1e-6)
    assert measured.round_steps["step"] * len(measured.samples["step"]) == 10


@pytest.mark.parametrize(("steps", "samples"), [(250, 0), (240, 1000)])
def test_data_that_are_made_for_all_steps_say_nothing_of_an_epoch(tmp_path: Path, steps: int, samples: int) -> None:
    """Megatron makes its data that way, for train_iters times the global batch."""
    arguments = ("shares no data", "4", "--train-iters", str(steps))
    (outcome,) = profiled(SCRIPTS / "misbehaving.py", arguments, tmp_path, counts_steps=True)
    assert (measurement_of(outcome).epoch_samples, outcome.message.result["samples"]) == (samples, samples)


def test_a_script_whose_updates_are_scaled_is_measured_with_the_copy_of_its_parameters(tmp_path: Path) -> None:
    arguments = ("--batch-size", "4", "--width", "100000", "--epochs", "1000")
    uses = []
    for apply in ("gradient", "update"):
        training = TrainingSpec(method="static", apply=apply)
        (outcome,) = profiled(SCRIPTS / "plain.py", arguments, tmp_path / apply, training=training)
        uses.append(measurement_of(outcome).memory)
    without, with_copy = uses
    assert without is not None
    assert with_copy is not None
    assert with_copy.peak_bytes - without.peak_bytes > 0.5 * without.parameter_bytes


def test_loader_processes_are_seen(tmp_path: Path) -> None:
    arguments = ("--batch-size", "4", "--loaders", "2", "--epochs", "1000")
    (outcome,) = profiled(SCRIPTS / "plain.py", arguments, tmp_path)
    measured = measurement_of(outcome)
    assert outcome.message.result["loader_workers"] == 2
    # whole rounds of the loader's processes
    assert measured.round_steps["step"] % 2 == 0


def test_batches_of_a_loader_without_a_length_are_taken_as_they_come(tmp_path: Path) -> None:
    arguments = ("--batch-size", "4", "--samples", "16", "--epochs", "1000", "--streamed")
    (outcome,) = profiled(SCRIPTS / "plain.py", arguments, tmp_path)
    measured = measurement_of(outcome)
    assert measured.epoch_samples == 0
    assert measured.times is not None


@pytest.mark.parametrize(
    ("sizes", "asked", "batch"),
    [
        ([], 8, 0),
        ([8] * 6 + [5], 8, 8),
        ([6] * 6 + [5], 8, 6),
        # epochs of two batches, seen from the second on
        ([5, 8, 5, 8, 5], 8, 8),
        ([5, 5, 8, 5], 8, 5),
        # batches that are drawn anew at every step, about as large as asked for, or not
        ([57, 66, 70, 61, 63], 64, 64),
        ([57, 66, 70, 61, 63], None, 63),
        ([27, 36, 40, 31, 33], 64, 33),
        # batches that are cut by their tokens: a mean of few is known only roughly
        ([17, 130, 52, 98, 41], 80, 80),
        # documents packed into as many tokens, mostly as many of them
        ([9] * 6 + [8, 8, 7, 6], 8, 8),
        ([9] * 9 + [4, 2], 8, 9),
    ],
)
def test_the_batch_is_the_usual_one_or_the_mean_of_drawn_ones(sizes: list[int], asked: int | None, batch: int) -> None:
    assert typical_batch(Counter(sizes), asked) == batch


@pytest.mark.parametrize(("sizes", "batch"), [([8] * 6 + [5], 8), ([57, 66, 70, 61, 63], 64), ([570, 661, 703], 0)])
def test_without_a_loader_sizes_that_differ_are_a_batch_only_near_what_was_asked_for(
    sizes: list[int], batch: int
) -> None:
    assert typical_batch(Counter(sizes), 64, has_loader=False) == batch


@pytest.mark.parametrize(
    ("sizes", "asked", "mean", "share"),
    [([8] * 6 + [5], 8, 0.0, 1.0), ([], 8, 0.0, 1.0), ([57, 66, 70, 61], None, 0.0, 1.0),
     ([570, 661, 703], 64, 0.0, 1.0), ([57, 66, 70, 61], 64, 0.0, 63.5 / 64), ([57, 66, 70, 61], 64, 60.0, 60 / 64),
     ([57, 66, 70, 61], 64, 20_000.0, 63.5 / 64), ([57, 66, 70, 61], 64, 2.0, 63.5 / 64)],
)  # fmt: skip
def test_batches_that_vary_have_fewer_samples_than_asked_for_or_more(
    sizes: list[int], asked: int | None, mean: float, share: float
) -> None:
    assert batch_share(Counter(sizes), asked, mean) == share


@pytest.mark.parametrize("world", [1, 2])
def test_a_script_that_takes_its_local_rank_as_an_option_gets_it_where_there_are_several(
    tmp_path: Path, world: int
) -> None:
    """torch.distributed.launch gives it that way; without it, such a script trains by itself."""
    script = tmp_path / "train.py"
    plain = (SCRIPTS / "plain.py").read_text()
    own = """parser.add_argument(
        "--local_rank", type=int, default=-1)
    options = parser.parse_args()
    world = 1 if options.local_rank == -1 else int(os.environ["WORLD_SIZE"])"""
    changed = plain.replace("options = parser.parse_args()", own)
    script.write_text(changed.replace('    world = int(os.environ.get("WORLD_SIZE", "1"))\n', ""))
    outcomes = profiled(script, ("--batch-size", "4", "--epochs", "9"), tmp_path, world)
    assert [measurement_of(each).nodes for each in outcomes] == [world] * world


def test_an_optimizer_that_has_counted_is_not_named_with_those_that_do_not_count() -> None:
    """As one that a script makes anew for each round of its training."""
    before, other = (torch.optim.SGD([torch.zeros(1)], 0.1) for _ in range(2))
    hooks = SimpleNamespace(others={before: True, other: False}, partners=SimpleNamespace(found=[]))
    assert vars(MeasuredSteps)["not_counted"].fget(SimpleNamespace(hooks=hooks)) == [other]
