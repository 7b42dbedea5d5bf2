"""What is measured and trained has one digest everywhere, and a difference is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.forked import ROOT, context_of_workers
from tests.run_factory import make_run, measurement
from tula_hpc.analysis.plan import main as plan_main
from tula_hpc.config import WorkloadSpec
from tula_hpc.errors import InputError
from tula_hpc.own_sources import digests_of, own_sources
from tula_hpc.records import (
    Configuration,
    Identity,
    Measurement,
    RunDirectory,
    append_record,
    measured_identity,
    parse_record,
    refuse_another,
    refuse_several,
)
from tula_hpc.stages.plan import obstacle
from tula_hpc.workloads.workload import build_workload

SMALL = Identity(
    parameters=1234,
    gradient_bytes=4936,
    structure="ab12",
    train_samples=512,
    test_samples=128,
    item="float32 3×8×8 with int64",
    sources={"net.py": "1", "data.py": "2"},
)
CHANGES = {
    "parameters": (2468, "the model has 2,468 parameters now, 1,234 before"),
    "gradient_bytes": (100, "its gradient has 100 bytes now, 4,936 before"),
    "structure": ("cd34", "the model has other layers, though 1,234 parameters as before"),
    "item": ("float32 3×9×9 with int64", "a sample is float32 3×9×9 with int64 now"),
    "train_samples": (500, "500 training samples now, 512 before"),
    "test_samples": (100, "100 test samples now, 128 before"),
}


@given(st.dictionaries(st.sampled_from([*CHANGES]), st.none(), max_size=6), st.booleans())
def test_only_code_may_differ(changed: dict[str, None], edited: bool) -> None:
    update: dict[str, object] = {key: CHANGES[key][0] for key in changed}
    now = SMALL.model_copy(update=update | ({"sources": {"net.py": "9", "data.py": "2"}} if edited else {}))
    assert now.is_same(SMALL) == (not changed) == (now.difference(SMALL) == "")
    assert now.changed_sources(SMALL) == (["net.py"] if edited else [])
    assert ("changed since then: net.py" in now.difference(SMALL)) == (edited and bool(changed))


@pytest.mark.parametrize("key", CHANGES)
def test_a_difference_is_refused_in_one_line_with_what_to_do(key: str, tmp_path: Path) -> None:
    value, words = CHANGES[key]
    run = RunDirectory(tmp_path)
    refuse_another(run, SMALL, SMALL.model_copy(update={"sources": {}}))
    refuse_another(run, None, SMALL)
    with pytest.raises(InputError) as raised:
        refuse_another(run, SMALL, SMALL.model_copy(update={key: value}))
    message = str(raised.value)
    assert words in message
    assert message.startswith(f"{tmp_path}: what would be trained now is not what was measured")
    assert message.endswith("Undo the change, or measure what is there now with another --run-dir.")
    assert "\n" not in message


def test_files_that_are_new_or_gone_have_changed() -> None:
    moved = SMALL.model_copy(update={"sources": {"net.py": "1", "more.py": "2"}})
    assert moved.changed_sources(SMALL) == ["data.py", "more.py"]


def test_a_record_without_an_identity_still_reads_and_refuses_nothing(tmp_path: Path) -> None:
    old = measurement(Configuration(1, 1, 32))
    line = old.model_dump_json(exclude={"identity"}).encode()
    assert parse_record(Measurement, line) == old
    assert measured_identity([old]) is None
    refuse_several(RunDirectory(tmp_path), [old, measurement(Configuration(1, 1, 64), identity=SMALL)])


def test_measurements_of_two_models_are_not_planned_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", stage="profile")
    assert plan_main([str(run.root)]) == 0
    capsys.readouterr()
    larger = SMALL.model_copy(update={"parameters": 2468})
    for batch, identity, time in ((32, SMALL, 2e9), (64, SMALL, 2e9), (128, larger, 3e9)):
        row = measurement(Configuration(1, 1, batch), identity=identity, finished_at=time)
        append_record(run.profile / f"n1-b{batch}-9.jsonl", row)
    assert plan_main([str(run.root)]) == 2
    output = capsys.readouterr().err
    assert "mix different models or data (the model has 2,468 parameters now, 1,234 before" in output
    assert f"or keep it and delete {run.profile / 'n1-b32-9.jsonl'}, {run.profile / 'n1-b64-9.jsonl'}, or" in output
    assert "Undo the change and delete " in output
    # status says so, too
    assert obstacle(run, run.measurements().records) == output.strip()
    for batch in (32, 64):
        (run.profile / f"n1-b{batch}-9.jsonl").unlink()
    assert plan_main([str(run.root)]) == 0


OWN = """
from torch import nn
import helper.layers

def net(classes, image_size):
    return nn.Sequential(nn.Flatten(), helper.layers.wide({width}), nn.ReLU(), nn.Linear({width}, classes))
"""
LAYERS = "from torch import nn\ndef wide(width):\n    return nn.Linear(192, width)\n"


def write_identity(folder: Path, seed: int) -> None:
    os.chdir(folder)
    identity = build_workload(WorkloadSpec(model="net:net", seed=seed)).identity.model_dump_json()
    Path("identity.json").write_text(identity)


def identity_in(folder: Path, seed: int = 0) -> Identity:
    """Ask a process that has imported nothing from the folder."""
    process = context_of_workers().Process(target=write_identity, args=(folder, seed))
    process.start()
    process.join()
    return Identity.model_validate_json((folder / "identity.json").read_bytes())


def digests_in(folder: Path) -> dict[str, str]:
    """Ask a process that is started there, whose hashes of strings differ."""
    code = "import json; from tula_hpc.own_sources import digests_of; print(json.dumps(digests_of(['net:net'])))"
    command = [sys.executable, "-P", "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder, env=environment)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def write_own(folder: Path, width: int = 16, layers: str = LAYERS) -> Path:
    (folder / "helper").mkdir(parents=True, exist_ok=True)
    (folder / "net.py").write_text(OWN.format(width=width))
    (folder / "helper" / "__init__.py").write_text("")
    (folder / "helper" / "layers.py").write_text(layers)
    (folder / "other.py").write_text("nothing of the workload")
    return folder


def test_the_digest_is_the_same_in_every_process_and_folder(tmp_path: Path) -> None:
    first = identity_in(write_own(tmp_path / "a"))
    assert first == identity_in(write_own(tmp_path / "b"), seed=3)
    assert first.sources == digests_in(tmp_path / "b")
    assert [*first.sources] == ["helper/__init__.py", "helper/layers.py", "net.py"]
    assert first.parameters == 192 * 16 + 16 + 16 * 10 + 10
    assert first.gradient_bytes == 4 * first.parameters
    # a file of the same size and second would have its old bytecode
    wider = identity_in(write_own(tmp_path / "b", width=128))
    assert f"the model has {wider.parameters:,} parameters now" in wider.difference(first)
    assert "changed since then: net.py" in wider.difference(first)


def test_comments_and_formatting_are_no_change_and_other_code_is_named(tmp_path: Path) -> None:
    def digests(layers: str) -> dict[str, str]:
        return digests_in(write_own(tmp_path, layers=layers))

    plain = digests(LAYERS)
    assert digests(f"# a remark\n\n{LAYERS.replace('(192, width)', '( 192,  width )')}") == plain
    other = digests(LAYERS.replace("192, width", "192, width, bias=True"))
    assert {name for name in plain if plain[name] != other[name]} == {"helper/layers.py"}
    assert digests_of(["tula_hpc.workloads.small_cnns:compact_cnn", "json:dumps", "torch:nn"]) == {}


def test_a_script_that_imports_as_if_it_were_in_a_package_has_its_files(tmp_path: Path) -> None:
    """The error is then the script's own."""
    write_own(tmp_path)
    script = tmp_path / "train.py"
    script.write_text("from .helper import layers\nfrom . import other\nfrom .. import above\n")
    assert [*own_sources([str(script)])] == ["helper/__init__.py", "helper/layers.py", "train.py"]
    # even if an editor has written a byte order mark
    script.write_bytes(b"\xef\xbb\xbf" + script.read_bytes())
    assert [*own_sources([str(script)])] == ["helper/__init__.py", "helper/layers.py", "train.py"]
