"""What Slurm's commands print, as recorded on 22.05.8, and as later versions do by their documentation and source."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tula_hpc import env
from tula_hpc.errors import LaunchError
from tula_hpc.failure_kinds import Failure
from tula_hpc.launch import slurm
from tula_hpc.launch.diagnosis import classify, explain, waits
from tula_hpc.launch.slurm import JobState, Leaving, accounted_runs
from tula_hpc.launch.slurm_executor import id_in

# scontrol's line (22.05.8) of a job that a preemption cancelled; its name and folder contain blanks
PREEMPTED = (
    "JobId=59547533 JobName=my job UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901759 Nice=0 "
    "Account=root QOS=normal JobState=PREEMPTED Reason=None Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 "
    "Reboot=0 ExitCode=0:15 RunTime=00:00:03 TimeLimit=365-00:00:00 TimeMin=N/A SubmitTime=2026-11-23T23:08:48 "
    "PreemptEligibleTime=2026-11-23T23:08:49 PreemptTime=2026-11-23T23:08:52 SuspendTime=None SecsPreSuspend=0 "
    "AllocNode:Sid=ttc-head:4187 ReqNodeList=ttc-node1 ExcNodeList=(null) NodeList=ttc-node1 "
    "NtasksPerN:B:S:C=0:0:*:* CoreSpec=* OverSubscribe=NO Command=/home/a b/job 1.sh WorkDir=/home/a b Power= \n"
)
CANCELLED = PREEMPTED.replace("JobState=PREEMPTED", "JobState=CANCELLED").replace(
    "PreemptTime=2026-11-23T23:08:52", "PreemptTime=None"
)
# fields from OverSubscribe to Command and SubmitLine as of 24.05, 25.05 and 25.11, according to public logs
ALLOCATED = (
    "OverSubscribe=NO Contiguous=0 Licenses=(null) LicensesAlloc=(null) Network=(null) Command=/home/a b/job 1.sh"
)
SUBMITTED = f"{ALLOCATED} SubmitLine=sbatch --export=ALL,PACE=1 --comment Restarts twice /home/a b/job 1.sh"
EXCLUSIVE = SUBMITTED.replace("OverSubscribe=NO", "OverSubscribe=NO Exclusive=NO")
LOGS = "StdErr= StdIn=/dev/null StdOut=/home/a b/12.out TresPerNode=gres/gpu:4 TresPerTask=cpu=8"
LINES = {
    "22.05": lambda line: line,
    "24.05": lambda line: _later(line, ALLOCATED),
    "25.05": lambda line: _later(line, SUBMITTED),
    "25.11": lambda line: _later(line, EXCLUSIVE),
}
# a job that is being killed and that the preemption requeues
REQUEUED = CANCELLED.replace("JobState=CANCELLED", "JobState=COMPLETING").replace("Restarts=0", "Restarts=1")
STATES_NOT_OVER = (
    *("COMPLETING", "CONFIGURING", "EXPEDITING", "LAUNCH_FAILED", "PENDING", "POWER_UP_NODE", "RECONFIG_FAIL"),
    *("REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESIZING", "RESV_DEL_HOLD", "REVOKED", "RUNNING", "SIGNALING"),
    *("SPECIAL_EXIT", "STAGE_OUT", "STOPPED", "SUSPENDED", "UPDATE_DB", "SOMETHING_NEW", "?"),
)

# output of each command; None: it fails
Answers = Mapping[str, str | None]


def _later(line: str, fields: str) -> str:
    """Return a line of 22.05 as a later Slurm would write it."""
    whole = line.replace("OverSubscribe=NO Command=/home/a b/job 1.sh", fields)
    return whole.replace("Power= \n", f"{LOGS} \n")


@pytest.fixture(params=LINES)
def written(request: pytest.FixtureRequest) -> Callable[[str], str]:
    """A function that turns a job's line of 22.05 into that of another version."""
    return LINES[request.param]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answers], None]:
    """A function that sets the output of Slurm's commands."""

    def prepare(answers: Answers) -> None:
        def run(arguments: Sequence[str], _timeout_s: float = 60.0) -> str:
            printed = answers[arguments[0]]
            if printed is None:
                raise LaunchError(f"{arguments[0]} failed: no such thing")
            return printed

        monkeypatch.setattr(slurm, "run_command", run)
        monkeypatch.setattr("tula_hpc.launch.slurm.run_command", run)

    return prepare


@pytest.mark.parametrize(
    ("printed", "job_id"),
    [
        ("Submitted batch job 59547533\n", "59547533"),
        ("Submitted batch job 59547533 on cluster alpha\n", "59547533"),
        ("59547533\n", "59547533"),
        ("59547533;alpha\n", "59547533"),
        ("Project x has 12 GPU hours left.\n--> Checking job 3 of 5... OK\nSubmitted batch job 71\n12\n", "71"),
    ],
)
def test_the_id_is_the_one_that_sbatch_prints(printed: str, job_id: str) -> None:
    assert id_in(printed) == job_id


def test_output_without_an_id_has_none() -> None:
    assert id_in("your job 12 is checked\n") == ""


@pytest.mark.parametrize("state", STATES_NOT_OVER)
def test_any_other_state_is_no_end(state: str, answer: Callable[[Answers], None]) -> None:
    answer({"squeue": f"12|{state}|None|x\n"})
    (found,) = slurm.queue(["12"]).values()
    assert not found.is_over


def test_every_state_of_an_end_is_an_end() -> None:
    ends = ["BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"]
    ends += ["PREEMPTED", "TIMEOUT"]
    assert all(JobState(state, "").is_over for state in ends)


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        ("12|PENDING|(Resources)", "enough nodes have to become free"),
        (
            "12|PENDING|Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
            "its nodes are down or drained (`sinfo -R` says why), or kept for other jobs",
        ),
        (
            "12|PENDING|(ReqNodeNotAvail, UnavailableNodes:n[1-3,7])",
            "its nodes are down or drained (`sinfo -R` says why), or reserved",
        ),
        ("12|PENDING|(launch failed requeued held)", "held; `scontrol release JOB` lets it go"),
        ("12|PENDING|job requeued in held state", "held; `scontrol release JOB` lets it go"),
        ("12|REQUEUE_HOLD|a|b", "held after a requeue; `scontrol release JOB` lets it go"),
        ("12|LAUNCH_FAILED|None", "its nodes could not start it"),
    ],
)
def test_a_reason_may_hold_blanks_brackets_and_bars(
    printed: str, reason: str, answer: Callable[[Answers], None]
) -> None:
    answer({"squeue": f"{printed}|x\n"})
    (found,) = slurm.queue(["12"]).values()
    assert waits(found)
    assert explain(found).words == reason


def test_waiting_tasks_may_be_shown_in_one_line(answer: Callable[[Answers], None]) -> None:
    """squeue does so without -r."""
    answer({"squeue": "12_[4-6,9%2]|PENDING|JobArrayTaskLimit|x\n12_3|RUNNING|None|x\n13_[0]|PENDING|Priority|x\n"})
    wanted = [*(f"12_{index}" for index in range(10)), "13_0"]
    assert sorted(slurm.queue(wanted)) == ["12_3", "12_4", "12_5", "12_6", "12_9", "13_0"]


def test_a_job_with_the_id_of_one_of_ours_is_another_job(
    answer: Callable[[Answers], None], written: Callable[[str], str]
) -> None:
    """A controller that lost its state counts anew, so such a job is neither waited for nor cancelled."""
    key = slurm.key_of("train-20261129-120000-abc123")
    keys = dict.fromkeys(["12", "13", "14"], key)
    script = "/run/slurm/train-20261129-120000-abc123/.submission.sh"
    shown = f"12|RUNNING|None|y_/y.sh\n13|RUNNING|None|renamed_{script}\n14|RUNNING|None|x-train-abc123_(null)\n"
    answer({"squeue": shown})
    assert slurm.queue(keys, keys=keys).keys() == {"13", "14"}
    ended = "12|OUT_OF_MEMORY|0:125|y\n12.batch|OUT_OF_MEMORY|0:125|batch\n13|TIMEOUT|0:0|x-train-abc123\n"
    answer({"sacct": ended, "scontrol": written(PREEMPTED)})
    assert slurm.steps(["12", "13"], keys).keys() == {"13"}


def test_a_name_gives_parents_whatever_their_jobs_are_shown_as(answer: Callable[[Answers], None]) -> None:
    known = "9_[0-3%1]|x\n9_4|x\n12|x\n12+0|x\n12+1|x\n13|y\n"
    answer({"squeue": "ARRAY_JOB_ID|NAME|UID\n", "sacct": known})
    assert slurm.named("x") == ["9", "12"]


def test_jobs_to_which_others_gave_the_same_name_are_not_ours(
    answer: Callable[[Answers], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger may rename an old job: the oldest of a name is kept, and the others are cancelled."""
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    heading = "ARRAY_JOB_ID|NAME|UID\n"
    strangers = f"{heading}3|x|1001\n90|x|1001\n"
    answer({"squeue": f"{strangers}12|x|1000\n", "sacct": None})
    assert slurm.named("x") == ["12"]
    # the controller forgets a job that is over, accounting does not
    answer({"squeue": strangers, "sacct": "12|x\n"})
    assert slurm.named("x") == ["12"]
    # where the own job was lost, so that it has to be submitted again
    answer({"squeue": strangers, "sacct": None})
    assert slurm.named("x") == []


def test_in_a_container_that_numbers_users_anew_no_job_is_submitted_twice(
    answer: Callable[[Answers], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(env, "_UID_MAP", tmp_path / "uid_map")
    (tmp_path / "uid_map").write_text("         0       1000          1\n         1     100000      65536\n")
    answer({"squeue": "ARRAY_JOB_ID|NAME|UID\n3|x|1001\n12|x|1000\n", "sacct": None})
    assert slurm.named("x") == ["12"]
    # a file that other systems lack
    (tmp_path / "uid_map").unlink()
    assert slurm.named("x") == []


@pytest.mark.parametrize(
    ("rows", "failure"),
    [
        ("12|CANCELLED by 1000|0:0|x\n12.batch|CANCELLED|0:15|x\n12.0|CANCELLED|0:9|x\n", Failure.CANCELLED),
        ("12|PREEMPTED|0:0|x\n12.batch|CANCELLED|0:15|x\n12.0|CANCELLED|0:9|x\n", Failure.PREEMPTED),
        ("12|OUT_OF_MEMORY|0:125|x\n12.batch|OUT_OF_MEMORY|0:125|x\n", Failure.HOST_OOM),
        ("12|NODE_FAIL|1:0|x\n12.batch|CANCELLED by 0||x\n12.extern|COMPLETED|0:0|x\n", Failure.NODE_FAILED),
        ("12|FAILED|1:0|x\n12.batch|FAILED|1:0|x\n12.0|FAILED|0:9|x\n", Failure.KILLED),
        ("12|TIMEOUT|0:0|x\n12.0|CANCELLED|0:15|x\n", Failure.TIMED_OUT),
        ("12|DEADLINE|0:0|x\n", Failure.TIMED_OUT),
    ],
)
def test_ends_are_read_from_accounting(rows: str, failure: Failure, answer: Callable[[Answers], None]) -> None:
    answer({"sacct": rows})
    assert classify(slurm.steps(["12"])["12"], "") is failure


@pytest.mark.parametrize("sacct", ["", "12|RUNNING|0:0|x\n12.batch|CANCELLED|0:15|x\n", None])
def test_the_controller_reports_an_end_that_accounting_lacks(
    sacct: str | None, answer: Callable[[Answers], None], written: Callable[[str], str]
) -> None:
    answer({"sacct": sacct, "scontrol": written(PREEMPTED)})
    assert classify(slurm.steps(["12"])["12"], "") is Failure.PREEMPTED


@pytest.mark.parametrize(
    ("printed", "leaving"),
    [
        (PREEMPTED, Leaving.PREEMPTED),
        (PREEMPTED.replace("JobState=PREEMPTED", "JobState=COMPLETING"), Leaving.PREEMPTED),
        # in its grace time
        (PREEMPTED.replace("JobState=PREEMPTED", "JobState=RUNNING"), None),
        (CANCELLED, Leaving.CANCELLED),
        (REQUEUED, Leaving.REQUEUED),
        (CANCELLED.replace("JobState=CANCELLED", "JobState=COMPLETING"), Leaving.CANCELLED),
        (CANCELLED.replace("JobState=CANCELLED", "JobState=RUNNING"), None),
        # at its time limit
        (
            CANCELLED.replace("JobState=CANCELLED", "JobState=COMPLETING").replace("Reason=None", "Reason=TimeLimit"),
            None,
        ),
        # where Slurm does not requeue it
        (
            CANCELLED.replace("JobState=CANCELLED", "JobState=NODE_FAIL").replace("Reason=None", "Reason=NodeDown"),
            Leaving.PREEMPTED,
        ),
        (CANCELLED.replace("my job", "my JobState=RUNNING job"), Leaving.CANCELLED),
        ("", None),
        (None, None),
    ],
)
def test_a_preempted_or_requeued_job_is_distinguished_from_a_cancelled_one(
    printed: str | None, leaving: Leaving | None, answer: Callable[[Answers], None], written: Callable[[str], str]
) -> None:
    answer({"scontrol": written(printed) if printed else printed})
    assert slurm.leaving("12") is leaving


def test_hosts_that_a_task_is_kept_off_are_read_and_kept(
    written: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Sequence[str]] = []
    line = written(PREEMPTED.replace("ExcNodeList=(null)", "ExcNodeList=n[1-3,7]"))

    def run(arguments: Sequence[str], _timeout_s: float = 60.0) -> str:
        asked.append(arguments)
        return line

    monkeypatch.setattr(slurm, "run_command", run)
    slurm.avoid_host("12", "12_0", "n9", 5)
    assert asked[-1] == ["scontrol", "update", "JobId=12", "ExcNodeList=n[1-3,7],n9"]


def test_restarts_before_this_one_are_no_sign_of_another(
    answer: Callable[[Answers], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    answer({"scontrol": REQUEUED})
    assert slurm.leaving("12") is Leaving.CANCELLED


@pytest.mark.parametrize(
    ("printed", "largest"),
    [
        ("MaxArraySize            = 4001\nMaxBatchRequeue         = 5\n", 4001),
        ("MaxArraySize = 4001\nSchedulerParameters     = bf_continue,max_array_tasks=50,defer\n", 50),
        ("MaxArraySize = 0\nSchedulerParameters = (null)\n", 1),
        ("Slurm is UP\n", slurm.DEFAULT_LARGEST_ARRAY),
        (None, slurm.DEFAULT_LARGEST_ARRAY),
    ],
)
def test_the_largest_array_is_read_or_slurms_own(
    printed: str | None, largest: int, answer: Callable[[Answers], None]
) -> None:
    answer({"scontrol": printed})
    assert slurm.largest_array() == largest


def test_runs_are_read_from_accounting(answer: Callable[[Answers], None]) -> None:
    waited = "14_[1-3%1]|x-a|CANCELLED by 0|0|2"
    answer({"sacct": f"12|x-a|PREEMPTED|3|2\n12|x-a|CANCELLED by 1000|70|2\n{waited}\n13|y|FAILED||1\n"})
    runs = accounted_runs({"12": "train", "13": "train", "14_2": "train"}, name_prefix="x", since=0.0, timeout_s=5)
    assert [(run.state, run.node_seconds) for run in runs["12"]] == [("PREEMPTED", 6.0), ("CANCELLED", 140.0)]
    assert [run.state for run in runs["14_2"]] == ["CANCELLED"]
    assert runs.keys() == {"12", "14_2"}


def test_tasks_that_were_cancelled_while_they_waited_are_found_in_accounting(answer: Callable[[Answers], None]) -> None:
    answer(
        {
            "sacct": "14_0|CANCELLED by 0|0:0|x\n14_0.batch|FAILED|1:0|x\n14_[1-3%1]|CANCELLED by 0|0:0|x\n",
            "scontrol": "",
        }
    )
    found = slurm.steps(["14_0", "14_2"])
    assert [row.job_id for row in found["14_0"]] == ["14_0", "14_0.batch"]
    assert [(row.job_id, row.state) for row in found["14_2"]] == [("14_2", "CANCELLED")]
    assert classify(found["14_2"], "") is Failure.CANCELLED
