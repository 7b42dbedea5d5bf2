"""pdoc makes pages of the library's docstrings without a warning."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from tests.library_docs import build


@pytest.mark.processes
def test_the_librarys_pages_are_made_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("pdoc", reason="pdoc is of the extra dev")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        build(tmp_path)
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.html")}
    for page in ("optim", "analysis/performance", "analysis/memory", "analysis/plan", "attach"):
        assert f"tula_hpc/{page}.html" in written
    assert not any(page.startswith("tula_hpc/attach/") for page in written)
    assert "Gradient" in (tmp_path / "tula_hpc" / "optim.html").read_text()
