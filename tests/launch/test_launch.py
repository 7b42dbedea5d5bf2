"""Submission through submitit on this machine, and the scripts that Slurm would get."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from submitit.core.utils import DelayedSubmission
from submitit.slurm import slurm as submitit_slurm

from tests.forked_jobs import forking_jobs
from tests.known import known
from tula_hpc.config import ClusterSpec, SweepSpec, load_cluster
from tula_hpc.env import outside_of_job
from tula_hpc.errors import LaunchError, RefusedError, SubmitLimitError
from tula_hpc.failure_kinds import Failure
from tula_hpc.launch import local_executor, slurm
from tula_hpc.launch.job_files import Notice, Request, Submitted, setup_text
from tula_hpc.launch.launcher import NOTICE, REFUSED, Launcher, StillRunningError, describe_states
from tula_hpc.launch.local_executor import TRAPS, is_alive
from tula_hpc.launch.slurm_executor import SBATCH_S, could_start, requeue_if_killed, time_outs
from tula_hpc.records import Event, RunDirectory, append_record
from tula_hpc.records.events import CONTROL, GUARD
from tula_hpc.retry_policy import CONTROL_MINUTES
from tula_hpc.stages.context import Sweep


def touch(path: Path, error: bool = False) -> Callable[[], None]:
    """Make a job that leaves a file, or fails; an inner function, because those are pickled by value."""

    def job() -> None:
        if error:
            raise KeyError("the bug in user code")
        path.touch()

    return job


def sleeper() -> Callable[[], None]:
    """Make a job that outlives the test unless it is ended."""

    def job() -> None:
        time.sleep(60)

    return job


def launcher(tmp_path: Path, **cluster: object) -> Launcher:
    run = RunDirectory(tmp_path / "run").create()
    return Launcher(ClusterSpec.model_validate(cluster), run, "tula-test")


@pytest.mark.processes
def test_a_local_job_runs_and_a_failing_one_is_a_bug_with_its_traceback(tmp_path: Path) -> None:
    local = launcher(tmp_path)
    jobs = local.submit(
        [touch(tmp_path / "done"), touch(tmp_path / "never", error=True)], stage="profile", nodes=1, minutes=1
    )
    ended = local.wait(jobs)
    assert (tmp_path / "done").exists()
    assert not (tmp_path / "never").exists()
    assert ended[1].failure is Failure.BUG
    assert "the bug in user code" in ended[1].log_tail
    assert ended[1].log_file is not None
    assert [event.event for event in local.run.events()] == ["submitted", "submitted"]


def test_job_folders_are_unique_to_the_submission(tmp_path: Path) -> None:
    local = launcher(tmp_path)
    folders = {local.submit([touch(tmp_path / "x")], stage="profile", nodes=1, minutes=1)[0].folder for _ in range(3)}
    assert len(folders) == 3
    assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in folders)


def processes_of(job: Submitted) -> list[int]:
    """Return the ids of all processes of a job."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(job.folder).encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found


def test_a_job_whose_shell_alone_is_killed_is_not_over_until_the_rest_is(tmp_path: Path) -> None:
    local = launcher(tmp_path)
    (job,) = local.submit([sleeper()], stage="train", nodes=1, minutes=1)
    lock, deadline = job.folder / f"{job.job_id}.lock", time.monotonic() + 20
    while not (lock.exists() and len(processes_of(job)) > 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(int(job.job_id), signal.SIGKILL)
    os.waitpid(int(job.job_id), 0)
    assert local.executor.states([job])
    for process in processes_of(job):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    (end,) = local.wait([job])
    assert end.failure is Failure.KILLED


@pytest.mark.processes
def test_the_command_that_cancels_local_jobs_hits_them_and_nobody_else(tmp_path: Path) -> None:
    """The printed command is run for a folder whose every character means something to a shell or a pattern."""
    odd = tmp_path / "a.b*[c](d)+? {2} $HOME^|'\"; é"
    odd.mkdir()
    local = launcher(odd)
    (job,) = local.submit([sleeper()], stage="train", nodes=1, minutes=1)
    (other,) = launcher(tmp_path).submit([sleeper()], stage="train", nodes=1, minutes=1)
    reader = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", f"{job.folder}/0_log.out"])
    deadline = time.monotonic() + 20
    while min(len(processes_of(job)), len(processes_of(other))) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    try:
        # dash and bash also understand other forms of it
        subprocess.run(["sh", "-c", local.executor.cancel_command([job])], check=True)
        (end,) = local.wait([job])
        assert end.failure is Failure.KILLED
        assert local.executor.states([other])
        assert reader.poll() is None
    finally:
        reader.kill()
        reader.wait()
        local.executor.cancel([other])
    assert not local.executor.states([job])


@pytest.mark.processes
def test_a_process_that_has_the_number_of_a_job_is_not_that_job(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)", "local_controller", str(tmp_path / "other")]
    )
    try:
        assert not is_alive(tmp_path / "mine", str(other.pid))
        assert is_alive(tmp_path / "other", str(other.pid))
    finally:
        other.kill()
        other.wait()


def test_an_id_that_returns_is_another_jobs(tmp_path: Path) -> None:
    """Process numbers return, and so do ids from a controller that has lost its state."""
    run = RunDirectory(tmp_path / "run").create()
    run.log_event("submitted", "train", job_id="7", data={"label": "first"})
    run.log_event("oom", "train", job_id="7")
    run.log_event("ended", "train", job_id="7")
    assert run.history().unsettled("train") == []
    run.log_event("submitted", "train", job_id="7", data={"label": "second"})
    assert [job.label for job in run.history().unsettled("train")] == ["second"]
    assert run.history().job("7").events == []


def test_what_an_sbatch_that_was_given_up_submits_late_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tula_hpc.launch.slurm_executor.SBATCH_S", 0.0)
    monkeypatch.setattr("tula_hpc.launch.slurm_executor.SETTLE_S", 0.0)
    monkeypatch.setattr(slurm, "named", lambda name: [])
    there = launcher(tmp_path, executor="slurm")
    folder = there.run.slurm / "train-1"
    folder.mkdir(mode=0o700)
    (folder / NOTICE).write_text(Notice(name="x", stage="train", tasks=[{}]).model_dump_json())
    (folder / "task-0.pkl").touch()
    assert there.find_lost() == []
    assert [path.name for path in folder.iterdir()] == [REFUSED]


@pytest.mark.parametrize("ahead_s", [-600.0, 600.0])
def test_an_sbatch_that_may_be_at_work_is_waited_for_by_the_file_servers_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    there = launcher(tmp_path, executor="slurm")
    folder = there.run.slurm / "train-1"
    folder.mkdir(mode=0o700)
    (folder / NOTICE).write_text(Notice(name="x", stage="train", tasks=[{}]).model_dump_json())
    real = time.time
    pauses: list[float] = []
    monkeypatch.setattr(time, "time", lambda: real() + ahead_s)
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(slurm, "named", lambda name: [])
    there.find_lost()
    assert 0.0 < pauses[0] <= SBATCH_S


def test_the_script_says_what_the_template_says(tmp_path: Path) -> None:
    there = launcher(
        tmp_path,
        name="v100",
        executor="slurm",
        device="cuda",
        gres="gpu:1",
        partition="gpu",
        account="me",
        memory_gb=64,
        cpus_per_worker=8,
        setup=["module load cuda"],
        environment={"NCCL_ALGO": "ring", "WORDS": "a b'c"},
        sbatch={"mail-type": "END"},
    )
    script = there.script(stage="profile", nodes=4, minutes=20, tasks=5)
    lines = script.splitlines()
    for line in (
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --array=0-4%1",
        "#SBATCH --gres=gpu:1",
        "#SBATCH --partition=gpu",
        "#SBATCH --account=me",
        "#SBATCH --mem=64GB",
        "#SBATCH --exclusive",
        "#SBATCH --requeue",
        "#SBATCH --signal=USR2@90",
        "#SBATCH --mail-type=END",
    ):
        assert line in lines, line
    assert any(line.startswith("srun") and f" -K1 {sys.executable} -u " in line for line in lines)
    setup = setup_text(there.cluster).splitlines()
    expected = [
        "module load cuda",
        "trap - ERR",
        "export OMP_NUM_THREADS=8",
        "export PYTHONHASHSEED=0",
        "export PYTHONSAFEPATH=1",
        "export NCCL_ALGO=ring",
    ]
    assert setup[setup.index("module load cuda") :] == [*expected, """export WORDS='a b'"'"'c'""", "tula_setup=done"]


@pytest.mark.parametrize(
    ("sbatch", "lines"), [({}, []), ({"wckey": "vision"}, ["#SBATCH --wckey=vision"]), ({"wckey": False}, [])]
)
def test_a_wckey_is_given_only_where_the_user_gives_one(
    tmp_path: Path, sbatch: dict[str, object], lines: list[str]
) -> None:
    """submitit's own wckey, which no site knows, would be refused where wckeys are enforced."""
    script = launcher(tmp_path, executor="slurm", sbatch=sbatch).script(stage="train", nodes=1, minutes=20, tasks=1)
    assert [line for line in script.splitlines() if line.startswith("#SBATCH --wckey")] == lines


@pytest.mark.processes
@pytest.mark.parametrize(("device", "visible"), [("cpu", "2,3"), ("cuda", "2,3"), ("cuda", ""), ("cuda", None)])
def test_local_jobs_see_the_gpus_that_the_command_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, device: str
) -> None:
    """submitit would show them the first GPUs, which may be another user's."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    local = launcher(tmp_path, device=device)
    file = tmp_path / "seen"

    def job() -> None:
        file.write_text(repr(os.environ.get("CUDA_VISIBLE_DEVICES")))

    with forking_jobs():
        local.wait(local.submit([job], stage="profile", nodes=1, minutes=1))
    assert file.read_text() == repr("" if device == "cpu" else visible)


def test_the_shell_of_a_local_job_sets_its_traps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    def start(_: Path, __: str, setup: list[str], **___: int) -> int:
        lines.extend(setup)
        return 1

    monkeypatch.setattr(local_executor, "start_controller", start)
    launcher(tmp_path).submit([print], stage="profile", nodes=1, minutes=1)
    assert set(TRAPS) <= set(lines)


@pytest.mark.processes
@pytest.mark.parametrize("shell", ["dash", "bash"])
def test_the_task_stays_a_child_of_the_shell(shell: str) -> None:
    """submitit takes the shell's pid as the job's id, but bash would replace itself by the last command of a list."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    command = " && ".join([*TRAPS, f"{sys.executable} -c 'import os; print(os.getppid())'"])
    with subprocess.Popen([shell, "-c", command], stdout=subprocess.PIPE, text=True) as process:
        assert int(known(process.stdout).read()) == process.pid


@pytest.mark.processes
@pytest.mark.parametrize("shell", ["dash", "bash"])
def test_an_interrupt_does_not_end_local_jobs(shell: str) -> None:
    """Nor does the signal that submitit sends before it kills, whose traceback would look like the reason of an end."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    code = "import os, signal; os.killpg(0, signal.SIGINT); print('goes on')"
    command = " && ".join([*TRAPS, f'{sys.executable} -c "{code}"'])
    done = subprocess.run(
        [shell, "-c", command], capture_output=True, text=True, check=False, start_new_session=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "goes on\n")


def test_switches_that_are_off_are_left_out(tmp_path: Path) -> None:
    script = launcher(tmp_path, executor="slurm", sbatch={"requeue": False}).script(
        stage="train", nodes=1, minutes=1, tasks=1
    )
    assert "requeue" not in script


def test_gpus_that_slurm_does_not_manage_are_not_asked_for(tmp_path: Path) -> None:
    there = launcher(tmp_path, executor="slurm", device="cuda", gres="none")
    assert "--gres" not in there.script(stage="train", nodes=1, minutes=1, tasks=1)


def test_jobs_are_sent_the_signal_that_they_handle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """submitit reads another one from SUBMITIT_PREEMPT_SIGNAL when it is imported; no job sees that variable."""
    monkeypatch.setattr(submitit_slurm.SlurmJobEnvironment, "USR_SIG", "USR1")
    script = launcher(tmp_path, executor="slurm").script(stage="train", nodes=1, minutes=9, tasks=1)
    assert "#SBATCH --signal=USR2@90\n" in script


def device_failed(run: RunDirectory, host: str, ago_s: float = 0.0) -> None:
    where = {"failure": Failure.DEVICE_FAILED, "detail": "an ECC error", "data": {"hosts": [host]}}
    append_record(run.events_file, Event(time=time.time() - ago_s, event="failed", stage="train", **where))


@pytest.mark.parametrize(
    ("own", "merged"),
    [({}, "n2,n7"), ({"exclude": "n[4-5]"}, "n[4-5],n2,n7"), ({"exclude": "{folder}/bad"}, "n4,n5,n2,n7")],
)
def test_hosts_with_broken_devices_are_left_out_for_a_day_besides_those_that_the_user_excludes(
    tmp_path: Path, own: dict[str, str], merged: str
) -> None:
    (tmp_path / "bad").write_text("n4\nn5\n")
    sbatch = {key: value.format(folder=tmp_path) for key, value in own.items()}
    there = launcher(tmp_path, executor="slurm", sbatch=sbatch)
    device_failed(there.run, "n9", ago_s=25 * 3600)
    device_failed(there.run, "n2", ago_s=23 * 3600)
    device_failed(there.run, "n7")
    device_failed(there.run, "n2; rm -r x")
    for stage in ("profile", "train"):
        assert f"#SBATCH --exclude={shlex.quote(merged)}\n" in there.script(stage=stage, nodes=1, minutes=9, tasks=1)
    # its controllers need no device
    assert "n7" not in there.script(stage=CONTROL, nodes=1, minutes=9, tasks=1)


def test_a_refusal_names_the_hosts_that_were_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = launcher(tmp_path, executor="slurm")
    device_failed(there.run, "n2")

    def refuse(*_: object) -> None:
        raise RefusedError("the scheduler refused the job: no such nodes")

    monkeypatch.setattr(there, "_submit_array", refuse)
    words = r"refused the job: no such nodes; .* left out: n2 reported 'an ECC error'; .* tried again from"
    with pytest.raises(RefusedError, match=words):
        there.submit([touch(tmp_path / "x")], stage="train", nodes=1, minutes=9)
    assert there.run.events()[-1].detail.startswith(
        "train: the scheduler refused the job: no such nodes; nodes with broken"
    )


def test_a_refusal_names_the_partition_of_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path / "run").create()
    run.cluster_file.write_text(
        'executor = "slurm"\n[[partitions]]\npartition = "cpu"\n[[partitions]]\npartition = "gpu"\n'
    )
    sweep = Sweep(SweepSpec(name="x"), load_cluster(run.cluster_file), run)

    def refuse(*_: object) -> None:
        raise RefusedError("the scheduler refused the job")

    monkeypatch.setattr(Launcher, "_submit_array", refuse)
    with pytest.raises(RefusedError, match=r"^partition gpu: the scheduler refused the job$"):
        sweep.on("gpu").launcher.submit([touch(tmp_path / "x")], stage="train", nodes=1, minutes=9)
    assert run.events()[-1].detail == "train: partition gpu: the scheduler refused the job"


def test_where_arrays_are_refused_jobs_are_submitted_one_by_one_and_as_many_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = launcher(tmp_path, executor="slurm", array_parallelism=2)
    asked: list[tuple[int, tuple[str, ...]]] = []
    largest = 1

    def submit(tasks: list[object], request: Request, _folder: Path) -> list[str]:
        asked.append((len(tasks), request.after))
        if len(tasks) > largest:
            raise RefusedError("the scheduler refused the job")
        return [str(len(asked))]

    monkeypatch.setattr(slurm, "largest_array", lambda: 1001)
    monkeypatch.setattr(there.executor, "check", lambda: None)
    monkeypatch.setattr(there.executor, "submit", submit)
    jobs = there.submit([print] * 4, stage="train", nodes=1, minutes=1, after=["0"])
    assert [job.job_id for job in jobs] == ["2", "3", "4", "5"]
    assert asked == [(4, ("0",)), (1, ("0",)), (1, ("0",)), (1, ("2",)), (1, ("3",))]
    assert capsys.readouterr().err == "the scheduler refused the job; submitting jobs one by one\n"
    largest = 0
    asked.clear()
    with pytest.raises(RefusedError):
        there.submit([print] * 4, stage="train", nodes=1, minutes=1)
    assert [count for count, _ in asked] == [4, 1]


def test_no_slurm_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    there = launcher(tmp_path, executor="slurm")
    with pytest.raises(LaunchError, match="sbatch is not on PATH"):
        there.submit([touch(tmp_path / "x")], stage="profile", nodes=1, minutes=1)


def let_sbatch_print(words: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sbatch print these words whatever it is asked, and take no job."""
    for name in ("sbatch", "srun"):
        (folder / name).write_text(f"#!/bin/sh\necho '{words}' >&2; exit 1\n")
        (folder / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr("tula_hpc.launch.slurm_executor.PAUSES_S", (0,))
    monkeypatch.setattr("tula_hpc.launch.slurm_executor.submissions_named", lambda _: [])


@pytest.mark.parametrize(
    ("words", "meaning"),
    [
        ("sbatch: error: Invalid generic resource (gres) specification", RefusedError),
        ("allocation failure: Invalid partition name specified", RefusedError),
        ("sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Job violates accounting/QOS policy", SubmitLimitError),
        ("allocation failure: Unable to contact slurm controller (connect failure)", LaunchError),
    ],
)
def test_a_dry_run_and_a_submission_take_the_same_words_for_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, meaning: type[LaunchError]
) -> None:
    let_sbatch_print(words, tmp_path, monkeypatch)
    there = launcher(tmp_path, executor="slurm")
    with pytest.raises(LaunchError) as dry:
        could_start(there.script(stage="profile", nodes=1, minutes=1, tasks=1))
    with pytest.raises(LaunchError) as real:
        there.submit([touch(tmp_path / "x")], stage="profile", nodes=1, minutes=1, patient=False)
    assert (type(dry.value), type(real.value)) == (meaning, meaning)
    assert all(words.splitlines()[-1].rpartition(": ")[2] in str(raised.value) for raised in (dry, real))


@pytest.mark.parametrize("stage", ["profile", "train", CONTROL])
def test_what_the_scheduler_refuses_is_on_record_unless_it_can_be_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    let_sbatch_print("sbatch: error: Batch job submission failed: Invalid feature specification", tmp_path, monkeypatch)
    there = launcher(tmp_path, executor="slurm")
    with pytest.raises(RefusedError):
        there.submit([touch(tmp_path / "x")], stage=stage, nodes=1, minutes=1, patient=False)
    assert there.run.events() == []
    with pytest.raises(RefusedError):
        there.submit([touch(tmp_path / "x")], stage=stage, nodes=1, minutes=1)
    (event,) = there.run.events()
    assert (event.event, event.stage, event.job_id) == ("failed", stage, "")
    assert "Invalid feature specification" in event.detail


def test_what_a_job_submits_does_not_inherit_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_MEM_PER_NODE", "SRUN_EXPORT_ENV", "SUBMITIT_EXECUTOR", "SLURM_CONF"):
        monkeypatch.setenv(name, "x")
    before = dict(os.environ)
    with outside_of_job():
        assert {name for name in os.environ if name.startswith(("SLURM", "SRUN", "SUBMITIT"))} == {"SLURM_CONF"}
    assert dict(os.environ) == before


def test_sbatch_follows_the_script_and_not_the_users_variables_unless_the_script_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PARTITION", "ACCOUNT", "JOB_NAME", "TIMELIMIT", "ARRAY_INX", "WAIT", "CLUSTERS"):
        monkeypatch.setenv(f"SBATCH_{name}", "mine")
    with outside_of_job(["partition", "job_name", "time"]):
        assert {name for name in os.environ if name.startswith("SBATCH_")} == {"SBATCH_ACCOUNT"}


def test_what_a_user_has_squeue_leave_out_is_not_left_out_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_PARTITION", "debug")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    seen = slurm.run_command(["env"])
    assert "SQUEUE_" not in seen
    assert "SLURM_CONF=/etc/slurm.conf" in seen


@pytest.mark.parametrize("minutes", [2, 30, 60 * 24 * 40])
def test_a_controller_that_waits_for_room_is_bounded_by_time_not_by_a_number_of_requeues(minutes: int) -> None:
    assert time_outs(Request("profile", 1, minutes)) == 3
    assert CONTROL_MINUTES <= time_outs(Request(CONTROL, 1, minutes)) * minutes < CONTROL_MINUTES + minutes


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (submitit_slurm, "_make_sbatch_string"),
        (submitit_slurm, "_convert_mem"),
        (submitit_slurm.SlurmJobEnvironment, "_requeue"),
        (submitit_slurm.SlurmJobEnvironment, "_handle_signals"),
        (DelayedSubmission(print), "_timeout_min"),
        (DelayedSubmission(print), "_timeout_countdown"),
    ],
)
def test_submitit_has_the_private_names_that_are_used_here(owner: object, name: str) -> None:
    """A new version may drop them: the first two are for scripts, the others for a job's start and its requeue."""
    assert hasattr(owner, name)


@pytest.mark.parametrize(("in_job", "jobs", "waits"), [(False, 0, False), (False, 1, True), (True, 1, False)])
def test_a_command_below_a_limit_on_jobs_does_not_wait_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_job: bool, jobs: int, waits: bool
) -> None:
    monkeypatch.setattr(slurm, "own_jobs", lambda: jobs)
    monkeypatch.setattr("tula_hpc.launch.launcher.ROOM_PAUSE_S", 0.0)
    if in_job:
        monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
        monkeypatch.setenv("SLURM_JOB_ID", "17")
    error = SubmitLimitError("a limit of the cluster on submitted jobs is reached")
    with contextlib.nullcontext() if waits else pytest.raises(SubmitLimitError):
        assert launcher(tmp_path, executor="slurm")._fewer(1, error, 4) == 4


def test_a_wait_for_room_is_said_once_in_each_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tula_hpc.launch.launcher.ROOM_PAUSE_S", 0.0)
    monkeypatch.setattr(slurm, "own_jobs", lambda: 5)
    there = launcher(tmp_path, executor="slurm")
    refusals = 3 * [SubmitLimitError("a limit of the cluster on submitted jobs is reached")]

    def submit(*_: object) -> list[str]:
        if refusals:
            raise refusals.pop()
        return ["7"]

    monkeypatch.setattr(there.executor, "check", lambda: None)
    monkeypatch.setattr(there.executor, "submit", submit)
    there.submit([print], stage="train", nodes=1, minutes=1)
    assert capsys.readouterr().err.count("is reached; trying again every 0 s") == 1
    refusals.append(SubmitLimitError("a limit of the cluster on submitted jobs is reached"))
    there.submit([print], stage="train", nodes=1, minutes=1)
    assert "is reached; trying again every 0 s" in capsys.readouterr().err


def test_a_guard_gives_way_before_anybody_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled: list[str] = []
    monkeypatch.setattr(slurm, "cancel", cancelled.extend)
    monkeypatch.setattr(slurm, "queue", lambda job_ids, **_: dict.fromkeys(job_ids, slurm.JobState("PENDING", "")))
    monkeypatch.setattr(slurm, "own_jobs", lambda: 0)
    there = launcher(tmp_path, executor="slurm")
    for job_id, data in (("8", {}), ("9", {"role": GUARD})):
        there.run.log_event("submitted", CONTROL, job_id=job_id, data=data)
    error = SubmitLimitError("a limit of the cluster on submitted jobs is reached")
    assert there._fewer(5, error, 5) == 3
    assert cancelled == []
    assert there._fewer(1, error, 5) == 1
    assert cancelled == ["9"]
    with pytest.raises(SubmitLimitError):
        there._fewer(1, error, 5)


SCONTROL = """#!/bin/sh
echo "$@" >>"$0.log"
[ "$1" = requeue ] || echo "JobId=17 JobState=$STATE"
"""


@pytest.mark.parametrize(
    ("code", "state", "times", "requeued"),
    [
        (137, "RUNNING", 1, 1),
        (137, "RUNNING", 9, 3),
        (0, "RUNNING", 1, 0),
        (1, "RUNNING", 1, 0),
        (255, "PENDING", 9, 0),
    ],
    ids=["killed", "killed again and again", "done", "failed and said why", "on its way out"],
)
def test_a_controller_that_is_killed_comes_again_a_few_times(
    tmp_path: Path, code: int, state: str, times: int, requeued: int
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(SCONTROL)
    scontrol.chmod(0o700)
    folder = tmp_path / "a b"
    folder.mkdir()
    script = "\n".join([f"(exit {code})", *requeue_if_killed(folder)])
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17", "STATE": state}
    for _ in range(times):
        assert subprocess.run(["bash", "-c", script], env=environment, check=False, timeout=60).returncode == code
    log = tmp_path / "scontrol.log"
    assert (log.read_text().count("requeue 17") if log.exists() else 0) == requeued


@pytest.mark.processes
@pytest.mark.parametrize(("silences", "asked"), [(0, 1), (2, 3), (9, 4)])
def test_a_controller_that_is_killed_asks_again_where_slurm_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silences: int, asked: int
) -> None:
    monkeypatch.setattr("tula_hpc.launch.slurm_executor.REQUEUE_PAUSES_S", (0, 0, 0, 0))
    scontrol, log = tmp_path / "scontrol", tmp_path / "asked"
    scontrol.write_text(
        "#!/bin/sh\n[ $1 = requeue ] || { echo JobState=RUNNING; exit; }\n"
        f"echo >>{log}; [ $(wc -l <{log}) -gt {silences} ]\n"
    )
    scontrol.chmod(0o700)
    script = "\n".join(["(exit 137)", *requeue_if_killed(tmp_path)])
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    assert subprocess.run(["bash", "-c", script], env=environment, check=False, timeout=60).returncode == 137
    assert log.read_text().count("\n") == asked


@pytest.mark.processes
def test_a_detached_launcher_does_not_wait_for_what_runs(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run").create()
    detached = Launcher(ClusterSpec(), run, "tula-test", detached=True)
    jobs = detached.submit([touch(tmp_path / "done")], stage="train", nodes=1, minutes=1)
    with pytest.raises(StillRunningError) as left:
        detached.wait_for_some(jobs)
    assert left.value.jobs == jobs
    Launcher(ClusterSpec(), run, "tula-test").wait(jobs)
    assert [end.job for end in detached.wait_for_some(jobs)] == jobs
    assert (tmp_path / "done").exists()


def test_a_requeued_job_waits_since_it_was_last_seen_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile job leaves no event of its own."""
    there = launcher(tmp_path, executor="slurm")
    hours_ago = {"time": time.time() - 2 * 3600, "event": "submitted", "stage": "profile", "job_id": "7"}
    append_record(there.run.events_file, Event.model_validate(hours_ago))
    looks = [("PENDING", "Priority"), ("RUNNING", "None"), ("PENDING", "BeginTime")]
    states = [{"7": slurm.JobState(*look)} for look in looks]
    monkeypatch.setattr(there.executor, "states", lambda _: states.pop(0) if states else {})
    monkeypatch.setattr(there.executor, "ended", lambda _: {})
    monkeypatch.setattr(time, "sleep", lambda _: None)
    seen: list[str] = []
    there.wait_for_some([Submitted("7", tmp_path)], lambda now: seen.append(now.text))
    before, running, again, *_ = seen
    assert before == "1 waiting for 2 h (other jobs go first)"
    assert running == "1 running"
    assert again.startswith("1 waiting (its start is set for later")


def test_a_command_in_a_job_of_the_users_own_says_that_this_keeps_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    waiting = {"8": slurm.JobState("PENDING", "(Resources)")}
    assert describe_states(waiting) == "1 waiting (enough nodes have to become free)"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    message = "1 waiting (enough nodes have to become free; job 7, in which this command runs, keeps its own nodes)"
    assert describe_states(waiting) == message


def test_a_job_that_waits_in_vain_is_distinguished() -> None:
    waiting = slurm.JobState("PENDING", "Priority")
    stuck = slurm.JobState("PENDING", "PartitionConfig")
    message = describe_states({"7": slurm.JobState("RUNNING", ""), "8": waiting, "9": waiting, "10": stuck})
    assert message == (
        "1 running, 2 waiting (other jobs go first), "
        "1 waiting (asks for more than its partition has or allows; this does not go away by itself)"
    )
    message = describe_states(
        {"8": waiting, "9": waiting, "7": slurm.JobState("COMPLETING", "")}, {"8": 59.0, "9": 754.0}
    )
    assert message == "2 waiting for 12 min (other jobs go first), 1 completing"
    assert describe_states({}) == "ending"
    held = {"8": slurm.JobState("PENDING", "JobHeldUser")}
    assert "`scontrol release 8` lets it go" in describe_states(held)
