"""The time and memory that TulaOptimizer adds to a training step of its base optimizer, SGD with momentum, as JSON.

    python -m tests.benchmarks.optimizer_overhead [--device cpu|cuda] [--models …] [--batch …] [--seconds …] [--out …]

Forms: `element`, the paper's (an ordinary step; the extra pass once an epoch is timed by the profiler, not here);
`tensor`; `free`, which also estimates its factors anew at every step from norms that it is given (computing the norms
is not included). All forms share the same model, data, base optimizer and momenta. A round is one step of each form in
a random order, so that a slowing machine slows all forms. The overhead is the median over rounds of a form's time over
the base's in the same round; its interval comes from resampled rounds. `wall` uses elapsed time, `processor` the time
in which this process had a processor, which other work influences less.

Steps vary by more than the overhead. The optimizer's part is therefore also timed alone, after a backward pass of
`FEW` samples: `extra_s` is its difference from the base's, which does not depend on the batch, and `overhead_of_parts`
is `extra_s` over the base's step. Memory: bytes that the optimizer keeps between steps, and on CUDA the rise of a
step's peak.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torchvision
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from tula_hpc.optim import TulaOptimizer
from tula_hpc.optim.optimizer import STATE_KEY

# pixels, as in the paper
IMAGE_SIZES = {"resnet50": 224, "vgg11": 32, "alexnet": 224, "mobilenet_v3_small": 224}
FORMS: dict[str, dict[str, Any]] = {
    "element": {"granularity": "element"},
    "tensor": {"granularity": "tensor"},
    "free": {"granularity": "tensor", "smoothing": 0.9},
}
SMALL, LARGE = 32, 1024
RESAMPLES = 2000
# samples of the backward pass after which the optimizer is timed alone
FEW = 2
# least number of rounds, however long they take
LEAST = 3


class Seconds(NamedTuple):
    """Time of one step."""

    wall: float
    # processor time of this process, over all processors
    processor: float


CLOCKS = Seconds._fields
Round = dict[str, Seconds]


class Bench:
    """One model with one base optimizer, and wrappers of it that share everything.

    Args:
        model: Name of a torchvision classifier.
        batch: Samples in a step.
        image_size: Pixels on one side.
        device: Device of the training.
    """

    def __init__(self, model: str, batch: int, image_size: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device, self.batch = device, batch
        self.model: nn.Module = torchvision.models.get_model(model, weights=None, num_classes=100).to(device)
        self.inputs = torch.randn(batch, 3, image_size, image_size, device=device)
        self.targets = torch.randint(100, (batch,), device=device)
        self.base = SGD(self.model.parameters(), lr=1e-4, momentum=0.9, weight_decay=5e-4)
        self.squares = torch.empty(0)
        wrapped = {
            name: TulaOptimizer(self.base, small_batch=SMALL, large_batch=LARGE, **f) for name, f in FORMS.items()
        }
        self.forms: dict[str, Optimizer] = {"base": self.base, **wrapped}
        self._first_factors()

    def _first_factors(self) -> None:
        """Give every form its factors before the first measured step."""
        self.gradients()
        large = [p.grad for p in self.model.parameters()]
        small = [g + 0.3 * g.std() * torch.randn_like(g) for g in large if g is not None]
        for form in self.forms.values():
            if isinstance(form, TulaOptimizer):
                form.update_gradscale(small, large)
        self.squares = torch.stack([g.double().square().sum() for g in small])

    def gradients(self, samples: int | None = None) -> None:
        """Run forward and backward pass on the one batch, or on its first samples."""
        self.base.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(self.model(self.inputs[:samples]), self.targets[:samples])
        torch.autograd.backward(loss)

    def now(self) -> Seconds:
        """Wait for the device, and return the time."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return Seconds(time.perf_counter(), time.process_time())

    def step(self, name: str) -> Seconds:
        """Time one whole step."""
        start = self.now()
        self.gradients()
        self.optimize(name)
        return _since(start, self.now())

    def optimizer_alone(self, name: str) -> Seconds:
        """Time the optimizer's part, after a backward pass that has finished."""
        self.gradients(FEW)
        start = self.now()
        self.optimize(name)
        return _since(start, self.now())

    def optimize(self, name: str) -> None:
        """Run the part of a step that differs between forms."""
        form = self.forms[name]
        if name == "free" and isinstance(form, TulaOptimizer):
            form.observe_small(self.squares, SMALL)
        form.step()

    def extra_peak_bytes(self, name: str) -> int | None:
        """Return by how much a step's peak memory exceeds the base's; None if the device does not count it."""
        if self.device.type != "cuda":
            return None
        peaks = []
        for each in ("base", name):
            self.step(each)
            torch.cuda.reset_peak_memory_stats(self.device)
            self.step(each)
            peaks.append(torch.cuda.max_memory_allocated(self.device))
        return peaks[1] - peaks[0]


def _since(start: Seconds, end: Seconds) -> Seconds:
    return Seconds(*(after - before for before, after in zip(start, end, strict=True)))


def rounds(bench: Bench, seconds: float, measure: Callable[[str], Seconds]) -> Iterator[Round]:
    """Yield the times of each form, round by round for some seconds, after one round to warm up."""
    order, generator = list(bench.forms), random.Random(0)
    for name in order:
        measure(name)
    end, index = time.perf_counter() + seconds, 0
    while index < LEAST or time.perf_counter() < end:
        generator.shuffle(order)
        yield {name: measure(name) for name in order}
        index += 1


def overhead(pairs: Sequence[Round], name: str, clock: str) -> dict[str, Any]:
    """Return the median of the paired ratios minus 1, with its 90 % interval and the ratios' quartiles."""
    ratios = [getattr(pair[name], clock) / getattr(pair["base"], clock) - 1 for pair in pairs]
    generator = random.Random(1)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    interval = [medians[RESAMPLES // 20], medians[-RESAMPLES // 20]]
    return {
        "overhead": statistics.median(ratios),
        "interval_90": interval,
        "quartiles": statistics.quantiles(ratios, n=4),
    }


def of_parts(whole: Sequence[Round], alone: Sequence[Round], name: str, clock: str) -> dict[str, float]:
    """Return the seconds that the form adds to the optimizer's part, also as a share of the base's whole step."""
    extra = statistics.median(getattr(pair[name], clock) - getattr(pair["base"], clock) for pair in alone)
    step = statistics.median(getattr(pair["base"], clock) for pair in whole)
    return {"extra_s": extra, "step_s": step, "overhead_of_parts": extra / step}


def state_bytes(form: Optimizer) -> int:
    """Return the bytes that a TulaOptimizer keeps in addition to its base, each storage counted once."""
    storages: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Tensor):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            visit(list(value.values()))
        elif isinstance(value, list):
            for each in value:
                visit(each)

    visit(form.state_dict()[STATE_KEY])
    return sum(storages.values())


def measure(model: str, batch: int, image_size: int, seconds: float, device: torch.device) -> dict[str, Any]:
    """Measure one model."""
    bench = Bench(model, batch, image_size, device)
    whole = list(rounds(bench, seconds, bench.step))
    alone = list(rounds(bench, seconds / 2, bench.optimizer_alone))
    sizes = [parameter.numel() for parameter in bench.model.parameters()]
    row: dict[str, Any] = {"model": model, "batch": batch, "image_size": image_size}
    row |= {"parameters": sum(sizes), "tensors": len(sizes), "rounds": len(whole), "rounds_alone": len(alone)}
    row["forms"] = {name: _form(bench, whole, alone, name) for name in FORMS}
    for name, form in row["forms"].items():
        shown = [
            f"{clock} {form[clock]['overhead']:+.2%}, parts {form[clock]['overhead_of_parts']:+.2%}" for clock in CLOCKS
        ]
        print(f"{model} b={batch} {name}: {'; '.join(shown)}", file=sys.stderr)
    return row


def _form(bench: Bench, whole: Sequence[Round], alone: Sequence[Round], name: str) -> dict[str, Any]:
    clocks = {clock: overhead(whole, name, clock) | of_parts(whole, alone, name, clock) for clock in CLOCKS}
    parameters = sum(p.numel() for p in bench.model.parameters())
    kept = state_bytes(bench.forms[name]) / parameters
    return clocks | {"state_bytes_per_parameter": kept, "extra_peak_bytes": bench.extra_peak_bytes(name)}


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--models", nargs="+", default=list(IMAGE_SIZES))
    parser.add_argument("--batch", type=int, nargs="+", default=[128], help="one for all models, or one for each")
    parser.add_argument("--image-size", type=int, help="pixels, for all; default: 32 for vgg11 (CIFAR), else 224")
    parser.add_argument(
        "--seconds",
        type=float,
        default=300.0,
        help="for whole steps of each model, plus half of that for the optimizer alone",
    )
    parser.add_argument("--out", type=Path, help="JSON file; default: standard output")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    batches = arguments.batch * (len(arguments.models) if len(arguments.batch) == 1 else 1)
    rows = []
    for model, batch in zip(arguments.models, batches, strict=True):
        image_size = arguments.image_size or IMAGE_SIZES.get(model, 224)
        rows.append(measure(model, batch, image_size, arguments.seconds, device))
    result = {"device": _device_name(device), "torch": torch.__version__, "base": "SGD with momentum", "rows": rows}
    text = json.dumps(result, indent=1) + "\n"
    if arguments.out:
        arguments.out.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
