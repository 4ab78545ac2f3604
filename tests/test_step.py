"""The whole step: on 8 devices against 1, and when it fails. `test_combinations` has it against a plain program."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec.data.schema import Batch, Dataset, FeatureSpec, Schema
from jaxrec.embeddings.spec import EmbeddingConfig
from jaxrec.fsdp import unpack
from jaxrec.mesh import MeshConfig
from jaxrec.models.dlrm import DLRM, DLRMConfig
from jaxrec.optim.dense import DenseOptimizerConfig
from jaxrec.optim.schedule import ScheduleConfig
from jaxrec.optim.sparse import SparseOptimizerConfig
from jaxrec.profiling.collectives import collectives
from jaxrec.training import setup
from jaxrec.training.checkpoint import from_arrays, to_arrays
from jaxrec.training.config import Config, TrainingConfig
from jaxrec.training.state import LossScale
from jaxrec.training.step import checks, shard_predict_step, shard_train_step

B, STEPS = 32, 20
SCHEMA = Schema(
    (
        FeatureSpec("watched", "categorical", "items"),
        FeatureSpec("history", "bag", "items", "mean", 4),
        FeatureSpec("tags", "bag", "tags", "sum", 3),
    ),
    {"items": 50, "tags": 11},
    ("a", "b", "c"),
    ("click", "like"),
    ("save", "share", "buy"),
)
DATASET = Dataset("test", SCHEMA, {})
BASE = Config(
    name="test",
    data=None,  # pyright: ignore[reportArgumentType]
    model=DLRMConfig(bottom_mlp=(8, 8), top_mlp=(8,), dropout=0.25),
    embedding=EmbeddingConfig(dim=8, init_scale=0.1, optimizer=SparseOptimizerConfig(learning_rate=0.05)),
    optimizer=DenseOptimizerConfig("adam", learning_rate=1e-2),
    schedule=ScheduleConfig("linear", warmup_steps=3, decay_steps=30, end_factor=0.1),
    training=TrainingConfig(batch_size=B, seed=5, auxiliary_weight=0.7),
)
MESHES = ((8, 1), (1, 8), (2, 4))

over_meshes = pytest.mark.parametrize("mesh", MESHES, ids=lambda m: f"data{m[0]}model{m[1]}")
over_strategies = pytest.mark.parametrize("sharding", ["replicated", "row", "row_cyclic", "table", "column"])


def on(config: Config, sharding: str, mesh: tuple[int, int]) -> Config:
    embedding = dataclasses.replace(config.embedding, sharding=sharding)
    return dataclasses.replace(config, embedding=embedding, mesh=MeshConfig(*mesh))


@functools.cache
def build(config: Config):
    """Returns (program, first state and window on the host, their shardings, jitted step), each made once."""
    program, dense = setup.build_program(config, DATASET)
    first = (setup.initial_state(program, dense), setup.new_window(program))
    shardings = jax.tree.map(lambda x: x.sharding, first)
    return program, jax.device_get(first), shardings, shard_train_step(program)


def start(config: Config):
    """Returns the program, a state and window of its own buffers, and the step."""
    program, first, shardings, step = build(config)
    state, window = jax.device_put(first, shardings, may_alias=False)
    return program, state, window, step


@functools.cache
def batch(k: int) -> Batch:
    """A batch with empty bags, repeated ids and rows of other weights; its last rows are padding."""
    rng = np.random.default_rng([7, k])
    lengths = np.stack([rng.integers(0, f.max_length + 1, B) for f in SCHEMA.bags], axis=1).astype(np.int32)
    ids = np.concatenate(
        [
            np.minimum(rng.geometric(0.2, (B, f.max_length)) - 1, SCHEMA.vocabulary[f.table] - 1)
            for f in SCHEMA.features
        ],
        axis=1,
    ).astype(np.int32)
    weight = rng.choice([1.0, 0.5, 2.0], B).astype(np.float32)
    weight[-3:] = 0
    dense = rng.normal(size=(B, len(SCHEMA.dense))).astype(np.float32)
    labels = (rng.random((B, len(SCHEMA.tasks))) < 0.4).astype(np.float32)
    return Batch(ids, lengths, dense, labels, weight)


def host(program, state):
    """The state's floats by name: dense parameters, tables and optimizer rows, whatever the mesh."""
    out = {}
    leaves, shapes = jax.tree_util.tree_leaves_with_path(state.dense), jax.tree.leaves(program.whole_shapes()[0])
    for (path, x), shape in zip(leaves, shapes, strict=True):
        out[jax.tree_util.keystr(path)] = unpack(np.asarray(x), shape.shape, program.dense_shards)
    for g in program.plan.groups:
        table = state.tables[g.name]
        for part, array in {"weights": np.asarray(table.weights).view(g.dtype), **table.slots}.items():
            out |= {f"{name} {part}": value for name, value in g.to_logical(np.asarray(array)).items()}
    return out


def train(config: Config, steps: int):
    """Returns the losses (mean over the batch, by step) and the final state on the host."""
    program, state, window, step = start(config)
    losses, empty = [], jax.device_get(window)
    for k in range(steps):
        window = jax.device_put(empty, jax.tree.map(lambda x: x.sharding, window), may_alias=False)
        state, window, done = step(state, window, batch(k))
        assert int(done) == k + 1
        losses.append(float(window.loss) / float(window.weight))
    assert int(state.step) == steps and int(state.failed_step) == -1
    return np.array(losses), host(program, state)


@functools.cache
def one_device():
    return train(on(BASE, "replicated", (1, 1)), STEPS)


@over_strategies
@over_meshes
def test_eight_devices_equal_one(sharding, mesh):
    losses, state = train(on(BASE, sharding, mesh), STEPS)
    expected_losses, expected = one_device()
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6, atol=0)
    assert len(np.unique(losses)) == STEPS
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        # Adam divides by the root of its mean square, which enlarges rounding where a gradient is near 0.
        np.testing.assert_allclose(state[name], value, rtol=1e-4, atol=2e-6, err_msg=name)


def fsdp(config: Config) -> Config:
    return dataclasses.replace(config, dense_sharding="fsdp")


@pytest.mark.parametrize(
    "sharding, mesh", [("replicated", (1, 8)), ("column", (2, 4)), ("row", (2, 4)), ("replicated", (8, 1))]
)
def test_fsdp_equals_one_device(sharding, mesh):
    losses, state = train(fsdp(on(BASE, sharding, mesh)), STEPS)
    expected_losses, expected = one_device()
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6, atol=0)
    for name, value in expected.items():
        np.testing.assert_allclose(state[name], value, rtol=1e-4, atol=2e-6, err_msg=name)


def test_fsdp_stores_parts_and_gathers_layer_by_layer():
    """Stored bytes fall with `model`; at no time are all layers whole; bytes moved are the docstring's."""
    wide = dataclasses.replace(BASE.model, bottom_mlp=(8, 8), top_mlp=(512,) * 6)
    memory, moved, elements = {}, {}, 0
    for name, config in (
        ("whole", dataclasses.replace(on(BASE, "replicated", (1, 8)), model=wide)),
        ("parts", fsdp(dataclasses.replace(on(BASE, "replicated", (1, 8)), model=wide))),
    ):
        program, state, window, step = start(config)
        compiled = step.lower(state, window, batch(0)).compile()
        memory[name] = compiled.memory_analysis()
        moved[name] = sum(c.received_bytes for c in collectives(compiled))
        elements = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(program.whole_shapes()[0]))
    parameters = 4 * elements
    assert parameters > 5 * 4 * 512 * 512
    # Parameters and Adam's two moments: 3 whole copies, against 3 eighths.
    saved = memory["whole"].argument_size_in_bytes - memory["parts"].argument_size_in_bytes
    assert abs(saved - 3 * parameters * 7 / 8) < 0.01 * parameters
    # Without the parts' own gradients and updates the temporaries hold a few layers, not all.
    assert memory["parts"].temp_size_in_bytes < memory["whole"].temp_size_in_bytes
    assert memory["parts"].temp_size_in_bytes < 0.75 * parameters
    # Gathered twice and scattered once, against one all-reduce of as much as two of these.
    extra = moved["parts"] - moved["whole"]
    assert abs(extra - parameters * 7 / 8) < 0.01 * parameters


def test_a_state_goes_through_checkpoints_between_dense_shardings():
    config = on(BASE, "row", (2, 4))
    program, state, window, step = start(fsdp(config))
    state, window, _ = step(state, window, batch(0))
    arrays = to_arrays(program, state)
    other, other_state, other_window, other_step = start(on(BASE, "replicated", (1, 8)))
    moved = from_arrays(other, other_state, arrays, "checkpoint")
    back = to_arrays(other, moved)
    assert arrays.keys() == back.keys() and any(name.startswith("optimizer/") for name in arrays)
    for name, value in arrays.items():
        assert value.tobytes() == back[name].tobytes(), name
    losses = []
    for here, its_window, its_step in ((state, start(fsdp(config))[2], step), (moved, other_window, other_step)):
        after, its_sums, _ = its_step(here, its_window, batch(1))
        losses.append(float(its_sums.loss) / float(its_sums.weight))
        assert int(after.step) == 2
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)


def test_window_sums_count_the_weighted_tasks():
    _, state, window, step = start(on(BASE, "row", (2, 4)))
    state, window, _ = step(state, window, batch(0))
    state, window, _ = step(state, window, batch(1))
    weight = sum(2 * batch(k).weight.sum() for k in (0, 1))
    label = sum((batch(k).labels[:, :2] * batch(k).weight[:, None]).sum() for k in (0, 1))
    np.testing.assert_allclose(window.weight, weight, rtol=1e-6)
    np.testing.assert_allclose(window.label, label, rtol=1e-6)
    assert 0 < float(window.prediction) < weight


def test_padding_changes_nothing():
    """What stands in a row of weight 0 has no influence."""
    config = on(BASE, "row", (2, 4))
    ends = []
    for fill in (0, 1):
        program, state, window, step = start(config)
        data = Batch(*(a.copy() for a in batch(0)))
        for a, other in zip(data[:-1], (3, 1, 2.5, 1.0), strict=True):
            a[-3:] = other if fill else 0
        state, window, _ = step(state, window, data)
        ends.append({**host(program, state), "loss": np.asarray(window.loss), "weight": np.asarray(window.weight)})
    for name, value in ends[0].items():
        np.testing.assert_array_equal(value, ends[1][name], err_msg=name)


def copies(tree):
    """The bytes of every array on every device."""
    return [np.asarray(s.data).tobytes() for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards]


def without_work(state):
    """What must not change: everything but the failure and what an engine keeps, such as the scratch of merging."""
    tables = {k: (t.weights, t.slots) for k, t in state.tables.items()}
    return state.step, state.dense, state.optimizer, tables


def restored(program, state):
    """The state as if from a checkpoint, so that what an engine keeps of its tables is that of spoilt ones."""
    return from_arrays(program, state, to_arrays(program, state), "checkpoint")


def spoil_dense_input(data, state):
    data.dense[21, 1] = np.nan  # One row: one device of eight.
    return data, state


def spoil_weight(data, state):
    data.weight[5] = np.inf
    return data, state


def spoil_table(data, state):
    name, table = next(iter(state.tables.items()))
    weights = jax.device_put(np.where(np.asarray(table.weights) == 0, 0, np.float32(np.inf)), table.weights.sharding)
    return data, state._replace(tables={**state.tables, name: table._replace(weights=weights)})


def overflow_the_update(data, state):
    """An accumulator that is not finite: loss, gradients and the updates of the weights are."""
    name, table = next(iter(state.tables.items()))
    old = table.slots["accumulator"]
    slot = np.full(old.shape, np.inf, np.float32)
    slot[np.asarray(table.weights == 0).all(axis=1)] = 0  # But not of the sentinels.
    slot = jax.device_put(slot, old.sharding)
    return data, state._replace(tables={**state.tables, name: table._replace(slots={"accumulator": slot})})


def spoil_parameters(data, state):
    """A NaN among the dense parameters."""
    leaves, tree = jax.tree.flatten(state.dense)
    leaves[-1] = jax.device_put(np.full(leaves[-1].shape, np.nan, np.float32), leaves[-1].sharding)
    return data, state._replace(dense=jax.tree.unflatten(tree, leaves))


def overflow_the_squares(data, state):
    """Gradients near 1e24: finite, but Adam's mean of their squares is not, and would make every later update 0."""
    data.labels[:] *= 1e25
    return data, state


FAULTS = {
    spoil_dense_input: "loss",
    spoil_weight: "loss",
    spoil_table: "loss",
    spoil_parameters: "loss",
    overflow_the_squares: "optimizer state nu.bottom_mlp.layers.0.bias",
    overflow_the_update: "update of embedding group0_dim8_rowwise_adagrad_{sharding}",
}


@pytest.mark.parametrize("fault", list(FAULTS), ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "sharding, mesh",
    [
        ("replicated", (1, 1)),
        ("replicated", (8, 1)),
        ("row", (2, 4)),
        ("column", (2, 4)),
        ("table", (1, 8)),
    ],
)
def test_a_step_that_is_not_finite_changes_nothing(fault, sharding, mesh):
    program, state, window, step = start(on(BASE, sharding, mesh))
    state, window, _ = step(state, window, batch(0))
    data, state = fault(Batch(*(a.copy() for a in batch(1))), state)
    state = restored(program, state)
    before, sums = copies(without_work(state)), copies(window)
    state, window, _ = step(state, window, data)
    assert copies(without_work(state)) == before
    assert copies(window) == sums
    assert {int(s.data) for s in state.failed_step.addressable_shards} == {1}
    assert len({int(s.data) for s in state.failed_check.addressable_shards}) == 1
    tensor = checks(program, state)[int(state.failed_check)]
    assert tensor == FAULTS[fault].format(sharding=sharding) + " is not finite"
    for k in (2, 3):  # The steps that were queued behind it.
        state, window, _ = step(state, window, batch(k))
        assert copies(without_work(state)) == before
        assert copies(window) == sums
        assert int(state.failed_step) == 1
        assert checks(program, state)[int(state.failed_check)] == tensor


@dataclasses.dataclass(frozen=True)
class TrappedConfig(DLRMConfig):
    """A DLRM whose value is finite everywhere, but whose gradient is not where the first dense feature is 7."""

    def create(self, schema, dim, policy, rngs):
        return Trapped(self, schema, dim, policy, rngs)


class Trapped(DLRM):
    def __call__(self, dense, activations, source):
        trap = jnp.sqrt(jnp.abs(dense[:, :1] - 7) * jnp.square(activations["watched"][:, :1]))
        return super().__call__(dense, activations, source) + 0.0 * trap


@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: f"data{m[0]}model{m[1]}")
@pytest.mark.parametrize("sharding, dense_sharding", [("row_cyclic", "fsdp"), ("column", "replicated")])
def test_a_gradient_that_is_nan_on_one_device_changes_nothing_on_any(sharding, dense_sharding, mesh):
    model = TrappedConfig(**{f.name: getattr(BASE.model, f.name) for f in dataclasses.fields(BASE.model)})
    config = dataclasses.replace(on(BASE, sharding, mesh), model=model, dense_sharding=dense_sharding)
    program, state, window, step = start(config)
    state, window, _ = step(state, window, batch(0))
    assert int(state.step) == 1 and int(state.failed_step) == -1
    before, sums = copies(without_work(state)), copies(window)
    data = Batch(*(a.copy() for a in batch(1)))
    data.dense[21, 0] = 7.0  # One row: one device of eight.
    logits = shard_predict_step(program)(state.dense, state.tables, data)
    assert np.isfinite(np.asarray(logits)).all()
    state, window, _ = step(state, window, data)
    assert copies(without_work(state)) == before and copies(window) == sums
    assert {int(s.data) for s in state.failed_step.addressable_shards} == {1}
    assert checks(program, state)[int(state.failed_check)] == "gradient of embedding feature watched is not finite"


def test_an_update_that_overflows_names_its_parameter():
    """Loss and gradients are finite, w - lr * (g + decay * w) is not where w is not 0, as the biases are."""
    optimizer = DenseOptimizerConfig("sgd", learning_rate=1e6, weight_decay=1e37)
    program, state, window, step = start(dataclasses.replace(on(BASE, "replicated", (1, 1)), optimizer=optimizer))
    before = copies(without_work(state))
    state, window, _ = step(state, window, batch(0))
    assert int(state.failed_step) == 0
    assert checks(program, state)[int(state.failed_check)] == "updated bottom_mlp.layers.0.kernel is not finite"
    assert copies(without_work(state)) == before


@over_strategies
def test_clipping_bounds_the_global_norm(sharding):
    """With SGD of rate 1 a step's change is its gradient: clipped, it has the norm asked for and the same direction."""
    sgd = SparseOptimizerConfig("sgd", learning_rate=1.0)
    plain = dataclasses.replace(
        on(BASE, sharding, (2, 4)),
        optimizer=DenseOptimizerConfig("sgd", learning_rate=1.0),
        embedding=dataclasses.replace(BASE.embedding, optimizer=sgd, sharding=sharding),
        schedule=ScheduleConfig(),
    )

    def change(clip_norm: float, config: Config = plain):
        config = dataclasses.replace(config, training=dataclasses.replace(config.training, clip_norm=clip_norm))
        program, state, window, step = start(config)
        before = host(program, state)
        state, *_ = step(state, window, batch(0))
        assert int(state.failed_step) == -1
        return {name: value - before[name] for name, value in host(program, state).items()}

    free, loose, tight = change(0.0), change(1e6), change(0.01)
    norm = np.sqrt(sum((d.astype(np.float64) ** 2).sum() for d in free.values()))
    assert norm > 0.1
    for name, d in free.items():
        np.testing.assert_array_equal(loose[name], d)
        np.testing.assert_allclose(tight[name], d * (0.01 / norm), rtol=1e-3, atol=1e-7, err_msg=name)
    for other in (dataclasses.replace(plain, mesh=MeshConfig()), fsdp(plain)):
        again = change(0.01, other)
        for name, d in tight.items():
            np.testing.assert_allclose(again[name], d, rtol=1e-3, atol=1e-7, err_msg=name)


def test_checks_have_names_of_their_own():
    program, state, *_ = start(on(BASE, "row", (2, 4)))
    names = checks(program, state)
    assert len(names) == len(set(names))
    tensors = ("loss", "gradient of embedding feature tags", "gradient of top_mlp.layers.1.bias")
    assert {f"{tensor} is not finite" for tensor in tensors} < set(names)


def test_bfloat16_keeps_float32_state_and_changes_little():
    logits = {}
    for precision in ("float32", "bfloat16"):
        config = dataclasses.replace(on(BASE, "row", (2, 4)), precision=precision)
        program, state, window, step = start(config)
        first = shard_predict_step(program)(state.dense, state.tables, batch(0))
        assert first.dtype == jnp.float32 and first.shape == (B, len(SCHEMA.tasks))
        logits[precision] = np.asarray(first)
        for k in range(3):
            state, window, _ = step(state, window, batch(k))
        assert int(state.failed_step) == -1
        floats = [x for x in jax.tree.leaves((state, window)) if jnp.issubdtype(x.dtype, jnp.floating)]
        assert {x.dtype for x in floats} == {jnp.dtype("float32")}
    difference = np.abs(logits["float32"] - logits["bfloat16"])
    scale = np.abs(logits["float32"]).max()
    assert 0 < difference.max() < 0.03 * scale


FLOAT16 = dataclasses.replace(BASE, precision="float16")


def scaled_start(config: Config, scale: float, good_steps: int = 0):
    program, state, window, step = start(config)
    numbers = LossScale(np.float32(scale), np.int32(good_steps), np.int32(0))
    put = [jax.device_put(x, y.sharding) for x, y in zip(numbers, state.loss_scale, strict=True)]
    return program, state._replace(loss_scale=LossScale(*put)), window, step


@pytest.mark.parametrize("mesh", [(1, 1), (2, 4)], ids=["1", "8"])
def test_float16_differs_by_its_rounding_only(mesh):
    losses, state = train(on(FLOAT16, "row", mesh), STEPS)
    expected, single = one_device()
    # A few layers, each of whose products is rounded to 11 bits.
    np.testing.assert_allclose(losses, expected, rtol=20 * float(np.finfo(np.float16).eps))
    assert (losses != expected).any()
    assert all(value.dtype == np.float32 for value in state.values()) and state.keys() == single.keys()


def test_a_step_that_overflows_at_its_scale_is_skipped():
    program, state, window, step = scaled_start(on(FLOAT16, "row", (2, 4)), 2.0**24)
    # Large gradients: with this scale they are beyond float16, with a smaller they are not.
    data = batch(0)._replace(dense=batch(0).dense * 300)
    before, sums = host(program, state), copies(window)
    skipped = 0
    while True:
        state, window, _ = step(state, window, data)
        if int(state.loss_scale.skipped) == skipped:
            break
        skipped += 1
        assert int(state.step) == skipped and int(state.failed_step) == -1
        assert float(state.loss_scale.scale) == 2.0 ** (24 - skipped)
        for name, value in host(program, state).items():
            np.testing.assert_array_equal(value, before[name])
        assert copies(window) == sums
    assert 0 < skipped < 24 and int(state.step) == skipped + 1 and int(state.loss_scale.good_steps) == 1
    assert any((value != before[name]).any() for name, value in host(program, state).items())
    back = from_arrays(program, state, to_arrays(program, state), "checkpoint")
    assert [float(x) for x in back.loss_scale] == [2.0 ** (24 - skipped), 1, skipped]


def test_the_loss_scale_grows_and_changes_no_result():
    config, ends = on(FLOAT16, "row", (1, 1)), []
    for scale, good_steps in ((2.0**10, 1999), (2.0**8, 0)):
        program, state, window, step = scaled_start(config, scale, good_steps)
        state, window, _ = step(state, window, batch(0))
        ends.append((host(program, state), [float(x) for x in state.loss_scale]))
    assert ends[0][1] == [2.0**11, 0, 0] and ends[1][1] == [2.0**8, 1, 0]
    for name, value in ends[0][0].items():  # Powers of two: equal but for what vanishes at the smaller one.
        np.testing.assert_allclose(value, ends[1][0][name], rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("fault", [spoil_dense_input, spoil_weight], ids=lambda f: f.__name__)
def test_no_scale_mends_a_loss_that_is_not_finite(fault):
    program, state, window, step = start(on(FLOAT16, "row", (2, 4)))
    data, state = fault(Batch(*(a.copy() for a in batch(0))), state)
    state, window, _ = step(state, window, data)
    assert int(state.failed_step) == 0 and int(state.loss_scale.skipped) == 0 and int(state.step) == 0
    assert checks(program, state)[int(state.failed_check)] == "loss is not finite"


def test_at_the_least_scale_a_fault_is_a_fault():
    program, state, window, step = scaled_start(on(FLOAT16, "row", (2, 4)), 1.0)
    data, state = overflow_the_update(batch(0), state)
    state = restored(program, state)
    state, window, _ = step(state, window, data)
    assert int(state.failed_step) == 0 and int(state.loss_scale.skipped) == 0
