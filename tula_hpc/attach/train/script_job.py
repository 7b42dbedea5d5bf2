"""Run a script's training job: start, watch, stop and requeue its processes.

The job's workers stay outside: each starts the script's process of its rank and watches it. A stop
is passed on as the signal that it came by. If the script has no handler of its own, its process
ends after a step that all workers agree on.
"""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from tula_hpc.attach import processes
from tula_hpc.attach.hangs import HangWatch
from tula_hpc.attach.own_folder import own_folder
from tula_hpc.attach.processes import Child, Meeting, ProcessEnd, WorkerPeers
from tula_hpc.attach.reporting import ChildSpec, ProcessMessage
from tula_hpc.attach.script import counts_steps, forward_batch, script_of, values_of, variables_of
from tula_hpc.attach.train.resume_point import (
    Start,
    TrainedSoFar,
    TrainSettings,
    begin_where_the_script_does,
    without_repeated,
)
from tula_hpc.attach.train.scores import Scores, last_scores
from tula_hpc.attach.train.script_drift import drift_settings
from tula_hpc.checkpoint.interval import expected_interruptions
from tula_hpc.ddp.process_group import Allocation, place_among
from tula_hpc.ddp.stop_signals import StopRequest
from tula_hpc.env import job_started_at, join_job, unix_time
from tula_hpc.errors import StageError
from tula_hpc.failure_kinds import Failure
from tula_hpc.formatting import format_score, plural
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.own_sources import named_above, takes_rest
from tula_hpc.records import RunDirectory, TrainResult, read_metrics, write_atomically
from tula_hpc.records.events import EventName, StopReason
from tula_hpc.training.ending import leave, record_oom

# longest wait for the other workers, before the script's first step and after its last
PATIENCE = timedelta(minutes=10)
# seconds by which Slurm may send a signal too early
EARLY_S = 60.0


def run_training(job: TrainJob, stop: StopRequest) -> str:
    """Train a job's configuration; see `TrainJob`."""
    return ScriptJob(job, Allocation(job.cluster, join_job(), PATIENCE), stop).run()


class ScriptJob:
    """A script's training, as one worker of its job sees it."""

    def __init__(self, job: TrainJob, allocation: Allocation, stop: StopRequest) -> None:
        self.job, self.allocation, self.stop = job, allocation, stop
        self.env = allocation.env
        # this worker writes the result
        self.is_main = self.env.rank == 0
        self.run_directory = RunDirectory(job.root)
        self.files = self.run_directory.train(job.label)
        # kept over restarts; the script runs in `work`
        self.folder = self.files.root / "script"
        self.work = self.folder / "work"
        self.start_file = self.folder / "start.json"
        nodes, per_node, _ = job.configuration
        self.place = place_among(self.env, nodes, per_node) or self.env
        # set at the end
        self.progress: TrainedSoFar
        # the plan's step as JSON data, see `script_drift`; None: there is none to compare with
        self.compared_with: dict[str, Any] | None = None
        self._passed_on = False

    def run(self) -> str:
        """Start the script's processes, and see to their end."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        begins = json.loads(self.allocation.broadcast(self._prepare))
        meeting = Meeting(*begins["meeting"])
        start = Start(**begins["start"])
        self.compared_with = begins["drift"]
        peers = WorkerPeers(self.allocation.store, meeting.run_id)
        mine = self._judged(self._watch(start, meeting, peers), peers)
        peers.announce(mine)
        if mine.is_done and mine.message.result["end"] == "stopped":
            # all processes leave after the same step, but in a further training, or by handlers of
            # the script's own, each by itself, as soon as it has saved
            grace_s = self.job.cluster.signal_delay_s - processes.GRACE_S
            peers.end_others(self.place.rank, self.place.world_size, grace_s)
        self.allocation.broadcast(str)
        outcomes = peers.outcomes(self.place.world_size)
        end = processes.worst(outcomes)
        if not end.is_done:
            self._fail(end)
        # a process that a signal has killed does not report how far it came
        known = start.progress()
        ends = [TrainedSoFar.model_validate(known | each.message.result) for each in outcomes]
        restarts = max(start.restarts, ends[0].restarts)
        self.progress = ends[0].model_copy(update={"restarts": restarts})
        if any(each.end == "stopped" for each in ends):
            if self.is_main:
                start.starts_s = self.progress.starts_s
                write_atomically(self.start_file, json.dumps(asdict(start)))
            return self._leave()
        self._write_result(start)
        return "finished"

    def _prepare(self) -> str:
        """Decide how all workers begin; on rank 0."""
        begins: dict[str, Any] = {
            "meeting": processes.choose_meeting(self.env),
            "start": asdict(self._start()),
        }
        drift = drift_settings(self.job)
        begins["drift"] = None if drift is None else drift.model_dump(mode="json")
        return json.dumps(begins)

    def any(self, mine: bool) -> bool:
        """Return rank 0's answer on every worker. Collective."""
        return self.allocation.broadcast(lambda: str(mine)) == str(True)

    # begin

    def _start(self) -> Start:
        """Return the start, make the script's folder, and put on record that a job begins."""
        work = self.job.sweep.workload
        own_folder(self.work, Path.cwd(), named_above(work.entry_points, work.arguments))
        start = Start(started_at=unix_time())
        if self.start_file.exists():
            before = Start(**json.loads(self.start_file.read_text()))
            start = Start(
                restarts=before.restarts + 1, started_at=before.started_at, starts_s=before.starts_s
            )
            if not any(self.files.checkpoints.glob("*.tula")):
                how = begin_where_the_script_does(start, self.job, self.work)
                place = {
                    "step": start.step,
                    "samples_seen": start.samples_seen,
                    "epoch": start.epoch,
                    "began_at": job_started_at(),
                }
                self.log_event("resumed", how, place)
        write_atomically(self.start_file, json.dumps(asdict(start)))
        return start

    # watch

    def _watch(self, start: Start, meeting: Meeting, peers: WorkerPeers) -> ProcessEnd:
        job = self.job
        work = job.sweep.workload
        place = self.place
        hangs = HangWatch(peers, place.rank, place.world_size, 60.0 * work.hang_minutes)
        per_node = job.configuration.workers_per_node
        variables = variables_of(place, per_node, meeting, job.cluster.device)
        first_step_s = 60.0 * job.sweep.search.first_step_minutes
        metric = work.metric if self.is_main else None
        with (
            processes.open_log(self.folder, place.rank) as log,
            closing(Scores(metric, self.files, log)) as scores,
        ):
            is_read = metric is not None
            child = processes.start(self._spec(start), variables, self.work, log, is_read=is_read)
            scores.read(child.process)

            def look(child: Child) -> str | None:
                self._pass_on(child, peers)
                scores.look()
                message = child.message()
                silent_s = child.silent_s()
                # a script that was resumed may compile first, or take no further step
                is_early = message is None or (message.steps == 0 and silent_s < first_step_s)
                return hangs.look(None if is_early else silent_s)

            return processes.watch(child, peers, first_step_s, look)

    def _spec(self, start: Start) -> ChildSpec:
        script = script_of(self.job.sweep, self.job.configuration, self.work)
        arguments = (*script.arguments, *start.resuming)
        if start.resuming and takes_rest(self.job.sweep.workload.entry_points):
            arguments = (*start.resuming, *script.arguments)
        return ChildSpec(
            mode="train",
            program=script._replace(arguments=arguments),
            message_file=self.folder / f"rank-{self.place.rank}.said",
            rank=self.place.rank,
            world_size=self.place.world_size,
            device=self.job.cluster.device,
            counted_model=self.job.sweep.workload.counted_model,
            settings=self._settings(start),
        )

    def _settings(self, start: Start) -> dict[str, Any]:
        job = self.job
        options = job.sweep.training
        nodes = job.configuration.nodes
        prior = expected_interruptions(job.cluster.pricing, options, nodes, seen=0, over_s=0.0)
        more: dict[str, Any] = {}
        if job.measured is not None:
            more["parameters"] = job.measured.parameters
        if options.scales:
            more["sweep"] = job.sweep.model_dump(mode="json")
        settings = TrainSettings(
            root=job.root,
            label=job.label,
            job_id=self.env.job_id,
            samples=job.sweep.workload.samples or 1,
            global_batch=job.configuration.global_batch,
            epochs=job.sweep.workload.epochs,
            counts_steps=counts_steps(job.sweep),
            forward_batch=forward_batch(job.sweep, job.configuration),
            log_interval_steps=options.log_interval_steps,
            restart_count=job.run_number(self.env.restart_count),
            progress=start.progress(),
            job_began_at=job_started_at(),
            between_s=prior.prior_s,
            between_is_known=prior.is_known,
            fixed_s=options.checkpoint_s,
            configuration=job.configuration,
            drift=self.compared_with,
            **more,
        )
        return settings.model_dump(mode="json")

    def _pass_on(self, child: Child, peers: WorkerPeers) -> None:
        """Pass a stop on to the script, once; another worker's counts as well."""
        if self._passed_on:
            return
        number = self.stop.received
        if number is not None:
            peers.ask_to_stop()
        elif peers.are_asked_to_stop():
            number = signal.SIGTERM
        if number is not None:
            self._passed_on = True
            if child.message() is None:
                # before its first step it may not be prepared for other signals, and loses nothing
                number = signal.SIGTERM
            os.kill(child.process.pid, number)

    def _judged(self, mine: ProcessEnd, peers: WorkerPeers) -> ProcessEnd:
        """Return the outcome of this worker's script, judged as stopped, failed or done.

        A script that ends by itself counts as stopped if it was asked to stop. It has failed if its
        exit code is not 0, or if it has never taken a step.
        """
        message = mine.message
        result = message.result
        is_asked = self.stop.received is not None or peers.are_asked_to_stop()
        is_stopped = False
        how = ""
        if message.state != "done":
            # ended by the signal, or by what its own handler raised
            is_stopped = is_asked and not (message.failure and message.failure.is_oom)
        elif result.get("end") == "exited":
            is_whole = self._has_all(result["epoch"], result["step"]) and not result["code"]
            is_stopped = is_asked and not is_whole
            if code := result["code"]:
                how = f"ended with exit code {code} after {plural(message.steps, 'step')}"
            elif result["step"] == 0 and not result["restarts"]:
                how = (
                    "ended without an optimizer step; if it goes on from a file of an earlier "
                    "training by itself, take that file away, and run the same command again"
                )
        if is_stopped:
            # without a checkpoint of ours at this step
            unsaved = {**result, "end": "stopped", "is_kept": False}
            message = ProcessMessage(state="done", steps=message.steps, result=unsaved)
        elif how:
            detail = f"{self.job.sweep.workload.script_name} {how}"
            message = ProcessMessage(state="failed", failure=Failure.BAD_INPUT, detail=detail)
        return mine.model_copy(update={"message": message})

    def _has_all(self, epoch: int, step: int) -> bool:
        """Tell whether these are all epochs, or all steps if the script is given their number."""
        sweep = self.job.sweep
        steps = values_of(sweep, self.job.configuration, self.work)["steps"]
        return epoch >= sweep.workload.epochs or (counts_steps(sweep) and step >= int(steps))

    # end

    def _fail(self, end: ProcessEnd) -> NoReturn:
        record = partial(record_oom, self.job, self.env, held=end.message.held)
        at = self.job.configuration
        processes.end_as(end, at, self.place.rank, record, lambda: self.allocation.broadcast(str))

    def _leave(self) -> str:
        """Ask for a requeue, see `ending.leave`; fail if another job would get no further."""
        # a process that a signal has killed does not report it
        is_kept = self.progress.is_kept or any(self.files.checkpoints.glob("*.tula"))
        begins_anew = not (is_kept or self.job.sweep.workload.goes_on)
        if self.any(begins_anew and self._is_at_its_limit()):
            detail = (
                f"the time limit ended the script at step {self.progress.step:,}, and another job "
                "would begin anew"
            )
            if self.is_main:
                self.log_event("failed", detail, {"stop": StopReason.LIMIT_IN_VAIN})
            # as in `ending.leave`, no worker ends before that is on record
            self.any(False)
            raise StageError(detail)
        saved = "saved at step" if self.progress.is_kept else "the script ended at step"
        return leave(self, self.stop, saved)

    def _is_at_its_limit(self) -> bool:
        """Tell whether the stop is for the time limit, not a preemption with the same signal."""
        cluster = self.job.cluster
        warned_s = 60.0 * cluster.train_minutes - cluster.signal_delay_s - EARLY_S
        is_warned = self.stop.received is signal.SIGUSR2
        return is_warned and unix_time() - job_started_at() >= warned_s

    def log_event(self, event: EventName, detail: str, data: dict[str, Any] | None = None) -> None:
        """Add an event of this training to the run's events."""
        self.run_directory.log_event(
            event, "train", detail=detail, job_id=self.env.job_id, data=data or {}
        )

    def _write_result(self, start: Start) -> None:
        if not self.is_main:
            return
        job = self.job
        progress = self.progress
        epochs = job.sweep.workload.epochs
        scores = last_scores(self.files.metrics_file)
        rows = read_metrics(self.files.metrics_file).epochs
        progress = without_repeated(progress, start, epochs, rows)
        started_at = progress.started_at or start.started_at
        # where a script went on by itself is known only to within an epoch
        is_whole = self._has_all(progress.epoch + int(start.resumes), progress.step)
        result = TrainResult(
            label=job.label,
            **job.configuration._asdict(),
            global_batch=job.configuration.global_batch,
            method=job.sweep.training.method,
            epochs=epochs if is_whole else progress.epoch,
            steps=progress.step,
            samples_seen=progress.samples_seen,
            final_loss=scores.get("train_loss"),
            test_loss=scores.get("test_loss"),
            test_accuracy=scores.get("test_accuracy"),
            test_top5_accuracy=scores.get("test_top5_accuracy"),
            train_time_s=progress.train_time_s,
            wall_time_s=max(progress.train_time_s, unix_time() - started_at),
            restarts=max(progress.restarts, self.run_directory.history().restarts(job.label)),
            starts_s=progress.starts_s,
            saving_s=progress.saving_s,
            further_steps=progress.further_steps,
        )
        write_atomically(self.files.result_file, result.model_dump_json(indent=1))
        score = format_score(result.test_accuracy, result.test_loss)
        self.log_event("finished", score, {"began_at": job_started_at()})
