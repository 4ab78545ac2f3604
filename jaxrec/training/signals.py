"""SIGTERM and Ctrl-C end a run between two steps, not within one, and all of its processes after the same."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from jaxrec import processes

# Processes ask each other so many steps or batches apart.
AGREE_EVERY = 16


class StopRequest:
    """Remembers that a stop was asked for; a second Ctrl-C interrupts at once.

    Attributes:
      received: The signal that this process has received, or 0.
    """

    def __init__(self):
        self.received = 0
        self._agreed, self._polls = 0, 0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number

    @property
    def signal(self) -> int:
        """The signal for which to stop, or 0: with several processes one that any has received, once all know."""
        return self._agreed if processes.count() > 1 else self.received

    def poll(self) -> int:
        """Returns `signal`. All processes must call it equally often."""
        if processes.count() > 1:
            self._polls += 1
            if self._polls % AGREE_EVERY == 0:
                self._agreed = max(processes.exchange(self.received))
        return self.signal

    @property
    def exit_status(self) -> int:
        """128 + the signal, as a shell reports it; 0 without one."""
        return 128 + self.signal if self.signal else 0
