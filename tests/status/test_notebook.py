"""The example for notebooks in sweeps/README.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.run_factory import make_run

README = Path(__file__).resolve().parents[2] / "sweeps" / "README.md"


def test_the_lines_for_a_notebook_read_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (shown,) = [
        text for text in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL) if "status_of" in text
    ]
    run = make_run(tmp_path / "runs" / "mine", epochs_done=5)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    names: dict[str, object] = {}
    exec(shown, names)  # noqa: S102 # the README's own lines
    chosen = run.read_plan().chosen
    assert f"\n{chosen.nodes} {chosen.global_batch} {chosen.epoch_time_s}\n" in capsys.readouterr().out
    assert names["times"]
