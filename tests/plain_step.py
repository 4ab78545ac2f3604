"""The plain reference of a training step: one device, tables as ordinary arrays with dense gradients, float64 updates.

No plan, no routes, no shard_map; JAX differentiates the dense model and its loss.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrec.data.schema import Batch, Schema
from jaxrec.optim.sparse import SparseOptimizerConfig


def activations(schema: Schema, tables: dict, data: Batch) -> dict[str, jax.Array]:
    """Feature -> pooled vectors [B, D]."""
    out, start, bag = {}, 0, 0
    rows = data.weight.shape[0]
    for f in schema.features:
        vectors = jnp.take(tables[f.table], data.ids[:, start : start + f.max_length], axis=0)
        length = jnp.ones(rows)
        if f.kind != "categorical":
            length = data.lengths[:, bag]
            bag += 1
        vectors = vectors * (np.arange(f.max_length) < length[:, None])[..., None]
        divisor = jnp.maximum(length, 1)[:, None] if f.combiner == "mean" else 1.0
        out[f.name] = vectors.sum(axis=1) / divisor
        start += f.max_length
    return out


def touched(schema: Schema, data: Batch) -> dict[str, np.ndarray]:
    """Table -> bool [rows]: the rows that the batch names."""
    out = {t: np.zeros(rows, bool) for t, rows in schema.vocabulary.items()}
    start, bag = 0, 0
    for f in schema.features:
        ids, length = data.ids[:, start : start + f.max_length], np.ones(len(data.ids), int)
        if f.kind != "categorical":
            length = data.lengths[:, bag]
            bag += 1
        out[f.table][ids[np.arange(f.max_length) < length[:, None]]] = True
        start += f.max_length
    return out


def loss_and_gradients(schema: Schema, graphdef: Any, auxiliary_weight: float, scale: float = 1.0) -> Any:
    """Returns a jitted (dense, tables, batch) -> (loss of the tasks, gradients of dense and tables).

    The gradients are those of `scale` times the objective, divided by `scale` in the end.
    """
    tasks = len(schema.labels)

    def loss_of(dense: Any, tables: dict, data: Batch):
        z = nnx.merge(graphdef, dense)(data.dense, activations(schema, tables, data), None)
        p = jax.nn.sigmoid(z)
        losses = -(data.labels * jnp.log(p) + (1 - data.labels) * jnp.log(1 - p))
        of_tasks = (data.weight * losses[:, :tasks].sum(axis=1)).sum() / data.weight.sum()
        auxiliary = (data.weight * losses[:, tasks:].mean(axis=1)).sum() / data.weight.sum()
        return scale * (of_tasks + auxiliary_weight * auxiliary), of_tasks

    def call(dense: Any, tables: dict, data: Batch):
        gradients, loss = jax.grad(loss_of, argnums=(0, 1), has_aux=True)(dense, tables, data)
        return loss, *jax.tree.map(lambda g: g / scale, gradients)

    return jax.jit(call)


def new_slots(config: SparseOptimizerConfig, weights: np.ndarray) -> dict[str, np.ndarray]:
    wide, by_row = np.zeros(weights.shape), np.zeros((len(weights), 1))
    if config.name == "rowwise_adagrad":
        return {"accumulator": by_row + config.initial_accumulator}
    if config.name == "adagrad":
        return {"accumulator": wide + config.initial_accumulator}
    return {"adam": {"first": wide, "second": wide}, "momentum": {"momentum": wide}, "sgd": {}}[config.name]


def update(
    config: SparseOptimizerConfig, weights: np.ndarray, gradient: np.ndarray, slots: dict, rate: float, step: int
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """One update of whole rows in float64; `rate` includes the schedule, `step` counts from 0."""
    g, w = gradient.astype(np.float64), weights.astype(np.float64)
    slots = {name: s.astype(np.float64) for name, s in slots.items()}
    if config.name == "sgd":
        direction = g
    elif config.name == "momentum":
        direction = slots["momentum"] = config.b1 * slots["momentum"] + g
    elif config.name == "adam":
        slots["first"] = config.b1 * slots["first"] + (1 - config.b1) * g
        slots["second"] = config.b2 * slots["second"] + (1 - config.b2) * g**2
        root = np.sqrt(slots["second"] / (1 - config.b2 ** (step + 1))) + config.eps
        direction = slots["first"] / (1 - config.b1 ** (step + 1)) / root
    else:
        by_row = config.name == "rowwise_adagrad"
        slots["accumulator"] = slots["accumulator"] + ((g**2).mean(axis=1, keepdims=True) if by_row else g**2)
        direction = g / (np.sqrt(slots["accumulator"]) + config.eps)
    return w - rate * direction - rate * config.weight_decay * w, slots


def update_touched(
    config: SparseOptimizerConfig, weights: Any, gradient: Any, slots: dict, rate: float, step: int, rows: Any
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """`update` of the rows in the bool array `rows`; the others, and their slots, stay."""
    new, new_slots = update(config, np.asarray(weights), np.asarray(gradient), slots, rate, step)
    weights = np.where(rows[:, None], new, weights).astype(np.float32)
    return weights, {name: np.where(rows[:, None], new_slots[name], s) for name, s in slots.items()}
