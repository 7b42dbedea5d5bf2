"""Metrics that are passed on to trackers: every line once, whatever happens to a training meanwhile."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.known import known
from tests.run_factory import SWEEP_TOML
from tula_hpc.cli import options as command
from tula_hpc.cli.options import load_inputs
from tula_hpc.errors import InputError
from tula_hpc.records import EpochMetrics, RunDirectory, StepMetrics, append_record
from tula_hpc.records.metrics import parse_metrics
from tula_hpc.sweep import _parser
from tula_hpc.tracking import trackers
from tula_hpc.tracking.follow import Follower, following
from tula_hpc.tracking.trackers import MLflow, NewMetrics, Position, TensorBoard, Tracker, WeightsAndBiases, values_of


def step(number: int, loss: float = 1.0) -> StepMetrics:
    return StepMetrics(step=number, samples_seen=64 * number, epoch=number / 4, loss=loss, lr=0.1, step_time_s=0.5)


def epoch(number: int) -> EpochMetrics:
    fields = {"epoch": number, "step": 4 * number, "samples_seen": 256 * number, "global_batch": 64, "steps": 4}
    scores = {"train_loss": 1.0, "test_loss": 0.9, "test_accuracy": 0.5, "test_top5_accuracy": None}
    return EpochMetrics.model_validate({**fields, **scores, "epoch_time_s": 2.0})


def log(run: RunDirectory, steps: Sequence[int], loss: float = 1.0) -> None:
    """Write lines of these steps, and those of the epochs that end with one of them."""
    path = run.make_train().metrics_file
    for number in steps:
        append_record(path, step(number, loss), durable=False)
        if number % 4 == 0:
            append_record(path, epoch(number // 4), durable=False)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run").create()


class Memory:
    """A tracker that keeps what it gets."""

    def __init__(self) -> None:
        self.runs: dict[str, list[NewMetrics]] = {}
        self.run = ""
        self.fails = False

    def begin(self, position: Position) -> Position:
        self.run = position.run or f"run {len(self.runs)}"
        self.runs.setdefault(self.run, [])
        return position.model_copy(update={"run": self.run})

    def write(self, points: Sequence[NewMetrics], position: Position) -> None:
        if self.fails:
            raise OSError("no route to host")
        assert position.lines == len(self.runs[self.run])
        self.runs[self.run] += points

    def close(self) -> None:
        pass

    def steps(self, run: str = "run 0") -> list[int]:
        return [point.step for point in self.runs[run] if "train/lr" in point.values]

    def epochs(self, run: str = "run 0") -> list[float]:
        return [point.values["epoch/epoch"] for point in self.runs[run] if "epoch/epoch" in point.values]


def test_every_line_is_passed_on_once_also_of_a_training_that_goes_back_to_a_checkpoint(run: RunDirectory) -> None:
    memory = Memory()
    follower = Follower(run.make_train(), {"memory": memory})
    follower.pass_on()
    log(run, range(1, 7))
    follower.pass_on()
    with run.train().metrics_file.open("ab") as file:
        file.write(b'{"kind":"step","st')
    follower.pass_on()
    # killed, requeued, and continued from step 4: only the torn line is lost
    follower = Follower(run.make_train(), {"memory": memory})
    log(run, range(5, 13), loss=1.5)
    follower.pass_on()
    follower.pass_on()
    assert (memory.steps(), memory.epochs()) == ([*range(1, 13)], [1, 2, 3])


def test_scores_that_come_after_their_epoch_are_passed_on_alone(run: RunDirectory) -> None:
    """A script's scores are read from its output, or reported after the next epoch's steps have begun."""
    memory = Memory()
    path = run.make_train().metrics_file
    follower = Follower(run.make_train(), {"memory": memory})
    known = {"test_accuracy": None, "test_loss": None}
    late: dict[str, None] = {}
    for number, scores in ((1, known), (2, known), (1, late), (2, {"test_loss": None}), (2, late)):
        append_record(path, epoch(number).model_copy(update=scores), durable=False)
        follower.pass_on()
        if number == 1:
            follower = Follower(run.make_train(), {"memory": memory})
    assert memory.epochs() == [1, 2]
    later = [point for point in memory.runs["run 0"] if "epoch/epoch" not in point.values]
    assert later == [
        NewMetrics(4, {"epoch/test_loss": 0.9, "epoch/test_accuracy": 0.5}),
        NewMetrics(8, {"epoch/test_accuracy": 0.5}),
        NewMetrics(8, {"epoch/test_loss": 0.9}),
    ]


def test_a_training_that_begins_anew_is_another_run(run: RunDirectory) -> None:
    """A script without checkpoints begins anew: its metrics are put aside while they are followed."""
    memory = Memory()
    follower = Follower(run.make_train(), {"memory": memory})
    log(run, range(1, 7))
    follower.pass_on()
    run.train().metrics_file.rename(run.train().root / "metrics-1.jsonl")
    follower.pass_on()
    log(run, range(1, 5), loss=2.0)
    follower.pass_on()
    assert [memory.steps(name) for name in ("run 0", "run 1")] == [[*range(1, 7)], [*range(1, 5)]]


def test_a_tracker_that_fails_does_not_disturb_another_and_gets_the_rest_from_the_next_job(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, whole = Memory(), Memory()
    broken.fails = True
    both: dict[str, Tracker] = {"broken": broken, "whole": whole}
    follower = Follower(run.make_train(), both)
    for steps in (range(1, 4), range(4, 6)):
        log(run, steps)
        follower.pass_on()
    assert whole.steps() == [*range(1, 6)]
    assert capsys.readouterr().err == "broken: OSError: no route to host; nothing more is passed on to it\n"
    broken.fails = False
    Follower(run.make_train(), both).pass_on()
    assert (broken.steps("run 1"), whole.steps()) == ([*range(1, 6)], [*range(1, 6)])


@pytest.mark.processes
def test_the_process_passes_on_all_that_was_written_before_its_end(run: RunDirectory) -> None:
    """The pipe may still be open in a child of the training, such as a loader process, when the end comes."""
    pytest.importorskip("tensorboard", reason="tensorboard is an extra that is not installed here")
    with following(run.root, "main", ["tensorboard"]):
        log(run, range(1, 9))
    assert scalars(run.train().root / "tensorboard" / "metrics", "train/loss") == dict.fromkeys(range(1, 9), 1.0)
    assert (run.train().root / "trackers.log").read_text() == ""


def scalars(folder: Path, tag: str) -> dict[int, float]:
    """Return values by step, as TensorBoard's own reader finds them; assert that none is there twice."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload().Scalars(tag)
    found = {each.step: each.value for each in read}
    assert len(found) == len(read)
    return found


def test_tensorboard_reads_a_requeued_training_as_one_run(run: RunDirectory) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is an extra that is not installed here")
    for steps, loss in ((range(1, 7), 1.0), (range(5, 13), 1.5)):
        log(run, steps, loss)
        files = run.make_train()
        follower = Follower(files, {"tensorboard": TensorBoard(run.root, "main", files)})
        follower.pass_on()
        # killed after it had written lines that it did not record as passed on
        tracker = follower.trackers["tensorboard"]
        tracker.write([NewMetrics(99, {"train/loss": 9.0})], follower.positions["tensorboard"])
        follower.close()
    follower = Follower(files, {"tensorboard": TensorBoard(run.root, "main", files)})
    follower.pass_on()
    follower.close()
    folder = files.root / "tensorboard" / "metrics"
    assert scalars(folder, "train/loss") == {**dict.fromkeys(range(1, 7), 1.0), **dict.fromkeys(range(7, 13), 1.5)}
    assert scalars(folder, "epoch/test_accuracy") == {4: 0.5, 8: 0.5, 12: 0.5}


@pytest.mark.processes
def test_wandb_writes_offline_runs_of_one_id(run: RunDirectory) -> None:
    pytest.importorskip("wandb", reason="wandb is an extra that is not installed here")
    for steps in (range(1, 7), range(5, 13)):
        log(run, steps)
        files = run.make_train()
        follower = Follower(files, {"wandb": WeightsAndBiases(run.root, "main", files)})
        follower.pass_on()
        follower.close()
        assert follower.trackers, "the tracker has failed"
    written = sorted((files.root / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len({path.name for path in written}) == 1
    rows = [row for path in written for row in history(path)]
    assert [int(row["step"]) for row in rows if "train/loss" in row] == [*range(1, 13)]
    assert [row["epoch/epoch"] for row in rows if "epoch/epoch" in row] == [1, 2, 3]
    numbers = [int(row["_step"]) for row in rows]
    assert numbers == [*range(15)], "wandb drops steps that do not grow"


def history(path: Path) -> list[dict[str, float]]:
    """Return the logged rows of a file of wandb's own messages; newer versions have no reader in Python."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for data in messages(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in items})
    return rows


def messages(log: bytes) -> Iterator[bytes]:
    """Yield the messages of a log as LevelDB writes it: in blocks, each piece with checksum, length and kind."""
    block, header, whole, last = 32 * 1024, 7, 1, 4
    assert log.startswith(b":W&B")
    place, message = header, b""
    while place + header <= len(log):
        if block - place % block < header:
            place += block - place % block
            continue
        _, length, kind = struct.unpack_from("<IHB", log, place)
        message += log[place + header : place + header + length]
        place += header + length
        if kind in (whole, last):
            yield message
            message = b""


@pytest.mark.processes
def test_mlflow_has_one_run_that_stores_how_far_it_came(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="mlflow is an extra that is not installed here")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for steps in (range(1, 61), range(50, 71)):
        log(run, steps)
        files = run.make_train()
        follower = Follower(files, {"mlflow": MLflow(run.root, "main", files)})
        follower.pass_on()
        follower.close()
        assert follower.trackers, "the tracker has failed"
        # killed before it could record the last lines
        noted = follower.positions["mlflow"]
        (files.root / "trackers.json").write_text(
            json.dumps({"of": {"mlflow": {**noted.model_dump(), "step": noted.step - 5}}})
        )
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(run.root / "mlflow").as_uri())
    experiment = known(client.get_experiment_by_name(run.root.name))
    (message,) = client.search_runs([experiment.experiment_id])
    assert [each.step for each in client.get_metric_history(message.info.run_id, "train/loss")] == [*range(1, 71)]
    epochs = client.get_metric_history(message.info.run_id, "epoch/test_accuracy")
    assert [each.step for each in epochs] == [*range(4, 71, 4)]


def test_a_line_is_its_numbers() -> None:
    line = step(3).model_copy(update={"sensitivity": 0.25})
    assert parse_metrics(line.model_dump_json().encode()) == line
    expected = {"samples_seen": 192.0, "epoch": 0.75, "loss": 1.0, "lr": 0.1, "step_time_s": 0.5, "sensitivity": 0.25}
    assert values_of(line) == {f"train/{name}": value for name, value in expected.items()}
    assert "epoch/test_top5_accuracy" not in values_of(epoch(1))


def test_a_folder_of_a_trackers_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb makes such a folder where it is started."""
    (tmp_path / "a_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert trackers.missing(["pytest", "a_tracker", "not_there"]) == ["a_tracker", "not_there"]


@pytest.mark.parametrize(("estimate", "is_refused"), [("true", True), ("false", False)])
def test_a_package_that_is_missing_here_is_one_sentence_before_any_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, estimate: str, is_refused: bool
) -> None:
    monkeypatch.setattr(trackers, "_is_installed", lambda _: False)
    sweep = tmp_path / "sweep.toml"
    sweep.write_text(SWEEP_TOML.replace("/nowhere/cifar100", str(tmp_path)))
    given = ["--set", 'training.log_to=["wandb"]', "--set", f"search.estimate={estimate}"]
    asked = _parser().parse_args([str(sweep), *given])
    if not is_refused:
        assert load_inputs(asked)[0].training.log_to == ("wandb",)
        return
    with pytest.raises(InputError) as caught:
        load_inputs(asked)
    assert str(caught.value) == (
        f"{sweep}: training.log_to: wandb is not installed; pip install '{command.DISTRIBUTION}[wandb]', or set "
        "search.estimate = false if only the nodes have it"
    )
