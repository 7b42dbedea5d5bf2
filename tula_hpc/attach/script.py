"""A user's training script: its command line for a configuration, and its run in this process."""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tula_hpc.env import WorkerEnvironment

# what Lightning and others would take for a place of their own
HIDDEN = ("SLURM_", "SUBMITIT_", "PMI_", "PMIX_", "OMPI_", "PALS_")


class Script(NamedTuple):
    """Script to be run as the main program, with its arguments filled in."""

    # of a file; else a module's name, as for `python -m`
    path: Path | None
    module: str | None
    arguments: tuple[str, ...]

    def run(self) -> None:
        """Run it as `python FILE ARGUMENTS` or `python -m MODULE ARGUMENTS` would.

        Raises:
            SystemExit: It ends so, or raises whatever it raises.
        """
        sys.argv = [str(self.path or self.module), *self.arguments]
        if self.path is not None:
            sys.path.insert(0, str(self.path.parent))
            runpy.run_path(str(self.path), run_name="__main__")
            return
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(str(self.module), run_name="__main__", alter_sys=True)


def filled(arguments: Sequence[str], values: Mapping[str, str]) -> tuple[str, ...]:
    """Return arguments with each known `{name}` replaced; other braces stay as they are."""
    return tuple(
        re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), text)
        for text in arguments
    )


def torchrun_environment(
    env: WorkerEnvironment, local_world_size: int, master: tuple[str, int], run_id: str
) -> dict[str, str]:
    """Return the environment of a worker's process, as torchrun makes it.

    Args:
        env: Rank of the worker among those that run the script.
        local_world_size: Workers of a node.
        master: Host and free port of rank 0.
        run_id: The same for all workers, another one for each start.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(HIDDEN)}
    node = env.rank // local_world_size
    return kept | {
        "RANK": str(env.rank),
        "LOCAL_RANK": str(env.local_rank),
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
