"""Identity of a workload: the model's structure, the user's own code, the data.

Measurements hold for one model and one kind of data. `Identity.difference` describes changes of
either in a sentence. If only the user's own code changed, a plan is not refused:
`changed_sources` names the files, for a warning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from tula_hpc.errors import InputError
from tula_hpc.formatting import in_short
from tula_hpc.records.base import Record

if TYPE_CHECKING:
    from tula_hpc.records.measurement import Measurement
    from tula_hpc.records.run_directory import RunDirectory

Count = Annotated[int, Field(ge=0, le=2**60)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{0,64}$")]
Name = Annotated[str, Field(max_length=1000)]


class Identity(Record):
    """Model that is trained, the code that defines it, and its data."""

    parameters: Count
    # of one worker; frozen parameters have no gradient
    gradient_bytes: Count
    # digest of the module tree: names, types, layers' settings, shapes and types of parameters
    structure: Digest
    train_samples: Count
    test_samples: Count
    # types and shapes of inputs and targets
    item: Name = ""
    # digest of each of the user's own files that define the workload, comments left out
    sources: dict[Name, Digest] = Field(default={}, max_length=1000)

    def is_same(self, other: Identity) -> bool:
        """Tell whether both have the same model, and the same kind and number of samples."""
        return self.model_copy(update={"sources": other.sources}) == other

    def changed_sources(self, before: Identity) -> list[str]:
        """Return the files whose code has changed, or that are new or gone, since `before`."""
        names = sorted(self.sources.keys() | before.sources.keys())
        return [name for name in names if self.sources.get(name) != before.sources.get(name)]

    def difference(self, before: Identity) -> str:
        """Describe the changes since `before`; "" if model and data are the same."""
        parts = list(_differences(self, before))
        changed = self.changed_sources(before)
        if parts and changed:
            parts.append(f"changed since then: {in_short(changed)}")
        return "; ".join(parts)


def _differences(now: Identity, before: Identity) -> Iterator[str]:
    if now.parameters != before.parameters:
        yield f"the model has {now.parameters:,} parameters now, {before.parameters:,} before"
    elif now.gradient_bytes != before.gradient_bytes:
        yield f"its gradient has {now.gradient_bytes:,} bytes now, {before.gradient_bytes:,} before"
    elif now.structure != before.structure:
        yield f"the model has other layers, though {now.parameters:,} parameters as before"
    if now.item != before.item:
        yield f"a sample is {now.item} now, {before.item} before"
    if now.train_samples != before.train_samples:
        yield f"{now.train_samples:,} training samples now, {before.train_samples:,} before"
    if now.test_samples != before.test_samples:
        yield f"{now.test_samples:,} test samples now, {before.test_samples:,} before"


def measured_identity(measurements: Iterable[Measurement]) -> Identity | None:
    """Return the identity in the newest measurement that has one; None if none has."""
    known = [m for m in measurements if m.identity is not None]
    newest = max(known, key=lambda m: m.finished_at, default=None)
    return newest.identity if newest else None


def refuse_another(run: RunDirectory, measured: Identity | None, now: Identity) -> None:
    """Refuse to plan or train a model or data that differ from those that the run has measured.

    Raises:
        InputError: They differ; the message names the differences and the remedy.
    """
    if measured is not None and (found := now.difference(measured)):
        message = f"what would be trained now is not what was measured: {found}"
        if now.changed_sources(measured):
            # the command may run in another folder than before
            message += f" (as they are in {Path.cwd()})"
        remedy = "Undo the change, or measure what is there now with another --run-dir."
        raise InputError(f"{message}. {remedy}", source=run.root)


def refuse_several(run: RunDirectory, measurements: Iterable[Measurement]) -> None:
    """Refuse to plan from measurements of different models or data.

    Raises:
        InputError: They differ; the message names the measurements and the remedy.
    """
    rows = list(measurements)
    newest = measured_identity(rows)
    if newest is None:
        return
    newer: list[Measurement] = []
    others: list[Measurement] = []
    for row in rows:
        if row.identity is not None:
            (newer if row.identity.is_same(newest) else others).append(row)
    if not others or others[0].identity is None:
        return
    where = in_short([str(m.configuration) for m in others])
    found = newest.difference(others[0].identity)
    since = in_short([str(m.configuration) for m in newer])
    message = (
        f"its measurements mix different models or data ({found}): {since} measured after this "
        f"change, {where} before it"
    )
    old, new = (in_short(list(map(str, run.files_of(each)))) for each in (others, newer))
    remedy = (
        f"Undo the change and delete {new}, or keep it and delete {old}, or measure it with another "
        "--run-dir."
    )
    raise InputError(f"{message}. {remedy}", source=run.root)
