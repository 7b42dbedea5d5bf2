"""All figures of the report. This and its `figures_*` neighbours are the only users of matplotlib.

Figures of a study: the table, accuracy against batch, over epochs, against δ, and the scales that
were used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tula_hpc.analysis.figures.drawing import Drawing, Missing, attempt
from tula_hpc.analysis.figures.gradients import (
    draw_gradient_norm,
    draw_scale_density,
    draw_variability,
)
from tula_hpc.analysis.figures.memory import draw_memory
from tula_hpc.analysis.figures.step_time import (
    draw_computation,
    draw_prediction_error,
    draw_step_breakdown,
)
from tula_hpc.analysis.figures.study import (
    draw_study_accuracy,
    draw_study_delta,
    draw_study_epochs,
    draw_study_scale,
    draw_study_scale_elements,
    draw_study_table,
)
from tula_hpc.analysis.figures.time_and_cost import draw_cost, draw_epoch_time, draw_pareto
from tula_hpc.analysis.figures.training import draw_sensitivity, draw_training
from tula_hpc.analysis.run_contents import RunContents
from tula_hpc.analysis.study_results import StudyContents, StudyTable

# in the order of the report: file stem and what draws it
FIGURES = {
    "epoch_time": draw_epoch_time,
    "cost": draw_cost,
    "pareto": draw_pareto,
    "memory": draw_memory,
    "step_breakdown": draw_step_breakdown,
    "computation": draw_computation,
    "prediction_error": draw_prediction_error,
    "training": draw_training,
    "sensitivity": draw_sensitivity,
    "variability": draw_variability,
    "gradient_norm": draw_gradient_norm,
    "scale_density": draw_scale_density,
}
# those that the nodes of another partition would change
OF_NODES = ("epoch_time", "cost", "memory", "step_breakdown", "computation", "prediction_error")


class Figures(NamedTuple):
    """What could be drawn, and what was asked for and not yet could."""

    drawings: list[Drawing]
    missing: list[Missing]

    @classmethod
    def of(cls, results: Iterable[Drawing | Missing]) -> Figures:
        """The results apart; nothing of what nobody asked for."""
        drawings, missing = [], []
        for result in results:
            if isinstance(result, Drawing):
                drawings.append(result)
            elif not result.optional:
                missing.append(result)
        return cls(drawings, missing)


def draw_all(run: RunContents) -> Figures:
    """Draw every figure that has data; of a run over several partitions all but the front show the chosen one alone."""
    run = run.in_figures()
    alone, partition = run.of_chosen_partition(), run.plan.chosen.partition if run.plan else ""
    results = (
        attempt(name, draw, run if draw is draw_pareto else alone) for name, draw in FIGURES.items()
    )
    return Figures.of(_told(result, partition) for result in results)


def _told(result: Drawing | Missing, partition: str) -> Drawing | Missing:
    """With a caption that says which partition is shown, where there are any."""
    if isinstance(result, Missing) or result.name not in OF_NODES or not partition:
        return result
    return result._replace(
        caption=f"Shown is partition {partition}, the chosen one. {result.caption}"
    )


# in the order of the report: file stem and what draws it
STUDY_FIGURES = {
    "study_table": draw_study_table,
    "study_accuracy": draw_study_accuracy,
    "study_epochs": draw_study_epochs,
    "study_delta": draw_study_delta,
    "study_scale": draw_study_scale,
    "study_scale_elements": draw_study_scale_elements,
}


def draw_study(contents: StudyContents, table: StudyTable) -> Figures:
    """Draw every figure that has data."""
    return Figures.of(attempt(name, draw, contents, table) for name, draw in STUDY_FIGURES.items())
