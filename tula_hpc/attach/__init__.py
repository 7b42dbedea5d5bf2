"""Watch, measure, scale and resume a user's own training script from outside.

Three lines in a script let it resume exactly. They do nothing where tula_hpc does not run it:

    import tula_hpc.attach as tula
    tula.keep(model=model, optimizer=optimizer, scheduler=scheduler)
    for epoch in tula.epochs(90):
        for inputs, targets in tula.batches(loader):
            ...
        tula.report(test_accuracy=accuracy)

With a framework one call is enough: `tula.trainer_callback()` among the callbacks of Hugging Face's
Trainer, or `tula.lightning_callback()` among Lightning's. With accelerate, a plain loop as above
keeps its `Accelerator`: `tula.keep(accelerator=…)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from tula_hpc.attach.train.keeping import Keeper

T = TypeVar("T")

# keeper of the script's training, set before the script runs; None: this is no training job
_around: Keeper | None = None
# objects that the script keeps, by name; None: it has not asked to keep anything
_kept: dict[str, Any] | None = None
# whether the script has a framework's callback, which keeps the whole training
_is_framework = False
# yields the epochs of a script that is trained or profiled here; None: it is neither
_epochs: Callable[[int], Iterator[int]] | None = None


def be_around(around: Keeper) -> None:
    """Pass the script's calls on to the keeper of its training."""
    global _around, _epochs  # noqa: PLW0603 - a script's process has one
    _around = around
    _epochs = around.epochs


def watch_epochs(then: Callable[[], None]) -> None:
    """Call `then` at the beginning of each of the script's epochs, where there is no keeper."""
    global _epochs  # noqa: PLW0603 - see above

    def begin(count: int) -> Iterator[int]:
        for epoch in range(count):
            then()
            yield epoch

    _epochs = begin


def was_kept() -> bool:
    """Tell whether the script that runs here keeps its state."""
    return _kept is not None


def kept_things() -> dict[str, Any]:
    """Return the objects that the script keeps, by name; none where a framework keeps all."""
    return {} if _kept is None or _is_framework else _kept


def _note_kept(objects: dict[str, Any], *, is_framework: bool = False) -> None:
    global _kept, _is_framework  # noqa: PLW0603 - see above
    _kept = {**(_kept or {}), **objects}
    _is_framework = _is_framework or is_framework


def keep(**objects: Any) -> None:
    """Keep objects with `state_dict` and `load_state_dict`: model, optimizer, scheduler, averages.

    With accelerate, pass its `Accelerator` in place of all that it has prepared. This call also
    loads their states from a checkpoint, if there is one.
    """
    _note_kept(objects)
    if _around is not None:
        _around.keep(objects)


def epochs(count: int) -> Iterable[int]:
    """Return the epochs 0 to `count` − 1; a resumed script begins with the interrupted one."""
    begin = _epochs
    if begin is None:
        return range(count)
    return _Loop(lambda: begin(count), range(count))


def batches(loader: Iterable[T]) -> Iterable[T]:
    """Return the batches of a loader; in an interrupted epoch, only those that are left.

    Loop over them within a loop over `epochs`, and with only one such inner loop at a time.
    """
    around = _around
    if around is None:
        return loader
    return _Loop(lambda: around.batches(loader), loader)


def numbered(loader: Iterable[T], start: int = 0) -> Iterable[tuple[int, T]]:
    """Return `batches` with their numbers in the epoch, as `enumerate` over a whole epoch does.

    In an interrupted epoch, `enumerate(tula.batches(loader))` would begin at 0 again.
    """
    around = _around
    if around is None:
        return enumerate(loader, start)

    def begin() -> Iterator[tuple[int, T]]:
        for batch in around.batches(loader):
            yield start + around.progress.batches, batch

    return _Loop(begin, loader)


def report(**scores: float) -> None:
    """Report test_accuracy, test_top5_accuracy, test_loss or train_loss of the current epoch."""
    if _around is not None:
        _around.report(scores)


def trainer_callback() -> Any:
    """Return a callback for Hugging Face's Trainer that keeps its training and reports scores."""
    _note_kept({}, is_framework=True)
    from tula_hpc.attach.frameworks.huggingface import callback_for

    return callback_for(_around)


def lightning_callback() -> Any:
    """Return a callback for Lightning's Trainer that keeps its training and reports scores."""
    _note_kept({}, is_framework=True)
    from tula_hpc.attach.frameworks.lightning_fit import callback_for

    return callback_for(_around)


class _Loop(Generic[T]):
    """Iterable that also has the length of another one, since progress bars ask for it."""

    def __init__(self, begin: Callable[[], Iterator[T]], whole: Any) -> None:
        self._begin, self._whole = begin, whole

    def __iter__(self) -> Iterator[T]:
        return self._begin()

    def __len__(self) -> int:
        return len(self._whole)
