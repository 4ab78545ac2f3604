"""Optimizers and schedules against NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrec.checks import UserError
from jaxrec.optim.adagrad import scale_by_adagrad
from jaxrec.optim.dense import DenseOptimizerConfig, direction
from jaxrec.optim.row_rule import Context
from jaxrec.optim.schedule import ScheduleConfig, factor
from jaxrec.optim.sparse import SPARSE_OPTIMIZERS, SparseOptimizerConfig, row_rule

U, D, STEPS = 6, 5, 5


def context(learning_rate, step=0):
    return Context(jnp.float32(learning_rate), jnp.int32(step), lambda values: values.mean(axis=-1))


def gradients(*shape):
    rng = np.random.default_rng(0)
    return (rng.normal(size=(STEPS, *shape)) * 10.0 ** rng.uniform(-3, 1, (STEPS, *shape))).astype(np.float32)


@pytest.mark.parametrize("initial", [0.0, 0.1])
@pytest.mark.parametrize("eps", [1e-8, 0.1])
def test_dense_adagrad_is_pytorchs(initial, eps):
    """torch.optim.Adagrad: state_sum += g^2; param -= lr * g / (sqrt(state_sum) + eps)."""
    transform = scale_by_adagrad(eps, initial)
    params = {"w": jnp.zeros((U, D))}
    state = transform.init(params)
    total = np.full((U, D), initial)
    for g in gradients(U, D):
        updates, state = transform.update({"w": jnp.asarray(g)}, state)
        total += g.astype(np.float64) ** 2
        np.testing.assert_allclose(updates["w"], g / (np.sqrt(total) + eps), rtol=2e-6)
        np.testing.assert_allclose(state.accumulator["w"], total, rtol=1e-6)


def row_loop(name, eps, initial, rate, per_step):
    """Weights and accumulators in float64, one row after another."""
    weights = np.ones((U, D))
    accumulator = np.full((U, D) if name == "adagrad" else U, initial)
    for step in per_step.astype(np.float64):
        for u in range(U):
            g = step[u]
            if name == "sgd":
                weights[u] -= rate * g
                continue
            accumulator[u] += g**2 if name == "adagrad" else sum(x * x for x in g) / D
            weights[u] -= rate * g / (np.sqrt(accumulator[u]) + eps)
    return weights, accumulator


@pytest.mark.parametrize("name", ["rowwise_adagrad", "adagrad", "sgd"])
@pytest.mark.parametrize("eps, initial", [(1e-8, 0.0), (0.1, 0.0), (1e-3, 0.5), (0.0, 0.0)])
def test_row_rules_equal_a_loop(name, eps, initial):
    rule = row_rule(SparseOptimizerConfig(name, eps=eps, initial_accumulator=initial))
    assert rule.slots == {"rowwise_adagrad": {"accumulator": False}, "adagrad": {"accumulator": True}, "sgd": {}}[name]
    weights = jnp.ones((U, D))
    slots = {s: jnp.full((U, D) if per_column else U, rule.initial) for s, per_column in rule.slots.items()}
    for g in gradients(U, D):
        delta, slots = rule.update(jnp.asarray(g), slots, context(0.05))
        weights = weights + delta
    expected, accumulator = row_loop(name, eps, initial, 0.05, gradients(U, D))
    np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-6)
    if slots:
        np.testing.assert_allclose(slots["accumulator"], accumulator, rtol=1e-5)


@pytest.mark.parametrize("name", ["rowwise_adagrad", "adagrad", "sgd"])
@pytest.mark.parametrize("eps", [1e-8, 0.0])
@pytest.mark.parametrize("initial", [0.0, 0.3])
def test_a_zero_gradient_leaves_a_row_unchanged(name, eps, initial):
    rule = row_rule(SparseOptimizerConfig(name, eps=eps, initial_accumulator=initial))
    for start in {rule.initial, 2.0}:
        slots = {s: jnp.full((U, D) if c else U, start, jnp.float32) for s, c in rule.slots.items()}
        delta, new = rule.update(jnp.zeros((U, D)), slots, context(0.5))
        assert (np.asarray(delta) == 0).all()
        for s, value in slots.items():
            np.testing.assert_array_equal(new[s], value)


def test_a_column_without_gradient_stays_where_its_row_moves():
    rule = row_rule(SparseOptimizerConfig("adagrad", eps=0.0))
    g = jnp.asarray([[1.0, 0.0]])
    delta, _ = rule.update(g, {"accumulator": jnp.zeros((1, 2))}, context(1.0))
    np.testing.assert_array_equal(delta, [[-1.0, 0.0]])
    updates, _ = scale_by_adagrad(0.0, 0.0).update(g, scale_by_adagrad(0.0, 0.0).init(g))
    np.testing.assert_array_equal(updates, [[1.0, 0.0]])


@pytest.mark.parametrize("eps", [1e-8, 1e-3, 0.0])
def test_lazy_adam_is_adam_on_the_rows_that_are_touched(eps):
    """torch.optim.SparseAdam: moments of touched rows only, bias correction by the run's step."""
    rule = row_rule(SparseOptimizerConfig("adam", eps=eps, b1=0.8, b2=0.99))
    weights = np.ones((U, D))
    first, second = np.zeros((U, D)), np.zeros((U, D))
    slots = {s: jnp.zeros((U, D)) for s in rule.slots}
    ours = jnp.ones((U, D))
    for step, g in enumerate(gradients(U, D)):
        touched = np.arange(U) % (step + 2) == 0
        rows = np.flatnonzero(touched)
        delta, new = rule.update(jnp.asarray(g[rows]), {k: v[rows] for k, v in slots.items()}, context(0.05, step))
        ours = ours.at[rows].add(delta)
        slots = {k: v.at[rows].set(new[k]) for k, v in slots.items()}
        for u in rows:
            first[u] = 0.8 * first[u] + 0.2 * g[u].astype(np.float64)
            second[u] = 0.99 * second[u] + 0.01 * g[u].astype(np.float64) ** 2
            corrected = np.sqrt(second[u] / (1 - 0.99 ** (step + 1))) + eps
            weights[u] -= 0.05 * first[u] / (1 - 0.8 ** (step + 1)) / corrected
    np.testing.assert_allclose(ours, weights, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(slots["second"], second, rtol=1e-5)


def test_momentum_of_rows():
    rule = row_rule(SparseOptimizerConfig("momentum", b1=0.75))
    velocity, total = np.zeros((U, D)), np.zeros((U, D))
    slots = {"momentum": jnp.zeros((U, D))}
    for g in gradients(U, D):
        delta, slots = rule.update(jnp.asarray(g), slots, context(0.05))
        velocity = 0.75 * velocity + g
        total += np.asarray(delta)
        np.testing.assert_allclose(delta, -0.05 * velocity, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SPARSE_OPTIMIZERS)
def test_the_sentinel_stays(name):
    rule = row_rule(SparseOptimizerConfig(name, initial_accumulator=0.25))
    slots = {s: jnp.full((U, D) if c else U, rule.initial, jnp.float32) for s, c in rule.slots.items()}
    delta, new = rule.update(jnp.zeros((U, D)), slots, context(0.5, 7))
    assert not np.asarray(delta).any()
    for s, value in slots.items():
        np.testing.assert_array_equal(new[s], value)


@pytest.mark.parametrize("name", ["adam", "adagrad", "sgd"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_dense_directions(name, decay):
    """The transformation without a learning rate: what is multiplied by -lr; weight decay is decoupled."""
    transform = direction(DenseOptimizerConfig(name, eps=1e-3, weight_decay=decay))
    w = jnp.full((D,), 2.0)
    state = transform.init(w)
    first = second = square = np.zeros(D)
    for t, g in enumerate(gradients(D).astype(np.float64), start=1):
        update, state = transform.update(jnp.asarray(g, jnp.float32), state, w)
        square = square + g**2
        first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g**2
        plain = {
            "adam": first / (1 - 0.9**t) / (np.sqrt(second / (1 - 0.999**t)) + 1e-3),
            "adagrad": g / (np.sqrt(square) + 1e-3),
            "sgd": g,
        }[name]
        np.testing.assert_allclose(update, plain + decay * np.asarray(w), rtol=1e-4, atol=1e-5)
        w = optax.apply_updates(w, -0.1 * update)


def values(config, steps):
    return [float(factor(config, jnp.int32(s))) for s in steps]


def test_schedules():
    assert values(ScheduleConfig(), [0, 1, 1000]) == [1, 1, 1]
    np.testing.assert_allclose(
        values(ScheduleConfig(warmup_steps=3), [0, 1, 2, 3, 4, 9]), [0.25, 0.5, 0.75, 1, 1, 1], rtol=1e-6
    )
    linear = ScheduleConfig("linear", warmup_steps=4, decay_steps=10, end_factor=0.2)
    np.testing.assert_allclose(
        values(linear, [0, 3, 4, 5, 9, 14, 15, 999]), [0.2, 0.8, 1, 0.92, 0.6, 0.2, 0.2, 0.2], rtol=1e-6
    )
    cosine = ScheduleConfig("cosine", decay_steps=8, end_factor=0.1)
    np.testing.assert_allclose(
        values(cosine, [0, 2, 4, 8, 20]),
        [1, 0.1 + 0.9 * (0.5 + 0.5 * math.cos(math.pi / 4)), 0.55, 0.1, 0.1],
        rtol=1e-6,
    )
    assert jax.eval_shape(lambda s: factor(linear, s), jnp.int32(0)).dtype == jnp.float32


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: SparseOptimizerConfig("adamw"),
            "embedding.optimizer.name is 'adamw', but must be one of: rowwise_adagrad",
        ),
        (lambda: SparseOptimizerConfig(learning_rate=-1.0), "embedding.optimizer.learning_rate is -1.0"),
        (lambda: SparseOptimizerConfig(eps=-1.0), "embedding.optimizer.eps is -1.0"),
        (lambda: SparseOptimizerConfig(initial_accumulator=-1.0), "embedding.optimizer.initial_accumulator is -1.0"),
        (lambda: SparseOptimizerConfig(learning_rate=float("nan")), "embedding.optimizer.learning_rate is nan"),
        (lambda: DenseOptimizerConfig("lamb"), "optimizer.name is 'lamb', but must be one of: adam, adagrad, sgd"),
        (lambda: DenseOptimizerConfig(weight_decay=-0.1), "optimizer.weight_decay is -0.1"),
        (lambda: DenseOptimizerConfig(learning_rate=-0.1), "optimizer.learning_rate is -0.1"),
        (lambda: ScheduleConfig("exponential"), "schedule.name is 'exponential', but must be one of"),
        (
            lambda: ScheduleConfig("linear"),
            "schedule.decay_steps is 0, but a linear schedule decays over at least 1 step",
        ),
        (lambda: ScheduleConfig(warmup_steps=-1), "schedule.warmup_steps is -1, but must not be negative"),
    ],
)
def test_configs_are_validated(make, message):
    with pytest.raises(UserError, match=message):
        make()
