"""What the commands share: their options, their inputs, the run directory, and how they end."""

from __future__ import annotations

import argparse
import difflib
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tula_hpc.errors import InputError, RunDirectoryError, TulaError

if TYPE_CHECKING:
    from tula_hpc.config import ClusterSpec, SweepSpec
    from tula_hpc.stages import Sweep


def add_input_options(parser: argparse.ArgumentParser) -> None:
    """The sweep file, the cluster file, the run directory, and single keys."""
    parser.add_argument("sweep", type=Path, metavar="SWEEP.toml", help="what to train; see sweeps/example.toml")
    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="CLUSTER.toml",
        help="where to run; see slurm_templates/ (default: this machine)",
    )
    parser.add_argument("--run-dir", type=Path, metavar="RUN", help="where results go (default: runs/NAME)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="section.key=value",
        help="override a key of the sweep, or of the cluster as cluster.key=value; repeatable",
    )


def exit_code_of(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Run a command; returns the exit code: 0 done, 1 a stage failed, 2 bad input, 130 interrupted."""
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # a killed login session ends like Ctrl-C: nothing is lost
    try:
        return run(options)
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except TulaError as error:
        sys.stderr.write(f"{error}\nMend the cause and run the same command again: what is done is not done again.\n")
        return 1
    except KeyboardInterrupt:
        return 130


def load_inputs(options: argparse.Namespace) -> tuple[SweepSpec, ClusterSpec]:
    """Read and check the sweep and the cluster, one by itself and both together.

    Raises:
        InputError: One line per mistake.
    """
    from tula_hpc.config import ClusterSpec, check_together, load_cluster, load_sweep

    mine = [text for text in options.set if not text.startswith("cluster.")]
    others = [text.removeprefix("cluster.") for text in options.set if text.startswith("cluster.")]
    spec = load_sweep(options.sweep, mine)
    if options.cluster is None and others:
        raise InputError("cluster.* needs --cluster", source="--set")
    cluster = ClusterSpec() if options.cluster is None else load_cluster(options.cluster, others)
    check_together(spec, cluster, options.sweep, options.cluster or "the default cluster (this machine)")
    return spec, cluster


def run_root(options: argparse.Namespace, spec: SweepSpec) -> Path:
    """The run directory's path."""
    return Path(options.run_dir or Path("runs") / spec.name)


def open_run(spec: SweepSpec, cluster: ClusterSpec, root: Path) -> Sweep:
    """Make the run directory, or continue one that was made from the same inputs.

    Raises:
        RunDirectoryError: It is something else, or was made from other inputs.
    """
    from tula_hpc.records import RunDirectory
    from tula_hpc.stages import Sweep

    run = RunDirectory(root)
    if run.root.exists() and not run.root.is_dir():
        raise RunDirectoryError("is not a folder", source=run.root)
    if run.root.is_dir() and any(run.root.iterdir()) and not run.sweep_file.exists():
        raise RunDirectoryError("is not empty and not a run directory; choose another --run-dir", source=run.root)
    try:
        run.create()
    except OSError as error:
        raise RunDirectoryError(f"cannot be made: {error.strerror}", source=run.root) from None
    for path, frozen in ((run.sweep_file, _frozen(spec)), (run.cluster_file, _frozen(cluster))):
        _freeze(path, frozen)
    return Sweep(spec, cluster, run)


def _freeze(path: Path, text: str) -> None:
    from tula_hpc.records import write_atomically

    if not path.exists():
        write_atomically(path, text)
        return
    before = path.read_text(encoding="utf-8")
    if before != text:
        changed = difflib.unified_diff(before.splitlines(), text.splitlines(), "run directory", "now", lineterm="", n=0)
        lines = "\n".join(line for line in changed if not line.startswith("@@"))
        message = f"was made from other inputs; use another --run-dir or the same inputs:\n{lines}"
        raise RunDirectoryError(message, source=path)


def _frozen(spec: SweepSpec | ClusterSpec) -> str:
    """The resolved input as TOML."""
    import tomli_w

    return tomli_w.dumps(spec.model_dump(mode="json", exclude_none=True))


def say_interrupted(sweep: Sweep) -> None:
    """How to go on, and how to cancel what still runs."""
    from tula_hpc.stages import jobs_left

    sys.stderr.write("\ninterrupted. Run the same command again to continue.\n")
    jobs = [job for _, job in jobs_left(sweep)]
    if jobs:
        sys.stderr.write(f"jobs are left as they are; to cancel them: {sweep.launcher.cancel_command(jobs)}\n")
