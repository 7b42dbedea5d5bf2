"""Signals that stop a job or suspend it, noted for the next step boundary.

Course of a training on USR2 (before its time limit) and TERM (preemption, cancellation):

1. `StopRequest`, here, notes the signal. `training/job.py` installs it before anything else.
2. `ddp/agreement.py`: about once a second all workers agree to stop, after the same step
   (`Agreed.decide`); within an evaluation, between two of its batches (`until_stopped`).
3. `training/loop.py` has them agree after each step. `checkpoint/safe_points.py` then saves, and
   waits until the checkpoint is on disk (`SafePoints.step_ended`).
4. `training/ending.py` (`leave`) logs "preempted", and asks for a requeue of this job, up to
   `training.max_requeues` times, then it fails; not where it is cancelled, or Slurm requeues it by
   itself. The process ends; on one machine its exit code asks submitit for the requeue.
5. The requeued job goes on from the checkpoint. Where there is none, the command that waits submits
   another job, as `retry_policy.py` says (`stages/train.py`).

A script's training: the worker notes the signal (`attach/train/script_job.py`) and passes it on to
the script's process. Without a handler of the script's own that process notes it in the same way
(`attach/train/script_training.py`) and agrees with the others after a step, or, with `tula.keep`,
between two batches, and saves (`attach/train/keeping.py`). Once it has ended, its worker goes on
with 4.

A profile handles none: submitit requeues it, see `launch/job_start.py`.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from tula_hpc.errors import PreemptedError
from tula_hpc.launch.diagnosis import lost_a_peer


class Suspensions:
    """Record of this process being stopped and continued: times that span it are worthless.

    Slurm stops the processes of a job that it suspends, and sends CONT when the job goes on. CONT
    also precedes the TERM of a cancellation, when nothing is timed any more.
    """

    def __init__(self) -> None:
        self._seen = False

    def install(self) -> Suspensions:
        """Handle CONT in place of submitit. Call it in the main thread."""
        signal.signal(signal.SIGCONT, self._remember)
        return self

    def _remember(self, _number: int, _frame: FrameType | None) -> None:
        self._seen = True

    def take(self) -> bool:
        """Tell whether there was a suspension since the last call."""
        seen, self._seen = self._seen, False
        return seen

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Name the suspension as the cause where a collective times out after it.

        Raises:
            PreemptedError: In place of the collective's error.
        """
        try:
            yield
        except RuntimeError as error:
            # a peer that was killed closes its connection, and Slurm then sends CONT before TERM
            timed_out = lost_a_peer(error) and "timed out" in str(error).lower()
            if timed_out and self.take():
                raise PreemptedError(
                    "the job was suspended for longer than its workers wait for each other"
                ) from error
            raise


class StopRequest:
    """Flag for USR2 (time limit, preemption with the user signal) and TERM (other preemption).

    Submitit's own handler would pickle and requeue between two arbitrary bytecodes; this one only
    sets a flag, and the training loop saves at the next step boundary. Install it in the main
    thread.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def install(self) -> StopRequest:
        """Handle USR2 and TERM in place of submitit."""
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, self._remember)
        return self

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
