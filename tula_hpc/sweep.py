"""`python -m tula_hpc.sweep`: from a TOML file to a trained model and a report."""

from __future__ import annotations

import argparse
import difflib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tula_hpc.errors import InputError, RunDirectoryError, TulaError

if TYPE_CHECKING:
    from tula_hpc.config import ClusterSpec, SweepSpec
    from tula_hpc.records import Plan
    from tula_hpc.stages import Sweep

STAGES = ("profile", "plan", "train", "report")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0 done, 1 a stage failed, 2 bad input, 130 interrupted."""
    options = _parser().parse_args(arguments)
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # a killed login session ends like Ctrl-C: nothing is lost
    try:
        return _run(options)
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except TulaError as error:
        sys.stderr.write(f"{error}\nMend the cause and run the same command again: what is done is not done again.\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tula_hpc.sweep",
        description="Profile a training job at a few cluster and batch sizes, plan, train at the best, and report.",
        epilog="Running the same command again continues where it stopped.",
    )
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
    parser.add_argument("--until", choices=STAGES, default="report", help="stop after this stage")
    parser.add_argument(
        "--dry-run", action="store_true", help="print jobs, node-hours and sbatch scripts; submit nothing"
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    spec, cluster = _load(options)
    root = options.run_dir or Path("runs") / spec.name
    if options.dry_run:
        from tula_hpc.dry_run import describe_submission

        sys.stdout.write(describe_submission(spec, cluster, root))
        return 0
    sweep = _open_run(spec, cluster, root)
    with sweep.run.locked():
        try:
            return _run_stages(sweep, STAGES.index(options.until))
        except KeyboardInterrupt:
            _say_interrupted(sweep)
            return 130


def _run_stages(sweep: Sweep, last: int) -> int:
    from tula_hpc import profile_stage, stages

    if not stages.training_began(sweep.run):
        profile_stage.profile_stage(sweep)
        print(f"profiling cost: {_profiling_cost(sweep) or 'unknown'}")
    if last == STAGES.index("profile"):
        return 0
    plan = stages.plan_stage(sweep)
    _say_plan(plan)
    result = stages.train_stage(sweep, plan) if last >= STAGES.index("train") else None
    if last == STAGES.index("report"):
        paths = stages.report_stage(sweep)
        from tula_hpc.summary import print_summary

        print_summary(plan, sweep.run.measurements().records, result, _profiling_cost(sweep))
        print(f"report: {next(path for path in paths if path.suffix == '.html')}")
    return 0


def _profiling_cost(sweep: Sweep) -> str:
    from tula_hpc.analysis.profiling_cost import describe

    return describe(sweep.spec, sweep.cluster, sweep.run.measurements().records, sweep.run.job_notes())


def _say_interrupted(sweep: Sweep) -> None:
    from tula_hpc.stages import jobs_left

    sys.stderr.write("\ninterrupted. Run the same command again to continue.\n")
    jobs = [job for _, job in jobs_left(sweep)]
    if jobs:
        sys.stderr.write(f"jobs are left as they are; to cancel them: {sweep.launcher.cancel_command(jobs)}\n")


def _say_plan(plan: Plan) -> None:
    print(f"plan: {plan.reason}")
    for warning in plan.warnings:
        print(f"warning: {warning}")


def _load(options: argparse.Namespace) -> tuple[SweepSpec, ClusterSpec]:
    from tula_hpc.config import ClusterSpec, check_together, load_cluster, load_sweep

    mine = [text for text in options.set if not text.startswith("cluster.")]
    others = [text.removeprefix("cluster.") for text in options.set if text.startswith("cluster.")]
    spec = load_sweep(options.sweep, mine)
    if options.cluster is None and others:
        raise InputError("cluster.* needs --cluster", source="--set")
    cluster = ClusterSpec() if options.cluster is None else load_cluster(options.cluster, others)
    check_together(spec, cluster, options.sweep, options.cluster or "the default cluster (this machine)")
    return spec, cluster


def _open_run(spec: SweepSpec, cluster: ClusterSpec, root: Path) -> Sweep:
    """Make the run directory, or continue one that was made from the same inputs."""
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


if __name__ == "__main__":
    sys.exit(main())
