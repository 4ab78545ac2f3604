"""The number types of a run: what they are called, what products use, what is refused."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxrec.checks import UserError
from jaxrec.models.interactions import dot_interaction
from jaxrec.models.layers import Linear
from jaxrec.precision import CPU_PRODUCTS, PRECISIONS, compiler_options, policy


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("table", PRECISIONS)
def test_the_types_are_said(name, table):
    p = policy(name, table)
    said = p.describe("cpu")
    assert f"compute {name}" in said and f"tables {table}" in said and "products" not in said
    assert all(f"{part} float32" in said for part in ("accumulate", "parameters", "outputs"))
    assert ("stochastic rounding" in said) == (table != "float32")
    assert ("loss scaling" in said) == (name == "float16") == p.loss_scaled
    assert (p.param, p.accumulate, p.output) == (jnp.float32,) * 3


def test_a_gpu_is_told_how_to_multiply():
    assert "products by float32" in policy("float32").describe("gpu")
    assert "products by tf32" in policy("float32", matmul="tf32").describe("gpu")
    assert "products" not in policy("bfloat16").describe("gpu")
    policy("float32", matmul="tf32").check("gpu")
    for platform in ("cpu", "tpu"):
        with pytest.raises(UserError, match=f"only GPUs have, but the devices are {platform}"):
            policy("float32", matmul="tf32").check(platform)
    with pytest.raises(UserError, match="--precision is 'float16'"):
        policy("float16", matmul="tf32")


@pytest.mark.parametrize("matmul, precision", [("float32", "HIGHEST"), ("tf32", "HIGH")])
def test_every_product_carries_the_mode(matmul, precision):
    p = policy("float32", matmul=matmul)
    layer = Linear(4, 3, p, nnx.Rngs(params=0))
    for function, shape in ((layer, (2, 4)), (lambda x: dot_interaction(x, p), (2, 3, 4))):
        (product,) = [
            e
            for e in jax.make_jaxpr(lambda x, f=function: f(x).sum())(jnp.ones(shape)).jaxpr.eqns
            if e.primitive.name == "dot_general"
        ]
        assert {str(x) for x in product.params["precision"]} == {precision}
        gradient = str(jax.make_jaxpr(jax.grad(lambda x, f=function: f(x).sum()))(jnp.ones(shape)))
        assert gradient.count(f"Precision.{precision}") >= 2 and "Precision.DEFAULT" not in gradient


def test_the_library_of_products_is_chosen():
    x, w = jnp.linspace(-1, 1, 256 * 128).reshape(256, 128), jnp.linspace(-1, 1, 128 * 64).reshape(128, 64)

    def layer(x, w):
        return jnp.maximum(x @ w, 0)

    compiled = {
        name: jax.jit(layer, compiler_options=compiler_options(name)).lower(x, w).compile() for name in CPU_PRODUCTS
    }
    if jax.devices()[0].platform == "cpu":
        assert {name: "ynn" in c.as_text().lower() for name, c in compiled.items()} == {"default": True, "eigen": False}
    for c in compiled.values():
        assert jnp.allclose(c(x, w), layer(x, w), rtol=1e-5, atol=1e-5)
