"""Does Δ(G), or the gradient's norm, follow the Hessian's largest eigenvalue, as the paper's figure 3 says? As JSON.

    python -m tests.benchmarks.curvature_follows [--data FOLDER] [--out tests/benchmarks/results/curvature_follows.json]

A small network (`compact_cnn`, 16 pixels, with BatchNorm) learns 20 classes of CIFAR-100, or the digits if CIFAR-100 is
not there, by SGD with momentum at two batch sizes and three seeds; the learning rate falls to a tenth at 60 % of the
training. Evenly spaced points of a training record the largest eigenvalue of the Hessian and the norm of the gradient,
both on fixed samples, and the medians of Δ(G) and of the norm of the batch's gradient over all steps since the previous
point. The result has Spearman's rank correlations over the points of each training, and of the changes from point to
point, since the paper speaks of abrupt changes.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import statistics
import tarfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from tests.benchmarks.curvature import LocalHessian, measure_curvature
from tula_hpc.gradients.norms import foreach_norms, sum_of_squares
from tula_hpc.optim.gate import relative_change
from tula_hpc.workloads.small_cnns import compact_cnn

ROOT = Path(__file__).parents[2]
OUT = Path(__file__).parent / "results" / "curvature_follows.json"
DATA = Path(os.environ.get("TULA_SHARED_DATA", ROOT.parent / "shared" / "data")) / "cifar100"
CLASSES, PER_CLASS, PIXELS = 20, 150, 16
BATCHES, SEEDS = (32, 256), (0, 1, 2)
EPOCHS, RATE, MOMENTUM, DECAY = 15, 0.05, 0.9, 5e-4
DROP_AT, DROP = 0.6, 0.1
POINTS, CURVATURE_SAMPLES, TOLERANCE = 15, 192, 0.05
# at 15 points, |ρ| above this happens by chance once in twenty
FOLLOWS = 0.52


class Images(NamedTuple):
    """A training set in memory."""

    name: str
    # (n, 3, PIXELS, PIXELS)
    inputs: Tensor
    # (n,)
    targets: Tensor
    classes: int


class Point(NamedTuple):
    """Values at one point of a training, and over the steps since the previous point."""

    step: int
    lr: float
    eigenvalue: float
    residual: float
    # norm of the gradient on the fixed samples
    fixed_norm: float
    # norm of the batch's gradient, median over the steps
    batch_norm: float
    # median of Δ(G) over the steps
    variability: float
    # mean over the steps
    loss: float


def load_images(folder: Path) -> Images:
    """Load CIFAR-100 from its tar files or their unpacked tree; the digits if there is neither."""
    if not folder.is_dir():
        return _digits()
    found: dict[str, list[NDArray[np.uint8]]] = {}
    for label, content in _files(folder):
        found.setdefault(label, [])
        if len(found[label]) < PER_CLASS:
            found[label].append(_decoded(content))
        if len(found) > CLASSES:
            break
    pixels = np.stack([image for label in list(found)[:CLASSES] for image in found[label]])
    inputs = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    targets = torch.tensor([i for i, label in enumerate(list(found)[:CLASSES]) for _ in found[label]])
    return Images("cifar100", _prepared(inputs), targets, CLASSES)


def _files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield class and content of the training images, class by class."""
    for archive in sorted(folder.glob("train-*.tar")):
        with tarfile.open(archive) as tar:
            for member in tar:
                content = tar.extractfile(member) if member.name.endswith(".png") else None
                if content is not None:
                    yield Path(member.name).parent.name, content.read()
    for path in sorted(folder.glob("train/*/*.png")):
        yield path.parent.name, path.read_bytes()


def _decoded(content: bytes) -> NDArray[np.uint8]:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def _digits() -> Images:
    from sklearn.datasets import load_digits

    digits = load_digits()
    grey = torch.tensor(digits.images, dtype=torch.float32)[:, None].expand(-1, 3, -1, -1) / 16
    return Images("digits", _prepared(grey), torch.tensor(digits.target), 10)


def _prepared(inputs: Tensor) -> Tensor:
    small = interpolate(inputs, (PIXELS, PIXELS), mode="bilinear", antialias=True)
    return (small - small.mean((0, 2, 3), keepdim=True)) / small.std((0, 2, 3), keepdim=True)


def train(images: Images, batch: int, seed: int) -> list[Point]:
    """Train once, and return the points."""
    torch.manual_seed(seed)
    model = compact_cnn(images.classes, PIXELS)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)
    steps = EPOCHS * (len(images.targets) // batch)
    fixed = torch.randperm(len(images.targets))[:CURVATURE_SAMPLES]
    marks = {round(steps * (i + 1) / POINTS) for i in range(POINTS)}
    points: list[Point] = []
    window: list[tuple[float, float, float]] = []
    previous, start = torch.tensor(math.nan), None
    for step, index in enumerate(_order(len(images.targets), batch, steps), start=1):
        if step > DROP_AT * steps:
            optimizer.param_groups[0]["lr"] = RATE * DROP
        loss, square = _step(model, optimizer, images.inputs[index], images.targets[index])
        window.append((float(relative_change(square, previous)), float(square.sqrt()), loss))
        previous = square
        if step in marks:
            hessian = LocalHessian(
                model, cross_entropy, images.inputs[fixed], images.targets[fixed], list(model.parameters())
            )
            found = measure_curvature(hessian, start=start, tolerance=TOLERANCE)
            start = found.direction
            variability, norm = (
                statistics.median(filter(math.isfinite, c)) for c in list(zip(*window, strict=True))[:2]
            )
            mean_loss = statistics.fmean(row[2] for row in window)
            lr = optimizer.param_groups[0]["lr"]
            eigenvalue, residual, _ = found.dominant
            points.append(Point(step, lr, eigenvalue, residual, found.gradient_norm, norm, variability, mean_loss))
            window = []
    return points


def _order(samples: int, batch: int, steps: int) -> Iterator[Tensor]:
    """Yield the sample indices of `steps` batches, in a new random order each epoch."""
    taken = 0
    while True:
        for index in torch.split(torch.randperm(samples), batch):
            if len(index) == batch:
                yield index
                taken += 1
                if taken == steps:
                    return


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> tuple[float, Tensor]:
    optimizer.zero_grad()
    loss = cross_entropy(model(inputs), targets)
    torch.autograd.backward(loss)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    square = sum_of_squares(foreach_norms(gradients).values(), gradients[0].device)
    optimizer.step()
    return float(loss.detach()), square


FIRST_ORDER = ("variability", "batch_norm", "fixed_norm")


def correlations(points: Sequence[Point]) -> dict[str, float]:
    """Return the rank correlations of first-order quantities with the eigenvalue: of values, and of changes."""
    eigenvalues = [point.eigenvalue for point in points]
    found = {}
    for name in FIRST_ORDER:
        values = [float(getattr(point, name)) for point in points]
        found[name] = rank_correlation(values, eigenvalues)
        found[f"{name}_changes"] = rank_correlation(_changes(values), _changes(eigenvalues))
    sizes = [abs(change) for change in _changes(eigenvalues)]
    found["variability_to_size_of_change"] = rank_correlation([p.variability for p in points[1:]], sizes)
    return found


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation; pairs with a NaN are left out."""
    return float(spearmanr(first, second, nan_policy="omit").statistic)


def _changes(values: Sequence[float]) -> list[float]:
    """Return the changes of the logarithm from point to point; NaN where a value is not positive."""
    logs = [math.log(value) if value > 0 else math.nan for value in values]
    return [after - before for before, after in pairwise(logs)]


def verdict(ranks: Sequence[float]) -> str:
    """Say in words what the correlations of all trainings show together."""
    known = [rank for rank in ranks if math.isfinite(rank)]
    middle = statistics.median(known)
    one_sign = min(known) > 0 or max(known) < 0
    if abs(middle) < FOLLOWS or not one_sign:
        return "does not follow"
    return "follows" if middle > 0 else "moves the opposite way"


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the correlations over all trainings, and by batch."""
    result: dict[str, Any] = {}
    for name in runs[0]["rank_correlation"]:
        ranks = [run["rank_correlation"][name] for run in runs]
        of = {str(b): [r["rank_correlation"][name] for r in runs if r["batch"] == b] for b in BATCHES}
        result[name] = {
            "median": statistics.median(ranks),
            "lowest": min(ranks),
            "highest": max(ranks),
            "median_by_batch": {batch: statistics.median(each) for batch, each in of.items()},
            "verdict": verdict(ranks),
        }
    return result


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    started, images, runs = time.process_time(), load_images(options.data), []
    for batch in BATCHES:
        for seed in SEEDS:
            points = train(images, batch, seed)
            ranks = correlations(points)
            runs.append(
                {"batch": batch, "seed": seed, "rank_correlation": ranks, "points": [p._asdict() for p in points]}
            )
            print(
                f"B = {batch:4} seed {seed}", " ".join(f"{name} {rank:.2f}" for name, rank in ranks.items()), flush=True
            )
    shown = summary(runs)
    for name, row in shown.items():
        print(f"{name}: median {row['median']:.2f} [{row['lowest']:.2f}, {row['highest']:.2f}] {row['verdict']}")
    facts = {
        "data": images.name, "samples": len(images.targets), "classes": images.classes, "pixels": PIXELS,
        "epochs": EPOCHS, "lr": RATE, "drop_at": DROP_AT, "momentum": MOMENTUM, "weight_decay": DECAY,
        "curvature_samples": CURVATURE_SAMPLES, "tolerance": TOLERANCE, "torch": torch.__version__,
        "cpu_seconds": round(time.process_time() - started),
    }  # fmt: skip
    options.out.write_text(json.dumps({"setup": facts, "summary": shown, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
