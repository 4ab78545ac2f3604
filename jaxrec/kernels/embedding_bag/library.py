"""The compiled library: which one fits this processor, and whether it is there.

It is built when the package is installed (setup.py), once per instruction set; without a C++ compiler it is absent.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import platform
import struct
from pathlib import Path

import jax

TARGETS = ("Lookup", "AddUp", "RowSquares", "Check", "Update")

# From the fastest to what every processor runs; the flags are those of Linux's /proc/cpuinfo.
LEVELS = {
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd", "avx2", "fma", "f16c", "3dnowprefetch"},
    "avx2": {"avx2", "fma", "f16c", "3dnowprefetch"},
    "baseline": set(),
}


def _processor_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


def levels() -> list[str]:
    """Returns the instruction sets that this processor has, the fastest first."""
    flags = _processor_flags() if platform.machine() == "x86_64" else set()
    return [name for name, needed in LEVELS.items() if needed <= flags]


def path_of(level: str) -> Path | None:
    """Returns where the library for an instruction set is, or None."""
    folder = Path(__file__).parent
    found = (folder / f"_cpu_{level}{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return next((p for p in found if p.exists()), None)


def installed_level() -> str:
    """Returns the fastest instruction set of this processor that a library is installed for; "" where none is."""
    return next((level for level in levels() if path_of(level)), "")


def _is_whole(path: Path) -> bool:
    """Whether an ELF file reaches to the table of sections at its end.

    Loading a part of one, as a build that was killed leaves, would end the process.
    """
    with path.open("rb") as file:
        head = file.read(64)
    if head[:4] != b"\x7fELF":
        return True  # The loader says what is wrong with it.
    if len(head) < 64:
        return False
    (sections,), (size, count) = struct.unpack_from("<Q", head, 40), struct.unpack_from("<HH", head, 58)
    return path.stat().st_size >= sections + size * count


@functools.cache
def load() -> str:
    """Loads the library and makes its operations known to XLA, once.

    Returns:
      "" or, in words, why it cannot be used.
    """
    path = path_of(installed_level())
    if path is not None:
        try:
            if not _is_whole(path):
                return "it cannot be loaded (the file is shorter than it says; was its build interrupted?)"
            library = ctypes.CDLL(str(path))
            for name in TARGETS:
                handler = getattr(library, f"JaxrecEmbedding{name}")
                jax.ffi.register_ffi_target(target(name), jax.ffi.pycapsule(handler), platform="cpu")
        except (OSError, AttributeError, RuntimeError, ValueError) as e:
            # Such as a library that was built against another jaxlib.
            return f"it cannot be loaded ({type(e).__name__}: {str(e).splitlines()[0]})"
        return ""
    return "none is installed (where there is a C++ compiler, `python setup.py build_ext --inplace` builds it)"


_PREFIX = "jaxrec_embedding_"


def target(name: str) -> str:
    """Returns the name by which compiled programs call an operation."""
    return _PREFIX + name


def operation_of(target: str) -> str:
    """Returns the operation that programs call by a name; "" where it is another's."""
    return target.removeprefix(_PREFIX) if target.startswith(_PREFIX) else ""
