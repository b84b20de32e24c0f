"""Where an engine's time goes: on the device, by program, and in its own thread."""

from __future__ import annotations

import time
from collections.abc import Callable


class StepTimes:
    """Sums since the start; they may be read from any thread.

    The device works on one step after the other, so a step took it from its dispatch, or from the
    end of the step before if that was later, until its result was there. A result that waits for
    the host to read it is not noticed before: where the host is the limit, steps seem longer than
    they are, and the device busier.

    Attributes:
        seconds: on the device, by program; steps: how many of them.
        host: seconds of the engine's thread in steps, without those it waited for the device.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.seconds: dict[str, float] = {}
        self.steps: dict[str, int] = {}
        self.host = 0.0
        self._ended = 0.0  # when the last result was there
        self._waited = 0.0

    @property
    def busy(self) -> float:
        """Seconds in which the device had a step to work on."""
        return sum(self.seconds.values())

    def collected(self, program: str, dispatched: float, waited_since: float) -> None:
        """A result is there, for which the thread waited since then."""
        now = self.clock()
        self.seconds[program] = self.seconds.get(program, 0.0) + now - max(dispatched, self._ended)
        self.steps[program] = self.steps.get(program, 0) + 1
        self._ended = now
        self._waited += now - waited_since

    def stepped(self, began: float) -> None:
        """A turn of the engine's loop that began then has ended."""
        self.host += self.clock() - began - self._waited
        self._waited = 0.0
