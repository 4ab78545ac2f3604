"""Stochastic rounding: to a neighbour, without bias, the same for the same draw."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec import counters
from jaxrec.rounding import stochastic

DRAWS = 100_000
# Significant bits, and the least step between two numbers.
TYPES = {"bfloat16": (8, 0.0), "float16": (11, 2.0**-24)}
VALUES = np.float32([1.0, 1.00123, -3.14159, 1023.7, 1e-3, 6.2e-5, 6.0e-5, -2.3e-7, 1e-8, 1.5 + 2**-12, 0.0, -0.0])

over_types = pytest.mark.parametrize("dtype", list(TYPES))


def rounded(values: np.ndarray, dtype: str, *coordinates: int) -> np.ndarray:
    """float64 [DRAWS, values]."""
    bits = counters.bits(*coordinates, jnp.arange(DRAWS)[:, None], jnp.arange(len(values))[None])
    return np.asarray(stochastic(jnp.broadcast_to(values, bits.shape), jnp.dtype(dtype), bits)).astype(np.float64)


def step_at(values: np.ndarray, dtype: str) -> np.ndarray:
    """The distance of the two neighbours in the type."""
    bits, least = TYPES[dtype]
    exponent = np.floor(np.log2(np.maximum(np.abs(values.astype(np.float64)), 1e-30)))
    return np.maximum(2.0 ** (exponent + 1 - bits), least)


@over_types
def test_every_outcome_is_a_neighbour_and_the_mean_is_the_value(dtype):
    outcomes, x, step = rounded(VALUES, dtype, 5), VALUES.astype(np.float64), step_at(VALUES, dtype)
    below, above = np.floor(x / step) * step, np.ceil(x / step) * step
    assert ((outcomes == below) | (outcomes == above)).all()
    share = (x - below) / step  # Of draws that should go up.
    deviation = step * np.sqrt(share * (1 - share) / DRAWS)
    assert (np.abs(outcomes.mean(axis=0) - x) <= 5 * deviation + 2.0**-20 * step).all()
    exact = share == 0
    assert 3 <= exact.sum() < len(x) and (outcomes[:, exact] == x[exact]).all()
    assert (np.ptp(outcomes[:, ~exact], axis=0) > 0).all()
    assert (np.signbit(outcomes[:, -1])).all()


@over_types
def test_many_small_updates_add_up(dtype):
    """1,000 updates of a hundredth of a step: rounding to nearest would lose all of them."""
    start, update = np.float32(1.0), np.float32(step_at(np.float32([1.0]), dtype)[0] / 100)
    weights = jnp.full(2000, start, dtype)
    for step in range(1000):
        bits = counters.bits(3, step, jnp.arange(2000))
        weights = stochastic(weights.astype(jnp.float32) + update, jnp.dtype(dtype), bits)
    drift = float(np.asarray(weights).astype(np.float64).mean() - start)
    assert abs(drift - 1000 * update) < 0.05 * 1000 * update
    assert jnp.asarray(start + update, dtype) == jnp.asarray(start, dtype)


@over_types
def test_the_draw_decides(dtype):
    a, b, c = (rounded(VALUES, dtype, *k) for k in ((1, 2), (1, 2), (1, 3)))
    np.testing.assert_array_equal(a, b)
    assert (a != c).any()


@over_types
def test_what_is_not_finite_stays_so(dtype):
    values = np.float32([np.nan, np.inf, -np.inf, 3.4e38])
    nan, inf, negative, large = rounded(values, dtype, 1).T
    assert np.isnan(nan).all() and (inf == np.inf).all() and (negative == -np.inf).all()
    # Beyond the largest number of the type: that number or infinity, never another.
    assert set(large[np.isfinite(large)]) <= {float(jnp.finfo(dtype).max)}


def test_other_types_are_refused():
    with pytest.raises(ValueError, match="must be bfloat16 or float16"):
        stochastic(jnp.ones(1), jnp.dtype("float32"), jnp.zeros(1, jnp.uint32))
