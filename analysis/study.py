"""Write the report of a study: `python -m tula_hpc.analysis.study RUN`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tula_hpc.analysis.report.study_page import report_study
from tula_hpc.command_errors import CommandParser, exit_code_of
from tula_hpc.formatting import printable_output
from tula_hpc.records import RunDirectory


@printable_output()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 done, 1 failed, 2 bad input."""
    parser = CommandParser(
        prog="python -m tula_hpc.analysis.study",
        description=(
            "Write table, figures and verdicts of a study into RUN/report, from the files in RUN "
            "alone."
        ),
    )
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="a run directory of a study, finished or not"
    )
    return exit_code_of(_run, parser.parse_args(arguments), again=False)


def _run(options: argparse.Namespace) -> int:
    print(report_study(RunDirectory(options.run)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
