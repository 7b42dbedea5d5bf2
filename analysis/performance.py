"""Give the step-time model its public name."""

from tula_hpc.analysis.models.step_time import StepTimeModel

__all__ = ["StepTimeModel"]
