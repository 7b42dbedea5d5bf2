"""Fake Slurm commands for PATH: they answer correctly, with a site's banner around the answer, or fail in many ways."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

# each command prints what Slurm 22.05 prints for an array of two tasks
GOOD = {
    "squeue": rf"""case "$*" in
*%F*) printf 'ARRAY_JOB_ID|NAME|UID\n12|x-train-1|{os.getuid()}\n12|x-train-1|{os.getuid()}\n' ;;
*%r*) printf 'JOBID|STATE|REASON|NAME_COMMAND\n12_0|RUNNING|None|x-1\n12_1|PENDING|Resources|x-1\n' ;;
*) printf 'JOBID|STATE\n12_0|RUNNING\n12_1|PENDING\n' ;;
esac""",
    "sacct": r"""case "$*" in
*NodeList*) printf '12_0|2|n[1-2]\n' ;;
*ElapsedRaw*) printf '12_0|x-train-1|PREEMPTED|30|2\n12_0|x-train-1|COMPLETED|70|2\n' ;;
*ExitCode*) printf '12_0|FAILED|1:0|x-1\n12_0.batch|FAILED|1:0|batch\n' ;;
*) printf '12|x-train-1\n' ;;
esac""",
    "scontrol": r"""case "$*" in
*config*) printf 'AccountingStorageEnforce = associations\nMaxArraySize            = 4001\n' ;;
*hostnames*) printf 'n1\nn2\n' ;;
*partition*) printf 'PartitionName=cpu Default=YES MaxTime=2-00:00:00 State=UP TotalNodes=100\n' ;;
*"show job"*) printf 'JobId=12 JobName=x JobState=CANCELLED Restarts=0 ExcNodeList=n9 PreemptTime=None\n' ;;
esac""",
    "sinfo": r"""case "$*" in
*%R*) printf 'cpu 40 192000\n' ;;
*) printf '20|40|192000|(null)|mixed|v100|n[01-20]\n' ;;
esac""",
    "sacctmgr": r"""case "$*" in
*assoc*) printf 'ml||normal|1-00:00:00|node=4\n' ;;
*) printf 'normal|12:00:00|node=8\n' ;;
esac""",
    "sbatch": r"""case "$*" in
*--test-only*) echo 'sbatch: Job 12 to start at 2026-11-24T12:00:00 using 4 processors on nodes n1' >&2 ;;
*) echo 'Submitted batch job 12' ;;
esac""",
    "scancel": ":",
    "srun": ":",
}
# lines that a parser may mistake for ids, rows, headings, fields or hosts
BANNER = r"printf 'Welcome to Example | 2026\n12 nodes are down: |a|\n7\n42|all|day\nMaintenance\n\n= 3\n'"
BYTES = r"""printf '\344\366\374 \377\376\000\033[31m\r\n'"""

Wrap = Callable[[str], str]
# correct answers with noise around them, which must still be understood
AROUND: Mapping[str, Wrap] = {
    "as it is": lambda good: good,
    "a banner before": lambda good: f"{BANNER}\n{good}",
    "a banner behind": lambda good: f"{good}\n{BANNER}",
    "a banner beside": lambda good: f"{BANNER} >&2\n{good}\n{BANNER} >&2",
    "bytes that are no UTF-8 before": lambda good: f"{BYTES}\n{good}",
    "bytes that are no UTF-8 beside": lambda good: f"{BYTES} >&2\n{good}",
}
# commands that run and give no usable answer
INSTEAD: Mapping[str, Wrap] = {
    "nothing": lambda _: ":",
    "a banner": lambda _: BANNER,
    "bytes that are no UTF-8": lambda _: BYTES,
    "a failure without a word": lambda _: "exit 3",
    "a failure with bytes": lambda _: f"{BYTES} >&2\nexit 1",
    "a kill": lambda _: "kill -9 $$",
    "an answer without end": lambda _: "exec /usr/bin/yes '12_0|RUNNING|None|x-1'",
    "an error without end": lambda _: "exec /usr/bin/yes error >&2",
    "no end": lambda _: "exec /bin/sleep 600",
    "a child without end": lambda good: f"{good}\n/bin/sleep 600 &",
}
# commands that cannot be started
BROKEN: Mapping[str, Callable[[Path], object]] = {
    "no right to run it": lambda path: path.chmod(0o600),
    "no shebang": lambda path: path.write_text("echo hello\n"),
    "an interpreter that is not there": lambda path: path.write_text("#!/nowhere/sh\n"),
    "a folder": lambda path: path.rename(path.with_suffix(".moved")).with_name(path.name).mkdir(),
    "nothing at all": lambda path: path.unlink(),
}
FAULTS = (*INSTEAD, *BROKEN)


def put_commands(folder: Path, how: str = "as it is", only: str = "") -> None:
    """Write all commands into a folder; `only`, or all if it is empty, behave as `how` says, the others correctly."""
    for name, good in GOOD.items():
        path = folder / name
        mine = how if only in ("", name) else "as it is"
        wrap = {**AROUND, **INSTEAD}.get(mine, AROUND["as it is"])
        path.write_text(f"#!/bin/sh\n{wrap(good)}\n")
        path.chmod(0o700)
        if mine in BROKEN:
            BROKEN[mine](path)
