"""Turn exceptions of the user's own code in a job into one sentence: whose code, where, which key.

The sentence is the last line of the job's log, and an `InputError`: the command ends, since another
job would fail in the same way. Errors that may not be the user's mistake are left as they are: lack
of memory, lost peers, a device or a file system that fails.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

from torch import nn

from tula_hpc.config import WorkloadSpec
from tula_hpc.ddp.device_errors import is_of_accelerator
from tula_hpc.errors import InputError, TulaError
from tula_hpc.launch.diagnosis import device_word, lost_a_peer
from tula_hpc.own_sources import is_own
from tula_hpc.user_code import describe_with_remedy, is_entry_point, is_mistake
from tula_hpc.workloads.criterion import CALLS, labels_without_score

_MODEL_KEY = "workload.model"
# torch's code that calls a module, even a module that runs no code of the user's own
_MODULE_CALLS = frozenset({nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__})


@contextlib.contextmanager
def explaining_own_mistakes(spec: WorkloadSpec) -> Iterator[None]:
    """Turn an exception of the user's own code in the block into one sentence.

    Raises:
        InputError: In place of such an exception.
    """
    try:
        yield
    except Exception as error:
        mistake = own_mistake(error, spec)
        if mistake is None:
            raise
        raise mistake from error


def own_mistake(error: Exception, spec: WorkloadSpec) -> InputError | None:
    """Return the error for the user if an exception comes from the user's own code, else None."""
    if isinstance(error, TulaError) or is_of_accelerator(error) or not is_mistake(error):
        return None
    if lost_a_peer(error) or device_word(str(error)):
        return None
    key = _key_of(error)
    named = {_MODEL_KEY: spec.model, "workload.loss": spec.loss, "workload.metric": spec.metric}
    name = named.get(key)
    if name is None or not is_entry_point(name):
        return None
    hint = next((labels_without_score(*call) for call in _calls(error)), "")
    return InputError(f"{name} failed: {describe_with_remedy(error)}{hint}", key=key)


def _key_of(error: Exception) -> str:
    """Return the key that names the function that raised; "" if that is not the user's."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    for code in codes:
        if code in CALLS:
            return CALLS[code]
    places = traceback.extract_tb(error.__traceback__)
    ran_model = any(code in _MODULE_CALLS for code in codes)
    if ran_model or any(is_own(place.filename) for place in places):
        return _MODEL_KEY
    return ""


def _calls(error: Exception) -> Iterator[tuple[Any, Any]]:
    """Yield the outputs and targets with which the user's loss or metric was called."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code in CALLS:
            yield frame.f_locals["outputs"], frame.f_locals["targets"]
