"""Refuse to plan from measurements that were made with other inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from tula_hpc.config.cluster import ClusterSpec
from tula_hpc.config.sweep import SweepSpec
from tula_hpc.config.validation import Spec, is_hidden, line_of, shown
from tula_hpc.config.workload import WorkloadSpec
from tula_hpc.errors import InputError

# Keys of [workload] that do not change a step: length of the training, learning rate, place of the
# data. Measurements depend on all other keys of [workload].
FREE_OF_WORKLOAD = frozenset({
    "epochs", "lr", "schedule", "milestones", "gamma", "warmup_epochs", "data_dir", "resume_arguments",
    "hang_minutes",
})  # fmt: skip
MEASURED_OF_WORKLOAD = tuple(
    key for key in WorkloadSpec.model_fields if key not in FREE_OF_WORKLOAD
)
# keys of [training] that change a step, or what is timed in addition to it
MEASURED_OF_TRAINING = (
    "method", "base_batch", "preset", "small_batch", "granularity", "apply",
    "reference", "layer_wise", "clip_norm", "observe_gradients",
)  # fmt: skip
# keys of a cluster file, or of one of its partitions, that change a step
MEASURED_OF_CLUSTER = (
    "executor", "device", "workers_per_node", "cpus_per_worker", "partition", "gres", "constraint",
    "exclusive", "srun_args", "setup", "sbatch", "environment", "container",
)  # fmt: skip


def refuse_other_sweep(path: Path, measured: SweepSpec, wanted: SweepSpec) -> None:
    """Refuse a plan for a workload that was not measured, with a line for each key that differs."""
    found = [
        *_changed(path, ("workload",), MEASURED_OF_WORKLOAD, measured.workload, wanted.workload),
        *_changed(path, ("training",), MEASURED_OF_TRAINING, measured.training, wanted.training),
    ]
    _refuse(found)


def refuse_other_cluster(path: Path, measured: ClusterSpec, wanted: ClusterSpec) -> None:
    """Refuse a plan for a cluster that was not measured; partitions may be left out, not added."""
    before = measured.by_name()
    after = wanted.by_name()
    on = " and ".join(filter(None, before)) or "a cluster without partitions"
    found: list[str] = []
    for name in after:
        if name in before:
            continue
        new = name or "a cluster without partitions"
        remedy = f"to measure {new}, start a sweep with a new --run-dir"
        message = f"the measurements cover {on}; {remedy}"
        found.append(line_of(path, ("partitions",), message))
    _refuse(found)
    for name, part in after.items():
        table = ("partitions", name) if name else ()
        found += _changed(path, table, MEASURED_OF_CLUSTER, before[name], part)
    _refuse(found)


def _changed(
    path: Path, table: tuple[str, ...], keys: Iterable[str], measured: Spec, wanted: Spec
) -> Iterator[str]:
    for key in keys:
        old = getattr(measured, key)
        new = getattr(wanted, key)
        if old == new:
            continue
        hidden = is_hidden((key,))
        before = "with another value" if hidden else _with(old)
        now = "with this one" if hidden else _with(new)
        message = f"measured {before}; to measure {now}, start a sweep with a new --run-dir"
        yield line_of(path, (*table, key), message)


def _with(value: object) -> str:
    if value is None:
        return "without it"
    return f"with {shown(value.model_dump() if isinstance(value, Spec) else value)}"


def _refuse(lines: list[str]) -> None:
    if lines:
        raise InputError("\n".join(lines))
