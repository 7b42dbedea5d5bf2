from __future__ import annotations

import ctypes
import resource
import subprocess
import sys

import numpy as np
import pytest

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


def test_memory_of_grandchildren_counts() -> None:
    before = resident.descendants_private_bytes()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_MEMORY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        assert resident.descendants_private_bytes() - before > 64 * MIB
        assert child.stdin is not None
        child.stdin.close()
    assert resident.descendants_private_bytes() < before + 32 * MIB


CHURNS = """
import ctypes, resource, sys
from tula_hpc import process_memory as resident

if "keep" in sys.argv:
    resident.keep_freed()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def step():  # what a training step does with its gradients
    blocks = [libc.malloc(8 << 20) for _ in range(6)]
    for block in blocks:
        libc.memset(block, 1, 8 << 20)
    for block in blocks:
        libc.free(block)

step(); step(); step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
resident.release_freed()
print(resident.resident_bytes())
"""


def _churn(*arguments: str) -> tuple[int, int]:
    """Page faults of one more step, and what is resident after freed memory was released, bytes."""
    run = subprocess.run([sys.executable, "-c", CHURNS, *arguments], capture_output=True, text=True, check=True)
    faults, held = map(int, run.stdout.split())
    return faults, held


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="only glibc can be told")
def test_freed_memory_is_there_for_the_next_step_and_can_still_be_released() -> None:
    pages = 6 * (8 << 20) // resource.getpagesize()
    faults, held = _churn("keep")
    assert faults < pages / 100
    assert held < _churn()[1] + 8 * MIB
