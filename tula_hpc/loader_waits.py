"""How long steps wait for their batches, as far as the device feels it."""

from __future__ import annotations

import torch


class LoaderWaits:
    """Sums up waits for the loader between two moments at which the device has nothing left to do.

    On a CPU a step waits itself: each second of the host's wait makes training longer by one. A GPU works behind the
    host, which asks for the next batch while steps are still queued: with a loader that keeps up the host may wait in
    every step without the device ever being idle. What training loses is the part of a wait for which the device had
    nothing to do: the time on the device between the end of the last step's work and the arrival of the batch, by two
    events. It is at most the host's own wait: whatever else keeps the device idle in between is no wait for data.

    Args:
        device: That trains.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._felt_s = 0.0
        self._launched: torch.cuda.Event | None = None
        self._waits: list[tuple[float, torch.cuda.Event, torch.cuda.Event]] = []

    def arrived(self, waited_s: float) -> None:
        """A batch has come after the host waited so long; call it before the step."""
        if self._launched is None:
            # a CPU, or the first step after `take`: the device was idle all the while
            self._felt_s += waited_s
            return
        self._waits.append((waited_s, self._launched, self._mark()))
        self._launched = None

    def launched(self) -> None:
        """The step's work has been given to the device."""
        if self.device.type == "cuda":
            self._launched = self._mark()

    def take(self) -> float:
        """Return the seconds since the last call; the device must have been waited for."""
        felt_s = self._felt_s
        for waited_s, launched, arrived in self._waits:
            idle_s = 1e-3 * launched.elapsed_time(arrived)  # type: ignore[no-untyped-call] # torch's
            felt_s += min(waited_s, idle_s)
        self._felt_s, self._launched, self._waits = 0.0, None, []
        return felt_s

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch's
        event.record(torch.cuda.current_stream(self.device))  # type: ignore[no-untyped-call] # torch's
        return event
