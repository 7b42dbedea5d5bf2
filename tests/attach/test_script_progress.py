"""Epochs and times of a script's training, derived from its steps."""

from __future__ import annotations

import gc
import signal
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.attach.scripts.plain import Streamed
from tests.known import known
from tests.run_factory import candidate, measurement, plan, write_plan
from tula_hpc.analysis.run_contents import median_epoch_s
from tula_hpc.attach import reporting
from tula_hpc.attach.hooks import step_times
from tula_hpc.attach.hooks.step_hooks import MOST_AWAITED
from tula_hpc.attach.reporting import ChildSpec, read_message
from tula_hpc.attach.script import Script
from tula_hpc.attach.train import script_drift, script_training
from tula_hpc.attach.train.resume_point import ScriptProgress, TrainSettings
from tula_hpc.attach.train.script_drift import DriftSettings, drift_settings
from tula_hpc.attach.train.script_training import ScriptTraining
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.ddp import agreement
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.records import Configuration, Drift, Metrics, RunDirectory, StepParts, append_record, read_metrics
from tula_hpc.training import metrics_writer

STEP_S, WAIT_S = 1.0, 0.25
# Unix time of the job's start
BEGAN_AT = 1000.0


class Clock:
    """A clock that advances only when a test sets it."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (script_training, step_times, script_drift, agreement):
        monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(script_training, "unix_time", lambda: BEGAN_AT + made.now)
    return made


class WatchedTraining:
    """A training of one worker whose steps the test reports; it is never asked to stop."""

    def __init__(
        self,
        folder: Path,
        clock: Clock,
        samples: int,
        drift: DriftSettings | None = None,
        *,
        counts_steps: bool = False,
    ) -> None:
        self.run, self.clock = RunDirectory(folder / "run").create(), clock
        self.run.make_train()
        settings = TrainSettings(
            root=self.run.root, label="main", job_id="1", samples=samples, global_batch=8, log_interval_steps=3,
            between_s=3600.0, drift=drift, job_began_at=BEGAN_AT, counts_steps=counts_steps,
        )  # fmt: skip
        message_file = folder / "message.json"
        spec = ChildSpec(
            mode="train", program=Script(Path("x.py"), None, ()), home=folder, message_file=message_file, parent=0,
            settings=settings.model_dump(),
        )  # fmt: skip
        self.training = ScriptTraining(spec)
        self.training.hooks.inner_model = torch.nn.Linear(2, 2)

    def step(
        self, samples: int = 8, parts: int = 1, *, evaluated_s: float = 0.0, slept_s: float = 0.0, idle: int = 0
    ) -> None:
        """Report a step of `samples`, after a wait and perhaps an evaluation or an unused pass of `idle` samples."""
        if evaluated_s:
            self.training.evaluating()
            self.clock.now += evaluated_s
        self.clock.now += slept_s + WAIT_S
        if idle:
            self.training.forward_begins(idle)
        for _ in range(parts):
            self.training.forward_begins(samples // parts)
            self.training.hooks.backward.count += 1
            self.clock.now += STEP_S / parts
        self.training.gradients_ready()
        self.training.step_ends()

    def metrics(self) -> Metrics:
        self.training.metrics.flush()
        return read_metrics(self.run.train().metrics_file)


def why_ended(watched: WatchedTraining, monkeypatch: pytest.MonkeyPatch) -> str:
    """Take a step that ends the process at once, which the script cannot catch; return the reason."""
    monkeypatch.setattr(reporting, "leave", sys.exit)
    with pytest.raises(SystemExit):
        watched.step()
    return known(read_message(watched.training.spec.message_file)).detail


def test_lines_of_steps_before_an_evaluation_do_not_wait_for_its_end(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_writer, "time", clock)
    monkeypatch.setattr(metrics_writer, "GATHER_S", 10.0)
    watched = WatchedTraining(tmp_path, clock, samples=800)
    for _ in range(6):
        watched.step()

    def evaluate() -> list[int]:
        watched.training.evaluating()
        return [row.step for row in read_metrics(watched.run.train().metrics_file).steps]

    assert evaluate() == [3]
    clock.now += 10.0
    assert evaluate() == [3, 6]


def test_epochs_end_with_their_last_whole_batch(tmp_path: Path, clock: Clock) -> None:
    watched = WatchedTraining(tmp_path, clock, samples=29)
    for _ in range(2 * 3):
        watched.step()
    rows = watched.metrics()
    assert [(row.epoch, row.step, row.steps) for row in rows.epochs] == [(1, 3, 3), (2, 6, 3)]
    assert [row.epoch for row in rows.steps] == [1.0, 2.0]


def test_further_optimizers_of_a_step_are_no_wait_for_batches(tmp_path: Path, clock: Clock) -> None:
    """A script that loads in its own way is taken to load from a step's end to the next forward pass."""
    watched = WatchedTraining(tmp_path, clock, samples=10**6)
    partner = torch.optim.SGD([torch.zeros(2)], 0.1)
    for _ in range(2 * 3):
        watched.step()
        clock.now += 0.5
        watched.training.partner_stepped(partner)
    row = watched.metrics().steps[-1]
    assert (row.step_time_s, row.data_time_s) == (WAIT_S + STEP_S + 0.5, WAIT_S)


def test_steps_are_timed_on_the_gpu_of_the_model(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that names its GPU may never select it, so that torch's current GPU is another worker's."""
    gpu, waited = torch.device("cuda", 1), list[torch.device]()
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(step_times, "device_mark", lambda device: None)
    watched = WatchedTraining(tmp_path, clock, samples=29)
    monkeypatch.setattr(watched.training.hooks.inner_model, "parameters", lambda: iter([SimpleNamespace(device=gpu)]))
    for _ in range(3):
        watched.step()
    assert waited == [gpu]
    assert watched.training._peers.device == gpu


def test_layers_that_are_unfrozen_later_belong_to_the_same_model(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile may have ended in either stage; the script has another optimizer for the second."""
    for place, measured in enumerate((2, 6, 5)):
        folder = tmp_path / str(place)
        folder.mkdir()
        watched = WatchedTraining(folder, clock, samples=29)
        model = torch.nn.Linear(2, 2)
        watched.training.hooks.inner_model = model
        watched.training.settings = watched.training.settings.model_copy(update={"parameters": measured})
        model.weight.requires_grad = False
        if measured == 5:
            assert why_ended(watched, monkeypatch).startswith("the model has 2 parameters now, 5 when it was measured")
            continue
        watched.step()
        model.weight.requires_grad = True
        watched.training.begins_anew()
        watched.step()
        assert watched.training.progress.step == 2


def test_workers_agree_at_the_same_steps_wherever_each_sees_an_epoch_end(tmp_path: Path, clock: Clock) -> None:
    """A worker that has counted fewer samples reaches the end of an epoch a step later."""
    watched = WatchedTraining(tmp_path, clock, samples=29)
    for _ in range(2 * 3):
        watched.step()
    assert known(watched.training._agreement).steps == 2 * 3


def test_samples_of_an_evaluation_that_takes_gradients_count_for_no_epoch(tmp_path: Path, clock: Clock) -> None:
    watched = WatchedTraining(tmp_path, clock, samples=29)
    for step in range(2 * 3):
        watched.step(idle=500 if step in {1, 3} else 0)
    assert [(row.epoch, row.step, row.samples_seen) for row in watched.metrics().epochs] == [(1, 3, 24), (2, 6, 48)]


def test_passes_that_become_more_are_all_counted(tmp_path: Path, clock: Clock) -> None:
    """Some scripts accumulate gradients over more passes in later epochs."""
    watched = WatchedTraining(tmp_path, clock, samples=32)
    for parts in (1, 2, 4):
        for _ in range(4 // parts):
            # a policy acts before it is trained
            watched.training.forward_begins(8)
            watched.training.pass_unused(8)
            watched.step(8 * parts, parts)
    watched.training.ended(0)
    rows = watched.metrics().epochs
    assert [(row.epoch, row.step, row.samples_seen) for row in rows] == [(1, 4, 32), (2, 6, 64), (3, 7, 96)]


def test_all_passes_of_a_first_step_count_though_the_model_was_not_known_before(tmp_path: Path, clock: Clock) -> None:
    watched = WatchedTraining(tmp_path, clock, samples=16)
    # only the first of its two parts
    watched.training.hooks.backward.count = 1
    watched.step(4)
    for _ in range(3):
        watched.step(8, 2)
    assert [(row.step, row.samples_seen) for row in watched.metrics().epochs] == [(2, 16), (4, 32)]


def test_a_first_step_of_fewer_passes_than_later_ones_counts_these_alone(tmp_path: Path, clock: Clock) -> None:
    """This is so for YOLO, whose model is not known before that step."""
    watched = WatchedTraining(tmp_path, clock, samples=16)
    watched.training.settings = watched.training.settings.model_copy(update={"forward_batch": 2})
    watched.training.hooks.backward.count = 1
    watched.training.gradients_ready()
    watched.training.step_ends()
    watched.step(6, 3)
    assert watched.training.progress.samples_seen == 8


def test_short_steps_of_a_warm_up_belong_to_the_first_epoch(tmp_path: Path, clock: Clock) -> None:
    """YOLO takes more and more passes for its first steps."""
    watched = WatchedTraining(tmp_path, clock, samples=32)
    for parts in (1, 3, *[4] * 7):
        watched.step(2 * parts, parts)
    assert [(row.step, row.samples_seen) for row in watched.metrics().epochs] == [(5, 32), (9, 64)]


def test_steps_of_a_search_for_a_rate_and_after_the_last_epoch_do_not_count(tmp_path: Path, clock: Clock) -> None:
    watched = WatchedTraining(tmp_path, clock, samples=32)
    watched.training.settings = watched.training.settings.model_copy(update={"epochs": 2})
    for _ in range(2):
        watched.step()
    # another optimizer has taken a step, whose pass was seen
    assert watched.training.trains_anew(1)
    watched.step(16, 2)
    for _ in range(2):
        watched.step()
    # all layers are trained, after the last ones
    assert watched.training.trains_anew()
    for _ in range(4):
        watched.step()
    assert [(row.epoch, row.step, row.samples_seen) for row in watched.metrics().epochs] == [(1, 4, 32), (2, 8, 64)]
    assert not watched.training.trains_anew(1)


def test_a_further_training_obeys_a_stop_and_what_it_has_let_go_is_not_kept_in_memory(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for the folds of a cross-validation, each with a model and an optimizer of its own."""
    watched = WatchedTraining(tmp_path, clock, samples=32)
    hooks = watched.training.hooks
    stopped_at: list[int] = []
    hooks.model = hooks.inner_model
    hooks.optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1)
    further = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1)
    hooks._before_step(further, (further,), {})
    assert (hooks.further_steps, list(hooks.others)) == (1, [further])
    monkeypatch.setattr(ScriptTraining, "leave_stopped", lambda training: stopped_at.append(hooks.further_steps))
    watched.training.stop.received = signal.SIGTERM
    for _ in range(MOST_AWAITED):
        hooks._before_step(further, (further,), {})
    assert stopped_at == [MOST_AWAITED, MOST_AWAITED + 1]
    known = weakref.ref(further)
    del further
    gc.collect()
    assert known() is None


def test_nothing_that_a_kept_script_trains_after_its_epochs_counts(tmp_path: Path, clock: Clock) -> None:
    """A start that resumed after the epochs has no model that counts, for which it could be taken."""
    training = WatchedTraining(tmp_path, clock, samples=32).training
    hooks = training.hooks
    training.be_kept(begins=False)
    model = torch.nn.Linear(2, 2)
    probe = torch.optim.SGD(model.parameters(), 0.1)
    hooks._before_step(probe, (probe,), {})
    hooks._after_step(probe)
    assert (hooks.optimizer, hooks.further_steps, training.progress.step) == (None, 1, 0)
    assert not training.trains_anew()
    training.in_epoch = True
    hooks._before_step(probe, (probe,), {})
    assert (hooks.optimizer, training.trains_anew()) == (probe, True)


def test_a_shorter_batch_is_the_last_of_its_epoch(tmp_path: Path, clock: Clock) -> None:
    watched = WatchedTraining(tmp_path, clock, samples=29)
    for _ in range(2):
        for samples in (8, 8, 8, 5):
            watched.step(samples)
    rows = watched.metrics().epochs
    assert [(row.epoch, row.step, row.samples_seen) for row in rows] == [(1, 3, 24), (2, 7, 29 + 24)]


def test_short_batches_within_a_pass_shift_no_later_epoch(tmp_path: Path, clock: Clock) -> None:
    """A sampler of buckets gives out a short batch for each of them, in any order."""
    watched = WatchedTraining(tmp_path, clock, samples=22)
    for sizes in ([8, 8, 2, 2, 2], [8, 2, 2, 2, 8], [8, 8, 2, 2, 2]):
        buckets = [list(range(size)) for size in sizes]
        batches = iter(DataLoader(TensorDataset(torch.zeros(22)), batch_sampler=buckets))
        watched.training.loading_begins(batches)
        for size in sizes:
            watched.training.hooks.next_batch(batches, torch.zeros(size))
            watched.step(size)
    rows = watched.metrics().epochs
    assert [(row.step, row.samples_seen) for row in rows] == [(2, 16), (10, 44), (12, 60)]


@pytest.mark.parametrize(("offset", "left"), [(12, 0), (376, 376)])
def test_only_the_short_end_of_a_pass_belongs_to_the_epoch_before(offset: int, left: int) -> None:
    """Batches by tokens differ between workers, so that on one of them an epoch may end within the next pass."""
    progress = ScriptProgress(epoch=1, samples_seen=778, offset=offset, pass_began=378)
    progress.begin_pass(carried=0, samples=400, batch=16)
    assert progress.offset == left


def test_a_step_over_the_end_of_a_pass_belongs_to_both_epochs(tmp_path: Path, clock: Clock) -> None:
    """Such a script takes two batches for a step, from a loader that starts again and again."""
    watched = WatchedTraining(tmp_path, clock, samples=18)
    loader = DataLoader(TensorDataset(torch.zeros(18)), batch_size=4)
    passes = iter([4, 4, 4, 4, 2] * 2)
    for _ in range(5):
        for _ in range(2):
            if watched.training.progress.samples_seen + watched.training._samples in {0, 18}:
                batches = iter(loader)
                watched.training.loading_begins(batches)
            samples = next(passes)
            watched.training.hooks.next_batch(batches, torch.zeros(samples))
            watched.training.forward_begins(samples)
        watched.training.gradients_ready()
        watched.training.step_ends()
    watched.training.ended(0)
    rows = watched.metrics().epochs
    assert [(row.epoch, row.step, row.samples_seen) for row in rows] == [(1, 3, 22), (2, 5, 36)]


def test_a_streams_epoch_is_as_long_as_the_sweep_says(tmp_path: Path, clock: Clock) -> None:
    watched = WatchedTraining(tmp_path, clock, samples=16)
    stream = iter(DataLoader(Streamed(TensorDataset(torch.zeros(64))), batch_size=8))
    for _ in range(4):
        watched.training.hooks.next_batch(stream, torch.zeros(8))
        watched.step()
    assert [row.samples_seen for row in watched.metrics().epochs] == [16, 32]


@pytest.mark.parametrize("begins_anew", [False, True])
def test_a_step_over_the_end_of_an_epoch_is_of_both_where_the_pass_goes_on(
    tmp_path: Path, clock: Clock, begins_anew: bool
) -> None:
    """This holds for a sampler without an end; if a stream begins anew, the rest belongs to no other epoch."""
    watched = WatchedTraining(tmp_path, clock, samples=20)
    data = Streamed(TensorDataset(torch.zeros(64)))
    stream = iter(DataLoader(data, batch_size=8))
    for step in range(10):
        if begins_anew and step and step % 3 == 0:
            watched.training.loading_begins(stream)
        watched.training.hooks.next_batch(stream, torch.zeros(8))
        watched.step()
    watched.training.ended(0)
    expected = [3, 6, 9] if begins_anew else [3, 5, 8, 10]
    assert [row.step for row in watched.metrics().epochs] == expected


def test_epochs_of_a_script_that_takes_a_number_of_steps_are_those_of_the_plan(tmp_path: Path, clock: Clock) -> None:
    """Full batches leave out four of 20 samples in a pass, which add up to further steps and passes."""
    watched = WatchedTraining(tmp_path, clock, samples=20, counts_steps=True)
    loader = DataLoader(TensorDataset(torch.zeros(20)), batch_size=8, drop_last=True)
    for _ in range(5):
        batches = iter(loader)
        watched.training.loading_begins(batches)
        for _ in range(2):
            watched.training.hooks.next_batch(batches, torch.zeros(8))
            watched.step()
    watched.training.ended(0)
    assert [row.step for row in watched.metrics().epochs] == [3, 5, 8, 10]


def test_an_epoch_of_loaders_that_take_turns_has_the_samples_of_all(tmp_path: Path, clock: Clock) -> None:
    """As in a training on several tasks, each with a data set of its own."""
    watched = WatchedTraining(tmp_path, clock, samples=16 + 32)
    sets = [TensorDataset(torch.zeros(samples)) for samples in (16, 32)]
    for _ in range(2):
        few, many = (iter(DataLoader(each, batch_size=8)) for each in sets)
        for batches in (few, many, many, few, many, many):
            watched.training.hooks.next_batch(batches, torch.zeros(8))
            watched.step()
    watched.training.ended(0)
    assert [(row.step, row.samples_seen) for row in watched.metrics().epochs] == [(6, 48), (12, 96)]


def test_a_rate_that_an_optimizer_sets_itself_is_logged_as_none(tmp_path: Path, clock: Clock) -> None:
    """Adafactor has None for it."""
    watched = WatchedTraining(tmp_path, clock, samples=24)
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.1)
    optimizer.param_groups[0]["lr"] = None
    watched.training.hooks.optimizer = optimizer
    for _ in range(3):
        watched.step()
    assert [row.lr for row in watched.metrics().steps] == [0.0]


def test_a_script_that_halves_its_batch_goes_on_with_its_epochs(tmp_path: Path, clock: Clock) -> None:
    """A script may do so to train on larger images later."""
    watched = WatchedTraining(tmp_path, clock, samples=32)
    for samples in (8, *[4] * 2):
        for _ in range(32 // samples):
            watched.step(samples)
    watched.training.ended(0)
    assert [row.samples_seen for row in watched.metrics().epochs] == [32, 64, 96]


@pytest.mark.parametrize("known_samples", [29, 35])
def test_a_loader_that_gives_out_a_shorter_batch_ends_the_epoch_with_it(
    tmp_path: Path, clock: Clock, known_samples: int
) -> None:
    """This holds even if the sweep states more samples."""
    watched = WatchedTraining(tmp_path, clock, samples=known_samples)
    loader = iter(DataLoader(TensorDataset(torch.zeros(29)), batch_size=8))
    for _ in range(2):
        for samples in (8, 8, 8, 5):
            watched.training.hooks.next_batch(loader, torch.zeros(samples))
            watched.step(samples)
        clock.now += 10.0
    watched.training.ended(0)
    rows = watched.metrics().epochs
    assert [(row.epoch, row.step, row.samples_seen) for row in rows] == [(1, 4, 29), (2, 8, 2 * 29)]
    assert [row.evaluation_time_s for row in rows] == [10.0 + WAIT_S, 10.0]


def test_an_epoch_takes_its_steps_and_waits_but_no_evaluation(tmp_path: Path, clock: Clock) -> None:
    watched = WatchedTraining(tmp_path, clock, samples=32)
    for _ in range(2):
        watched.step(parts=2)
        watched.step()
        watched.step(evaluated_s=100.0)
        watched.step()
        clock.now += 1000.0
    first, second = watched.metrics().epochs
    # the time of the first step, for which nothing was waited yet, belongs to the start
    assert first.epoch_time_s == pytest.approx(4 * (STEP_S + WAIT_S))
    assert second.epoch_time_s == pytest.approx(4 * (STEP_S + WAIT_S))


def test_an_epoch_of_a_first_step_alone_has_no_time(tmp_path: Path, clock: Clock) -> None:
    watched = WatchedTraining(tmp_path, clock, samples=8)
    watched.step()
    watched.step()
    rows = watched.metrics().epochs
    assert [(row.steps, row.epoch_time_s) for row in rows] == [(0, 0.0), (1, STEP_S)]
    assert median_epoch_s(rows) == STEP_S


def test_an_evaluation_after_each_epoch_counts_for_no_step_however_few_it_has(tmp_path: Path, clock: Clock) -> None:
    watched = WatchedTraining(tmp_path, clock, samples=8)
    loader = iter(DataLoader(TensorDataset(torch.zeros(8)), batch_size=8))
    for _ in range(30):
        watched.training.loading_begins(loader)
        watched.step(evaluated_s=2.0)
    assert watched.metrics().steps[-1].step_time_s == pytest.approx(STEP_S)


def test_a_long_rare_gap_counts_for_no_step(tmp_path: Path, clock: Clock) -> None:
    """Such gaps come from a policy that plays between its steps, or from a checkpoint."""
    watched = WatchedTraining(tmp_path, clock, samples=100 * 8)
    for step in range(100):
        watched.step(slept_s=50.0 if step % 25 == 24 else 0.0)
    clock.now += 7.0
    watched.training.ended(0)
    (epoch,) = watched.metrics().epochs
    assert epoch.epoch_time_s == pytest.approx(100 * (STEP_S + WAIT_S))
    assert epoch.evaluation_time_s == pytest.approx(4 * (50.0 + WAIT_S) + 7.0)


def test_passes_without_gradients_at_every_step_are_a_part_of_it(tmp_path: Path, clock: Clock) -> None:
    watched = WatchedTraining(tmp_path, clock, samples=30 * 8)
    for _ in range(30):
        watched.step(evaluated_s=2.0)
    assert watched.metrics().steps[-1].step_time_s == pytest.approx(STEP_S + WAIT_S + 2.0)


def test_a_pass_without_gradients_within_a_step_is_no_pause(tmp_path: Path, clock: Clock) -> None:
    watched = WatchedTraining(tmp_path, clock, samples=6 * 8)
    for _ in range(3):
        watched.step()
        watched.training.forward_begins(8)
        watched.training.evaluating()
        watched.training.step_ends()
    first, second = watched.metrics().steps
    # every second step takes no time here
    assert first.step_time_s == pytest.approx((2 * STEP_S + WAIT_S) / 3)
    assert second.step_time_s == pytest.approx((STEP_S + WAIT_S) / 3)


def test_only_a_loaders_part_of_a_gap_is_waiting(tmp_path: Path, clock: Clock) -> None:
    watched = WatchedTraining(tmp_path, clock, samples=4 * 8)
    watched.step()
    # the loader of an evaluation
    watched.training.batch_loaded(None, 50.0)
    watched.training.evaluating()
    # all batches without a pass, as in `len(list(loader))`
    watched.training.batch_loaded(None, 50.0)
    watched.training.loading_begins(None)
    for _ in range(3):
        watched.training.batch_loaded(None, 0.0625)
        watched.training.batch_loaded(None, 0.0625)
        watched.step(parts=2)
    first, second = watched.metrics().steps
    assert (first.step, second.step) == (3, 4)
    assert first.data_time_s == pytest.approx(2 * 0.125 / 3)
    assert second.data_time_s == pytest.approx(0.125)
    assert second.step_time_s == pytest.approx(STEP_S + WAIT_S)


def test_time_outside_an_epochs_steps_is_in_its_line(tmp_path: Path, clock: Clock) -> None:
    watched = WatchedTraining(tmp_path, clock, samples=16)
    for _ in range(2):
        watched.step()
        # one score within the epoch, one after it
        watched.step(evaluated_s=10.0)
        watched.training.report({"test_accuracy": 0.5})
        clock.now += 100.0
    watched.training.leave_out(7.0)
    watched.training.ended(0)
    first, second = watched.metrics().epochs
    assert first.evaluation_time_s == pytest.approx(10.0 + 100.0 + 2 * WAIT_S)
    assert second.evaluation_time_s == pytest.approx(10.0 + 100.0 + WAIT_S - 7.0)
    # lines of one epoch are combined
    known = {"evaluation_time_s": None, "test_accuracy": None, "test_loss": 0.25}
    append_record(watched.run.train().metrics_file, first.model_copy(update=known))
    first, _ = watched.metrics().epochs
    assert (first.test_loss, first.test_accuracy, first.evaluation_time_s is None) == (0.25, 0.5, False)


def test_a_loss_that_is_reported_within_a_step_is_of_its_epoch(tmp_path: Path, clock: Clock) -> None:
    watched = WatchedTraining(tmp_path, clock, samples=8)
    for loss in (3.0, 2.0, 1.0):
        watched.training.forward_begins(8)
        watched.training.report({"train_loss": loss})
        watched.training.step_ends()
    assert [row.train_loss for row in watched.metrics().epochs] == [3.0, 2.0, 1.0]


@pytest.mark.parametrize("parts", [1, 0], ids=["seen", "a first pass that nobody saw"])
def test_a_start_lasts_until_the_end_of_the_first_step(tmp_path: Path, clock: Clock, parts: int) -> None:
    watched = WatchedTraining(tmp_path, clock, samples=16)
    clock.now += 30.0
    watched.step(parts=parts)
    watched.step()
    so_far = watched.training.ended(0).result
    assert so_far["starts_s"] == 30.0 + WAIT_S + parts * STEP_S
    assert so_far["started_at"] == BEGAN_AT + so_far["starts_s"]


def test_a_start_after_others_adds_to_them(tmp_path: Path, clock: Clock) -> None:
    watched = WatchedTraining(tmp_path, clock, samples=16)
    watched.training.progress.starts_s = 40.0
    watched.training.progress.started_at = 7.0
    watched.step()
    so_far = watched.training.ended(0).result
    assert (so_far["starts_s"], so_far["started_at"]) == (40.0 + WAIT_S + STEP_S, 7.0)


def test_scores_are_of_the_epoch_that_was_over(tmp_path: Path, clock: Clock) -> None:
    watched = WatchedTraining(tmp_path, clock, samples=16)
    for accuracy in (50.0, 0.6):
        watched.step()
        watched.training.report({"test_accuracy": accuracy, "test_loss": float("nan"), "other": 1.0})
        watched.step()
    assert [row.test_accuracy for row in watched.metrics().epochs] == [0.5, 0.6]
    assert [row.test_loss for row in watched.metrics().epochs] == [None, None]


def test_scores_after_the_last_epoch_are_added_to_it(tmp_path: Path, clock: Clock) -> None:
    watched = WatchedTraining(tmp_path, clock, samples=8)
    watched.training.add_to_last_epoch()
    for _ in range(2):
        watched.step()
    watched.training.report({"test_accuracy": 0.5})
    watched.training.add_to_last_epoch()
    watched.training.report({"test_loss": 2.0})
    watched.training.add_to_last_epoch()
    rows = watched.metrics().epochs
    assert [(row.epoch, row.test_accuracy, row.test_loss) for row in rows] == [(1, None, None), (2, 0.5, 2.0)]


def test_another_model_than_was_measured_is_refused(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = WatchedTraining(tmp_path, clock, samples=16)
    watched.training.settings = watched.training.settings.model_copy(update={"parameters": 7})
    watched.training.hooks.inner_model = torch.nn.Linear(2, 2)
    assert why_ended(watched, monkeypatch).startswith("the model has 6 parameters now, 7 when it was measured")


def test_a_pass_without_a_gradient_does_not_count_for_a_steps_samples(tmp_path: Path, clock: Clock) -> None:
    watched = WatchedTraining(tmp_path, clock, samples=16)
    for _ in range(2):
        watched.training.forward_begins(3)
        watched.training.pass_unused(3)
        watched.step()
    assert [(row.epoch, row.step, row.samples_seen) for row in watched.metrics().epochs] == [(1, 2, 16)]


def test_passes_of_a_policy_before_its_loader_begins_count_for_no_epoch(tmp_path: Path, clock: Clock) -> None:
    watched = WatchedTraining(tmp_path, clock, samples=32)
    for _ in range(8):
        for _ in range(2):
            watched.training.forward_begins(8)
        watched.training.loading_begins(object())
        watched.training.forward_begins(8)
        watched.training.hooks.backward.count += 1
        for _ in range(2):
            watched.training.pass_unused(8)
        watched.training.gradients_ready()
        watched.training.step_ends()
    assert [row.step for row in watched.metrics().epochs] == [4, 8]


def test_only_the_trained_layers_of_a_partly_frozen_model_count(tmp_path: Path, clock: Clock) -> None:
    watched = WatchedTraining(tmp_path, clock, samples=16)
    watched.training.settings = watched.training.settings.model_copy(update={"parameters": 4})
    known(watched.training.hooks.inner_model).bias.requires_grad = False
    watched.step()


AT = Configuration(1, 1, 8)


@pytest.mark.parametrize(
    ("data_s", "part"), [(WAIT_S, "compute"), (WAIT_S - 0.6, "loader")], ids=["slow computation", "slow loader"]
)
def test_steps_that_depart_from_the_plan_are_reported_and_so_is_their_end(
    tmp_path: Path, clock: Clock, data_s: float, part: str
) -> None:
    """The steps first take twice as long as planned, and then as long as planned."""
    planned_s = (STEP_S + WAIT_S) / 2
    expected = StepParts(data_time_s=data_s, compute_time_s=0.3, allreduce_time_s=0.0)
    settings = DriftSettings(
        prediction=(planned_s, 0.9 * planned_s, 1.1 * planned_s), window_s=1.0, expected=expected, configuration=AT
    )
    watched = WatchedTraining(tmp_path, clock, 8 * 1000, settings)
    for _ in range(60):
        watched.step()
    (event,) = (each for each in watched.run.events() if each.event == "drifted")
    assert event.data["ratio"] == pytest.approx(2.0)
    assert event.data["part"] == part
    drift = Drift.model_validate_json(watched.run.train().drift_file.read_bytes())
    assert (drift.configuration, drift.part) == (AT, part)
    for _ in range(60):
        # without this, the wait of a step that takes as long as planned would be negative
        clock.now -= planned_s
        watched.step()
    assert [each.event for each in watched.run.events() if each.stage == "train"] == ["drifted", "recovered"]
    assert not watched.run.train().drift_file.exists()


def job(root: Path, **training: object) -> TrainJob:
    workload = {"script": "/x.py", "arguments": ["{local_batch}"], "samples": 80, "epochs": 1}
    tables = {"name": "x", "workload": workload, "training": training}
    return TrainJob(SweepSpec.model_validate(tables, context={"check_paths": False}), ClusterSpec(), AT, root)


def test_steps_are_compared_with_the_plan_and_the_profile(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run").create()
    run.make_train()
    assert drift_settings(job(run.root)) is None
    there = candidate(AT)
    append_record(run.profile / "1.jsonl", measurement(AT))
    write_plan(run, plan([there] * 4, chosen=there, fallbacks=[]))
    drift = known(drift_settings(job(run.root)))
    assert drift.prediction[0] == there.step_time_s
    times = known(measurement(AT).times)
    assert (drift.side, drift.expected.compute_time_s) == (0, times.compute_time_s)
    open_one = Drift(**AT._asdict(), measured_s=1.0, predicted_s=2.0, part="loader", measured=drift.expected,
                     expected=drift.expected)  # fmt: skip
    run.train().drift_file.write_text(open_one.model_dump_json())
    again = known(drift_settings(job(run.root)))
    assert again.side == -1
    assert drift_settings(job(run.root, drift=False)) is None
