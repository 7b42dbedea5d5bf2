"""Command that writes the report of a run or study, or of several runs: `tula report RUN …`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tula_hpc.analysis.report.output import exit_code_of
from tula_hpc.analysis.report.page import write_report
from tula_hpc.analysis.report.several.runs_page import write_runs_report
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
            "alone. With several runs: one page of them side by side."
        ),
    )
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="a run directory, finished or not"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where the page of several runs goes (default: the first run's report folder)",
    )
    options = parser.parse_args(arguments)
    runs = [RunDirectory(path) for path in options.runs]
    if options.out is not None and len(runs) == 1:
        parser.error("--out: a run's own report stands in RUN/report")

    def write() -> None:
        print(_write(runs, options.out)[0])

    return exit_code_of(write, runs[0].root)


def _write(runs: Sequence[RunDirectory], folder: Path | None) -> list[Path]:
    if len(runs) > 1:
        return write_runs_report(runs, folder)
    return write_study_report(runs[0]) if holds_study(runs[0]) else write_report(runs[0])


if __name__ == "__main__":
    sys.exit(main())
