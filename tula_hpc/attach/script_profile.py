"""Profile of a script, taken in its own process at the ends of its own steps.

How a user's script is profiled, from the job on:

1. `script_profile_job.py`: each worker of the job starts the script's process of its rank for a
   configuration, watches it (`processes.py`), and rank 0 records its result.
2. `child.py` is that process: it puts the hooks in place and runs the script as the main program.
3. `hooks/step_hooks.py` notices torch's optimizer steps, backward passes and batches, whatever
   framework takes them, and finds the model that counts.
4. `measured_steps.py` prepares the script's steps for timing: learning rates are 0, and times that
   belong to no step are left out.
5. This module chooses the next measurement between two steps, and makes the record.
6. `script_course.py` times the steps and their parts, by the rounds and statistics of
   `profiling/measured_rounds.py`, the same for the built-in training; `reporting.py` carries the
   result to the worker.

The work between the script's steps is one generator, `ScriptProfile._steps`, which reads like a
profile of the built-in training: each `yield` in it waits for the end of the script's next step.
When all is measured the process ends at once, whatever the script would do next.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Collection, Iterator
from typing import Any

import torch
from pydantic import Field
from torch.nn.parallel import DistributedDataParallel

from tula_hpc.attach import script, was_kept, watch_epochs
from tula_hpc.attach.hooks.find_model import methods_of, model_of, why_unheld
from tula_hpc.attach.hooks.step_times import between_epochs_s
from tula_hpc.attach.measured_steps import MeasuredSteps
from tula_hpc.attach.reporting import ChildSpec, ProcessMessage, leave
from tula_hpc.attach.script_course import OPTIMIZER_STEPS, ScriptCourse
from tula_hpc.attach.train.script_scaling import own_hook, require_averaged, require_dense
from tula_hpc.batches import ENDLESS, LoaderPass, bytes_of, length_of
from tula_hpc.config import ClusterSpec, SearchSpec, TrainingSpec
from tula_hpc.ddp.stop_signals import Suspensions
from tula_hpc.env import WorkerEnvironment, unix_time
from tula_hpc.errors import InputError
from tula_hpc.failure_kinds import Failure
from tula_hpc.formatting import plural
from tula_hpc.profiling.meters import MemoryMeter, PowerMeter, largest_over_workers
from tula_hpc.profiling.probes import PASSES
from tula_hpc.profiling.record import describe
from tula_hpc.profiling.timing import least_timed, warm_up, within
from tula_hpc.records import Configuration, Identity, Measurement
from tula_hpc.records.base import Record

# steps until a loader has settled, and where the timing of a part begins and ends
BETWEEN_STEPS = 5
# share of steps on a batch that has had a step before, from which on a script is refused
MOST_AGAIN = 0.25


class Settings(Record):
    """Settings of a script's profile."""

    search: SearchSpec
    cluster: ClusterSpec
    configuration: Configuration
    place: WorkerEnvironment
    # samples of one worker's forward pass, and passes of a step; None: whatever the script takes
    forward_batch: int | None = None
    accumulation: int | None = None
    # samples of an epoch
    samples: int = 0
    # whether the script's arguments set its epochs, whose steps follow from `samples`, or its steps
    counts_epochs: bool = False
    counts_steps: bool = False
    # optimizer steps of the training that is planned; 0: unknown
    training_steps: float = 0.0
    # table of the training that is planned
    training: TrainingSpec = TrainingSpec(method="lbt")
    # digests of the script's own files
    sources: dict[str, str] = Field(default={})
    # seconds of the bare all-reduce, by number of workers
    allreduce_s: dict[int, float] = Field(default={})
    # Unix time; None: this is not the job's first configuration
    job_began_at: float | None = None


class ScriptProfile(MeasuredSteps):
    """Times of a script's step and its parts, and memory."""

    def __init__(self, spec: ChildSpec) -> None:
        settings = Settings.model_validate(spec.settings)
        super().__init__(spec, settings.place, settings.cluster.device)
        self.settings, self.configuration = settings, settings.configuration
        self.training = settings.training
        self.suspensions = Suspensions()
        self.course = ScriptCourse(self)
        self.power: PowerMeter
        self._going = self._steps()
        self.options = script.NO_OPTIONS
        # result so far, where steps went on to take more passes
        self._so_far: ProcessMessage | None = None

    def begin(self) -> None:
        """Watch from now on; memory that is in use by now is not the script's."""
        super().begin()
        watch_epochs(self.epoch_begins)
        if self.spec.mode == "look":
            self.options = script.watch_parsers()
        self.suspensions.install()
        self.memory = MemoryMeter(self.settings.cluster)

    def begins_anew(self) -> None:
        """Measure the larger model from its first step on."""
        super().begins_anew()
        self.course = ScriptCourse(self)
        self._going = self._steps()

    def asked(self) -> Collection[int]:
        """See `Listener`."""
        asked = self.settings.forward_batch
        return self.options.batches() if asked is None else [asked]

    def after_step(self) -> None:
        """Go on with the profile, and end the process after it."""
        try:
            next(self._going)
        except StopIteration:
            measured = self._measurement().model_dump(mode="json")
            result = {"measurement": measured, **self._seen()}
            self._so_far = ProcessMessage(state="done", steps=self.steps, result=result)
            if self.step_passes.grow:
                self.begins_anew()
                return
            self.say(self._so_far)
            leave(0)

    def ended(self, code: int) -> ProcessMessage:
        """Return that the script ended too early, unless there is a result already."""
        if self._so_far is not None:
            return self._so_far
        name, steps = self.spec.program.name, self.steps
        if steps == 0 and self.trained_apart:
            why = str(self.unwrapped(self.trained_apart))
            return ProcessMessage(state="failed", failure=Failure.BAD_INPUT, detail=why)
        how = "ended" if code == 0 else f"exited with code {code}"
        # limits with which the script would be measured in time, if it is run again
        shorter: dict[str, Any] = {}
        left = steps - self._apart_steps
        if code == 0 and (search := within(self.settings.search, left, self.course.turn)):
            shorter = {"search": search.model_dump(mode="json"), "others": self._others()}
        if steps == 0 and self.not_counted:
            only = ", ".join(self._others())
            when = f": no optimizer of the model that counts took a step, only {only}"
            why = "" if self.spec.counted_model else why_unheld(self.not_counted[-1])
            remedy = f"it {why}" if why else ""
        elif steps == 0:
            when = " before its first optimizer step"
            remedy = (
                "expected optimizer.step() of one of torch.optim after each batch, in the script's "
                "own process; if it goes on from a file of an earlier training, move that away"
            )
        else:
            shorter["identity"] = self._identity().model_dump(mode="json")
            when = f" after {plural(steps, 'optimizer step')}, before it was measured"
            if self.not_counted:
                when += f"; steps of others were not counted: {', '.join(self._others())}"
            remedy = self._remedy()
        return ProcessMessage(
            state="failed",
            failure=Failure.BAD_INPUT,
            detail=f"{name} {how}{when}",
            steps=steps,
            is_early=True,
            is_short=code == 0 and steps > 0,
            remedy="" if code else remedy,
            result=shorter,
        )

    @property
    def _apart_steps(self) -> int:
        """Most steps of a profile in addition to its warm-up and the steps timed in rounds."""
        return self.awaited + self.course.turn + OPTIMIZER_STEPS + 2 * PASSES + BETWEEN_STEPS

    def _remedy(self) -> str:
        """Return advice on how to get more steps from a script; its options may have any name."""
        search = self.settings.search
        least = search.warmup_steps + 2 * least_timed(self.course.turn) + self._apart_steps
        if self.spec.mode == "look":
            return (
                f"give it more epochs, steps or samples by its own arguments: {least} steps are "
                "enough; switch off what ends it early, such as early stopping"
            )
        samples = self.settings.samples
        if (loaded := self.loaded_samples) and samples > loaded:
            return (
                f"the data set of its loader has {loaded:,} samples, not {samples:,} as "
                "workload.samples; correct that key: the epochs of a profile follow from it"
            )
        if self.settings.counts_epochs:
            return (
                f"{least} steps are enough, and {{epochs}} asked for more: make it obey that, "
                "and switch off what ends it early: a limit of steps, or early stopping, as its "
                "learning rates are 0 in a profile"
            )
        return (
            "a profile raises {epochs} until there are enough steps: pass that in "
            f"workload.arguments, have the script take {least} steps, which are enough, or lower "
            "search.max_batch, as larger batches leave fewer steps"
        )

    def _steps(self) -> Iterator[None]:
        # the first step has just ended
        if _searches_batch():
            raise InputError(
                f"{self.spec.program.name} searches for its batch by Lightning's BatchSizeFinder "
                "(or Tuner.scale_batch_size), but the sweep chooses its batch: leave that search "
                "out"
            )
        if self.spec.mode == "look":
            script.note_parsed(self.options)
        self.meet()
        if self.training.adapts and getattr(self.hooks.model, "_comm_hooks", None):
            raise own_hook(self.training.method)
        if self.training.adapts and self.env.world_size > 1:
            require_averaged(self.training.method, *self.found)
        if self.training.scales:
            require_dense(self.training.method, self.found[1])
        self.course.note_first_step()
        yield from warm_up(self, self.settings.search.warmup_steps, self.course.left_out_s)
        yield from self.await_passes(self.settings.accumulation or 1)
        self._check_passes()
        self._check_batch(is_last=False)
        self._check_share()
        self.power = PowerMeter(self.settings.cluster, self)
        yield from self.course.whole_steps(self.memory, self.power)
        yield from self.course.parts()
        if self.settings.accumulation is not None and self.step_passes.grow:
            first, *_, last = self.step_passes
            raise InputError(
                f"{self.spec.program.name} takes more and more forward passes for a step, {first} "
                f"at first and then {last}; set it to the final number, which a profile waits for",
                key="workload.accumulation",
            )
        self._check_batch(is_last=True)
        self.check_kept()

    def _check_passes(self) -> None:
        """Refuse another number of passes than was asked for."""
        name = self.spec.program.name
        passes = self.step_passes.usual
        asked = self.settings.forward_batch
        parts = self.settings.accumulation
        batch = self._batch()
        other = next(filter(None, map(model_of, self.not_counted)), "")
        to_count = other and script.counting(other, self.spec.mode)
        repeated = self.hooks.has_repeated
        again = self.step_passes.count(0) if repeated else 0
        if passes == 0 or again >= MOST_AGAIN * len(self.step_passes) > 0:
            known = self._model_name(), methods_of(self.hooks.inner_model or self.found[0])
            why = script.why_no_passes(*known, has_repeated=repeated, other=to_count)
            raise InputError(f"{name}: {why}")
        if parts is not None and passes != parts:
            world = self.env.world_size
            remedy = script.remedy_of_passes(passes, parts, batch, asked, world, other=other)
            raise self._refusal(
                f"{name} takes {plural(passes, 'forward pass')} for an optimizer step, not "
                f"{parts}; {remedy}",
                "workload.accumulation",
            )
        batches = max(self.step_batches, key=self.step_batches.__getitem__, default=0)
        if other and batches > passes:
            raise InputError(
                f"{name} takes {batches} batches of its loader for a step of "
                f"{self._model_name()}, which gets {passes}; if {other} is trained on each of "
                f"them, its steps should count: {to_count}"
            )
        if asked is None:
            self.configuration = self.configuration._replace(local_batch=max(1, batch) * passes)

    def _batch(self) -> int:
        """Return the samples of a forward pass; 0: no tensor or option of the script shows them."""
        asked = self.settings.forward_batch
        has_loader = self.loader is not None
        batch = script.typical_batch(self.forward_samples, asked, has_loader=has_loader)
        by_options = set(self.options.batches())
        return by_options.pop() if batch == 0 and len(by_options) == 1 else batch

    def _check_batch(self, *, is_last: bool) -> None:
        """Refuse another batch than was asked for; where batches differ, only at the end."""
        sizes = self.forward_samples
        asked = self.settings.forward_batch
        batch = self._batch()
        # with a loader two sizes are usual: whole batches, and an epoch's last one
        differs = len(sizes) > (2 if self.loader is not None else 1)
        # a batch of 0 is unknown
        if asked is None or batch in (0, asked) or (differs and not is_last):
            return
        remedy = script.remedy_of_batch(self.spec.program.name, asked, batch, self.configuration)
        if differs:
            remedy = (
                f"{sizes.total()} batches had {min(sizes)} to {max(sizes)} samples; batches that "
                "differ can only be planned if their mean is what was asked for"
            )
        raise self._refusal(
            f"asked for {plural(asked, 'sample')} a forward pass, {self._model_name()} got "
            f"{batch}: {remedy}",
            "workload.arguments",
        )

    def _refusal(self, why: str, key: str) -> Exception:
        """Return the error for other passes than were asked for; memory may have run out before."""
        if self.memory.has_run_out:
            return torch.OutOfMemoryError(f"memory ran out, the script goes on otherwise: {why}")
        return InputError(why, key=key)

    def _check_share(self) -> None:
        """Refuse workers that each go through all samples in an epoch."""
        samples = self.settings.samples
        world = self.env.world_size
        if world == 1 or not self.settings.counts_epochs:
            return
        share = self.loader_batches * (self.settings.forward_batch or 0)
        # a data set of another size is not the one that the sweep file means
        is_whole = abs(self.loaded_samples - samples) <= script.NEAR * samples
        if is_whole and share > samples * (1 + 1 / world) / 2:
            raise InputError(
                f"{self.spec.program.name}: each of its {world} workers goes through all "
                f"{samples:,} samples in an epoch; expected a share of them each: give its loader "
                "sampler=DistributedSampler(dataset)",
                key="workload.script",
            )

    # results

    def _measurement(self) -> Measurement:
        """Return the measurement. Collective; whole on rank 0."""
        settings = self.settings
        identity = self._identity()
        share = script.batch_share(self.forward_samples, settings.forward_batch, self.loader_mean)
        found = describe(self.configuration, settings.cluster, self.env) | self.course.measured()
        model, _ = self.found
        used = self.memory.use(model, self.parameters, *self.optimizers)
        return Measurement(
            status="ok",
            memory=largest_over_workers(self, used),
            watts_per_node=self.power.mean(),
            dataset_samples=settings.samples,
            # a script that takes several passes in a step may leave out the last ones of an epoch
            short_batch=settings.accumulation == 1
            and (share != 1.0 or LoaderPass(self.loader).given_out is not None),
            batch_share=share,
            parameters=identity.parameters,
            epoch_samples=self._epoch_samples(),
            between_epochs_s=self._between_epochs_s(),
            kept=was_kept(),
            one_iterator=self.has_one_iterator,
            identity=identity,
            start_s=self.course.started_s(settings.job_began_at),
            finished_at=unix_time(),
            **found,
        )

    def _epoch_samples(self) -> int:
        """Return the samples of an epoch by all workers' loaders; 0: unknown, or without an end."""
        if self.settings.counts_steps:
            # not their sum: an endless sampler may give the number of all samples on each worker
            return self.loaded_samples
        # the last batch is counted as full
        mine = self.loader_batches * LoaderPass(self.loader).size
        (found,) = self.total(0 if self.gives_batches or self.takes_turns else mine)
        return int(found) if found < ENDLESS * self.settings.samples else 0

    def _between_epochs_s(self) -> float | None:
        """Return the longest time of any worker between two epochs. Collective."""
        steps = self.settings.samples // self.configuration.global_batch
        mine = between_epochs_s(self.pauses, steps, self.steps)
        # −1 for a worker that has seen no pause is less than any other worker's time
        (longest,) = self.agree(-1.0 if mine is None else mine)
        return None if longest < 0.0 else longest

    def _identity(self) -> Identity:
        """Return the identity of the model and its code, by the parameters that are trained.

        Names and layers do not count: scripts choose layers by the number of workers
        (SyncBatchNorm), and parameters have other names where a framework wraps the model.
        """
        kinds = (f"{p.dtype} {tuple(p.shape)}" for p in self.parameters)
        return Identity(
            parameters=sum(p.numel() for p in self.parameters),
            gradient_bytes=bytes_of(self.parameters),
            structure=hashlib.sha256("\n".join(sorted(kinds)).encode()).hexdigest()[:32],
            train_samples=self.settings.samples,
            test_samples=0,
            sources=self.settings.sources,
        )

    def _drawn_samples(self) -> int:
        """Return the samples that an epoch of this worker takes from its data set; 0: unknown."""
        loader_pass = LoaderPass(self.loader)
        # a sampler may draw another number of samples than the data set has
        drawn = self.loaded_samples and (loader_pass.drawn or self.loaded_samples)
        is_limited = self.loader_batches < (length_of(self.loader) or 0)
        return min(drawn, self.loader_batches * loader_pass.size) if is_limited else drawn

    def _seen(self) -> dict[str, Any]:
        """Return observations of the script's training, for people."""
        return {
            "model": self._model_name(),
            "wrapped": isinstance(self.hooks.model, DistributedDataParallel),
            "optimizer": " and ".join(type(each).__name__ for each in self.optimizers),
            "others": self._others(),
            "forward_batch": self._batch(),
            "accumulation": self.step_passes.usual,
            "loader_workers": self.loader_workers,
            "samples": self._drawn_samples(),
            "options": self.options._asdict(),
        }


def _searches_batch() -> bool:
    """Tell whether Lightning's search for a batch is taking the present step."""
    codes = (frame.f_code for frame, _ in traceback.walk_stack(None))
    return any(
        code.co_name == "scale_batch_size" and "lightning" in code.co_filename for code in codes
    )
