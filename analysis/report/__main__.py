"""Command that writes the report of a run or study: `tula report RUN`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tula_hpc.analysis.report.output import exit_code_of
from tula_hpc.analysis.report.page import write_report
from tula_hpc.analysis.report.study_page import write_study_report
from tula_hpc.analysis.run_contents import holds_study
from tula_hpc.formatting import printable_output
from tula_hpc.records import RunDirectory


@printable_output()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 done, 1 failed, 2 bad input."""
    parser = argparse.ArgumentParser(
        prog="tula report",
        description=(
            "Write figures, tables and the report of a run into RUN/report, from the files in RUN "
            "alone."
        ),
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory, finished or not")
    run = RunDirectory(parser.parse_args(arguments).run)

    def write() -> None:
        paths = write_study_report(run) if holds_study(run) else write_report(run)
        print(paths[0])

    return exit_code_of(write, run.root)


if __name__ == "__main__":
    sys.exit(main())
