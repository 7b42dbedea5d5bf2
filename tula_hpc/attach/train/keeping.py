"""Exact resume of a script: what it keeps, its place in epochs and batches, its random numbers.

The script asks for its epochs and batches here (`tula.epochs`, `tula.batches`). When it comes for
the next batch, the batch before is done: there all workers agree to save or to stop, unless
gradients are being accumulated over batches. A checkpoint has the states of what is kept, from rank
0, and every worker's random numbers.

DDP regroups its gradient buckets after the first backward pass, which changes the order of
additions. A resumed script passes its first batch once more beforehand and throws the gradients
away, so that it adds in the same order as an uninterrupted one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tula_hpc.attach import be_around
from tula_hpc.attach.reporting import ChildSpec, Mode, Said
from tula_hpc.attach.train.loaders import (
    Passed,
    Stream,
    batch_size_of,
    generator_states,
    random_state,
    set_generator_states,
    set_random_state,
)
from tula_hpc.attach.train.peers import Peers
from tula_hpc.attach.train.script_training import ScriptProgress, ScriptTraining
from tula_hpc.batches import tensors_of
from tula_hpc.checkpoint.background import Saving
from tula_hpc.checkpoint.interval import Cadence, Interruptions
from tula_hpc.checkpoint.store import CheckpointStore, LoadedCheckpoint
from tula_hpc.ddp.agreement import Agreed
from tula_hpc.errors import InputError, StageError
from tula_hpc.files import HeldFolder
from tula_hpc.workloads.optimizers import consolidate

# name of the method's own state among what is kept
SCALING = "gradient scaling"


class Keeper:
    """One worker's part of an exact resume.

    Args:
        steps: Counts the script's steps; its progress is saved and restored.
    """

    def __init__(self, steps: ScriptTraining) -> None:
        self.steps, self.stop = steps, steps.stop
        self.spec, self.settings = steps.spec, steps.settings
        self.store = CheckpointStore(steps.files.checkpoints)
        # looked for where the script begins to keep; until it is in force
        self.loaded: LoadedCheckpoint | None = None
        self.restart_count = steps.settings.restart_count
        self.kept: dict[str, Any] = {}
        if steps.scaling is not None:
            self._keep_one(SCALING, steps.scaling)
        # calls of `batches` in this epoch, in this process
        self.calls = 0
        self.in_epoch = self.in_batches = False
        # random numbers at the beginning of the epoch and of the loader, for a checkpoint
        self.began = {"epoch": "", "loader": ""}
        # of the checkpoint, until they are in force; by moment
        self.found: dict[str, str] = {}
        # of this epoch or the last one, and the checkpoint's states of their generators; by place
        self.loaders: dict[int, Iterable[Any]] = {}
        self.generators: dict[str, list[str]] = {}
        self.peers: Peers | None = None
        self.marked = 0.0

    def keep(self, things: Mapping[str, Any]) -> None:
        """Keep these, and give them the states of the checkpoint, if there is one.

        Raises:
            InputError: One has no state, the checkpoint has none of it, or epochs have begun.
        """
        if self.peers is not None:
            raise InputError("expected before tula.epochs", source="tula.keep")
        if not self.kept:
            self.loaded = self.store.load_latest()
            self._restore_progress()
        for name, thing in things.items():
            for method in ("state_dict", "load_state_dict"):
                if not callable(getattr(thing, method, None)):
                    kind = type(thing).__name__
                    raise InputError(f"a {kind} has no {method}", source=f"tula.keep({name}=…)")
            self._keep_one(name, thing)

    def _keep_one(self, name: str, thing: Any) -> None:
        self.kept[name] = thing
        if self.loaded is not None:
            self._restore(name, thing, self.loaded)

    def _restore(self, name: str, thing: Any, loaded: LoadedCheckpoint) -> None:
        states = loaded.state["kept"]
        if name not in states:
            known = ", ".join(states)
            raise InputError(
                f"{loaded.path} has no state of it, only of {known}; name it as before, "
                "or delete the checkpoints to begin anew",
                source=f"tula.keep({name}=…)",
            )
        thing.load_state_dict(states[name])

    def _restore_progress(self) -> None:
        loaded = self.loaded
        if loaded is None:
            return
        # a resubmitted job counts its restarts from 0 again, and would be fenced out as stale
        self.restart_count = max(self.restart_count, loaded.restart_count + 1)
        self.steps.progress = progress = ScriptProgress(**loaded.state["progress"])
        progress.restarts += 1
        progress.interruptions += not progress.stopped
        progress.stopped = False
        # of this worker; another number of workers draws other numbers
        self.found = {
            moment: texts[self.spec.rank % len(texts)]
            for moment, texts in loaded.state["random"].items()
            if moment != "now" or len(texts) == self.spec.world_size
        }
        self.generators = json.loads(self.found.pop("generators"))

    # the script's loops

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that are left of so many."""
        self._begin()
        while self.progress.epoch < count:
            epoch = self.progress.epoch
            self.in_epoch, self.calls = True, 0
            self._begin_epoch()
            yield epoch
            self.in_epoch = False
            self.steps.end_epoch()
            self._end_epoch(is_last=epoch + 1 >= count)

    def _begin_epoch(self) -> None:
        if "epoch" in self.found:
            set_random_state(self.found.pop("epoch"))
        if not self.progress.calls and not self.progress.batches:
            # nothing of the epoch was done
            self.found = {}
        self.began["epoch"] = random_state()

    def _end_epoch(self, *, is_last: bool) -> None:
        peers, saving = self._peers(), self.saving
        stop, wanted = peers.agree(float(self.stop.received is not None), float(saving.may_save))
        self.progress.stopped = bool(stop)
        if is_last or stop or wanted:
            self.began = dict.fromkeys(self.began, random_state())
            self._save(wait=is_last or bool(stop))
        if stop:
            self.steps.leave_stopped()

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches that are left in this place of the epoch.

        Raises:
            InputError: It is not in `tula.epochs`, or within another such loop.
        """
        if not self.in_epoch:
            raise InputError("expected within `for … in tula.epochs(n)`", source="tula.batches")
        if self.in_batches:
            raise InputError("expected one such loop at a time", source="tula.batches")
        self.calls += 1
        self.loaders[self.calls] = loader
        set_generator_states(loader, self.generators.pop(str(self.calls), []))
        if self.calls <= self.progress.calls:
            # of an epoch that is resumed, and done
            return
        self.in_batches = True
        stream = self._stream(loader)
        try:
            yield from self._each(stream.batches)
        finally:
            self.in_batches = False
            stream.close()
            self.progress.calls, self.progress.batches = self.calls, 0
            self.steps.end_steps_of_epoch()

    def _stream(self, loader: Iterable[Any]) -> Stream:
        progress, passed = self.progress, None
        if "loader" in self.found:
            set_random_state(self.found.pop("loader"), loader)
            passed = Passed(progress.batches, progress.batch_size, progress.workers)
        self.began["loader"] = random_state(loader)
        stream = Stream(loader, passed, self.spec.world_size)
        if "now" in self.found:
            set_random_state(self.found.pop("now"), loader)
        self._recount(loader, passed)
        return stream

    def _recount(self, loader: Iterable[Any], passed: Passed | None) -> None:
        """Count the batches of this place in those of the loader as it is now."""
        progress = self.progress
        size, workers = batch_size_of(loader), self.spec.world_size
        if passed is not None and size:
            samples = passed.batches * passed.batch_size * passed.workers
            progress.batches = samples // (size * workers)
        progress.batch_size, progress.workers = size, workers

    def _each(self, batches: Iterator[Any]) -> Iterator[Any]:
        self._mark()
        for batch in batches:
            before = self.progress.step
            yield batch
            self.progress.batches += 1
            if self.progress.step > before and not self.steps.is_open:
                self._after_step()
        self._look_once_more()

    # saving and stopping

    @property
    def progress(self) -> ScriptProgress:
        """Progress of the script."""
        return self.steps.progress

    def _after_step(self) -> None:
        decision = self.agreed.decide(lambda: self.steps.readings(self._peers()))
        landed = self.saving.has_landed
        if decision.save or landed:
            # the device's queue is the steps' time, not a save's
            self._peers().synchronize_device()
        self.saving.cadence.worked(time.perf_counter() - self.marked)
        if landed:
            self.saving.note()
            self._log_cost()
        if decision.failed:
            # all workers raise it here
            self.saving.settle()
        self.progress.stopped = decision.stop
        if decision.save:
            self._save(wait=decision.stop)
            self.steps.pause()
        if decision.stop:
            self.steps.leave_stopped()
        self.steps.look(decision.shared, self._peers())
        self._mark()

    def _look_once_more(self) -> None:
        """Obey a stop before what follows the batches, which may take long."""
        (stop,) = self._peers().agree(float(self.stop.received is not None))
        if stop and not self.steps.is_open:
            self.progress.stopped = True
            self._save(wait=True)
            self.steps.leave_stopped()

    def _mark(self) -> None:
        self.marked = time.perf_counter()

    def _begin(self) -> None:
        """Meet the other workers and, if the script was resumed, agree on that. Collective."""
        if self.peers is not None:
            return
        self._check_kept()
        self.steps.is_kept = True
        self.peers = peers = Peers(self.spec.world_size)
        self._check_same(peers)
        progress, settings = self.progress, self.settings
        interruptions = Interruptions(
            settings.between_s,
            is_known=settings.between_is_known,
            seen=progress.interruptions,
            over_s=progress.train_time_s + progress.epoch_time_s,
        )
        is_main = peers.rank == 0
        self.saving = Saving(
            peers,
            self.store if is_main else None,
            _NothingOfItsOwn(),
            Cadence(interruptions, settings.fixed_s),
            HeldFolder(self.steps.files.root) if is_main else None,
        )
        self.agreed = Agreed(peers, self.stop, self.saving.wish, self.steps.look_every_s)
        if self.loaded is not None:
            self._note_resume(self.loaded)
        # its tensors are in what is kept by now
        self.loaded = None

    def _note_resume(self, loaded: LoadedCheckpoint) -> None:
        for model in self.steps.models:
            rehearse_first_pass(model)
        if self._peers().rank != 0:
            return
        progress = self.progress
        refused = "; ".join(f"{bad.name} refused: {why}" for bad, why in loaded.rejected)
        detail = f"from {loaded.path.name} at step {progress.step}"
        detail += f" ({refused})" if refused else ""
        data = {
            "step": progress.step,
            "samples_seen": progress.samples_seen,
            "epoch": progress.epoch,
        }
        self.steps.log_event("resumed", detail, data)

    def _check_kept(self) -> None:
        if not set(self.kept) - {SCALING}:
            message = "expected tula.keep(model=…, optimizer=…) before it"
            raise InputError(message, source="tula.epochs")
        missing = set() if self.loaded is None else set(self.loaded.state["kept"]) - set(self.kept)
        if missing:
            message = f"{self.store.folder} has a state of {', '.join(sorted(missing))}, too"
            raise InputError(f"{message}; keep it as before", source="tula.keep")

    def _check_same(self, peers: Peers) -> None:
        """Refuse different checkpoints, as a stale directory listing on one node may cause."""
        mine = (-1.0, -1.0)
        if self.loaded is not None:
            mine = (float(self.loaded.restart_count), float(self.loaded.samples_seen))
        highest = peers.agree(*mine)
        lowest = peers.agree(*(-value for value in mine))
        if highest != [-value for value in lowest]:
            raise StageError(
                f"workers see different checkpoints in {self.store.folder}; start the job again"
            )

    def _peers(self) -> Peers:
        if self.peers is None:
            raise InputError("expected within `for … in tula.epochs(n)`", source="tula.batches")
        return self.peers

    def _save(self, *, wait: bool) -> None:
        self.steps.write_steps()
        began = time.perf_counter()
        self.saving.save(
            self._state,
            samples_seen=self.progress.samples_seen,
            restart_count=self.restart_count,
            wait=wait,
        )
        self.steps.leave_out(time.perf_counter() - began)
        self._log_cost()

    def _log_cost(self) -> None:
        news = self.saving.cadence.news()
        if news is not None:
            cost = f"{news['cost_s']:.3g} s of training, {news['share']:.2%} of it so far"
            detail = f"saving costs {cost}; one every {news['interval_s']:.0f} s"
            self.steps.log_event("checkpoint", detail, news)

    def _state(self) -> dict[str, Any]:
        """Return a checkpoint's content, whole on rank 0, {} on the others. Collective."""
        peers = self._peers()
        generators = {place: generator_states(each) for place, each in self.loaders.items()}
        now = random_state(self.loaders.get(self.calls))
        moments = {**self.began, "now": now, "generators": json.dumps(generators)}
        random = {moment: peers.texts(text) for moment, text in moments.items()}
        kept = {name: _state_of(thing) for name, thing in self.kept.items()}
        if peers.rank != 0:
            return {}
        return {"kept": kept, "random": random, "progress": asdict(self.progress)}

    def report(self, scores: Mapping[str, Any]) -> None:
        """Take scores of this epoch; see `tula_hpc.attach.report`."""
        self.steps.report(scores)

    def close(self) -> None:
        """Wait for a checkpoint that is being written, however the script has ended."""
        if self.peers is not None:
            self.saving.abandon()


class KeptTraining(ScriptTraining):
    """Training by a script that may keep its state here."""

    def begin(self) -> None:
        """See `Mode`."""
        super().begin()
        self.keeper = Keeper(self)
        be_around(self.keeper)

    def ended(self, code: int) -> Said:
        """See `Mode`."""
        self.keeper.close()
        return super().ended(code)

    def fail(self, error: BaseException) -> NoReturn:
        """See `Mode`."""
        self.keeper.close()
        super().fail(error)


def training(spec: ChildSpec) -> Mode:
    """Return what a training script's process does beside running the script."""
    return KeptTraining(spec)


class _NothingOfItsOwn:
    """Other workers' share of a checkpoint: rank 0 has it all."""

    def save(self, *, samples_seen: int, restart_count: int) -> dict[str, int]:
        """See `OwnState`."""
        return {}


def _state_of(thing: Any) -> Any:
    """Return the state of a kept thing; a sharded optimizer's is gathered on rank 0. Collective."""
    if isinstance(thing, torch.optim.Optimizer):
        consolidate(thing)
    return _plain(thing.state_dict())


def _plain(value: Any) -> Any:
    """Return a state with NumPy's numbers as Python's, which load without pickled code."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {key: _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return value


def rehearse_first_pass(model: DistributedDataParallel) -> None:
    """Have a model pass its first batch in training twice; nothing is left of the first time."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            handle.remove()
            _rehearse(model, args, kwargs)

    handle = model.register_forward_pre_hook(before, with_kwargs=True)


def _rehearse(
    model: DistributedDataParallel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    numbers, synchronizes = random_state(), model.require_backward_grad_sync
    for parameter, _ in gradients:
        parameter.grad = None
    model.require_backward_grad_sync = True
    # not the module itself, whose hooks would count another pass
    outputs = model.forward(*args, **kwargs)  # type: ignore[no-untyped-call] # torch's
    sums: list[Tensor] = [t.float().sum() for t in tensors_of(outputs) if t.requires_grad]
    if sums:
        torch.stack(sums).sum().backward()  # type: ignore[no-untyped-call] # torch's
    model.require_backward_grad_sync = synchronizes
    set_random_state(numbers)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
