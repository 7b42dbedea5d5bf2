"""What the shell of a job does first, `setup` and `[environment]` of the cluster file, without anybody seeing it.

Both may hold keys and passwords. A command line is shown to everybody on the machine, and a script to whoever it is
mailed to. So the lines travel in a file of the submission's folder, for its owner alone. The shell of the job knows the
file's SHA-256 and evaluates the very text that has it, for the reason that `job_pickle` gives; the file begins with a
random number, so that nobody can find a short password by trying hashes.
"""

from __future__ import annotations

import hashlib
import secrets
import shlex
from pathlib import Path

from tula_hpc.config import ClusterSpec
from tula_hpc.records import write_atomically
from tula_hpc.search_path import is_found_elsewhere

WHAT_TO_DO = "nothing of it is executed; look at who may write to the folders above it, and submit the job again"
SETUP_FILE = "setup.sh"


def write_setup(folder: Path, cluster: ClusterSpec) -> str:
    """Write the file; returns its SHA-256.

    Raises:
        StorageError: It cannot be written.
    """
    text = setup_text(cluster)
    write_atomically(folder / SETUP_FILE, text)
    return hashlib.sha256(text.encode()).hexdigest()


def setup_text(cluster: ClusterSpec) -> str:
    """Return the lines, so that `$tula_setup` is `done` behind them.

    On this machine a line that fails ends the job, on Slurm it is up to the lines what they do then.
    """
    exports = [f"export {name}={shlex.quote(value)}" for name, value in _variables(cluster).items()]
    lines = [*cluster.setup, *exports, "tula_setup=done"]
    between = " && " if cluster.executor == "local" else "\n"
    return f"# {secrets.token_hex(32)}\n{between.join(lines)}"


def _variables(cluster: ClusterSpec) -> dict[str, str]:
    # a job starts where the command did, and would import submitit and torch from there
    path = {"PYTHONSAFEPATH": "1"} if is_found_elsewhere() else {}
    return {"OMP_NUM_THREADS": str(cluster.cpus_per_worker), **path, **cluster.environment}


def run_setup(folder: Path, sha256: str) -> list[str]:
    """Shell lines that run the file, if it is still the same; what ends early or is no shell ends the job."""
    path = folder / SETUP_FILE
    return [
        f"tula_setup=$(cat {shlex.quote(str(path))})",
        'tula_found=$(printf %s "$tula_setup" | sha256sum)',
        _or_end(f'[ "${{tula_found%% *}}" = {sha256} ]', f"{path}: is not what was submitted; {WHAT_TO_DO}"),
        'eval "$tula_setup"',
        _or_end('[ "$tula_setup" = done ]', f"{path}: setup of the cluster file did not come to its end"),
    ]


def _or_end(condition: str, words: str) -> str:
    return f"{{ {condition} || {{ echo {shlex.quote(words)} >&2; exit 1; }}; }}"


def describe_setup(cluster: ClusterSpec) -> str:
    """Return a comment for the script, which names the variables and counts the lines."""
    count = f"{len(cluster.setup)} line{'' if len(cluster.setup) == 1 else 's'} of setup"
    return f"# {SETUP_FILE}, for you alone: {count}; variables {', '.join(_variables(cluster))}"
