"""Checks that need a real GPU. Each runs in its own process, and all run even if one fails.

    python -m tests.benchmarks.gpu_checks [--device cpu|cuda] [--only NAME …] [--out …]

`groups`: process groups over NCCL made and destroyed ten times, with a training step through LocalNorms' hook in each.
`pair`: two workers over gloo on one GPU with DistributedDataParallel, LocalNorms, and a checkpoint copied while
training continues; losses and weights as on the CPU. `sanitizer`: both again under TORCH_CUDA_SANITIZER.
`synchronizations`: how often a training step waits for the device, for every method. `profile`: a profile's step time
against steps that run without waiting. `overflows`: a profile in fp16 whose first steps overflow. `out_of_memory`: a
profile whose batch does not fit. `tight`: training in no more than the estimated memory.

With `--device cpu` the same code runs without a GPU, over gloo and with host memory that runs out; checks that have no
meaning there are skipped. The exit code is 1 if any check failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, HashStore
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from tula_hpc.checkpoint.background import BackgroundWriter
from tula_hpc.checkpoint.store import CheckpointStore
from tula_hpc.config import ClusterSpec, SweepSpec, WorkloadSpec
from tula_hpc.ddp.process_group import describe_versions, leave_group
from tula_hpc.ddp.worker import Worker
from tula_hpc.env import WorkerEnvironment
from tula_hpc.gradients.small_batch_norms import LocalNorms
from tula_hpc.launch.job_specs import ProfileJob
from tula_hpc.profiling.measure import measure
from tula_hpc.profiling.profile_loop import run_profile
from tula_hpc.profiling.work_queue import WorkQueue
from tula_hpc.records import Configuration, Measurement, read_records, with_rank_files
from tula_hpc.workloads.footprint import estimate_footprint

ROOT = Path(__file__).parents[2]
# for one check, which on an H100 takes at most a fifth of this
TIMEOUT_S = {"cpu": 600.0, "cuda": 180.0}
COMPACT = "tula_hpc.workloads.small_cnns:compact_cnn"
IMAGES = "tests.benchmarks.gpu_checks:images"
STEEP = "tests.benchmarks.gpu_checks:steep_loss"
GROUPS, STEPS = 10, 12
MIB = 1024**2
# memory limit in the check that has to exceed it
ALLOWED_BYTES = 768 * MIB
# batch of images of 64 × 64 pixels, whose first activations alone exceed that limit
TOO_LARGE = 4096
# largest relative difference between a profile's step time and that of free steps
PROFILE_ERROR = 0.10
FREE_STEPS, FREE_RUNS = 100, 6
# norm of the difference from the CPU over the CPU's norm; rounding grows from step to step
PAIR_ERROR = 1e-2

# intended device synchronizations of one step, by method and precision; other forms have none
MEANT = {
    # GradScaler checks whether any gradient overflowed before the optimizer may step
    "fp16": 1,
    # a step with a reference pass also reads the loss scale
    "fp16 with a reference pass": 2,
}


def images(spec: WorkloadSpec) -> tuple[TensorDataset, TensorDataset, int]:
    """Return a data set whose training images all share the memory of one image."""
    size = spec.image_size or 32
    one = torch.linspace(-1, 1, 3 * size * size).view(1, 3, size, size)
    count = 4 * TOO_LARGE
    labels = torch.arange(count) % 10
    return TensorDataset(one.expand(count, -1, -1, -1), labels), TensorDataset(one, labels[:1]), 10


def steep_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return losses whose gradients exceed float16 at the initial loss scale."""
    return 1e3 * nn.functional.cross_entropy(outputs, targets, reduction="none")


def sweep(method: str, *, workload: dict[str, Any] | None = None, **training: Any) -> SweepSpec:
    """Return a sweep of a small network on real images."""
    given = {"model": COMPACT, "dataset": "digits", "loader_workers": 0, "lr": 0.01}
    return SweepSpec.model_validate(
        {"name": "x", "workload": given | (workload or {}), "training": {"method": method, **training}}
    )


def place(rank: int, world_size: int) -> WorkerEnvironment:
    """Return a worker's place as the first on its own node, so that all workers use the first GPU."""
    return WorkerEnvironment(rank, world_size, 0, rank, "1", 0, ("here",), on_slurm=False)


# process groups


class OneWorkersNorms(LocalNorms):
    """LocalNorms for a single worker, which it refuses otherwise: NCCL allows only one worker on a GPU."""

    def attach(self, ddp: DistributedDataParallel) -> LocalNorms:
        """Register the hook without checking the number of workers."""
        self._ddp = ddp
        ddp.register_comm_hook(self, lambda state, bucket: state._reduce(bucket))
        return self


def check_groups(device: torch.device) -> dict[str, Any]:
    """Make ten groups, one after another; no step through the hook may synchronize."""
    seconds, waits = [], Counter[str]()
    for number in range(GROUPS):
        started = time.perf_counter()
        store = HashStore()
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
        waits += _step_through_hook(device, number)
        leave_group()
        seconds.append(time.perf_counter() - started)
    assert not waits, f"a step through the hook waits for the device: {dict(waits)}"
    return {"groups": GROUPS, "longest_s": round(max(seconds), 3)}


def _step_through_hook(device: torch.device, seed: int) -> Counter[str]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    ddp = DistributedDataParallel(model, device_ids=[0] if device.type == "cuda" else None)
    parameters = list(model.parameters())
    norms = OneWorkersNorms(parameters, 8).attach(ddp)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    inputs, targets = torch.randn(8, 3, 4, 4, device=device), torch.arange(8, device=device)
    for step in range(3):
        optimizer.zero_grad(set_to_none=True)
        # only the last step counts: DDP regroups its buckets after the first pass, and copies to the device then
        with counted(device if step == 2 else torch.device("cpu")) as waits:
            torch.autograd.backward(nn.functional.cross_entropy(ddp(inputs), targets))
            own, whole = norms.squares()[0], norms.averaged()
            optimizer.step()
        assert bool(torch.isfinite(own).all())
        torch.testing.assert_close(own, whole)
    norms.release()
    return waits


def check_pair(device: torch.device) -> dict[str, Any]:
    """Train two workers on the device, and compare them with two on the CPU."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kinds = {kind: folder / kind for kind in dict.fromkeys(["cpu", device.type])}
        for kind, path in kinds.items():
            path.mkdir()
            spawn(work_in_pair, (kind, path), nprocs=2)  # type: ignore[no-untyped-call]
        seen = {kind: [torch.load(path / f"{rank}.pt") for rank in range(2)] for kind, path in kinds.items()}
    here, there = seen[device.type], seen["cpu"][0]
    assert torch.equal(here[0]["weights"], here[1]["weights"]), "the two workers hold different weights"
    errors = {}
    for what in ("losses", "norms", "weights"):
        difference = torch.linalg.vector_norm(here[0][what] - there[what])
        errors[what] = float(difference / torch.linalg.vector_norm(there[what]))
        assert errors[what] < PAIR_ERROR, f"{what} differ by {errors[what]:.1e} from those of the CPU"
    return {"steps": STEPS, "difference_from_cpu": errors}


def work_in_pair(rank: int, kind: str, folder: Path) -> None:
    """Run one of the two workers."""
    torch.backends.cudnn.allow_tf32 = False
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = FileStore(str(folder / "store"), 2)
    # gloo accepts tensors on a GPU, and two workers on the same GPU
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.save(_trained_in_pair(rank, kind, folder), folder / f"{rank}.pt")
    leave_group()


def _trained_in_pair(rank: int, kind: str, folder: Path) -> dict[str, Tensor]:
    """Train one worker; in its own function, so that the model is freed before the group is left."""
    spec = sweep("ags", small_batch=8, workload={"augment": False})
    worker = Worker(spec, ClusterSpec.model_validate({"device": kind}), Configuration(2, 1, 16), place(rank, 2))
    assert isinstance(worker.norms, LocalNorms)
    saved = CheckpointStore(folder / f"{rank}")
    writer = BackgroundWriter(saved, worker.device)
    losses, norms, then = [], [], Tensor()
    for number, batch in enumerate(islice(worker.batches(), STEPS), start=1):
        losses.append(worker.train_step(*batch))
        norms.append(worker.optimizer.statistics().gradient_norm)  # type: ignore[attr-defined]
        if number == STEPS // 2:
            then = _flat(worker.parameters)
            state = {"model": worker.model.state_dict(), "optimizer": worker.optimizer.state_dict()}
            writer.begin(state, samples_seen=number, restart_count=0)
    landed = writer.finish()
    assert landed is not None
    _, error = landed
    assert error is None, error
    loaded = saved.load_latest()
    assert loaded is not None
    names = {id(parameter): name for name, parameter in worker.model.named_parameters()}
    kept = _flat([loaded.state["model"][names[id(parameter)]] for parameter in worker.parameters])
    assert torch.equal(kept, then), "the checkpoint does not hold the weights of the moment at which it began"
    worker.release()
    return {"losses": torch.stack(losses).cpu(), "norms": torch.tensor(norms), "weights": _flat(worker.parameters)}


def _flat(tensors: list[Any]) -> Tensor:
    return torch.cat([tensor.detach().flatten().cpu() for tensor in tensors])


def check_sanitizer(device: torch.device) -> dict[str, Any]:
    """Repeat both checks above under torch's CUDA sanitizer, which raises if streams race."""
    if device.type == "cpu":
        return {"skipped": "there are no streams"}
    for name in ("groups", "pair"):
        done = start(name, device, TORCH_CUDA_SANITIZER="1")
        assert done["ok"], done
    return {"watched": ["groups", "pair"]}


# steps


@contextmanager
def counted(device: torch.device) -> Iterator[Counter[str]]:
    """Count by line of code the operations that make the host wait for a GPU."""
    waits = Counter[str]()
    if device.type == "cpu":
        yield waits
        return
    torch.cuda.synchronize(device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
    synchronizing = (each for each in caught if "synchronizing CUDA operation" in str(each.message))
    waits.update(f"{each.filename}:{each.lineno}" for each in synchronizing)


PAPER: dict[str, Any] = {"preset": "paper", "small_batch": 8, "update_interval_epochs": 0.01}
LAMB: dict[str, Any] = {"optimizer": "adamw", "lr": 1e-3}
FORMS: dict[str, SweepSpec] = {
    **{method: sweep(method) for method in ("lbt", "lrs", "sqrt", "lars", "polo", "adascale", "static", "ags")},
    "lamb": sweep("lamb", workload=LAMB),
    "ags by element": sweep("ags", **PAPER),
    "ags, clipped": sweep("ags", clip_norm=1.0),
    "ags on updates": sweep("ags", apply="update", workload=LAMB),
    "lbt, not observed": sweep("lbt", observe_gradients=False),
    "lbt, channels last": sweep("lbt", workload={"channels_last": True}),
    "fp16": sweep("lbt", workload={"precision": "fp16"}),
    "fp16 with a reference pass": sweep("ags", **PAPER, workload={"precision": "fp16"}),
}


def check_synchronizations(device: torch.device) -> dict[str, Any]:
    """Count the synchronizations of every method, in the worst of some steps after the first ones."""
    found = {name: _waits(spec, device) for name, spec in FORMS.items()}
    worse = {name: lines for name, lines in found.items() if sum(lines.values()) > MEANT.get(name, 0)}
    assert not worse, f"steps wait for the device: {worse}"
    return {"most_in_a_step": {name: sum(lines.values()) for name, lines in found.items()}, "meant": MEANT}


def _waits(spec: SweepSpec, device: torch.device) -> Counter[str]:
    worker = Worker(spec, ClusterSpec.model_validate({"device": device.type}), Configuration(1, 1, 32), place(0, 1))
    batches, steps = worker.batches(), list[Counter[str]]()
    for number in range(STEPS):
        batch = next(batches)
        with counted(device) as waits:
            worker.train_step(*batch)
        if number >= 3:
            steps.append(waits)
    return max(steps, key=Counter.total)


def check_overflows(device: torch.device) -> dict[str, Any]:
    """Profile with a loss scale that is too large at first, so that steps are skipped; everything is still measured."""
    if device.type == "cpu":
        return {"skipped": "there is no fp16"}
    workload = {"precision": "fp16", "loss": STEEP, "lr": 1e-6}
    spec, cluster = sweep("ags", **PAPER, workload=workload), ClusterSpec.model_validate({"device": device.type})
    worker = Worker(spec, cluster, Configuration(1, 1, 32), place(0, 1))
    first = worker.scaler.get_scale()
    for batch in islice(worker.batches(), STEPS):
        worker.train_step(*batch)
    settled = worker.scaler.get_scale()
    assert settled < first, "no step has overflowed"
    found = measure(spec, cluster, Configuration(1, 1, 32), place(0, 1))
    assert found.noise_samples, "gradients of parts of a batch overflow"
    assert found.samples["update"]
    return {"loss_scale": [first, settled], "noise_samples": found.noise_samples}


def check_profile(device: torch.device) -> dict[str, Any]:
    """Compare a profile's step time with steps that never wait for the device, for a short and a long step."""
    batches = (64, 1024) if device.type == "cuda" else (16, 64)
    rows = {str(batch): _profiled(device, batch) for batch in batches}
    wrong = {batch: row for batch, row in rows.items() if abs(row["ratio"] - 1) > PROFILE_ERROR}
    # on CPU other work disturbs either time too much for a comparison
    assert not wrong or device.type == "cpu", f"a profile's step time is not that of free steps: {wrong}"
    return rows


def _profiled(device: torch.device, batch: int) -> dict[str, Any]:
    # as in a job; otherwise Python's garbage collection would search all objects of the libraries again and again
    gc.collect()
    gc.freeze()
    # no step may include a reference pass, since a profile times it separately
    spec = sweep("ags", workload={"augment": False}, update_interval_epochs=1e6)
    cluster = ClusterSpec.model_validate({"device": device.type})
    found = measure(spec, cluster, Configuration(1, 1, batch), place(0, 1))
    assert found.times is not None
    worker = Worker(spec, cluster, Configuration(1, 1, batch), place(0, 1))
    batches = worker.batches()
    # the first run warms up
    free = [_free_run(worker, batches) for _ in range(FREE_RUNS)][1:]
    return {"profile_s": found.times.step_time_s, "free_s": free, "ratio": found.times.step_time_s / median(free)}


def _free_run(worker: Worker, batches: Iterator[Any]) -> float:
    worker.synchronize_device()
    started = time.perf_counter()
    for _ in range(FREE_STEPS):
        worker.train_step(*next(batches))
    worker.synchronize_device()
    return (time.perf_counter() - started) / FREE_STEPS


# memory


def check_out_of_memory(device: torch.device) -> dict[str, Any]:
    """Let a profile job run out of memory: it records that and ends, and the process can still measure what fits."""
    spec = sweep("lbt", workload={"dataset": IMAGES, "image_size": 64, "augment": False})
    cluster = ClusterSpec.model_validate({"device": device.type})
    with tempfile.TemporaryDirectory() as name:
        output = Path(name) / "profile/1.jsonl"
        output.parent.mkdir()
        job = ProfileJob(spec, cluster, (Configuration(1, 1, TOO_LARGE),), output, nodes=1)
        with allowed(ALLOWED_BYTES, device):
            ending = _ending(lambda: run_profile(job, place(0, 1), WorkQueue(job, place(0, 1))))
        (record,) = read_records(Measurement, with_rank_files(output)).records
    wanted = "device_oom" if device.type == "cuda" else "host_oom"
    assert (record.status, str(record.failure)) == ("oom", wanted), record
    after = measure(sweep("lbt"), cluster, Configuration(1, 1, 32), place(0, 1))
    assert after.status == "ok"
    return {"record": wanted, "ending": ending, "measured_afterwards": after.status}


@contextmanager
def allowed(size_bytes: int, device: torch.device) -> Iterator[None]:
    """Limit this process's memory on the device: in all on CUDA, beyond its present size on CPU."""
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        torch.cuda.set_per_process_memory_fraction(size_bytes / total, device)
        yield
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + size_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def _ending(call: Callable[[], object]) -> str:
    try:
        call()
    except SystemExit as end:
        return str(end.code)
    raise AssertionError("the batch fits: nothing was shown")


def check_tight(device: torch.device) -> dict[str, Any]:
    """Train three networks for some steps in no more memory than is estimated before any profile."""
    if device.type == "cpu":
        return {"skipped": "on CPU the estimate is of the whole process"}
    fits = {}
    for model, size, batch in (("resnet50", 64, 128), ("mobilenet_v3_large", 224, 64), ("vgg11", 32, 512)):
        spec = sweep("lbt", workload={"model": model, "dataset": "synthetic", "image_size": size})
        cluster = ClusterSpec.model_validate({"device": "cuda"})
        peak = estimate_footprint(spec, cluster).peaks[batch]
        with allowed(peak, device):
            fits[model] = _trains(spec, cluster, batch)
        torch.cuda.empty_cache()
    assert all(fits.values()), f"the estimated memory is not enough: {fits}"
    return {"fits": fits}


def _trains(spec: SweepSpec, cluster: ClusterSpec, batch: int) -> bool:
    try:
        worker = Worker(spec, cluster, Configuration(1, 1, batch), place(0, 1))
        for step in islice(worker.batches(), 5):
            worker.train_step(*step)
        worker.synchronize_device()
    except torch.OutOfMemoryError:
        return False
    return True


# all of them

CHECKS: dict[str, Callable[[torch.device], dict[str, Any]]] = {
    "groups": check_groups,
    "pair": check_pair,
    "sanitizer": check_sanitizer,
    "synchronizations": check_synchronizations,
    "profile": check_profile,
    "overflows": check_overflows,
    "out_of_memory": check_out_of_memory,
    "tight": check_tight,
}


def start(name: str, device: torch.device, **environment: str) -> dict[str, Any]:
    """Run one check in its own process; return its result, or the end of its error output."""
    command = [sys.executable, "-m", "tests.benchmarks.gpu_checks", "--device", device.type, "--one", name]
    started = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            # with few processors, threads would wait for each other
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S[device.type] * (2 if name == "sanitizer" else 1),
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        return {"ok": False, "error": f"not over after {late.timeout:.0f} s"}
    row: dict[str, Any] = {"ok": done.returncode == 0, "seconds": round(time.perf_counter() - started, 1)}
    if done.returncode:
        return row | {"error": done.stderr.strip().splitlines()[-12:]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return row | found


def facts(device: torch.device) -> dict[str, Any]:
    """Return the device and the versions."""
    if device.type == "cpu":
        return {"device": "cpu", "versions": describe_versions()}
    major, minor = torch.cuda.get_device_capability()
    return {"device": torch.cuda.get_device_name(), "capability": major + minor / 10, "versions": describe_versions()}


def main() -> None:
    """Run one check (`--one`, in its own process), or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS))
    parser.add_argument("--out", type=Path, help="JSON file; default: standard output")
    parser.add_argument("--one", choices=list(CHECKS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    if options.one:
        print(json.dumps(CHECKS[options.one](device)))
        return
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU; --device cpu runs the checks that need none")
    result = facts(device) | {"checks": {}}
    for name in options.only:
        print(f"{name} ...", file=sys.stderr, end=" ", flush=True)
        row = result["checks"][name] = start(name, device)
        print("ok" if row["ok"] else f"FAILED: {row['error']}", file=sys.stderr)
    text = json.dumps(result, indent=1) + "\n"
    if options.out:
        options.out.write_text(text)
    else:
        print(text, end="")
    sys.exit(0 if all(row["ok"] for row in result["checks"].values()) else 1)


if __name__ == "__main__":
    main()
