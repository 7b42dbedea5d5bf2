"""Checkpoint intervals and the time that interruptions add, for the plan and for training itself.

Seconds of training steps between two saves:

    T = max(min(τ(δ, M), `MOST_S`), δ / `MAX_SHARE`)

τ is the interval of Young and Daly, δ the cost of one save, M the mean time between two
interruptions that leave no time to save. At most `MOST_S` of work are lost, unless saving so often
would cost more than `MAX_SHARE` of the training: the bound on the cost takes precedence. Training
also saves at the end of an epoch, if the last save is at least δ / `MAX_SHARE` ago, or always if
the user has set T.

Preemptions are modeled as a Poisson process with mean time M between them. With a checkpoint of δ
seconds after every τ seconds of work and R seconds to restart, work of T_s seconds takes on average
(J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
Generation Computer Systems 22, 2006, equations 20 and 37)

    T = M · e^(R/M) · (e^((τ + δ)/M) − 1) · T_s / τ
    τ = √(2δM) · (1 + √(δ/2M)/3 + (δ/2M)/9) − δ     for δ < 2M, else M

The first term of τ alone is the older estimate of J. W. Young (Communications of the ACM 17, 1974).
A job of N nodes ends when the first of its nodes is preempted: if M is known per node, the job has
M/N. This T leaves out waiting for new nodes, which is not paid for, and the first start of the job,
which `under_time_limit` adds.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum, auto
from typing import NamedTuple

import numpy as np

from tula_hpc.analysis.costs.spread import MOMENT_S, Array
from tula_hpc.config import PricingSpec, WorkloadSpec
from tula_hpc.formatting import format_duration
from tula_hpc.records import CREDIBLE_S, Event, RunHistory

# training checks about once a second whether to save; a shorter interval gains nothing
MIN_INTERVAL_S = 10.0
# as the key training.checkpoint_minutes says
MOST_S = 300.0
# largest share of the training time that saving may take
MAX_SHARE = 0.03


def best_interval_s(write_s: float, between_s: Array) -> Array:
    """Return τ, seconds of work between checkpoints, for δ and M (Daly, equation 37)."""
    ratio = write_s / (2.0 * between_s)
    first_order = np.sqrt(2.0 * write_s * between_s)
    higher_order = first_order * (1.0 + np.sqrt(ratio) / 3.0 + ratio / 9.0) - write_s
    return np.maximum(np.where(ratio < 1.0, higher_order, between_s), MIN_INTERVAL_S)


def expected_time_s(
    work_s: Array, interval_s: Array, between_s: Array, *, write_s: float, restart_s: float
) -> Array:
    """Return the expected seconds of work with preemptions (Daly, equation 20).

    The result is infinite where preemptions leave no progress. Work shorter than an interval is one
    segment, with the same fraction of a checkpoint as of the interval: checkpoints then cost the
    same share of all work, as in `pricing.bill`. In the module's letters: work T_s, interval τ,
    between M, write δ, restart R.
    """
    segment_s = np.where(work_s > 0.0, np.minimum(interval_s, work_s), interval_s)
    saved_s = segment_s * (1.0 + write_s / interval_s)
    with np.errstate(over="ignore"):
        segment = between_s * np.exp(restart_s / between_s) * np.expm1(saved_s / between_s)
        return np.asarray(segment * (work_s / segment_s))


class Resume(StrEnum):
    """Point from which a training continues after an interruption."""

    # the last checkpoint that tula_hpc wrote
    CHECKPOINT = auto()
    # the script's own checkpoint, assumed to be saved at the end of each epoch
    EPOCH = auto()
    # the beginning of the training
    NOTHING = auto()


def resume_of(work: WorkloadSpec, kept: bool) -> Resume:
    """Return from where a workload continues; `kept`: a script was seen to keep its exact state."""
    if kept or not work.is_script:
        return Resume.CHECKPOINT
    return Resume.EPOCH if work.goes_on else Resume.NOTHING


def measured_save_s(events: Iterable[Event]) -> float | None:
    """Return δ, the cost of the latest save that a training of the run timed; None without any."""
    costs = RunHistory(events).save_costs()
    known = [(time, cost_s) for time, cost_s in costs if 0.0 <= cost_s < CREDIBLE_S]
    return max(known)[1] if known else None


def describe(save_s: float | None, pricing: PricingSpec, resume: Resume = Resume.CHECKPOINT) -> str:
    """Return a sentence on the cost of a save and its source."""
    if resume is Resume.NOTHING:
        return "the script saves nothing to resume from, so that no time for saving is expected"
    if resume is Resume.EPOCH:
        saving = "the time outside its steps includes saving"
        if save_s is None:
            saving = "each save costs pricing.checkpoint_write_s"
        return (
            "after an interruption the script resumes from its own checkpoint, as far as is "
            f"known from the end of an epoch; {saving}"
        )
    if save_s is not None:
        cost = format_duration(save_s)
        return f"a checkpoint costs {cost} of training, as a training of this run measured"
    cost = format_duration(pricing.save_s)
    return (
        f"a checkpoint is assumed to cost {cost} of training (pricing.checkpoint_write_s), "
        "until a training of this run has measured it"
    )


def interval_s(cost_s: float, between_s: Array) -> Array:
    """Return T, seconds of training steps between two saves, for δ and M (module's equation)."""
    bounded_s = np.minimum(best_interval_s(cost_s, between_s), MOST_S)
    return np.maximum(bounded_s, least_interval_s(cost_s))


def least_interval_s(cost_s: float) -> float:
    """Return the interval, seconds of training steps, at which saving takes `MAX_SHARE`."""
    return cost_s / MAX_SHARE


def with_epoch_ends_s(every_s: Array, epoch_s: Array, least_s: float) -> Array:
    """Return the mean seconds of training steps between saves, including those at ends of epochs.

    `every_s` is T > 0, `epoch_s` the seconds of an epoch's steps. The end of an epoch saves if the
    last save is at least `least_s` ago, and always if that is 0.
    """
    epoch_s = np.maximum(epoch_s, MOMENT_S)
    at_ends = epoch_s * np.maximum(np.ceil(least_s / epoch_s), 1.0)
    in_long_epochs = _in_long_epochs_s(every_s, epoch_s, least_s)
    between_s = np.where(epoch_s >= every_s, in_long_epochs, np.minimum(at_ends, every_s))
    return np.maximum(between_s, least_s)


def _in_long_epochs_s(every_s: Array, epoch_s: Array, least_s: float) -> Array:
    """Return the mean seconds of training steps between saves in epochs longer than T."""
    # more steps follow the last save of each epoch than of the one before, until its end saves
    whole = np.floor(epoch_s / every_s * (1.0 + 1e-9))
    rest_s = np.maximum(epoch_s - whole * every_s, 0.0)
    at_an_end = rest_s > 1e-9 * every_s
    until_save = np.ceil(least_s / np.where(at_an_end, rest_s, 1.0))
    epochs = np.where(at_an_end, np.maximum(until_save, 1.0), 1.0)
    saves = np.floor(epochs * epoch_s / every_s * (1.0 + 1e-9)) + at_an_end
    return np.asarray(epochs * epoch_s / np.maximum(saves, 1.0))


class Requeued(NamedTuple):
    """Expected time and requeues of a training under a time limit."""

    # infinite if the limit leaves no time for work
    time_s: Array
    requeues: Array


def under_time_limit(
    work_s: Array, limit_s: float, interval_s: Array, restart_s: float
) -> Requeued:
    """Return the expected time of a training that is requeued before each time limit.

    A job ends at the warning before the limit. The first job takes R to start. Each requeue repeats
    the start and the work since the last checkpoint, on average half an interval τ:

        requeues k = ⌈(T + R − L) / (L − R − τ/2)⌉ for T + R > L, else 0
        time       = T + R + k (R + τ/2)

    A training that receives the warning saves before it ends, and does not repeat the half
    interval. T is the work without interruptions, checkpoints included. L is the time from the
    start of a job to the warning: its time limit less `signal_delay_s`.
    """
    repeated = restart_s + interval_s / 2.0
    usable = limit_s - repeated
    needed_s = work_s + restart_s
    beyond = np.maximum(needed_s - limit_s, 0.0)
    possible = (usable > 0.0) | (beyond == 0.0)
    requeues = np.where(possible, np.ceil(beyond / np.where(usable > 0.0, usable, 1.0)), np.inf)
    return Requeued(needed_s + np.where(requeues > 0.0, requeues * repeated, 0.0), requeues)


def by_epochs_under_time_limit(
    work_s: Array, limit_s: float, epochs: Array | float, restart_s: float
) -> Requeued:
    """Return the expected time of a training that continues from the end of its last whole epoch.

    With E epochs of τ seconds, each job except the last completes m epochs:

        m = ⌊(L − R) / τ⌋,  requeues k = ⌈E / m⌉ − 1,  time = k L + R + (E − k m) τ

    If no epoch fits into a job, the training never ends. A training that starts over counts as one
    epoch. See `under_time_limit` for the letters.
    """
    # a batch beyond all samples has no step, and an epoch no work
    epoch_s = np.maximum(work_s / epochs, MOMENT_S)
    each = np.floor((limit_s - restart_s) / epoch_s * (1.0 + 1e-9))
    fits = work_s + restart_s <= limit_s
    requeues = np.where(fits, 0.0, np.ceil(epochs / np.maximum(each, 1.0)) - 1.0)
    time_s = requeues * limit_s + restart_s + (epochs - requeues * each) * epoch_s
    possible = fits | (each >= 1.0)
    return Requeued(np.where(possible, time_s, np.inf), np.where(possible, requeues, np.inf))
