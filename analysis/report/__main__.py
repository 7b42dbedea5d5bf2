"""Command that writes the report of a run or study: `tula report RUN`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tula_hpc.analysis.report.page import write_report
from tula_hpc.analysis.run_contents import holds_study
from tula_hpc.analysis.study import write_study_report
from tula_hpc.errors import InputError, TulaError
from tula_hpc.formatting import printable_output
from tula_hpc.records import RunDirectory


@printable_output()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 done, 1 no report could be written, 2 bad input."""
    parser = argparse.ArgumentParser(
        prog="tula report",
        description=(
            "Write figures, tables and the report of a run into RUN/report, from the files in RUN alone."
        ),
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory, finished or not")
    run = RunDirectory(parser.parse_args(arguments).run)
    try:
        paths = write_study_report(run) if holds_study(run) else write_report(run)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    except TulaError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error.filename or run.root}: {error.strerror or error}", file=sys.stderr)
        return 1
    print(paths[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
