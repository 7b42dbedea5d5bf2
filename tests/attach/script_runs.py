"""Profile scripts in their own processes, without a job."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch.distributed import HashStore  # type: ignore[attr-defined] # documented, though not in __all__

from tula_hpc.attach.own_folder import own_folder
from tula_hpc.attach.processes import ProcessEnd, WorkerPeers, choose_meeting, open_log, start, watch
from tula_hpc.attach.reporting import ChildSpec
from tula_hpc.attach.script import Script, variables_of
from tula_hpc.attach.script_profile import Settings
from tula_hpc.config import ClusterSpec, SearchSpec
from tula_hpc.env import WorkerEnvironment
from tula_hpc.records import Configuration, Measurement

SCRIPTS = Path(__file__).parent / "scripts"
BATCH = 4
QUICK = SearchSpec(warmup_steps=1, min_steps=5, max_steps=5)


def profiled(
    script: Path, arguments: tuple[str, ...], folder: Path, world: int = 1, step_s: float = 60.0, **settings: Any
) -> list[ProcessEnd]:
    """Profile a script; return the end of each rank's process."""
    store = HashStore() if world > 1 else None
    places = [WorkerEnvironment(rank, world, rank, 0, "1", 0, ("here",), False) for rank in range(world)]
    meeting = choose_meeting(places[0])
    own_folder(folder / "work", Path.cwd())

    def run(place: WorkerEnvironment) -> ProcessEnd:
        usual = {"configuration": Configuration(world, 1, BATCH), "forward_batch": BATCH, "accumulation": 1}
        wanted = {**usual, "samples": 1000, "search": QUICK, **settings}
        profile_settings = Settings(cluster=ClusterSpec(), place=place, **wanted)
        with open_log(folder, place.rank) as log:
            spec = ChildSpec(
                mode="profile",
                program=Script(script, None, arguments),
                home=Path.cwd(),
                message_file=folder / f"rank-{place.rank}.message",
                parent=os.getpid(),
                rank=place.rank,
                world_size=world,
                settings=profile_settings.model_dump(mode="json"),
            )
            variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables_of(place, 1, meeting)}
            child = start(spec, variables, folder / "work", log)
            return watch(child, WorkerPeers(store, meeting.run_id), step_s)

    # all threads stay alive in the pool, because a process ends with the thread that started it
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, places))


def measurement_of(outcome: ProcessEnd) -> Measurement:
    assert outcome.is_done, f"{outcome.message.detail}\n{Path(outcome.log).read_text()[-3000:]}"
    return Measurement.model_validate_json(json.dumps(outcome.message.result["measurement"]))
