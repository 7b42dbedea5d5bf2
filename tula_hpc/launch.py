"""Jobs through submitit: submit, wait, and say how each ended. On Slurm as arrays, on one machine one after another."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tula_hpc import slurm
from tula_hpc.config import ClusterSpec
from tula_hpc.errors import Failure, LaunchError
from tula_hpc.records import RunDirectory

POLL_S = 2.0
GONE_POLLS = 3  # a requeued job is missing from squeue for a moment: believe its end only when seen so often
LOG_TAIL_LINES = 15
MAX_LOG_BYTES = 200_000


class Submitted(NamedTuple):
    """A job on its way: its id and where its logs are."""

    job_id: str
    folder: Path

    def log_files(self) -> list[Path]:
        """Standard error, then standard output, of every task so far."""
        return [*sorted(self.folder.glob(f"{self.job_id}_*.err")), *sorted(self.folder.glob(f"{self.job_id}_*.out"))]


class Ended(NamedTuple):
    """How a job ended as far as the scheduler tells; whether it did its work is told by the records it left."""

    job: Submitted
    failure: Failure  # meaningful only where the records are missing
    log_tail: str
    log_file: Path | None


class Launcher:
    """Submits callables as jobs of one cluster and waits for them.

    Args:
        cluster: Where and how.
        run: The run directory; logs and pickles go to its slurm/ folder.
        name: Base of the job names, unique to the sweep.
    """

    def __init__(self, cluster: ClusterSpec, run: RunDirectory, name: str) -> None:
        self.cluster, self.run, self.name = cluster, run, name

    def submit(
        self,
        jobs: Sequence[Callable[[], Any]],
        *,
        stage: str,
        nodes: int,
        minutes: int,
        labels: Sequence[str] = (),
    ) -> list[Submitted]:
        """Submit as one array (a plain job if there is one); every submission has a folder of its own.

        A scheduler that counts its job ids from 1 again thus cannot make an old result look new. The events say which
        job has which of the labels, if there are any.

        Raises:
            LaunchError: The scheduler refused.
        """
        folder = self.run.slurm / f"{stage}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
        folder.mkdir(mode=0o700)
        executor = self._executor(folder)
        executor.update_parameters(**self.parameters(stage=stage, nodes=nodes, minutes=minutes))
        submitted = [Submitted(str(job.job_id), folder) for job in _submit(executor, jobs)]
        for i, job in enumerate(submitted):
            data = {"folder": str(folder.relative_to(self.run.root)), "nodes": nodes}
            data |= {"label": labels[i]} if labels else {}
            self.run.log_event("submitted", stage, job_id=job.job_id, data=data)
        return submitted

    def wait(self, jobs: Sequence[Submitted], tick: Callable[[str], None] = lambda _: None) -> list[Ended]:
        """Wait until all are over; `tick` hears now and then what they are doing."""
        ended: dict[str, Ended] = {}
        while left := [job for job in jobs if job.job_id not in ended]:
            ended |= {end.job.job_id: end for end in self.wait_for_some(left, tick)}
        return [ended[job.job_id] for job in jobs]

    def wait_for_some(self, jobs: Sequence[Submitted], tick: Callable[[str], None] = lambda _: None) -> list[Ended]:
        """Wait until any of these is over; returns those that are."""
        missing = dict.fromkeys((job.job_id for job in jobs), 0)
        while True:
            active = self.active([job.job_id for job in jobs])
            for job_id in missing:
                missing[job_id] = 0 if job_id in active else missing[job_id] + 1
            if any(count >= self._gone_polls for count in missing.values()):
                return [self._ended(job) for job in jobs if missing[job.job_id] >= self._gone_polls]
            tick(_describe(active))
            time.sleep(POLL_S if self.cluster.executor == "slurm" else 0.2)

    @property
    def _gone_polls(self) -> int:
        return GONE_POLLS if self.cluster.executor == "slurm" else 1

    def active(self, job_ids: Sequence[str]) -> dict[str, slurm.JobState]:
        """Those of the jobs that are not over. A controller that does not answer for a while is waited out."""
        if self.cluster.executor == "local":
            return {job_id: slurm.JobState("RUNNING", "") for job_id in job_ids if _local_alive(job_id)}
        words = ""
        for pause_s in (2, 5, 10, 30, 60, 120, 300):
            try:
                return {job_id: state for job_id, state in slurm.queue(job_ids).items() if not state.is_over}
            except LaunchError as error:
                if not slurm.available():
                    raise
                words = str(error)
                time.sleep(pause_s)
        raise LaunchError(f"the Slurm controller has not answered for 9 minutes: {words}")

    def cancel_command(self, jobs: Sequence[Submitted]) -> str:
        """What a user types to cancel these jobs. Locally KILL: on TERM a training saves and is started again."""
        if self.cluster.executor == "slurm":
            return "scancel " + " ".join(job.job_id for job in jobs)
        return "; ".join(f"pkill -KILL -f {shlex.quote(str(job.folder))}" for job in jobs)

    def _ended(self, job: Submitted) -> Ended:
        log_file, tail = _log_tail(job)
        rows = slurm.steps(job.job_id) if self.cluster.executor == "slurm" else []
        return Ended(job, slurm.classify(rows, tail), tail, log_file)

    def _executor(self, folder: Path) -> Any:
        import submitit

        if self.cluster.executor == "slurm" and not slurm.available():
            raise LaunchError("sbatch is not on PATH: run this on a Slurm login node, or with a local cluster file")
        return submitit.AutoExecutor(folder=folder, cluster=self.cluster.executor)

    def parameters(self, *, stage: str, nodes: int, minutes: int) -> dict[str, Any]:
        """Parameters of the submitit executor for one submission."""
        if self.cluster.executor == "local":
            return self._local_parameters(nodes, minutes)
        return self._slurm_parameters(stage, nodes, minutes)

    def _local_parameters(self, nodes: int, minutes: int) -> dict[str, Any]:
        workers = nodes * self.cluster.workers_per_node  # the nodes are emulated: one machine runs all workers
        return {
            "nodes": 1,
            "tasks_per_node": workers,
            "gpus_per_node": workers if self.cluster.device == "cuda" else 0,
            "timeout_min": minutes,
            # EXIT: keeps bash, where it is /bin/sh, from becoming its last command: submitit counts on a parent shell.
            # INT: a terminal sends Ctrl-C to the jobs too, which are in the same process group; they are to go on
            "local_setup": [*self.setup_lines(), "trap : EXIT", "trap '' INT"],
        }

    def _slurm_parameters(self, stage: str, nodes: int, minutes: int) -> dict[str, Any]:
        cluster = self.cluster
        optional = {key: getattr(cluster, key) for key in ("partition", "account", "qos", "gres", "constraint")}
        return {
            "name": f"{self.name}-{stage}",
            "nodes": nodes,
            "tasks_per_node": cluster.workers_per_node,
            "cpus_per_task": cluster.cpus_per_worker,
            "timeout_min": minutes,
            **({"mem_gb": cluster.memory_gb} if cluster.memory_gb else {}),
            **{f"slurm_{key}": value for key, value in optional.items() if value is not None},
            **({"slurm_exclusive": True} if cluster.exclusive else {}),
            "slurm_array_parallelism": cluster.array_parallelism,
            "slurm_signal_delay_s": cluster.signal_delay_s,
            # since Slurm 22.05 srun does not inherit --cpus-per-task from sbatch
            "slurm_srun_args": [f"--cpus-per-task={cluster.cpus_per_worker}", *cluster.srun_args],
            "slurm_setup": self.setup_lines(),
            "slurm_additional_parameters": _without_false({"requeue": True, **cluster.sbatch}),
        }

    def setup_lines(self) -> list[str]:
        """Shell lines before the task: the template's own, then its environment."""
        threads = {"OMP_NUM_THREADS": str(self.cluster.cpus_per_worker)}
        exports = {**threads, **self.cluster.environment}
        return [*self.cluster.setup, *(f"export {key}={shlex.quote(value)}" for key, value in exports.items())]

    def script(self, *, stage: str, nodes: int, minutes: int, tasks: int) -> str:
        """The sbatch script that `submit` would hand in; for --dry-run, without Slurm."""
        from submitit.slurm import slurm as submitit_slurm

        plain = {"name": "job_name", "timeout_min": "time", "tasks_per_node": "ntasks_per_node"}
        parameters: dict[str, Any] = {}
        for key, value in self.parameters(stage=stage, nodes=nodes, minutes=minutes).items():
            parameters[plain.get(key, key.removeprefix("slurm_"))] = value
        if "mem_gb" in parameters:
            parameters["mem"] = submitit_slurm._convert_mem(parameters.pop("mem_gb"))
        folder = self.run.slurm / f"{stage}-…"
        command = f"python -u -m submitit.core._submit {shlex.quote(str(folder))}"
        parameters["map_count"] = tasks if tasks > 1 else None
        return str(submitit_slurm._make_sbatch_string(command=command, folder=folder, **parameters))


def _without_false(options: Mapping[str, str | int | bool]) -> dict[str, str | int | bool]:
    """Switches that are off are left out: submitit would write `--requeue=False`, which sbatch refuses."""
    return {name: value for name, value in options.items() if value is not False}


def _submit(executor: Any, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    try:
        with executor.batch():
            submitted = [executor.submit(job) for job in jobs]
    except (FailedJobError, FailedSubmissionError) as error:
        words = str(error).strip().splitlines()
        raise LaunchError(f"the scheduler refused the job: {words[-1] if words else error!r}") from None
    return submitted


def _describe(active: Mapping[str, slurm.JobState]) -> str:
    """For example `3 RUNNING, 1 PENDING (Priority)`."""
    words: dict[str, int] = {}
    for state in active.values():
        reason = f" ({state.reason})" if state.state == "PENDING" and state.reason not in ("", "None") else ""
        words[state.state.lower() + reason] = words.get(state.state.lower() + reason, 0) + 1
    return ", ".join(f"{count} {word}" for word, count in words.items()) or "ending"


def _local_alive(job_id: str) -> bool:
    """Whether submitit's local controller lives; a child of ours that ended is reaped on the way."""
    with contextlib.suppress(ChildProcessError):  # started by an earlier run of the same command
        os.waitpid(int(job_id), os.WNOHANG)
    try:
        command = Path(f"/proc/{job_id}/cmdline").read_bytes()
    except OSError:
        return False
    return b"submitit" in command


def _log_tail(job: Submitted) -> tuple[Path | None, str]:
    """The log that tells most, and the ends of all: a traceback beats a slurmstepd message beats silence."""
    best: Path | None = None
    tails: list[str] = []
    for path in job.log_files():
        text = _last_bytes(path)
        if best is None or ("Traceback" in text and "Connection closed by peer" not in text):
            best = path
        tails.append("\n".join(text.splitlines()[-LOG_TAIL_LINES:]))
    return best, "\n".join(tail for tail in tails if tail)


def _last_bytes(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MAX_LOG_BYTES))
        return file.read().decode(errors="replace")
