"""Exact resume of a script: its kept states, its place in epochs and batches, its random numbers.

The script asks for its epochs and batches here. `loaders.py` leads a loader to its next batch:
samples already seen are left out. When the script comes for the next batch, the batch before is
done: there all workers agree to save or to stop, unless gradients are being accumulated over
batches. A checkpoint has the kept states, from rank 0, and every worker's random numbers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, NoReturn

from torch.nn.parallel import DistributedDataParallel

from tula_hpc.attach import be_around
from tula_hpc.attach.frameworks.folders import batch_of, check_folders, kept_in_folder
from tula_hpc.attach.hooks.find_model import objects_of
from tula_hpc.attach.hooks.patches import watch_beginnings
from tula_hpc.attach.reporting import ProcessMessage
from tula_hpc.attach.train.first_pass import rehearse_first_pass
from tula_hpc.attach.train.loaders import (
    LoaderHistory,
    OwnBeginnings,
    Passed,
    Stream,
    batch_size_of,
    generator_states,
    random_state,
    set_generator_states,
    set_random_state,
)
from tula_hpc.attach.train.peers import ScriptPeers, require_state, state_of
from tula_hpc.attach.train.resume_point import ScriptProgress
from tula_hpc.attach.train.script_training import ScriptTraining
from tula_hpc.checkpoint.interval import Interruptions
from tula_hpc.checkpoint.safe_points import SafePoints
from tula_hpc.checkpoint.store import CheckpointStore, LoadedCheckpoint
from tula_hpc.ddp.agreement import Agreement
from tula_hpc.errors import InputError
from tula_hpc.records.events import EventName
from tula_hpc.user_code import describe_error

# name under which the state of a method that scales gradients is kept
SCALING = "gradient scaling"


class Keeper(SafePoints):
    """One worker's part of an exact resume: the progress of `steps` is saved and restored."""

    # all workers; set by the time of `has_begun`
    worker: ScriptPeers

    def __init__(self, steps: ScriptTraining) -> None:
        store = CheckpointStore(steps.files.checkpoints)
        super().__init__(store, steps.settings.restart_count)
        self.steps, self.stop = steps, steps.stop
        self.spec, self.settings = steps.spec, steps.settings
        # the checkpoint, from the first `keep` until all of it is restored
        self.loaded: LoadedCheckpoint | None = None
        self.kept: dict[str, Any] = {}
        self._has_looked = False
        # function that has a model pass its first batch twice after a resume
        self.rehearse: Callable[..., None] = rehearse_first_pass
        # steps done at the last batch's end
        self._stepped = 0
        if steps.scaling is not None:
            self.kept[SCALING] = steps.scaling
        # calls of `batches` in this epoch, in this process
        self.calls = 0
        self.in_batches = False
        # random numbers at the beginning of the epoch and of the loader, for a checkpoint
        self.began = {"epoch": "", "loader": ""}
        # the checkpoint's random numbers by moment, until they are restored
        self.saved_numbers: dict[str, str] = {}
        # loaders of this epoch or the last, and the checkpoint's states of generators, by place
        self.loaders: dict[int, Iterable[Any]] = {}
        self.generators: dict[str, list[str]] = {}
        # generators and loaders whose states are restored, as places may share them
        self.restored: list[object] = []
        self.beginnings = OwnBeginnings(self.restored)
        self.history = LoaderHistory()
        # loops over `epochs` that this process has begun
        self.loops = 0
        # `epochs` was called, in which all workers meet; a framework's training has ended
        self.has_begun = self.is_over = False
        # as far as is known, all batches of the epoch were done before this process began
        self.has_empty_epoch = False
        self.marked = 0.0

    def keep(self, objects: Mapping[str, Any]) -> None:
        """Keep objects, and give them the states of the checkpoint, if there is one.

        Raises:
            InputError: An object has no state, the checkpoint lacks it, or epochs have begun.
        """
        if self.has_begun:
            raise InputError("call it before the loop over tula.epochs", source="tula.keep")
        if not self._has_looked:
            self._has_looked = True
            self.loaded = self._latest()
            self._restore_progress()
            # gradient scaling, which the script does not name
            objects = {**self.kept, **objects}
        for name, given in objects.items():
            kept = kept_in_folder(name, given, self)
            require_state(name, kept)
            self.kept[name] = kept
            if self.loaded is not None:
                self._restore(name, kept, self.loaded)

    def _latest(self) -> LoadedCheckpoint | None:
        """Return the newest checkpoint that the script can go on from."""
        loaded = self.store.load_latest(check=partial(check_folders, self.store.folder))
        if loaded is None:
            return None
        # a resubmitted job counts its restarts from 0 again, and would be fenced out as stale
        self.restart_count = max(self.restart_count, loaded.restart_count + 1)
        before, now = batch_of(loaded.state), self.settings.global_batch
        if before in (0, now):
            return loaded
        if self.spec.rank == 0:
            detail = f"begins anew: the framework saved at a global batch of {before}, now {now}"
            place = {"step": 0, "samples_seen": 0, "epoch": 0}
            self.log_event("resumed", detail, {**place, "began_at": self.settings.job_began_at})
        return None

    def _restore(self, name: str, kept: Any, loaded: LoadedCheckpoint) -> None:
        states = loaded.state["kept"]
        if name not in states:
            raise InputError(
                f"{loaded.path} has states of {', '.join(states)}, but none of {name}; use the "
                "name as before, or delete the checkpoints to begin anew",
                source=f"tula.keep({name}=…)",
            )
        try:
            kept.load_state_dict(states[name])
        except (RuntimeError, ValueError, KeyError) as error:
            raise InputError(
                f"its state in {loaded.path.name} does not fit; if the script was changed, undo "
                f"that, or move {self.store.folder} away to begin anew ({describe_error(error)})",
                source=f"tula.keep({name}=…)",
            ) from error

    def _restore_progress(self) -> None:
        if (loaded := self.loaded) is None:
            return
        self.steps.progress = ScriptProgress(**loaded.state["progress"])
        self.go_on_from(loaded)
        self.steps.metrics.critical_batch.load_state_dict(loaded.state["critical_batch"])
        # this worker's numbers; those of "now" hold only for the same number of workers
        self.saved_numbers = {
            moment: texts[self.spec.rank % len(texts)]
            for moment, texts in loaded.state["random"].items()
            if moment != "now" or len(texts) == self.spec.world_size
        }
        self.generators = json.loads(self.saved_numbers.pop("generators"))
        self.beginnings.load(self.saved_numbers.pop("beginnings", "{}"))
        self.history.load_state(self.saved_numbers.pop("history", "[{}, {}]"))

    # the script's loops

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that are left of `count`; a second such loop has epochs of its own."""
        self._begin()
        loops = self.progress.loops
        place = self.loops
        self.loops += 1
        if place < len(loops):
            # this loop was done before this start
            return
        first = loops[-1] if loops else 0
        while self.progress.epoch < first + count:
            epoch = self.progress.epoch - first
            self.steps.in_epoch = True
            self.calls = 0
            self.begin_draws()
            try:
                yield epoch
            except GeneratorExit:
                # left by `break`, on each worker at a moment of its own
                self.steps.in_epoch = False
                self.steps.end_open_epoch()
                self.progress.train_time_s += self.progress.whole_epoch_s
                self.progress.begin_epoch()
                loops.append(self.progress.epoch)
                raise
            self.steps.in_epoch = False
            self.steps.end_epoch()
            self._end_epoch(is_last=epoch + 1 >= count)
        if place == len(loops):
            # no epoch was left: what follows goes on with the random numbers of the epochs' end
            if "epoch" in self.saved_numbers:
                set_random_state(self.saved_numbers.pop("epoch"))
            loops.append(min(self.progress.epoch, first + count))

    def begin_draws(self) -> None:
        """Give random numbers the states that they had at this epoch's beginning."""
        if "epoch" in self.saved_numbers:
            set_random_state(self.saved_numbers.pop("epoch"))
        is_new = not self.progress.calls and not self.progress.batches
        if is_new:
            # nothing of the epoch was done
            self.saved_numbers = {}
            self.history.begin_epoch()
        self.beginnings.begin_epoch(is_new=is_new)
        self.began["epoch"] = random_state()

    def _end_epoch(self, *, is_last: bool) -> None:
        mine = (self.stop.received is not None, self.saving.may_save, self.steps.is_open)
        stop, wanted, is_open = self.worker.agree(*map(float, mine))
        if is_open and not is_last and self.calls:
            # checkpoints have no gradients: save after the next epoch's first step, which uses them
            return
        self.progress.stopped = bool(stop)
        if is_last or stop or wanted:
            self.began = dict.fromkeys(self.began, random_state())
            self.save(wait=is_last or bool(stop))
        if stop and not is_last:
            self.steps.leave_stopped()

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches that are left in this place of the epoch.

        Raises:
            InputError: The loop is not in `tula.epochs`, or is within another such loop.
        """
        if not self.steps.in_epoch:
            raise InputError("expected within `for … in tula.epochs(n)`", source="tula.batches")
        if self.in_batches:
            raise InputError(
                "is called inside another loop over it; expected one loop after the other",
                source="tula.batches",
            )
        self.calls += 1
        self.loaders[self.calls] = loader
        self.has_empty_epoch = self.progress.calls + self.progress.batches > 0
        self._restore_generators(loader)
        if self.calls <= self.progress.calls:
            # this loop of a resumed epoch was done before
            self.beginnings.go_on()
            return
        self.in_batches = True
        stream = self._stream(loader)
        self._stepped = self.progress.step
        self.marked = time.perf_counter()
        try:
            for batch in stream.batches:
                self.has_empty_epoch = False
                yield batch
                self.progress.batches += 1
                self.end_batch()
            self._look_once_more()
        finally:
            self.in_batches = False
            stream.close()
            self.progress.calls = self.calls
            self.progress.batches = 0
            self.steps.end_steps_of_epoch()

    def note_beginning(self, loader: object) -> None:
        """Note a loader that is about to be begun, by the script itself or inside another one."""
        self.history.note_beginning(loader)
        if self.loops and self.steps.in_epoch and not self.in_batches:
            self.beginnings.note(loader, self.calls)

    def _restore_generators(self, loader: Iterable[Any]) -> None:
        """Give a loader's own generators their states in the checkpoint, unless they have them."""
        set_generator_states(loader, self.generators.pop(str(self.calls), []), self.restored)

    # loops of frameworks, which go through their batches by themselves

    def begin_epoch(self) -> None:
        """Note that an epoch begins, or the rest of an epoch. Collective."""
        self._begin()
        self.steps.in_epoch = True
        self._stepped = self.progress.step
        self.marked = time.perf_counter()

    def open(self, loader: Iterable[Any], begin: Callable[[], Iterator[Any]]) -> Stream:
        """Begin to go through the training's loader where it stopped; see `Stream`."""
        self.loaders[self.calls] = loader
        self._restore_generators(loader)
        self.begin_draws()
        return self._stream(loader, begin)

    def end_batch(self) -> None:
        """Save or stop after a batch, unless gradients are being accumulated. Collective."""
        if self.progress.step > self._stepped and not self.steps.is_open:
            self._after_step()
        self._stepped = self.progress.step

    def end_epoch(self, *, is_last: bool, saves: bool = True) -> None:
        """Count an epoch with all that belongs to it; save or stop. Collective.

        `saves` is false if the framework would not go on exactly from here.
        """
        self.steps.in_epoch = False
        self.steps.end_epoch()
        if is_last:
            self.progress.loops.append(self.progress.epoch)
        if saves:
            self._end_epoch(is_last=is_last)

    def end(self) -> None:
        """Note that no epoch follows: scores belong to the last one, even of an earlier start."""
        self.is_over = True

    def meet(self) -> bool:
        """Wait for the other workers; tell whether this one is rank 0. Collective."""
        self.worker.agree(0.0)
        return self.is_main

    def _stream(
        self, loader: Iterable[Any], begin: Callable[[], Iterator[Any]] | None = None
    ) -> Stream:
        progress = self.progress
        passed: Passed | None = None
        self.history.load_from(loader, self.spec.world_size)
        if "loader" in self.saved_numbers:
            set_random_state(self.saved_numbers.pop("loader"), loader)
            passed = Passed(progress.batches, progress.batch_size, progress.workers)
            # a loader of accelerate's
            if hasattr(loader, "base_dataloader"):
                self.history.load_ahead(progress.batches, self.saved_numbers)
        self.began["loader"] = random_state(loader)
        stream = Stream(loader, passed, self.spec.world_size, begin)
        if "now" in self.saved_numbers:
            set_random_state(self.saved_numbers.pop("now"), loader)
            self.beginnings.go_on()
        self.history.catch_up()
        # count batches of the loader's present size
        progress.batch_size = batch_size_of(loader)
        progress.workers = self.spec.world_size
        if passed is not None and progress.batch_size:
            progress.batches = passed.samples // (progress.batch_size * progress.workers)
        return stream

    # saving and stopping

    @property
    def progress(self) -> ScriptProgress:
        """Progress of the script."""
        return self.steps.progress

    @property
    def is_main(self) -> bool:
        """See `SafePoints`."""
        return self.worker.rank == 0

    def log_event(self, event: EventName, detail: str, data: dict[str, Any] | None = None) -> None:
        """See `SafePoints`."""
        self.steps.log_event(event, detail, data)

    def flush(self) -> None:
        """See `SafePoints`."""
        self.steps.flush()

    def pause(self) -> None:
        """See `SafePoints`."""
        self.steps.pause()

    def save(self, *, wait: bool = False) -> None:
        """See `SafePoints`."""
        before_s = self.progress.saving_s
        super().save(wait=wait)
        self.steps.leave_out(self.progress.saving_s - before_s)

    def _after_step(self) -> None:
        decision = self.agreement.decide(lambda: self.steps.readings(self.worker))
        self.step_ended(self.marked, decision)
        if decision.stop:
            self.steps.leave_stopped()
        self.steps.look(decision.shared, self.worker)
        self.marked = time.perf_counter()

    def _look_once_more(self) -> None:
        """Obey a stop after the last batch, as long work may follow; the end counts as a batch."""
        (stop,) = self.worker.agree(float(self.stop.received is not None))
        if stop and not self.steps.is_open:
            self.progress.batches += 1
            self.progress.stopped = True
            self.save(wait=True)
            self.steps.leave_stopped()

    def _begin(self) -> None:
        """Meet the other workers and, if the script was resumed, agree on that. Collective."""
        if self.has_begun:
            return
        self._check_kept()
        self.steps.be_kept(begins=self.loaded is None)
        self.worker = ScriptPeers(self.spec.world_size, model=self.steps.hooks.inner_model)
        self.check_same(self.loaded)
        progress, settings = self.progress, self.settings
        interruptions = Interruptions(
            settings.between_s,
            is_known=settings.between_is_known,
            seen=progress.interruptions,
            over_s=progress.train_time_s + progress.epoch_time_s,
        )
        self.begin_saving(interruptions, settings.fixed_s, None, self.steps.files.root)
        every_s = self.steps.look_every_s
        self.agreement = Agreement(self.worker, self.stop, self.saving.request, every_s)
        if self.loaded is not None:
            for model in objects_of(DistributedDataParallel):
                self.rehearse(model, self._forget_pass)
            self.log_resume(self.loaded, began_at=settings.job_began_at)
            # long work may come before the next step, if there is one at all
            self.steps.begin_signs()
        # frees the tensors, which the kept objects have taken over
        self.loaded = None
        self.has_begun = True

    def _forget_pass(self) -> None:
        if self.steps.scaling is not None:
            self.steps.scaling.forget_passes()

    def _check_kept(self) -> None:
        if not set(self.kept) - {SCALING}:
            message = "expected tula.keep(model=…, optimizer=…) before it"
            raise InputError(message, source="tula.epochs")
        if self.loaded is None:
            return
        missing = set(self.loaded.state["kept"]) - set(self.kept)
        if missing:
            message = (
                f"the checkpoints in {self.store.folder} also hold {', '.join(sorted(missing))}"
            )
            raise InputError(
                f"{message}; keep that, too, or delete the checkpoints to begin anew",
                source="tula.keep",
            )

    def state(self) -> dict[str, Any]:
        """See `SafePoints`."""
        begun = {str(place): generator_states(each) for place, each in self.loaders.items()}
        moments = self.history.moments(self.steps.hooks.loader, self.loaders.get(self.calls))
        moments |= {**self.began, "beginnings": self.beginnings.state()}
        # including the checkpoint's states for places that this process has not come to
        moments["generators"] = json.dumps(self.generators | begun)
        random = {moment: self.worker.texts(text) for moment, text in moments.items()}
        kept = {name: state_of(each) for name, each in self.kept.items()}
        if not self.is_main:
            return {}
        return {
            "kept": kept,
            "random": random,
            "progress": asdict(self.progress),
            "critical_batch": self.steps.metrics.critical_batch.state_dict(),
        }

    def report(self, scores: Mapping[str, Any]) -> None:
        """Take scores of this epoch, or of the last one; see `tula_hpc.attach.report`."""
        self.steps.report(scores)
        if (self.has_begun or self.is_over) and not self.steps.in_epoch:
            self.steps.add_to_last_epoch()

    def close(self) -> None:
        """See `SafePoints`."""
        if self.has_begun:
            super().close()


class KeptTraining(ScriptTraining):
    """Training by a script that may keep its state here."""

    def begin(self) -> None:
        """See `Mode`."""
        super().begin()
        self.keeper = Keeper(self)
        self.keeper.history.install()
        be_around(self.keeper)
        watch_beginnings(self.keeper.note_beginning)

    def ended(self, code: int) -> ProcessMessage:
        """See `Mode`."""
        self.keeper.close()
        return super().ended(code)

    def fail(self, error: BaseException, so_far: dict[str, Any] | None = None) -> NoReturn:
        """See `Mode`."""
        # first, as the wait for a checkpoint may be long
        self.metrics.close()
        self.keeper.close()
        super().fail(error, so_far or self.end_message("stopped").result)

    def circumstances(self) -> str:
        """See `Mode`."""
        if not self.keeper.has_empty_epoch:
            return ""
        return (
            "; this epoch was resumed after its last batch, so that the loop over tula.batches was "
            "empty: give names that are used after it a value before it, and report means over "
            "its batches only if there were any"
        )
