"""With one added line, frameworks that are stopped and killed end as if undisturbed, bit for bit; real processes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import tula_hpc.attach as tula
from tests.attach.script_runs import BATCH, measurement_of, profiled
from tests.attach.test_keeping import EXITED, KILLED, STOPPED, Scenario, assert_same, assert_scales_go_on
from tests.forked_jobs import forking_scripts
from tula_hpc.attach.reporting import failed_by
from tula_hpc.attach.train.loaders import generator_states, set_generator_states
from tula_hpc.failure_kinds import Failure
from tula_hpc.records import read_metrics

SCRIPTS = Path(__file__).parent / "scripts"
TRAINER, LIGHTNING, ACCELERATE = (SCRIPTS / f"on_{name}.py" for name in ("trainer", "lightning", "accelerate"))
Alone = Callable[..., Scenario]


@pytest.fixture(scope="module", autouse=True)
def frameworks_are_imported() -> None:
    """Import once for all forked processes; imports at the top would be repeated by every worker of pytest-xdist."""
    import accelerate  # noqa: F401
    import lightning  # noqa: F401
    from transformers import GPT2LMHeadModel, Trainer, TrainingArguments  # noqa: F401


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """A function that trains with the script alone, once for each kind of training."""
    known: dict[tuple[object, ...], Scenario] = {}

    def scenario(script: Path, workers: int, *arguments: str) -> Scenario:
        key = (script, workers, *arguments)
        if key not in known:
            folder = tmp_path_factory.mktemp("alone") / "run"
            known[key] = Scenario(folder, workers, arguments, around=False, script=script)
            assert known[key].start() == [0] * workers
        return known[key]

    return scenario


class Case(NamedTuple):
    script: Path
    workers: int
    # a whole epoch has 8 steps: the first stop is within one, or at its end
    first: int
    arguments: tuple[str, ...] = ()
    # killed after the stop, then stopped once more
    is_killed: bool = False

    def __str__(self) -> str:
        return " ".join((self.script.stem, str(self.workers), str(self.first), *self.arguments))

    @property
    def disturbances(self) -> int:
        return 3 if self.is_killed else 1


CASES = [
    # more than a megabyte makes several buckets of gradients, whose order of addition matters with three workers
    Case(TRAINER, 3, 3, ("--width", "192", "--samples", "96", "--masks", "--loader-workers", "1")),
    Case(TRAINER, 2, 8, ("--accumulate", "2", "--samples", "256", "--group", "--masks"), is_killed=True),
    Case(LIGHTNING, 1, 3, ("--samples", "64", "--plateau")),
    # three workers as in the Trainer's case; the next start stops at the end of an epoch, too
    pytest.param(Case(LIGHTNING, 3, 8, ("--width", "700", "--samples", "192")), marks=pytest.mark.thorough),
    Case(LIGHTNING, 2, 8, ("--accumulate", "2", "--samples", "256", "--loader-workers", "1", "--anew"), is_killed=True),
    # a framework takes the next batch of a stream at once
    Case(LIGHTNING, 1, 3, ("--stream", "--samples", "64"), is_killed=True),
    # stopped during the second and during the first iteration over one of its loaders
    Case(LIGHTNING, 1, 5, ("--cycled", "--samples", "64"), is_killed=True),
    # the first worker sends the others their batches, and each evaluates with a loader of its own
    Case(TRAINER, 2, 3, ("--stream", "--masks")),
    Case(LIGHTNING, 1, 3, ("--by-hand", "--samples", "64", "--max-steps", "16")),
    Case(ACCELERATE, 2, 3, is_killed=True),
    pytest.param(Case(ACCELERATE, 2, 8, ("--accumulate", "2", "--samples", "256")), marks=pytest.mark.thorough),
    Case(ACCELERATE, 1, 3, ("--samples", "64", "--seedable")),
    # the first worker loads several batches before it sends the others theirs
    Case(ACCELERATE, 2, 3, ("--stream",)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_training_that_is_stopped_or_also_killed_ends_as_undisturbed(
    tmp_path: Path, alone: Alone, case: Case
) -> None:
    script, workers, first, arguments, is_killed = case
    whole = alone(script, workers, *arguments)
    scenario = Scenario(tmp_path / "run", workers, arguments, script=script)
    assert scenario.start(first, only=0) == [STOPPED] * workers
    if is_killed:
        # the kill comes in the second epoch
        assert KILLED in scenario.start(11 - first, signal.SIGKILL)
        assert scenario.start(2) == [STOPPED] * workers
    assert scenario.start() == [EXITED] * workers
    assert_same(whole, scenario, lines=set)
    # Lightning may have fetched the next batch of its stream; otherwise only the kill repeats work, of one start with
    # at most 8 steps of 2 passes
    assert 0 <= len(scenario.lines(0)) - len(whole.lines(0)) <= (16 if is_killed else 1)
    metrics = read_metrics(scenario.run.train().metrics_file)
    assert [row.epoch for row in metrics.epochs] == [1, 2]
    assert [row.samples_seen for row in metrics.epochs] == [n * 8 * 8 * workers for n in (1, 2)] or arguments
    assert all(row.test_accuracy is not None for row in metrics.epochs)
    details = [event.detail for event in scenario.run.events() if event.event == "resumed"]
    assert len(details) == case.disturbances
    # checkpoints that no other one names are deleted at the next save
    checkpoints = scenario.run.train().checkpoints
    assert len(list(checkpoints.glob("*.tula"))) == 2
    assert 2 <= sum(path.is_dir() for path in checkpoints.iterdir()) <= 4


def test_a_method_that_scales_goes_on_with_its_averages(tmp_path: Path) -> None:
    whole, cut = (Scenario(tmp_path / name, 2, (), script=TRAINER) for name in ("whole", "cut"))
    assert assert_scales_go_on(whole, cut, stop=6) > 8


@pytest.mark.parametrize("stop", [0, 15], ids=["undisturbed", "stopped after an evaluation in mid-epoch"])
def test_steps_and_scores_of_a_trainer_that_evaluates_within_epochs(tmp_path: Path, stop: int) -> None:
    """It evaluates the model without its wrapper; 15 batches make 8 steps of two, the last of which has one."""
    arguments = ("--accumulate", "2", "--samples", "120", "--eval-steps", "3")
    scenario = Scenario(tmp_path / "run", 1, arguments, script=TRAINER)
    if stop:
        assert scenario.start(stop) == [STOPPED]
    assert scenario.start() == [EXITED]
    metrics = read_metrics(scenario.run.train().metrics_file)
    assert [row.step for row in metrics.steps] == list(range(1, 17))
    assert all(row.test_loss is not None for row in metrics.epochs)


@pytest.mark.parametrize(
    ("script", "stop", "epochs"), [(LIGHTNING, 12, 2), (TRAINER, 18, 3)], ids=["lightning", "trainer"]
)
def test_a_training_that_stops_early_does_so_as_undisturbed_and_trains_no_further(
    tmp_path: Path, script: Path, stop: int, epochs: int
) -> None:
    """The training is stopped in its last epoch and killed after its end; it could have had four epochs."""
    arguments = ("--samples", "64", "--early")
    whole = Scenario(tmp_path / "whole", 1, arguments, around=False, script=script)
    scenario = Scenario(tmp_path / "run", 1, arguments, script=script)
    assert whole.start() == [0]
    assert [scenario.start(stop), scenario.start(), scenario.start()] == [[STOPPED], [KILLED], [EXITED]]
    assert_same(whole, scenario)
    losses = [row.test_loss for row in read_metrics(scenario.run.train().metrics_file).epochs]
    assert len(losses) == epochs
    assert None not in losses
    assert losses[0] != losses[1]
    if script is LIGHTNING:
        metrics = [(each.log / "metrics").read_text() for each in (whole, scenario)]
        assert metrics[0] == metrics[1]
    # the validation after the last epoch, in the start that has no epoch left
    if script is LIGHTNING:
        assert losses[1] == float((scenario.log / "validated").read_text())


def test_averages_that_are_stopped_in_their_first_epoch_go_on_as_undisturbed(tmp_path: Path, alone: Alone) -> None:
    arguments = ("--samples", "64", "--averaged")
    whole = alone(LIGHTNING, 1, *arguments)
    scenario = Scenario(tmp_path / "run", 1, arguments, script=LIGHTNING)
    assert [scenario.start(3), scenario.start(3), scenario.start()] == [[STOPPED], [STOPPED], [EXITED]]
    assert_same(whole, scenario, lines=set)


def test_layers_that_lightning_unfreezes_in_an_epoch_are_not_frozen_again(tmp_path: Path, alone: Alone) -> None:
    arguments = ("--samples", "64", "--unfrozen")
    whole = alone(LIGHTNING, 1, *arguments)
    scenario = Scenario(tmp_path / "run", 1, arguments, script=LIGHTNING)
    assert [scenario.start(11), scenario.start()] == [[STOPPED], [EXITED]]
    assert_same(whole, scenario)


@pytest.mark.parametrize(("how", "steps"), [("--search", 12), ("--finder", 20)])
def test_a_search_for_a_rate_is_not_part_of_the_training_after_it(
    tmp_path: Path, alone: Alone, how: str, steps: int
) -> None:
    """A Tuner searches at each start, a callback only at the first one, whose rate the others keep."""
    arguments = ("--samples", "64", how)
    whole = alone(LIGHTNING, 1, *arguments)
    scenario = Scenario(tmp_path / "run", 1, arguments, script=LIGHTNING)
    assert [scenario.start(steps + 3), scenario.start()] == [[STOPPED], [EXITED]]
    assert set(whole.lines(0)) == set(scenario.lines(0)) or how == "--search"
    assert whole.weights().keys() == scenario.weights().keys()
    assert all(torch.equal(value, scenario.weights()[name]) for name, value in whole.weights().items())
    metrics = read_metrics(scenario.run.train().metrics_file)
    assert [(row.step, row.samples_seen) for row in metrics.epochs] == [(8, 64), (16, 128)]


def test_of_several_validation_loaders_of_lightning_the_first_ones_scores_are_reported() -> None:
    from tula_hpc.attach.frameworks.lightning_fit import KeptFit

    logged = {"val_loss/dataloader_idx_0": 0.5, "val_loss/dataloader_idx_1": 2.0, "val/acc/dataloader_idx_0": 0.75}
    trainer = SimpleNamespace(sanity_checking=False, callback_metrics=logged)
    told: dict[str, float] = {}
    callback: Any = SimpleNamespace(keeper=SimpleNamespace(report=told.update))
    KeptFit.on_validation_end(callback, trainer, None)
    assert told == {"test_loss": 0.5, "test_accuracy": 0.75}


SEARCHES = """
import sys, lightning, torch
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader, TensorDataset

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.batch_size, self.layer = 4, torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        return self.layer(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(64, 4)), self.batch_size)

callbacks = [BatchSizeFinder()] if sys.argv[1] == "callback" else []
trainer = lightning.Trainer(max_epochs=2, logger=False, callbacks=callbacks, enable_progress_bar=False)
model = Net()
if not callbacks:
    Tuner(trainer).scale_batch_size(model)
trainer.fit(model)
"""


@pytest.mark.parametrize("how", ["callback", "tuner"])
def test_lightnings_search_for_a_batch_is_refused_by_its_name(tmp_path: Path, how: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SEARCHES)
    with forking_scripts():
        (outcome,) = profiled(script, (how,), tmp_path / "run")
    assert outcome.message.failure is Failure.BAD_INPUT
    words = "train.py searches for its batch by Lightning's BatchSizeFinder (or Tuner.scale_batch_size), but the sweep"
    assert outcome.message.detail.startswith(words)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_epoch_has_no_more_batches_than_lightning_is_limited_to(tmp_path: Path, workers: int) -> None:
    arguments = ("--batch-size", str(BATCH), "--epochs", "1000", "--samples", "64", "--limit-batches", "5")
    with forking_scripts():
        outcome, *_ = profiled(LIGHTNING, arguments, tmp_path, workers)
    assert measurement_of(outcome).epoch_samples == 5 * BATCH * workers
    assert outcome.message.result["samples"] == 5 * BATCH


WITHOUT_THE_LINE = """
import sys, lightning, torch
from torch.utils.data import DataLoader, TensorDataset

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        return self.layer(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
trainer = lightning.Trainer(max_epochs=2, devices=2, strategy="ddp", **quiet)
trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(256, 4)), int(sys.argv[2])))
"""


def test_several_workers_of_lightning_stop_after_the_same_step_without_the_line(tmp_path: Path) -> None:
    """Its own handler exchanges a tensor at once, for which the other worker may wait in vain."""
    script = tmp_path / "train.py"
    script.write_text(WITHOUT_THE_LINE)
    scenario = Scenario(tmp_path / "run", 2, (), script=script)
    assert scenario.start(3, only=0) == [STOPPED] * 2


def test_with_another_batch_a_framework_begins_anew_and_says_so(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path / "run", 1, ("--samples", "64"), script=TRAINER)
    assert scenario.start(3) == [STOPPED]
    assert scenario.start(batch=4) == [EXITED]
    (resumed,) = [event for event in scenario.run.events() if event.event == "resumed"]
    assert resumed.detail == "begins anew: the framework saved at a global batch of 8, now 4"
    assert read_metrics(scenario.run.train().metrics_file).epochs[-1].samples_seen == 2 * 64


def test_a_model_that_saves_other_names_is_kept_by_its_own_names(tmp_path: Path) -> None:
    """A ViT does that; a Trainer that resumes takes the names as they are."""
    from safetensors.torch import load_file
    from transformers import ViTConfig, ViTForImageClassification

    from tula_hpc.attach.frameworks.huggingface import names_of_their_own

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **sizes))
    with names_of_their_own():
        model.save_pretrained(tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors").keys() for name in ("ours", "theirs"))
    assert ours == model.state_dict().keys()
    assert theirs != ours


def test_a_loader_of_fabric_goes_on_in_the_order_of_its_pass() -> None:
    """The loader counts its passes, and its sampler orders by that number."""
    from lightning.fabric.wrappers import _FabricDataLoader

    data = TensorDataset(torch.arange(16))
    one, other = (_FabricDataLoader(DataLoader(data, 2, sampler=DistributedSampler(data, 2, 0))) for _ in range(2))
    list(one)
    begun = generator_states(one)
    set_generator_states(other, begun)
    assert torch.stack([batch for (batch,) in one]).equal(torch.stack([batch for (batch,) in other]))
    assert begun != generator_states(one)


def test_without_tula_around_the_callbacks_are_the_frameworks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning
    from transformers import TrainerCallback

    # otherwise scripts that later tests fork would see what these calls note
    monkeypatch.setattr(tula, "_kept", None)
    monkeypatch.setattr(tula, "_is_framework", False)
    assert type(tula.trainer_callback()) is TrainerCallback
    assert type(tula.lightning_callback()) is lightning.Callback


def test_lightning_on_nodes_that_it_does_not_know_is_refused_with_the_way_to_set_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="product") as caught:
        TorchElasticEnvironment().validate_settings(num_devices=1, num_nodes=1)
    assert "give {nodes} to its option for num_nodes" in failed_by(caught.value).detail
