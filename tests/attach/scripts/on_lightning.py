"""Lightning, whose optimizer steps by a closure or by hand; kept by one line where tula_hpc is around it.

on_lightning.py --batch-size 8 --epochs 2 [--samples 128] [--by-hand] [--accumulate 2] [--max-steps 14] [--width 32]
                [--log FOLDER] [--pause 0.1] [--early] [--averaged] [--loader-workers 1]
                [--limit-batches 5] [--stream] [--cycled] [--search] [--finder] [--plateau] [--anew] [--unfrozen]
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateFinder, StochasticWeightAveraging
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import tula_hpc.attach as tula


class Noisy(Dataset[Any]):
    def __init__(self, samples: int) -> None:
        numbers = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(samples, 16, generator=numbers)
        self.targets = torch.randint(0, 4, (samples,), generator=numbers)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index] + 0.1 * torch.randn(16), self.targets[index]


class Stream(IterableDataset[Any]):
    """A data set without a length, for a single worker."""

    def __init__(self, items: Noisy) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        yield from map(self.items.__getitem__, range(len(self.items)))


class Halved(lightning.Callback):  # type: ignore[misc] # no types are read from lightning
    """Changes the model at the end, as averages of weights do."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.div_(2.0)


class Classifier(lightning.LightningModule):  # type: ignore[misc] # no types are read from lightning
    # an attribute of the class, because a model may be copied
    log_file: Any = None

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        if options.plateau:
            # an object that torch.load refuses unless it is told otherwise
            self.save_hyperparameters()
        self.automatic_optimization, self.pause_s = not options.by_hand, options.pause
        # where a search for a rate expects it
        self.lr, self.has_plateau, width = 0.1, options.plateau, options.width
        self.layers = nn.Sequential(
            nn.Linear(16, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 4)
        )
        self.is_unfrozen_later = options.unfrozen
        self.layers[0].requires_grad_(not options.unfrozen)

    def on_train_epoch_start(self) -> None:
        if self.is_unfrozen_later and self.current_epoch == 1:
            self.layers[0].requires_grad_()

    def forward(self, inputs: Tensor) -> Any:
        return self.layers(inputs)

    def training_step(self, batch: Any, index: int) -> Tensor:
        time.sleep(self.pause_s)
        # several loaders together
        inputs, targets = map(torch.cat, zip(*batch.values(), strict=True)) if isinstance(batch, dict) else batch
        loss = nn.functional.cross_entropy(self(inputs), targets)
        self.log("train_loss", loss)
        self.log_file.write(f"{float(loss).hex()} {float(inputs.sum()).hex()} {self.lr}\n")
        self.log_file.flush()
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        outputs = self(batch[0])
        self.log("val_loss", nn.functional.cross_entropy(outputs, batch[1]))
        self.log("val/acc", (outputs.argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        if self.has_plateau:
            # a threshold that no result reaches
            by_loss = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
            return [optimizer], [{"scheduler": by_loss, "monitor": "val_loss"}]
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def options_given() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--limit-batches", type=int)
    parser.add_argument("--by-hand", action="store_true")
    parser.add_argument("--log", type=Path, default=Path("log"))
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--early", action="store_true")
    parser.add_argument("--averaged", action="store_true")
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--cycled", action="store_true")
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--finder", action="store_true")
    parser.add_argument("--plateau", action="store_true")
    parser.add_argument("--anew", action="store_true")
    parser.add_argument("--unfrozen", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = options_given()
    torch.set_num_threads(1)
    rank, world, here = (int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    lightning.seed_everything(0, verbose=False)
    options.log.mkdir(exist_ok=True)
    validation = TensorDataset(torch.randn(16, 16), torch.randint(0, 4, (16,)))
    callbacks = [tula.lightning_callback()]
    if options.early:
        # asks to stop after each epoch; Lightning continues until its least number of epochs
        callbacks.insert(0, EarlyStopping("val/acc", mode="max", stopping_threshold=-1.0))
        callbacks.append(Halved())
    if options.averaged:
        callbacks.append(StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1))
    if options.finder:
        callbacks.append(LearningRateFinder(num_training_steps=20))
    most = options.epochs + 2 * options.early
    trainer = lightning.Trainer(
        min_epochs=options.epochs,
        max_epochs=most if options.max_steps < 0 else None,
        max_steps=options.max_steps,
        devices=max(1, here),
        num_nodes=max(1, world) // max(1, here),
        strategy="ddp" if world > 1 else "auto",
        accumulate_grad_batches=options.accumulate,
        limit_train_batches=options.limit_batches,
        reload_dataloaders_every_n_epochs=int(options.anew),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    with (options.log / f"losses-{rank}.txt").open("a") as log:
        Classifier.log_file = log
        model = Classifier(options)
        data = Noisy(options.samples)
        loader = DataLoader(data, options.batch_size, shuffle=True, num_workers=options.loader_workers)
        if options.stream:
            loader = DataLoader(Stream(data), options.batch_size)
        if options.cycled:
            # a loader that is iterated several times an epoch, in an order of its own
            few = DataLoader(Noisy(24), 8, shuffle=True, generator=torch.Generator())
            loader = CombinedLoader({"many": loader, "few": few}, "max_size_cycle")
        if options.search:
            # the rate that it finds is not used
            Tuner(trainer).lr_find(model, loader, num_training=12, update_attr=False)
        trainer.fit(model, loader, DataLoader(validation, 8))
    flag = options.log / "killed"
    if options.early and tula._around is not None and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if options.early:
        (options.log / "metrics").write_text(str(trainer.callback_metrics["val_loss"]))
        (last,) = trainer.validate(model, DataLoader(validation, 5), verbose=False)
        (options.log / "validated").write_text(str(last["val_loss"]))
    torch.save(model.state_dict(), options.log / f"weights-{rank}.pt")


if __name__ == "__main__":
    main()
