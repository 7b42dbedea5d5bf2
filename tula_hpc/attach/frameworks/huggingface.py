"""Keep a training of Hugging Face's Trainer by its own checkpoints, and resume it where it stopped.

The Trainer resumes exactly from two places: the beginning of an epoch, and after a step whose next
batch is of the same epoch. It is saved there, once all that belongs to the step is over: logs,
evaluation, checkpoints of the user's own. Our checkpoints are in the run directory, so that the
Trainer's output folder is the same as without us.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, partialmethod, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset
from transformers import PreTrainedModel, Trainer, TrainerCallback

from tula_hpc.attach.frameworks.folders import FolderState
from tula_hpc.attach.hooks.patches import before
from tula_hpc.errors import InputError

if TYPE_CHECKING:
    from tula_hpc.attach.train.keeping import Keeper

# names of scores in the Trainer's evaluations, and in records
SCORES = {
    "eval_loss": "test_loss",
    "eval_accuracy": "test_accuracy",
    "eval_top5_accuracy": "test_top5_accuracy",
}
# arguments of the Trainer while it saves for us
OURS = {
    "save_strategy": "no",
    "save_only_model": False,
    "save_on_each_node": False,
    "save_total_limit": None,
    "push_to_hub": False,
}


def callback_for(keeper: Any) -> TrainerCallback:
    """Return a callback that does nothing unless a keeper is around."""
    return TrainerCallback() if keeper is None else KeptTrainer(keeper)


class KeptTrainer(TrainerCallback):  # type: ignore[misc] # no types are read from transformers
    """Callback of a Trainer whose training is kept."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.trainer: Any = None
        # the Trainer's folder in the checkpoint that it goes on from; None: there is none
        self.checkpoint: Path | None = None
        # the Trainer's step after which a stop was last looked for
        self.looked = 0
        self._wrap_train()

    def _wrap_train(self) -> None:
        """Make the Trainer that has this callback begin where it stopped."""
        original = Trainer.train

        @wraps(original)
        def train(
            trainer: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            if self in trainer.callback_handler.callbacks:
                resume_from_checkpoint = self.take(trainer) or resume_from_checkpoint
            return original(trainer, resume_from_checkpoint, *args, **kwargs)

        Trainer.train = train

    def take(self, trainer: Any) -> str | None:
        """Keep a Trainer that is about to train; return the checkpoint that it goes on from.

        Raises:
            InputError: This callback, or another one, has been in a training before.
        """
        if self.trainer is not None or self.keeper.has_begun:
            raise InputError(
                "serves one call of Trainer.train; leave it out of further calls",
                source="tula.trainer_callback",
            )
        self.trainer = trainer
        batch = self.keeper.settings.global_batch
        self.keeper.keep(
            {"trainer": FolderState("trainer", self._save, self._note, self.keeper, batch)}
        )
        if self.keeper.progress.loops:
            _train_no_further(trainer)
        history = self.keeper.history
        hooks = self.keeper.steps.hooks
        before((trainer,), "get_batch_samples", lambda: history.take_batches(hooks.loader))
        if self.checkpoint is None:
            return None
        # a resume is no start, and early stopping would count an evaluation at it
        trainer.args.eval_on_start = False
        # otherwise early stopping would forget how long it has waited
        trainer._load_callback_state = partial(_restore_callbacks, trainer)
        trainer._init_training_state = partial(self._place, trainer._init_training_state)
        module = sys.modules[Trainer.__module__]
        vars(module)["skip_first_batches"] = partial(_skip, vars(module)["skip_first_batches"])
        return str(self.checkpoint)

    def _place(
        self, original: Callable[..., Any], steps: int, of_epoch: int, epochs: int, *others: Any
    ) -> Any:
        """Return the epoch, and its batches, after which a Trainer goes on.

        For a stream the Trainer knows no epochs: it takes all steps for one epoch.
        """
        place = original(steps, of_epoch, epochs, *others)
        if epochs != sys.maxsize or self.trainer.args.ignore_data_skip:
            return place
        return self.keeper.progress.epoch, self.keeper.progress.batches

    def _save(self, folder: Path) -> None:
        changes = {**OURS, "output_dir": str(folder)}
        with _changed(self.trainer.args, changes), names_of_their_own():
            self.trainer._save_checkpoint(self.trainer.model_wrapped, trial=None)

    def _note(self, folder: Path) -> None:
        (self.checkpoint,) = folder.glob("checkpoint-*")

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """End the epoch before, whose evaluation is over, and begin this one."""
        self._end_open_epoch(is_last=False)
        self.keeper.begin_epoch()
        # samplers may draw random numbers; the Trainer restores its own with the first batch
        self.keeper.begin_draws()
        batches = self.keeper.progress.batches
        self.keeper.history.load_from(given["train_dataloader"], args.world_size)
        # from other data sets, the batches before are skipped by their indices
        is_stream = isinstance(self.trainer.train_dataset, IterableDataset)
        self.keeper.history.load_ahead(batches if is_stream else 0, self.keeper.saved_numbers)
        self.looked = state.global_step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save or stop after the step before, unless it was of another epoch."""
        self.keeper.history.catch_up()
        if state.global_step > self.looked:
            done = state.global_step - self.looked
            self.keeper.progress.batches += done * args.gradient_accumulation_steps
            self.looked = state.global_step
            self.keeper.end_batch()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the last epoch."""
        self._end_open_epoch(is_last=True)
        self.keeper.end()

    def _end_open_epoch(self, *, is_last: bool) -> None:
        if self.keeper.steps.in_epoch:
            self.keeper.end_epoch(is_last=is_last)

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Report the scores that records know."""
        known = given["metrics"].items()
        self.keeper.report({SCORES[name]: value for name, value in known if name in SCORES})

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Report the mean loss of the steps since the last log."""
        if self.keeper.steps.in_epoch and "loss" in given["logs"]:
            self.keeper.report({"train_loss": given["logs"]["loss"]})


@contextmanager
def names_of_their_own() -> Iterator[None]:
    """Make models save their weights within the block by the names that these have in memory.

    Many models save by the names of earlier versions, which a Trainer that goes on does not know:
    it warns, and trains on with weights that were drawn anew.
    """
    original = PreTrainedModel.save_pretrained
    if "save_original_format" not in inspect.signature(original).parameters:
        yield
        return
    with _changed(
        PreTrainedModel, {"save_pretrained": partialmethod(original, save_original_format=False)}
    ):
        yield


class _WithoutFirst:
    """A loader whose first batches are loaded and dropped."""

    def __init__(self, loader: Any, passed: int) -> None:
        self.loader = loader
        self.passed = passed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.loader, self.passed, None)


def _skip(original: Callable[[Any, int], Any], loader: Any, batches: int) -> Any:
    """Return a loader without its first batches.

    Loader processes load and drop them, as only loading advances their random numbers.
    """
    if isinstance(loader.dataset, IterableDataset) or not loader.num_workers:
        return original(loader, batches)
    return _WithoutFirst(loader, batches)


def _restore_callbacks(trainer: Any) -> None:
    """Give a Trainer's callbacks their states in its checkpoint, and make no new callbacks."""
    for name, saved in trainer.state.stateful_callbacks.items():
        given = [each for each in trainer.callback_handler.callbacks if type(each).__name__ == name]
        # a list if there are several callbacks of the class
        states = saved if isinstance(saved, list) else [saved]
        for callback, state in zip(given, states, strict=False):
            vars(callback).update(state.get("attributes", {}))


def _train_no_further(trainer: Any) -> None:
    """Make a Trainer load but not train, as it forgets that an earlier start stopped early."""
    original = trainer.set_initial_training_values

    @wraps(original)
    def values(*args: Any, **kwargs: Any) -> Any:
        _, *others = original(*args, **kwargs)
        return 0, *others

    # the first value, here 0, is the number of epochs
    trainer.set_initial_training_values = values


@contextmanager
def _changed(holder: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Give attributes of an object other values within the block."""
    own = {name: getattr(holder, name) for name in values}
    try:
        for name, value in values.items():
            setattr(holder, name, value)
        yield
    finally:
        for name, value in own.items():
            setattr(holder, name, value)
