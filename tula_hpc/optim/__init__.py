"""Gradient scaling for large batches: the wrapping optimizer, its sensitivity gate, and the reference gradient."""

from tula_hpc.optim.gradscale import GradScale, Granularity, StaticScale, default_s_max, element_ratio, tensor_ratio
from tula_hpc.optim.noise_scale import (
    NO_READING,
    NoiseReading,
    NoiseScale,
    gradient_square,
    noise_scale,
    noise_trace,
)
from tula_hpc.optim.optimizer import STATE_KEY, Statistics, TulaOptimizer
from tula_hpc.optim.reference import local_gradient, reference_gradient
from tula_hpc.optim.sensitivity import Sensitivity, relative_change, squared_norm

__all__ = [
    "NO_READING",
    "STATE_KEY",
    "GradScale",
    "Granularity",
    "NoiseReading",
    "NoiseScale",
    "Sensitivity",
    "StaticScale",
    "Statistics",
    "TulaOptimizer",
    "default_s_max",
    "element_ratio",
    "gradient_square",
    "local_gradient",
    "noise_scale",
    "noise_trace",
    "reference_gradient",
    "relative_change",
    "squared_norm",
    "tensor_ratio",
]
