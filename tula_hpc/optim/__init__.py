"""Gradient scaling for large batches: the wrapping optimizer, its gate, and observers."""

from tula_hpc.gradients.noise_scale import (
    NO_READING,
    CriticalBatch,
    NoiseReading,
    NoiseScale,
    gradient_square,
    noise_scale,
    noise_trace,
    square_at,
)
from tula_hpc.gradients.norms import squared_norm
from tula_hpc.gradients.reference_gradient import local_gradient, reference_gradient
from tula_hpc.gradients.small_batch_norms import LocalNorms, PartNorms, looks_at_whole_batch
from tula_hpc.optim.gate import Gate, Sensitivity, relative_change
from tula_hpc.optim.norm_ratio import norm_ratio
from tula_hpc.optim.observer import GradientObserver, NoObserver, ScaleHistogram, Seen, StepObserver
from tula_hpc.optim.optimizer import StaticScaleObserver, Statistics, TulaOptimizer
from tula_hpc.optim.scale_factors import (
    GradScale,
    Granularity,
    StaticScale,
    default_s_max,
    element_ratio,
)
from tula_hpc.optim.wrapper import STATE_KEY, WrappingOptimizer

__all__ = [
    "NO_READING",
    "STATE_KEY",
    "CriticalBatch",
    "Gate",
    "GradScale",
    "GradientObserver",
    "Granularity",
    "LocalNorms",
    "NoObserver",
    "NoiseReading",
    "NoiseScale",
    "PartNorms",
    "ScaleHistogram",
    "Seen",
    "Sensitivity",
    "StaticScale",
    "StaticScaleObserver",
    "Statistics",
    "StepObserver",
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
]
