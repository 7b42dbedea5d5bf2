"""Figures of a run's report and of a study's report, in the order of their pages."""

from __future__ import annotations

from typing import NamedTuple

from tula_hpc.analysis.figures import gradients, memory, scaling_panels, timeline, training
from tula_hpc.analysis.figures.drawing import Drawing, Missing, attempt
from tula_hpc.analysis.figures.step_time import prediction_error, step_breakdown
from tula_hpc.analysis.figures.study import accuracy, results_table, scales
from tula_hpc.analysis.figures.time_and_cost import over_batch, pareto_front
from tula_hpc.analysis.node_scaling import NodeScaling, failed, no_scaling, node_scaling_of
from tula_hpc.analysis.run_contents import RunContents
from tula_hpc.analysis.study_results import StudyContents, StudyTable

# figures that a decision needs: time and cost of each candidate; the other figures explain
DECIDING = ("epoch_time", "pareto")
# figures by the name of their files without suffix, the deciding ones first
FIGURES = {
    "epoch_time": over_batch.draw_epoch_time,
    "pareto": pareto_front.draw_pareto,
    "training": training.draw_training,
    "timeline": timeline.draw_timeline,
    "progress": over_batch.draw_progress,
    "cost": over_batch.draw_cost,
    "strong_scaling": scaling_panels.draw_strong_scaling,
    "weak_scaling": scaling_panels.draw_weak_scaling,
    "memory": memory.draw_memory,
    "step_breakdown": step_breakdown.draw_step_breakdown,
    "prediction_error": prediction_error.draw_prediction_error,
    "memory_error": prediction_error.draw_memory_error,
    "gradient_scale": training.draw_gradient_scale,
    "variability": gradients.draw_variability,
    "gradient_norm": gradients.draw_gradient_norm,
}
STUDY_FIGURES = {
    "study_table": results_table.draw_study_table,
    "study_accuracy": accuracy.draw_study_accuracy,
    "study_epochs": accuracy.draw_study_epochs,
    "study_delta": accuracy.draw_study_delta,
    "study_scale": scales.draw_study_scale,
}
# figures that are not about the chosen partition alone
OF_ALL_NODES = (
    "pareto",
    "timeline",
    "training",
    "gradient_scale",
    "variability",
    "gradient_norm",
)


class Figures(NamedTuple):
    """Figures that could be drawn, those that lack data, and the scaling that two of them show."""

    drawings: list[Drawing]
    missing: list[Missing]
    scaling: NodeScaling | None = None

    def add(self, result: Drawing | Missing) -> None:
        """File a result; an optional figure without data is not mentioned."""
        if isinstance(result, Drawing):
            self.drawings.append(result)
        elif not result.optional:
            self.missing.append(result)


def draw_all(run: RunContents) -> Figures:
    """Draw every figure that has data, those outside `OF_ALL_NODES` for the chosen partition."""
    figures = Figures([], [], _scaling(run))
    run = run.in_figures()
    chosen_only = run.of_chosen_partition()
    partition = run.plan.chosen.partition if run.plan else ""
    for name, draw in FIGURES.items():
        if name in ("strong_scaling", "weak_scaling"):
            # both figures share one prediction, so that its models are fitted once
            result = attempt(name, draw, chosen_only, figures.scaling)
        else:
            result = attempt(name, draw, run if name in OF_ALL_NODES else chosen_only)
        if partition and name not in OF_ALL_NODES and isinstance(result, Drawing):
            shown = f"Shown is partition {partition}, the chosen one."
            result = result._replace(caption=f"{shown} {result.caption}")
        figures.add(result)
    return figures


def _scaling(run: RunContents) -> NodeScaling:
    try:
        return node_scaling_of(run)
    except Exception as error:  # noqa: BLE001 - all else of the report is worth having
        return no_scaling(failed(error))


def draw_study(contents: StudyContents, table: StudyTable) -> Figures:
    """Draw every figure of a study that has data."""
    figures = Figures([], [])
    for name, draw in STUDY_FIGURES.items():
        figures.add(attempt(name, draw, contents, table))
    return figures
