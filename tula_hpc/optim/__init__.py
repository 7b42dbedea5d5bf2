"""Gradient scaling for large batches: the wrapping optimizer, its sensitivity gate, and the reference gradient."""

from tula_hpc.optim.gradscale import GradScale, Granularity, StaticScale, default_s_max, element_ratio, tensor_ratio
from tula_hpc.optim.optimizer import STATE_KEY, Statistics, TulaOptimizer
from tula_hpc.optim.reference import reference_gradient
from tula_hpc.optim.sensitivity import Sensitivity, relative_change, squared_norm

__all__ = [
    "STATE_KEY",
    "GradScale",
    "Granularity",
    "Sensitivity",
    "StaticScale",
    "Statistics",
    "TulaOptimizer",
    "default_s_max",
    "element_ratio",
    "reference_gradient",
    "relative_change",
    "squared_norm",
    "tensor_ratio",
]
