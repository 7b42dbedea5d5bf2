"""`on_event`: the user's command gets each message once, and cannot disturb the sweep."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tula_hpc.cli.pipeline import carry_out
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.env import unix_time
from tula_hpc.errors import LaunchError, StageError
from tula_hpc.failure_kinds import Failure
from tula_hpc.launch.launcher import Launcher
from tula_hpc.records import RunDirectory, read_document
from tula_hpc.stages import notify as notifications
from tula_hpc.stages.context import Sweep
from tula_hpc.stages.notify import notify, notify_of_news


def sweep_with(folder: Path, command: str | None = None) -> Sweep:
    """Return a sweep whose command writes down its messages."""
    writes = f'printf "%s|%s|%s\\n" "$TULA_EVENT" "$TULA_MESSAGE" "$TULA_RUN" >>{folder}/notifications'
    cluster = ClusterSpec(on_event=command or writes)
    return Sweep(SweepSpec(name="x"), cluster, RunDirectory(folder / "run").create(), unix_time())


def lines_of(folder: Path) -> list[str]:
    path = folder / "notifications"
    return path.read_text().splitlines() if path.exists() else []


def test_each_message_about_a_training_is_sent_once_even_by_another_command(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run").create()
    run.log_event("finished", "train", job_id="1", detail="in an earlier command")
    time.sleep(0.01)
    sweep = sweep_with(tmp_path)
    run.log_event("submitted", "train", job_id="2", data={"label": "main"})
    notify_of_news(sweep, running=1)
    run.log_event("preempted", "train", job_id="2", detail="stop requested (USR2); saved at step 40")
    run.log_event("failed", "train", job_id="2", detail="requeue refused: no")
    data = {"label": "main"}
    run.log_event("failed", "train", job_id="2", detail="requeue refused: no", failure=Failure.PREEMPTED, data=data)
    for label in ("study/ags", "main"):
        run.log_event("submitted", "train", job_id="3", data={"label": label})
        run.log_event("finished", "train", job_id="3", detail="64.5 % test accuracy")
    for command in (sweep, sweep, sweep_with(tmp_path)):
        notify_of_news(command, running=0)
    assert [line.rpartition("|")[0] for line in lines_of(tmp_path)] == [
        "training_started|x: the training runs",
        "training_preempted|x: stop requested (USR2); saved at step 40",
        "training_failed|x: preempted: requeue refused: no",
        "training_finished|x: 64.5 % test accuracy",
    ]
    assert {line.rpartition("|")[2] for line in lines_of(tmp_path)} == {str(run.root)}


def test_the_end_of_a_stage_is_sent_again_only_after_further_jobs(tmp_path: Path) -> None:
    sweep = sweep_with(tmp_path)
    for job_id in ("1", "2"):
        sweep.run.log_event("submitted", "profile", job_id=job_id)
        for _ in range(2):
            notify(sweep, "stage_ended", "profiling is done", "profile")
    assert len(lines_of(tmp_path)) == 2


def test_two_commands_that_look_at_the_same_moment_send_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain command on a detached sweep looks on while a controller works."""
    sweep = sweep_with(tmp_path)
    both_have_read = threading.Barrier(2)

    def read(*arguments: Any) -> Any:
        try:
            return read_document(*arguments)
        finally:
            with contextlib.suppress(threading.BrokenBarrierError):
                both_have_read.wait(0.3)

    monkeypatch.setattr(notifications, "read_document", read)
    sweep.run.log_event("finished", "train", job_id="2", detail="64.5 % test accuracy")
    commands = [threading.Thread(target=notify_of_news, args=(sweep,)) for _ in range(2)]
    for command in commands:
        command.start()
    for command in commands:
        command.join()
    assert [line.split("|")[0] for line in lines_of(tmp_path)] == ["training_finished"]


def test_a_message_is_data_to_the_shell(tmp_path: Path) -> None:
    """The command must be no argument either, because everybody on the machine could read it."""
    hostile = f'"; touch {tmp_path}/made; $(touch {tmp_path}/made) `touch {tmp_path}/made`\x1b[2J'
    notify(sweep_with(tmp_path), "sweep_failed", f"{hostile}\nand more")
    (line,) = lines_of(tmp_path)
    assert line.split("|")[1] == "x: " + hostile.replace("\x1b", "\\x1b")
    assert not (tmp_path / "made").exists()
    assert str(tmp_path) not in " ".join(notifications.SHELL)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("echo no such host >&2; exit 6", "no such host"),
        ("sleep 60", "did not end within 0.2 s, and was killed"),
        ("sleep 60 &", "did not end within 0.2 s, and was killed"),
        ("nonsense-of-a-name", "nonsense-of-a-name"),
    ],
)
def test_a_command_that_fails_or_hangs_is_reported_once_and_changes_nothing(
    tmp_path: Path, command: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "TIME_LIMIT_S", 0.2)
    sweep = sweep_with(tmp_path, command)
    notify(sweep, "stage_ended", "planned", "plan")
    notify(sweep, "sweep_ended", "done")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: on_event, for stage_ended: ")
    assert words in line
    assert line.endswith("; the sweep goes on")


def test_without_the_key_nothing_is_kept(tmp_path: Path) -> None:
    sweep = sweep_with(tmp_path)._replace(cluster=ClusterSpec())
    notify(sweep, "sweep_ended", "done")
    notify_of_news(sweep, running=1)
    assert not sweep.run.notifications_file.exists()


def test_a_scheduler_that_does_not_answer_is_a_failure_to_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_lost(_: Launcher) -> None:
        raise LaunchError("the Slurm controller has not answered for an hour")

    monkeypatch.setattr(Launcher, "find_lost", find_lost)
    with pytest.raises(LaunchError):
        carry_out(sweep_with(tmp_path), "report")
    assert [line.split("|")[0] for line in lines_of(tmp_path)] == ["sweep_failed"]


def test_a_study_has_either_ended_or_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = sweep_with(tmp_path)
    study = {"methods": ["lbt"], "batches": [256], "seeds": [0]}
    sweep = sweep._replace(spec=SweepSpec.model_validate({"name": "x", "study": study}))
    ends: list[dict[str, str]] = [{"study/lbt": "bug: why"}, {}]
    monkeypatch.setattr("tula_hpc.cli.pipeline.study_stage", lambda _: ends.pop(0))
    monkeypatch.setattr("tula_hpc.cli.pipeline.try_before_jobs", lambda _: True)
    with pytest.raises(StageError):
        carry_out(sweep, "train")
    assert carry_out(sweep, "train") == 0
    assert [line.rpartition("|")[0] for line in lines_of(tmp_path)] == [
        "sweep_failed|x: study: 1 training without a result:",
        "sweep_ended|x: 2 trainings done",
    ]
