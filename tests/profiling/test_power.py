from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tula_hpc.profiling import meters
from tula_hpc.profiling.meters import Power, mean_power, read_energy, read_rapl


def zone(root: Path, name: str, microjoules: int, limit: int = 1_000_000_000) -> None:
    folder = root / name
    folder.mkdir(exist_ok=True)
    (folder / "name").write_text("psys\n" if name.endswith(":9") else "package-0\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    (folder / "max_energy_range_uj").write_text(f"{limit}\n")


@pytest.fixture(autouse=True)
def _counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test write the processors' counters, and hide GPUs."""
    monkeypatch.setattr(meters, "POWERCAP", tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let time.monotonic give these seconds, one after another."""
    ticks = [100.0, 110.0]
    monkeypatch.setattr(time, "monotonic", lambda: ticks.pop(0))
    return ticks


def test_only_packages_are_added_and_neither_their_parts_nor_the_whole(tmp_path: Path, clock: list[float]) -> None:
    for name in ("intel-rapl:0", "intel-rapl:1", "intel-rapl:0:0", "intel-rapl:9"):
        zone(tmp_path, name, 5_000_000)
    began = read_energy()
    for name in ("intel-rapl:0", "intel-rapl:1", "intel-rapl:0:0", "intel-rapl:9"):
        zone(tmp_path, name, 505_000_000)
    power = mean_power(began, read_energy())
    assert power.processors_w == pytest.approx(100.0)
    assert power.gpus_w is None
    assert clock == []


def test_a_counter_that_wraps_goes_on(tmp_path: Path, clock: list[float]) -> None:
    zone(tmp_path, "intel-rapl:0", 900_000_000)
    began = read_energy()
    zone(tmp_path, "intel-rapl:0", 100_000_000)
    assert mean_power(began, read_energy()).watts == pytest.approx(20.0)


def test_a_counter_that_may_not_be_read_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "intel-rapl:0").mkdir()
    (tmp_path / "intel-rapl:1").mkdir()
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("n/a")
    assert read_rapl() == {}
    assert mean_power(read_energy(), read_energy()) == Power(None, None)
    assert Power(None, None).watts == 0.0


def test_nvml_counts_energy_where_it_is_there(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    # millijoules of two GPUs, three times
    energy = [1_000_000, 3_000_000, 2_500_000, 4_500_000, 5_000_000, 5_000_000]
    nvml = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetTotalEnergyConsumption=lambda _: energy.pop(0),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    clock.append(120.0)
    assert mean_power(read_energy(), read_energy()).gpus_w == pytest.approx(300.0)
    # GPUs of a node's other workers are hidden from this one
    assert read_energy(4).gpu_joules is None


def test_an_old_nvml_leaves_it_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError

    nvml = SimpleNamespace(NVMLError=RuntimeError, nvmlInit=broken)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert mean_power(read_energy(), read_energy()).gpus_w is None
