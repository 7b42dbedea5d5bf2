"""Trackers: TensorBoard, Weights & Biases (offline) and MLflow, behind one protocol.

Each is an extra of this package (`pip install 'tula_hpc[wandb]'`) and imported when it is used. Its
output is in the folder of the training, or for MLflow in that of the run:

    tensorboard   RUN/train/LABEL/tensorboard       tensorboard --logdir RUN/train
    wandb         RUN/train/LABEL/wandb             wandb sync RUN/train/LABEL/wandb/offline-run-*
    mlflow        RUN/mlflow, unless MLFLOW_TRACKING_URI is set in [environment]

A metric is `train/<field>` or `epoch/<field>` of the lines of metrics.jsonl; its step is the
optimizer's.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pydantic import Field

from tula_hpc.env import with_variables
from tula_hpc.records import AnyMetrics, Record, StepMetrics, TrainDirectory

# lines that are sent to MLflow at once: it allows 1000 metrics in a batch
MLFLOW_LINES = 40
# number of last epochs whose scores may still come
LATE_EPOCHS = 8
# metrics that every line of steps, or of an epoch, has in MLflow
OF_STEPS, OF_EPOCHS = "train/lr", "epoch/epoch"


def values_of(row: AnyMetrics) -> dict[str, float]:
    """Return the metrics of a line by name."""
    room = "train" if isinstance(row, StepMetrics) else "epoch"
    fields = row.model_dump(exclude={"kind", "step"}, exclude_none=True)
    return {f"{room}/{name}": float(value) for name, value in fields.items()}


def missing(names: Sequence[str]) -> list[str]:
    """Return the names whose package is not installed here."""
    return [name for name in names if not _is_installed(name)]


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    # a folder of that name in the working directory is no package
    return spec is not None and spec.origin is not None


class NewMetrics(NamedTuple):
    """Metrics of a line by name, as far as they have not been passed on before."""

    # number of the optimizer's step
    step: int
    values: dict[str, float]


class Position(Record):
    """Place in a training's metrics up to which a tracker has passed them on."""

    # id of the training's run in the tracker
    run: str = ""
    # digest of the first line: a training that begins anew is another run
    first_line: str = ""
    # last step and last epoch that were passed on
    step: int = 0
    epoch: int = 0
    # names of the metrics that were passed on for the last epochs: a script's scores come later, in
    # a line of their own
    told: dict[int, tuple[str, ...]] = Field(default={})
    # number of lines passed on so far
    lines: int = 0

    def after(self, row: AnyMetrics) -> tuple[Position, NewMetrics | None]:
        """Return the position after a line, and what is new in the line; None if it is repeated."""
        values = values_of(row)
        if isinstance(row, StepMetrics):
            if row.step <= self.step:
                return self, None
            return self._moved(step=row.step), NewMetrics(row.step, values)
        # of an epoch that is too old to be in `told`, all metrics count as passed on
        passed = self.told.get(row.epoch, tuple(values) if row.epoch <= self.epoch else ())
        values = {name: value for name, value in values.items() if name not in passed}
        if not values:
            return self, None
        newest = max(row.epoch, self.epoch)
        known = {**self.told, row.epoch: (*passed, *values)}
        known = {epoch: names for epoch, names in known.items() if epoch > newest - LATE_EPOCHS}
        return self._moved(epoch=newest, told=known), NewMetrics(row.step, values)

    def _moved(self, **changes: Any) -> Position:
        return self.model_copy(update={"lines": self.lines + 1, **changes})


class Tracker(Protocol):
    """Receiver of a training's metrics."""

    def begin(self, position: Position) -> Position:
        """Begin a run, or go on with it, and return the position after which it lacks lines."""

    def write(self, points: Sequence[NewMetrics], position: Position) -> None:
        """Write points that follow the position, so that they are kept if the process dies."""

    def close(self) -> None:
        """End the run, or leave it as it is for a later job."""


class _Run:
    """Run of a training in a tracker."""

    def __init__(self, root: Path, label: str, files: TrainDirectory) -> None:
        self.root = root
        self.label = label
        self.files = files


class TensorBoard(_Run):
    """Event files of TensorBoard."""

    writer: Any = None

    def begin(self, position: Position) -> Position:
        """Open a new event file, which makes readers drop earlier lines after the position."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.close()
        folder = self.files.root / "tensorboard"
        run = position.run
        if not run:
            there = len(list(folder.glob("*")))
            run = f"metrics-{there + 1}" if there else "metrics"
        self.writer = EventFileWriter(str(folder / run))
        start = SessionLog(status=SessionLog.START)
        self.writer.add_event(
            Event(wall_time=time.time(), step=position.step + 1, session_log=start)
        )
        return position.model_copy(update={"run": run})

    def write(self, points: Sequence[NewMetrics], position: Position) -> None:
        """Write a scalar for each metric, and flush."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for step, values in points:
            scalars = [Summary.Value(tag=name, simple_value=x) for name, x in values.items()]
            summary = Summary(value=scalars)
            self.writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        self.writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self.writer is not None:
            self.writer.close()


class WeightsAndBiases(_Run):
    """Offline runs of Weights & Biases: those of all jobs have one id, so that they are one run."""

    run: Any = None

    def begin(self, position: Position) -> Position:
        """Open an offline run, with the id of the former one, if there is any."""
        import wandb

        self.close()
        quiet = wandb.Settings(console="off", silent=True, disable_git=True, save_code=False)
        self.run = wandb.init(
            project=self.root.name,
            name=f"{self.root.name}-{self.label.replace('/', '-')}",
            id=position.run or None,
            dir=str(self.files.root),
            mode="offline",
            settings=quiet,
        )
        # wandb's own steps have to grow, so they count lines here
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        return position.model_copy(update={"run": str(self.run.id)})

    def write(self, points: Sequence[NewMetrics], position: Position) -> None:
        """Log each point."""
        for number, (step, values) in enumerate(points, start=position.lines):
            self.run.log({**values, "step": step}, step=number)

    def close(self) -> None:
        """Finish the offline run, and wait until wandb's own process has written it."""
        if self.run is not None:
            import wandb

            self.run.finish()
            wandb.teardown()


class MLflow(_Run):
    """Run of MLflow, in an experiment of the run directory's name."""

    client: Any = None
    run = ""

    def begin(self, position: Position) -> Position:
        """Create a run, or ask the existing one how far it came."""
        from mlflow import environment_variables
        from mlflow.tracking import MlflowClient

        # newer versions require this for files: a database would need more than mlflow-skinny
        if allowed := getattr(environment_variables, "MLFLOW_ALLOW_FILE_STORE", None):
            allowed.set(True)
        given = with_variables({}).get("MLFLOW_TRACKING_URI")
        self.client = MlflowClient(tracking_uri=given or (self.root / "mlflow").as_uri())
        self.run = position.run
        if self.run:
            self.client.update_run(self.run, status="RUNNING")
            told = self._passed_on()
            step = max(self._steps(OF_STEPS), default=0)
            changes = {"step": step, "epoch": max(told, default=0), "told": told}
            return position.model_copy(update=changes)
        experiment = self.client.get_experiment_by_name(self.root.name)
        where = experiment.experiment_id if experiment else None
        where = where or self.client.create_experiment(self.root.name)
        self.run = self.client.create_run(where, run_name=self.label).info.run_id
        return position.model_copy(update={"run": self.run})

    def _steps(self, name: str) -> set[int]:
        return {each.step for each in self.client.get_metric_history(self.run, name)}

    def _passed_on(self) -> dict[int, tuple[str, ...]]:
        """Return the names of the metrics of the last epochs."""
        names = [name for name in self.client.get_run(self.run).data.metrics if "epoch/" in name]
        steps = {name: self._steps(name) for name in names}
        ends = self.client.get_metric_history(self.run, OF_EPOCHS)
        last = sorted((int(each.value), each.step) for each in ends)[-LATE_EPOCHS:]
        return {epoch: tuple(n for n in names if step in steps[n]) for epoch, step in last}

    def write(self, points: Sequence[NewMetrics], position: Position) -> None:
        """Log points in batches, which are written as a whole."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        for begin in range(0, len(points), MLFLOW_LINES):
            metrics = []
            for step, values in points[begin : begin + MLFLOW_LINES]:
                metrics += [Metric(name, x, now, step) for name, x in values.items()]
            self.client.log_batch(self.run, metrics=metrics)

    def close(self) -> None:
        """Mark the run as finished where the training is."""
        if self.run and self.files.result_file.exists():
            self.client.set_terminated(self.run, "FINISHED")


TRACKERS: Mapping[str, Callable[[Path, str, TrainDirectory], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}
