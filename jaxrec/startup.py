"""Where the time before the first step goes, and how often XLA compiled."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator
from pathlib import Path

import jax

PHASES = ("imports", "data", "init", "compile", "restore", "first_step")


class PhaseClock:
    """Seconds per start-up phase; a phase entered twice adds up."""

    def __init__(self):
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - begin


def keep_freed_memory() -> bool:
    """Makes glibc keep what was freed, instead of giving it back to the system; to be called before threads start.

    The system clears pages that it hands out, one by one as they are first written. Blocks, batches and a step's
    buffers are megabytes large and short-lived: clearing their pages anew costs more than what is then done with them.
    XLA allocates all temporaries of a step as one piece, which is larger than what glibc would ever take from its
    heap: at the size `dlrm_balanced` half of the step's 100 MB of first writes were spent in the system. So the heap
    serves pieces of every size, up to 2 GB of it stay when they are free, and there is one heap for all threads, as
    those of others than the main thread are limited to 64 MiB.

    Returns:
      Whether it did: other C libraries have no such options.
    """
    m_trim_threshold, m_mmap_threshold, m_mmap_max, m_arena_max = -1, -3, -4, -8  # malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    # Setting the threshold, to the greatest that glibc takes, keeps glibc from adapting it and the others.
    wanted = ((m_mmap_threshold, 32 << 20), (m_mmap_max, 0), (m_trim_threshold, 2**31 - 1), (m_arena_max, 1))
    return all([bool(mallopt(option, value)) for option, value in wanted])


def seconds_since_process_start() -> float:
    """Returns the age of this process: at the beginning of a command's main, the time its imports took.

    0 where the system does not tell (it is read from Linux's /proc).
    """
    try:
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return float(Path("/proc/uptime").read_text().split()[0]) - started
    except OSError:
        return 0.0


class CompileCounter:
    """Counts XLA compilations, programs read from the compile cache included, from its creation on."""

    def __init__(self):
        self.count = 0
        self.cache_hits = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def _on_duration(self, event: str, *_: object, **__: object) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"

    def _on_event(self, event: str, **_: object) -> None:
        self.cache_hits += event == "/jax/compilation_cache/cache_hits"

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_duration)
        jax.monitoring.unregister_event_listener(self._on_event)


def enable_compile_cache(directory: str) -> None:
    """Turns the persistent compile cache on, for every program however quickly it compiles.

    To be called before the first array exists: a later call is silently too late (jax#22281).

    Args:
      directory: Where; empty turns the cache off.
    """
    if not directory:
        jax.config.update("jax_enable_compilation_cache", False)
        return
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
