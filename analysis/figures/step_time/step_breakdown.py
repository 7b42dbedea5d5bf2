"""Breakdown of a step into waiting for data, computing, the optimizer and the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from tula_hpc.analysis.figures import style
from tula_hpc.analysis.figures.drawing import CONFIGURATION_COLUMNS, Cell, Drawing, Missing, Table
from tula_hpc.analysis.models.data_loading import loader_decides
from tula_hpc.analysis.models.profiles import StepPartTimes, parts_of
from tula_hpc.analysis.run_contents import RunContents
from tula_hpc.formatting import format_duration, format_percent
from tula_hpc.records import Configuration

# height of a bar with its gap
ROW_IN = 0.17
# share of a step below which a part is not worth naming in the title
NOTABLE = 0.05
# a rest up to this multiple of the bare all-reduce may be just that: the two are timed separately
EXCHANGE = 1.25


PART_NAMES = ("data wait", "forward + backward", "optimizer", "rest (N > 1: synchronization)")
PART_COLOURS = (style.DATA, style.COMPUTE, style.OPTIMIZER, style.SYNC)
DATA, _, OPTIMIZER, REST = range(len(PART_NAMES))


class Bar(NamedTuple):
    """One profiled configuration."""

    configuration: Configuration
    parts: StepPartTimes
    step_s: float
    allreduce_s: float
    # a faster loader would help, and waiting for data is the largest part of the step
    loader_decides: bool

    def share(self, part: int) -> float:
        """Return the share of the step that one part takes."""
        return self.parts[part] / self.step_s

    @property
    def unhidden_s(self) -> float:
        """Time of the step if none of the all-reduce were hidden behind the backward pass."""
        return sum(self.parts) - self.parts.exposed_sync_s + self.allreduce_s


def draw_step_breakdown(run: RunContents) -> Drawing | Missing:
    """Draw the shares of a step per profiled configuration, as stacked bars."""
    bars = []
    for item in run.ok:
        if item.times is not None:
            spent = item.times.step_time_s, item.times.allreduce_time_s
            parts = parts_of(item.times)
            slow = loader_decides(item.times) and parts[DATA] == max(parts)
            bars.append(Bar(item.configuration, parts, *spent, slow))
    if not bars:
        return Missing("step_breakdown", "step breakdown", "no configuration has been measured yet")
    title = _breakdown_title(bars)
    keys = []
    for name, colour in zip(PART_NAMES, PART_COLOURS, strict=True):
        keys.append(style.Key(name, marker="s", colour=colour.light))
    exchanged = any(bar.allreduce_s for bar in bars)
    if exchanged:
        keys.append(style.Key("bare all-reduce, unhidden", marker="D", colour=style.INK.light))
    rows = _with_gaps(bars)
    with style.styled():
        figure, (axes,) = style.new_figure(title, 1.25 + ROW_IN * len(rows))
        _draw_bars(axes, rows, run.cluster_sizes)
        style.legend(axes, keys, left=-0.22)
    caption = _breakdown_caption(exchanged=exchanged)
    return Drawing("step_breakdown", title, caption, figure, _breakdown_table(bars))


def _breakdown_caption(*, exchanged: bool) -> str:
    text = (
        "One bar per profiled configuration, as shares of its step; the step's time is at the "
        "right. The wait for data is that of the timed steps. Forward and backward, optimizer and "
        "the bare all-reduce of the gradients are timed separately; the rest is what remains of "
        "the whole step: with several workers, mostly synchronization that is not hidden. "
    )
    if exchanged:
        text += (
            "The diamond shows where the step would end with the bare all-reduce in place of the "
            "rest: if none of it were hidden behind the backward pass, and nothing else held the "
            "step up. A diamond right of its bar's end shows how much is hidden; left of it, the "
            "step takes longer than its parts and the all-reduce together, for example because "
            "workers wait for the slowest. "
        )
    return (
        f"{text}Computation and optimizer are shortened if they took longer, timed separately, "
        "than the step leaves them."
    )


def _with_gaps(bars: Sequence[Bar]) -> list[Bar | None]:
    rows: list[Bar | None] = []
    for bar in bars:
        previous = rows[-1] if rows else None
        if previous is not None and previous.configuration.nodes != bar.configuration.nodes:
            rows.append(None)
        rows.append(bar)
    return rows


def _draw_bars(axes: Axes, rows: Sequence[Bar | None], sizes: list[int]) -> None:
    names = {}
    colours = []
    widest = 1.0
    for y, bar in enumerate(rows):
        if bar is not None:
            _draw_bar(axes, y, bar)
            widest = max(widest, bar.unhidden_s / bar.step_s)
            names[y] = bar.configuration.short
            colours.append(style.size_style(sizes, bar.configuration.nodes).colour)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, widest * 1.16)
    style.named_ticks(axes, [0.0, 0.25, 0.5, 0.75, 1.0], lambda share: f"{100 * share:.0f} %")
    axes.set_xlabel("share of a step's time")
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.spines["left"].set_visible(False)
    axes.set_yticks(list(names), list(names.values()))
    for label, colour in zip(axes.get_yticklabels(), colours, strict=True):
        label.set_color(colour)


def _draw_bar(axes: Axes, y: int, bar: Bar) -> None:
    left = 0.0
    for seconds, colour in zip(bar.parts, PART_COLOURS, strict=True):
        axes.barh(y, seconds / bar.step_s, left=left, height=0.74, color=colour.light, linewidth=0)
        left += seconds / bar.step_s
    if bar.allreduce_s > 0:
        (diamond,) = axes.plot([bar.unhidden_s / bar.step_s], [y], "D", color=style.INK.light)
        diamond.set(markersize=4.2, markeredgecolor=style.PAPER.light, markeredgewidth=0.7)
    right = ("axes fraction", "data")
    time = format_duration(bar.step_s)
    axes.annotate(time, (1, y), xycoords=right, ha="right", va="center", size=8)


def _breakdown_title(bars: Sequence[Bar]) -> str:
    """Name the part, other than computing, with the largest share of any step.

    The rest of a single worker's step is not named, since it exchanges no gradients.
    """
    worst = max(bars, key=lambda bar: (bar.loader_decides, bar.share(DATA)))
    if worst.loader_decides:
        waiting = f"waiting for data takes {format_percent(worst.share(DATA))} of a step"
        return f"The data loader is the bottleneck: {waiting} at {worst.configuration.short}"
    named = []
    for bar in bars:
        named += [(DATA, bar), (OPTIMIZER, bar)]
        if bar.configuration.world_size > 1:
            named.append((REST, bar))
    part, worst = max(named, key=lambda item: item[1].share(item[0]))
    share = format_percent(worst.share(part))
    if worst.share(part) < NOTABLE:
        return _calm_title(bars, share)
    title = f"{_taken(part, worst, bars).format(share)} of a step at {worst.configuration.short}"
    if part == REST and worst.allreduce_s and not _is_exchange(worst, bars):
        title += f" (a bare all-reduce takes {format_percent(worst.allreduce_s / worst.step_s)})"
    others = [bar for other, bar in named if other == part]
    least = min(others, key=lambda bar: bar.share(part))
    if least.share(part) > 0.8 * worst.share(part):
        return title
    share = "hardly any"
    if least.share(part) >= 0.005:
        share = f"only {format_percent(least.share(part))}"
    return f"{title}, but {share} at {least.configuration.short}"


def _taken(part: int, bar: Bar, bars: Sequence[Bar]) -> str:
    """Return a part's title, with braces for its share; name the rest if its cause is known."""
    if part != REST:
        return "Waiting for data takes {}" if part == DATA else "The optimizer takes {}"
    if _is_exchange(bar, bars):
        return "Exchanging gradients takes {}"
    return "The rest besides data, computing and optimizer takes {}"


def _is_exchange(bar: Bar, bars: Sequence[Bar]) -> bool:
    """Tell whether the all-reduce explains the rest, and a single worker has no such rest."""
    alone = [other.share(REST) for other in bars if other.configuration.world_size == 1]
    explained = bar.parts.exposed_sync_s <= EXCHANGE * bar.allreduce_s
    return explained and max(alone, default=0.0) < bar.share(REST) / 2


def _calm_title(bars: Sequence[Bar], share: str) -> str:
    """Return the title for steps of which no named part takes more than `share`."""
    if all(bar.share(REST) < NOTABLE for bar in bars):
        most = max(bar.share(part) for bar in bars for part in (DATA, OPTIMIZER, REST))
        return f"Computing fills every step: no other part takes more than {format_percent(most)}"
    several = any(bar.configuration.world_size > 1 for bar in bars)
    exchange = " nor exchanging gradients" if several else ""
    return f"Neither data nor the optimizer{exchange} takes more than {share} of a step"


def _breakdown_table(bars: Sequence[Bar]) -> Table:
    columns = (
        *CONFIGURATION_COLUMNS,
        "step_time_s",
        "data_wait_s",
        "forward_backward_s",
        "optimizer_s",
        "exposed_synchronization_s",
        "bare_allreduce_s",
        "data_wait_percent",
        "forward_backward_percent",
        "optimizer_percent",
        "exposed_synchronization_percent",
        "step_without_overlap_percent",
    )
    rows: list[tuple[Cell, ...]] = []
    for bar in bars:
        configuration = bar.configuration
        seconds = (bar.step_s, *bar.parts, bar.allreduce_s)
        shares = [100 * bar.share(part) for part in range(len(PART_NAMES))]
        unhidden = 100 * bar.unhidden_s / bar.step_s
        rows.append((*configuration, configuration.global_batch, *seconds, *shares, unhidden))
    return Table(columns, rows)
