"""Gradient scaling for large batches: the wrapping optimizer, its sensitivity gate, and the reference gradient."""

from tula_hpc.optim.critical_batch import CriticalBatch
from tula_hpc.optim.gradscale import GradScale, Granularity, StaticScale, default_s_max, element_ratio, tensor_ratio
from tula_hpc.optim.local_norms import LocalNorms
from tula_hpc.optim.noise_scale import (
    NO_READING,
    NoiseReading,
    NoiseScale,
    gradient_square,
    noise_scale,
    noise_trace,
    square_at,
)
from tula_hpc.optim.norm_ratio import norm_ratio
from tula_hpc.optim.norms import squared_norm
from tula_hpc.optim.observer import GradientObserver, Seen
from tula_hpc.optim.optimizer import Statistics, TulaOptimizer
from tula_hpc.optim.part_norms import PartNorms, looks_at_whole_batch
from tula_hpc.optim.reference import local_gradient, reference_gradient
from tula_hpc.optim.scale_histogram import ScaleHistogram
from tula_hpc.optim.sensitivity import Gate, Sensitivity, relative_change
from tula_hpc.optim.wrapping import STATE_KEY, WrappingOptimizer

__all__ = [
    "NO_READING",
    "STATE_KEY",
    "CriticalBatch",
    "Gate",
    "GradScale",
    "GradientObserver",
    "Granularity",
    "LocalNorms",
    "NoiseReading",
    "NoiseScale",
    "PartNorms",
    "ScaleHistogram",
    "Seen",
    "Sensitivity",
    "StaticScale",
    "Statistics",
    "TulaOptimizer",
    "WrappingOptimizer",
    "default_s_max",
    "element_ratio",
    "gradient_square",
    "local_gradient",
    "looks_at_whole_batch",
    "noise_scale",
    "noise_trace",
    "norm_ratio",
    "reference_gradient",
    "relative_change",
    "square_at",
    "squared_norm",
    "tensor_ratio",
]
