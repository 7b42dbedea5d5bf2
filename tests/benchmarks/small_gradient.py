"""The small batch's gradient norm from the workers' own gradients, or from an extra pass: noise, bias, cost, as JSON.

    python -m tests.benchmarks.small_gradient [--out tests/benchmarks/results/small_gradient.json]

A CNN without BatchNorm on CIFAR-100 images (the digits of scikit-learn if they are not there), 2 and 4 workers over
gloo, B = 256, b_small = 32. Training stops after some steps; at these weights, batches are drawn with replacement again
and again, and both ways estimate the quantities that the scale needs. The images are the population, so that the truth
is known exactly: |G|² and tr(Σ) of each tensor from the gradients of all images one by one.

- free: mean of the workers' own squared norms (b = B / workers), converted to b_small by the linear law.
- pass: squared norm of an all-reduced gradient of b_small samples, the first part of the same batch.

For each quantity: `bias`, mean over the truth, minus 1; `noise`, standard deviation over the truth, both of a single
draw. The `gain` ŝ(b_small)/l̂(B) and the `scale` √gain are also given with squares averaged over 10 draws before the
division. All are given by tensor, as the median over tensors, and for the whole model as one vector. `draws_worth`: how
many draws of the pass one free draw is worth, the ratio of variances.

Cost: steps with neither, with the hook, and with a pass take turns in changing order; the median of the ratios of
neighbours. For a single worker: a batch in two parts against the whole batch.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.parallel import DistributedDataParallel

from tests.forked import fork_workers, run_workers
from tula_hpc.gradients.noise_scale import gradient_square, noise_trace, square_at
from tula_hpc.gradients.norms import norms_where_present, squares
from tula_hpc.gradients.reference_gradient import reference_gradient
from tula_hpc.gradients.small_batch_norms import LocalNorms, PartNorms

Array = NDArray[np.float64]
RESULT = Path(__file__).parent / "results" / "small_gradient.json"
GLOBAL_BATCH, SMALL_BATCH = 256, 32
IMAGES = 2048
# steps of training, after which draws are taken
STOPS = (10, 200)
DRAWS, AVERAGED = 200, 10
# rounds of timed steps
PAIRS = 60
loss = nn.CrossEntropyLoss()


def images() -> tuple[Tensor, Tensor, str]:
    """Return images (n, 3, edge, edge) from −1 to 1, labels, and the name of the data set."""
    root = Path(os.environ.get("TULA_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
    archive = root / "cifar100" / "train-0.tar"
    if not archive.exists():
        from sklearn.datasets import load_digits

        digits = load_digits()
        pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None].expand(-1, 3, -1, -1) / 8 - 1
        return pixels.contiguous(), torch.tensor(digits.target), "digits"
    return *_cifar(archive), "cifar100"


def _cifar(archive: Path) -> tuple[Tensor, Tensor]:
    """Read every k-th image of the archive, so that all its classes occur."""
    from PIL import Image

    with tarfile.open(archive) as tar:
        members = [member for member in tar if member.name.endswith(".png")]
        classes = sorted({Path(member.name).parent.name for member in members})
        chosen = members[:: max(1, len(members) // IMAGES)][:IMAGES]
        pixels = [np.asarray(Image.open(io.BytesIO(tar.extractfile(m).read())).convert("RGB")) for m in chosen]  # type: ignore[union-attr] # all are files
    labels = torch.tensor([classes.index(Path(member.name).parent.name) for member in chosen])
    return torch.tensor(np.stack(pixels)).permute(0, 3, 1, 2).float() / 127.5 - 1, labels


def network(edge: int) -> nn.Module:
    """Return a network of four convolutions and two linear layers: twelve tensors, small and large."""
    widths, layers = (3, 16, 32, 64, 64), []
    for before, after in pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if edge > 4 else []
        edge = edge // 2 if edge > 4 else edge
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * edge**2, 128), nn.ReLU(), nn.Linear(128, 100))


class Bench:
    """One worker with its model and the images."""

    def __init__(self, rank: int, workers: int) -> None:
        self.rank, self.workers, self.local_batch = rank, workers, GLOBAL_BATCH // workers
        self.images, self.labels, self.source = images()
        torch.manual_seed(0)
        self.model = network(self.images.shape[-1])
        self.ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.parameters = list(self.model.parameters())
        self.norms = LocalNorms(self.parameters, self.local_batch).attach(self.ddp)
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1, momentum=0.9)
        self.generator = torch.Generator().manual_seed(rank)
        self.steps = 0

    def batch(self) -> tuple[Tensor, Tensor]:
        """Draw this worker's part of a batch, with replacement."""
        chosen = torch.randint(len(self.images), (self.local_batch,), generator=self.generator)
        return self.images[chosen], self.labels[chosen]

    def backward(self, inputs: Tensor, targets: Tensor) -> float:
        """Run forward and backward pass, all-reduce the gradients, and return this worker's loss."""
        self.optimizer.zero_grad(set_to_none=True)
        value = loss(self.ddp(inputs), targets)
        torch.autograd.backward(value)
        return float(value.detach())

    def train(self, until: int) -> float:
        """Train until step `until`; return the mean loss of the last ten steps on this worker."""
        losses = []
        while self.steps < until:
            losses.append(self.backward(*self.batch()))
            self.optimizer.step()
            self.steps += 1
        return float(np.mean(losses[-10:]))

    def pass_squares(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the squared norms of the tensors by the paper's extra pass."""
        part = SMALL_BATCH // self.workers
        found = reference_gradient(self.model, loss, inputs[:part], targets[:part], self.parameters)
        return squares(norms_where_present(found), torch.device("cpu"))

    def draw(self) -> Tensor:
        """Return squared norms (3, tensors): of the workers' own gradients, of the pass, of the large batch."""
        inputs, targets = self.batch()
        small = self.pass_squares(inputs, targets)
        self.backward(inputs, targets)
        own, _ = self.norms.squares()
        large = squares(norms_where_present([p.grad for p in self.parameters]), torch.device("cpu"))
        return torch.stack([own, small, large])

    def truth(self) -> tuple[Array, Array]:
        """Return |G|² and tr(Σ) of each tensor over all images, which the workers share."""
        totals = [torch.zeros_like(p) for p in self.parameters]
        sums = torch.zeros(len(self.parameters), dtype=torch.float64)
        share = range(self.rank, len(self.images), self.workers)
        for chosen in torch.split(torch.tensor(share), 64):
            each = self._gradients_one_by_one(chosen)
            sums += torch.stack([gradient.square().sum() for gradient in each])
            for total, gradient in zip(totals, each, strict=True):
                total.add_(gradient.sum(0))
        for tensor in (*totals, sums):
            dist.all_reduce(tensor)
        square = squares(norms_where_present([total / len(self.images) for total in totals]), torch.device("cpu"))
        return square.numpy(), (sums / len(self.images) - square).numpy()

    def _gradients_one_by_one(self, chosen: Tensor) -> list[Tensor]:
        def one(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
            value: Tensor = loss(functional_call(self.model, parameters, (image[None],)), label[None])
            return value

        weights = {name: p.detach() for name, p in self.model.named_parameters()}
        found = vmap(grad(one), in_dims=(None, 0, 0))(weights, self.images[chosen], self.labels[chosen])
        return [found[name] for name in weights]


def compare(bench: Bench, until: int) -> dict[str, Any]:
    """Compare draws of both ways, at the weights after some steps, with the truth."""
    trained = bench.train(until)
    square, trace = bench.truth()
    draws = torch.stack([bench.draw() for _ in range(DRAWS)]).double().numpy()
    truth = _quantities(square + trace / SMALL_BATCH, square + trace / GLOBAL_BATCH, SMALL_BATCH)
    names = [name for name, _ in bench.model.named_parameters()]
    estimates = {"free": (draws[:, 0], bench.local_batch), "pass": (draws[:, 1], SMALL_BATCH)}
    large = draws[:, 2]
    tensors = {way: _scores(small, large, batch, truth) for way, (small, batch) in estimates.items()}
    sums = [np.sum(square) + np.sum(trace) / batch for batch in (SMALL_BATCH, GLOBAL_BATCH)]
    whole = _quantities(sums[0], sums[1], SMALL_BATCH)
    model = {
        way: _scores(small.sum(1, keepdims=True), large.sum(1, keepdims=True), batch, whole)
        for way, (small, batch) in estimates.items()
    }
    return {
        "steps": until,
        "train_loss": trained,
        "noise_scale": float(np.sum(trace) / np.sum(square)),
        "true_scale": {"model": float(whole["scale"]), **dict(zip(names, truth["scale"].tolist(), strict=True))},
        "model": _summary(model),
        "median_tensor": _summary(tensors),
        "tensors": {name: _summary(tensors, place) for place, name in enumerate(names)},
    }


def _quantities(small: Any, large: Any, batch: float) -> dict[str, Any]:
    """Estimate the quantities from squared norms at a batch and at B."""
    square = gradient_square(small, large, batch, GLOBAL_BATCH)
    trace = noise_trace(small, large, batch, GLOBAL_BATCH)
    at_small = square_at(small, large, batch, GLOBAL_BATCH, SMALL_BATCH)
    gain = at_small / large
    return {"square": square, "trace": trace, "small": at_small, "gain": gain, "scale": np.sqrt(np.maximum(gain, 0))}


def _scores(small: Array, large: Array, batch: float, truth: dict[str, Any]) -> dict[str, dict[str, Array]]:
    """Return bias and noise of each quantity, for each column (tensor)."""
    single = _quantities(small, large, batch)
    groups = (-1, AVERAGED, small.shape[1])
    averaged = _quantities(small.reshape(groups).mean(1), large.reshape(groups).mean(1), batch)
    found = {**single, **{f"{name} of {AVERAGED}": averaged[name] for name in ("gain", "scale")}}
    return {
        name: {
            "bias": values.mean(0) / truth[name.split()[0]] - 1,
            "noise": values.std(0) / np.abs(truth[name.split()[0]]),
        }
        for name, values in found.items()
    }


def _summary(scores: dict[str, dict[str, dict[str, Array]]], place: int | None = None) -> dict[str, Any]:
    """Return by quantity bias and noise of both ways (of one tensor, or the median), and a free draw's worth."""

    def one(values: Array) -> float:
        return float(np.median(values) if place is None else values[place])

    return {
        quantity: {
            **{way: {key: one(values) for key, values in scores[way][quantity].items()} for way in scores},
            "draws_worth": one((scores["pass"][quantity]["noise"] / scores["free"][quantity]["noise"]) ** 2),
        }
        for quantity in scores["free"]
    }


def costs(bench: Bench) -> dict[str, float]:
    """Return step times over those of plain DDP: with the hook, and with a pass in each step."""
    other = network(bench.images.shape[-1])
    plain = DistributedDataParallel(other, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)

    def without(*, small: bool = False) -> None:
        inputs, targets = bench.batch()
        if small:
            part = SMALL_BATCH // bench.workers
            reference_gradient(other, loss, inputs[:part], targets[:part], list(other.parameters()))
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss(plain(inputs), targets))
        optimizer.step()

    def free() -> None:
        bench.backward(*bench.batch())
        bench.norms.squares()
        bench.optimizer.step()

    times = interleaved([without, free, partial(without, small=True)])
    return {"step_time_s": float(np.median(times[0])), "free": ratio(times, 1), "pass": ratio(times, 2)}


def cost_of_parts() -> dict[str, float]:
    """Return a single worker's step time with its batch in two parts over that with the whole batch."""
    pixels, labels, _ = images()
    models = [network(pixels.shape[-1]) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    norms = PartNorms(list(models[1].parameters()))
    chosen = torch.randint(len(pixels), (GLOBAL_BATCH,))
    inputs, targets = pixels[chosen], labels[chosen]

    def step(index: int) -> None:
        optimizers[index].zero_grad(set_to_none=True)
        parts = norms.parts(inputs, targets) if index else [(inputs, targets, 1.0)]
        for x, y, share in parts:
            torch.autograd.backward(loss(models[index](x), y) * share)
        if index:
            norms.squares()
        optimizers[index].step()

    times = interleaved([partial(step, 0), partial(step, 1)])
    return {"step_time_s": float(np.median(times[0])), "parts": ratio(times, 1)}


def interleaved(steps: Sequence[Callable[[], None]]) -> Array:
    """Return the seconds (kinds, PAIRS) of each kind of step in turn, each round beginning with another kind."""
    times = np.zeros((len(steps), PAIRS + 2))
    for index in range(PAIRS + 2):
        for kind in np.roll(np.arange(len(steps)), index).tolist():
            started = time.perf_counter()
            steps[kind]()
            times[kind, index] = time.perf_counter() - started
    return times[:, 2:]


def ratio(times: Array, kind: int) -> float:
    """Return the median over rounds of one kind's time over that of the first kind."""
    return float(np.median(times[kind] / times[0]))


def work(rank: int, folder: Path, workers: int) -> None:
    """Run one worker; rank 0 writes the results."""
    torch.set_num_threads(1)
    rendezvous = f"file://{folder / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=workers, timeout=timedelta(minutes=5))
    bench = Bench(rank, workers)
    found = {"local_batch": bench.local_batch, "data": bench.source, "states": [compare(bench, n) for n in STOPS]}
    found["cost"] = costs(bench)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    # DDP has to be freed before the process group is destroyed
    del bench
    dist.destroy_process_group()


def main() -> None:
    """Measure with two and with four workers; print the main figures and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULT)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        "global_batch": GLOBAL_BATCH, "small_batch": SMALL_BATCH, "images": IMAGES, "draws": DRAWS,
        "cores": os.cpu_count(), "torch": torch.__version__, "one_worker": cost_of_parts(), "workers": {},
    }  # fmt: skip
    for workers in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            run_workers(__file__, folder, str(workers), timeout_s=3600, OMP_NUM_THREADS="1")
            found = json.loads((Path(folder) / "found.json").read_text())
        results["workers"][str(workers)] = found
        print(f"{workers} workers: cost {found['cost']}")
        for state in found["states"]:
            for name, of in islice(state["model"].items(), 5):
                print(f"  {state['steps']:4} steps, whole model, {name:8} {of}")
    # over five minutes: other work makes the costs uncertain
    results["load_average"] = os.getloadavg()[1]
    out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[2].isdigit():
        sys.exit(fork_workers(int(sys.argv[2]), partial(work, folder=Path(sys.argv[1]), workers=int(sys.argv[2]))))
    main()
