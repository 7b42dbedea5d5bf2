"""What `--dry-run` prints: the arrays, an upper bound of node-hours, and the sbatch scripts."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.launch import Launcher
from tula_hpc.records import Configuration, RunDirectory


def describe_submission(spec: SweepSpec, cluster: ClusterSpec, root: Path) -> str:
    """Text for the user; nothing is created and no scheduler is asked."""
    from tula_hpc.analysis.search import candidates, propose

    wpn = cluster.workers_per_node
    proposed = propose(spec, cluster, [])
    lines = [
        f"sweep {spec.name!r} on {cluster.name!r} ({cluster.executor}), run directory {root}",
        f"{len(candidates(spec.search, wpn))} candidates, {len(proposed)} to profile ({spec.search.mode} search):",
    ]
    launcher = Launcher(cluster, RunDirectory(root), f"tula-{spec.name}")
    scripts: list[str] = []
    hours = 0.0
    for nodes, group in groupby(sorted(proposed), key=lambda c: c.nodes):
        array = list(group)
        hours += nodes * len(array) * cluster.profile_minutes / 60
        lines.append(f"  N={nodes}: local batches {', '.join(str(c.local_batch) for c in array)}")
        scripts += _script(launcher, cluster, "profile", array)
    largest = max(spec.search.cluster_sizes)
    lines.append(f"profiling: at most {hours:.2f} node-hours ({cluster.profile_minutes} min is the limit of a task)")
    hours = largest * cluster.train_minutes / 60
    lines.append(f"training: at most {hours:.2f} node-hours per submission, if {largest} nodes are chosen")
    scripts += _script(launcher, cluster, "train", [Configuration(largest, wpn, 1)])
    return "\n".join([*lines, *scripts]) + "\n"


def _script(launcher: Launcher, cluster: ClusterSpec, stage: str, array: list[Configuration]) -> list[str]:
    if cluster.executor == "local":
        return []
    minutes = cluster.profile_minutes if stage == "profile" else cluster.train_minutes
    nodes = array[0].nodes
    text = launcher.script(stage=stage, nodes=nodes, minutes=minutes, tasks=len(array))
    return [f"\n# ---- {stage}, N={nodes}, {len(array)} task(s) ----", text]
