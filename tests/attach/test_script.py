"""A script's command line, place and folder."""

from __future__ import annotations

import operator
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tula_hpc.attach.hooks.patches import before
from tula_hpc.attach.processes import Meeting
from tula_hpc.attach.script import (
    ParsedOptions,
    Script,
    filled,
    remedy_of_batch,
    remedy_of_passes,
    values_of,
    variables_of,
)
from tula_hpc.config import SweepSpec
from tula_hpc.config.workload import PLACEHOLDERS
from tula_hpc.env import WorkerEnvironment, environment_of_script
from tula_hpc.records import Configuration
from tula_hpc.user_code import describe_error

MEETING = Meeting("node1", 12345, "abc", 0.0)


def spec(method: str = "lbt", **workload: object) -> SweepSpec:
    arguments = ["{local_batch}"] if method == "lbt" else ["{local_batch}", "{lr_scale}"]
    keys = {"script": "/train.py", "arguments": arguments, "samples": 1000, "epochs": 3, **workload}
    tables = {"name": "x", "workload": keys, "training": {"method": method, "base_batch": 64}}
    return SweepSpec.model_validate(tables, context={"check_paths": False})


# without a file of its own, as the start of a job
RUN = """
try:
    script.run(home)
except FileNotFoundError as error:
    message = describe_error(error)
"""


def test_a_missing_script_fails_without_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr("sys.path", [*sys.path])
    names = {"script": Script(tmp_path / "gone.py", None, ()), "home": tmp_path, "describe_error": describe_error}
    exec(RUN, names)  # noqa: S102 # the text above
    assert str(names["message"]).endswith("/gone.py'")


def test_a_librarys_failure_within_a_hook_is_not_placed_in_the_hook() -> None:
    library = SimpleNamespace(divide=operator.truediv)
    before([library], "divide", lambda: None)
    names: dict[str, Any] = {"library": library, "describe_error": describe_error}
    text = RUN.replace("script.run(home)", "library.divide(1, 0)").replace("FileNotFoundError", "ZeroDivisionError")
    exec(text, names)  # noqa: S102 # the text above
    assert names["message"] == "ZeroDivisionError: division by zero"


def test_each_placeholder_has_a_value() -> None:
    values = values_of(spec(accumulation=2), Configuration(2, 4, 16), Path("/run"))
    assert values.keys() == PLACEHOLDERS.keys()
    assert values == {
        "local_batch": "8", "global_batch": "128", "accumulation": "2", "nodes": "2", "workers": "8", "epochs": "3",
        "steps": "23", "lr_scale": "1", "seed": "0", "run_dir": "/run",
    }  # fmt: skip


@pytest.mark.parametrize(("method", "scale"), [("lbt", "1"), ("lrs", "4"), ("sqrt", "2")])
def test_the_factor_of_the_rate_goes_from_the_base_batch_to_the_batch(method: str, scale: str) -> None:
    assert values_of(spec(method), Configuration(2, 1, 128), Path())["lr_scale"] == scale


def test_a_factor_multiplies_without_rounding_or_exponent() -> None:
    values = {"batch": "4096", "scale": "1.414213562", "small": "1"}
    arguments = ["--tokens={batch*1048576}", "{scale*0.1}", "{small*3e-4}", "{other*2}"]
    assert filled(arguments, values) == ("--tokens=4294967296", "0.1414213562", "0.0003", "{other*2}")


def test_other_braces_stay() -> None:
    assert filled(["{a}-{a}", "${a}", '{"b": {a}}', "{}"], {"a": "1"}) == ("1-1", "${a}", '{"b": 1}', "{}")


def environment(rank: int) -> WorkerEnvironment:
    return WorkerEnvironment(rank, 4, rank % 2, rank // 2, "7", 0, ("node1", "node2"), on_slurm=True)


def test_a_worker_finds_its_place_as_under_torchrun() -> None:
    found = variables_of(environment(3), 2, MEETING)
    assert {name: found[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")} == {
        "RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
    }  # fmt: skip
    assert (found["MASTER_ADDR"], found["MASTER_PORT"], found["GROUP_WORLD_SIZE"]) == ("node1", "12345", "2")
    # also under srun
    names = ("PROCID", "LOCALID", "NODEID", "NTASKS", "NTASKS_PER_NODE", "NNODES", "JOB_NODELIST", "JOB_ID")
    assert [found[f"SLURM_{name}"] for name in names] == ["3", "1", "1", "4", "2", "2", "node1,node2", "7"]


def test_a_script_keeps_the_jobs_folder_on_its_node_and_no_rank_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_TMPDIR", "/local/7")
    monkeypatch.setenv("SLURM_PROCID", "5")
    found = environment_of_script({"RANK": "0"})
    assert (found["SLURM_TMPDIR"], found["RANK"]) == ("/local/7", "0")
    assert "SLURM_PROCID" not in found


def test_a_worker_with_a_gpu_of_its_own_has_the_first_that_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert variables_of(environment(3), 2, MEETING)["LOCAL_RANK"] == "0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert variables_of(environment(3), 2, MEETING)["LOCAL_RANK"] == "1"


@pytest.mark.parametrize(
    ("shape", "got", "expected"),
    [
        ((1, 1), 48, "look at how train.py takes its batch"),
        ((1, 1), 96, "look at how train.py takes its batch"),
        (
            (1, 1),
            64,
            "is 2 for the model, as two views of an image or the points of a ray are, give it {local_batch*0.5}",
        ),
        ((2, 1), 512, "give it {local_batch*0.0625}, and multiply workload.samples, search.min_batch and search.max"),
        ((2, 1), 16, "it divides its batch among its workers: give it {global_batch}"),
        ((2, 1), 64, "it takes the batch of a node: give it {local_batch}"),
        ((1, 2), 16, "give it {local_batch*2} if among those of a node, {global_batch} if among all"),
        ((2, 2), 8, "it divides its batch among its workers: give it {global_batch}"),
        ((2, 2), 16, "it takes the batch of a node: give it {local_batch*2}"),
        ((2, 2), 64, "it takes the batch of a node: give it {local_batch*2}"),
    ],
)
def test_a_batch_other_than_asked_for_is_reported_with_the_placeholder_that_helps(
    shape: tuple[int, int], got: int, expected: str
) -> None:
    """The placeholder was replaced by 32 samples a worker."""
    assert expected in remedy_of_batch("train.py", 32, got, Configuration(*shape, 32))


def test_a_warm_up_of_the_passes_is_mentioned_only_where_later_steps_may_have_more() -> None:
    words = "if it takes fewer at its beginning"
    assert words in remedy_of_passes(1, 4, 16, 16, 1)
    assert words not in remedy_of_passes(4, 1, 16, 16, 1)


def test_a_critic_that_takes_a_new_batch_in_each_of_five_steps_is_named_as_the_model_that_counts() -> None:
    """The larger generator has a pass for each step of the critic."""
    assert 'workload.counted_model = "Critic"' in remedy_of_passes(5, 1, 16, 16, 2, other="Critic")


def test_numbers_of_batches_and_other_words_are_no_batch() -> None:
    """CleanRL's PPO has a number of minibatches, and others a dimension of observations."""
    options = ParsedOptions({}, {})
    for name in ("--num-minibatches", "--obs-dim", "--n_jobs", "--bs", "--train-bs", "--minibatch-size", "--eval-bs"):
        options.add([name], len(name))
    assert options.batches() == [len(name) for name in ("--bs", "--train-bs", "--minibatch-size")]
