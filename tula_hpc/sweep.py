"""Command `tula sweep`: from a TOML file to a trained model and a report."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from tula_hpc.cli.options import (
    STAGES,
    add_input_options,
    load_inputs,
    refuse_impossible,
    run_root,
)
from tula_hpc.command_errors import NOTHING_BEGUN, CommandParser, command
from tula_hpc.errors import InputError
from tula_hpc.study import run, status_at_end

if TYPE_CHECKING:
    from tula_hpc.config import ClusterSpec, SweepSpec


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="tula sweep",
        description="Profile a training job at a few cluster and batch sizes, plan, train at the "
        "best, and report. A sweep with a [study] table compares methods instead, like tula study.",
        epilog="Running the same command again continues where it stopped.",
    )
    add_input_options(parser)
    parser.add_argument("--until", choices=STAGES, default="report", help="stop after this stage")
    return parser


def _run(options: argparse.Namespace) -> int:
    spec, cluster = load_inputs(options)
    if spec.study is not None:
        return _run_study(options, spec, cluster)
    root = run_root(options, spec)
    refuse_impossible(options, spec, cluster, root)
    if options.dry_run:
        from tula_hpc.cli.dry_run import preview

        return preview(options, spec, cluster, root, trains=options.until in ("train", "report"))
    from tula_hpc.cli.open_run import open_run, work

    sweep = open_run(spec, cluster, root, has_cluster_file=options.cluster is not None)
    with status_at_end(root, wanted=options.json):
        return work(sweep, options.until, detach=options.detach, here=options.take_over)


def _run_study(options: argparse.Namespace, spec: SweepSpec, cluster: ClusterSpec) -> int:
    if options.until in ("profile", "plan"):
        raise InputError(
            f"a sweep with [study] has no stage {options.until!r}; expected 'train' or 'report'",
            source="--until",
        )
    return run(options, spec, cluster, report=options.until == "report")


main = command(_parser, _run, NOTHING_BEGUN)

if __name__ == "__main__":
    sys.exit(main())
