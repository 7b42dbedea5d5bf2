"""A loop with its own checkpoints, at the ends of epochs, as in many scripts, or after some steps.

Every start after the first one takes its steps faster, because no test acts at a certain step of it.

own_checkpoints.py --batch-size 8 --epochs 2 [--resume checkpoints/last.pt | --auto-resume] [--repeats] [--handler]
                   [--save-steps 3 [--epoch-anew]] [--samples 64] [--fails how]
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SAVED = Path("checkpoints/last.pt")


def options_given() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--auto-resume", action="store_true")
    parser.add_argument("--repeats", action="store_true")
    parser.add_argument("--handler", action="store_true")
    parser.add_argument("--save-steps", type=int, default=0)
    parser.add_argument("--epoch-anew", action="store_true")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--fails", default="")
    return parser.parse_args()


def leave(*_: object) -> None:
    print("handled", flush=True)
    sys.exit(3)


def fail(options: argparse.Namespace) -> None:
    if options.fails == "exit":
        sys.exit(7)
    if options.fails == "hang":
        time.sleep(600)


def save(model: nn.Module, epoch: int, step: int) -> None:
    if dist.get_rank() == 0:
        SAVED.parent.mkdir(exist_ok=True)
        # a kill may come at any moment
        part = SAVED.with_suffix(".part")
        torch.save({"model": model.state_dict(), "epoch": epoch, "step": step}, part)
        part.replace(SAVED)


def resumed(options: argparse.Namespace, model: nn.Module) -> tuple[int, int]:
    """Return the epoch and the step to continue from."""
    if options.auto_resume and SAVED.exists():
        options.resume = SAVED
    if not options.resume:
        return 0, 0
    state = torch.load(options.resume, weights_only=True)
    model.load_state_dict(state["model"])
    begin = state["epoch"] - options.repeats
    print(f"resumed at epoch {begin}", flush=True)
    return begin, state["step"]


def pause_s() -> float:
    """Return the pause after each step, which is short in all starts in this folder but the first one."""
    # outside the folder, where it would count as something that the script has saved
    started = Path(f"../started-{os.environ['RANK']}")
    if started.exists():
        return 0.02
    started.touch()
    return 0.1


def main() -> None:
    options = options_given()
    pause = pause_s()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(4, 2))
    data = TensorDataset(torch.randn(options.samples, 4), torch.randint(0, 2, (options.samples,)))
    sampler: DistributedSampler[object] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=options.batch_size, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begin, step = resumed(options, model)
    passed = 0 if options.epoch_anew else step % len(loader)
    if options.handler:
        signal.signal(signal.SIGTERM, leave)
    for epoch in range(begin, options.epochs):
        sampler.set_epoch(epoch)
        for number, (inputs, targets) in enumerate(loader):
            if epoch == begin and number < passed:
                continue
            time.sleep(pause)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call] # torch's
            optimizer.step()
            step += 1
            if options.save_steps and step % options.save_steps == 0:
                save(model, epoch, step)
            if (epoch, number) == (1, 1):
                fail(options)
        if not options.save_steps:
            save(model, epoch + 1, step)
        if dist.get_rank() == 0:
            print(f" * Acc@1 {50.0 + 10 * epoch:.3f} loss {1 / (epoch + 1):.4f} of {os.getpid()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
