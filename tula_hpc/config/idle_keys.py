"""Keys of training that were given and change nothing, or leave nothing to scale.

A sweep may hold them, but whoever wrote them should know.
"""

from __future__ import annotations

from collections.abc import Iterator

from tula_hpc.config.ags import AgsOptions
from tula_hpc.config.study_columns import study_column
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
    """Each such key, dotted, with the reason: of [training], and of a study's variants.

    One that has its default value is as good as left out. Of a study's [training] those alone that change nothing
    for any column.
    """
    if sweep.study is None:
        yield from ((f"training.{key}", why) for key, why in _idle(sweep.training).items())
        return
    of_columns = {name: _idle(study_column(sweep, name, check_paths=False).training) for name in sweep.study.columns}
    for key in OF_METHODS:
        whys = dict.fromkeys(of_column.get(key, "") for of_column in of_columns.values())
        if _is_given(sweep.training, key) and all(whys):
            yield f"training.{key}", "; ".join(whys)
    for name, values in sweep.study.variants.items():
        own = {key: why for key, why in of_columns[name].items() if f"training.{key}" in values}
        yield from ((f"study.variants.{name}.training.{key}", why) for key, why in own.items())


def _idle(training: TrainingSpec) -> dict[str, str]:
    """Keys of one training that have another value than their default and change nothing, each with the reason."""
    given = [key for key in OF_METHODS if _is_given(training, key)]
    return {key: why for key in given if (why := _reason(training, key))}


def _is_given(training: TrainingSpec, key: str) -> bool:
    return bool(getattr(training, key) != TrainingSpec.model_fields[key].default)


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


def idle_reference(sweep: SweepSpec) -> Iterator[tuple[str, str]]:
    """Each key that gives AGS a reference batch which is not below any batch of the sweep, dotted, with the reason."""
    study = sweep.study
    if study is None:
        if why := _not_below(sweep.training, sweep.search.max_batch, "search.max_batch"):
            yield "training.small_batch", why
        return
    found: dict[str, str] = {}
    for name in study.columns:
        training = study_column(sweep, name, check_paths=False).training
        own = f"study.variants.{name}." if "training.small_batch" in study.overrides(name) else ""
        if why := _not_below(training, max(study.batches), "the largest of study.batches"):
            found[f"{own}training.small_batch"] = why
    yield from found.items()


def _not_below(training: TrainingSpec, largest: int, key: str) -> str:
    """Why AGS's reference batch leaves nothing to scale; empty where it is below the largest batch, or not given."""
    given, shrink = training.small_batch, training.ags.small_batch_shrink
    if training.method != "ags" or given is None or given < largest:
        return ""
    unless = "" if shrink == 1.0 else " until training.small_batch_shrink brings it below the batch"
    return (
        f"{given} is not below {key}, {largest}: gradients are held against those of the same batch, "
        f"which scales nothing{unless}"
    )
