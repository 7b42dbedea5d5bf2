"""Warnings of a plan about its method: none where it acts as expected, otherwise with what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.run_factory import candidate
from tula_hpc.analysis.planning.warnings import about_method
from tula_hpc.config import SweepSpec
from tula_hpc.records import Configuration

OWN: dict[str, Any] = {"model": "m:f", "dataset": "digits"}


@pytest.mark.parametrize(
    ("is_script", "method", "nodes", "batch", "words"),
    [
        (False, "ags", 1, 256, None),
        (False, "lbt", 1, 32, None),
        (False, "lbt", 1, 256, "--set training.method=ags"),
        (True, "lbt", 2, 256, "--set training.method=ags"),
        (True, "lbt", 1, 256, 'set training.method = "sqrt"'),
        # the factors are unknown: a script's single worker has only the gradient of the whole batch
        (True, "ags", 1, 256, 'to raise the learning rate with the batch, set training.method = "sqrt"'),
        (True, "adascale", 1, 256, "of a script on a single worker are not scaled"),
        (True, "ags", 1, 32, None),
        (True, "ags", 2, 256, None),
        (True, "static", 1, 256, None),
    ],
)
def test_a_large_batch_for_which_nothing_is_done_is_reported(
    tmp_path: Path, *, is_script: bool, method: str, nodes: int, batch: int, words: str | None
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    theirs = {"script": script, "arguments": ["{local_batch}"], "samples": 4096}
    training = {"method": method, "base_batch": 32}
    workload = {**(theirs if is_script else OWN), "epochs": 2}
    sweep = SweepSpec.model_validate(
        {"name": "x", "workload": workload, "training": training}, context={"check_paths": False}
    )
    found = about_method(candidate(Configuration(nodes, 1, batch // nodes)), sweep)
    assert bool(found) == (words is not None), found
    assert words is None or words in found[0]
