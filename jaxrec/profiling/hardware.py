"""The ceilings of the devices that JAX sees, measured with JAX: what no program of these operations can exceed.

Each rate is the best of a few samples, all of which are kept: a ceiling is what the machine can do undisturbed. On a
CPU it is of all cores that XLA uses, together.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.kernels.embedding_bag import cpu, library
from jaxrec.kernels.embedding_bag.bags import Bags
from jaxrec.precision import CPU_PRODUCTS, Policy, compiler_options

# Larger than most caches; a table of this size fits every device.
BYTES = 256 << 20
# Of rows that are looked up at a time. Larger results would come from the system as pages to be cleared first.
TAKEN_BYTES = 8 << 20
# Rows that the compiled kernel sums into one.
SUMMED = 64


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Of one device.

    Attributes:
      device: What JAX calls it.
      copy: Bytes per second read and written in order.
      random: Bytes per second of rows read by uniformly random ids from a table of the step's size, by the faster of
        XLA's gather (that it writes the rows, too, in order, is not counted) and the compiled kernel. Skewed ids can be
        served faster, by caches.
      row_bytes: Of such a row.
      products: FLOPs per second of square matrix products in the step's precision; on a CPU, by the faster library.
      precision: Which that is.
      elementwise: Element-wise multiplications and additions per second, in float32.
      samples: Every sample of each rate.
    """

    device: str
    copy: float
    random: float
    row_bytes: int
    products: float
    precision: str
    elementwise: float
    samples: dict[str, list[float]]


def measure(policy: Policy, row_bytes: int, table_bytes: int, *, samples: int = 5, size: int = BYTES) -> Ceilings:
    """Measures the ceilings of the default device; takes a few seconds.

    Args:
      policy: Its compute type and way of multiplying are measured.
      row_bytes: Of an embedding row.
      table_bytes: Of the largest table, which decides what the caches hold; beyond `size` it makes no difference.
      samples: Of each rate, after one that warms up.
      size: Bytes of the array that is copied, and of the table that is looked up at most.
    """
    device = jax.devices()[0]
    columns = max(row_bytes // 4, 1)
    rates = {
        "copy": copy(size, samples),
        "random": random_rows(max(min(table_bytes, size), 4 * columns), columns, samples),
        "products": _products(policy, samples, device.platform),
        "elementwise": _elementwise(samples),
    }
    kind = policy.matmul if policy.compute == jnp.float32 and device.platform == "gpu" else policy.compute.name
    best = {name: max(values) for name, values in rates.items()}
    return Ceilings(device.device_kind, row_bytes=4 * columns, precision=kind, samples=rates, **best)


def _rates(work: float, once: Callable[[], Any], samples: int) -> list[float]:
    jax.block_until_ready(once())
    rates = []
    for _ in range(samples):
        begin = time.perf_counter()
        jax.block_until_ready(once())
        rates.append(work / (time.perf_counter() - begin))
    return rates


def copy(size: int, samples: int) -> list[float]:
    """Returns bytes per second, read and written in order, of arrays of `size` bytes."""
    # In place: fresh memory would be cleared by the system first, which is no copy.
    step = jax.jit(lambda x: x + 1.0, donate_argnums=0)
    held = [jnp.zeros(size // 4, jnp.float32)]

    def once() -> jax.Array:
        held[0] = step(held[0])
        return held[0]

    return _rates(2.0 * size, once, samples)


def random_rows(size: int, columns: int, samples: int) -> list[float]:
    """Returns bytes per second of float32 rows read by uniformly random ids, the faster way's.

    Args:
      size: Bytes of the table.
      columns: Of a row.
      samples: Of each way: XLA's gather, which also writes the rows in order, and on a CPU the compiled kernel, which
        sums them 64 at a time.
    """
    rows, taken = size // (4 * columns), TAKEN_BYTES // (4 * columns) // SUMMED * SUMMED
    table = jnp.zeros((rows, columns), jnp.float32)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, rows, (8, taken), np.int32))
    ways = [lambda table, ids: table.at[ids].get(mode="promise_in_bounds")]
    if jax.devices()[0].platform == "cpu" and not library.load():
        bags = Bags((SUMMED,), rows)
        ways.append(lambda table, ids: cpu.lookup(bags, table, "float32", ids.reshape(-1, SUMMED)))
    # Other rows each time: those of the time before may still be in a cache.
    turn = itertools.cycle(list(ids))
    read = float(taken * columns * 4)
    found = [_rates(read, lambda take=take: take(table, next(turn)), samples) for take in map(jax.jit, ways)]
    return max(found, key=max)


def _products(policy: Policy, samples: int, platform: str) -> list[float]:
    product = functools.partial(jnp.dot, precision=policy.product, preferred_element_type=policy.accumulate)
    libraries = CPU_PRODUCTS if platform == "cpu" else CPU_PRODUCTS[:1]
    rates = [_rates_of(product, compiler_options(name), policy, samples, platform) for name in libraries]
    return max(rates, key=max)


def _rates_of(
    product: Callable[..., jax.Array], options: dict[str, str], policy: Policy, samples: int, platform: str
) -> list[float]:
    multiply = jax.jit(product, compiler_options=options)
    width = 512
    while True:
        x = jnp.full((width, width), 0.5, policy.compute)
        rates = _rates(2.0 * width**3, lambda x=x: multiply(x, x), 1)
        # Long enough that starting it does not count.
        if 2.0 * width**3 / rates[0] > 0.05 or width >= (16384 if platform == "gpu" else 4096):
            return _rates(2.0 * width**3, lambda x=x: multiply(x, x), samples)
        width *= 2


def _elementwise(samples: int) -> list[float]:
    length, chains, links = 1 << 22, 4, 64

    def polynomials(x: jax.Array) -> jax.Array:
        # A chain alone would wait for each of its links.
        values = [x + float(k) for k in range(chains)]
        for _ in range(links):
            values = [y * x + 0.5 for y in values]
        return sum(values[1:], values[0])

    run = jax.jit(polynomials)
    x = jnp.full(length, 0.25, jnp.float32)
    return _rates(2.0 * chains * links * length, lambda: run(x), samples)
