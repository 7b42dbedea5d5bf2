"""A whole sweep file."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from tula_hpc.catalog import DATASETS
from tula_hpc.config.objective import ObjectiveSpec
from tula_hpc.config.search import SearchSpec
from tula_hpc.config.spec import Name, Spec
from tula_hpc.config.study import StudySpec
from tula_hpc.config.training import TrainingSpec
from tula_hpc.config.workload import WorkloadSpec

JOB_NAMES = "tula-"  # so begin the names of all jobs


class SweepSpec(Spec):
    """A whole sweep file."""

    name: Name
    workload: WorkloadSpec = WorkloadSpec()
    search: SearchSpec = SearchSpec()
    objective: ObjectiveSpec = ObjectiveSpec()
    training: TrainingSpec = TrainingSpec()
    study: StudySpec | None = None  # the sweep is a study then: nothing is profiled or planned

    @model_validator(mode="after")
    def _some_batch_is_left(self) -> SweepSpec:
        most, least = self.objective.max_global_batch, self.search.min_batch
        if most is not None and most < least:
            raise ValueError(f"objective.max_global_batch: {most} is below search.min_batch = {least}")
        return self

    @model_validator(mode="after")
    def _warm_up_ends(self) -> SweepSpec:
        warmup, epochs = self.training.warmup_epochs, self.workload.epochs
        if warmup is not None and warmup >= epochs:
            raise ValueError(f"training.warmup_epochs: {warmup:g} leaves nothing of workload.epochs = {epochs}")
        return self

    @model_validator(mode="after")
    def _method_fits(self) -> SweepSpec:
        method, work = self.training.method, self.workload
        needed = {"lars": "sgd", "lamb": "adamw"}.get(method, work.optimizer)
        if work.optimizer != needed:
            message = f'"{method}" is {needed} with a rate of its own for each layer'
            raise ValueError(f'training.method: {message}; expected workload.optimizer = "{needed}", and its lr')
        if method == "polo" and work.zero_stage:
            message = "every worker has an optimizer of its own"
            raise ValueError(f'training.method: in "polo" {message}; expected workload.zero_stage = 0')
        if self.training.layer_wise and method in ("ags", "static") and self.scale_applies_to == "gradient":
            message = "LARS and LAMB divide by the gradient's size"
            raise ValueError(f'training.layer_wise: {message}; expected apply = "update"')
        return self

    @model_validator(mode="after")
    def _study_compares_accuracies(self) -> SweepSpec:
        if self.study is not None:
            check_accuracy(self.workload, self.study)
        return self

    @property
    def job_name(self) -> str:
        """Base of the names of the sweep's jobs; it tells sweeps of one user apart in squeue."""
        return JOB_NAMES + self.name

    @property
    def scale_applies_to(self) -> Literal["gradient", "update"]:
        """`training.apply`; left out, the update where the optimizer divides by the gradient's size."""
        training = self.training
        cancels = self.workload.optimizer == "adamw" or training.has_trust_ratios
        left_out = training.apply is None and training.preset == "default"
        return "update" if training.method in ("ags", "static") and left_out and cancels else training.ags.apply

    @property
    def step_copies(self) -> int:
        """Parameters' worth of memory on top of a plain optimizer's step: those before it, where updates are scaled."""
        scales = self.training.method in ("ags", "static") and self.scale_applies_to == "update"
        return int(scales or self.training.method == "adascale")

    def updates_per_epoch(self, steps: int) -> float:
        """How often AGS updates its scale, on average: the first time after a whole interval, and not after the end.

        Args:
            steps: Of an epoch.
        """
        options, epochs = self.training.ags, self.workload.epochs
        if self.training.method != "ags" or options.reference == "free":
            return 0.0  # no update costs a pass
        interval = max(1, round(options.update_interval_epochs * steps))
        return max(0, steps * epochs - 1) // interval / epochs


def check_accuracy(work: WorkloadSpec, study: StudySpec) -> None:
    """A study compares accuracies: there must be one of the kind that it asks for.

    Raises:
        ValueError: Begins with the key.
    """
    if work.loss is not None and work.metric is None and work.dataset not in DATASETS:
        message = "a study compares accuracies, and own data with an own loss may know none"
        raise ValueError(f"workload.metric: {message}; give a function that says how much of a sample is right")
    if work.metric is not None and study.metric == "top5":
        raise ValueError('study.metric: "top5" is of labels, and workload.metric is given; expected "top1"')
