"""Follow a script's training by its steps: write metrics.jsonl, count epochs, end at a stop.

Without `tula.epochs` an epoch is over when no further batch is left of the samples that the sweep
names, or that torch's loader gives out. If a loader does not show whether its last batch may be
shorter, an epoch is over with the last whole batch, and a shorter batch right after that still
counts to it. `training/ending.py` describes the course of a stop, with and without `keeping.py`.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from functools import partial
from types import FrameType
from typing import Any, Literal, NoReturn, cast
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from tula_hpc.attach.hooks.passes import Apart
from tula_hpc.attach.hooks.step_hooks import MOST_AWAITED
from tula_hpc.attach.hooks.step_times import StepTimes
from tula_hpc.attach.own_folder import Saved
from tula_hpc.attach.reporting import ChildSpec, Mode, ProcessMessage, leave, not_caught
from tula_hpc.attach.train.peers import ScriptPeers, device_of, stop_as_others, synchronize
from tula_hpc.attach.train.resume_point import ScriptProgress, TrainedSoFar, TrainSettings
from tula_hpc.attach.train.scores import SCORES, known_scores
from tula_hpc.attach.train.script_drift import ScriptDrift
from tula_hpc.attach.train.script_scaling import refuse_another, refuse_nan, scaling_of
from tula_hpc.batches import LoaderPass
from tula_hpc.ddp.agreement import CHECK_EVERY_S, GOES_ON, Agreement, Decision
from tula_hpc.ddp.stop_signals import StopRequest, Suspensions
from tula_hpc.env import unix_time
from tula_hpc.optim.observer import GradientObserver
from tula_hpc.records import RunDirectory
from tula_hpc.records.events import EventName
from tula_hpc.training.metrics_writer import MetricsWriter, StepWindow

# multiple of a pass's batch that no batch reaches; batches that are drawn anew vary by less
MUCH_MORE = 1.5


class ScriptTraining(Mode):
    """Counts the steps of a script and logs them, and ends it at a stop. Every worker has one."""

    def __init__(self, spec: ChildSpec) -> None:
        # a script may train many models in turn, and needs the memory of those that it has let go
        super().__init__(spec, others=WeakKeyDictionary())
        self.settings = TrainSettings.model_validate(spec.settings)
        self.stop = StopRequest()
        self.suspensions = Suspensions()
        self.run = RunDirectory(self.settings.root)
        self.files = self.run.train(self.settings.label)
        self.progress = ScriptProgress(**cast("dict[str, Any]", self.settings.progress))
        self.scaling = scaling_of(self.settings.sweep, self.settings.configuration)
        self.drift: ScriptDrift | None = None
        if (compared := self.settings.drift) is not None:
            self.drift = ScriptDrift(compared, self.run, self.settings.label, self.settings.job_id)
        # a keeper knows where epochs begin and end, and obeys the stop within them
        self.is_kept = False
        self.in_epoch = False
        # a forward pass has begun since the last step
        self.is_open = False
        own_file = self.files.metrics_file if spec.rank == 0 else None
        sizes = self.settings.samples, self.settings.global_batch, spec.world_size
        self.metrics = MetricsWriter(own_file, *sizes)
        self.window = StepWindow()
        self._times = StepTimes()
        self._apart = Apart()
        self._agreement: Agreement | None = None
        self._workers = spec.world_size
        self._whole = self.settings.global_batch
        self._log_steps = self.settings.log_interval_steps
        # most samples of a pass that may be one batch's, however it was loaded
        self._usual = MUCH_MORE * self.settings.forward_batch or math.inf
        # fewest samples that make an epoch's last step, as far as no loader shows it
        self._least = 1 if self.settings.counts_steps else self.settings.global_batch
        # samples of an epoch and that number, by the pass of a loader that was looked at last
        self._epoch = self.settings.samples, self._least
        self._epoch_by: LoaderPass | None = None
        # samples of this step on this worker, and those from before the loader began another pass
        self._samples = 0
        self._samples_before = 0
        self._backward_due = 0
        # samples of the last step, over all workers, that belong to the next epoch
        self._carried = 0
        # seconds of this epoch that belong to none of its steps
        self._paused_s = 0.0
        # an epoch's line is written, and the time until the next epoch is not known yet
        self._is_between = False
        # the last step that an epoch's line covers
        self._written = 0 if self.progress.offset else self.progress.step

    def begin(self) -> None:
        """See `Mode`. A script's own handlers take the place of ours, and obey as they like."""
        self.stop.install()
        self.suspensions.install()
        self._noted = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGUSR2, self._take_user_signal)
        super().begin()

    def place(self) -> Saved:
        """See `Mode`."""
        now = self.progress
        place = {"step": now.step, "samples_seen": now.samples_seen, "epoch": now.epoch}
        return Saved(at=unix_time(), offset=max(0, now.offset), **place)

    def _take_user_signal(self, number: int, frame: FrameType | None) -> None:
        """Stop as at TERM, which is the one that scripts have handlers for."""
        if signal.getsignal(signal.SIGTERM) == self._noted:
            self.stop.received = signal.Signals(number)
        else:
            signal.raise_signal(signal.SIGTERM)

    def ended(self, code: int) -> ProcessMessage:
        """See `Mode`."""
        if not self.is_kept:
            self.end_open_epoch()
        self.flush()
        if code == 0 and self._times.stepped_at is not None:
            self._count_pause(time.perf_counter() - self._times.stepped_at)
        return self.end_message("exited", code)

    def end_message(self, end: Literal["stopped", "exited"], code: int = 0) -> ProcessMessage:
        """Return the message with which this process ends."""
        facts = {**asdict(self.progress), "end": end, "code": code, "is_kept": self.is_kept}
        facts["further_steps"] = self.hooks.further_steps
        so_far = TrainedSoFar.model_validate(facts)
        return ProcessMessage(state="done", steps=self.steps, result=so_far.model_dump())

    def leave_stopped(self) -> NoReturn:
        """End this process, as all workers have agreed."""
        self.flush()
        self.say(self.end_message("stopped"))
        leave(0)

    def asked(self) -> Collection[int]:
        """See `Listener`."""
        return [self.settings.forward_batch]

    def loading_begins(self, loader: object) -> None:
        """See `Listener`."""
        is_of_steps = self.hooks.is_of_steps(loader)
        # some scripts evaluate without the wrapper, and only passes of the wrapper are watched
        self._apart.note_loader(is_of_steps=is_of_steps)
        # if a pause ends, the waits before it belong to no step
        self._times.pass_apart()
        if is_of_steps:
            self._samples_before = self._samples
            if not self.progress.epoch_steps:
                # the loader's pass did end with the last epoch: nothing is carried over
                self.progress.offset -= self._carried
                self._carried = 0

    def trains_anew(self, missed: int = 0) -> bool:
        """See `Listener`. Steps so far in a first epoch do not count, as in a search for a rate."""
        progress = self.progress
        is_whole = not self.is_kept and progress.epoch >= self.settings.epochs > 0
        if is_whole or self._is_further:
            return False
        if not (self.is_kept or progress.epoch) and progress.step == self.steps:
            self._forget_steps()
            self.steps = 0
        # these steps count, as their passes were seen
        progress.step += missed
        return True

    def evaluating(self) -> None:
        """See `Listener`."""
        self.give_sign()
        # the next step may be far away
        self.metrics.flush_if_due()
        self._apart.note_pass()
        self._times.pass_apart()

    def batch_loaded(self, loader: object, waited_s: float) -> None:
        """See `Listener`."""
        times = self._times
        times.loading_s = (times.loading_s or 0.0) + waited_s
        if time.perf_counter() > self.sign_due:
            self.give_sign()

    def forward_begins(self, samples: int) -> None:
        """See `Listener`."""
        self._samples += samples if samples <= self._usual else self._samples_of(samples)
        self._backward_due += 1
        if self.scaling is not None:
            self._scale(self.scaling.forward_begins, self.hooks.model)
        if self.is_open:
            return
        self.is_open = True
        is_pause = self._apart.is_noted and self._apart.is_pause(self.steps)
        if paused_s := self._times.begin(is_pause=is_pause):
            self._count_pause(paused_s)

    def _samples_of(self, samples: int) -> int:
        """Return the samples of a pass: without a loader they may be the nodes of a graph."""
        is_other = self.hooks.loader is None and samples > self._usual
        return self.settings.forward_batch if is_other else samples

    def pass_unused(self, samples: int) -> None:
        """See `Listener`."""
        self._samples -= self._samples_of(samples)
        self._samples_before = min(self._samples_before, self._samples)
        self._backward_due -= 1

    def gradients_ready(self) -> None:
        """See `Listener`."""
        optimizer, model = self.hooks.optimizer, self.hooks.inner_model
        if self.scaling is not None and optimizer is not None and model is not None:
            epochs_seen = self.progress.epoch + self._epoch_share
            self._scale(self.scaling.gradients_ready, optimizer, model, epochs_seen)

    @not_caught
    def _scale(self, handle: Callable[..., None], *args: Any) -> None:
        """Pass an event on; without scaling it needs no guard, which costs a call."""
        handle(*args)

    @not_caught
    def step_ends(self) -> None:
        """See `Listener`."""
        if self.scaling is not None:
            self.scaling.step_ends()
        if self._times.stepped_at is None:
            # a single worker's model is known from its first step on
            self._note_first_step()
        elif not self.is_open and self.steps:
            # the optimizer has stepped twice
            return
        self.count_step()
        self._count_progress()
        is_last = self.progress.epoch_ends(*self._epoch)
        is_logged = is_last or self.progress.step % self._log_steps == 0
        if is_logged:
            synchronize(self._device)
        self._count_time(time.perf_counter())
        self.is_open = False
        if is_logged:
            self.write_steps()
        if self.is_kept:
            return
        if is_last:
            self.end_epoch()
        agreement = self._agreement or self._meet()
        # no stop at an epoch's end: scripts save after it, and workers may count it a step apart
        asks = not is_last or self.settings.samples < 2 * self._whole
        if (decision := agreement.decide(self._read, asks=asks)) is not GOES_ON:
            self._obey(decision)

    def trains_further(self) -> None:
        """See `Listener`. A worker obeys a stop by itself here: no step that counts may follow."""
        is_other = self.stop.received is not None and self.hooks.further_steps >= MOST_AWAITED
        if is_other and not self.in_epoch:
            self.leave_stopped()

    def trains_apart(self, optimizer: Optimizer) -> bool:
        """See `Listener`. A script that was resumed after its epochs has no model that counts."""
        return self._is_further or super().trains_apart(optimizer)

    @property
    def _is_further(self) -> bool:
        """True outside the epochs of a script that is kept: what they did is in a checkpoint."""
        return self.is_kept and not self.in_epoch

    def partner_ready(self, optimizer: Optimizer) -> None:
        """See `Listener`."""
        if self.scaling is not None:
            self._scale(self.scaling.partner_ready, optimizer)

    def partner_stepped(self, optimizer: Optimizer) -> None:
        """See `Listener`."""
        if self.scaling is not None:
            self.scaling.partner_stepped()
        self._times.go_on()

    def _note_first_step(self) -> None:
        model = self.hooks.inner_model
        self._device = device_of(model)
        self._times.long_gaps.note_device(self._device)
        stop_as_others(self.stop, self.spec.world_size)
        # not at later steps, as a script may unfreeze layers for another optimizer
        if model is not None and (before := self.settings.parameters) is not None:
            refuse_another(model, before)
        # as in a profile the first step belongs to the start: it may compile the model
        now = unix_time()
        self.progress.starts_s += max(0.0, now - self.settings.job_began_at)
        self.progress.started_at = self.progress.started_at or now

    def _count_progress(self) -> None:
        progress = self.progress
        source = self.hooks.source
        is_same = source is not None and source.loader_pass is self._epoch_by is not None
        loader_pass = None if is_same else self.hooks.loader_pass()
        if loader_pass is not None and loader_pass is not self._epoch_by:
            sizes = self.settings.samples, self._least, self._workers
            is_begun = progress.offset > 0
            self._epoch = loader_pass.epoch(*sizes, self._epoch_by, is_begun=is_begun)
            self._epoch_by = loader_pass
            if loader_pass.given_out is None and not (self.is_kept or self.settings.counts_steps):
                progress.begin_pass(self._carried, self.settings.samples, self._whole)
        samples = self._samples * self._workers or self._whole
        backward = self.hooks.backward.count
        if backward < self._backward_due:
            # an evaluation with gradients looks like training, but has no backward passes
            samples = min(samples, self._whole)
        elif self.steps == self._workers == 1 and backward > self._backward_due:
            # a single worker, whose model was not known before its first step, of maybe few passes
            samples = min(self._whole, backward * self.settings.forward_batch or self._whole)
        self._backward_due = backward
        is_split = self._samples_before and not self.is_kept
        self._carried = (self._samples - self._samples_before) * self._workers if is_split else 0
        self._samples = self._samples_before = 0
        is_short = samples < self._epoch[1] and not self.is_kept
        if progress.epoch and is_short and progress.offset == progress.epoch_steps == 0:
            # the last, shorter batch of the epoch before
            progress.offset = -samples
        progress.count_step(samples)

    def _count_time(self, now: float) -> None:
        times = self._times
        is_timed = times.stepped_at is not None
        waited_s = times.end(now)
        if self._apart.is_noted:
            self._apart.step_ends()
        # a step with a suspension says nothing about the time of steps
        if self.is_open and not (self.suspensions.seen and self.suspensions.take()):
            step_s = now - times.began
            window = self.window
            window.steps += 1
            window.seconds += step_s
            window.waited_s += waited_s
            if not is_timed:
                self.progress.start_steps += 1
                return
            self.progress.epoch_steps += 1
            self.progress.epoch_time_s += step_s
            if self.drift is not None:
                self.drift.count(step_s, waited_s)

    def pause(self) -> None:
        """Leave the time up to the next forward pass out of the training's time."""
        self._times.pause()

    def be_kept(self, *, begins: bool) -> None:
        """Leave epochs to a keeper. Steps before a training, as in a search, do not count."""
        self.is_kept = True
        if begins and self.steps:
            self._forget_steps()

    def _forget_steps(self) -> None:
        progress = self.progress
        self._written = progress.epoch = progress.step = progress.samples_seen = 0
        progress.begin_epoch()
        progress.reported = {}
        self.window = StepWindow()
        self.pause()

    def leave_out(self, seconds: float) -> None:
        """Leave seconds of our own work, as on a checkpoint, out of the script's pause."""
        self._paused_s -= seconds

    def _count_pause(self, seconds: float) -> None:
        """Count the script's time outside its steps; after an epoch, add it to the epoch's line."""
        self._paused_s += seconds
        if self._written != self.progress.step:
            return
        if self._is_between:
            self.metrics.amend({"evaluation_time_s": max(0.0, self._paused_s)})
        self._paused_s = 0.0
        self._is_between = False

    def _meet(self) -> Agreement:
        """Make the agreement between the workers. Collective."""
        self._peers = ScriptPeers(self.spec.world_size, model=self.hooks.inner_model)
        self._read = partial(self.readings, self._peers)
        self._agreement = Agreement(self._peers, self.stop, every_s=self.look_every_s)
        return self._agreement

    def _obey(self, decision: Decision) -> None:
        if decision.stop:
            self.leave_stopped()
        self.look(decision.shared, self._peers)

    @property
    def look_every_s(self) -> float:
        """Seconds between two agreements of the workers."""
        return CHECK_EVERY_S if self.drift is None else self.drift.watch.look_every_s

    def readings(self, peers: ScriptPeers) -> tuple[float, ...]:
        """Return this worker's readings for the drift watch at an agreement; () without a watch."""
        return () if self.drift is None else self.drift.readings(peers)

    def look(self, shared: tuple[float, ...], peers: ScriptPeers) -> None:
        """Compare the workers' step times with the plan's. Collective."""
        model = self.hooks.inner_model
        if self.drift is None or model is None:
            return
        began = time.perf_counter()
        if self.drift.look(shared, peers, [p for p in model.parameters() if p.requires_grad]):
            self.leave_out(time.perf_counter() - began)
            self.pause()

    def write_steps(self) -> None:
        """Write a line for the steps since the last one, if there are any."""
        window, self.window = self.window, StepWindow()
        if window.steps:
            optimizer = self.hooks.optimizer
            # Adafactor has None where it chooses the rate itself
            lr = 0.0 if optimizer is None else float(optimizer.param_groups[0].get("lr") or 0.0)
            self.metrics.write_steps(self.progress, window, self._readings, lr=lr)

    def flush(self) -> None:
        """Write a line for the steps since the last one, and all lines that wait to be written."""
        self.write_steps()
        self.metrics.flush()

    @property
    def _readings(self) -> GradientObserver:
        return GradientObserver() if self.scaling is None else self.scaling.readings

    @property
    def _epoch_share(self) -> float:
        return self.progress.epoch_share(self.settings.samples, self.settings.global_batch)

    def end_steps_of_epoch(self) -> None:
        """Write the line of the epoch whose steps are over, unless it is there.

        Raises:
            DivergedError: Weights are nan.
        """
        self.write_steps()
        refuse_nan(self.hooks.optimizer, self.progress.step)
        if self.progress.offset > 0 and self._written != self.progress.step:
            self._write_epoch()
        self.pause()

    def end_epoch(self) -> None:
        """Count an epoch, add its scores to its line, and begin the next one."""
        self.end_steps_of_epoch()
        if self.progress.reported:
            self._write_epoch()
        self.progress.reported = {}
        self.progress.count_epoch()
        loader_pass = None if self.is_kept else self.hooks.loader_pass()
        if loader_pass is not None and loader_pass.given_out in (None, sys.maxsize):
            # samples beyond the epoch, in a pass without an end or if epochs end within a step
            self._carried = max(self._carried, self.progress.offset - self.settings.samples)
        self.progress.begin_epoch()
        self.progress.offset = self._carried

    def _write_epoch(self) -> None:
        self._written = self.progress.step
        self._is_between = True
        scores = dict.fromkeys(SCORES) | self.progress.reported
        self.metrics.write_epoch(self.progress, self.progress.epoch + 1, self._readings, scores)

    def add_to_last_epoch(self) -> None:
        """Add the reported scores to the line of the epoch that is over."""
        self.metrics.amend(self.progress.reported)
        self.progress.reported = {}

    def end_open_epoch(self) -> None:
        """Count the epoch that the script has left, if most of it was done."""
        if self._epoch_share > 0.5:
            self.end_epoch()

    def report(self, scores: Mapping[str, Any]) -> None:
        """Take scores of the epoch that the script is in; see `tula_hpc.attach.report`."""
        self.progress.reported |= known_scores(scores)
        if not self.is_kept and not self.is_open and self.progress.step == self._written > 0:
            # a script that evaluates after an epoch's last step
            self.add_to_last_epoch()

    def log_event(self, event: EventName, detail: str, data: dict[str, Any] | None = None) -> None:
        """Add an event of this training to the run's events."""
        job_id = self.settings.job_id
        self.run.log_event(event, "train", detail=detail, job_id=job_id, data=data or {})
