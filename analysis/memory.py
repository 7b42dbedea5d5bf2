"""Give the memory model its public name."""

from tula_hpc.analysis.models.memory import MemoryModel

__all__ = ["MemoryModel"]
