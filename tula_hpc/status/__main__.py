"""`tula status RUN`: the jobs that ran, run, wait (and why) or failed, and the cost so far.

It only reads. It runs on any machine that sees the run directory, for any owner, stage and age of
the run. It asks Slurm if Slurm's commands are installed; if they are not, or do not answer within
seconds, it reports what the files say.

`--json` prints one object: the fields of `RunStatus` in `run_status.py` and of the records that it
holds, each explained where it is defined. Values are None if unknown; times are Unix seconds,
durations are seconds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tula_hpc.command_errors import CommandParser, command
from tula_hpc.errors import LaunchError
from tula_hpc.files import write_out

if TYPE_CHECKING:
    from tula_hpc.records import JobAccount
    from tula_hpc.status.jobs import Answer, JobStatus
    from tula_hpc.status.run_files import Facts
    from tula_hpc.status.run_status import RunStatus


QUEUE_TIMEOUT_S = 8.0
ACCOUNTING_TIMEOUT_S = 8.0
# number of latest failures whose logs are searched
LOGS = 20

EXIT_CODES = """\
exit codes: 0 finished, or still going on; 1 something failed for good, or waits until somebody
acts; 2 bad input, or RUN cannot be read; 3 nothing goes on by itself: run the same command again;
4 unknown, as the scheduler could not be asked.
--json prints the same as one JSON object; RunStatus in tula_hpc/status/run_status.py describes its keys.
"""


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="tula status",
        description="Show the state of a run: which jobs ran, run, wait (and for what) or failed, and the cost so far. "
        "Nothing is written or changed.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print one JSON object")
    how.add_argument(
        "--watch",
        action="store_true",
        help="keep showing it until the sweep has ended; Ctrl-C leaves and changes nothing",
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    from tula_hpc.status.text import status_text

    if options.watch:
        from tula_hpc.status.watch import watch

        return watch(lambda: status_of(options.run))
    status = status_of(options.run)
    width = shutil.get_terminal_size((110, 40)).columns
    write_out(
        status.model_dump_json(indent=1) + "\n" if options.json else status_text(status, width)
    )
    return status.exit_code


def status_of(root: Path) -> RunStatus:
    """Return the state of the run in that directory at this moment.

    Raises:
        RunDirectoryError: The directory holds no run, or cannot be read.
    """
    from tula_hpc.records import RunDirectory
    from tula_hpc.status.run_files import read_facts
    from tula_hpc.status.state import describe

    facts = read_facts(RunDirectory(root))
    answer, accounted = ask(facts)
    status = describe(facts, answer, _rate_labels(facts), accounted)
    latest = [_with_log(facts, job) for job in status.failures[-LOGS:]]
    return status.model_copy(update={"failures": [*status.failures[:-LOGS], *latest]})


def ask(facts: Facts) -> tuple[Answer, dict[str, list[JobAccount]]]:
    """Ask the scheduler for jobs that may not be over, and accounting for all jobs."""
    from tula_hpc.status.jobs import Answer

    if facts.executor == "slurm":
        return _ask_slurm(facts)
    if facts.executor == "local":
        return _ask_this_machine(facts), {}
    file = facts.run.cluster_file
    what = "is damaged" if file.exists() else "is missing (the same command writes it anew)"
    return Answer(None, f"{file} {what}, so it is unknown where its jobs run"), {}


def _ask_this_machine(facts: Facts) -> Answer:
    from tula_hpc.launch.local_executor import is_alive
    from tula_hpc.launch.slurm import JobState
    from tula_hpc.status.jobs import Answer, undecided

    host, here = facts.holder.host, os.uname().nodename
    jobs = undecided(facts)
    if jobs and host not in ("", here):
        return Answer(None, f"its jobs are processes of {host}, but this machine is {here}")
    folders = {job.job_id: facts.run.root / job.folder for job in jobs}
    alive = [job_id for job_id, folder in folders.items() if is_alive(folder, job_id)]
    return Answer(dict.fromkeys(alive, JobState("RUNNING", "")))


def _ask_slurm(facts: Facts) -> tuple[Answer, dict[str, list[JobAccount]]]:
    from tula_hpc.launch import slurm
    from tula_hpc.status.jobs import Answer, undecided

    jobs = {job.job_id: slurm.key_of(Path(job.folder).name) for job in undecided(facts)}
    accounted = _ask_accounting(facts)
    try:
        active = slurm.queue(jobs, QUEUE_TIMEOUT_S, jobs)
        # ids of cut-off submissions are unknown: only find out whether Slurm answers
        if facts.cut_off and not jobs:
            slurm.own_jobs(QUEUE_TIMEOUT_S)
    except LaunchError as error:
        return Answer(None, slurm.unreached(error)), accounted or {}
    if jobs and not active and accounted == {}:
        words = (
            "this machine's Slurm knows none of the jobs: they are another cluster's, or ended too "
            "long ago"
        )
        return Answer(None, words), {}
    known = accounted or {}
    last_states = {job_id: runs[-1].state for job_id, runs in known.items()}
    return Answer(active, last_states=last_states), known


def _ask_accounting(facts: Facts) -> dict[str, list[JobAccount]] | None:
    from tula_hpc.config import JOB_NAMES
    from tula_hpc.launch.slurm import accounted_runs

    submitted = facts.history.submissions()
    if not submitted:
        return None
    try:
        return accounted_runs(
            {job.job_id: job.stage for job in submitted},
            name_prefix=f"{facts.spec.job_name}-" if facts.spec else JOB_NAMES,
            since=submitted[0].submitted_at,
            timeout_s=ACCOUNTING_TIMEOUT_S,
        )
    except LaunchError:
        return None


def _rate_labels(facts: Facts) -> list[str]:
    """Return the labels of the trainings that choose a study's learning rates."""
    if facts.spec is None or facts.spec.study is None or not facts.spec.study.base_lrs:
        return []
    from tula_hpc.stages.study import trial_specs

    return list(trial_specs(facts.spec))


def _with_log(facts: Facts, job: JobStatus) -> JobStatus:
    from tula_hpc.status.run_files import find_log

    # only logs inside the run directory, whatever the events name
    folder = facts.run.slurm / Path(job.folder).name
    if not job.folder or not job.folder.isprintable():
        return job
    log_file, last_line = find_log(folder, job.job_id)
    return job.model_copy(update={"log_file": log_file, "detail": job.detail or last_line})


main = command(_parser, _run)

if __name__ == "__main__":
    sys.exit(main())
