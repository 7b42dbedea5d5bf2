from __future__ import annotations

import subprocess
import sys

import numpy as np

from tula_hpc import resident

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
