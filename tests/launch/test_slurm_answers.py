"""Whatever Slurm's commands print, and whether or not they start: answers are read, everything else is an error."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from submitit.core.utils import JobPaths

from tests.fake_slurm import AROUND, BROKEN, FAULTS, put_commands
from tests.run_factory import CLUSTER_TOML, SWEEP_TOML
from tula_hpc.check.site import ask_site
from tula_hpc.config import ClusterSpec
from tula_hpc.errors import LaunchError, RefusedError, StorageError
from tula_hpc.failure_kinds import Failure
from tula_hpc.launch import bounded_command, slurm, slurm_executor
from tula_hpc.launch.job_files import Submitted
from tula_hpc.launch.launcher import NOTICE, Launcher
from tula_hpc.launch.slurm import JobState, Leaving, accounted_runs
from tula_hpc.launch.slurm_executor import SlurmJobs, could_start
from tula_hpc.records import RunDirectory, write_atomically
from tula_hpc.stages.preview import Preview, Script, _asked, script_of
from tula_hpc.status import __main__ as status
from tula_hpc.status.jobs import JobPhase

pytestmark = pytest.mark.processes

TASKS = ["12_0", "12_1"]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole PATH; commands that hang or print without end are given up soon."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(bounded_command, "MOST_BYTES", 2**20)
    patient = bounded_command.run

    def run(arguments: list[str], timeout_s: float, **how: object) -> bounded_command.Done:
        script = folder / arguments[0]
        text = script.read_bytes() if script.is_file() else b""
        # give up almost at once on a command that never answers, unless it first has to write down its call
        waits_in_vain = b"/bin/sleep 600" in text and bytes(folder) not in text
        patience_s = 0.1 if waits_in_vain else 0.4
        return patient(arguments, min(timeout_s, patience_s), **how)  # type: ignore[arg-type]  # handed through

    monkeypatch.setattr(bounded_command, "run", run)
    monkeypatch.setattr("tula_hpc.launch.slurm_executor.run", run)
    monkeypatch.setattr(slurm, "REQUEUE_PAUSE_S", 0.01)
    monkeypatch.setattr("tula_hpc.launch.slurm_executor.PAUSES_S", (0,))
    monkeypatch.setattr("tula_hpc.launch.slurm_executor.SETTLE_S", 0)
    monkeypatch.setattr(slurm, "PATIENCE_S", (0,))
    return folder


class Question(NamedTuple):
    """A function that asks Slurm, with the command that it runs and its results with and without an answer."""

    command: str
    ask: Callable[[Path], object]
    answer: object
    # result without an answer; None: an error
    without: object = None


def ask_runs(_: Path) -> object:
    runs = accounted_runs({"12_0": "train"}, name_prefix="x-", since=1e9, timeout_s=5)
    return [(run.state, run.node_seconds) for run in runs.get("12_0", [])]


def ask_accounts(folder: Path) -> object:
    """Return the accounts that a command records for programs without access to Slurm."""
    ours = launcher(folder)
    for task in TASKS:
        ours.run.log_event("submitted", "train", job_id=task)
    ours.note_accounts()
    return [(run.stage, run.state, run.over, run.node_seconds) for run in ours.run.accounts()]


def ask_about_site(folder: Path) -> object:
    site = ask_site(launcher(folder), 2)
    return site.partitions, [each.count for each in site.nodes], [each.accepted for each in site.answers]


def launcher(folder: Path) -> Launcher:
    return Launcher(ClusterSpec(executor="slurm", partition="cpu"), RunDirectory(folder / "run").create(), "x")


def submit(folder: Path) -> object:
    jobs = launcher(folder).submit([print, print], stage="train", nodes=1, minutes=5)
    return [job.job_id for job in jobs]


GONE: list[object] = []
QUESTIONS = {
    "named": Question("squeue", lambda _: slurm.named("x-train-1"), ["12"]),
    "own jobs": Question("squeue", lambda _: slurm.own_jobs(), 2),
    "queue": Question(
        "squeue",
        lambda _: slurm.queue(TASKS),
        {"12_0": JobState("RUNNING", "None"), "12_1": JobState("PENDING", "Resources")},
    ),
    "accounted runs": Question("sacct", ask_runs, [("PREEMPTED", 60.0), ("COMPLETED", 140.0)], without=GONE),
    "accounts on file": Question(
        "sacct", ask_accounts, [("train", "PREEMPTED", True, 60.0), ("train", "COMPLETED", True, 140.0)], without=GONE
    ),
    "steps": Question("sacct", lambda _: [row.state for row in slurm.steps(["12_0"])["12_0"]], ["FAILED"] * 2, GONE),
    "hosts": Question("sacct", lambda _: slurm.hosts_of("12_0"), ["n1", "n2"], without=GONE),
    "hosts by their list": Question("scontrol", lambda _: slurm.hosts_of("12_0"), ["n1", "n2"], without=GONE),
    "the largest array": Question("scontrol", lambda _: slurm.largest_array(), 4001, without=1001),
    "leaving": Question("scontrol", lambda _: slurm.leaving("12"), Leaving.CANCELLED, without=GONE),
    "a host to avoid": Question("scontrol", lambda _: slurm.avoid_host("12", "12_0", "n1", 5), None),
    "when a job could start": Question(
        "sbatch",
        lambda _: could_start("#!/bin/sh\n"),
        "Job 12 to start at 2026-11-24T12:00:00 using 4 processors on nodes n1",
    ),
    "a submission": Question("sbatch", submit, ["12_0", "12_1"]),
    "the site": Question("scontrol", ask_about_site, (("cpu",), [20], [True, True])),
}
questions = pytest.mark.parametrize("question", QUESTIONS.values(), ids=list(QUESTIONS))


@questions
@pytest.mark.parametrize("how", AROUND)
def test_an_answer_is_read_whatever_a_site_prints_around_it(commands: Path, question: Question, how: str) -> None:
    put_commands(commands, how, question.command)
    assert question.ask(commands) == question.answer


def test_a_job_of_another_name_is_not_ours_whatever_its_id(commands: Path) -> None:
    put_commands(commands)
    (commands / "scancel").write_text(f'#!/bin/sh\necho "$*" >{commands}/cancelled\n')
    executor = launcher(commands).executor
    other = Submitted("12_0", Path("train-20261129-120000-abc123"))
    jobs = [other, Submitted("12_1", Path("of an unknown key"))]
    assert executor.states(jobs).keys() == {"12_1"}
    assert executor.ended([other]) == {}
    executor.cancel([other])
    assert not (commands / "cancelled").exists()
    executor.cancel(jobs)
    assert (commands / "cancelled").read_text() == "12_1\n"


# ends with words or without failure are read by each question's own lines; how a command ends is seen in one place
SAID = ("nothing", "a banner", "bytes that are no UTF-8", "a failure without a word", "a failure with bytes")
ENDS = [how for how in FAULTS if how not in (*SAID, "a child without end")]
OF_EACH_COMMAND = ("own jobs", "steps", "the largest array", "a submission")


@pytest.mark.parametrize(
    ("name", "how"), [*itertools.product(QUESTIONS, SAID), *itertools.product(OF_EACH_COMMAND, ENDS)]
)
def test_output_that_is_no_answer_counts_as_none(commands: Path, name: str, how: str) -> None:
    question = QUESTIONS[name]
    put_commands(commands, how, question.command)
    if question.command == "sbatch":
        (commands / "squeue").write_text("#!/bin/sh\necho 'ARRAY_JOB_ID|NAME|UID'\n")
        (commands / "sacct").write_text("#!/bin/sh\nexit 1\n")
    answer, error = answer_of(question, commands)
    if error is None:
        # if accounting fails, the controller answers
        assert question.without is not None
        assert answer in (question.without, None, ["CANCELLED"] * 2)
        return
    assert question.command in str(error) or isinstance(error, RefusedError)
    assert len(str(error)) < 5000


def answer_of(question: Question, folder: Path) -> tuple[object, LaunchError | None]:
    try:
        return question.ask(folder), None
    except LaunchError as error:
        return None, error


@pytest.mark.parametrize("how", ["a child without end", "no end", "an answer without end"])
def test_nothing_of_a_command_that_is_given_up_stays_behind(commands: Path, how: str) -> None:
    put_commands(commands, how)
    (commands / "squeue").write_text(f"#!/bin/sh\necho $$ >{commands}/group\n{(commands / 'squeue').read_text()}")
    with pytest.raises(LaunchError, match=r"squeue (did not answer within 0\.4 s|printed more than 1 MiB)"):
        slurm.own_jobs()
    group, deadline = int((commands / "group").read_text()), time.monotonic() + 5
    while alive_in(group) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive_in(group)


def test_a_command_that_has_not_answered_for_long_is_reported(
    commands: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_commands(commands, "a child without end")
    monkeypatch.setattr(bounded_command, "NOTICE_AFTER_S", 0.05)
    with pytest.raises(LaunchError):
        slurm.own_jobs()
    assert capsys.readouterr().err == "squeue has not answered for 0.05 s; still waiting\n"


def alive_in(group: int) -> list[int]:
    """Return the live processes of a group; a dead one may remain long until its parent asks how it ended."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, of = (process / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(of) == group and state != "Z":
                found.append(int(process.name))
    return found


def test_an_answer_without_end_takes_bounded_memory(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit, gigabytes would come in seconds."""
    put_commands(commands, "an answer without end")
    monkeypatch.setattr(bounded_command, "run", bounded_command.run)
    with pytest.raises(LaunchError, match="squeue printed more than 1 MiB and was stopped"):
        slurm.own_jobs(30)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("no right to run it", "squeue cannot be started: Permission denied"),
        ("no shebang", "squeue cannot be started: Exec format error"),
        ("an interpreter that is not there", "squeue cannot be started: No such file or directory"),
        ("nothing at all", "squeue is not on PATH: is this a Slurm login node?"),
        ("nothing", "squeue answered nothing"),
        ("a banner", "squeue gave no answer, but 'Welcome to Example | 2026'"),
        ("a failure without a word", "squeue failed: exit code 3"),
        ("a kill", "squeue failed: killed by signal 9"),
        ("a failure with bytes", r"squeue failed: \xe4\xf6\xfc \xff\xfe" + "\0\x1b[31m"),
    ],
)
def test_the_failure_of_a_command_is_reported(commands: Path, how: str, words: str) -> None:
    put_commands(commands, how)
    with pytest.raises(LaunchError) as raised:
        slurm.own_jobs()
    assert str(raised.value) == words


# ---- the whole


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run whose jobs may run, wait or be over."""
    run = RunDirectory(tmp_path / "run").create()
    write_atomically(run.sweep_file, SWEEP_TOML)
    write_atomically(run.cluster_file, CLUSTER_TOML)
    (run.slurm / "profile-12").mkdir()
    for job_id in TASKS:
        run.log_event("submitted", "profile", job_id=job_id, data={"folder": "slurm/profile-12", "nodes": 2})
    return run


@pytest.mark.parametrize("how", AROUND)
def test_a_status_is_shown_whatever_a_site_prints(
    commands: Path, run: RunDirectory, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    put_commands(commands, how)
    assert status.main([str(run.root)]) == 0
    assert "scheduler" not in capsys.readouterr().out
    phases = {job.job_id: job.phase for job in status.status_of(run.root).jobs}
    assert phases == {"12_0": JobPhase.RUNNING, "12_1": JobPhase.WAITING}


@pytest.mark.parametrize(
    ("how", "only"), [*((how, "squeue") for how in FAULTS), *((how, "") for how in ("nothing", "no end", "a folder"))]
)
def test_a_status_without_an_answer_is_not_known(
    commands: Path, run: RunDirectory, how: str, only: str, capsys: pytest.CaptureFixture[str]
) -> None:
    put_commands(commands, how, only)
    assert status.main([str(run.root)]) == 4
    printed, errors = capsys.readouterr()
    assert errors == ""
    assert "scheduler  could not be asked: squeue " in printed
    assert all(line.isprintable() for line in printed.splitlines())
    assert status.main([str(run.root), "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["scheduler"]["words"].startswith("squeue ")


def test_jobs_do_not_count_as_gone_without_a_valid_answer_of_squeue(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs count as gone only in a valid answer without them, not in an empty or a meaningless one."""
    put_commands(commands)
    there = launcher(tmp_path)
    jobs = there.submit([print, print], stage="train", nodes=1, minutes=5)
    monkeypatch.setattr(SlurmJobs, "limits", SlurmJobs.limits._replace(poll_s=0.0))
    for how in ("nothing", "a banner"):
        put_commands(commands, how, "squeue")
        with pytest.raises(LaunchError, match="has not answered for an hour: squeue"):
            there.wait_for_some(jobs)


@pytest.mark.parametrize(("known", "failure"), [("NAME", Failure.CANCELLED), ("another", Failure.BUG)])
def test_a_task_that_was_cancelled_while_it_waited_is_known_by_its_array(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: str, failure: Failure
) -> None:
    put_commands(commands)
    there = launcher(tmp_path)
    jobs = there.submit([print, print], stage="train", nodes=1, minutes=5)
    monkeypatch.setattr(SlurmJobs, "limits", SlurmJobs.limits._replace(poll_s=0.0))
    name = json.loads((jobs[0].folder / NOTICE).read_bytes())["name"]
    row = f"12_0|RUNNING|None|{name}"
    array = f"12|{known}|{os.getuid()}".replace("NAME", name)
    named = f'printf "ARRAY_JOB_ID|NAME|UID\\n{array}\\n"'
    asked = f'{named} ;; *) printf "JOBID|STATE|REASON|NAME_COMMAND\\n{row}\\n" ;; esac'
    (commands / "squeue").write_text(f'#!/bin/sh\ncase "$*" in *%F*) {asked}\n')
    for silent in ("sacct", "scontrol"):
        (commands / silent).write_text("#!/bin/sh\nexit 1\n")
    (end,) = there.wait_for_some(jobs)
    assert (end.job.job_id, end.failure) == ("12_1", failure)


def test_a_submission_without_an_answer_of_sbatch_is_looked_up_by_its_name(commands: Path, tmp_path: Path) -> None:
    put_commands(commands, "nothing", "sbatch")
    names = 'for each do case "$each" in x-train-*) name=$each ;; esac; done'
    row = f"34|$name|{os.getuid()}"
    (commands / "squeue").write_text(f'#!/bin/sh\n{names}\nprintf "ARRAY_JOB_ID|NAME|UID\\n{row}\\n"\n')
    assert submit(tmp_path) == ["34_0", "34_1"]


def test_an_accepted_job_is_known_though_its_script_cannot_be_renamed(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quota on files may be reached just then."""
    put_commands(commands)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(JobPaths, "move_temporary_file", refuse)
    assert submit(tmp_path) == TASKS


@pytest.mark.parametrize("how", BROKEN)
def test_an_sbatch_that_cannot_be_started_is_not_a_full_disk(commands: Path, tmp_path: Path, how: str) -> None:
    put_commands(commands, how, "sbatch")
    with pytest.raises(LaunchError, match=r"^sbatch ") as raised:
        submit(tmp_path)
    assert not isinstance(raised.value, StorageError)


# ---- a requeue


def answers_in_turn(path: Path, answers: list[str]) -> None:
    """Let a command give these answers in turn, and from then on the last one."""
    cases = "\n".join(f"{number}) {answer} ;;" for number, answer in enumerate(answers))
    count = f"n=0; [ ! -e {path}.n ] || read n <{path}.n; echo $((n + 1)) >{path}.n"
    path.write_text(
        f'#!/bin/sh\n[ "$1" = requeue ] || exit 1\n{count}\ncase $n in\n{cases}\n*) {answers[-1]} ;;\nesac\n'
    )


def asked(path: Path) -> int:
    return int(Path(f"{path}.n").read_text())


@pytest.mark.parametrize("fault", ["exit 1", r"printf '\377' >&2; exit 1", "exec /bin/sleep 600", "kill -9 $$"])
def test_a_requeue_that_has_no_answer_is_tried_again(commands: Path, fault: str) -> None:
    put_commands(commands)
    answers_in_turn(commands / "scontrol", [fault, fault, ":"])
    assert slurm.requeue("12") is None
    assert asked(commands / "scontrol") == 3


def test_a_refusal_after_a_late_acceptance_is_of_a_second_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first sbatch has no answer; its job is accepted while the second one is on its way, and reaches the limit."""
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n")
    attempts: list[list[str]] = []

    def sbatch(command: list[str], _: float) -> bounded_command.Done:
        attempts.append(command)
        if len(attempts) == 1:
            raise LaunchError("sbatch: timed out")
        return bounded_command.Done(1, "", "sbatch: error: QOSMaxSubmitJobPerUserLimit\n")

    monkeypatch.setattr(slurm_executor, "run", sbatch)
    monkeypatch.setattr(slurm_executor, "submissions_named", lambda _, **__: ["77"] * (len(attempts) > 1))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert slurm_executor.submit_once(script, "mine") == "77"
    assert len(attempts) == 2


def test_one_of_two_jobs_that_were_accepted_late_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither sbatch has an answer; the first job is found at once, the second one while it is waited for."""
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n")
    looks = iter([[], ["77"], ["77", "78"]])
    cancelled: list[list[str]] = []

    def sbatch(_command: list[str], _: float) -> bounded_command.Done:
        raise LaunchError("sbatch: timed out")

    monkeypatch.setattr(slurm_executor, "run", sbatch)
    monkeypatch.setattr(slurm_executor, "submissions_named", lambda _, **__: next(looks))
    monkeypatch.setattr(slurm, "cancel", cancelled.append)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert slurm_executor.submit_once(script, "mine") == "77"
    assert cancelled == [["78"]]


def test_a_refused_requeue_is_not_tried_again(commands: Path) -> None:
    put_commands(commands)
    words = "Requested operation is presently disabled for job 12"
    answers_in_turn(commands / "scontrol", [f"echo {words} >&2; exit 1"])
    assert slurm.requeue("12") == f"scontrol failed: {words}"
    assert asked(commands / "scontrol") == 1


def test_a_requeue_that_never_has_an_answer_ends_in_time(commands: Path) -> None:
    put_commands(commands)
    answers_in_turn(commands / "scontrol", ["echo slurm_load_jobs error: Zero Bytes were transmitted >&2; exit 1"])
    began = time.monotonic()
    assert "Zero Bytes" in (slurm.requeue("12", within_s=0.2) or "")
    assert time.monotonic() - began < 5
    assert asked(commands / "scontrol") > 2


def test_a_requeue_that_took_effect_without_an_answer_is_granted(commands: Path) -> None:
    """Another requeue would be refused, because the job already waits."""
    put_commands(commands)
    (commands / "scontrol").write_text(
        "#!/bin/sh\n"
        f"if [ $1 = requeue ]; then echo >>{commands}/asked; exec /bin/sleep 600; fi\n"
        "echo JobId=12 JobState=PENDING Restarts=1 PreemptTime=None\n"
    )
    assert slurm.requeue("12") is None
    assert (commands / "asked").read_text() == "\n"


def test_the_error_without_slurms_configuration_says_where_to_go(commands: Path) -> None:
    put_commands(commands)
    words = "scontrol: fatal: Could not establish a configuration source"
    (commands / "scontrol").write_text(f"#!/bin/sh\necho {words} >&2\nexit 1\n")
    with pytest.raises(LaunchError) as caught:
        slurm.run_command(["scontrol", "show", "config"])
    assert str(caught.value).startswith("Slurm cannot be reached from here (scontrol: Could not establish")
    assert str(caught.value).endswith("run this on a login node, or set SLURM_CONF")


@pytest.mark.parametrize(
    ("complaint", "keys"),
    [
        ("Invalid --mail-type specification", "mail-type"),
        ("Batch job submission failed: Invalid qos specification", "qos"),
        (
            "Batch job submission failed: Invalid account or account/partition combination specified",
            "partition and account",
        ),
        ("Batch job submission failed: Invalid feature specification", "constraint"),
        (
            "Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)",
            "profile_minutes and train_minutes",
        ),
        ("Batch job submission failed: Node count specification invalid", "max_nodes"),
        (
            "Batch job submission failed: More processors requested than permitted",
            "workers_per_node and cpus_per_worker",
        ),
        ("Memory specification can not be satisfied", "memory_gb"),
    ],
)
def test_a_refusal_names_the_key_that_it_is_about(commands: Path, complaint: str, keys: str) -> None:
    put_commands(commands)
    (commands / "sbatch").write_text(f"#!/bin/sh\necho 'sbatch: error: {complaint}' >&2\nexit 1\n")
    with pytest.raises(RefusedError) as caught:
        could_start("#!/bin/sh\n")
    assert str(caught.value) == f"{complaint} (see {keys} in the cluster file)"


def test_a_job_for_which_no_node_is_up_is_refused_with_the_keys_and_another_cause(commands: Path) -> None:
    put_commands(commands)
    complaint = "sbatch: error: Requested node configuration is not available"
    (commands / "sbatch").write_text(f"#!/bin/sh\necho '{complaint}' >&2\nexit 1\n")
    with pytest.raises(RefusedError, match=r"nodes are down or drained .*, or .* max_nodes, .* \[sbatch\] "):
        could_start("#!/bin/sh\n")


def test_a_job_larger_than_any_node_is_refused_with_what_it_asks_for() -> None:
    script = Script("profile", "#!/bin/sh\n#SBATCH --nodes=8\n#SBATCH --cpus-per-task=64\n#SBATCH --job-name=x\n")
    message = _asked(script, RefusedError("sbatch: error: Requested node configuration is not available"))
    assert message == "; it asks for nodes=8, cpus-per-task=64"
    assert _asked(script, RefusedError("invalid partition")) == ""


def test_a_refusal_counts_even_if_slurm_then_answers_no_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [RefusedError("invalid account"), LaunchError("sbatch gives no answer")]

    def refuse(_: str) -> str:
        raise answers.pop(0)

    monkeypatch.setattr(slurm, "available", lambda: True)
    monkeypatch.setattr("tula_hpc.stages.preview.could_start", refuse)
    with pytest.raises(RefusedError, match="Slurm would refuse 1 of 2 submissions"):
        Preview([], [Script("profile", ""), Script("train", "")]).show()
    assert "  profile: refused: invalid account\n  sbatch gives no answer\n" in capsys.readouterr().out


def test_a_dry_run_asks_about_an_array_that_the_site_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "largest_array", lambda: 4)
    shape = {"nodes": 1, "minutes": 5, "tasks": 6}
    (script,) = script_of(launcher(tmp_path), "train, 6 tasks", stage="train", **shape)
    assert "#SBATCH --array=0-3%1\n" in script.text
