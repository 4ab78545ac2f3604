"""SIGTERM and Ctrl-C end a run between two steps, not within one."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class StopRequest:
    """Remembers that a stop was asked for; a second Ctrl-C interrupts at once.

    Attributes:
      signal: The signal received, or 0.
    """

    def __init__(self):
        self.signal = 0
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
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number

    @property
    def exit_status(self) -> int:
        """128 + the signal, as a shell reports it; 0 without one."""
        return 128 + self.signal if self.signal else 0
