"""Asks the search what to profile next, in a process of its own.

Inside a job the numeric libraries of the search would stay in the worker's memory, and be measured as the training's.
"""

from __future__ import annotations

import json
import subprocess
import sys

from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.errors import StageError
from tula_hpc.jobs import ProfileJob
from tula_hpc.records import Configuration, Measurement
from tula_hpc.search_path import start_of_python

TIMEOUT_S = 300.0


def ask_search(job: ProfileJob) -> list[Configuration]:
    """What the search proposes, given all that the run has measured so far.

    Raises:
        StageError: The search failed; the message ends with its last words.
    """
    question = {
        "sweep": job.sweep.model_dump(mode="json"),
        "cluster": job.cluster.model_dump(mode="json"),
        "measurements": [m.model_dump(mode="json", exclude={"samples"}) for m in job.known()],
        "trusted_batch": job.trusted_batch,
    }
    try:
        done = subprocess.run(
            [*start_of_python(), "-m", "tula_hpc.proposing"],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            check=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise StageError(f"the search did not answer within {TIMEOUT_S:g} s") from None
    except subprocess.CalledProcessError as error:
        words = error.stderr.strip().splitlines()
        raise StageError(f"the search failed in the job: {words[-1] if words else error.returncode}") from None
    return [Configuration(*row) for row in json.loads(done.stdout)]


def answer(question: str) -> str:
    """The proposals as JSON; see `ask_search` for the question."""
    from tula_hpc.analysis.search import propose

    asked = json.loads(question)
    # the paths of the workload were checked when the sweep was read, and do not matter to the search
    sweep = SweepSpec.model_validate(asked["sweep"], context={"check_paths": False})
    cluster = ClusterSpec.model_validate(asked["cluster"])
    measurements = [Measurement.model_validate(row) for row in asked["measurements"]]
    return json.dumps(propose(sweep, cluster, measurements, trusted_batch=asked["trusted_batch"]))


if __name__ == "__main__":
    sys.stdout.write(answer(sys.stdin.read()))
