"""A study of a script with methods that act through its steps or its rate, in real local jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.test_config import complaint
from tests.forked_jobs import forking_jobs
from tests.known import known
from tula_hpc.analysis.study_results import read_study
from tula_hpc.attach.script import values_of
from tula_hpc.config import SweepSpec, load_sweep, load_together, study_column
from tula_hpc.records import Configuration, RunDirectory, read_metrics
from tula_hpc.stages.study import cell_spec
from tula_hpc.sweep import main

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def sweep_text(study: str, arguments: str = "", **keys: str) -> str:
    more = "\n".join(f"{key} = {value}" for key, value in keys.items())
    return f"""
name = "mine"
[workload]
script = "{SCRIPTS / "own_checkpoints.py"}"
arguments = ["--batch-size", "{{local_batch}}", "--epochs", "{{epochs}}"{arguments}]
samples = 64
epochs = 2
metric = 'Acc@1 (?P<test_accuracy>[\\d.]+)'
{more}
[study]
{study}
"""


def cluster_text(workers: int) -> str:
    return f'name = "here"\nexecutor = "local"\nmax_nodes = 1\nworkers_per_node = {workers}\n'


def test_columns_share_the_arguments_and_differ_in_their_method() -> None:
    study = 'methods = ["lbt", "lrs", "ags"]\nbatches = [256]\nsmall_batch = 64\nseeds = [3, 4]'
    path = Path("mine.toml")
    path.write_text(sweep_text(study, arguments=', "{lr_scale}", "{seed}"') + "[training]\nbase_batch = 64\n")
    spec = load_sweep(path)
    cells = [cell for cell in known(spec.study).cells() if cell.seed == 4]
    found = {}
    for cell in cells:
        column = cell_spec(spec, cell, {})
        values = values_of(column, Configuration(1, 2, cell.batch // 2), Path())
        found[cell.column, cell.batch] = (column.training.method, values["lr_scale"], values["seed"])
    assert found == {
        ("lbt", 64): ("lbt", "1", "4"), ("lbt", 256): ("lbt", "1", "4"), ("lrs", 256): ("lrs", "4", "4"),
        ("ags", 256): ("ags", "1", "4"),
    }  # fmt: skip
    # a job reads its sweep again
    again = study_column(spec, "ags", check_paths=False)
    assert SweepSpec.model_validate(again.model_dump(), context={"check_paths": False}) == again


@pytest.mark.parametrize(
    ("study", "workers", "keys", "expected"),
    [
        ('methods = ["ags"]\nbatches = [16]', 1, {}, "study.nodes: ags takes the factors of a script's steps from"),
        (
            'methods = ["lbt"]\nbatches = [16]', 2, {"accumulation": "16"},
            "study.batches: 8 samples of a worker cannot be taken in 16 parts",
        ),
        (
            'methods = ["lbt"]\nbatches = [2]', 2, {"accumulation": "16"},
            "study.batches: 1 sample of a worker cannot be taken in 16 parts",
        ),
    ],
)  # fmt: skip
def test_what_a_cluster_cannot_run_is_one_line(study: str, workers: int, keys: dict[str, str], expected: str) -> None:
    cluster = Path("here.toml")
    cluster.write_text(cluster_text(workers))
    text = sweep_text(f"{study}\nseeds = [0]\nsmall_batch = 0", **keys)
    line = complaint(lambda path, overrides: load_together(path, cluster, overrides)[0], text)
    assert expected in line


def test_a_study_of_a_script_trains_and_compares() -> None:
    study = 'methods = ["lbt", "ags"]\nbatches = [16]\nsmall_batch = 0\nseeds = [0]'
    Path("mine.toml").write_text(sweep_text(study))
    Path("here.toml").write_text(cluster_text(2))
    with forking_jobs():
        assert main(["mine.toml", "--cluster", "here.toml", "--run-dir", "run", "--until", "train"]) == 0
    run = RunDirectory(Path("run"))
    contents = read_study(run)
    assert [(each.cell.column, each.status, each.test) for each in contents.outcomes] == [
        ("lbt", "finished", 0.6), ("ags", "finished", 0.6),
    ]  # fmt: skip
    scales = {
        column: {row.scale_mean for row in read_metrics(run.train(f"study/{column}-b16-s0").metrics_file).steps}
        for column in ("lbt", "ags")
    }
    assert scales["lbt"] == {None}
    assert scales["ags"] != {None}
