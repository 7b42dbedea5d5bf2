"""Whole sweeps on one GPU, by the command, as a user runs them: profiled, planned, trained and reported, as JSON.

    python -m tests.benchmarks.gpu_sweeps WORK [--device cpu|cuda] [--only NAME …] [--out …]

WORK is a folder for run directories. The built-in loop trains images in three precisions and a language model; scripts
on plain torch (mixed precision, `tula.keep`), Trainer, Lightning and accelerate follow. For each sweep:

- promised_s, its 90 % interval, taken_s: predicted and actual seconds of the whole training, and of its steps alone;
- measured: number of configurations, and of those whose steps, memory and noise are known;
- step_error: step time predicted over measured, minus 1, for each batch except the smallest and the largest; the
  model is fitted to the other batches.

`stopped` trains twice, once undisturbed and once stopped by USR2 and resumed: final loss and scores must be equal bit
for bit, for the built-in loop and for the script. The exit code is 1 if a command failed or results differ.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
import torch

from tula_hpc.analysis.costs.spread import TimePart
from tula_hpc.analysis.models.profiles import summarize
from tula_hpc.analysis.models.step_time import fit_step_time
from tula_hpc.analysis.report.bill_text import bill_of
from tula_hpc.analysis.run_contents import read_run
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.launch.launcher import Launcher
from tula_hpc.records import Configuration, Measurement, RunDirectory, TrainResult, is_usable, read_metrics

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "attach" / "scripts"
COMMAND_S = 240
PATIENCE_S = 120
# steps
STOP_AT = 20


class Case(NamedTuple):
    """One sweep, and the smallest and largest batch by device."""

    workload: dict[str, Any]
    batches: tuple[int, int]
    method: str = "ags"


def _images(precision: str, **more: Any) -> Case:
    net = {"model": "resnet50", "dataset": "synthetic", "image_size": 64, "epochs": 10, "lr": 0.01}
    return Case({**net, "loader_workers": 4, "precision": precision, **more}, (64, 512))


def _script(name: str, *arguments: str, samples: int, epochs: int, batches: tuple[int, int], method: str) -> Case:
    given = ["--batch-size", "{local_batch}", "--epochs", "{epochs}", "--samples", str(samples), *arguments]
    table = {"script": str(SCRIPTS / name), "arguments": given, "samples": samples, "epochs": epochs}
    return Case(table, batches, method)


CASES = {
    "images bf16": _images("bf16"),
    "images fp16": _images("fp16", channels_last=True),
    "images fp32": _images("fp32", optimizer="adamw"),
    "language": Case(
        {
            "model": "tula_hpc.workloads.language_model:transformer",
            "dataset": "tula_hpc.workloads.language_model:programs",
            "loss": "tula_hpc.workloads.language_model:next_character_loss",
            "metric": "tula_hpc.workloads.language_model:next_character_right",
            "samples": 8192,
            "epochs": 3,
            "optimizer": "adamw",
            "lr": 1e-3,
            "loader_workers": 0,
        },
        (32, 512),
    ),
    "mixed_precision.py": _script("mixed_precision.py", samples=8192, epochs=6, batches=(64, 1024), method="ags"),
    "on_trainer.py": _script(
        "on_trainer.py", "--width", "128", samples=4096, epochs=3, batches=(64, 128), method="lbt"
    ),
    "on_lightning.py": _script(
        "on_lightning.py", "--width", "512", samples=8192, epochs=3, batches=(64, 128), method="ags"
    ),
    "on_accelerate.py": _script(
        "on_accelerate.py", "--width", "512", samples=8192, epochs=3, batches=(64, 128), method="ags"
    ),
}


def cluster_tables(device: str) -> dict[str, Any]:
    """Return a cluster file's tables for this machine with its one GPU."""
    tables: dict[str, Any] = {"name": "here", "executor": "local", "device": device}
    tables["cpus_per_worker"] = max(1, (os.cpu_count() or 2) // 2)
    tables["pricing"] = {"basis": "node-hour", "usd_per_node_hour": 3.0}
    if device == "cuda":
        _, total = torch.cuda.mem_get_info()
        tables["device_memory_gb"] = round(total / 2**30, 2)
    return tables


def swept(name: str, work: Path, device: str) -> dict[str, Any]:
    """Run one sweep by the command, and read its run directory."""
    case, stem = CASES[name], name.replace(" ", "_").replace(".", "_")
    smallest, largest = case.batches
    workload = case.workload
    if device == "cpu":
        largest = smallest
        workload = {**workload, "epochs": 1}
    tables = {
        "name": stem,
        "workload": workload,
        "search": {
            "cluster_sizes": [1],
            "min_batch": smallest,
            "max_batch": largest,
            "mode": "full",
            "max_seconds": 3.0,
        },
        "training": {"method": case.method, "base_batch": smallest},
    }
    files = [work / f"{stem}.{kind}.toml" for kind in ("sweep", "cluster")]
    for file, content in zip(files, (tables, cluster_tables(device)), strict=True):
        file.write_text(tomli_w.dumps(content))
    # otherwise measurements of an earlier version would be used
    shutil.rmtree(work / stem, ignore_errors=True)
    command = [sys.executable, "-m", "tula_hpc.sweep", str(files[0]), "--cluster", str(files[1])]
    command += ["--run-dir", str(work / stem)]
    started = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    (work / f"{stem}.out").write_text(done.stdout + done.stderr)
    row: dict[str, Any] = {"ok": done.returncode == 0, "seconds": round(time.perf_counter() - started, 1)}
    if done.returncode:
        return row | {"error": (done.stdout + done.stderr).strip().splitlines()[-15:]}
    return row | outcome(RunDirectory(work / stem))


def outcome(run: RunDirectory) -> dict[str, Any]:
    """Return what a finished sweep predicted, measured and took."""
    contents = read_run(run)
    plan = run.read_plan()
    bill = bill_of(plan, contents.events, contents.trainings[0])
    assert bill is not None
    measured = [each for each in contents.measurements if is_usable(each)]
    steps = bill.parts[TimePart.STEPS]
    result = TrainResult.model_validate_json(run.train().result_file.read_text())
    return {
        "chosen": str(plan.chosen.configuration),
        "promised_s": bill.whole.expected,
        "interval_s": bill.whole.interval,
        "taken_s": bill.whole.actual,
        "verdict": str(bill.whole.verdict),
        "steps_promised_s": steps.expected,
        "steps_taken_s": steps.actual,
        "off": [str(part) for part in bill.parts_off()],
        "measured": {
            "configurations": len(measured),
            "steps": sum(each.times is not None for each in measured),
            "memory": sum(each.memory is not None for each in measured),
            "noise": sum(each.noise_scale > 0 for each in measured),
        },
        "step_s": {each.configuration.global_batch: each.times.step_time_s for each in measured if each.times},
        "step_error": left_out(measured),
        "samples_seen": result.samples_seen,
        "test_accuracy": result.test_accuracy,
    }


def left_out(measured: list[Measurement]) -> dict[int, float]:
    """Return the error of the step time at each inner batch, predicted by a model of the other batches."""
    rows = sorted(measured, key=lambda each: each.configuration.global_batch)
    errors = {}
    for one in rows[1:-1]:
        assert one.times is not None
        model = fit_step_time(summarize([each for each in rows if each is not one]).profiles)
        errors[one.configuration.global_batch] = float(model.predict(1, one.local_batch)) / one.times.step_time_s - 1
    return errors


# stopped and resumed


def stopped(work: Path, device: str) -> dict[str, Any]:
    """Train undisturbed, and stopped and resumed, by the loop and by the script; compare the ends."""
    script = {**CASES["mixed_precision.py"].workload, "epochs": 4}
    script["arguments"] = [*script["arguments"], "--repeatable"]
    loop = {"model": "tests.benchmarks.gpu_sweeps:repeatable", "dataset": "synthetic", "epochs": 4, "lr": 0.05}
    specs = {"loop": {**loop, "loader_workers": 2, "cudnn_benchmark": False}, "script": script}
    rows: dict[str, Any] = {}
    for name, workload in specs.items():
        training = {"method": "ags", "small_batch": 32, "base_batch": 32, "log_interval_steps": 1, "drift": False}
        spec = SweepSpec.model_validate({"name": "x", "workload": workload, "training": training})
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=work))
        ends = [_trained(spec, folder / way, device, way == "cut") for way in ("whole", "cut")]
        rows[name] = {"equal": ends[0] == ends[1], "whole": ends[0], "cut": ends[1]}
    return {"ok": all(row["equal"] for row in rows.values()), **rows}


def repeatable(classes: int, image_size: int) -> torch.nn.Module:
    """Return a small network whose operators give the same bits each time on a GPU."""
    from tula_hpc.workloads.small_cnns import compact_cnn

    torch.use_deterministic_algorithms(True)
    return compact_cnn(classes, image_size)


def _trained(spec: SweepSpec, root: Path, device: str, is_cut: bool) -> tuple[Any, ...]:
    repeats = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    tables = cluster_tables(device) | {"environment": repeats}
    cluster = ClusterSpec.model_validate(tables)
    run = RunDirectory(root).create()
    run.make_train()
    launcher = Launcher(cluster, run, "tula-stop")
    jobs = launcher.submit([TrainJob(spec, cluster, Configuration(1, 1, 64), root)], stage="train", nodes=1, minutes=5)
    if is_cut:
        _stop(run, int(jobs[0].job_id))
    (ended,) = launcher.wait(jobs)
    assert run.train().result_file.exists(), ended.log_tail
    result = TrainResult.model_validate_json(run.train().result_file.read_text())
    assert result.restarts == int(is_cut), f"{result.restarts} restarts"
    return result.final_loss, result.test_loss, result.test_accuracy, result.steps, result.samples_seen


def _stop(run: RunDirectory, shell: int) -> None:
    """Send USR2 to the worker once it has reached step `STOP_AT`."""
    deadline = time.monotonic() + PATIENCE_S
    while not (steps := read_metrics(run.train().metrics_file).steps) or steps[-1].step < STOP_AT:
        assert time.monotonic() < deadline, "training did not get that far"
        time.sleep(0.02)
    workers = [worker for controller in _children(shell) for worker in _children(controller)]
    os.kill(max(workers), signal.SIGUSR2)


def _children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def main() -> None:
    """Run all sweeps, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    names = [*CASES, "stopped"]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--out", type=Path, help="JSON file; default: standard output")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    rows: dict[str, Any] = {}
    for name in options.only:
        print(f"{name} ...", file=sys.stderr, end=" ", flush=True)
        work = options.work.absolute()
        rows[name] = stopped(work, options.device) if name == "stopped" else swept(name, work, options.device)
        print("ok" if rows[name]["ok"] else f"FAILED: {rows[name]}", file=sys.stderr, flush=True)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    text = json.dumps({"device": device, "torch": torch.__version__, "sweeps": rows}, indent=1) + "\n"
    if options.out:
        options.out.write_text(text)
    else:
        print(text, end="")
    sys.exit(0 if all(row["ok"] for row in rows.values()) else 1)


if __name__ == "__main__":
    main()
