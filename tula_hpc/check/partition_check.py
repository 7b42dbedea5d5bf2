"""Check of each partition: Slurm's answers, a small job, and the verdicts on what both say."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tula_hpc.check import MINUTES, NODES
from tula_hpc.check.job import CheckJob
from tula_hpc.check.network_verdicts import judge_network
from tula_hpc.check.rank_verdicts import judge_job
from tula_hpc.check.reports import Probe, RankReport, Requeue
from tula_hpc.check.site import Site, ask_site, readable_here
from tula_hpc.check.site_verdicts import (
    Topic,
    Verdict,
    failed,
    judge_container,
    judge_data_here,
    judge_site,
)
from tula_hpc.config import JOB_NAMES, ClusterSpec, WorkloadSpec, load_cluster, load_together
from tula_hpc.containers import folders_of
from tula_hpc.errors import LaunchError, NotConfiguredError, NotStartedError, RunDirectoryError
from tula_hpc.files import make_private, write_out
from tula_hpc.formatting import wrapped
from tula_hpc.launch.diagnosis import explain, last_bytes, waits
from tula_hpc.launch.job_files import Submitted
from tula_hpc.launch.launcher import Launcher
from tula_hpc.launch.slurm import unreached
from tula_hpc.records import RunDirectory

# short, so that Slurm's signal before the time limit comes after the probes, which send their own
SIGNAL_DELAY_S = 10
POLL_S = 1.0
CANCEL_S = 10.0
LEVEL_WIDTH = 9
TOPIC_WIDTH = 18


def check_cluster(options: argparse.Namespace) -> int:
    """Check each partition and print the verdicts; return the exit code."""
    cluster, workload, looks_here = _load_inputs(options)
    run = _make_run_directory()
    checks = [
        _Check(name, part, workload, run, looks_here=looks_here)
        for name, part in cluster.by_name().items()
    ]
    try:
        for check in checks:
            check.begin()
        for check in checks:
            check.finish(60 * options.wait_minutes)
    except KeyboardInterrupt:
        for check in checks:
            if check.job is not None:
                sys.stderr.write(f"job {check.job.job_id} is cancelled\n")
        raise
    finally:
        for check in checks:
            check.cancel()
        if not any(check.keeps_logs for check in checks):
            shutil.rmtree(run.root, ignore_errors=True)
    logs = str(run.slurm) if run.root.exists() else ""
    has_failed = any(verdict.level == "failed" for each in checks for verdict in each.verdicts)
    report = {
        "cluster": cluster.name,
        "exit_code": int(has_failed),
        "logs": logs,
        "partitions": [check.as_json() for check in checks],
    }
    width = max(70, shutil.get_terminal_size((110, 40)).columns)
    as_json = f"{json.dumps(report, indent=1)}\n"
    write_out(as_json if options.json else _as_text(checks, logs, width))
    return int(has_failed)


def _load_inputs(options: argparse.Namespace) -> tuple[ClusterSpec, WorkloadSpec, bool]:
    """Return cluster, workload, and whether a sweep would look for its data on this machine."""
    if options.sweep is None:
        return load_cluster(options.cluster), WorkloadSpec(dataset="synthetic"), True
    # without check_paths: a missing data folder gets a line of the table instead
    sweep, cluster = load_together(options.sweep, options.cluster, check_paths=False)
    return cluster, sweep.workload, sweep.search.estimate


def _make_run_directory() -> RunDirectory:
    """Make a private folder below runs/, like that of a sweep, where the nodes see it."""
    parent = Path("runs")
    RunDirectory(parent).check_name()
    if parent.exists() and not parent.is_dir():
        raise RunDirectoryError("is not a folder; move it away", source=parent.absolute())
    make_private(parent)
    return RunDirectory(Path(tempfile.mkdtemp(prefix="check-", dir=parent))).create()


class _Check:
    """The check of one partition, or of a cluster without [[partitions]]."""

    def __init__(
        self,
        partition: str,
        cluster: ClusterSpec,
        workload: WorkloadSpec,
        run: RunDirectory,
        *,
        looks_here: bool,
    ) -> None:
        self.partition = partition
        self.cluster = cluster
        self.workload = workload
        self.looks_here = looks_here
        self.launcher = Launcher(_for_check(cluster), run, f"{JOB_NAMES}check", work=workload)
        several_hosts = self.launcher.executor.limits.several_hosts
        self.nodes = min(NODES, cluster.max_nodes) if several_hosts else 1
        folder = run.profile / (partition or "all")
        folder.mkdir(mode=0o700)
        self.task = CheckJob(cluster, workload, self.nodes, folder)
        self.expected = self.nodes * cluster.workers_per_node
        self.site: Site | None = None
        self.job: Submitted | None = None
        self.ranks: list[RankReport] = []
        self.verdicts: list[Verdict] = []
        # what was last said about the job
        self._said = ""

    def begin(self) -> None:
        """Judge Slurm's answers, and submit the job unless it would be refused."""
        if self.cluster.executor == "slurm" and not self._ask_slurm():
            return
        self.verdicts += judge_container(
            self.cluster, folders_of(self.workload), self.launcher.run.root
        )
        folder = self.workload.data_dir
        if folder is not None:
            self.verdicts.append(judge_data_here(folder, readable_here(folder), self.looks_here))
        try:
            (self.job,) = self.launcher.submit(
                [self.task], stage="profile", nodes=self.nodes, minutes=MINUTES, patient=False
            )
        except KeyboardInterrupt:
            # Slurm may have accepted the job already, which then has to be cancelled
            self.job = next(iter(self.launcher.find_lost()), None)
            raise
        except LaunchError as error:
            remedy = "fix the cause and run the check again"
            self.verdicts.append(failed(Topic.JOB, str(error), remedy))
            return
        sys.stderr.write(f"job {self.job.job_id} is submitted: at most {MINUTES} minutes\n")

    def _ask_slurm(self) -> bool:
        """Judge Slurm's answers; return whether there is a partition for the job."""
        # the launcher of a sweep, to test its batch scripts
        sweeps = Launcher(self.cluster, self.launcher.run, self.launcher.name, work=self.workload)
        sys.stderr.write("asking Slurm\n")
        try:
            self.site = ask_site(sweeps, self.nodes)
        except LaunchError as error:
            remedy = 'to check this machine instead, set executor = "local"'
            if not isinstance(error, NotStartedError | NotConfiguredError):
                remedy = f"run the check again when Slurm answers; {remedy}"
            self.verdicts.append(failed(Topic.SLURM, unreached(error), remedy))
            return False
        self.verdicts += judge_site(self.cluster, self.site)
        return self.site.partition is not None

    def finish(self, wait_s: float) -> None:
        """Wait for the job and judge its workers' reports."""
        if self.job is None:
            return
        self.verdicts += self._follow(self.job, wait_s)
        self.verdicts += judge_job(self.cluster, self.workload, self.ranks, self.expected)
        self.verdicts += judge_network(self.ranks, _networks(self.job))

    @property
    def is_complete(self) -> bool:
        """Tell whether all workers have finished their reports."""
        return len(self.ranks) == self.expected and all(each.finished for each in self.ranks)

    def _follow(self, job: Submitted, wait_s: float) -> list[Verdict]:
        """Wait until all workers have reported; return the verdicts on the job itself."""
        ends = time.monotonic() + wait_s
        gone = 0
        while gone < self.launcher.executor.limits.gone_polls:
            state = self.launcher.executor.states([job]).get(job.job_id)
            self.ranks = self.task.reports()
            if self.is_complete:
                return []
            gone = gone + 1 if state is None else 0
            if state is not None and waits(state):
                if self.ranks:
                    self._complete_requeued()
                    break
                wait = explain(state)
                reason = "" if state.reason.strip("()") == "None" else state.reason
                why = ": ".join(filter(None, (reason, wait.words)))
                self._say(f"job {job.job_id} waits ({why})")
                if wait.stuck or time.monotonic() > ends:
                    return [_not_started(why, wait_s, stuck=wait.stuck)]
            elif state is not None:
                self._say(f"job {job.job_id} runs")
            time.sleep(POLL_S)
        return [] if self.is_complete else [self._ended_early(job)]

    def _say(self, words: str) -> None:
        if words != self._said:
            sys.stderr.write(f"{words}\n")
            self._said = words

    def _complete_requeued(self) -> None:
        """Complete reports that a granted requeue cut off: it ends rank 0 before it can say so."""
        granted = {"requeue": Requeue(refused=""), "finished": True, "at_work_on": None}
        for index, each in enumerate(self.ranks):
            if each.at_work_on is Probe.REQUEUE:
                self.ranks[index] = each.model_copy(update=granted)

    def _ended_early(self, job: Submitted) -> Verdict:
        self.launcher.executor.cancel([job])
        (end,) = self.launcher.wait([job])
        last = end.log_tail.strip().rpartition("\n")[2]
        found = f"ended early ({end.failure.value.replace('_', ' ')})"
        if last:
            found += f": {last}"
        return failed(Topic.JOB, found, f"see {end.log_file or job.folder}")

    def cancel(self) -> None:
        """Cancel the job, which is pending again after a granted requeue, and await its end."""
        if self.job is None:
            return
        with contextlib.suppress(LaunchError):
            self.launcher.executor.cancel([self.job])
            ends = time.monotonic() + CANCEL_S
            while self.launcher.executor.states([self.job], CANCEL_S) and time.monotonic() < ends:
                time.sleep(POLL_S / 2)

    @property
    def keeps_logs(self) -> bool:
        """Tell whether the job began but did not run to its end."""
        return self.job is not None and not self.is_complete and bool(self.job.log_files())

    def as_json(self) -> dict[str, object]:
        """Return this partition's part of `--json`."""
        return {
            "partition": self.partition,
            "verdicts": [verdict.model_dump(mode="json") for verdict in self.verdicts],
            "site": self.site.model_dump(mode="json") if self.site else None,
            "job_id": self.job.job_id if self.job else "",
            "ranks": [report.model_dump(mode="json") for report in self.ranks],
        }


def _for_check(cluster: ClusterSpec) -> ClusterSpec:
    """Return the cluster with settings for the check: NCCL logs which network it uses."""
    nccl_log = (
        {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"} if cluster.device == "cuda" else {}
    )
    own = {"environment": {**nccl_log, **cluster.environment}, "signal_delay_s": SIGNAL_DELAY_S}
    return cluster.model_copy(update=own)


def _not_started(why: str, wait_s: float, *, stuck: bool) -> Verdict:
    if stuck:
        return failed(Topic.JOB, f"will not start: {why}", "fix the cause and run the check again")
    found = f"did not start within {wait_s / 60:g} minutes: {why}"
    return failed(
        Topic.JOB, found, "run the check again when nodes are free, or with more --wait-minutes"
    )


# NCCL logs "NCCL INFO Using network Socket", newer versions with more words in between
_NETWORK = re.compile(r"NCCL INFO .*Using network (\S+)")


def _networks(job: Submitted) -> list[str]:
    found: set[str] = set()
    for path in job.log_files():
        found.update(_NETWORK.findall(last_bytes(path)))
    return sorted(found)


def _as_text(checks: Sequence[_Check], logs: str, width: int) -> str:
    lines: list[str] = []
    verdicts: list[Verdict] = []
    for check in checks:
        if check.partition:
            lines += ["", f"partition {check.partition}"]
        for verdict in check.verdicts:
            lines += _table_lines(verdict, width)
        verdicts += check.verdicts
    counts = Counter(verdict.level.value for verdict in verdicts)
    summary = ", ".join(
        f"{counts[level]} {level}" for level in ("failed", "warning", "ok") if counts[level]
    )
    lines += ["", summary, *_first_to_do(verdicts, width)]
    if logs:
        lines.append(f"logs: {logs}")
    return "\n".join(lines).lstrip("\n") + "\n"


def _first_to_do(verdicts: Sequence[Verdict], width: int) -> list[str]:
    """Say which of several failed lines to fix first: topics are in the order of their causes."""
    bad = [verdict for verdict in verdicts if verdict.level == "failed"]
    if len(bad) < 2:
        return []
    order = list(Topic)
    first = min(bad, key=lambda verdict: order.index(verdict.topic))
    why = "the other failures may come from this one; then run the check again"
    head = "first: "
    return wrapped(head, f"{first.topic.value}: {first.remedy}; {why}", width, len(head))


def _table_lines(verdict: Verdict, width: int) -> Iterator[str]:
    head = f"{verdict.level.value:<{LEVEL_WIDTH}}{verdict.topic.value:<{TOPIC_WIDTH}}"
    yield from wrapped(head, verdict.found, width, len(head))
    if verdict.remedy:
        arrow = f"{'':<{len(head)}}-> "
        yield from wrapped(arrow, verdict.remedy, width, len(arrow))
