"""Run a job's workers inside a container image, by Apptainer or pyxis (Slurm's plug-in).

With `[container]` in the cluster file, every job that computes runs in an image: profiles,
trainings, `tula check`. The batch script, and a detached sweep's controller jobs, which need
Slurm's commands, stay outside. Each path that a worker needs is mounted under the same name: the
working directory, the run directory, the data folder and the folders of the user's own sources.
Variables of `[environment]` override the image's own; their values appear on no command line.

Inside, `container.python` runs the job. Nothing of the login node's Python is needed there: the
image has this package, of the same version, and its dependencies.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tula_hpc.config import ClusterSpec, WorkloadSpec
from tula_hpc.errors import InputError
from tula_hpc.own_sources import own_sources


class Folders(NamedTuple):
    """Folders that a workload reads from."""

    data: tuple[Path, ...] = ()
    # folders on Python's path that hold the user's own modules
    sources: tuple[Path, ...] = ()


NO_FOLDERS = Folders()


def folders_of(work: WorkloadSpec) -> Folders:
    """Return the folders that a workload reads from."""
    data = () if work.data_dir is None else (work.data_dir.absolute(),)
    found = own_sources(work.entry_points).items()
    # a file's path without the part that belongs to its module is the folder on Python's path
    above = (path.absolute().parents[len(Path(shown).parts) - 1] for shown, path in found)
    return Folders(data, tuple(dict.fromkeys(above)))


def mounts_of(cluster: ClusterSpec, folders: Folders, run: Path) -> list[str]:
    """Return the mounts: the needed paths, which keep their names inside, and the user's own.

    Raises:
        InputError: A path holds a character that separates mounts.
    """
    container = cluster.container
    own = () if container is None else container.mounts
    wanted = [Path.cwd(), run.absolute(), *folders.data, *folders.sources]
    for path in wanted:
        if any(letter in str(path) for letter in ",:"):
            message = f"{path} cannot be mounted: its name holds a comma or a colon"
            raise InputError(message, key="container")
    return [*map(str, _outermost(wanted)), *own]


def _outermost(paths: Iterable[Path]) -> list[Path]:
    """Leave out paths below another, and the root, which would hide the image."""
    unique = [path for path in dict.fromkeys(paths) if path.parent != path]
    return [path for path in unique if not any(other in path.parents for other in unique)]


def python_of(cluster: ClusterSpec, folders: Folders, run: Path, outside: str) -> str:
    """Return the shell words that start Python for a worker."""
    container = cluster.container
    if container is None:
        return shlex.quote(outside)
    if container.runtime == "pyxis":
        return shlex.quote(container.python)
    devices = ["--nv"] if cluster.device == "cuda" else []
    binds = [f"--bind={mount}" for mount in mounts_of(cluster, folders, run)]
    words = ["apptainer", "exec", *devices, *binds, f"--pwd={Path.cwd()}", *container.options]
    return shlex.join([*words, container.image, container.python])


def srun_options(
    cluster: ClusterSpec, folders: Folders, run: Path, names: Sequence[str]
) -> list[str]:
    """Return pyxis's options of srun; variables in `names` override the image's own."""
    container = cluster.container
    if container is None or container.runtime != "pyxis":
        return []
    kept = [*names, "PYTHONPATH"] if folders.sources else list(names)
    return [
        f"--container-image={container.image}",
        f"--container-mounts={','.join(mounts_of(cluster, folders, run))}",
        f"--container-workdir={Path.cwd()}",
        f"--container-env={','.join(kept)}",
        *container.options,
    ]


def export_lines(cluster: ClusterSpec, folders: Folders, names: Sequence[str]) -> list[str]:
    """Return shell lines that pass variables, already set at that point, into the container."""
    container = cluster.container
    if container is None:
        return []
    lines = []
    kept = list(names)
    if folders.sources:
        path = shlex.quote(":".join(map(str, folders.sources)))
        lines.append(f"export PYTHONPATH={path}${{PYTHONPATH:+:$PYTHONPATH}}")
        kept.append("PYTHONPATH")
    if container.runtime == "apptainer":
        lines += [f'export APPTAINERENV_{name}="${name}"' for name in kept]
    return lines


def describe(cluster: ClusterSpec, folders: Folders, run: Path) -> str:
    """Describe the container in which jobs run; "" without one."""
    container = cluster.container
    if container is None:
        return ""
    mounts = ", ".join(mounts_of(cluster, folders, run))
    return (
        f"{container.python} in {container.image}, by {container.runtime}; it must contain this "
        f"version of tula_hpc; mounted: {mounts}"
    )
