"""Records of a run's state, as `tula status` shows and `--json` prints them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tula_hpc.records import Plan, Record
from tula_hpc.records.broken_hosts import BrokenHost
from tula_hpc.status.cost import CostStatus, PromiseStatus
from tula_hpc.status.jobs import JobPhase, JobStatus
from tula_hpc.status.trainings import TrainingStatus

State = Literal["finished", "running", "waiting", "stuck", "over", "stopped", "failed", "unknown"]
Stand = Literal["none", "running", "waiting", "stopped", "failed", "done", "unknown"]


class CommandStatus(Record):
    """The command that works on the run directory, or the last one that did."""

    # 0: unknown
    process: int = 0
    # "": unknown
    host: str = ""
    # None: cannot be seen from this machine
    alive: bool | None = False
    # as by Ctrl-Z
    stopped: bool = False


class DetachedStatus(Record):
    """Controller jobs that carry the sweep on."""

    # Unix time
    since: float
    # last stage
    until: str
    # of the last controller job, or of its guard where that has to act
    job_id: str = ""
    phase: JobPhase | None = None


class SchedulerStatus(Record):
    """Answer of the scheduler."""

    # slurm, local, "" where the cluster file cannot be read
    executor: str
    # True also where there was nothing to ask
    answered: bool
    # why it did not answer
    words: str = ""


class ProfileStatus(Record):
    """State of the first stage."""

    stand: Stand
    # configurations
    measured: int
    out_of_memory: int
    # that nothing but failures are known of
    failed: int
    # as many as the search may measure; None: it decides by itself
    wanted: int | None = None
    # submitted
    jobs: int
    # an estimate: what those jobs still have to measure, at the pace so far; None where none runs
    left_s: float | None = None


class PlanStatus(Record):
    """Chosen configuration."""

    nodes: int
    workers_per_node: int
    local_batch: int
    global_batch: int
    # forward passes in which a script takes the local batch
    accumulation: int = 1
    partition: str
    epoch_time_s: float
    train_time_s: float
    cost: float
    currency: str
    reason: str
    # what the cost is for
    wall_time_s: float
    # ends of 90 % intervals, by field
    interval_90: dict[str, tuple[float, float]] = Field(default={})

    def with_interval(self, field: str) -> tuple[float, float, float]:
        """Return a field and the ends of its interval; itself where there is none."""
        value = getattr(self, field)
        return (value, *self.interval_90.get(field, (value, value)))

    @classmethod
    def of(cls, plan: Plan) -> PlanStatus:
        """Summarise a plan."""
        names = set(cls.model_fields) - {"reason"}
        return cls(reason=plan.reason, **plan.chosen.model_dump(include=names))


class StudyStatus(Record):
    """Trainings of a study, and those that chose its learning rates."""

    cells: int
    finished: int
    diverged: int
    running: int
    waiting: int
    failed: int
    # none of these, or to be tried again
    left: int
    # trainings that choose the learning rates, not among the cells
    rates: int
    rates_finished: int
    # counted in `failed`, too
    rates_failed: int
    # why, by label
    failures: dict[str, str]
    # those that run
    under_way: list[TrainingStatus]


class RunStatus(Record):
    """State of a run as `status` shows it; `--json` prints it."""

    schema_version: Literal[1] = 1
    name: str
    run_directory: str
    asked_at: float
    state: State
    # what that means here, and what to do
    words: str
    exit_code: int
    command: CommandStatus
    detached: DetachedStatus | None
    scheduler: SchedulerStatus
    # None: the run is a study
    profile: ProfileStatus | None
    plan: PlanStatus | None
    # of the plan
    training: TrainingStatus | None
    study: StudyStatus | None
    report: bool
    # it is older than a measurement, a result or the plan
    report_stale: bool
    jobs: list[JobStatus]
    # those of them that nothing has made up for
    failures: list[JobStatus]
    cost: CostStatus
    # what could not be read
    doubts: list[str]
    # hosts that its jobs are kept off
    avoided: list[BrokenHost] = Field(default=[])
    # of the training, once it has ended
    promise: PromiseStatus | None = None
