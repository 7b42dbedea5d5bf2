"""Gradient scaling for large batches: the wrapping optimizer, its gate, and observers."""

from tula_hpc.optim.optimizer import TulaOptimizer

__all__ = ["TulaOptimizer"]
