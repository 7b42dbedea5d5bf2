"""Choose the configurations that a sweep measures next."""

from tula_hpc.analysis.search.adaptive import AdaptiveSearch

__all__ = ["AdaptiveSearch"]
