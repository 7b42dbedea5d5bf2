"""What a command or a job does first."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

# a user namespace in which the user has a number without an entry in passwd
NAMELESS = ["unshare", "--user", "--map-user=54321", "--map-group=54321", "env", "-i"]


@pytest.mark.processes
@pytest.mark.parametrize(
    "asks", ["getpass; getpass.getuser()", pytest.param("torch._dynamo", marks=pytest.mark.thorough)]
)
def test_a_user_without_a_name_can_use_torch(asks: str) -> None:
    """Containers and some compute nodes have such users, and torch's optimizers ask Python for the user's name."""
    if not shutil.which("unshare") or subprocess.run([*NAMELESS, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces here")
    code = f"from tula_hpc.env import begin_process; begin_process(); import {asks}"
    done = subprocess.run([*NAMELESS, sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
