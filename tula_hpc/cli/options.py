"""Options and input files that the commands share."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tula_hpc.command_errors import add_overrides, ending_at_once
from tula_hpc.env import slurm_conf
from tula_hpc.errors import InputError, NotConfiguredError, RunDirectoryError
from tula_hpc.files import in_words, is_there

if TYPE_CHECKING:
    from tula_hpc.config import ClusterSpec, SweepSpec

# stages of a sweep, in order
STAGES = ("profile", "plan", "train", "report")
# name of this package for pip
DISTRIBUTION = "tula_hpc"
# where Slurm's commands look if the variable SLURM_CONF is not set
SLURM_CONF = "/etc/slurm/slurm.conf"


def add_input_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `tula sweep` and `tula study` share."""
    parser.add_argument(
        "sweep", type=Path, metavar="SWEEP.toml", help="what to train; see sweeps/example.toml"
    )
    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="CLUSTER.toml",
        help="where to run; see slurm_templates/ (default: this machine)",
    )
    parser.add_argument(
        "--run-dir", type=Path, metavar="RUN", help="where results go (default: runs/NAME)"
    )
    add_overrides(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the jobs, their scripts, and Slurm's answer to them; submit nothing",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="at the end print the JSON object of tula status --json; all else goes to standard error",
    )
    _add_detaching(parser)


def _add_detaching(parser: argparse.ArgumentParser) -> None:
    who = parser.add_mutually_exclusive_group()
    who.add_argument(
        "--detach",
        action="store_true",
        help="submit, and return at once: small Slurm jobs carry on (see tula status RUN)",
    )
    who.add_argument(
        "--take-over",
        action="store_true",
        help="carry on here with a detached sweep, and cancel its controller jobs",
    )


@ending_at_once()
def load_inputs(options: argparse.Namespace) -> tuple[SweepSpec, ClusterSpec]:
    """Read the sweep and the cluster; check each by itself and both together.

    Raises:
        InputError: There are mistakes; the message has one line for each.
    """
    if options.json and options.dry_run:
        raise InputError(
            "describes a run, but --dry-run makes none; leave out one of them", source="--json"
        )
    if options.take_over and options.dry_run:
        raise InputError(
            "cancels controller jobs, but --dry-run changes nothing; leave out one of them",
            source="--take-over",
        )
    from tula_hpc.config import exposure_warning, hidden_peers, load_together, loaders_without_cores
    from tula_hpc.launch.slurm import available

    if warning := exposure_warning(options.set):
        sys.stderr.write(f"warning: {warning}\n")
    missing = ""
    try:
        spec, cluster = load_together(options.sweep, options.cluster, options.set)
    except InputError as error:
        spec, cluster = _load_without_paths(options, error)
        missing = str(error)
    _warn_of_idle_keys(options, spec, cluster)
    for key, why in dict.fromkeys((*hidden_peers(cluster), *loaders_without_cores(spec, cluster))):
        file = options.sweep if key.startswith("workload.") else options.cluster or "cluster"
        sys.stderr.write(f"warning: {file}: {key}: {why}\n")
    for line in missing.splitlines():
        sys.stderr.write(f"warning: {line}\n")
    if options.cluster is None and available() and Path(slurm_conf() or SLURM_CONF).is_file():
        sys.stderr.write(
            "no --cluster: everything runs on this machine; "
            "--cluster CLUSTER.toml sends jobs to its Slurm\n"
        )
    if cluster.container is None:
        _refuse_missing_trackers(options, spec)
    _refuse_detached_here(options, cluster)
    return spec, cluster


def _warn_of_idle_keys(options: argparse.Namespace, spec: SweepSpec, cluster: ClusterSpec) -> None:
    """Warn of given keys that have no effect."""
    from tula_hpc.config import idle_cluster_keys, idle_keys, idle_reference

    for key, why in idle_keys(spec):
        sys.stderr.write(f"warning: {options.sweep}: {key}: changes nothing: {why}\n")
    for key, why in idle_cluster_keys(cluster):
        file = options.cluster or "cluster"
        sys.stderr.write(f"warning: {file}: {key}: changes nothing: {why}\n")
    for key, why in idle_reference(spec):
        sys.stderr.write(f"warning: {options.sweep}: {key}: {why}\n")


def _refuse_detached_here(options: argparse.Namespace, cluster: ClusterSpec) -> None:
    """Refuse the options of a detached sweep if jobs do not go through Slurm."""
    if options.detach and cluster.executor != "slurm":
        raise InputError(
            'needs a cluster with executor = "slurm"; here use nohup or tmux', source="--detach"
        )
    if options.take_over and cluster.executor != "slurm":
        raise InputError(
            'nothing is detached here, since that needs executor = "slurm"; leave it out',
            source="--take-over",
        )


def _refuse_missing_trackers(options: argparse.Namespace, spec: SweepSpec) -> None:
    """Refuse a tracker whose package is not installed here, unless only the nodes need it."""
    from tula_hpc.tracking.trackers import missing

    if spec.search.estimate and (names := missing(spec.training.log_to)):
        message = (
            f"{names[0]} is not installed; pip install '{DISTRIBUTION}[{','.join(names)}]', or set "
            "search.estimate = false if only the nodes have it"
        )
        raise InputError(message, source=options.sweep, key="training.log_to")


def _load_without_paths(
    options: argparse.Namespace, mistake: InputError
) -> tuple[SweepSpec, ClusterSpec]:
    """Return inputs that name folders or modules which this machine lacks, if that is allowed.

    Raises:
        InputError: That is not allowed, or there are other mistakes.
    """
    from tula_hpc.config import load_together
    from tula_hpc.own_sources import find_source, module_files
    from tula_hpc.records import RunDirectory
    from tula_hpc.stages.rehearsal import with_remedy

    try:
        spec, cluster = load_together(
            options.sweep, options.cluster, options.set, check_paths=False
        )
    except InputError:
        raise mistake from None
    if options.dry_run and _lacks_only_data(options):
        return spec, cluster
    script = spec.workload.script
    if script and not script.exists() and RunDirectory(run_root(options, spec)).has_results():
        raise InputError(
            f"{script}: no such file; check the path. If this run has measured it, give the file that "
            "name again, or measure another script with another --run-dir",
            source=options.sweep,
            key="workload.script",
        ) from None
    # jobs on this machine would lack the same files as this command
    if not spec.workload.names_data or cluster.executor == "local":
        raise mistake from None
    if not spec.search.estimate:
        return spec, cluster
    lacking = []
    for name in spec.workload.entry_points:
        module = name.partition(":")[0]
        if not Path(name).exists() and not find_source(module):
            lacking.append(module)
    # `mistake` already says where these files are, or how to write their names
    next_to_sweep = (module_files(options.sweep.parent, module) for module in lacking)
    files = (module.removesuffix(".py") for module in lacking if module.endswith(".py"))
    if any(next_to_sweep) or any(map(find_source, files)):
        raise mistake from None
    if not lacking and not _lacks_only_data(options):
        raise mistake from None
    raise InputError(with_remedy(str(mistake), cluster)) from None


def _lacks_only_data(options: argparse.Namespace) -> bool:
    """Tell whether only the data folder is missing, which a dry run does not need."""
    from tula_hpc.config import load_together

    with contextlib.suppress(InputError):
        load_together(options.sweep, options.cluster, [*options.set, "workload.data_dir=/"])
        return True
    return False


def refuse_impossible(
    options: argparse.Namespace, spec: SweepSpec, cluster: ClusterSpec, root: Path
) -> None:
    """Refuse a partition or number of nodes that Slurm does not have, until a training begins.

    Raises:
        InputError: Slurm does not have them.
        NotConfiguredError: Slurm's commands find no configuration; a dry run goes on without.
    """
    from tula_hpc.records import RunDirectory
    from tula_hpc.stages.context import Sweep
    from tula_hpc.stages.preview import impossible

    sweep = Sweep(spec, cluster, RunDirectory(root))
    if cluster.executor != "slurm" or sweep.run.has_trained():
        return
    # each of Slurm's commands would wait for this file for a minute
    if (file := slurm_conf()) and not os.access(file, os.R_OK):
        raise InputError(f"no readable file {file}; correct it, or unset it", source="SLURM_CONF")
    try:
        found = impossible(sweep)
    except NotConfiguredError:
        if options.dry_run:
            return
        raise
    if found is not None:
        key, words = found
        given = {each.partition("=")[0].strip() for each in options.set}
        if f"cluster.{key}" in given:
            raise InputError(words, source="--set", key=f"cluster.{key}")
        raise InputError(words, source=options.cluster or "cluster", key=key)


def run_root(options: argparse.Namespace, spec: SweepSpec) -> Path:
    """Return the run directory's path.

    Raises:
        RunDirectoryError: The path holds characters with a meaning in job scripts, it or a parent
            exists and is no folder, or a parent may not be searched.
    """
    from tula_hpc.records import RunDirectory

    usual = Path("runs") / spec.name
    root = Path(options.run_dir or usual)
    run = RunDirectory(root)
    run.check_name()
    try:
        is_there(root)
    except OSError as error:
        # a folder above it may not be searched
        message = f"cannot be reached: {in_words(error)}; use another --run-dir"
        raise RunDirectoryError(message, source=root.absolute()) from None
    existing = next(path for path in (run.root, *run.root.parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise RunDirectoryError("is not a folder; use another --run-dir", source=existing)
    earlier = options.sweep.parent / usual
    if options.run_dir is None and not root.exists() and (earlier / run.sweep_file.name).exists():
        sys.stderr.write(
            f"a new run, in {root.absolute()}; to go on with the one in {earlier.absolute()}, end this "
            f"command (Ctrl-C) and start it in {options.sweep.parent.absolute()}\n"
        )
    return root
