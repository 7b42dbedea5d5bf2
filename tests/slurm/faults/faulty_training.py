"""One training on the test cluster, run as the command runs it, with methods to disturb it and to read its records.

Its model sleeps instead of computing. The test sets how long: slow until its fault is over, then without sleep.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.examples.slow import PACE_FILE
from tests.run_factory import candidate, plan
from tests.same_state import same_state
from tests.slurm.sweeping import TEMPLATE
from tests.slurm.testcluster import ClusterError, MiniCluster
from tula_hpc.checkpoint.store import CheckpointStore, LoadedCheckpoint
from tula_hpc.config import ClusterSpec, SweepSpec, load_cluster
from tula_hpc.env import unix_time
from tula_hpc.errors import StageError
from tula_hpc.records import (
    Configuration,
    Event,
    Plan,
    RunDirectory,
    StepMetrics,
    TrainResult,
    read_metrics,
    read_records,
    write_atomically,
)
from tula_hpc.stages.context import Sweep
from tula_hpc.stages.train import train_stage

# limit for every wait of a scenario; long, because many trainings share two cores
PATIENCE_S = 600
# pause between two polls of files or the queue, to leave the processors to the jobs
LOOK_PAUSE_S = 0.5
# step of 64 for a fault: in the second epoch of 8 steps, after several checkpoints
EARLY_STEP = 12
ONE = Configuration(nodes=1, workers_per_node=1, local_batch=64)
WORKLOAD = {
    "dataset": "digits",
    "samples": 512,
    "epochs": 8,
    "lr": 0.05,
}
TRAINING = {
    "preset": "paper",
    "small_batch": 16,
    "log_interval_steps": 1,
    "update_interval_epochs": 0.5,
    "checkpoint_minutes": 0.05,
    "drift": False,
}


class Settings(NamedTuple):
    """What one training trains, and how its job runs."""

    configuration: Configuration = ONE
    # keys of [training]
    training: Mapping[str, object] = {}
    # keys of the cluster file
    cluster: Mapping[str, object] = {}
    # few, because each is a process that imports torch
    loader_workers: int = 0
    # duration of a training pass, until `Training.hurry`
    pace_s: float = 0.4
    # replaces the usual sweep; needs a plan that fits
    spec: SweepSpec | None = None
    plan: Plan | None = None


class Strike(NamedTuple):
    """A fault that the test caused."""

    # Unix time
    at: float
    # samples that the newest checkpoint had seen at that time
    saved: int


@dataclass
class Account:
    """The result or the error of one run of the command."""

    result: TrainResult | None = None
    error: str = ""


class Training:
    """One training in a run directory of its own.

    Args:
        name: Key of `SCENARIOS`.
        cluster: The test cluster.
        folder: New folder for its files; must not exist.
        settings: What and where it trains.
    """

    def __init__(self, name: str, cluster: MiniCluster, folder: Path, settings: Settings) -> None:
        folder.mkdir()
        self.name, self.cluster, self.pace_file, self.settings = name, cluster, folder / "pace", settings
        self.run = RunDirectory(folder / "run").create()
        self.files = self.run.train()
        self.set_pace(settings.pace_s)
        workload = {**WORKLOAD, "loader_workers": settings.loader_workers, "model": "tests.examples.slow:build"}
        training = SweepSpec.model_validate({"name": "faults", "workload": workload, "training": TRAINING})
        self.spec = settings.spec or _with_training(training, settings.training)
        self.plan = settings.plan or only(settings.configuration)
        self.strikes: list[Strike] = []
        self.accounts: list[Account] = []
        # observations of the scenario, for its tests
        self.seen: dict[str, Any] = {}
        self._command: threading.Thread | None = None

    def set_pace(self, seconds: float) -> None:
        """Set the duration of a training pass from now on."""
        write_atomically(self.pace_file, str(seconds))

    def hurry(self) -> None:
        """Train without sleeping from now on, once the fault is over."""
        self.set_pace(0.0)

    def start(self, **cluster: object) -> None:
        """Start the command in a thread; `end` waits for it."""
        spec = cluster_for(self, {**self.settings.cluster, **cluster})
        account = Account()
        self.accounts.append(account)

        def command() -> None:
            try:
                account.result = train_stage(Sweep(self.spec, spec, self.run, unix_time()), self.plan)
            except StageError as error:
                account.error = str(error)

        self._command = threading.Thread(target=command, daemon=True, name=str(self.run.root))
        self._command.start()

    def end(self) -> Account:
        """Wait for the command's end; return its result or error."""
        assert self._command is not None
        self._command.join(PATIENCE_S)
        assert not self._command.is_alive(), f"{self.run.root} has not ended: {self.events()}"
        return self.accounts[-1]

    def events(self, kind: str = "") -> list[Event]:
        """Return the run's events, all or those of one kind."""
        return [event for event in self.run.events() if kind in ("", event.event)]

    @property
    def job_id(self) -> str:
        """Id of the newest job."""
        return self.events("submitted")[-1].job_id

    def wait_for(self, predicate: Callable[[], object], what: str) -> None:
        """Wait until the predicate holds; fail at once if the command ends before."""

        def settled() -> bool:
            over = self._command is not None and not self._command.is_alive()
            assert predicate() or not over, f"the command ended before {what}: {self.accounts}"
            return bool(predicate())

        self.cluster.wait_for(settled, PATIENCE_S, what, LOOK_PAUSE_S)

    def wait_for_event(self, kind: str, number: int = 1) -> None:
        """Wait until there are at least `number` events of this kind."""
        self.wait_for(lambda: len(self.events(kind)) >= number, f"event {number} of kind {kind} in {self.run.root}")

    def wait_for_steps(self, more: int = EARLY_STEP) -> None:
        """Wait until the newest run has logged `more` steps and there are several checkpoints."""
        before = max([event.data["step"] for event in self.events("resumed")], default=0)

        def reached() -> bool:
            steps = read_metrics(self.files.metrics_file).steps
            return bool(steps) and steps[-1].step >= before + more and len(self.store.paths()) > 1

        self.wait_for(reached, f"step {before + more} in {self.run.root}")

    def strike(self, cause: Callable[[], object]) -> None:
        """Cause a fault, and record its time and the samples saved by then."""
        saved = self.saved_samples()
        self.strikes.append(Strike(time.time(), saved))
        cause()

    @property
    def store(self) -> CheckpointStore:
        """The training's checkpoints."""
        return CheckpointStore(self.files.checkpoints)

    def saved_samples(self) -> int:
        """Return the samples seen in the newest checkpoint, from its file name."""
        return int(self.store.paths()[-1].stem.rpartition("-")[2])

    def result(self) -> TrainResult:
        """Return the result of the command's last run; fail if it ended with an error."""
        result = self.accounts[-1].result
        assert result is not None, self.accounts[-1].error
        return result

    def last_checkpoint(self) -> LoadedCheckpoint:
        """Return the newest checkpoint that is not damaged."""
        loaded = self.store.load_latest()
        assert loaded is not None
        return loaded

    def losses(self) -> list[tuple[int, int, float | None, float]]:
        """Return step, samples seen, loss and learning rate of every step."""
        return [(m.step, m.samples_seen, m.loss, m.lr) for m in read_metrics(self.files.metrics_file).steps]

    def redone_steps(self) -> int:
        """Return the number of steps that were repeated after a fault."""
        lines = read_records(StepMetrics, [self.files.metrics_file]).records
        return len(lines) - len({line.samples_seen for line in lines})

    def resume_times_s(self) -> list[float]:
        """Return the seconds from each fault (from each preemption if the test caused none) to the next resume."""
        begun = [strike.at for strike in self.strikes] or [event.time for event in self.events("preempted")]
        resumed = [event.time for event in self.events("resumed")]
        return [min((at for at in resumed if at > begin), default=begin) - begin for begin in begun]

    def check_equal(self, other: Training) -> None:
        """Assert that every step and the final state are those of another run, bit for bit."""
        assert self.losses() == other.losses()
        mine, theirs = self.result(), other.result()
        same = ("steps", "samples_seen", "final_loss", "test_accuracy", "test_top5_accuracy")
        assert [getattr(mine, name) for name in same] == [getattr(theirs, name) for name in same]
        states = [training.last_checkpoint().state for training in (self, other)]
        assert same_state(states[0]["model"], states[1]["model"])
        assert same_state(states[0]["optimizer"], states[1]["optimizer"])
        epochs = [read_metrics(training.files.metrics_file).epochs for training in (self, other)]
        assert [(e.step, e.train_loss, e.test_loss) for e in epochs[0]] == [
            (e.step, e.train_loss, e.test_loss) for e in epochs[1]
        ]

    def account(self) -> str:
        """Return the run's events as text for people, a line for each."""
        events = self.events()
        lines = (f"{e.time - events[0].time:6.1f} s {e.job_id} {e.event} {e.failure or ''} {e.detail}" for e in events)
        return "\n".join(lines)

    def logs(self) -> str:
        """Return all that the jobs wrote to stderr."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.run.slurm.glob("*/*.err")))

    def cancel(self) -> None:
        """Cancel all of the training's jobs."""
        for job_id in {event.job_id for event in self.events("submitted")}:
            with suppress(ClusterError):
                self.cluster.run("scancel", job_id)


def cluster_for(training: Training, changes: Mapping[str, object]) -> ClusterSpec:
    """Return the test cluster's template with changes; two trainings share a node, unless the scenario changes that."""
    settings = training.settings
    base = load_cluster(TEMPLATE, [f"workers_per_node={settings.configuration.workers_per_node}"])
    environment = {**base.environment, PACE_FILE: str(training.pace_file)}
    # Slurm may choose any job for another scenario's preemption, so by default a job cannot be preempted
    shared = {
        "partition": "steady",
        "exclusive": False,
        "memory_gb": 2.0,
        "signal_delay_s": 5,
        "environment": environment,
    }
    return base.model_copy(update={**shared, **changes})


def only(configuration: Configuration) -> Plan:
    """Return a plan that chose this configuration and has no fallback."""
    chosen = candidate(configuration).model_copy(update={"feasible": True})
    return plan([chosen] * 4, chosen=chosen, fallbacks=[])


def _with_training(spec: SweepSpec, changes: Mapping[str, object]) -> SweepSpec:
    return spec.model_copy(update={"training": spec.training.model_copy(update=dict(changes))})
