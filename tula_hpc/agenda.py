"""What a profile job measures next: its list, then what the search wants, until time is up. Rank 0 keeps it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal

from tula_hpc.clock import unix_time
from tula_hpc.env import WorkerEnvironment, job_started_at
from tula_hpc.errors import StageError
from tula_hpc.jobs import ProfileJob
from tula_hpc.proposing import ask_search
from tula_hpc.records import Configuration, JobNote, append_record, notes_file

MARGIN = 1.5  # nothing is begun when less time is left than so many times the longest configuration so far


class Agenda:
    """Decides for one run of a job, and writes down what it is about to do.

    The notes are on disk before the work begins. When the job is killed without a word, as by the memory limit of a
    node, they tell which configuration did it.

    Args:
        job: The list, and whether to ask the search for more.
        env: This worker's place; only rank 0 decides and writes.
        ask: Asks the search; a test may put its own answers here.
    """

    def __init__(
        self, job: ProfileJob, env: WorkerEnvironment, ask: Callable[[ProfileJob], list[Configuration]] = ask_search
    ) -> None:
        self.job, self.env, self._ask = job, env, ask
        self._began_at, self._here_since = job_started_at(), unix_time()
        self._todo = deque(job.configurations)
        self._startup_s: float | None = None  # known when all workers have met
        if env.rank == 0:
            self._note("began")

    def next(self) -> Configuration | None:
        """The next configuration, noted; None when the job is to end."""
        if self._startup_s is None:
            self._startup_s = unix_time() - self._began_at
            self._note("ready")
        recorded = self.job.recorded()
        longest_s = max((m.elapsed_s for m in recorded if m.finished_at >= self._here_since), default=None)
        if longest_s is not None and self._left_s() < MARGIN * longest_s:
            self._note("ended", detail="too little time was left for another configuration")
            return None
        return self._first_new({m.configuration for m in recorded}, longest_s or 0.0)

    def _first_new(self, done: set[Configuration], longest_s: float) -> Configuration | None:
        failure = ""
        if not self._pending(done) and self.job.asks:
            try:
                self._todo.extend(c for c in self._ask(self.job) if self._belongs_here(c, longest_s))
            except StageError as error:  # the command will ask the search itself, and say so if that fails too
                failure = str(error)
        if not self._pending(done):
            self._note("ended", detail=failure)
            return None
        configuration = self._todo.popleft()
        self._note("measuring", configuration)
        return configuration

    def _belongs_here(self, configuration: Configuration, longest_s: float) -> bool:
        """Whether these nodes measure it, and for less than a job of its own would.

        A smaller size keeps nodes waiting here, N·e node-seconds in all; a job of its own would first have to start,
        n·(s + e).
        """
        here, own = self.job.nodes, configuration.nodes
        if own >= here or not self.job.smaller:
            return own == here
        if self.job.sweep.search.nest:
            return True
        return here * longest_s <= own * ((self._startup_s or 0.0) + longest_s)

    def _pending(self, done: set[Configuration]) -> bool:
        """Whether something is left after what is on record was struck off."""
        while self._todo and self._todo[0] in done:
            self._todo.popleft()
        return bool(self._todo)

    def _left_s(self) -> float:
        """Until the job is warned of its time limit."""
        cluster = self.job.cluster
        warning_s = cluster.signal_delay_s if cluster.executor == "slurm" else 0
        return self._began_at + 60 * cluster.profile_minutes - warning_s - unix_time()

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
            detail=detail,
        )
        append_record(notes_file(self.job.output), record)
