from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.known import known
from tula_hpc import process_memory as resident

MIB = 1024**2

HOLDS_MEMORY = """
import subprocess, sys
if len(sys.argv) > 1:  # a grandchild, as the loader's processes behind their fork server are
    held = b"x" * (64 << 20)
    print("ready", flush=True)
    sys.stdin.read()
else:
    subprocess.run([sys.executable, "-c", sys.orig_argv[2], "grandchild"])
"""


def test_peak_remembers_what_is_already_freed_and_a_reset_forgets_it() -> None:
    resident.reset_peak()
    before = resident.peak_resident_bytes()
    block = np.ones(200 * MIB, dtype=np.uint8)
    del block
    assert resident.peak_resident_bytes() >= before + 190 * MIB
    assert resident.resident_bytes() < before + 100 * MIB
    resident.reset_peak()
    assert resident.peak_resident_bytes() < before + 100 * MIB


@pytest.mark.processes
def test_memory_of_grandchildren_counts() -> None:
    before = resident.descendants_private_bytes()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_MEMORY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert known(child.stdout).readline() == "ready\n"
        assert resident.descendants_private_bytes() - before > 64 * MIB
        known(child.stdin).close()
    assert resident.descendants_private_bytes() < before + 32 * MIB


def test_a_process_that_ends_while_it_is_looked_at_is_the_last_of_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for process, children in ((90001, "90002 90003"), (90002, "90004"), (90003, "90005"), (90005, "")):
        task = tmp_path / str(process) / "task" / str(process)
        task.mkdir(parents=True)
        (task / "children").write_text(children)
    list_folder = os.scandir

    def ended(folder: str) -> Any:
        if "90002" in Path(folder).parts:
            raise FileNotFoundError(folder)
        return list_folder(folder)

    monkeypatch.setattr(resident, "PROC", tmp_path)
    monkeypatch.setattr(os, "scandir", ended)
    assert list(resident.descendants(90001)) == [90002, 90003, 90005]


BLOCK = 8 * MIB
# glibc's initial thresholds, in bytes
DEFAULT = 128 * 1024


def churn(*, keep: bool) -> tuple[int, int]:
    """Return the page faults of a training step, and the bytes that are still resident after a release."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

    # allocates and frees memory as a training step does with gradients
    def step() -> None:
        blocks = [libc.malloc(BLOCK) for _ in range(6)]
        for block in blocks:
            libc.memset(block, 1, BLOCK)
        for block in blocks:
            libc.free(block)

    for threshold in (resident.TRIM_THRESHOLD, resident.MMAP_THRESHOLD):
        libc.mallopt(threshold, DEFAULT)
    at_start = resident.resident_bytes()
    if keep:
        resident.keep_freed()
    for _ in range(3):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    resident.release_freed()
    return faults, resident.resident_bytes() - at_start


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="only glibc can be told")
def test_freed_memory_is_there_for_the_next_step_and_can_still_be_released() -> None:
    messages = []
    for keep in (True, False):
        # in a new process, because the setting cannot be undone and other tests leave freed memory behind
        program = f"from tests.test_resident import churn; print(*churn(keep={keep}))"
        printed = subprocess.check_output([sys.executable, "-c", program], cwd=Path(__file__).parents[1], text=True)
        messages.append([int(word) for word in printed.split()])
    (faults, held), (_, held_otherwise) = messages
    assert faults < 6 * BLOCK / resource.getpagesize() / 100
    assert held < held_otherwise + 8 * MIB
