"""The benchmark of scaling tables, over made-up runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.scaling_prediction import LIMIT, MOST_PROFILES, first_profiles, main
from tests.run_factory import STARTED_AT, configurations, make_run, measurement, step_time_s
from tula_hpc.records import Configuration, append_record, write_atomically

pytestmark = pytest.mark.thorough
FEW = [Configuration(1, 1, 32), Configuration(1, 1, 512), Configuration(4, 1, 8), Configuration(4, 1, 256)]
MORE = [Configuration(2, 1, 64), Configuration(4, 1, 64), Configuration(2, 1, 256)]


def exact(where: Configuration, second: int) -> str:
    """Return a measurement without noise, as a line of a records file."""
    row = measurement(where, finished_at=STARTED_AT + second)
    assert row.times is not None
    times = row.times.model_copy(update={"step_time_s": step_time_s(where)})
    return row.model_copy(update={"times": times}).model_dump_json()


def write_run(root: Path, places: list[Configuration]) -> Path:
    run = make_run(root, stage="profile")
    for file in run.profile.glob("*.jsonl"):
        file.unlink()
    lines = [exact(where, second) for second, where in enumerate(places)]
    write_atomically(run.profile / "all.jsonl", "".join(f"{line}\n" for line in lines))
    return root


def test_the_first_six_configurations_count_with_their_repeats(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", stage="profile")
    for file in run.profile.glob("*.jsonl"):
        file.unlink()
    for second, where in enumerate([*FEW, *MORE, FEW[0]]):
        append_record(run.profile / "all.jsonl", measurement(where, finished_at=STARTED_AT + second))
    rows = first_profiles(run.measurements().records)
    assert {row.configuration for row in rows} == {*FEW, *MORE[: MOST_PROFILES - len(FEW)]}
    assert len(rows) == MOST_PROFILES + 1


def test_few_profiles_are_compared_with_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    everything = [where for where in configurations() if where.local_batch <= 512]
    full = write_run(tmp_path / "full", everything)
    few = write_run(tmp_path / "few", [*FEW, *MORE])
    output = tmp_path / "found.json"
    main(["--full", str(full), "--adaptive", str(few), str(full), "--output", str(output)])
    found = json.loads(output.read_text())
    assert json.loads(capsys.readouterr().out) == found
    assert found["repeatability"] is None
    assert len(found["runs"]["few"]["profiled"]) == MOST_PROFILES
    for kind in ("strong", "weak"):
        row = found["runs"]["few"][kind]
        assert row["table"]["by N"]["efficiency"][str(row["base"])] == 0.0
        assert set(row["table"]["measured"]) == {"step_s", "epoch_s", "speed_up", "efficiency", "node_hours"}
        assert row["table"]["beyond"]["efficiency"]["largest"] > 0.0
        assert set(row["basis"]["full"].values()) == {"measured", "extrapolated"}
    assert found["within the limit"]["few"] == (found["largest"]["few"] <= LIMIT)


def test_a_run_differs_from_itself_by_nothing(tmp_path: Path) -> None:
    full = write_run(tmp_path / "full", [*FEW, MORE[0], MORE[1]])
    output = tmp_path / "found.json"
    main(["--full", str(full), str(full), "--adaptive", str(full), "--output", str(output)])
    found = json.loads(output.read_text())
    assert found["largest"] == {"full": 0.0}
    assert found["repeatability"] == 0.0
    assert found["runs"]["full"]["strong"]["inside"]["efficiency"] == 1.0
