"""Records of a run's state, which `tula status` shows and `--json` prints."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tula_hpc.records import Plan, Record
from tula_hpc.records.broken_hosts import BrokenHost
from tula_hpc.status.cost import CostStatus, PromiseStatus
from tula_hpc.status.jobs import JobPhase, JobStatus
from tula_hpc.status.trainings import TrainingStatus

# stuck: a job waits until somebody acts; over: jobs are over, and nobody has handled their ends;
# unknown: the scheduler could not be asked
State = Literal["finished", "running", "waiting", "stuck", "over", "stopped", "failed", "unknown"]
Stand = Literal["none", "running", "waiting", "stopped", "failed", "done", "unknown"]


class CommandStatus(Record):
    """The command that works on the run directory, or the last one that did."""

    # 0: unknown
    process: int = 0
    # "": unknown
    host: str = ""
    # None: this machine cannot see that
    alive: bool | None = False
    # suspended, as by Ctrl-Z
    stopped: bool = False


class DetachedStatus(Record):
    """Controller jobs that carry the sweep on."""

    # Unix time
    since: float
    # the last stage that they run
    until: str
    # id of the last controller job, or of the guard if that has to act
    job_id: str = ""
    phase: JobPhase | None = None


class SchedulerStatus(Record):
    """Answer of the scheduler."""

    # slurm or local; "" if the cluster file cannot be read
    executor: str
    # True also if there was nothing to ask
    answered: bool
    # why it did not answer
    words: str = ""


class ProfileStatus(Record):
    """State of the profile stage."""

    stand: Stand
    # numbers of configurations
    measured: int
    out_of_memory: int
    # configurations that only failed
    failed: int
    # the most configurations that the search measures; None: it has no such bound
    wanted: int | None = None
    # number of jobs submitted
    jobs: int
    # estimated seconds until the jobs have measured all, at the pace so far; None: none runs
    left_s: float | None = None


class PlanStatus(Record):
    """The chosen configuration, with its predictions."""

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
    # what the cost is paid for
    wall_time_s: float
    # ends of 90 % intervals, by field
    interval_90: dict[str, tuple[float, float]] = Field(default={})

    def with_interval(self, field: str) -> tuple[float, float, float]:
        """Return a field and the ends of its interval; its value as both ends if there is none."""
        value = getattr(self, field)
        return (value, *self.interval_90.get(field, (value, value)))

    @classmethod
    def of(cls, plan: Plan) -> PlanStatus:
        """Return a plan's summary."""
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
    # in none of these states, or failed and to be tried again
    left: int
    # trainings that choose the learning rates; not counted as cells
    rates: int
    rates_finished: int
    # these are counted in `failed`, too
    rates_failed: int
    # why trainings failed, by label
    failures: dict[str, str]
    # trainings that run
    under_way: list[TrainingStatus]


class RunStatus(Record):
    """State of a run as `status` shows it; `--json` prints it."""

    schema_version: Literal[1] = 1
    name: str
    run_directory: str
    asked_at: float
    state: State
    # what the state means here, and what to do
    words: str
    # of the command, see its --help
    exit_code: int
    command: CommandStatus
    detached: DetachedStatus | None
    scheduler: SchedulerStatus
    # None: the run is a study
    profile: ProfileStatus | None
    plan: PlanStatus | None
    # the training by the plan
    training: TrainingStatus | None
    study: StudyStatus | None
    # the report is written
    report: bool
    # the report is older than a measurement, a result or the plan
    report_stale: bool
    jobs: list[JobStatus]
    # failed jobs whose work no later job has done
    failures: list[JobStatus]
    cost: CostStatus
    # what could not be read
    doubts: list[str]
    # hosts that later jobs avoid
    avoided: list[BrokenHost] = Field(default=[])
    # the training against its plan, once it has ended
    promise: PromiseStatus | None = None
