"""Training scripts of the user's own: watched, measured, scaled and resumed from outside.

Three lines in a script give it an exact resume. Without tula_hpc around it they do nothing:

    import tula_hpc.attach as tula
    tula.keep(model=model, optimizer=optimizer, scheduler=scheduler)
    for epoch in tula.epochs(90):
        for inputs, targets in tula.batches(loader):
            ...
        tula.report(test_accuracy=accuracy)

With a framework it is one: `tula.trainer_callback()` among the callbacks of Hugging Face's Trainer,
`tula.lightning_callback()` among Lightning's, and for accelerate `tula.keep(accelerator=…)` in a
plain loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from tula_hpc.attach.train.keeping import Keeper

T = TypeVar("T")

# set before the script runs; None: it was started in another way
_around: Keeper | None = None
# what the script keeps; None: nothing
_kept: dict[str, Any] | None = None
# a framework keeps its whole training
_is_framework = False
# called as each of the epochs begins, in a profile
_at_epoch: Callable[[], None] | None = None


def be_around(around: Keeper) -> None:
    """Have the script's calls go to its runner."""
    global _around  # noqa: PLW0603 - a script's process has one
    _around = around


def tell_epochs(then: Callable[[], None]) -> None:
    """Call a function at the beginning of each of the script's epochs, where nothing is kept."""
    global _at_epoch  # noqa: PLW0603 - see above
    _at_epoch = then


def was_kept() -> bool:
    """Tell whether the script that runs here keeps its state."""
    return _kept is not None


def kept_things() -> dict[str, Any]:
    """Return what the script has named to be kept; empty where a framework keeps all."""
    return {} if _kept is None or _is_framework else _kept


def _note_kept(things: dict[str, Any], *, is_framework: bool = False) -> None:
    global _kept, _is_framework  # noqa: PLW0603 - see above
    _kept = {**(_kept or {}), **things}
    _is_framework = _is_framework or is_framework


def keep(**things: Any) -> None:
    """Keep things with `state_dict` and `load_state_dict`: model, optimizer, scheduler, averages.

    With accelerate, its `Accelerator` stands for all that it has prepared. Their states in a
    checkpoint are loaded here.
    """
    _note_kept(things)
    if _around is not None:
        _around.keep(things)


def epochs(count: int) -> Iterable[int]:
    """Return the epochs from 0 to `count`, from where the script stopped on."""
    around = _around
    if around is not None:
        return _Loop(lambda: around.epochs(count), range(count))
    then = _at_epoch
    if then is not None:
        return _Loop(lambda: _told(count, then), range(count))
    return range(count)


def _told(count: int, then: Callable[[], None]) -> Iterator[int]:
    for epoch in range(count):
        then()
        yield epoch


def batches(loader: Iterable[T]) -> Iterable[T]:
    """Return the batches of a loader, in an epoch that was interrupted only those that are left.

    Only one such loop is open at a time, and it belongs into one over `epochs`.
    """
    around = _around
    if around is None:
        return loader
    return _Loop(lambda: around.batches(loader), loader)


def numbered(loader: Iterable[T], start: int = 0) -> Iterable[tuple[int, T]]:
    """Return `batches` with their numbers in the epoch, as `enumerate` gives those of a whole one.

    `enumerate(tula.batches(loader))` would begin at 0 again where an interrupted epoch goes on.
    """
    around = _around
    if around is None:
        return enumerate(loader, start)

    def begin() -> Iterator[tuple[int, T]]:
        for batch in around.batches(loader):
            yield start + around.progress.batches, batch

    return _Loop(begin, loader)


def report(**scores: float) -> None:
    """Report test_accuracy, test_top5_accuracy, test_loss or train_loss of the present epoch."""
    if _around is not None:
        _around.report(scores)


def trainer_callback() -> Any:
    """Return a callback for Hugging Face's Trainer, which keeps its training and reports scores."""
    _note_kept({}, is_framework=True)
    from tula_hpc.attach.frameworks.huggingface import callback_for

    return callback_for(_around)


def lightning_callback() -> Any:
    """Return a callback for Lightning's Trainer, which keeps its training and reports scores."""
    _note_kept({}, is_framework=True)
    from tula_hpc.attach.frameworks.lightning_fit import callback_for

    return callback_for(_around)


class _Loop(Generic[T]):
    """Iterable with the length of another one, as progress bars ask for it."""

    def __init__(self, begin: Callable[[], Iterator[T]], whole: Any) -> None:
        self._begin, self._whole = begin, whole

    def __iter__(self) -> Iterator[T]:
        return self._begin()

    def __len__(self) -> int:
        return len(self._whole)
