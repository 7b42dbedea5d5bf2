"""Command `tula study`: train methods × batches × seeds of a [study] table and compare them."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tula_hpc.cli.options import add_input_options, load_inputs, refuse_impossible, run_root
from tula_hpc.command_errors import NOTHING_BEGUN, CommandParser, command
from tula_hpc.errors import InputError
from tula_hpc.files import write_out
from tula_hpc.formatting import command_line

if TYPE_CHECKING:
    from tula_hpc.config import ClusterSpec, SweepSpec


def _run(options: argparse.Namespace) -> int:
    return run(options, *load_inputs(options))


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="tula study",
        description="Train every method at every batch with every seed of a sweep's [study] table, "
        "and compare them.",
        epilog="Running the same command again continues where it stopped.",
    )
    add_input_options(parser)
    return parser


def run(
    options: argparse.Namespace, spec: SweepSpec, cluster: ClusterSpec, *, report: bool = True
) -> int:
    """Run the trainings that have no result yet, write the report, and list failures.

    Raises:
        InputError: The sweep has no [study] table.
        StageError: A training has no result; the others have theirs, and the report is written.
    """
    root = run_root(options, spec)
    if spec.study is None:
        message = f"expected a [study] table; without one use {command_line('sweep')}"
        raise InputError(message, source=options.sweep)
    refuse_impossible(options, spec, cluster, root)
    if options.dry_run:
        from tula_hpc.cli.dry_run import preview

        return preview(options, spec, cluster, root)
    from tula_hpc.cli.open_run import open_run, work

    sweep = open_run(spec, cluster, root, has_cluster_file=options.cluster is not None)
    until = "report" if report else "train"
    with status_at_end(root, wanted=options.json):
        return work(sweep, until, detach=options.detach, here=options.take_over)


@contextlib.contextmanager
def status_at_end(root: Path, *, wanted: bool) -> Iterator[None]:
    """Print the status of a run as JSON when its command ends, even with an error.

    Everything that the command itself prints goes to standard error.
    """
    if not wanted:
        yield
        return
    from tula_hpc.status.__main__ import status_of

    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        write_out(status_of(root).model_dump_json(indent=1) + "\n")


main = command(_parser, _run, NOTHING_BEGUN)

if __name__ == "__main__":
    sys.exit(main())
