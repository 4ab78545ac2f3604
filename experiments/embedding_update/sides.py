"""The implementations: each looks up a batch's bags and updates the touched rows.

The loss is SCALE / 2 times the sum of the squares of the pooled rows: its gradient is there after the lookup, as in
training, and costs next to nothing.

Shape suffixes: B rows of the batch, V bags of a row, D dim, R rows of all tables.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping
from typing import Any, Protocol, final

import numpy as np

from experiments.embedding_update.points import BATCHES, Point
from jaxrec.data.pipeline import Batches
from jaxrec.data.schema import Batch, Dataset, Schema
from jaxrec.training.config import Config

# Implementation -> the optimizer of rows that it is measured with. No ratio is taken across optimizers.
STACKS = {
    "jaxrec compiled": "rowwise_adagrad",
    "jaxrec XLA": "rowwise_adagrad",
    "JAX dense gradient": "rowwise_adagrad",
    "FBGEMM": "rowwise_adagrad",
    "jaxrec compiled Adagrad": "adagrad",
    "jaxrec XLA Adagrad": "adagrad",
    "EmbeddingBag Adagrad": "adagrad",
}
SCALE = 0.1
ARRAYS = ("weights", "accumulator")
# Of these a step with the check of finite values is timed, too.
WITH_CHECKS = ("jaxrec compiled", "jaxrec XLA")
TORCH = ("FBGEMM", "EmbeddingBag Adagrad")


class Side(Protocol):
    """An implementation at a point."""

    def settings(self) -> list[dict[str, Any]]:
        """Returns the settings among which the fastest is to be found."""
        ...

    def use(self, setting: Mapping[str, Any]) -> None:
        """Changes to a setting."""
        ...

    def run(self, steps: int) -> float:
        """Returns the ms of a step: lookup, update."""
        ...

    def forward(self, steps: int) -> float:
        """Returns the ms of a lookup alone."""
        ...

    def end(self) -> dict[str, np.ndarray]:
        """Returns logical arrays, `tables/NAME/weights` and `tables/NAME/accumulator`."""
        ...


def batches_of(config: Config, dataset: Dataset) -> list[Batch]:
    """Returns the batches of a point."""
    made = Batches(dataset, "train", config.training.batch_size, seed=0)
    return [made[k].batch for k in range(BATCHES)]


def first_arrays(config: Config, schema: Schema) -> dict[str, np.ndarray]:
    """Returns `tables/NAME/weights` and `tables/NAME/accumulator`, the same for every implementation."""
    arrays, wide = {}, config.embedding.optimizer.name == "adagrad"
    for number, (name, rows) in enumerate(schema.vocabulary.items()):
        draws = np.random.default_rng([2, number]).random((rows, config.embedding.dim), np.float32)
        arrays[f"tables/{name}/weights"] = (2 * draws - 1) * np.float32(rows**-0.5)
        arrays[f"tables/{name}/accumulator"] = np.zeros(draws.shape if wide else draws.shape[:1], np.float32)
    return arrays


@final
class JaxSide:
    """jaxrec's tables, by one of its engines or with a dense gradient; with the check of finite values or without."""

    def __init__(self, stack: str, point: Point):
        import jax
        import jax.numpy as jnp

        from jaxrec import mesh as mesh_lib
        from jaxrec.embeddings import engines, lookup
        from jaxrec.embeddings import tables as tables_lib
        from jaxrec.training import setup

        config = point.config(STACKS[stack])
        kernel = "compiled" if "compiled" in stack else "xla"
        config = dataclasses.replace(config, embedding=dataclasses.replace(config.embedding, kernel=kernel))
        dataset = config.data.open("")
        self._plan = setup.plan_tables(config, dataset.schema, "cpu")
        mesh = mesh_lib.create(config.mesh)
        first = first_arrays(config, dataset.schema)
        self._tables = {
            g.name: tables_lib.from_logical(
                g, mesh, {what: {t.name: first[f"tables/{t.name}/{what}"] for t in g.tables} for what in ARRAYS}
            )
            for g in self._plan.groups
        }
        self._inputs = [(jnp.asarray(b.ids), jnp.asarray(b.lengths)) for b in batches_of(config, dataset)]
        features, dim = self._plan.features, point.dim
        plan, sizes = self._plan, dict(mesh.shape)

        def pooled(tables: Any, ids: jax.Array, lengths: jax.Array) -> tuple[jax.Array, Any]:
            activations, routes = tables_lib.look_up(plan, tables, ids, lengths, sizes)
            return jnp.concatenate([activations[f] for f in features], axis=1), routes

        def step(tables: Any, ids: jax.Array, lengths: jax.Array, *, checks: bool) -> Any:
            out, routes = pooled(tables, ids, lengths)
            g = SCALE * out
            of_feature = {f: g[:, k * dim : (k + 1) * dim] for k, f in enumerate(features)}
            merged = tables_lib.merge_gradients(plan, tables, routes, of_feature, lengths, sizes)
            proposals = tables_lib.propose(plan, tables, merged, jnp.float32(1), jnp.int32(0), 0)
            ok = jnp.asarray(True)
            if checks:
                faults = tables_lib.check(plan, tables, proposals, of_feature)
                ok = ~jnp.stack([*faults.features.values(), *faults.groups.values()]).any()
            return tables_lib.commit(plan, tables, proposals, ok), out

        def dense_step(tables: Any, ids: jax.Array, lengths: jax.Array, *, checks: bool) -> Any:
            del checks
            (group,) = plan.groups
            table = tables[group.name]

            def from_weights(weights: jax.Array) -> jax.Array:
                places = lookup.places_of_slots(group, ids, lengths)
                activations = lookup.pool(group, weights.at[places].get(mode="promise_in_bounds"), lengths)
                return jnp.concatenate([activations[f] for f in features], axis=1)

            out, transpose = jax.vjp(from_weights, table.weights)
            (g_RD,) = transpose(SCALE * out)
            optimizer = config.embedding.optimizer
            # Rows that no id names have a gradient of 0, which changes nothing.
            sums = table.slots["accumulator"] + jnp.mean(jnp.square(g_RD), axis=1)
            rate = optimizer.learning_rate / (jnp.sqrt(sums) + optimizer.eps)
            weights = table.weights - rate[:, None] * g_RD
            return {group.name: table._replace(weights=weights, slots={"accumulator": sums})}, out

        run = dense_step if "dense" in stack else step
        self._engine = engines.choose(kernel, "cpu")[1]
        shapes = (self._tables, *self._inputs[0])
        self._programs = {
            checks: jax.jit(functools.partial(run, checks=checks), donate_argnums=0).lower(*shapes).compile()
            for checks in ((False,) if "dense" in stack else (False, True))
        }
        self._forward = jax.jit(lambda *args: pooled(*args)[0]).lower(*shapes).compile()
        self._checks = False

    def settings(self) -> list[dict[str, Any]]:
        return [{"checks": checks} for checks in self._programs]

    def use(self, setting: Mapping[str, Any]) -> None:
        self._checks = setting["checks"]

    def run(self, steps: int) -> float:
        program, out = self._programs[self._checks], None
        begin = time.perf_counter()
        for k in range(steps):
            self._tables, out = program(self._tables, *self._inputs[k % BATCHES])
        self._wait(out)
        return (time.perf_counter() - begin) / steps * 1e3

    def forward(self, steps: int) -> float:
        out, begin = None, time.perf_counter()
        for k in range(steps):
            out = self._forward(self._tables, *self._inputs[k % BATCHES])
        self._wait(out)
        return (time.perf_counter() - begin) / steps * 1e3

    def _wait(self, out: Any) -> None:
        import jax

        jax.block_until_ready((self._tables, out))

    def end(self) -> dict[str, np.ndarray]:
        arrays = {}
        for g in self._plan.groups:
            table = self._tables[g.name]
            for what, array in (("weights", table.weights), *table.slots.items()):
                logical = g.to_logical(np.asarray(array))
                arrays |= {f"tables/{name}/{what}": value for name, value in logical.items()}
        return arrays


@final
class TorchSide:
    """FBGEMM's fused tables, or `EmbeddingBag`s with PyTorch's sparse Adagrad; first weights as jaxrec's."""

    def __init__(self, stack: str, point: Point):
        import torch

        self._stack, self._point = stack, point
        self._config = point.config(STACKS[stack])
        self._dataset = self._config.data.open("")
        self._batches = batches_of(self._config, self._dataset)
        self._threads = torch.get_num_threads()
        self._built = ""
        self.use(self.settings()[0])

    def settings(self) -> list[dict[str, Any]]:
        layouts = ["fused"] if self._stack == "FBGEMM" else ["separate", "joined"]
        threads = sorted({self._threads, max(1, self._threads // 2)}, reverse=True)
        return [{"threads": t, "ids": i, "layout": x} for x in layouts for i in ("int64", "int32") for t in threads]

    def use(self, setting: Mapping[str, Any]) -> None:
        import torch

        torch.set_num_threads(setting["threads"])
        if (wanted := f"{setting['layout']} {setting['ids']}") == self._built:
            return
        if setting["layout"] == "fused":
            from experiments.baselines.fused_tables import FusedTables as Tables
        elif setting["layout"] == "joined":
            from experiments.baselines.joined_bag import JoinedBag as Tables
        else:
            from experiments.baselines.embedding_bags import EmbeddingBags as Tables
        self._tables = self._inputs = None  # Freed before the next is allocated.
        self._tables = Tables(self._config, self._dataset.schema, "cpu", setting["ids"])
        self._tables.load(first_arrays(self._config, self._dataset.schema))
        self._inputs = [self._tables.put(b) for b in self._batches]
        self._built = wanted

    def run(self, steps: int) -> float:
        assert self._tables is not None and self._inputs is not None
        begin = time.perf_counter()
        for k in range(steps):
            pooled = self._tables.pool(self._inputs[k % BATCHES])  # pyright: ignore[reportArgumentType]
            self._tables.update(pooled, [SCALE * p.detach() for p in pooled])
        return (time.perf_counter() - begin) / steps * 1e3

    def forward(self, steps: int) -> float:
        assert self._tables is not None and self._inputs is not None
        begin = time.perf_counter()
        for k in range(steps):
            self._tables.pool(self._inputs[k % BATCHES])  # pyright: ignore[reportArgumentType]
        return (time.perf_counter() - begin) / steps * 1e3

    def end(self) -> dict[str, np.ndarray]:
        assert self._tables is not None
        return self._tables.export()


def side(stack: str, point: Point) -> Side:
    """Builds an implementation at a point."""
    return TorchSide(stack, point) if stack in TORCH else JaxSide(stack, point)
