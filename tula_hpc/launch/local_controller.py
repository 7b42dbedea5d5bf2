"""Run submitit's controller of a local job; also end the job when one of its workers has failed.

    python -m tula_hpc.launch.local_controller FOLDER

`srun -K1` does that on Slurm. With gloo, workers notice that a peer is gone; with nccl they would
wait for it until the time limit of a collective. If the controller is killed, its workers end, too:
see `env.end_with_controller`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from signal import SIGKILL, SIGTERM
from threading import Thread
from typing import Any

from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE, Controller

from tula_hpc.env import be_controller

# srun's words for a worker that a signal has ended
ENDED_BY = {-SIGKILL: "Killed", -SIGTERM: "Terminated"}
# seconds for other workers to end by themselves, and to record that they ran out of memory, too
GRACE_S = 10.0
POLL_S = 0.1


class EndingController(Controller):
    """Controller that ends a job's other workers after one has failed."""

    def run(self, max_retry: int = sys.maxsize) -> None:
        """Run the job as often as it asks for, by its own limit; submitit's limit is six runs."""
        super().run(max_retry)

    def start_tasks(self) -> None:
        """Start the workers, and a thread that watches them."""
        be_controller()
        super().start_tasks()
        # ranks of the workers that this controller has ended
        self.ended: list[int] = []
        Thread(target=self._end_after_a_failure, args=(list(self.tasks),), daemon=True).start()

    def wait(self, freq: int = 24) -> Sequence[int | None]:
        """Wait as submitit does; report a worker that a signal ended in srun's words."""
        codes = super().wait(freq)
        for rank, code in enumerate(codes):
            if code in ENDED_BY and rank not in self.ended:
                self.stderrs[rank].write(f"task {rank}: {ENDED_BY[code]}\n")
        return codes

    def _end_after_a_failure(self, tasks: Sequence[Any]) -> None:
        fine = (None, 0, LOCAL_REQUEUE_RETURN_CODE)
        while _running(tasks) and all(task.poll() in fine for task in tasks):
            time.sleep(POLL_S)
        deadline = time.monotonic() + GRACE_S
        while _running(tasks) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for rank in _running(tasks):
            self.ended.append(rank)
            tasks[rank].kill()


def _running(tasks: Sequence[Any]) -> list[int]:
    return [rank for rank, task in enumerate(tasks) if task.poll() is None]


if __name__ == "__main__":
    EndingController(Path(sys.argv[1])).run()
