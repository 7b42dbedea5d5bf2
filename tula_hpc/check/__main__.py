"""Command `tula check CLUSTER.toml`: is a cluster as its file says, and fit for a training?

First this machine asks Slurm. Then a job of at most three minutes measures on two nodes; it is
submitted as profile and training jobs are. `site_verdicts` and `rank_verdicts` judge the results.

`--json` prints one object:

    cluster, exit_code
    logs         folder of the job's logs if the job did not end well; else ""
    partitions   for each: partition ("" without [[partitions]]),
                 verdicts (topic, level, found, remedy, hosts),
                 site (Slurm's answers, see `site.Site`), job_id, ranks (see `reports.RankReport`)
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from tula_hpc.check import MINUTES, NODES
from tula_hpc.command_errors import CommandParser, command

WAIT_MINUTES = 10

EXIT_CODES = """\
exit codes: 0 nothing failed; 1 something failed; 2 bad input; 130 interrupted, job cancelled.
--json prints the same as one JSON object; its keys are in the docstring of tula_hpc.check.__main__.
"""


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="tula check",
        description="Check a cluster before anything is trained there: its file, Slurm's limits, "
        f"and, by a job of at most {MINUTES} minutes on {NODES} nodes, devices, cores, network, "
        "data, signals and requeue.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("cluster", type=Path, metavar="CLUSTER.toml", help="see slurm_templates/")
    parser.add_argument(
        "--sweep",
        type=Path,
        metavar="SWEEP.toml",
        help="check this sweep's data folder and loader too (default: synthetic images)",
    )
    parser.add_argument(
        "--wait-minutes",
        type=minutes,
        default=WAIT_MINUTES,
        metavar="M",
        help=f"how long the job may wait for nodes (default: {WAIT_MINUTES})",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def minutes(text: str) -> float:
    """Return an option's minutes; argparse names this function if the text is no number."""
    number = float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"expected 0 minutes or more, got {text}")
    return number


def _run(options: argparse.Namespace) -> int:
    from tula_hpc.check.partition_check import check_cluster

    return check_cluster(options)


main = command(_parser, _run)

if __name__ == "__main__":
    sys.exit(main())
