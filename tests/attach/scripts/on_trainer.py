"""Hugging Face's Trainer on a small GPT-2 with made texts; kept by one line where tula_hpc is around it.

on_trainer.py --batch-size 8 --epochs 2 [--samples 128] [--accumulate 2] [--width 32] [--log FOLDER]
              [--pause 0.1] [--eval-steps 4] [--early] [--group] [--masks] [--stream]
              [--loader-workers 1]
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import tula_hpc.attach as tula

WORDS, LENGTH = 64, 16


class Texts(Dataset[Any]):
    def __init__(self, samples: int, seed: int, masks: bool = False) -> None:
        self.masks = masks
        numbers = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, WORDS, (samples, LENGTH), generator=numbers)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.tokens[index]
        shown = tokens.masked_fill(torch.rand(LENGTH) < 0.2, 0) if self.masks else tokens
        return {"input_ids": shown, "labels": tokens}


class Stream(IterableDataset[Any]):
    """Texts without a known number."""

    def __init__(self, texts: Texts) -> None:
        self.texts = texts

    def __iter__(self) -> Iterator[Any]:
        yield from map(self.texts.__getitem__, range(len(self.texts)))


class Logged(Trainer):  # type: ignore[misc] # no types are read from transformers
    """Writes the loss of each batch."""

    log_file: Any = None
    pause_s = 0.0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        if model.training:
            time.sleep(self.pause_s)
            self.log_file.write(f"{float(loss).hex()} {int(inputs['input_ids'].sum())}\n")
            self.log_file.flush()
        return (loss, outputs) if return_outputs else loss


class AfterTwo(EarlyStoppingCallback):  # type: ignore[misc] # no types are read from transformers
    """Stops after two evaluations that are not much better than the first one, as none is."""

    def __init__(self) -> None:
        super().__init__(2, early_stopping_threshold=1e9)


def accuracy(predictions: Any) -> dict[str, float]:
    words = np.argmax(predictions.predictions[:, :-1], axis=-1)
    return {"accuracy": float((words == predictions.label_ids[:, 1:]).mean())}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--log", type=Path, default=Path("log"))
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--eval-steps", type=int, default=0)
    parser.add_argument("--early", action="store_true")
    parser.add_argument("--group", action="store_true")
    parser.add_argument("--masks", action="store_true")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--loader-workers", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    set_seed(0)
    options.log.mkdir(exist_ok=True)
    steps = options.epochs * options.samples // (options.batch_size * int(os.environ.get("WORLD_SIZE", "1")))
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=options.width, n_layer=2, n_head=2))
    arguments = TrainingArguments(
        output_dir=str(options.log / "out"),
        per_device_train_batch_size=options.batch_size,
        gradient_accumulation_steps=options.accumulate,
        max_steps=steps if options.stream else -1,
        num_train_epochs=options.epochs + 2 * options.early,
        lr_scheduler_type="cosine",
        learning_rate=1e-3,
        eval_strategy="steps" if options.eval_steps else "epoch",
        eval_steps=options.eval_steps or None,
        eval_on_start=options.stream,
        per_device_eval_batch_size=16 if options.eval_steps else 8,
        save_strategy="epoch" if options.early else "no",
        load_best_model_at_end=options.early,
        # draws the order of samples from torch's random numbers
        train_sampling_strategy="group_by_length" if options.group else "random",
        dataloader_num_workers=options.loader_workers,
        logging_steps=4,
        report_to=[],
        disable_tqdm=True,
    )
    texts = Texts(options.samples, 1, options.masks)
    trainer = Logged(
        model=model,
        args=arguments,
        train_dataset=Stream(texts) if options.stream else texts,
        eval_dataset=Texts(16, 2),
        compute_metrics=accuracy,
        callbacks=[tula.trainer_callback()],
    )
    if options.early:
        trainer.add_callback(AfterTwo())
    rank = arguments.process_index
    with (options.log / f"losses-{rank}.txt").open("a") as log:
        trainer.log_file, trainer.pause_s = log, options.pause
        trainer.train()
    flag = options.log / "killed"
    if options.early and tula._around is not None and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    torch.save(model.state_dict(), options.log / f"weights-{rank}.pt")


if __name__ == "__main__":
    main()
