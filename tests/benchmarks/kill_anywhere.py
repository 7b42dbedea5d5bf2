"""Sweeps whose command or controller jobs are killed again and again at random moments: do they still end the same?

    python -m tests.benchmarks.kill_anywhere WORK OUT.json [KILLS]

WORK is a folder for run directories. Needs root and Slurm; starts the test cluster. Quick sweeps (eight configurations
as two arrays, whose tasks write made-up measurements; then a real, small training) are started, killed by SIGKILL at a
random moment, alone or with their child processes (sbatch), and started again until they finish; two at a time, KILLS
(25) times in total. Two more sweeps are detached: for each, one controller job is killed as a whole, and twice either
the process of a controller job is killed or the job is requeued.
Every sweep must give the same result as an undisturbed one: each configuration measured once, one job for each
submission, the same training. The moments are drawn from `SEED` and written to OUT.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from tests import planning_data
from tests.run_factory import measurement
from tests.slurm.testcluster import ClusterError, MiniCluster
from tula_hpc.launch.job_specs import ProfileJob
from tula_hpc.launch.launcher import NOTICE, REFUSED
from tula_hpc.records import RunDirectory, read_metrics
from tula_hpc.records.events import GUARD
from tula_hpc.stages import profile as profile_stage
from tula_hpc.sweep import main as sweep_command

ROOT = Path(__file__).resolve().parents[2]
SEED = 5
KILLS = 25
# then the sweep is left alone
KILLS_OF_A_SWEEP = 4
# for each detached sweep
CONTROLLER_KILLS = 3
# latest moments of a kill after the command's start, one of them drawn for each kill
LATEST_S = (2.5, 5.0, 25.0)
# or after a submission began: time for its folder, its pickles, sbatch, its events
SUBMISSION_S = 0.5
# about how long a controller job lives
CONTROLLER_S = 8.0
PATIENCE_S = 400.0
CONFIGURATIONS = 8
SWEEP = """
name = "{name}"
[workload]
model = "tula_hpc.workloads.small_cnns:compact_cnn"
dataset = "digits"
samples = 512
epochs = 2
lr = 0.05
loader_workers = 0
[search]
cluster_sizes = [1, 2]
min_batch = 32
max_batch = 256
mode = "full"
pack = "never"
estimate = false
[objective]
kind = "cost"
[training]
method = "lbt"
log_interval_steps = 1
"""
SETTINGS = ("exclusive=false", "memory_gb=2.0", "array_parallelism=4")
STARTER = "import sys; from tests.benchmarks.kill_anywhere import command; sys.exit(command(sys.argv[1:]))"


def records(job: ProfileJob) -> Callable[[], None]:
    """Return a task that records its configuration. As an inner function it is pickled by value: few imports."""
    (configuration,) = job.configurations
    made_up = measurement(configuration, memory=planning_data.memory(configuration.local_batch))
    line, output = made_up.model_dump_json() + "\n", job.output

    def task() -> None:
        if os.environ["SLURM_PROCID"] == "0":
            with output.open("a") as file:
                file.write(line)

    return task


def command(arguments: Sequence[str]) -> int:
    """Run `python -m tula_hpc.sweep` with such tasks, and return the exit code."""
    vars(profile_stage)["ProfileJob"] = lambda *of_job, **more: records(ProfileJob(*of_job, **more))
    return sweep_command(arguments)


class Case:
    """One sweep in its own run directory."""

    def __init__(self, folder: Path, cluster: MiniCluster) -> None:
        folder.mkdir(parents=True)
        self.name, self.cluster, self.folder = folder.name, cluster, folder
        self.run, self.log = RunDirectory(folder / "run"), folder / "log.txt"
        (folder / "sweep.toml").write_text(SWEEP.format(name=folder.name))
        self.kills: list[dict[str, Any]] = []

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        """Start the command in its own session, so that its children can be killed with it."""
        template = str(ROOT / "slurm_templates" / "testcluster.toml")
        words = [str(self.folder / "sweep.toml"), "--run-dir", str(self.run.root), "--cluster", template, *options]
        words += [word for setting in SETTINGS for word in ("--set", f"cluster.{setting}")]
        call, environment = [sys.executable, "-c", STARTER, *words], self.cluster.environment
        with self.log.open("ab") as log:
            return subprocess.Popen(call, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)

    def stands_at(self) -> str:
        """Describe the last progress on disk, for people."""
        if not self.run.sweep_file.exists():
            return "nothing is there"
        events = self.run.events()
        entered = {Path(str(event.data.get("folder"))).name for event in events if event.event == "submitted"}
        if {path.parent.name for path in self.run.slurm.glob(f"*/{NOTICE}")} - entered:
            return "in the midst of a submission"
        if self.run.report.exists():
            return "report begun"
        last = f"{events[-1].stage} {events[-1].event}" if events else "no event"
        return "planned" if self.run.plan_file.exists() and last.startswith("profile") else last

    def submissions(self) -> Counter[str]:
        """Count the submitted jobs by stage; each task of an array counts."""
        return Counter(event.stage for event in self.run.events() if event.event == "submitted")

    def faults(self, undisturbed: Case) -> list[str]:
        """Describe everything that differs from what has to be there."""
        rows = self.run.measurements().records
        measured = Counter(row.configuration for row in rows)
        submitted = self.submissions()
        return [
            *(f"{configuration} was measured {times} times" for configuration, times in measured.items() if times > 1),
            *([] if len(measured) == CONFIGURATIONS else [f"{len(measured)} configurations were measured"]),
            *(f"{row.configuration}: {row.status}" for row in rows if row.status != "ok"),
            *([] if (submitted["profile"], submitted["train"]) == (CONFIGURATIONS, 1) else [f"jobs: {submitted}"]),
            *([] if (self.run.report / "report.html").exists() else ["there is no report"]),
            *([] if self.run.train().read_result() is not None else ["there is no training result"]),
            *([] if self.training() == undisturbed.training() else ["the training differs from the undisturbed one"]),
            *self._wrong_names(),
        ]

    def _wrong_names(self) -> list[str]:
        """Describe submissions whose name is not exactly one job's or array's, or any job's if they were refused."""
        wrong = []
        for file, expected in ((NOTICE, 1), (REFUSED, 0)):
            for path in self.run.slurm.glob(f"*/{file}"):
                notice = json.loads(path.read_text())
                ids = self.cluster.run("sacct", "-XnPo", "JobID", "-S", "now-1days", "--name", notice["name"]).split()
                found = {job_id.partition("_")[0] for job_id in ids}
                # sacct does not show a guard that was cancelled before it could begin
                allowed = {expected, 0} if notice["tasks"][0].get("role") == GUARD else {expected}
                wrong += [] if len(found) in allowed else [f"{notice['name']}: jobs {sorted(found)}"]
        return wrong

    def training(self) -> tuple[object, ...]:
        """Return the result, and every step's samples, loss and learning rate."""
        result = self.run.train().read_result()
        steps = read_metrics(self.run.train().metrics_file).steps
        numbers = () if result is None else (result.nodes, result.local_batch, result.steps, result.final_loss)
        return (*numbers, *((step.samples_seen, step.loss, step.lr) for step in steps))


def foreground(case: Case, moments: random.Random, kills: int) -> None:
    """Start the command, kill it `kills` times, and let it end."""
    deadline = time.monotonic() + PATIENCE_S
    while len(case.kills) < kills:
        process = case.start()
        kill = _await_moment(case, process, moments)
        if process.poll() is not None:
            break
        group = moments.random() < 0.5
        kill |= {"with_children": group, "at": case.stands_at()}
        os.killpg(process.pid, signal.SIGKILL) if group else process.kill()
        process.wait()
        case.kills.append(kill)
    else:
        process = case.start()
    code = process.wait(deadline - time.monotonic())
    assert code == 0, f"{case.name} ended with {code}:\n{case.log.read_text()}"


def _await_moment(case: Case, process: subprocess.Popen[bytes], moments: random.Random) -> dict[str, Any]:
    """Wait for a random moment after the start or the beginning of a submission, or for the command's end."""
    after_s, near_s = moments.uniform(0.0, moments.choice(LATEST_S)), moments.uniform(0.0, SUBMISSION_S)
    since = moments.choice(("start", "submission"))
    if since == "submission":
        before, give_up, after_s = set(case.run.slurm.glob("*")), time.monotonic() + max(LATEST_S), near_s
        while process.poll() is None and time.monotonic() < give_up and set(case.run.slurm.glob("*")) == before:
            time.sleep(0.005)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(after_s)
    return {"after_s": round(after_s, 2), "since": since}


def detached(case: Case, moments: random.Random) -> None:
    """Detach, and kill or requeue controller jobs at random moments of their lives."""
    code, deadline = case.start("--detach").wait(), time.monotonic() + PATIENCE_S
    assert code == 0, case.log.read_text()
    struck: Counter[str] = Counter()
    hows = ["whole job", *(moments.choice(("SIGKILL", "SIGKILL", "requeue")) for _ in range(CONTROLLER_KILLS - 1))]
    while not (case.run.report / "report.html").exists():
        assert time.monotonic() < deadline, f"{case.name} does not end: {case.stands_at()}"
        running = case.cluster.run("squeue", "-h", "-t", "running", "-o", "%i %j").splitlines()
        mine = [line.split()[0] for line in running if f"tula-{case.name}-control" in line]
        new = [job_id for job_id in mine if struck[job_id] < 2]
        if new and len(case.kills) < CONTROLLER_KILLS:
            struck[new[0]] += 1
            _strike(case, new[0], hows[len(case.kills)], moments)
        time.sleep(0.3)


def _strike(case: Case, job_id: str, how: str, moments: random.Random) -> None:
    after_s = moments.uniform(0.5, CONTROLLER_S)
    time.sleep(after_s)
    stands_at = case.stands_at()
    try:
        if how == "whole job":
            case.cluster.run("scancel", "--signal=KILL", "--full", job_id)
        elif how == "requeue":
            case.cluster.run("scontrol", "requeue", job_id)
        else:
            case.cluster.kill_task(job_id, 0)
    except (ClusterError, KeyError, ProcessLookupError):  # the job had ended by then
        return
    case.kills.append({"after_s": round(after_s, 2), "how": how, "at": stands_at})


def run(work: Path, cluster: MiniCluster, kills: int) -> dict[str, Any]:
    """Run all sweeps, and return what was done and what was seen."""
    began = time.time()
    undisturbed = Case(work / "undisturbed", cluster)
    foreground(undisturbed, random.Random(SEED), 0)
    alone_s = time.time() - began
    cases = [undisturbed]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda task: task(), _tasks(work, cluster, kills, cases)))
    # controllers that were requeued after the sweep's end find nothing to do, and end
    cluster.wait_for(lambda: not cluster.run("squeue", "-h", "-o", "%i").split(), 120, "the end of all jobs")
    every_kill = [kill for case in cases for kill in case.kills]
    faults = {case.name: case.faults(undisturbed) for case in cases}
    return {
        "seed": SEED,
        "sweeps": len(cases),
        "commands_killed": sum("how" not in kill for kill in every_kill),
        "controllers_killed": sum("how" in kill for kill in every_kill),
        "faults": {name: words for name, words in faults.items() if words},
        "killed_at": dict(Counter(kill["at"] for kill in every_kill).most_common()),
        "jobs": {case.name: dict(case.submissions()) for case in cases},
        "undisturbed_s": round(alone_s, 1),
        "all_s": round(time.time() - began, 1),
        "kills": {case.name: case.kills for case in cases},
    }


def _tasks(work: Path, cluster: MiniCluster, kills: int, cases: list[Case]) -> Iterator[Callable[[], None]]:
    """Yield both kinds of sweeps; each has its own random numbers, so that its moments do not depend on the others."""
    for number, done in enumerate(range(0, kills, KILLS_OF_A_SWEEP)):
        cases.append(Case(work / f"killed-{number}", cluster))
        own = min(KILLS_OF_A_SWEEP, kills - done)
        yield partial(foreground, cases[-1], random.Random(SEED + number), own)
    for number in range(2):
        cases.append(Case(work / f"detached-{number}", cluster))
        yield partial(detached, cases[-1], random.Random(-SEED - number))


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and return the exit code."""
    if len(arguments) not in (2, 3):
        sys.stderr.write(f"{__doc__}\n")
        return 2
    with MiniCluster(cpu_percent=200) as cluster:
        result = run(Path(arguments[0]).resolve(), cluster, int(arguments[2]) if len(arguments) == 3 else KILLS)
    Path(arguments[1]).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
