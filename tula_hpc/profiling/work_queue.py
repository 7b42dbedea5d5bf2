"""Work queue of a profile job: its list, then proposals of the search, until time is up.

Rank 0 keeps it. It asks the search in a process of its own, `python -m` this module: the numeric
libraries of the search would stay in the worker's memory, and be measured as the training's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import deque
from typing import Any, Literal

from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.env import WorkerEnvironment, failed_setup, job_started_at, unix_time
from tula_hpc.errors import StageError
from tula_hpc.launch.job_specs import ProfileJob
from tula_hpc.python_path import start_of_python
from tula_hpc.records import (
    Configuration,
    JobNote,
    Measurement,
    append_record,
    measurements_for_search,
    notes_file,
    recorded_by_job,
    recorded_in,
)

TIMEOUT_S = 300.0


def ask_search(job: ProfileJob) -> list[Configuration]:
    """Return the proposals of the search, given all that the run has measured so far.

    Raises:
        StageError: The search failed; the message ends with its last line of output.
    """
    return [Configuration(*row) for row in _asked(job, "configurations")]


def ask_passes(job: ProfileJob, local_batch: int) -> int | None:
    """Return the forward passes in which a script is to take a batch; None if they are not set.

    Raises:
        StageError: The search failed.
    """
    if not job.sweep.workload.accumulates:
        return None
    passes, most = job.sweep.workload.accumulation, _asked(job, "largest pass")
    while most is not None and local_batch > passes * most:
        passes *= 2
    return passes


def _asked(job: ProfileJob, what: Literal["configurations", "largest pass"]) -> Any:
    known = measurements_for_search(
        recorded_in(job.output.parent), job.partition, job.since, job.sweep.workload.entry_points
    )
    question = {
        "asks": what,
        "sweep": job.sweep.model_dump(mode="json"),
        "cluster": job.cluster.model_dump(mode="json"),
        "measurements": [m.model_dump(mode="json", exclude={"samples"}) for m in known],
        "trusted_batch": job.trusted_batch,
    }
    try:
        done = subprocess.run(
            [*start_of_python(), "-m", "tula_hpc.profiling.work_queue"],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            check=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise StageError(f"the search did not answer within {TIMEOUT_S:g} s") from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [str(error.returncode)]
        raise StageError(f"the search failed in the job: {lines[-1]}") from None
    return json.loads(done.stdout)


def answer(question: str) -> str:
    """Return the proposals as JSON, or the largest batch of one forward pass of a script."""
    from tula_hpc.analysis.search.propose import largest_pass, propose

    asked = json.loads(question)
    # the workload's paths were checked when the sweep was read, and do not matter to the search
    sweep = SweepSpec.model_validate(asked["sweep"], context={"check_paths": False})
    cluster = ClusterSpec.model_validate(asked["cluster"])
    measurements = [Measurement.model_validate(row) for row in asked["measurements"]]
    if asked["asks"] == "largest pass":
        return json.dumps(largest_pass(sweep, cluster, measurements))
    return json.dumps(propose(sweep, cluster, measurements, trusted_batch=asked["trusted_batch"]))


# no configuration is begun with less time left than this times the longest one so far
MARGIN = 1.5


class WorkQueue:
    """Work queue of one run of a job, with a note before each configuration.

    The notes are on disk before the work begins. When the job is killed, as by the memory limit of
    a node, they show the configuration that did it.

    Only rank 0 decides and writes.
    """

    def __init__(self, job: ProfileJob, env: WorkerEnvironment) -> None:
        self.job = job
        self.env = env
        self._began_at = job_started_at()
        self._here_since = unix_time()
        self._todo = deque(job.configurations)
        # forward passes of a script for the last configuration, see `ask_passes`
        self.passes: int | None = None
        # seconds until all workers have met; None: they have not yet
        self._startup_s: float | None = None
        if env.rank == 0:
            self._note("began", detail=failed_setup())

    def next(self) -> Configuration | None:
        """Note and return the next configuration; None when the job is to end."""
        if self._startup_s is None:
            self._startup_s = unix_time() - self._began_at
            self._note("ready")
        recorded = recorded_by_job(self.job.output)
        longest_s = max(
            (m.elapsed_s for m in recorded if m.finished_at >= self._here_since), default=None
        )
        if longest_s is not None and self._left_s() < MARGIN * longest_s:
            self._note("ended", detail="too little time was left for another configuration")
            return None
        return self._first_new({m.configuration for m in recorded}, longest_s or 0.0)

    def _first_new(self, done: set[Configuration], longest_s: float) -> Configuration | None:
        failure = ""
        if not self._pending(done) and self.job.asks:
            try:
                self._todo.extend(
                    c for c in ask_search(self.job) if self._belongs_here(c, longest_s)
                )
            except StageError as error:
                # the command will ask the search itself, and report if that fails too
                failure = str(error)
        if not self._pending(done):
            self._note("ended", detail=failure)
            return None
        configuration = self._todo.popleft()
        # an error here ends the job: else other jobs would get the same configuration for ever
        self.passes = ask_passes(self.job, configuration.local_batch)
        self._note("measuring", configuration)
        return configuration

    def _belongs_here(self, configuration: Configuration, longest_s: float) -> bool:
        """Tell whether to measure a configuration on these nodes: if a job of its own costs more.

        A configuration with fewer nodes keeps the others waiting here, N·e node-seconds in all; a
        job of its own would first have to start, n·(s + e).
        """
        here, own = self.job.nodes, configuration.nodes
        if own >= here or not self.job.smaller:
            return own == here
        if self.job.sweep.search.nest:
            return True
        return here * longest_s <= own * ((self._startup_s or 0.0) + longest_s)

    def _pending(self, done: set[Configuration]) -> bool:
        """Tell whether something is left once recorded configurations are dropped."""
        while self._todo and self._todo[0] in done:
            self._todo.popleft()
        return bool(self._todo)

    def _left_s(self) -> float:
        """Return the seconds until the job is warned of its time limit."""
        cluster = self.job.cluster
        left_s = self._began_at + 60 * cluster.profile_minutes - unix_time()
        if cluster.executor == "slurm":
            left_s -= cluster.signal_delay_s
        return left_s

    def _note(
        self,
        note: Literal["began", "ready", "measuring", "ended"],
        configuration: Configuration | None = None,
        detail: str = "",
    ) -> None:
        record = JobNote(
            note=note,
            time=unix_time(),
            job_id=self.env.job_id,
            allocated_nodes=self.job.nodes,
            submitted_at=self.job.submitted_at,
            began_at=self._began_at,
            configuration=configuration,
            accumulation=self.passes,
            detail=detail,
        )
        append_record(notes_file(self.job.output), record)


if __name__ == "__main__":
    sys.stdout.write(answer(sys.stdin.read()))
