"""Command that writes the report of a run or study: `tula report RUN`.

`--json` prints one object: schema_version, run_directory, kind ("run" or "study"), page (path of
the HTML page) and files (paths of all that was written, the page first). Paths are absolute.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tula_hpc.analysis.report.output import exit_code_of
from tula_hpc.files import write_out
from tula_hpc.formatting import printable_output
from tula_hpc.records import RunDirectory


@printable_output()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 done, 1 failed, 2 bad input."""
    options = _parser().parse_args(arguments)
    run = RunDirectory(options.run)
    return exit_code_of(lambda: _write(run, as_json=options.json), run.root)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tula report",
        description=(
            "Write figures, tables and the report of a run into RUN/report, from the files in RUN "
            "alone."
        ),
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory, finished or not")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _write(run: RunDirectory, *, as_json: bool) -> None:
    from tula_hpc.analysis.report.page import write_report
    from tula_hpc.analysis.report.study_page import write_study_report
    from tula_hpc.analysis.run_contents import holds_study

    is_study = holds_study(run)
    paths = write_study_report(run) if is_study else write_report(run)
    if not as_json:
        print(paths[0])
        return
    told = {
        "schema_version": 1,
        "run_directory": str(run.root.absolute()),
        "kind": "study" if is_study else "run",
        "page": str(paths[0].absolute()),
        "files": [str(path.absolute()) for path in paths],
    }
    write_out(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
