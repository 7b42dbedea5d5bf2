"""The trial of a workload on the login node: when it happens, what its answer leads to, and what is then refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.known import known
from tests.run_factory import measurement
from tula_hpc.config import ClusterSpec, SearchSpec, SweepSpec, WorkloadSpec
from tula_hpc.errors import InputError
from tula_hpc.records import Configuration, Footprint, Identity, RunDirectory, Trial, append_record
from tula_hpc.stages import rehearsal
from tula_hpc.stages.context import Sweep
from tula_hpc.stages.rehearsal import ELSEWHERE, rehearse, try_before_jobs

IDENTITY = Identity(
    parameters=10, gradient_bytes=40, structure="ab", train_samples=500, test_samples=10, sources={"net.py": "1"}
)
OTHER = IDENTITY.model_copy(update={"parameters": 20, "sources": {"net.py": "2"}})
EDITED = IDENTITY.model_copy(update={"sources": {"net.py": "3"}})
SLURM = ClusterSpec.model_validate({"executor": "slurm", "max_nodes": 4})
FILES = (Path("sweep.toml"), Path("cluster.toml"))


def spec_of(**search: object) -> SweepSpec:
    fields = {"cluster_sizes": [1, 2], "min_batch": 32, "max_batch": 256, **search}
    return SweepSpec.model_validate({"name": "x", "workload": {"dataset": "synthetic"}, "search": fields})


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that replaces Python by another program."""

    def answer(program: str) -> None:
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{program}\n")
        python.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(python))

    return answer


def test_a_mistake_is_refused_with_a_way_out_where_there_may_be_one(answers: Callable[[str], None]) -> None:
    answers("echo chatter >&2; echo 'workload.model: mine:net cannot' >&2; exit 3")
    with pytest.raises(InputError) as raised:
        rehearse(spec_of(), SLURM, FILES)
    assert str(raised.value) == f"workload.model: mine:net cannot\n{ELSEWHERE}\nNothing was submitted."
    for status, cluster in ((3, ClusterSpec()), (2, SLURM)):
        answers(f"echo 'workload.model: mine:net cannot' >&2; exit {status}")
        with pytest.raises(InputError) as raised:
            rehearse(spec_of(), cluster, FILES)
        assert str(raised.value) == "workload.model: mine:net cannot\nNothing was submitted."


def test_own_code_that_crashes_is_refused_with_its_place(answers: Callable[[str], None], tmp_path: Path) -> None:
    trace = f'  File "{rehearsal.__file__}", line 3 in call\n  File "{tmp_path}/mine.py", line 7 in net\n'
    answers(f"echo '{trace}' >&2; kill -SEGV $$")
    for cluster, way_out in ((ClusterSpec(), ""), (SLURM, f"{ELSEWHERE}\n")):
        with pytest.raises(InputError) as raised:
            rehearse(spec_of(), cluster, FILES)
        message = f"your own code ends its process: Segmentation fault (mine.py:7)\n{way_out}Nothing was submitted."
        assert str(raised.value) == message


@pytest.mark.parametrize(
    ("program", "timeout_s", "reason"),
    [
        ("echo 'OSError: Stale file handle' >&2; exit 1", 60.0, "OSError: Stale file handle"),
        ("kill -9 $$", 60.0, "it ended by a signal: Killed"),
        ("echo 'Extension modules: numpy (total: 1)' >&2; kill -SEGV $$", 60.0, "it ended by a signal: Segm"),
        ("exec sleep 60", 0.2, "it took more than 0 s"),
        ("echo '{}'", 60.0, "its answer is damaged"),
        ("echo", 60.0, "it ended without an answer"),
    ],
)
def test_a_workload_that_cannot_be_tried_is_not_refused(
    answers: Callable[[str], None], program: str, timeout_s: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(program)
    monkeypatch.setattr("tula_hpc.stages.rehearsal.TIMEOUT_S", timeout_s)
    message = rehearse(spec_of(), SLURM, FILES)
    assert isinstance(message, str)
    assert message.startswith(reason)


def test_the_trial_has_the_variables_of_a_job(answers: Callable[[str], None]) -> None:
    answers('echo "$DATA_ROOT" >&2; exit 1')
    assert rehearse(spec_of(), SLURM.model_copy(update={"environment": {"DATA_ROOT": "/d"}}), FILES) == "/d"


def test_pythons_warnings_are_reported(answers: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    trial = Trial(identity=IDENTITY, warnings=("mine.py:3: it broadcasts",))
    answers(f"echo '{trial.model_dump_json()}'")
    assert isinstance(rehearse(spec_of(), SLURM, FILES), Trial)
    assert capsys.readouterr().err == "warning: mine.py:3: it broadcasts\n"


def test_batches_above_the_training_set_are_refused(answers: Callable[[str], None]) -> None:
    answers(f"echo '{Trial(identity=IDENTITY).model_dump_json()}'")
    assert isinstance(rehearse(spec_of(), SLURM, FILES), Trial)
    with pytest.raises(InputError, match=r"search.max_batch: a batch of 512 is above the 500 training samples; lower"):
        rehearse(spec_of(max_batch=1000), SLURM, FILES)


@pytest.mark.parametrize(
    ("helper", "sizes", "of_node", "remedy"),
    [
        ("from torch.optim import SGD", (1, 2), 1, "search.cluster_sizes = [1]"),
        ("from torch.optim import SGD", (1,), 1, None),
        # a single node has several workers, too
        (
            "from torch.optim import SGD",
            (1,),
            2,
            "search.cluster_sizes = [1], and workers_per_node = 1 in the cluster file",
        ),
        ("from torch.nn.parallel import DistributedDataParallel", (1, 2), 1, None),
    ],
)
def test_a_script_that_names_no_way_for_several_workers_is_warned_of_before_any_job(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    *,
    helper: str,
    sizes: tuple[int, ...],
    of_node: int,
    remedy: str | None,
) -> None:
    (tmp_path / "train.py").write_text("import helper")
    (tmp_path / "helper.py").write_text(helper)
    work = WorkloadSpec(script=tmp_path / "train.py", arguments=("{local_batch}",), samples=640, epochs=3)
    spec = SweepSpec(name="x", workload=work, search=SearchSpec(cluster_sizes=sizes))
    cluster = ClusterSpec(workers_per_node=of_node)
    try_before_jobs(Sweep(spec, cluster, RunDirectory(tmp_path / "run").create()))
    output = capsys.readouterr().err
    assert ("train.py does not seem to use DistributedDataParallel" in output) is (remedy is not None)
    assert remedy is None or output.endswith(f" to use a single worker, set {remedy}\n")


def test_files_of_settings_that_batches_lack_are_warned_of_before_any_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("from torch.nn.parallel import DistributedDataParallel")
    for name in ("local-32", "local-64", "global-64"):
        Path(f"{name}.yaml").touch()
    arguments = ("local-{local_batch}.yaml", "--set=global-{global_batch}.yaml", "--log={run_dir}/{local_batch}.json")
    table = {
        "script": str(tmp_path / "train.py"),
        "arguments": arguments,
        "samples": 640,
        "epochs": 3,
        "accumulation": 2,
    }
    search = {"cluster_sizes": [2], "min_batch": 64, "max_batch": 256}
    sweep = SweepSpec.model_validate({"name": "x", "workload": table, "search": search})
    run = RunDirectory(tmp_path / "run").create()
    try_before_jobs(Sweep(sweep, ClusterSpec(), run))
    missing = "local-16.yaml, global-128.yaml, global-256.yaml"
    assert capsys.readouterr().err.startswith(f"warning: no such file: {missing}; the search may try these batches")
    for name in missing.split(", "):
        Path(name).touch()
    try_before_jobs(Sweep(sweep, ClusterSpec(), run))
    assert capsys.readouterr().err == ""


class Rehearsals:
    """A stand-in for the trial that counts its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.run = RunDirectory(folder).create()
        self.finds: Identity | str = IDENTITY
        self.code = "1"
        self.tried: list[list[str]] = []
        monkeypatch.setattr(rehearsal, "rehearse", self.rehearse)
        monkeypatch.setattr(rehearsal, "digests_of", lambda _: {"net.py": self.code})

    def rehearse(self, spec: SweepSpec, cluster: ClusterSpec, files: object, memory: list[str]) -> Trial | str:
        self.tried.append(memory)
        if isinstance(self.finds, str):
            return self.finds
        footprints = dict.fromkeys(memory, FOOTPRINT)
        return Trial(identity=self.finds, key=rehearsal.key_of(spec), footprints=footprints)

    def command(self, **search: object) -> int:
        """Return how often the workload was tried."""
        before = len(self.tried)
        try_before_jobs(Sweep(spec_of(**search), SLURM.model_copy(update={"memory_gb": 1.0}), self.run))
        return len(self.tried) - before

    def edit(self, code: str, finds: Identity) -> None:
        self.code, self.finds = code, finds

    def measured(self, identity: Identity | None) -> None:
        row = measurement(Configuration(1, 1, 32), identity=identity)
        append_record(self.run.profile / "n1.jsonl", row)


FOOTPRINT = Footprint(
    parameter_bytes=1, gradient_bytes=1, optimizer_bytes=1, activation_bytes_per_sample=1, fixed_bytes=1, peaks={32: 1}
)


@pytest.fixture
def trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rehearsals:
    return Rehearsals(monkeypatch, tmp_path / "run")


def test_a_workload_is_tried_once_and_again_when_something_changed(trials: Rehearsals) -> None:
    assert [trials.command(), trials.command(), trials.command(max_batch=128)] == [1, 0, 0]
    assert trials.tried == [[""]]
    assert trials.run.footprints([""]) == {"": FOOTPRINT}
    trials.edit("3", EDITED)
    assert [trials.command(), trials.command()] == [1, 0]


def test_a_workload_that_could_not_be_tried_is_tried_the_next_time(trials: Rehearsals) -> None:
    trials.finds = "no memory"
    assert [trials.command(), trials.command()] == [1, 1]
    assert trials.run.trial() is None


def test_another_model_than_was_measured_is_refused_until_it_is_undone(trials: Rehearsals) -> None:
    trials.command()
    trials.measured(IDENTITY)
    trials.edit("2", OTHER)
    for _ in range(2):
        with pytest.raises(
            InputError, match=r"the model has 20 parameters now, 10 before; changed since then: net\.py"
        ):
            trials.command()
    failure = known(trials.run.history().stage_failure())
    assert "the model has 20 parameters now" in failure.detail
    trials.edit("1", IDENTITY)
    assert trials.command() == 0


def test_changed_code_of_the_same_model_is_a_warning(trials: Rehearsals, capsys: pytest.CaptureFixture[str]) -> None:
    trials.measured(IDENTITY)
    trials.edit("3", EDITED)
    trials.command()
    assert "warning: net.py changed since the measurements; model and data are the same\n" in capsys.readouterr().err
    trials.command(estimate=False)
    assert (
        "net.py changed since the measurements; if that changed the model, the training's job refuses it: undo it, or "
        "measure again with another --run-dir\n" in capsys.readouterr().err
    )


def test_a_model_that_is_another_one_without_a_gpu_is_compared_with_itself(trials: Rehearsals) -> None:
    trials.command()
    trials.measured(OTHER)
    trials.edit("3", EDITED)
    assert trials.command() == 1


def test_records_of_earlier_versions_refuse_nothing(trials: Rehearsals) -> None:
    trials.measured(None)
    assert trials.command() == 1


def test_nothing_is_tried_where_the_user_does_not_want_it_or_in_a_job(
    trials: Rehearsals, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trials.command(estimate=False) == 0
    monkeypatch.setattr(rehearsal, "slurm_job_id", lambda: "7")
    assert trials.command() == 0


def test_a_batch_above_the_training_set_is_refused_also_when_it_was_tried_before(trials: Rehearsals) -> None:
    trials.command()
    with pytest.raises(InputError, match="a batch of 512 is above the 500 training samples"):
        trials.command(max_batch=600)
