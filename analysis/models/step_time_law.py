"""Equations of a training step's time, and their gradients; `FORMS` has the collectives' laws.

For N workers, local batch b, K nodes and r = N / K workers on each of them:

    t_step    = ‖(1 − share) × t_compute + ‖share × t_compute, t_sync‖₄ + overhead_s × g(N),
                 storage_s × N × b, loader_s × b‖₈
    t_compute = ‖compute_fixed_s + compute_per_sample_s × b, compute_floor_s‖₈
                × (1 + contention × (r − 1)) × (1 + straggling × log₂ N) × e^u(b)
    t_sync    = (sync_s × f(N) + latency_s × g(N) + sharing_s × f(N) × (r − 1)
                 + node_sync_s × f(r)) × e^v(K, r)
    ‖x, y‖ₚ   = (xᵖ + yᵖ)^(1/p)

For one worker t_step = ‖t_compute + alone_s, storage_s × b, loader_s × b‖₈. On one node only the
last term of t_sync, the collective inside a node, is left. Where no collective is given its shape
is fitted:

    f(N) = ½ (2 (1 − 1/N))^ring_share × (K / 2)^congestion

which is constant from two workers on for ring_share = 0 (double tree), a ring for 1, and grows
further with congestion. Inside a node, whose workers share no network, there is no congestion.

- Sum and shapes f, g: S. Tyagi, F. Wang, "Tula" (parameter server, ring, tree); bandwidth and
  latency terms: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
  Operations in MPICH" (2005); double binary trees, as NCCL uses between nodes, with a bandwidth
  term that does not grow and logarithmic latency: P. Sanders, J. Speck, J. Träff, "Two-Tree
  Algorithms for Full Bandwidth Broadcast, Reduction and Scan" (2009). NCCL switches between rings
  and trees, and networks slow down with the nodes that share them, hence the fitted shape.
- Overlap: gradients are reduced while the backward pass still runs. The norm is a smooth maximum
  (A. Qiao et al., "Pollux", OSDI 2021, for the whole of t_compute); `overlap_share` is the part of
  the computation that can hide synchronization.
- The floor: below some batch a device is no faster.
- `overhead_s`: cost, in addition to the bare collective, of each message that has to wait for
  another worker (which may still compute, or be put to sleep by its scheduler); g(N) such messages
  follow one another, log₂ N if the form has no g.
- `alone_s`: cost of a single worker's step in addition to its computation. AGS may take its batch
  in two micro-batches, to get the gradient of a small batch that several workers have anyway; then
  the fixed cost of a pass is paid twice.
- `storage_s`: time per sample of storage that all nodes share. The total grows with N × b, and the
  step waits if that takes longer than everything else.
- `loader_s`: time per sample of a worker's loader processes, which load ahead while the step runs.
- `straggling`: all wait for the slowest of N workers, which is slower the more there are (the mean
  of the largest of N exponentially distributed delays grows as log N). It also covers nodes that
  share more than their network.
- u and v: departures of a measured batch or cluster size from the law, some percent in practice
  (the kernels that suit a batch, the switch that joins these nodes). They are shrunk towards 0, see
  `step_time_fit`; u is interpolated over log b between the measured batches, v is 0 for cluster
  sizes that were not measured.

Limits: one model, precision and kind of hardware; b and N positive; t in seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tula_hpc.analysis.models.regression import Array

# exponent 2² = 4 (Pollux's γ): steps of GPU clusters fit best, and about as well, with 3 to 10
OVERLAP_NORM = 2
# exponent 2³ = 8
FLOOR_NORM = 3
DATA_NORM = 3
# keeps the norms' gradients finite where both parts are 0
TINY_S = 1e-12


class Collective(NamedTuple):
    """Shapes of a collective's time over the number of workers, 0 for one worker."""

    # f(N): time to move the bytes, in units of sync_s
    bandwidth: Callable[[Array], Array]
    # g(N): number of successive messages, each of latency_s; None: the form has no such term
    latency: Callable[[Array], Array] | None
    # the shape is fitted: f is raised to ring_share, and grows with congestion
    fitted: bool = False


def _several(workers: Array) -> Array:
    return np.where(workers > 1.0, 1.0, 0.0)


# a new form also goes into `FormName` of config/search.py, its comment in sweeps/example.toml, and
# `FORM_NAMES` of the tests
FORMS: dict[str, Collective] = {
    "ring": Collective(lambda workers: 1.0 - 1.0 / workers, lambda workers: workers - 1.0),
    "double_tree": Collective(_several, np.log2),
    # bytes and messages both grow with the depth
    "tree": Collective(np.log2, None),
    "parameter_server": Collective(lambda workers: _several(workers) * workers, None),
    "reduce_scatter_all_gather": Collective(lambda workers: 2.0 * (1.0 - 1.0 / workers), np.log2),
}
# collectives if no form is given: NCCL sends small messages through trees, gloo around a ring;
# another backend needs beliefs, too (`BELIEFS` in `step_time_fit.py`)
FITTED: dict[str, Collective] = {
    "nccl": FORMS["ring"]._replace(latency=np.log2, fitted=True),
    "gloo": FORMS["ring"]._replace(fitted=True),
}
# the paper's ring: bandwidth alone
PAPER = FORMS["ring"]._replace(latency=None)
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
    "ring_share",
    "congestion",
    "storage_s",
    "loader_s",
)
FIXED, PER_SAMPLE, FLOOR, CONTENTION = range(4)
SYNC, LATENCY, SHARING, NODE_SYNC, OVERHEAD, OVERLAP, ALONE, STRAGGLING = range(4, 12)
RING_SHARE, CONGESTION, STORAGE, LOADER = range(12, len(NAMES))
# kinds of rows: a whole step, the step without synchronization, the bare all-reduce
STEP, COMPUTE, ALLREDUCE = 0, 1, 2


class Rows(NamedTuple):
    """Observations of the three kinds in columns, or points to predict."""

    kind: NDArray[np.int_]
    nodes: Array
    per_node: Array
    batch: Array
    seconds: Array

    @property
    def workers(self) -> Array:
        """N, of each row."""
        return self.nodes * self.per_node

    def only(self, chosen: NDArray[np.bool_] | NDArray[np.intp]) -> Rows:
        """Select rows by mask or index."""
        return Rows._make(column[chosen] for column in self)


class Knots(NamedTuple):
    """Local batches, and cluster sizes of several workers, at which departures are fitted."""

    # (i,), ascending
    batches: Array
    # (j, 2), nodes and workers per node
    sizes: Array

    def weights(self, rows: Rows) -> tuple[Array, Array]:
        """Return each departure's weight: (n, i), interpolated over log b, and (n, j), 0 or 1."""
        same_nodes = rows.nodes[:, None] == self.sizes[:, 0]
        same_per_node = rows.per_node[:, None] == self.sizes[:, 1]
        at_sizes = np.where(same_nodes & same_per_node, 1.0, 0.0)
        count = len(self.batches)
        if count == 0:
            return np.zeros((len(rows.batch), 0)), at_sizes
        position = np.interp(np.log(rows.batch), np.log(self.batches), np.arange(count))
        distance = np.abs(position[:, None] - np.arange(count))
        return np.asarray(np.maximum(0.0, 1.0 - distance)), at_sizes

    def known_batches(self, batch: Array, at_batches: Array) -> Array:
        """Return the share of each batch's departure (n,) that those at the knots determine.

        It is the sum of the squared weights `at_batches`. Beyond the measured batches, where a
        departure is that of the last one, it falls to 0 within an octave: other batches may use
        other kernels.
        """
        known: Array = np.sum(at_batches**2, axis=1)
        if not len(self.batches):
            return known
        beyond = np.maximum(batch / self.batches[-1], self.batches[0] / batch)
        return np.asarray(known * np.clip(1.0 - np.log2(beyond), 0.0, 1.0) ** 2)


class Linearization(NamedTuple):
    """Predictions of the law at some rows (n,), with derivatives."""

    seconds: Array
    # (n, p), by the coefficients, then u, then v, at the knots
    gradients: Array
    # derivative by the row's own u
    by_batch_effect: Array
    # derivative by the row's own v
    by_size_effect: Array
    # derivative by the logarithm of storage_s
    by_storage_effect: Array


class Law(NamedTuple):
    """One form of the equations; its coefficients are `NAMES`, then u at the knots, then v."""

    form: Collective
    knots: Knots
    # add computation and synchronization, as the paper does, instead of taking their norm
    additive: bool = False

    @property
    def coefficients(self) -> int:
        """Number of coefficients, p."""
        return len(NAMES) + len(self.knots.batches) + len(self.knots.sizes)

    def seconds(self, coefficients: Array, rows: Rows) -> Array:
        """Predict (..., n) from coefficients (..., p), without gradients: fast for many models."""
        # each (..., 1)
        coefficient = np.moveaxis(coefficients, -1, 0)[..., None]
        u, v = self._effects(coefficients, rows)
        line, contended, late = _compute_parts(coefficient, rows)
        compute = _total(line, coefficient[FLOOR], FLOOR_NORM) * (np.exp(u) * contended * late)
        columns, _ = self._sync_columns(coefficients, rows, v)
        sync = (columns @ coefficients[..., SYNC : NODE_SYNC + 1, None])[..., 0]
        step = compute + sync
        if not self.additive:
            share = coefficient[OVERLAP]
            step = (1.0 - share) * compute + _total(share * compute, sync, OVERLAP_NORM)
        joined = _measured(rows, step, compute, sync)
        waits, alone = _waits(self.form, rows), _is_alone(rows)
        seconds = joined + (waits * coefficient[OVERHEAD] + alone * coefficient[ALONE])
        of_storage, of_loader = _loaded_samples(rows)
        seconds = _total(seconds, coefficient[STORAGE] * of_storage, DATA_NORM)
        return _total(seconds, coefficient[LOADER] * of_loader, DATA_NORM)

    def evaluate(self, coefficients: Array, rows: Rows) -> Linearization:
        """Predict with gradients."""
        u, v = self._effects(coefficients, rows)
        compute, of_compute = self._compute(coefficients, rows, u)
        sync, of_sync, of_shape = self._sync(coefficients, rows, v)
        share = coefficients[OVERLAP]
        joined, by_compute, by_sync, by_share = self._join(share, compute, sync, rows)
        waits, alone = _waits(self.form, rows), _is_alone(rows)
        seconds = joined + (waits * coefficients[OVERHEAD] + alone * coefficients[ALONE])
        read, loaded = _loaded_samples(rows)
        seconds, by_step, by_storage = _norm(seconds, coefficients[STORAGE] * read, DATA_NORM)
        seconds, by_rest, by_loader = _norm(seconds, coefficients[LOADER] * loaded, DATA_NORM)
        by_step *= by_rest
        by_storage *= by_rest
        by_compute, by_sync, by_share, waits, alone = (
            each * by_step for each in (by_compute, by_sync, by_share, waits, alone)
        )
        by_u = by_compute * compute
        by_v = by_sync * sync
        at_batches, at_sizes = self.knots.weights(rows)
        blocks = [
            by_compute[:, None] * of_compute[:, :-1],
            by_sync[:, None] * of_sync,
            waits[:, None],
            by_share[:, None],
            alone[:, None],
            by_compute[:, None] * of_compute[:, -1:],
            by_sync[:, None] * of_shape,
            (by_storage * read)[:, None],
            (by_loader * loaded)[:, None],
            by_u[:, None] * at_batches,
            by_v[:, None] * at_sizes,
        ]
        of_storage = by_storage * read * coefficients[STORAGE]
        return Linearization(seconds, np.concatenate(blocks, axis=1), by_u, by_v, of_storage)

    def design(self, rows: Rows) -> Array:
        """Return the gradients (n, p) of the plain sum; 0 for terms that the sum lacks."""
        is_allreduce = np.where(rows.kind == ALLREDUCE, 1.0, 0.0)
        has_compute = 1.0 - is_allreduce
        has_sync = np.maximum(_is_together(rows), is_allreduce)
        columns = np.zeros((len(rows.batch), self.coefficients))
        columns[:, FIXED] = has_compute
        columns[:, PER_SAMPLE] = has_compute * rows.batch
        columns[:, SYNC : NODE_SYNC + 1] = has_sync[:, None] * _sync_columns(self.form, rows)
        columns[:, OVERHEAD] = _waits(self.form, rows)
        columns[:, ALONE] = _is_alone(rows)
        return columns

    def _effects(self, coefficients: Array, rows: Rows) -> tuple[Array | float, Array | float]:
        """Return the departures u and v at some rows."""
        batches, sizes = self.knots
        first_size = len(NAMES) + len(batches)
        u: Array | float = 0.0
        if len(batches):
            at = np.log(rows.batch)
            knots = np.log(batches)
            models = coefficients[..., len(NAMES) : first_size].reshape(-1, len(batches))
            found = np.array([np.interp(at, knots, of_batches) for of_batches in models])
            u = found.reshape(*coefficients.shape[:-1], len(at))
        v: Array | float = 0.0
        for place, (nodes, per_node) in enumerate(sizes, first_size):
            is_there = (rows.nodes == nodes) & (rows.per_node == per_node)
            v = np.where(is_there, coefficients[..., place, None], v)
        return u, v

    def _compute(self, coefficients: Array, rows: Rows, u: Array | float) -> tuple[Array, Array]:
        """Return t_compute, and its gradient (n, 5) in the order of the columns below."""
        line, contended, late = _compute_parts(coefficients, rows)
        base, by_line, by_floor = _norm(line, coefficients[FLOOR], FLOOR_NORM)
        factor = np.exp(u) * contended * late
        of_line = factor * by_line
        columns = [
            of_line,
            of_line * rows.batch,
            factor * by_floor,
            base * np.exp(u) * late * (rows.per_node - 1.0),
            base * np.exp(u) * contended * np.log2(rows.workers),
        ]
        return base * factor, np.stack(columns, axis=1)

    def _sync(
        self, coefficients: Array, rows: Rows, v: Array | float
    ) -> tuple[Array, Array, Array]:
        """Return t_sync and its gradients.

        These are (n, 4) by sync, latency, sharing, node sync, and (n, 2) by ring share, congestion.
        """
        columns, logarithms = self._sync_columns(coefficients, rows, v)
        linear = coefficients[SYNC : NODE_SYNC + 1]
        of_shape = np.zeros((len(rows.batch), 2))
        if logarithms is not None:
            between, inside = logarithms
            of_shape = (columns[:, [0, 2]] @ linear[[0, 2]])[:, None] * between
            of_shape[:, 0] += columns[:, 3] * linear[3] * inside
        return columns @ linear, columns, of_shape

    def _sync_columns(
        self, coefficients: Array, rows: Rows, v: Array | float
    ) -> tuple[Array, tuple[Array, Array] | None]:
        """Return t_sync (..., n, 4) for one unit of each of its coefficients.

        The second result is `_shape_logarithms`, or None if the shape is not fitted.
        """
        factor = np.broadcast_to(np.exp(v), (*coefficients.shape[:-1], len(rows.batch)))
        columns: Array = _sync_columns(self.form, rows) * factor[..., None]
        if not self.form.fitted:
            return columns, None
        shape = coefficients[..., RING_SHARE : CONGESTION + 1, None]
        between, inside = _shape_logarithms(rows)
        columns[..., [0, 2]] *= np.exp(between @ shape - between[:, :1])
        columns[..., 3] *= np.exp(inside * (shape[..., 0, :] - 1.0))
        return columns, (between, inside)

    def _join(
        self, share: float, compute: Array, sync: Array, rows: Rows
    ) -> tuple[Array, Array, Array, Array]:
        """Return `_measured`, and its derivatives by t_compute, t_sync and the share."""
        is_step = _is_together(rows) > 0.0
        has_sync = np.where(rows.kind == ALLREDUCE, 1.0, 0.0)
        if self.additive:
            share = 0.0
            norm = sync
            by_hidden = np.ones_like(sync)
            by_sync = np.ones_like(sync)
        else:
            norm, by_hidden, by_sync = _norm(share * compute, sync, OVERLAP_NORM)
        step = (1.0 - share) * compute + norm
        return (
            _measured(rows, step, compute, sync),
            np.where(is_step, 1.0 - share + share * by_hidden, 1.0 - has_sync),
            np.where(is_step, by_sync, has_sync),
            np.where(is_step, compute * (by_hidden - 1.0), 0.0),
        )


def _measured(rows: Rows, step: Array, compute: Array, sync: Array) -> Array:
    """Return the seconds (..., n) that each kind of row measures, without overhead."""
    apart = np.where(rows.kind == ALLREDUCE, sync, compute)
    return np.where(_is_together(rows) > 0.0, step, apart)


def _compute_parts(coefficient: Array, rows: Rows) -> tuple[Array, Array, Array]:
    """Return the line over the batch, and the factors of contention and straggling."""
    line = coefficient[FIXED] + coefficient[PER_SAMPLE] * rows.batch
    contended = 1.0 + coefficient[CONTENTION] * (rows.per_node - 1.0)
    return line, contended, 1.0 + coefficient[STRAGGLING] * np.log2(rows.workers)


def _is_together(rows: Rows) -> Array:
    """Return 1 for a whole step of several workers, else 0."""
    return np.where((rows.kind == STEP) & (rows.workers > 1.0), 1.0, 0.0)


def _is_alone(rows: Rows) -> Array:
    """Return 1 for a whole step of one worker, which pays alone_s, else 0."""
    return np.where((rows.kind == STEP) & (rows.workers == 1.0), 1.0, 0.0)


def _waits(form: Collective, rows: Rows) -> Array:
    """Return how often a step of several workers pays overhead_s: g(N); 0 for other rows."""
    rounds = np.log2 if form.latency is None else form.latency
    return np.asarray(_is_together(rows) * rounds(rows.workers))


def _loaded_samples(rows: Rows) -> tuple[Array, Array]:
    """Return N × b and b for whole steps, else 0."""
    each = np.where(rows.kind == STEP, rows.batch, 0.0)
    return rows.workers * each, each


def _shape_logarithms(rows: Rows) -> tuple[Array, Array]:
    """Return log f per unit of ring share and congestion (n, 2), in nodes per ring share (n,)."""
    of_congestion = np.log(np.maximum(rows.nodes, 2.0) / 2.0)
    between = np.stack([_ring_logarithm(rows.workers), of_congestion], axis=1)
    return between, _ring_logarithm(rows.per_node)


def _ring_logarithm(workers: Array) -> Array:
    return np.asarray(np.log(2.0 * (1.0 - 1.0 / np.maximum(workers, 2.0))))


def _sync_columns(form: Collective, rows: Rows) -> Array:
    """Return t_sync (n, 4) for one unit of sync_s, latency_s, sharing_s and node_sync_s each."""
    bandwidth = _several(rows.nodes) * form.bandwidth(rows.workers)
    latency = np.zeros_like(rows.nodes)
    if form.latency is not None:
        latency = _several(rows.nodes) * form.latency(rows.workers)
    inside = form.bandwidth(rows.per_node)
    return np.stack([bandwidth, latency, bandwidth * (rows.per_node - 1.0), inside], axis=1)


def _norm(left: Array, right: Array | float, doublings: int) -> tuple[Array, Array, Array]:
    """Return (left^p + right^p)^(1/p), p = 2^doublings, and its derivatives by left and right."""
    total = _total(left, right, doublings)
    of_left = left / total
    of_right = right / total
    by_left = _power(of_left, doublings) / np.maximum(of_left, TINY_S)
    by_right = _power(of_right, doublings) / np.maximum(of_right, TINY_S)
    return total, by_left, by_right


def _total(left: Array, right: Array | float, doublings: int) -> Array:
    largest = np.maximum(np.maximum(left, right), TINY_S)
    root = _power(left / largest, doublings) + _power(right / largest, doublings)
    for _ in range(doublings):
        root = np.sqrt(root)
    return np.asarray(np.maximum(largest * root, TINY_S))


def _power(base: Array, doublings: int) -> Array:
    """Square repeatedly, which is much faster than a power."""
    for _ in range(doublings):
        base = base * base
    return base
