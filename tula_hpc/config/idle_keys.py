"""Keys of [training] that were given and change nothing: a sweep may hold them, but whoever wrote them should know."""

from __future__ import annotations

from collections.abc import Iterator

from tula_hpc.config.ags import AgsOptions
from tula_hpc.config.sweep import SweepSpec
from tula_hpc.config.training import TrainingSpec

OF_METHODS = ("preset", *AgsOptions._fields, "s_max", "s_min", "static_scale")
# what each method makes use of; those that are not here, of nothing
USED = {
    "ags": {"preset", *AgsOptions._fields, "s_max", "s_min"},
    "static": {"static_scale", "delta", "gate", "smoothing", "scale_warmup_epochs", "exclude_norms", "apply"},
    "lars": {"lr_scaling"},
    "lamb": {"lr_scaling"},
}


def idle_keys(sweep: SweepSpec) -> Iterator[tuple[str, str]]:
    """Each such key with the reason; none of a study, whose columns can have another method each.

    One that has its default value is as good as left out.
    """
    training = sweep.training
    if sweep.study is not None:
        return
    for key in OF_METHODS:
        given = getattr(training, key) != type(training).model_fields[key].default
        why = _reason(training, key) if given else ""
        if why:
            yield key, why


def _reason(training: TrainingSpec, key: str) -> str:
    """Why a key changes nothing; empty if it does change something."""
    options = training.ags
    if key not in USED.get(training.method, ()):
        return f'method = "{training.method}" makes no use of it'
    if key == "delta" and options.gate == "none":
        return 'with gate = "none" every step is scaled, whatever it is; a gate is "paper", "smooth" or "smoothed"'
    if key in ("small_batch_shrink", "spike_guard") and training.method == "ags" and options.reference == "pass":
        return 'with reference = "pass" there are no norms at every step, which it needs'
    return ""
