"""What a process sets up before its first array."""

import subprocess
import sys

import pytest

# Allocates 64 MiB and frees it again, twice to warm up; then counts the pages that the system hands out for more.
ALLOCATE = """
import ctypes, resource, sys, threading
from jaxrec.startup import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit("no glibc")
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def rounds(count):
    before = faults()
    for _ in range(count):
        address = libc.malloc(64 << 20)
        libc.memset(address, 1, 64 << 20)
        libc.free(address)
    counts.append(faults() - before)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.memset.argtypes, libc.free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], [ctypes.c_void_p]
counts = []
rounds(2)
rounds(4)
for count in (2, 4):
    thread = threading.Thread(target=rounds, args=(count,))
    thread.start()
    thread.join()
print(counts[1], counts[3])
"""
PAGES = 4 * (64 << 20) // 4096


@pytest.mark.parametrize("mode", ["default", "keep"])
def test_freed_memory_is_used_again(mode, environment):
    command = [sys.executable, "-c", ALLOCATE, mode]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if "no glibc" in done.stderr:
        pytest.skip("the C library is not glibc")
    assert done.returncode == 0, done.stderr
    counts = [int(x) for x in done.stdout.split()]
    if mode == "keep":
        # One page in a hundred at most, on the main thread and on another.
        assert max(counts) < PAGES / 100
    elif min(counts) < PAGES / 100:
        pytest.skip("this system keeps freed memory anyhow, or hands out larger pages")
