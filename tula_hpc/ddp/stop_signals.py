"""Note signals that stop a job or suspend it, for the next step boundary.

`training/ending.py` has the whole course of what a training then does, and what a profile does.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from tula_hpc.errors import PreemptedError
from tula_hpc.launch.diagnosis import lost_a_peer


class Suspensions:
    """Record of suspensions of this process: a time that is measured across one is worthless.

    Slurm stops the processes of a job that it suspends, and sends CONT when the job goes on. CONT
    also precedes the TERM of a cancellation, when nothing is timed any more.
    """

    def __init__(self) -> None:
        # whether there was a suspension since the last `take`
        self.seen = False

    def install(self) -> Suspensions:
        """Handle CONT in place of submitit. Call it in the main thread."""
        signal.signal(signal.SIGCONT, self._remember)
        return self

    def _remember(self, _number: int, _frame: FrameType | None) -> None:
        self.seen = True

    def take(self) -> bool:
        """Tell whether there was a suspension since the last call."""
        seen = self.seen
        self.seen = False
        return seen

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Blame a suspension if a collective times out after it.

        Raises:
            PreemptedError: In place of the collective's error.
        """
        try:
            yield
        except RuntimeError as error:
            # CONT alone proves nothing: Slurm also sends it before TERM after a peer was killed
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
