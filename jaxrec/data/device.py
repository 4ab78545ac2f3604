"""Moving batches to the device while it computes."""

from __future__ import annotations

import atexit
import collections
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from jaxrec.data.schema import Batch, HostBatch

DeviceBatch = TypeVar("DeviceBatch")


class DevicePrefetch(Generic[DeviceBatch]):
    """Iterates over (device batch, host batch), of which a thread keeps a few ready.

    `for device_batch, host_batch in prefetch` ends with the stream; an exception of the stream or of `put` is raised
    here, as itself, after the batches before it. Use it as a context manager, or `close` it, to stop early.

    Attributes:
      wait_seconds: How long the consumer has waited for a batch, in all. Only the consumer's thread changes it.
      put_seconds: How long `put` has taken, in all. Only the prefetching thread changes it.
    """

    def __init__(self, stream: Iterator[HostBatch], put: Callable[[Batch], DeviceBatch], depth: int = 2):
        """Starts the thread.

        Args:
          stream: Host batches. It is read, and closed in the end, by the thread alone.
          put: Takes a batch to the device (`jax.device_put` with the caller's sharding).
          depth: Device batches that are ready at most, besides the one in the consumer's hands.

        Raises:
          ValueError: `depth` is less than 1.
        """
        if depth < 1:
            raise ValueError(f"depth is {depth}, but must be at least 1")
        self.wait_seconds = 0.0
        self.put_seconds = 0.0
        self._stream, self._put, self._depth = stream, put, depth
        self._ready: collections.deque[tuple[DeviceBatch, HostBatch]] = collections.deque()
        self._changed = threading.Condition()
        self._closed = False  # the consumer wants no more
        self._ended = False  # the thread brings no more
        self._error: BaseException | None = None
        # A program that ends without closing it is neither kept waiting for long (hence a daemon), nor aborted by a
        # thread that is inside the runtime while that is taken down (hence the farewell).
        self._thread = threading.Thread(target=self._run, name="jaxrec-device-prefetch", daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)

    def __iter__(self) -> DevicePrefetch[DeviceBatch]:
        return self

    def __next__(self) -> tuple[DeviceBatch, HostBatch]:
        begin = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended or self._closed)
            self.wait_seconds += time.monotonic() - begin
            if self._closed:
                raise StopIteration
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            raise StopIteration

    def close(self) -> None:
        """Drops what is ready and waits for the thread to end: at most as long as one batch takes."""
        self._stop()
        self._thread.join()
        atexit.unregister(self._at_exit)

    def __enter__(self) -> DevicePrefetch[DeviceBatch]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stop(self) -> None:
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()

    def _at_exit(self) -> None:
        self._stop()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        try:
            try:
                for host in self._stream:
                    # Room first, then `put`: no more than `depth` batches take up device memory here.
                    with self._changed:
                        self._changed.wait_for(lambda: len(self._ready) < self._depth or self._closed)
                        if self._closed:
                            break
                    begin = time.monotonic()
                    device = self._put(host.batch)
                    self.put_seconds += time.monotonic() - begin
                    with self._changed:
                        if not self._closed:
                            self._ready.append((device, host))
                            self._changed.notify_all()
            finally:
                close = getattr(self._stream, "close", None)
                if close is not None:
                    close()
        except BaseException as error:  # carried over to the consumer's thread, whatever it is
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()
