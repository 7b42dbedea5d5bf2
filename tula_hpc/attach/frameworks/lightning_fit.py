"""Keep a training of Lightning's Trainer by its own checkpoints, and resume it where it stopped.

Lightning restores its loops in mid-epoch, but neither random numbers nor the place in the data
loader. Both are noted when it begins to go through the loader, and restored at that moment. It is
saved where a batch or an epoch is over with all that belongs to it: validation, schedules,
callbacks.
"""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.parsing import (
    lightning_getattr,
    lightning_hasattr,
    lightning_setattr,
)

from tula_hpc.attach.frameworks.folders import FolderState
from tula_hpc.attach.hooks.patches import after
from tula_hpc.errors import InputError

if TYPE_CHECKING:
    from tula_hpc.attach.train.keeping import Keeper

# names under which users log each score by the end of a validation, preferred ones first
SCORES = {
    "test_loss": ("val_loss", "valid_loss", "test_loss"),
    "test_accuracy": ("val_acc", "val_accuracy", "valid_acc", "test_acc", "test_accuracy"),
    "test_top5_accuracy": ("val_acc5", "val_top5_accuracy", "test_top5_accuracy"),
    "train_loss": ("train_loss",),
}
# Lightning's file in the folder of a checkpoint
FILE = "lightning.ckpt"
# end of the names of what is logged with the first of several validation loaders
FIRST = "/dataloader_idx_0"


def callback_for(keeper: Any) -> Callback:
    """Return a callback that does nothing unless a keeper is around."""
    return Callback() if keeper is None else KeptFit(keeper)


class KeptFit(Callback):  # type: ignore[misc] # no types are read from lightning
    """Callback of a Trainer whose training is kept."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.trainer: Any = None
        # Lightning's file in the checkpoint that it goes on from; None: there is none
        self.checkpoint: Path | None = None
        # stream of the epoch's loader
        self.stream: Any = None
        # what Lightning's checkpoint lacks: while one is saved, or until a loaded one is restored
        self.more: dict[str, Any] = {}
        self.handler = signal.getsignal(signal.SIGTERM)
        self._wrap_fit()
        self._wrap_loading()

    def _wrap_fit(self) -> None:
        """Make the Trainer that has this callback begin where it stopped."""
        original = Trainer.fit
        signature = inspect.signature(original)

        @wraps(original)
        def fit(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            given = signature.bind(trainer, *args, **kwargs)
            # a Tuner's search for a rate or a batch is no training
            is_search = any(getattr(each, "_early_exit", False) for each in trainer.callbacks)
            if self in trainer.callbacks and not is_search:
                checkpoint = self.take(trainer)
                if checkpoint is not None:
                    given.arguments["ckpt_path"] = checkpoint
                    if "weights_only" in signature.parameters:
                        # saved hyperparameters may be objects of the script's own classes
                        given.arguments.setdefault("weights_only", False)
            return original(*given.args, **given.kwargs)

        Trainer.fit = fit

    def _wrap_loading(self) -> None:
        """Lead the training's loader to where it stopped, each time that it is begun."""
        original = CombinedLoader.__iter__

        @wraps(original)
        def begin(combined: Any) -> Any:
            trainer = self.trainer
            # without it, another callback is searching for a rate or a batch
            is_kept = trainer is not None and self in trainer.callbacks
            if not is_kept or combined is not trainer.fit_loop._combined_loader:
                return original(combined)
            self.open(combined, partial(original, combined))
            return combined

        CombinedLoader.__iter__ = begin

    def take(self, trainer: Any) -> str | None:
        """Keep a Trainer that is about to train; return the checkpoint that it goes on from.

        Raises:
            InputError: This callback, or another one, has been in a training before.
        """
        if self.trainer is not None or self.keeper.has_begun:
            raise InputError(
                "serves one call of Trainer.fit; leave it out of further calls",
                source="tula.lightning_callback",
            )
        self.trainer = trainer
        batch = self.keeper.settings.global_batch
        rehearse = self.keeper.rehearse
        self.keeper.rehearse = lambda model, then: self._rehearse(model, then, rehearse)
        self.keeper.keep(
            {"lightning": FolderState("lightning", self._save, self._note, self.keeper, batch)}
        )
        loop = trainer.fit_loop
        after(loop.epoch_loop, "on_run_start", self._unless_searching(self._go_on))
        after(loop.epoch_loop, "on_advance_end", self._unless_searching(self._end_batch))
        after(loop, "on_advance_end", self._unless_searching(self._end_epoch))
        if self.checkpoint is None:
            return None
        for each in trainer.callbacks:
            if isinstance(each, SaveConfigCallback):
                # LightningCLI's, which refuses to train if an earlier start has written its file
                each.overwrite = True
            elif isinstance(each, LearningRateFinder):
                # the rate that it found is in the checkpoint
                each.on_fit_start = lambda *_: None
        return str(self.checkpoint)

    def _unless_searching(self, then: Callable[..., None]) -> Callable[..., None]:
        """Return a function that does nothing in a search for a rate, which removes callbacks."""

        def guarded(*args: Any) -> None:
            if self in self.trainer.callbacks:
                then(*args)

        return guarded

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Train no further if an earlier start came to the end, as by early stopping."""
        if self.trainer is trainer and self.keeper.progress.loops:
            trainer.should_stop = True
            trainer.fit_loop.run = partial(_begin_and_end, trainer.fit_loop)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Make later scores belong to the last epoch, even if an earlier start has done it."""
        if self.trainer is trainer:
            self.keeper.end()

    def _save(self, folder: Path) -> None:
        metrics = dict(self.trainer.callback_metrics)
        frozen = {
            name: getattr(*found) for name, found in _frozen_by(self.trainer.lightning_module)
        }
        self.more = {"metrics": metrics, "rates": self._found_rates(), "frozen": frozen}
        # the optimizer's state and the rest, too
        self.trainer.save_checkpoint(folder / FILE, weights_only=False)
        self.more = {}

    def _found_rates(self) -> dict[str, Any]:
        """Return the attributes of the module in which a search has put its rate."""
        finders = (each for each in self.trainer.callbacks if isinstance(each, LearningRateFinder))
        names = {name for each in finders for name in ("lr", "learning_rate", each._attr_name)}
        module = self.trainer.lightning_module
        return {n: lightning_getattr(module, n) for n in names if lightning_hasattr(module, n)}

    def state_dict(self) -> dict[str, Any]:
        """Return what Lightning's checkpoint lacks; {} in checkpoints that are not for us."""
        return self.more

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` returned, until the training begins."""
        self.more = state

    def _note(self, folder: Path) -> None:
        self.checkpoint = folder / FILE

    def _rehearse(
        self, model: Any, then: Callable[[], None], rehearse: Callable[..., None]
    ) -> None:
        """Have a model pass its first batch twice, if that matters and can be undone.

        The order of additions of two workers does not matter. With manual optimization a pass takes
        a step.
        """
        module = self.trainer.lightning_module
        if self.trainer.world_size > 2 and module.automatic_optimization:
            rehearse(model, then, lambda: _without_logs(module))

    def open(self, combined: Any, begin: Callable[[], Any]) -> None:
        """Begin an epoch's loading."""
        if self.stream is not None:
            self.stream.close()
        # the loop may not have its checkpoint's epoch yet, as when the optimizer asks for the steps
        epoch = max(
            self.keeper.progress.epoch, self.trainer.fit_loop.epoch_progress.current.processed
        )
        for sampler in _samplers(combined.flattened):
            # Lightning does so too late if the loader's processes begin at once
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        only = combined.flattened[0] if len(combined.flattened) == 1 else combined
        numbers = dict(self.keeper.saved_numbers)
        if self.keeper.progress.batches and _draws_late(combined):
            begin = partial(self.keeper.history.begin_without_draws, only, begin)
        self.stream = self.keeper.open(only, begin)
        if self.keeper.progress.batches and sized_len(combined) is None:
            # Lightning loads the next batch of a stream at once, to know whether there is one
            self.keeper.history.load_ahead(0, numbers)

    # hooks of Lightning's

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin; and obey a stop as before, not by Lightning's own handler."""
        signal.signal(signal.SIGTERM, self.handler)
        trainer.callback_metrics.update(self.more.get("metrics", {}))
        for name, rate in self.more.get("rates", {}).items():
            lightning_setattr(pl_module, name, rate)
        frozen = self.more.get("frozen", {})
        for name, (holder, switch) in _frozen_by(pl_module):
            setattr(holder, switch, frozen.get(name, getattr(holder, switch)))
        self.more = {}
        self._load_anew_as_before(trainer.fit_loop)
        if not self.keeper.progress.loops:
            self.keeper.begin_epoch()

    def _load_anew_as_before(self, loop: Any) -> None:
        """Have loaders made anew in the same epochs as without a stop, and begun as often."""
        every = self.trainer.reload_dataloaders_every_n_epochs
        epoch = self.trainer.current_epoch
        if every:
            loop._last_train_dl_reload_epoch = epoch - epoch % every
            if epoch and epoch % every == 0 and not self.keeper.progress.batches:
                # Lightning begins a new loader twice, but not where a training goes on
                iter(loop._data_fetcher)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Report the scores that records know."""
        if trainer.sanity_checking:
            return
        # many log them in groups, as val/loss
        logged = trainer.callback_metrics.items()
        metrics = {name.removesuffix(FIRST).replace("/", "_"): value for name, value in logged}
        scores = {}
        for score, names in SCORES.items():
            known = [float(metrics[name]) for name in names if name in metrics]
            if known:
                scores[score] = known[0]
        self.keeper.report(scores)

    def _go_on(self, data_fetcher: Any) -> None:
        """Begin a resumed epoch also for callbacks that schedule or average in it."""
        trainer = self.trainer
        if not self.keeper.progress.batches:
            if _draws_late(trainer.fit_loop._combined_loader):
                now = self.keeper.history.moments(None, self.stream.loader)["now"]
                self.keeper.began["loader"] = now
            return
        # otherwise the loop would skip schedules by a metric at this epoch's end
        trainer.fit_loop._restarting = False
        for each in trainer.callbacks:
            if isinstance(each, GradientAccumulationScheduler | StochasticWeightAveraging):
                each.on_train_epoch_start(trainer, trainer.lightning_module)

    def _end_batch(self, data_fetcher: Any) -> None:
        loop = self.trainer.fit_loop.epoch_loop
        self.keeper.progress.batches = loop.batch_progress.current.completed
        # after a resume from here Lightning would neither validate nor end the epoch
        if not loop._is_training_done and not loop._should_check_val_fx(data_fetcher):
            self.keeper.end_batch()

    def _end_epoch(self) -> None:
        trainer = self.trainer
        loop = trainer.fit_loop
        is_last = (
            # a loop that is asked to stop before its minimum of epochs or steps goes on
            (trainer.should_stop and loop._can_stop_early)
            or 0 < loop.max_epochs <= loop.epoch_progress.current.processed
            or 0 < loop.max_steps <= trainer.global_step
        )
        # a loop that counts only steps would take the epoch for unfinished
        saves = is_last or not loop._iteration_based_training()
        self.keeper.end_epoch(is_last=is_last, saves=saves)
        if not is_last:
            self.keeper.begin_epoch()


def _begin_and_end(loop: Any) -> None:
    """Run a loop that has no epoch left, for what callbacks do at its end, as with averages."""
    loop.setup_data()
    loop.on_run_start()
    loop.on_run_end()


def _frozen_by(module: Any) -> Iterator[tuple[str, tuple[Any, str]]]:
    """Yield what freezes and unfreezes layers, by name: an object with one of its attributes.

    Callbacks that fine-tune, and modules themselves, unfreeze layers when an epoch begins.
    """
    for name, parameter in module.named_parameters():
        yield name, (parameter, "requires_grad")
    for name, layer in module.named_modules():
        if hasattr(layer, "track_running_stats"):
            yield name, (layer, "track_running_stats")


def _draws_late(combined: Any) -> bool:
    """Tell whether samplers draw only with the first batch, before which callbacks may draw."""
    loaders = combined.flattened
    # Lightning takes the first batch of a stream at once
    has_end = all(sized_len(each) is not None for each in loaders)
    return has_end and not any(getattr(each, "num_workers", 0) for each in loaders)


def _samplers(loaders: Iterable[Any]) -> Iterator[Any]:
    for loader in loaders:
        yield getattr(loader, "sampler", None)
        yield getattr(getattr(loader, "batch_sampler", None), "sampler", None)


@contextmanager
def _without_logs(module: Any) -> Iterator[None]:
    """Discard the values that a module logs in the block."""
    names = ("log", "log_dict")
    for name in names:
        vars(module)[name] = lambda *_, **__: None
    try:
        yield
    finally:
        for name in names:
            del vars(module)[name]
