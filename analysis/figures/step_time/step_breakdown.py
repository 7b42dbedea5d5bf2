"""Breakdown of a step into waiting for data, computing, the optimizer and the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from tula_hpc.analysis.figures import style
from tula_hpc.analysis.figures.drawing import Drawing, Missing, Table, configuration_cells
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


PARTS = {
    "data wait": style.DATA,
    "forward + backward": style.COMPUTE,
    "optimizer": style.OPTIMIZER,
    "rest (N > 1: synchronization)": style.SYNC,
}
# names of the parts in the table
COLUMNS = ("data_wait", "forward_backward", "optimizer", "exposed_synchronization")
DATA, _, OPTIMIZER, REST = range(len(PARTS))


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
    is_script = run.sweep is not None and run.sweep.workload.is_script
    for item in run.ok:
        if item.times is not None:
            spent = item.times.step_time_s, item.times.allreduce_time_s
            parts = parts_of(item.times)
            slow = loader_decides(item.times) and parts[DATA] == max(parts) and not is_script
            bars.append(Bar(item.configuration, parts, *spent, slow))
    if not bars:
        return Missing("step_breakdown", "step breakdown", "no configuration has been measured yet")
    wait = "Waiting for data"
    if is_script:
        wait += ", or other work between steps,"
    title = _breakdown_title(bars, wait)
    keys = [style.Key(name, marker="s", colour=colour.light) for name, colour in PARTS.items()]
    exchanged = any(bar.allreduce_s for bar in bars)
    if exchanged:
        keys.append(style.Key("bare all-reduce, unhidden", marker="D", colour=style.INK.light))
    shown = sorted({bar.configuration.nodes for bar in bars})
    # a gap separates numbers of nodes
    rows = {place + shown.index(bar.configuration.nodes): bar for place, bar in enumerate(bars)}
    with style.new_figure(title, 1.25 + ROW_IN * (max(rows) + 1)) as (figure, (axes,)):
        _draw_bars(axes, rows, run.cluster_sizes)
        style.legend(axes, keys, left=-0.22)
    caption = _breakdown_caption(exchanged=exchanged, is_script=is_script)
    return Drawing("step_breakdown", title, caption, figure, _breakdown_table(bars))


def _breakdown_caption(*, exchanged: bool, is_script: bool) -> str:
    between = ""
    if is_script:
        between = ", with all else that the script does between them"
    text = (
        "One bar per profiled configuration, as shares of its step; the step's time is at the "
        f"right. The wait for data is that of the timed steps{between}. Forward and backward, "
        "optimizer and the bare all-reduce of the gradients are timed separately; the rest is "
        "what remains of the whole step: with several workers, mostly synchronization that is not "
        "hidden. "
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


def _draw_bars(axes: Axes, rows: Mapping[int, Bar], sizes: list[int]) -> None:
    for y, bar in rows.items():
        _draw_bar(axes, y, bar)
    axes.set_ylim(max(rows) + 0.6, -0.6)
    axes.set_xlim(0, 1.16 * max(1.0, *(bar.unhidden_s / bar.step_s for bar in rows.values())))
    style.named_ticks(axes, [0.0, 0.25, 0.5, 0.75, 1.0], lambda share: f"{100 * share:.0f} %")
    axes.set_xlabel("share of a step's time")
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.spines["left"].set_visible(False)
    axes.set_yticks(list(rows), [bar.configuration.short for bar in rows.values()])
    for label, bar in zip(axes.get_yticklabels(), rows.values(), strict=True):
        label.set_color(style.size_style(sizes, bar.configuration.nodes).colour)


def _draw_bar(axes: Axes, y: int, bar: Bar) -> None:
    left = 0.0
    for seconds, colour in zip(bar.parts, PARTS.values(), strict=True):
        axes.barh(y, seconds / bar.step_s, left=left, height=0.74, color=colour.light, linewidth=0)
        left += seconds / bar.step_s
    if bar.allreduce_s > 0:
        (diamond,) = axes.plot([bar.unhidden_s / bar.step_s], [y], "D", color=style.INK.light)
        diamond.set(markersize=4.2, markeredgecolor=style.PAPER.light, markeredgewidth=0.7)
    right = ("axes fraction", "data")
    time = format_duration(bar.step_s)
    axes.annotate(time, (1, y), xycoords=right, ha="right", va="center", size=8)


def _breakdown_title(bars: Sequence[Bar], wait: str) -> str:
    """Name the part, other than computing, with the largest share of any step.

    `wait` names the first part, waiting for data.
    """
    worst = max(bars, key=lambda bar: (bar.loader_decides, bar.share(DATA)))
    if worst.loader_decides:
        waiting = f"waiting for data takes {format_percent(worst.share(DATA))} of a step"
        return f"The data loader is the bottleneck: {waiting} at {worst.configuration.short}"
    named = []
    for bar in bars:
        named += [(DATA, bar), (OPTIMIZER, bar)]
        # a single worker exchanges no gradients
        if bar.configuration.world_size > 1:
            named.append((REST, bar))
    part, worst = max(named, key=lambda item: item[1].share(item[0]))
    share = format_percent(worst.share(part))
    if worst.share(part) < NOTABLE:
        return _calm_title(bars, share)
    name = wait if part == DATA else _named(part, worst, bars)
    title = f"{name} takes {share} of a step at {worst.configuration.short}"
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


def _named(part: int, bar: Bar, bars: Sequence[Bar]) -> str:
    """Return a part's name for the title; the rest is named by its cause if that is known."""
    if part == OPTIMIZER:
        return "The optimizer"
    if _is_exchange(bar, bars):
        return "Exchanging gradients"
    return "The rest besides data, computing and optimizer"


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
    rows = []
    for bar in bars:
        cells = configuration_cells(bar.configuration)
        cells["step_time_s"] = bar.step_s
        cells |= {f"{name}_s": seconds for name, seconds in zip(COLUMNS, bar.parts, strict=True)}
        cells["bare_allreduce_s"] = bar.allreduce_s
        cells |= {f"{name}_percent": 100 * bar.share(part) for part, name in enumerate(COLUMNS)}
        cells["step_without_overlap_percent"] = 100 * bar.unhidden_s / bar.step_s
        rows.append(cells)
    return Table.of(rows)
