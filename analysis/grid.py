"""All configurations of a search as columns: what `search.candidates` lists, for millions of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tula_hpc.config import ClusterSpec, SearchSpec, cluster_sizes

Integers = NDArray[np.int64]


class Grid(NamedTuple):
    """Configurations; columns of one length, ascending by nodes, then by local batch."""

    nodes: Integers
    workers_per_node: Integers
    local_batch: Integers

    @property
    def global_batch(self) -> Integers:
        """Samples per step over all workers."""
        return self.nodes * self.workers_per_node * self.local_batch

    def take(self, rows: NDArray[np.bool_]) -> Grid:
        """Those rows."""
        return Grid(*(column[rows] for column in self))

    def keys(self) -> Integers:
        """One number for each configuration, for comparing many at once."""
        return (self.nodes << 38) | (self.workers_per_node << 31) | self.local_batch


def candidate_grid(search: SearchSpec, cluster: ClusterSpec) -> Grid:
    """Every power of two as local batch whose global batch lies within the bounds, on every cluster size that fits."""
    sizes = np.array(sorted(cluster_sizes(search, cluster)), dtype=np.int64)
    powers = 2 ** np.arange(search.max_batch.bit_length(), dtype=np.int64)
    batches = sizes[:, None] * cluster.workers_per_node * powers
    size, power = np.nonzero((batches >= search.min_batch) & (batches <= search.max_batch))
    return Grid(sizes[size], np.full(size.shape, cluster.workers_per_node, dtype=np.int64), powers[power])
