"""A user's training script: its command line for a configuration, its place, and its run here.

A script finds its place among the workers in the variables of torchrun. It runs in a folder of its
own, with links to the files of the command's working directory: files that it writes do not collide
with those of another configuration.
"""

from __future__ import annotations

import math
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tula_hpc.config import SweepSpec
from tula_hpc.config.workload import PLACEHOLDER
from tula_hpc.env import WorkerEnvironment
from tula_hpc.records import Configuration

# relative: so near the batch that was asked for lies the mean of batches that are drawn anew
NEAR = 0.1


class Script(NamedTuple):
    """Script to be run as the main program, with its arguments filled in."""

    # of a file; else a module's name, as for `python -m`
    path: Path | None
    module: str | None
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name for messages."""
        return self.path.name if self.path is not None else str(self.module)

    def run(self, home: Path) -> None:
        """Run it as `python FILE ARGUMENTS` or `python -m MODULE ARGUMENTS` would.

        Args:
            home: The working directory of the command, where a module is found.

        Raises:
            SystemExit: It ends so, or raises whatever it raises.
        """
        sys.argv = [str(self.path or self.module), *self.arguments]
        if self.path is not None:
            sys.path.insert(0, str(self.path.parent))
            runpy.run_path(str(self.path), run_name="__main__")
            return
        sys.path.insert(0, str(home))
        runpy.run_module(str(self.module), run_name="__main__", alter_sys=True)


def script_of(
    sweep: SweepSpec, configuration: Configuration, run_dir: Path, *, resumes: bool = False
) -> Script:
    """Return the script of a sweep as it is started for a configuration.

    Args:
        sweep: Names it, with its arguments.
        configuration: Nodes and batch to train with.
        run_dir: Folder of this profile or training.
        resumes: Append the arguments with which it goes on.
    """
    work = sweep.workload
    arguments = work.arguments
    if resumes:
        arguments += work.resume_arguments
    return Script(
        work.script, work.module, filled(arguments, values_of(sweep, configuration, run_dir))
    )


def values_of(sweep: SweepSpec, configuration: Configuration, run_dir: Path) -> dict[str, str]:
    """Return the value of each placeholder, see `config.workload.PLACEHOLDERS`."""
    work = sweep.workload
    return {
        "local_batch": str(forward_batch(sweep, configuration)),
        "global_batch": str(configuration.global_batch),
        "accumulation": str(work.accumulation),
        "nodes": str(configuration.nodes),
        "workers": str(configuration.world_size),
        "epochs": str(work.epochs),
        "steps": str(max(1, work.epochs * (work.samples or 0) // configuration.global_batch)),
        "lr_scale": f"{lr_scale(sweep, configuration.global_batch):.10g}",
        "seed": str(work.seed),
        "run_dir": str(run_dir),
    }


def forward_batch(sweep: SweepSpec, configuration: Configuration) -> int:
    """Return the samples of one forward pass of one worker."""
    return configuration.local_batch // sweep.workload.accumulation


def lr_scale(sweep: SweepSpec, global_batch: int) -> float:
    """Return the factor of the learning rate from training.base_batch to a batch.

    B/base for `lrs` (Goyal et al., arXiv 1706.02677), its root for `sqrt` (Krizhevsky, arXiv
    1404.5997), else 1.
    """
    ratio = global_batch / sweep.training.base_batch
    scales = {"lrs": ratio, "sqrt": math.sqrt(ratio)}
    return scales.get(sweep.training.method, 1.0)


def filled(arguments: Sequence[str], values: Mapping[str, str]) -> tuple[str, ...]:
    """Return arguments with each known `{name}` replaced; other braces stay as they are."""
    return tuple(
        PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), text) for text in arguments
    )


def torchrun_variables(
    env: WorkerEnvironment, local_world_size: int, master: tuple[str, int], run_id: str
) -> dict[str, str]:
    """Return the variables by which a worker finds its place, as torchrun sets them.

    Args:
        env: Rank of the worker among those that run the script, node by node.
        local_world_size: Workers of a node.
        master: Host and free port of rank 0.
        run_id: The same for all workers, another one for each start.
    """
    node, local_rank = divmod(env.rank, local_world_size)
    return {
        "RANK": str(env.rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(env.world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "NODE_RANK": str(node),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(-(-env.world_size // local_world_size)),
        "ROLE_RANK": str(env.rank),
        "ROLE_WORLD_SIZE": str(env.world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
