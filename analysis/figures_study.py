"""Figures of a study: the table, accuracy against batch, over epochs, against δ, and the scales that were used."""

from __future__ import annotations

from tula_hpc.analysis.figures import Figures
from tula_hpc.analysis.figures_drawing import attempt
from tula_hpc.analysis.figures_study_delta import draw_study_delta
from tula_hpc.analysis.figures_study_lines import draw_study_accuracy, draw_study_epochs
from tula_hpc.analysis.figures_study_scale import draw_study_scale, draw_study_scale_elements
from tula_hpc.analysis.figures_study_table import draw_study_table
from tula_hpc.analysis.study_data import StudyContents
from tula_hpc.analysis.study_table import StudyTable

__all__ = ["STUDY_FIGURES", "draw_study"]

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
