"""Profile job of a script: each configuration in fresh processes, inside the job's allocation.

The job's workers stay outside: each starts the script's process of its rank and watches it, and all
of them learn how every process ended before any acts on it. The records are those of a profile of
the built-in training.

`script_profile.py` describes the whole course, from the job to the measured steps;
`profiling/profile_loop.py` describes the case that memory runs out.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from tula_hpc.attach import processes
from tula_hpc.attach.own_folder import own_folder
from tula_hpc.attach.processes import Meeting, ProcessEnd, WorkerPeers
from tula_hpc.attach.reporting import ChildSpec
from tula_hpc.attach.script import counts_steps, forward_batch, script_of, variables_of
from tula_hpc.attach.script_profile import Settings
from tula_hpc.config import ClusterSpec, SearchSpec, SweepSpec
from tula_hpc.ddp.process_group import Allocation, place_among
from tula_hpc.env import WorkerEnvironment, job_started_at, unix_time
from tula_hpc.errors import StorageError
from tula_hpc.failure_kinds import Failure
from tula_hpc.files import HeldFolder
from tula_hpc.launch.job_specs import ProfileJob, in_passes
from tula_hpc.own_sources import digests_of, named_above
from tula_hpc.profiling.record import broken_devices, describe, record_oom, refuse_shared_device
from tula_hpc.profiling.work_queue import WorkQueue
from tula_hpc.records import (
    Configuration,
    Identity,
    Measurement,
    append_record,
    is_usable,
    recorded_in,
)

# longest time until the first step, and between two steps, outside of any job
PATIENCE_S = 600.0


def measure_here(spec: ChildSpec, search: SearchSpec, folder: Path) -> ProcessEnd:
    """Measure a script here, as a single worker outside of any job; return how its process ended.

    It runs in a folder of its own in `folder`. The settings of `spec` are made here.
    """
    place = WorkerEnvironment(0, 1, 0, 0, "", 0, (os.uname().nodename,), on_slurm=False)
    settings = Settings(
        search=search,
        cluster=ClusterSpec(device=spec.device),
        configuration=Configuration(1, 1, 1),
        place=place,
    )
    spec = spec.model_copy(update={"settings": settings.model_dump(mode="json")})
    meeting = processes.choose_meeting(place)
    program = spec.program
    above = named_above([str(program.path or program.module)], program.arguments)
    work = own_folder(folder / "work", Path.cwd(), above)
    with processes.open_log(folder, 0) as log:
        variables = variables_of(place, 1, meeting, spec.device)
        child = processes.start(spec, variables, work, log)
        return processes.watch(child, WorkerPeers(None, meeting.run_id), PATIENCE_S)


def run_profile(job: ProfileJob, env: WorkerEnvironment, queue: WorkQueue) -> int:
    """Measure a job's configurations; see `ProfileJob`."""
    allocation = Allocation(job.cluster, env, timedelta(minutes=job.cluster.profile_minutes))
    return Session(job, allocation, queue).run()


class Session:
    """Profiles of a script in one allocation, as one of its workers sees them."""

    def __init__(self, job: ProfileJob, allocation: Allocation, queue: WorkQueue) -> None:
        self.job = job
        self.allocation = allocation
        self.queue = queue
        self.env = allocation.env
        # configuration that is measured now
        self.configuration: Configuration
        # this worker's place among those that measure it; None: it is none of them
        self.place: WorkerEnvironment | None = None
        # the job's sweep, with this configuration's number of forward passes
        self.sweep = job.sweep
        # limits of this measurement
        self.search = job.sweep.search
        # seconds of runs of the script that ended early
        self.again_s = 0.0
        self.folder = HeldFolder(job.output.parent)
        # seconds of the bare all-reduce, by number of workers
        self.allreduce_s: dict[int, float] = {}
        self.sources = digests_of(job.sweep.workload.entry_points)
        self.measured = 0

    def run(self) -> int:
        """Measure until nothing is left to be measured; return how many this worker measured."""
        while (configuration := self._next()) is not None:
            self.configuration = configuration
            self._measure()
        self.allocation.close()
        return self.measured

    def _next(self) -> Configuration | None:
        """Return the next configuration of rank 0's queue, None at its end. Collective."""
        text = self.allocation.broadcast(lambda: json.dumps([self.queue.next(), self.queue.passes]))
        fields, passes = json.loads(text)
        self.sweep = in_passes(self.job.sweep, passes or 1)
        return None if fields is None else Configuration(*fields)

    def _measure(self) -> None:
        """Measure a configuration on the first nodes; all workers learn how that went. Collective.

        A script that ends early is run once more, with a measurement short enough for its steps.
        """
        self.search = self.job.sweep.search
        outcomes, meeting = self._run()
        began_at = meeting.began_at
        if shorter := processes.worst(outcomes).message.result.get("search"):
            self.again_s += unix_time() - began_at
            self.search = SearchSpec.model_validate(shorter)
            outcomes, meeting = self._run()
        end = processes.worst(outcomes)
        if end.message.is_short and self._is_left_out(end):
            self.again_s += unix_time() - meeting.began_at
            return
        if not end.is_done:
            self._fail(end)
        self.measured += self.place is not None
        self._record(outcomes[0].message.result, meeting._replace(began_at=began_at))

    def _run(self) -> tuple[list[ProcessEnd], Meeting]:
        """Run the script's processes to their end; return how each ended. Collective."""
        meeting = Meeting(*json.loads(self.allocation.broadcast(self._prepare)))
        peers = WorkerPeers(self.allocation.store, meeting.run_id)
        nodes, per_node, _ = self.configuration
        self.place = place_among(self.env, nodes, per_node)
        if self.place is not None:
            peers.announce(self._watch(self.place, meeting, peers))
        # when this broadcast ends, all workers have announced their outcomes
        self.allocation.broadcast(str)
        outcomes = peers.outcomes(self.configuration.world_size)
        if loss := self.folder.loss("measured"):
            raise StorageError(loss)
        return outcomes, meeting

    def _prepare(self) -> str:
        """Make the folder of a start, and return the `Meeting` of its processes; on rank 0."""
        meeting = processes.choose_meeting(self.env)
        work = self.job.sweep.workload
        above = named_above(work.entry_points, work.arguments)
        own_folder(self._folder(meeting) / "work", Path.cwd(), above)
        return json.dumps(meeting)

    def _watch(self, place: WorkerEnvironment, meeting: Meeting, peers: WorkerPeers) -> ProcessEnd:
        work = self.sweep.workload
        folder = self._folder(meeting)
        own = folder / "work"
        spec = ChildSpec(
            mode="profile",
            program=script_of(self._long_enough(), self.configuration, own),
            message_file=folder / f"rank-{place.rank}.said",
            rank=place.rank,
            world_size=place.world_size,
            device=self.job.cluster.device,
            counted_model=work.counted_model,
            settings=self._settings(place),
        )
        per_node = self.configuration.workers_per_node
        variables = variables_of(place, per_node, meeting, self.job.cluster.device)
        with processes.open_log(folder, place.rank) as log:
            child = processes.start(spec, variables, own, log)
            return processes.watch(child, peers, 60.0 * self.job.sweep.search.first_step_minutes)

    def _folder(self, meeting: Meeting) -> Path:
        nodes, _, batch = self.configuration
        name = f"n{nodes}-b{batch}-{meeting.run_id[:6]}"
        return self.job.output.with_suffix("") / name

    def _long_enough(self) -> SweepSpec:
        """Return the sweep with enough epochs for all measured steps, even of a small data set."""
        sweep = self.sweep
        search, work = sweep.search, sweep.workload
        # steps for the warm-up, whole steps, computation, and for parts that are timed briefly
        steps = search.warmup_steps + 3 * search.max_steps + 200
        epochs = math.ceil(steps * self.configuration.global_batch / (work.samples or 1)) + 1
        longer = work.model_copy(update={"epochs": max(work.epochs, epochs)})
        return sweep.model_copy(update={"workload": longer})

    def _settings(self, place: WorkerEnvironment) -> dict[str, Any]:
        job = self.job
        # leave out values that may be passwords
        cluster = job.cluster.model_copy(update={"environment": {}, "setup": ()})
        work = job.sweep.workload
        settings = Settings(
            search=self.search,
            cluster=cluster,
            configuration=self.configuration,
            place=place,
            forward_batch=forward_batch(self.sweep, self.configuration),
            accumulation=self.sweep.workload.accumulation,
            samples=work.samples or 0,
            counts_epochs=any("{epochs}" in text for text in work.arguments),
            counts_steps=counts_steps(job.sweep),
            training_steps=work.epochs * (work.samples or 0) / self.configuration.global_batch,
            training=job.sweep.training,
            sources=self.sources,
            allreduce_s=self.allreduce_s,
            job_began_at=job_started_at() + self.again_s if self.measured == 0 else None,
        )
        return settings.model_dump(mode="json")

    def _record(self, result: dict[str, Any], meeting: Meeting) -> None:
        measurement = Measurement.model_validate(result["measurement"])
        world = self.configuration.world_size
        # 0: a single worker has none, or memory did not suffice for it
        if measurement.times is not None and measurement.times.allreduce_time_s > 0:
            self.allreduce_s[world] = measurement.times.allreduce_time_s
        if self.env.rank != 0:
            return
        elapsed_s = unix_time() - meeting.began_at
        of_job: dict[str, Any] = {
            "partition": self.job.partition,
            "accumulation": self._passes_asked,
            "elapsed_s": elapsed_s,
            "node_seconds": self.job.nodes * elapsed_s,
        }
        if counts_steps(self.sweep):
            # the script takes as many steps as it is told to, and leftover samples of an epoch add
            # up to further batches
            of_job |= {"short_batch": True, "batch_share": 1.0}
        append_record(self.job.output, measurement.model_copy(update=of_job))
        if others := ", ".join(result["others"]):
            sys.stderr.write(
                f"steps of {result['optimizer']} on {result['model']} are counted, those of "
                f"{others} are not (workload.counted_model chooses another model)\n"
            )
        # links in it are not followed; the script's messages and output stay
        shutil.rmtree(self._folder(meeting) / "work", ignore_errors=True)

    @property
    def _passes_asked(self) -> int | None:
        work = self.sweep.workload
        return work.accumulation if work.accumulates else None

    def _is_left_out(self, end: ProcessEnd) -> bool:
        """Record that a batch leaves too few steps, if a smaller one was measured. Collective."""

        def record() -> str:
            known = filter(is_usable, recorded_in(self.job.output.parent))
            batch = self.configuration.global_batch
            if not any(each.configuration.global_batch < batch for each in known):
                return ""
            failed = Measurement(
                status="failed",
                detail=f"the script takes too few steps of this batch; {end.message.remedy}",
                steps=end.message.steps,
                partition=self.job.partition,
                accumulation=self._passes_asked,
                identity=Identity.model_validate(end.message.result["identity"]),
                finished_at=unix_time(),
                **describe(self.configuration, self.job.cluster, self.env),
            )
            append_record(self.job.output, failed)
            return "left out"

        return bool(self.allocation.broadcast(record))

    def _fail(self, end: ProcessEnd) -> None:
        job = self.job
        at = self.configuration

        def record(failure: Failure) -> None:
            refuse_shared_device(end.message.held, at, broken_devices(job, at))
            record_oom(
                job.output,
                job.cluster,
                at,
                self.env,
                failure,
                partition=job.partition,
                accumulation=self._passes_asked,
            )

        rank = None if self.place is None else self.place.rank
        processes.end_as(end, at, rank, record, lambda: self.allocation.broadcast(str))
