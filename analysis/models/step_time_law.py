"""The equations of a training step's time, and their gradients.

For N workers, local batch b, K nodes and r = N / K workers on each of them:

    t_step    = (1 − share) × t_compute + ‖share × t_compute, t_sync‖₄ + overhead_s × g(N)
    t_compute = ‖compute_fixed_s + compute_per_sample_s × b, compute_floor_s‖₈
                × (1 + contention × (r − 1)) × (1 + straggling × log₂ N) × e^u(b)
    t_sync    = (sync_s × f(N) + latency_s × g(K) + sharing_s × f(N) × (r − 1) + node_sync_s × f(r)) × e^v(K, r)
    ‖x, y‖ₚ   = (xᵖ + yᵖ)^(1/p)

For one worker t_step = t_compute + alone_s. On one node only the last term of t_sync, the
collective inside a node, is left.

- Sum and shapes f, g: S. Tyagi, F. Wang, "Tula" (parameter server, ring, tree); bandwidth and
  latency terms: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
  Operations in MPICH" (2005); double binary trees, whose bandwidth term does not grow and whose
  latency is logarithmic: P. Sanders, J. Speck, J. Träff, "Two-Tree Algorithms for Full Bandwidth
  Broadcast, Reduction and Scan" (2009), what NCCL uses between nodes.
- Overlap: gradients are reduced while the backward pass still runs. The norm is a smooth maximum
  (A. Qiao et al., "Pollux", OSDI 2021, for the whole of t_compute); `overlap_share` is the part of
  the computation that can hide it.
- The floor: a device does not become faster below some batch.
- `overhead_s`: what a step pays beside the bare collective, for each message that has to wait for
  another worker (the next one may still compute, its scheduler may let it sleep); g(N) such
  messages follow one another, log₂ N where the form does not say.
- `alone_s`: what one worker alone pays beside the computation. Where AGS takes its batch in two
  parts, for the gradient of a small batch that several workers have anyway, all that a pass takes
  whatever the batch is paid twice.
- `straggling`: all wait for the slowest of N workers, which is the slower the more there are (the
  mean of the largest of N exponentially distributed delays grows as log N); likewise where nodes
  share more than their network.
- u and v: how far a measured batch or cluster size departs from the law, as real ones do by some
  percent (the kernels that suit a batch, the switch that joins these nodes). They are shrunk
  towards 0, see `performance`; u is interpolated over log b between the measured batches, v is 0
  for cluster sizes that were not measured.

Limits: one model, precision and kind of hardware; b and N positive; t in seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tula_hpc.analysis.models.regression import Array

# γ = 2² = 4: measured steps of GPU clusters want 3 to 10, and differ little between them
OVERLAP_NORM = 2
# 2³ = 8
FLOOR_NORM = 3
# keeps the norms' gradients finite where both parts are 0
TINY_S = 1e-12


class Collective(NamedTuple):
    """Shape of a collective's time over the number of workers; every shape is 0 for one worker."""

    # f(N): time to move the bytes, in units of sync_s
    bandwidth: Callable[[Array], Array]
    # g(K): number of messages after one another, in units of latency_s
    latency: Callable[[Array], Array] | None


def _any(workers: Array) -> Array:
    return np.where(workers > 1.0, 1.0, 0.0)


FORMS: dict[str, Collective] = {
    "ring": Collective(lambda workers: 1.0 - 1.0 / workers, lambda nodes: nodes - 1.0),
    "double_tree": Collective(_any, np.log2),
    # bytes and messages both grow with the depth
    "tree": Collective(np.log2, None),
    "parameter_server": Collective(lambda workers: _any(workers) * workers, None),
    "reduce_scatter_all_gather": Collective(lambda workers: 2.0 * (1.0 - 1.0 / workers), np.log2),
}
# the paper's ring: bandwidth alone
PAPER = Collective(lambda workers: 1.0 - 1.0 / workers, None)
NAMES = (
    "compute_fixed_s",
    "compute_per_sample_s",
    "compute_floor_s",
    "contention",
    "sync_s",
    "latency_s",
    "sharing_s",
    "node_sync_s",
    "overhead_s",
    "overlap_share",
    "alone_s",
    "straggling",
)
FIXED, PER_SAMPLE, FLOOR, CONTENTION = range(4)
SYNC, LATENCY, SHARING, NODE_SYNC, OVERHEAD, OVERLAP, ALONE, STRAGGLING = range(4, len(NAMES))
# kinds of rows: a whole step, the step without synchronization, the bare all-reduce
STEP, COMPUTE, ALLREDUCE = 0, 1, 2


class Rows(NamedTuple):
    """Observations of the three kinds under one another, or points to predict."""

    kind: NDArray[np.int_]
    nodes: Array
    per_node: Array
    batch: Array
    seconds: Array

    @property
    def workers(self) -> Array:
        """N."""
        return self.nodes * self.per_node

    def only(self, chosen: NDArray[np.bool_] | NDArray[np.intp]) -> Rows:
        """Some of the rows."""
        kind, nodes, per_node, batch, seconds = self
        return Rows(kind[chosen], nodes[chosen], per_node[chosen], batch[chosen], seconds[chosen])


class Knots(NamedTuple):
    """Where departures from the law are known: at local batches, and at cluster sizes of more than one worker."""

    # (i,), ascending
    batches: Array
    # (j, 2), nodes and workers per node
    sizes: Array

    def weights(self, rows: Rows) -> tuple[Array, Array]:
        """How much each departure counts in each row: (n, i), interpolated over log b, and (n, j), 0 or 1."""
        return _interpolation(self.batches, rows.batch), _matches(self.sizes, rows)


def _interpolation(knots: Array, batch: Array) -> Array:
    if len(knots) == 0:
        return np.zeros((len(batch), 0))
    place = np.interp(np.log(batch), np.log(knots), np.arange(len(knots)))
    return np.asarray(np.maximum(0.0, 1.0 - np.abs(place[:, None] - np.arange(len(knots)))))


def _matches(sizes: Array, rows: Rows) -> Array:
    return np.where(
        (rows.nodes[:, None] == sizes[:, 0]) & (rows.per_node[:, None] == sizes[:, 1]), 1.0, 0.0
    )


class Evaluation(NamedTuple):
    """What the law says at some rows."""

    # (n,)
    seconds: Array
    # (n, p), over the coefficients, then u, then v, at the knots
    gradients: Array
    # (n,), derivative by u there
    by_batch_effect: Array
    # (n,), derivative by v there
    by_size_effect: Array


class Law(NamedTuple):
    """One form of the equations, ready to be evaluated: coefficients as `NAMES`, then u at the knots, then v."""

    form: Collective
    knots: Knots
    # leave the norm out: the paper's sum
    additive: bool = False

    @property
    def coefficients(self) -> int:
        """How many there are, p."""
        return len(NAMES) + len(self.knots.batches) + len(self.knots.sizes)

    def seconds(self, coefficients: Array, rows: Rows) -> Array:
        """Predictions (n,) alone: fast, for very many rows."""
        u, v = self._effects(coefficients, rows)
        compute, sync = (
            self._compute(coefficients, rows, u)[0],
            self._sync(coefficients, rows, v)[0],
        )
        joined = self._join(coefficients[OVERLAP], compute, sync, rows)[0]
        waits, alone = self._beside(rows)
        return np.asarray(joined + (waits * coefficients[OVERHEAD] + alone * coefficients[ALONE]))

    def evaluate(self, coefficients: Array, rows: Rows) -> Evaluation:
        """Predictions and their gradients."""
        u, v = self._effects(coefficients, rows)
        compute, of_compute = self._compute(coefficients, rows, u)
        sync, of_sync = self._sync(coefficients, rows, v)
        joined, by_compute, by_sync, by_share = self._join(
            coefficients[OVERLAP], compute, sync, rows
        )
        waits, alone = self._beside(rows)
        by_u, by_v = by_compute * compute, by_sync * sync
        at_batches, at_sizes = self.knots.weights(rows)
        blocks = [
            by_compute[:, None] * of_compute[:, :-1],
            by_sync[:, None] * of_sync,
            waits[:, None],
            by_share[:, None],
            alone[:, None],
            by_compute[:, None] * of_compute[:, -1:],
            by_u[:, None] * at_batches,
            by_v[:, None] * at_sizes,
        ]
        seconds = joined + (waits * coefficients[OVERHEAD] + alone * coefficients[ALONE])
        return Evaluation(seconds, np.concatenate(blocks, axis=1), by_u, by_v)

    def design(self, rows: Rows) -> Array:
        """(n, p) gradients of the plain sum, without floor, contention, overlap and departures, which are 0."""
        sees_compute = np.where(rows.kind == ALLREDUCE, 0.0, 1.0)
        columns = np.zeros((len(rows.batch), self.coefficients))
        columns[:, FIXED], columns[:, PER_SAMPLE] = sees_compute, sees_compute * rows.batch
        sees_sync = np.maximum(_is_together(rows), np.where(rows.kind == ALLREDUCE, 1.0, 0.0))
        columns[:, SYNC : NODE_SYNC + 1] = sees_sync[:, None] * _sync_columns(self.form, rows)
        columns[:, OVERHEAD], columns[:, ALONE] = self._beside(rows)
        return columns

    def _beside(self, rows: Rows) -> tuple[Array, Array]:
        """(n,) each: how often a step pays overhead_s and alone_s, beside computation and synchronization."""
        return _waits(self.form, rows), _is_alone(rows)

    def _effects(self, coefficients: Array, rows: Rows) -> tuple[Array | float, Array | float]:
        """The departures u and v at some rows."""
        batches, sizes = self.knots
        of_batch = coefficients[len(NAMES) : len(NAMES) + len(batches)]
        u = np.interp(np.log(rows.batch), np.log(batches), of_batch) if len(batches) else 0.0
        v = np.zeros(len(rows.batch)) if len(sizes) else 0.0
        for (nodes, per_node), effect in zip(
            sizes, coefficients[len(NAMES) + len(batches) :], strict=True
        ):
            v = np.where((rows.nodes == nodes) & (rows.per_node == per_node), effect, v)
        return u, v

    def _compute(self, coefficients: Array, rows: Rows, u: Array | float) -> tuple[Array, Array]:
        """t_compute, and its gradient (n, 5) over fixed, per sample, floor, contention, straggling."""
        line = coefficients[FIXED] + coefficients[PER_SAMPLE] * rows.batch
        base, by_line, by_floor = _norm(line, coefficients[FLOOR], FLOOR_NORM)
        others, doublings = rows.per_node - 1.0, np.log2(rows.workers)
        crowded, late = (
            1.0 + coefficients[CONTENTION] * others,
            1.0 + coefficients[STRAGGLING] * doublings,
        )
        factor = np.exp(u) * crowded * late
        of_line = factor * by_line
        of_waits = base * np.exp(u) * late * others, base * np.exp(u) * crowded * doublings
        gradient = np.stack([of_line, of_line * rows.batch, factor * by_floor, *of_waits], axis=1)
        return base * factor, gradient

    def _sync(self, coefficients: Array, rows: Rows, v: Array | float) -> tuple[Array, Array]:
        """t_sync, and its gradient (n, 4) over sync, latency, sharing, node sync."""
        columns = (
            _sync_columns(self.form, rows) * np.broadcast_to(np.exp(v), rows.batch.shape)[:, None]
        )
        return columns @ coefficients[SYNC : NODE_SYNC + 1], columns

    def _join(
        self, share: float, compute: Array, sync: Array, rows: Rows
    ) -> tuple[Array, Array, Array, Array]:
        """What each kind of row sees of the parts, without overhead; derivatives by t_compute, t_sync and the share."""
        is_step = _is_together(rows) > 0.0
        sees_sync = np.where(rows.kind == ALLREDUCE, 1.0, 0.0)
        sees_compute = 1.0 - sees_sync
        if self.additive:
            norm, by_hidden, by_sync, share = sync, np.zeros_like(sync), np.ones_like(sync), 0.0
        else:
            norm, by_hidden, by_sync = _norm(share * compute, sync, OVERLAP_NORM)
        return (
            np.where(
                is_step, (1.0 - share) * compute + norm, sees_compute * compute + sees_sync * sync
            ),
            np.where(is_step, 1.0 - share + share * by_hidden, sees_compute),
            np.where(is_step, by_sync, sees_sync),
            np.where(is_step, compute * (by_hidden - 1.0), 0.0),
        )


def _is_together(rows: Rows) -> Array:
    """1 for a whole step of several workers, else 0."""
    return np.where((rows.kind == STEP) & (rows.workers > 1.0), 1.0, 0.0)


def _is_alone(rows: Rows) -> Array:
    """1 for a whole step of one worker, else 0."""
    return np.where((rows.kind == STEP) & (rows.workers == 1.0), 1.0, 0.0)


def _waits(form: Collective, rows: Rows) -> Array:
    """g(N) for a whole step of several workers, else 0: how often a worker waits for another one in a step."""
    rounds = np.log2 if form.latency is None else form.latency
    return np.asarray(_is_together(rows) * rounds(rows.workers))


def _sync_columns(form: Collective, rows: Rows) -> Array:
    """(n, 4): what one unit of sync_s, latency_s, sharing_s and node_sync_s adds to t_sync."""
    bandwidth = _any(rows.nodes) * form.bandwidth(rows.workers)
    latency = np.zeros_like(rows.nodes) if form.latency is None else form.latency(rows.nodes)
    return np.stack(
        [bandwidth, latency, bandwidth * (rows.per_node - 1.0), form.bandwidth(rows.per_node)],
        axis=1,
    )


def _norm(left: Array, right: Array | float, doublings: int) -> tuple[Array, Array, Array]:
    """(left^p + right^p)^(1/p) for p = 2^doublings, and its derivatives by left and right."""
    total = np.maximum(np.maximum(left, right), TINY_S)
    shares = left / total, right / total
    sums = sum(_power(share, doublings) for share in shares)
    for _ in range(doublings):
        sums = np.sqrt(sums)
    total = np.maximum(total * sums, TINY_S)
    by_left, by_right = (
        _power(share, doublings) / np.maximum(share, TINY_S)
        for share in (left / total, right / total)
    )
    return total, by_left, by_right


def _power(base: Array, doublings: int) -> Array:
    for _ in range(doublings):
        base = base * base
    return base
