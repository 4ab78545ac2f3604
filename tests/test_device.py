"""Prefetch to the device."""

import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from jaxrec.checks import UserError
from jaxrec.data.device import DevicePrefetch
from jaxrec.data.schema import Batch, HostBatch


def host(k):
    ids = np.full((4, 1), k, np.int32)
    one = np.ones((4, 1), np.float32)
    return HostBatch(Batch(ids, ids[:, :0], one, one, one[:, 0]), ids[:, 0])


def source(n, closed=None, error=None):
    try:
        for k in range(n):
            yield host(k)
        if error:
            raise error
    finally:
        if closed is not None:
            closed.append(threading.current_thread().name)


def alive():
    return [t for t in threading.enumerate() if t.name == "jaxrec-device-prefetch"]


def test_batches_arrive_in_order_on_the_device():
    closed = []
    with DevicePrefetch(source(5, closed), jax.device_put) as prefetch:
        got = list(prefetch)
    assert [int(device.ids[0, 0]) for device, _ in got] == [int(h.batch.ids[0, 0]) for _, h in got] == list(range(5))
    assert isinstance(got[0][0].ids, jax.Array) and isinstance(got[0][1].batch.ids, np.ndarray)
    assert closed == ["jaxrec-device-prefetch"]  # the stream was closed by the thread that read it
    assert not alive()


def test_no_more_than_depth_batches_are_put_ahead():
    put = []
    with DevicePrefetch(source(10), lambda b: put.append(b) or len(put), depth=2) as prefetch:
        next(prefetch)
        time.sleep(0.1)
        assert len(put) == 3  # one in our hands, two ready
        assert [device for device, _ in prefetch] == list(range(2, 11))


def test_errors_of_the_stream_come_after_its_batches():
    prefetch = DevicePrefetch(source(3, error=UserError("bad file")), lambda b: b, depth=8)
    got = [next(prefetch) for _ in range(3)]
    assert len(got) == 3
    with pytest.raises(UserError, match="bad file"):
        next(prefetch)
    with pytest.raises(StopIteration):
        next(prefetch)
    prefetch.close()
    assert not alive()


def test_errors_of_put():
    def put(batch):
        if batch.ids[0, 0] == 2:
            raise ValueError("no room")
        return batch

    closed = []
    with DevicePrefetch(source(9, closed), put) as prefetch, pytest.raises(ValueError, match="no room"):
        list(prefetch)
    assert closed and not alive()


def test_close_early():
    closed = []
    prefetch = DevicePrefetch(source(10**9, closed), lambda b: b)
    next(prefetch)
    prefetch.close()
    assert closed and not alive()
    with pytest.raises(StopIteration):
        next(prefetch)
    prefetch.close()  # twice is fine


def test_waiting_and_putting_are_timed():
    def slow():
        yield host(0)
        time.sleep(0.05)
        yield host(1)

    def put(batch):
        time.sleep(0.02)
        return batch

    with DevicePrefetch(slow(), put) as prefetch:
        for _ in prefetch:
            pass
        assert 0.08 < prefetch.wait_seconds < 2
        assert 0.04 < prefetch.put_seconds < 1

    with DevicePrefetch(source(3), lambda b: b, depth=3) as prefetch:
        time.sleep(0.1)
        for _ in prefetch:
            pass
        assert prefetch.wait_seconds < 0.05  # all were ready


def test_depth():
    with pytest.raises(ValueError, match="depth is 0"):
        DevicePrefetch(source(1), lambda b: b, depth=0)


SCRIPT = """
import itertools
import jax
import numpy as np
from jaxrec.data.device import DevicePrefetch
from jaxrec.data.schema import Batch, HostBatch
one = np.ones((4096, 64), np.float32)
batch = HostBatch(Batch(one, one, one, one, one), one)
next(DevicePrefetch(itertools.repeat(batch), jax.device_put))
raise SystemExit(3)
"""


def test_a_program_may_end_without_closing_it():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (3, "")
