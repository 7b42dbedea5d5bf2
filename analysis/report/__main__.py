"""Command that writes the report of a run or study, or of several runs: `tula report RUN …`.

`--json` prints one object: schema_version, run_directory, kind ("run", "study" or "runs"), page
(path of the HTML page) and files (paths of all written files, the page first). Paths are absolute;
of several run directories the first one is named.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tula_hpc.command_errors import CommandParser, exit_code_of
from tula_hpc.errors import RunDirectoryError
from tula_hpc.files import write_out
from tula_hpc.formatting import printable_output
from tula_hpc.records import RunDirectory


@printable_output()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 done, 1 failed, 2 bad input."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.out is not None and len(options.runs) == 1:
        parser.error("--out: is for the page of several runs; one run's page is in RUN/report")
    return exit_code_of(_run, options, again=False)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="tula report",
        description=(
            "Write figures, tables and the report of a run into RUN/report, from the files in RUN "
            "alone. With several runs, write one page that shows them side by side."
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
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _run(options: argparse.Namespace) -> int:
    runs = list(map(RunDirectory, options.runs))
    for run in runs:
        # checked before the libraries for drawing are loaded
        run.require()
    from tula_hpc.analysis.report.several.runs_page import write_runs_report
    from tula_hpc.analysis.report.study_page import write_study_report
    from tula_hpc.analysis.run_contents import holds_study

    first = runs[0]
    if len(runs) > 1:
        kind = "runs"
        paths = write_runs_report(runs, options.out)
    elif holds_study(first):
        kind = "study"
        paths = write_study_report(first)
    else:
        kind = "run"
        paths = _write_run(first)
    if not options.json:
        write_out(f"{paths[0]}\n")
        return 0
    summary = {
        "schema_version": 1,
        "run_directory": str(first.root.absolute()),
        "kind": kind,
        "page": str(paths[0].absolute()),
        "files": [str(path.absolute()) for path in paths],
    }
    write_out(json.dumps(summary, indent=1) + "\n")
    return 0


def _write_run(run: RunDirectory) -> list[Path]:
    from tula_hpc.analysis.report.page import write_report

    for words in run.damage():
        print(f"warning: {words}", file=sys.stderr)
    paths = write_report(run)
    try:
        run.read_plan()
    except RunDirectoryError as error:
        print(error, file=sys.stderr)
    if not any(run.profile.glob("*.jsonl")):
        print("nothing is measured yet, and the report says no more than that", file=sys.stderr)
    return paths


if __name__ == "__main__":
    sys.exit(main())
