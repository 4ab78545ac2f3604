"""DLRM against NumPy, dropout's counters, and what the model refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrec import mesh as mesh_lib
from jaxrec.checks import UserError
from jaxrec.data.schema import FeatureSpec, Schema
from jaxrec.models.dlrm import DLRM, DLRMConfig
from jaxrec.models.layers import MLP, DropoutSource, dropout
from jaxrec.models.losses import binary_cross_entropy
from jaxrec.precision import policy

B, D = 5, 4
SCHEMA = Schema(
    tuple(FeatureSpec(f"f{i}", "categorical", "t") for i in range(3)), {"t": 9}, ("a", "b"), ("click", "like")
)
FLOAT32 = policy("float32")


def create(**options):
    config = DLRMConfig(**{"bottom_mlp": (6, D), "top_mlp": (7, 3), **options})
    model = config.create(SCHEMA, D, FLOAT32, nnx.Rngs(params=1))
    # Biases start at 0: give them values, so that a dropped one shows.
    graphdef, params = nnx.split(model, nnx.Param)
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(3)
    leaves = [x + jnp.asarray(rng.normal(size=x.shape), x.dtype) * 0.1 for x in leaves]
    return nnx.merge(graphdef, jax.tree.unflatten(tree, leaves))


def inputs():
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(B, 2)).astype(np.float32)
    return dense, {f.name: rng.normal(size=(B, D)).astype(np.float32) for f in SCHEMA.features}


def plain_mlp(mlp: MLP, x: np.ndarray, *, activate_last: bool) -> np.ndarray:
    for i, layer in enumerate(mlp.layers):
        x = x @ np.asarray(layer.kernel[...], np.float64) + np.asarray(layer.bias[...], np.float64)
        if i + 1 < len(mlp.layers) or activate_last:
            x = np.maximum(x, 0)
    return x


def plain_bottom(model: DLRM):
    dense, activations = inputs()
    return [plain_mlp(model.bottom_mlp, dense.astype(np.float64), activate_last=True), *activations.values()]


def test_dlrm_with_dot_interaction():
    model = create(interaction="dot")
    vectors = plain_bottom(model)
    pairs = [
        (vectors[i] * vectors[j]).sum(axis=1) for i in range(4) for j in range(i)
    ]  # Row by row below the diagonal.
    x = np.concatenate([vectors[0], np.stack(pairs, axis=1)], axis=1)
    assert x.shape == (B, D + 6)
    logits = model(*inputs(), None)
    assert logits.shape == (B, 2) and logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, plain_mlp(model.top_mlp, x, activate_last=False), rtol=1e-5, atol=1e-5)


def test_dlrm_with_cross_interaction():
    model = create(interaction="cross", cross_layers=3, cross_rank=2, bottom_mlp=(6, 5))
    x0 = np.concatenate(plain_bottom(model), axis=1)
    assert x0.shape == (B, 5 + 3 * D)
    x = x0
    for down, up in zip(model.cross.down, model.cross.up, strict=True):
        assert down.bias is None
        matrix = np.asarray(down.kernel[...], np.float64) @ np.asarray(up.kernel[...], np.float64)
        x = x0 * (x @ matrix + np.asarray(up.bias[...], np.float64)) + x
    np.testing.assert_allclose(
        model(*inputs(), None), plain_mlp(model.top_mlp, x, activate_last=False), rtol=1e-5, atol=1e-5
    )
    assert len(model.cross.down) == 3


@pytest.mark.parametrize("interaction", ["dot", "cross"])
def test_without_dense_columns_there_is_no_bottom(interaction):
    schema = Schema(SCHEMA.features, SCHEMA.vocabulary, (), SCHEMA.labels)
    config = DLRMConfig(bottom_mlp=(6,), interaction=interaction, top_mlp=())
    model = config.create(schema, D, FLOAT32, nnx.Rngs(params=1))
    assert model.bottom_mlp is None
    _, activations = inputs()
    vectors = list(activations.values())
    if interaction == "dot":
        x = np.stack([(vectors[i] * vectors[j]).sum(axis=1) for i in range(3) for j in range(i)], axis=1)
    else:
        x = np.asarray(model.cross(np.concatenate(vectors, axis=1)))
    expected = plain_mlp(model.top_mlp, x, activate_last=False)
    np.testing.assert_allclose(model(np.zeros((B, 0), np.float32), activations, None), expected, rtol=1e-5, atol=1e-5)


def test_features_are_taken_in_the_schema_order():
    model = create()
    dense, activations = inputs()
    shuffled = dict(reversed(activations.items()))
    np.testing.assert_array_equal(model(dense, shuffled, None), model(dense, activations, None))


ROWS, COLUMNS = 64, 50


def mask(sizes: tuple[int, int], layer: str = "top_mlp/0", step: int = 3, seed: int = 7, rate: float = 0.3):
    mesh = mesh_lib.create(mesh_lib.MeshConfig(*sizes))

    def body(x):
        rows = mesh_lib.device_index() * x.shape[0] + jnp.arange(x.shape[0], dtype=jnp.int32)
        return dropout(x, rate, DropoutSource(seed, jnp.int32(step), rows), layer)

    spec = mesh_lib.BATCH
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    return np.asarray(program(np.ones((ROWS, COLUMNS), np.float32)))


def test_dropout_is_the_same_on_every_mesh():
    first = mask((1, 1))
    for sizes in ((8, 1), (1, 8), (2, 4)):
        np.testing.assert_array_equal(mask(sizes), first)
    for other in (mask((1, 1), layer="top_mlp/1"), mask((1, 1), step=4), mask((1, 1), seed=8)):
        assert 0.2 < (other != first).mean() < 0.65  # 2 * 0.3 * 0.7 where the masks are independent.
    assert len(np.unique(first, axis=0)) == ROWS and len(np.unique(first, axis=1).T) == COLUMNS


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_drops_at_its_rate_and_keeps_the_mean(rate):
    x = dropout(jnp.ones((1000, 100)), rate, DropoutSource(0, jnp.int32(0), jnp.arange(1000)), "layer")
    dropped = float((x == 0).mean())
    assert abs(dropped - rate) < 5 * (rate * (1 - rate) / 100_000) ** 0.5
    np.testing.assert_allclose(x[x != 0], 1 / (1 - rate), rtol=1e-6)


def test_dropout_only_with_a_source_and_only_in_the_top():
    source = DropoutSource(0, jnp.int32(0), jnp.arange(B))
    never, model = create(), create(dropout=0.5)
    np.testing.assert_array_equal(model(*inputs(), None), never(*inputs(), None))
    np.testing.assert_array_equal(never(*inputs(), source), never(*inputs(), None))
    assert not np.array_equal(model(*inputs(), source), model(*inputs(), None))
    dense = inputs()[0]
    np.testing.assert_array_equal(model.bottom_mlp(dense, source), model.bottom_mlp(dense, None))


def test_feature_dropout_acts_before_the_interaction():
    source = DropoutSource(0, jnp.int32(0), jnp.arange(B))
    model, never = create(feature_dropout=0.5), create()
    np.testing.assert_array_equal(model(*inputs(), None), never(*inputs(), None))
    dense, activations = inputs()
    x = np.concatenate([np.asarray(model.bottom_mlp(dense, None)), *activations.values()], axis=1)
    x = np.asarray(dropout(jnp.asarray(x), 0.5, source, "features"))
    assert (x == 0).mean() > 0.3
    parts = np.split(x.astype(np.float64), 4, axis=1)
    pairs = [(parts[i] * parts[j]).sum(axis=1) for i in range(4) for j in range(i)]
    expected = plain_mlp(
        model.top_mlp, np.concatenate([parts[0], np.stack(pairs, axis=1)], axis=1), activate_last=False
    )
    np.testing.assert_allclose(model(*inputs(), source), expected, rtol=1e-5, atol=1e-5)


def test_bfloat16_computes_in_bfloat16_with_float32_parameters_and_sums():
    config = DLRMConfig(bottom_mlp=(6, D), top_mlp=(7, 3))
    models = {p: config.create(SCHEMA, D, policy(p), nnx.Rngs(params=1)) for p in ("float32", "bfloat16")}
    params = jax.tree.leaves(nnx.state(models["bfloat16"], nnx.Param))
    assert {x.dtype for x in params} == {jnp.dtype("float32")}
    logits = {p: m(*inputs(), None) for p, m in models.items()}
    assert logits["bfloat16"].dtype == jnp.float32
    difference = jnp.abs(logits["float32"] - logits["bfloat16"]).max()
    assert 0 < difference < 0.05 * jnp.abs(logits["float32"]).max()
    text = str(jax.make_jaxpr(lambda d, a: models["bfloat16"](d, a, None))(*inputs()))
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) == 6 and all("f32[" in line.split("=")[0] for line in products)
    assert "bf16[" in text


def test_binary_cross_entropy():
    z = np.array([-100.0, -2.0, 0.0, 3.0, 100.0, 90.0], np.float32)
    y = np.array([0, 1, 0, 1, 1, 0], np.float32)
    p = 1 / (1 + np.exp(-z.astype(np.float64)))
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = np.where(y == 1, -np.log(p), z + np.log1p(np.exp(-z.astype(np.float64))))
    np.testing.assert_allclose(binary_cross_entropy(z, y), expected, rtol=1e-6, atol=1e-30)


def test_refuses_a_feature_looked_up_by_position():
    schema = Schema((FeatureSpec("seq", "bag", "t", "none", 3),), {"t": 9}, ("a",), ("click",))
    with pytest.raises(UserError, match="feature seq is looked up per position, but DLRM takes pooled features"):
        DLRMConfig(bottom_mlp=(D,)).create(schema, D, FLOAT32, nnx.Rngs(params=0))


def test_dot_refuses_a_bottom_of_another_width():
    with pytest.raises(UserError, match=r"ends with 6, but the dot interaction needs embedding.dim, which is 4"):
        create(bottom_mlp=(6,))
    create(bottom_mlp=(6,), interaction="cross")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"interaction": "sum"}, "model.interaction is 'sum', but must be one of: dot, cross"),
        ({"dropout": 1.0}, "model.dropout is 1.0"),
        ({"dropout": -0.1}, "model.dropout is -0.1"),
        ({"feature_dropout": 1.0}, "model.feature_dropout is 1.0"),
        ({"bottom_mlp": ()}, "model.bottom_mlp is empty"),
        ({"top_mlp": (4, 0)}, "model.top_mlp holds a width below 1"),
        ({"cross_rank": 0}, "model.cross_rank is 0"),
        ({"cross_layers": 0}, "model.cross_layers is 0"),
    ],
)
def test_config_is_validated(options, message):
    with pytest.raises(UserError, match=message):
        DLRMConfig(**options)
