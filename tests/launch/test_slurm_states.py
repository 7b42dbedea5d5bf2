from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tula_hpc.ddp.device_errors import broken_device
from tula_hpc.errors import (
    DeviceError,
    DivergedError,
    InputError,
    LaunchError,
    NotStartedError,
    PreemptedError,
    TulaError,
    error_for,
)
from tula_hpc.failure_kinds import Failure
from tula_hpc.launch import slurm
from tula_hpc.launch.diagnosis import classify, complaining_nodes, informative_line, without_chatter
from tula_hpc.launch.slurm import JobState, StepState, is_submit_limit, is_unanswered

NCCL = "[PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: "
HUNG = (
    "[rank1]:[F1129 13:34:49.480862606 ProcessGroupNCCL.cpp:1557] [PG ID 0 PG GUID 0(default_pg) Rank 1] Terminating "
    "the process after attempting to dump debug info, due to ProcessGroupNCCL watchdog hang."
)
SYSTEM = (
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:317, "
    "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5"
)
REMOTE = SYSTEM.replace(
    "unhandled system error (run with NCCL_DEBUG=INFO for details)",
    "remote process exited or there was a network error",
)
ECC = "uncorrectable ECC error encountered"
LEAKED = "/lib/resource_tracker.py:254: UserWarning: resource_tracker: 22 leaked semaphores\n  warnings.warn('%d'"
TORCH_WARNS = "[W1127 13:34:49.480862606 socket.cpp:207] [c10d] The hostname of the client cannot be retrieved. err=-3"
# a full disk leaves such a line
CUT_OFF = "Error in sys.excepthook:\nobject address  : 0x7f0c\nobject type name: OSError\nobject repr     : "
FRAME = """Traceback (most recent call last):
  File "x.py", line 1, in f
    g()
"""


def rows(*states: tuple[str, str, str]) -> list[StepState]:
    return [StepState(*state) for state in states]


@pytest.mark.parametrize(
    ("steps", "log", "failure"),
    [
        # sacct of Slurm 22.05 shows a step over its memory so, while the job itself only says FAILED
        (
            rows(("7", "FAILED", "1:0"), ("7.batch", "FAILED", "1:0"), ("7.0", "OUT_OF_MEMORY", "0:125")),
            "",
            Failure.HOST_OOM,
        ),
        (
            rows(("7", "FAILED", "1:0")),
            f"{FRAME}tula_hpc.errors.InputError: workload.model: no such function",
            Failure.BAD_INPUT,
        ),
        ([], f"{FRAME}tula_hpc.errors.DivergedError: the loss is not finite at step 8", Failure.DIVERGED),
        ([], "[rank1]: tula_hpc.errors.DivergedError: the loss is not finite at step 8", Failure.DIVERGED),
        ([], "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0.", Failure.HOST_OOM),
        (rows(("7", "FAILED", "1:0")), "torch.OutOfMemoryError: CUDA out of memory.", Failure.DEVICE_OOM),
        (rows(("7", "NODE_FAIL", "0:0")), "", Failure.NODE_FAILED),
        (rows(("7", "TIMEOUT", "0:0"), ("7.0", "CANCELLED", "0:15")), "", Failure.TIMED_OUT),
        ([], "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT x DUE TO TIME LIMIT ***", Failure.TIMED_OUT),
        (rows(("7", "PREEMPTED", "0:0")), "", Failure.PREEMPTED),
        (rows(("7", "CANCELLED", "0:0")), "", Failure.CANCELLED),
        (rows(("7", "FAILED", "1:0")), "Traceback (most recent call last):\nKeyError: 'x'", Failure.BUG),
        ([], "", Failure.BUG),
        (rows(("7", "FAILED", "137:0"), ("7.0", "FAILED", "0:9")), "", Failure.KILLED),
        ([], "srun: error: n1: task 1: Killed", Failure.KILLED),
        ([], "srun: error: n1: task 1: Terminated\nsrun: Force Terminated StepId=7.0", Failure.KILLED),
        ([], "n1: task 1: Terminated\nn0: task 0: Exited with exit code 1", Failure.BUG),
        ([], f"{FRAME}RuntimeError: [gloo/pair.cc:534] Connection closed by peer [10.0.0.1]:1", Failure.KILLED),
        # of torch's store, at the first collective of a worker whose peer has met it, and then hangs
        ([], f"{FRAME}torch.distributed.DistStoreError: wait timeout after 600000ms, keys: /x/0//cpu", Failure.KILLED),
        # srun kills the others when one raises, so that its exception is the reason, whatever its peers say
        ([], f"{FRAME}KeyError: 'x'\nsrun: error: n1: task 1: Killed", Failure.BUG),
        ([], f"{FRAME}tula_hpc.errors.PreemptedError: requeue refused: disabled", Failure.PREEMPTED),
        # the cause comes before it
        (
            [],
            f"{FRAME}RuntimeError: Connection closed by peer\n{FRAME}tula_hpc.errors.PreemptedError: the job was "
            "suspended",
            Failure.PREEMPTED,
        ),
        ([], f"{FRAME}submitit.E: Job not requeued because: timed-out, and requeue refused: no", Failure.TIMED_OUT),
        ([], f"{FRAME}tula_hpc.errors.MeetingError: rank 1 did not find rank 0 of job 7", Failure.KILLED),
        ([], f"{FRAME}KeyError: 'x'\n{FRAME}a.MeetingError: 1 of 2 workers did not come to rank 0", Failure.BUG),
        ([], f"{FRAME}RuntimeError: Connection closed by peer\n{FRAME}my.Error: no", Failure.BUG),
        (
            [],
            f"{FRAME}RuntimeError: Connection closed by peer\n{LEAKED}\nsrun: error: n1: task 0: Exited",
            Failure.KILLED,
        ),
        ([], "[rank1]:   File \"x.py\", line 1\n[rank1]: KeyError: 'x'\nsrun: error: n1: task 0: Killed", Failure.BUG),
        (rows(("7", "FAILED", "139:0"), ("7.0", "FAILED", "0:11")), f"{FRAME}E: Broken pipe", Failure.BUG),
        ([], f"{FRAME}E: Broken pipe\nsrun: error: n1: task 0: Segmentation fault", Failure.BUG),
        (rows(("7", "CANCELLED", "0:0"), ("7.0", "CANCELLED", "0:9")), "task 0: Killed", Failure.CANCELLED),
        # if a peer of nccl is gone or silent, torch aborts the others, from a thread without a traceback
        (
            rows(("7", "FAILED", "134:0"), ("7.0", "FAILED", "0:6")),
            f"{NCCL}NCCL error: remote process exited or there was a network error, NCCL version 2.28.9\n"
            "srun: error: n1: task 1: Killed\nsrun: error: n2: task 2: Aborted (core dumped)",
            Failure.KILLED,
        ),
        ([], f"{NCCL}[Rank 1] Watchdog caught collective operation timeout: Work\nn1: task 1: Aborted", Failure.KILLED),
        (rows(("7", "FAILED", "134:0"), ("7.0", "FAILED", "0:6")), f"{HUNG}\nn1: task 1: Aborted", Failure.KILLED),
        ([], f"{NCCL}CUDA error: an illegal memory access was encountered\nn1: task 1: Aborted", Failure.BUG),
        ([], f"{NCCL}NCCL error: remote process exited\nn1: task 1: Aborted\n{FRAME}KeyError: 'x'", Failure.BUG),
        ([], f"{NCCL}NCCL error: remote process exited\nn1: task 0: Segmentation fault", Failure.BUG),
        # the worker that met the broken device names it; the others only lost a peer, or waited in vain
        ([], f"{FRAME}RuntimeError: CUDA error: {ECC}\n{FRAME}E: Connection closed by peer", Failure.DEVICE_FAILED),
        (rows(("7", "TIMEOUT", "0:0")), f"{FRAME}RuntimeError: CUDA error: {ECC}", Failure.DEVICE_FAILED),
        (rows(("7", "FAILED", "1:0")), f"{FRAME}tula_hpc.errors.DeviceError: n1: as told", Failure.DEVICE_FAILED),
        ([], f"{FRAME}torch.OutOfMemoryError: CUDA out of memory.\n{FRAME}E: {ECC}", Failure.DEVICE_OOM),
        ([], f"{NCCL}CUDA error: {ECC}\nn1: task 1: Aborted", Failure.DEVICE_FAILED),
        ([], f"{FRAME}{SYSTEM}\nn2: task 1: Killed", Failure.DEVICE_FAILED),
        ([], f"{FRAME}{SYSTEM}\n{FRAME}KeyError: 'x'", Failure.BUG),
        ([], f"{FRAME}{SYSTEM}\n{FRAME}tula_hpc.errors.InputError: no", Failure.BAD_INPUT),
        ([], f"{FRAME}{REMOTE}\nn1: task 0: Killed", Failure.KILLED),
        ([], f"{FRAME}{REMOTE}\n{FRAME}{REMOTE}", Failure.DEVICE_FAILED),
        (rows(("7", "FAILED", "1:0")), CUT_OFF, Failure.NO_SPACE),
        # a file system that refused a file this time
        ([], f"{FRAME}tula_hpc.errors.CheckpointError: /a: cannot be saved: Input/output error", Failure.KILLED),
        ([], f"{FRAME}tula_hpc.errors.StorageError: /a: cannot be written: Stale file handle", Failure.KILLED),
        ([], f"{FRAME}tula_hpc.errors.RunDirectoryError: /a: cannot be read: Stale file handle", Failure.KILLED),
        ([], f"{FRAME}tula_hpc.errors.InputError: /a: cannot be read: Input/output error", Failure.KILLED),
        ([], f"{FRAME}tula_hpc.errors.StorageError: /a: cannot be made: Stale file handle", Failure.KILLED),
        ([], f"{FRAME}OSError: [Errno 5] Input/output error: '/data/a.jpg'", Failure.KILLED),
        ([], "[rank1]: TimeoutError: [Errno 110] Connection timed out: '/data'", Failure.KILLED),
        ([], f"{FRAME}OSError: [Errno 116] Stale file handle", Failure.KILLED),
        # a connection of a tracker's, say, which was only logged
        (
            [],
            f"{FRAME}TimeoutError: [Errno 110] Connection timed out\n{FRAME}tula_hpc.errors.InputError: no",
            Failure.BAD_INPUT,
        ),
        ([], f"{FRAME}OSError: [Errno 107] Transport endpoint is not connected", Failure.BUG),
        ([], f"{FRAME}FileNotFoundError: [Errno 2] No such file or directory: '/data'", Failure.BUG),
        ([], f"{FRAME}OSError: [Errno 28] No space left on device: '/data'", Failure.NO_SPACE),
        ([], f"{FRAME}KeyError: 'Input/output error'", Failure.BUG),
        ([], f"{FRAME}tula_hpc.errors.InputError: /a: cannot be read: Permission denied", Failure.BAD_INPUT),
        ([], f"{FRAME}tula_hpc.errors.StorageError: /a: cannot be written: Permission denied", Failure.BUG),
    ],
)
def test_failures_are_distinguished(steps: list[StepState], log: str, failure: Failure) -> None:
    assert classify(steps, log) is failure


@pytest.mark.parametrize(
    ("line", "failure"),
    [
        ("RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable", Failure.DEVICE_FAILED),
        ("RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable", Failure.DEVICE_FAILED),
        ("torch.AcceleratorError: CUDA error: unspecified launch failure", Failure.DEVICE_FAILED),
        ("torch.AcceleratorError: CUDA error: unknown error", Failure.DEVICE_FAILED),
        ("RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution", Failure.DEVICE_FAILED),
        ("RuntimeError: CUDA error: no CUDA-capable device is detected", Failure.DEVICE_FAILED),
        ("RuntimeError: CUDA driver initialization failed, you might not have a CUDA gpu.", Failure.DEVICE_FAILED),
        (
            "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
            "NumCudaDevices() that might have already set an error? Error 802: system not yet initialized",
            Failure.DEVICE_FAILED,
        ),
        ("Failed to initialize NVML: Driver/library version mismatch", Failure.DEVICE_FAILED),
        ("slurmstepd: error: NVML: Failed to get usage(15): GPU is lost", Failure.DEVICE_FAILED),
        ("Unable to determine the device handle for GPU0000:0B:00.0: Unknown Error", Failure.DEVICE_FAILED),
        ("NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus", Failure.DEVICE_FAILED),
        ("NVRM: Xid (PCI:0000:44:00): 48, pid=7, An uncorrectable double bit error", Failure.DEVICE_FAILED),
        # results of a program's own mistakes
        ("NVRM: Xid (PCI:0000:44:00): 31, pid=7, Ch 00000028, MMU Fault", Failure.BUG),
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", Failure.BUG),
        ("RuntimeError: CUDA error: device-side assert triggered", Failure.BUG),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", Failure.BUG),
    ],
)
def test_a_broken_device_is_distinguished_from_a_bug_on_it(line: str, failure: Failure) -> None:
    assert classify([], FRAME + line) is failure
    assert bool(broken_device(RuntimeError(line))) is (failure is Failure.DEVICE_FAILED)


@pytest.mark.parametrize("error", [InputError, DivergedError, DeviceError, PreemptedError])
def test_our_errors_are_recognized_by_their_names_in_a_log(error: type[TulaError]) -> None:
    assert error.failure is not None
    assert classify([], f"{FRAME}{error.__module__}.{error.__name__}: words") is error.failure
    assert error_for(error.failure) is error


def test_a_gpu_that_nobody_asked_for_is_not_broken() -> None:
    words = '"cuda", but torch sees no GPU on n1: no CUDA-capable device is detected'
    assert broken_device(InputError(words, key="device")) == ""
    assert classify([], f"{FRAME}tula_hpc.errors.InputError: device: {words}") is Failure.BAD_INPUT


def test_an_error_of_nccl_alone_does_not_accuse_this_node() -> None:
    """Any of its peers may be the one whose network failed."""
    assert broken_device(RuntimeError(SYSTEM)) == ""
    assert (
        broken_device(RuntimeError(f"{SYSTEM}\nLast error:\nCuda failure 214 '{ECC}'")) == f"Cuda failure 214 '{ECC}'"
    )


@pytest.mark.parametrize(
    ("logs", "nodes"),
    [
        # of four workers on two nodes, one was aborted before it could report the reason
        ({0: f"{NCCL}CUDA error: an error of a peer", 2: f"{NCCL}CUDA error: {ECC}", 3: ""}, [1]),
        ({0: SYSTEM, 2: f"{NCCL}CUDA error: {ECC}"}, [1]),
        ({0: "", 2: SYSTEM}, [1]),
        # nccl alone accuses two nodes, and nobody knows which one failed
        ({0: SYSTEM, 2: SYSTEM}, []),
        ({0: "", 2: ""}, []),
    ],
)
def test_the_node_of_a_broken_device_is_found_by_its_tasks_logs(
    logs: dict[int, str], nodes: list[int], tmp_path: Path
) -> None:
    for task, text in logs.items():
        where = (
            f"JobEnvironment(job_id=7, hostname=n{task // 2}, local_rank=0(2), node={task // 2}(2), global_rank=0(4))"
        )
        (tmp_path / f"7_{task}_log.out").write_text(f"submitit INFO (x) - Starting with {where}\n")
        (tmp_path / f"7_{task}_log.err").write_text(f"{text}\n")
    assert complaining_nodes(sorted(tmp_path.iterdir())) == nodes


def test_requeued_and_suspended_jobs_are_not_over() -> None:
    for state in ("PENDING", "RUNNING", "COMPLETING", "SUSPENDED", "CONFIGURING", "REQUEUE_HOLD", "REQUEUED"):
        assert not JobState(state, "").is_over
    for state in ("COMPLETED", "FAILED", "NODE_FAIL", "TIMEOUT", "OUT_OF_MEMORY", "CANCELLED"):
        assert JobState(state, "").is_over


@pytest.mark.parametrize(
    ("words", "unanswered", "limit"),
    [
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", True, False),
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller", True, False),
        ("sbatch: error: Batch job submission failed: Resource temporarily unavailable", True, False),
        ("sbatch: fatal: Could not establish a configuration source", True, False),
        ("sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates "
         "accounting/QOS policy (job submit limit, user's size and/or time limits)", False, True),
        ("sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed: Job violates "
         "accounting/QOS policy (job submit limit, user's size and/or time limits)", False, True),
        ("sbatch: error: QOSMaxWallDurationPerJobLimit\nsbatch: error: Batch job submission failed: Job violates "
         "accounting/QOS policy (job submit limit, user's size and/or time limits)", False, False),
        ("sbatch: error: invalid partition specified: nowhere", False, False),
    ],
)  # fmt: skip
def test_a_refusal_a_limit_and_no_answer_are_distinguished(words: str, unanswered: bool, limit: bool) -> None:
    assert (is_unanswered(words), is_submit_limit(words)) == (unanswered, limit)


@pytest.mark.parametrize("silences", [0, 2, 3])
def test_waiting_for_a_controller_that_does_not_answer_is_reported(
    silences: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is reported once for each pause, and once more when the controller answers, if only after the last pause."""
    monkeypatch.setattr(slurm, "PATIENCE_S", (0, 0))
    monkeypatch.setattr(slurm, "available", lambda: True)
    monkeypatch.delenv("SLURM_CONF", raising=False)
    left = iter([f"squeue failed: a retry\nsqueue: error: no answer {number}" for number in range(silences)])

    def ask() -> str:
        for word in left:
            raise LaunchError(word)
        return "an answer"

    if silences < 3:
        assert slurm.retry_until_answered(ask) == "an answer"
    else:
        with pytest.raises(LaunchError, match=r"has not answered for an hour: .*no answer 2; SLURM_CONF is not set"):
            slurm.retry_until_answered(ask)
    message = "squeue failed: squeue: error: no answer {}; SLURM_CONF is not set"
    words = f"Slurm does not answer ({message}); trying again in 0 s"
    lines = [words.format(number) for number in range(2)]
    expected = {0: [], 2: [*lines, "Slurm answers again"], 3: lines}
    assert capsys.readouterr().err.splitlines() == expected[silences]


def test_a_wait_ends_when_nobody_reads_its_output_any_more(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Output still goes to stdout: only standard error was closed."""
    monkeypatch.setattr(slurm, "PATIENCE_S", (0,))
    monkeypatch.setattr(slurm, "available", lambda: True)
    reader, writer = os.pipe()
    os.close(reader)

    def ask() -> None:
        raise LaunchError("no answer")

    with os.fdopen(writer, "w", buffering=1) as closed:
        monkeypatch.setattr("sys.stderr", closed)
        with pytest.raises(BrokenPipeError):
            slurm.retry_until_answered(ask)
        monkeypatch.undo()
        # otherwise the rest of the line would be written once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), closed.fileno())
    os.write(1, b"a report")
    assert capfd.readouterr().out == "a report"


def test_waiting_for_a_controller_ends_though_each_question_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = [0.0], []

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    def ask() -> None:
        asked.append(now[0])
        pass_time(60.0)
        raise LaunchError("squeue did not answer within 60 s")

    monkeypatch.setattr(slurm, "available", lambda: True)
    monkeypatch.setattr(slurm, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=pass_time))
    with pytest.raises(LaunchError, match="has not answered for an hour: squeue did not answer"):
        slurm.retry_until_answered(ask)
    assert len(asked) > 5
    assert now[0] == slurm.LONGEST_WAIT_S + 60.0, "the last question is asked at the end of the hour"


@pytest.mark.parametrize("given", ["", "there", "nowhere"])
def test_a_missing_controller_is_reported_with_the_configuration_that_was_used(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").touch()
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / given) if given else "")
    message = slurm.unreached(LaunchError("squeue failed: Unable to contact slurm controller"))
    assert message.startswith("squeue failed: Unable to contact slurm controller; SLURM_CONF is ")
    ends = {"": "not set", "there": f"{tmp_path}/there", "nowhere": f"{tmp_path}/nowhere, no readable file"}
    assert message.endswith(f"SLURM_CONF is {ends[given]}")
    missing = NotStartedError("squeue is not on PATH: is this a Slurm login node?")
    assert slurm.unreached(missing) == str(missing)


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (f"{FRAME}KeyError: 'x'\nsrun: error: n1: task 1: Killed", "KeyError: 'x'"),
        (f"n1: task 1: Killed\n{FRAME}E: Broken pipe\nsrun: Terminated", "n1: task 1: Killed"),
        (f"{FRAME}E: Broken pipe\nsrun: Terminated", "E: Broken pipe"),
        (f"{FRAME}tula_hpc.errors.InputError: /data: no images\nsrun: Terminated", "/data: no images"),
        ("bash: module: command not found\nsubmitit INFO (x) - Loading", "bash: module: command not found"),
        ("submitit INFO (x) - Loading", "submitit INFO (x) - Loading"),
        ("FATAL: no such image\nsrun: launch/slurm: _step_signal: Terminating StepId=1.0", "FATAL: no such image"),
        (f"{NCCL}remote process exited\nframe #0: c10\nn1: task 1: Aborted", f"{NCCL}remote process exited"),
        (
            f"{FRAME}submitit.core.utils.UncompletedJobError: Job not requeued because: timed-out too many times.",
            "reached its time limit too many times.",
        ),
        (
            "slurmstepd-n2: error: execve(): /me/venv/bin/python: No such file or directory\nsrun: error: n2: task 0: "
            "Exited with exit code 2",
            "/me/venv/bin/python, the job's Python, is not on its node: it was moved or deleted, or is not on a file "
            "system that all nodes see; run the same command from an environment that is",
        ),
        (
            CUT_OFF,
            "its log ends where the reason could not be written: the disk of the run directory, or a quota, was full; "
            "make space there or have the quota raised",
        ),
        (f"n1: task 0: Exited\n{TORCH_WARNS}", "n1: task 0: Exited"),
        (f"{TORCH_WARNS}\n[rank1]:{TORCH_WARNS}", "its log does not say why"),
        (" \n", "no log was written; the run directory has to be on a file system that all nodes see"),
    ],
)
def test_a_log_is_summarized_by_its_most_informative_line(log: str, line: str) -> None:
    assert informative_line(log) == line


def test_lines_that_submitit_writes_around_every_job_are_left_out() -> None:
    around = [
        "submitit INFO (2026-11-22 11:09:13,479) - Starting with JobEnvironment(job_id=7, hostname=n1)",
        "submitit INFO (2026-11-22 11:09:13,479) - Loading pickle: /run/7_submitted.pkl",
        "submitit ERROR (2026-11-22 11:09:15,980) - Submitted job triggered an exception",
    ]
    message = "submitit INFO (2026-11-22 11:09:15,980) - Job not requeued because: timed-out"
    log = "\n".join([*around[:2], f"{FRAME}KeyError: 'x'", message, around[2]])
    assert without_chatter(log) == f"{FRAME}KeyError: 'x'\n{message}"
    assert without_chatter("\n".join(around)) == ""
    assert informative_line("\n".join(around)) == "its log does not say why"
