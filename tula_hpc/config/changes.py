"""Which inputs measurements depend on. A plan from other values of these would pass off the old numbers as theirs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from tula_hpc.config.cluster import ClusterSpec
from tula_hpc.config.sweep import SweepSpec
from tula_hpc.config.validation import Spec, is_hidden, line_of, shown
from tula_hpc.config.workload import WorkloadSpec
from tula_hpc.errors import InputError

# Of [workload] the length of training and its rate: they leave a step as it is. All else is
# measured.
FREE_OF_WORKLOAD = frozenset({"epochs", "lr", "schedule", "milestones", "gamma", "warmup_epochs"})
MEASURED_OF_WORKLOAD = tuple(
    key for key in WorkloadSpec.model_fields if key not in FREE_OF_WORKLOAD
)
# Of [training] what a step does, and what is timed beside it.
MEASURED_OF_TRAINING = (
    "method", "base_batch", "preset", "small_batch", "granularity", "exclude_norms", "apply", "reference",
    "layer_wise", "clip_norm", "observe_gradients",
)  # fmt: skip
# Of a cluster, or of one of its partitions, what runs a step.
MEASURED_OF_CLUSTER = (
    "executor", "device", "workers_per_node", "cpus_per_worker", "partition", "gres", "constraint", "exclusive",
    "srun_args", "setup", "sbatch", "environment",
)  # fmt: skip


def refuse_other_sweep(path: Path, measured: SweepSpec, wanted: SweepSpec) -> None:
    """Refuse a plan for another workload than the one that was measured.

    Args:
        path: Of the run's sweep file.
        measured: As the run was made.
        wanted: As the plan is asked for.

    Raises:
        InputError: One line for each key that differs.
    """
    found = _changed(path, ("workload",), MEASURED_OF_WORKLOAD, measured.workload, wanted.workload)
    _refuse(
        [
            *found,
            *_changed(
                path, ("training",), MEASURED_OF_TRAINING, measured.training, wanted.training
            ),
        ]
    )


def refuse_other_cluster(path: Path, measured: ClusterSpec, wanted: ClusterSpec) -> None:
    """The same of the cluster file; a partition may be left out, but none can be added."""
    before = dict(zip(measured.part_names(), measured.parts(), strict=True))
    after = dict(zip(wanted.part_names(), wanted.parts(), strict=True))
    _refuse(
        [line for name in after if name not in before for line in _not_measured(path, name, before)]
    )
    found = [
        line
        for name in after
        for line in _changed(
            path,
            ("partitions", name) if name else (),
            MEASURED_OF_CLUSTER,
            before[name],
            after[name],
        )
    ]
    _refuse(found)


def _not_measured(path: Path, name: str, measured: Iterable[str]) -> Iterator[str]:
    on = " and ".join(filter(None, measured)) or "a cluster without partitions"
    wanted = name or "one without partitions"
    yield line_of(
        path,
        ("partitions",),
        f"the measurements are of {on}; a sweep with a new --run-dir measures {wanted}",
    )


def _changed(
    path: Path, table: tuple[str, ...], keys: Iterable[str], measured: Spec, wanted: Spec
) -> Iterator[str]:
    for key in keys:
        old, new = getattr(measured, key), getattr(wanted, key)
        if old != new:
            there, wanted_one = (
                (_with(old), _with(new))
                if not is_hidden((key,))
                else ("with another", "with this one")
            )
            words = (
                f"the measurements are {there}; a sweep with a new --run-dir measures {wanted_one}"
            )
            yield line_of(path, (*table, key), words)


def _with(value: object) -> str:
    return "without it" if value is None else f"with {shown(value)}"


def _refuse(lines: list[str]) -> None:
    if lines:
        raise InputError("\n".join(lines))
