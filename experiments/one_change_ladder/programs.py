"""The training steps of the ladder, each written as plainly as it can be; the last is jaxrec's own.

All start from jaxrec's first weights, take jaxrec's batches, and compute the same: DLRM's dense part with its mean
loss, and element-wise Adagrad, a += g^2, w -= lr * g / (sqrt(a) + eps), over all parameters. They differ in how.

Shape suffixes: B batch, F features (one id each), V rows of a table, R rows of all tables, N occurrences, D dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxrec.checks import require
from jaxrec.data.schema import Batch, Dataset
from jaxrec.embeddings.merge import IN_BOUNDS, merge
from jaxrec.models.losses import binary_cross_entropy
from jaxrec.optim.adagrad import AdagradState, scale_by_adagrad
from jaxrec.training import setup
from jaxrec.training.config import Config
from jaxrec.training.state import TrainState, empty_window
from jaxrec.training.step import shard_predict_step, shard_train_step


@dataclasses.dataclass(frozen=True)
class TrainingProgram:
    """A program that trains.

    Attributes:
      first: Makes the state before the first step; of every program the same numbers.
      step: (state, batch) -> (new state, mean loss of the batch before the update); to be jitted.
      logits: (state, batch) -> float32 [B]; to be jitted.
      tables: State -> table -> float32 [V, D], the weights.
      put: Takes a host batch to the device.
    """

    first: Callable[[], Any]
    step: Callable[[Any, Batch], tuple[Any, jax.Array]]
    logits: Callable[[Any, Batch], jax.Array]
    tables: Callable[[Any], Mapping[str, jax.Array]]
    put: Callable[[Batch], Batch]


class State(NamedTuple):
    """What the programs before jaxrec's carry from step to step.

    Attributes:
      params: `dense`, the dense parameters; `tables`, a dict of arrays [V, D], or one array [R + 1, D].
      sums: Adagrad's accumulators, in the same structure.
      scratch: int32 [R + 1] where duplicates are merged without a sort.
    """

    params: dict[str, Any]
    sums: dict[str, Any]
    scratch: jax.Array | None = None


Activations = Mapping[str, jax.Array]  # feature -> [B, D]
Updates = tuple[jax.Array, jax.Array]  # of rows: what is added to weights, new sums; [N, D] each


class Ladder:
    """What the programs before jaxrec's share: model, first weights, learning rates."""

    def __init__(self, config: Config, dataset: Dataset):
        """Takes a DLRM whose features have one id each, and a table each, under Adagrad without a schedule."""
        optimizers = config.optimizer, config.embedding.optimizer
        for what, found, has in (
            ("dense optimizer", optimizers[0].name, "adagrad"),
            ("embedding optimizer", optimizers[1].name, "adagrad"),
            ("embedding learning rate", optimizers[1].learning_rate, optimizers[0].learning_rate),
            ("embedding eps", optimizers[1].eps, optimizers[0].eps),
            ("number of devices", config.mesh.size, 1),
            ("kinds of features", {f.kind for f in dataset.schema.features}, {"categorical"}),
        ):
            require(found == has, f"the {what} is {found}, but the programs of the ladder take {has} only")
        self.rate, self.eps = config.optimizer.learning_rate, config.optimizer.eps
        self.features = {f.name: f.table for f in dataset.schema.features}  # feature -> its table
        self.rows = dict(dataset.schema.vocabulary)
        self._program, self._dense = setup.build_program(config, dataset)
        self.put = setup.put_batch(self._program)

    # ---- what all of them compute

    def loss(self, dense: Any, activations: Activations, batch: Batch) -> jax.Array:
        """Returns the weighted mean loss of a batch."""
        losses_B = binary_cross_entropy(self.model(dense, activations, batch), batch.labels[:, 0])
        return jnp.sum(batch.weight * losses_B) / jnp.sum(batch.weight)

    def model(self, dense: Any, activations: Activations, batch: Batch) -> jax.Array:
        """Returns logits, float32 [B]."""
        return nnx.merge(self._program.graphdef, dense)(batch.dense, activations, None)[:, 0]

    def adagrad(self, params: Any, sums: Any, gradients: Any) -> tuple[Any, Any]:
        """Updates every element of a pytree; returns new parameters and sums."""
        direction, state = scale_by_adagrad(self.eps, 0.0).update(gradients, AdagradState(sums))
        return optax.apply_updates(params, jax.tree.map(lambda d: -self.rate * d, direction)), state.accumulator  # pyright: ignore[reportAttributeAccessIssue]

    def adagrad_rows(self, gradients_ND: jax.Array, sums_ND: jax.Array) -> Updates:
        """Adagrad on rows that have been gathered."""
        sums_ND = sums_ND + gradients_ND * gradients_ND
        return -self.rate * gradients_ND / (jnp.sqrt(sums_ND) + self.eps), sums_ND

    # ---- first states

    def first(self, one_array: bool, scratch: bool = False) -> State:
        """Returns jaxrec's first state in the ladder's layouts."""
        state = setup.initial_state(self._program, self._dense)
        (table,) = state.tables.values()
        weights, sums = table.weights, table.slots["accumulator"]
        if not one_array:
            weights, sums = self.split(weights), self.split(sums)
        params = {"dense": state.dense, "tables": weights}
        accumulators = {"dense": state.optimizer.accumulator, "tables": sums}
        return State(params, accumulators, jnp.zeros(table.weights.shape[:1], jnp.int32) if scratch else None)

    def split(self, array: jax.Array) -> dict[str, jax.Array]:
        """Cuts one array [R + 1, D], whose last row is no table's, into tables."""
        return {t: array[start : start + self.rows[t]] for t, start in self.offsets.items()}

    @property
    def offsets(self) -> dict[str, int]:
        """Table -> its first row in the one array."""
        (group,) = self._program.plan.groups
        return {t.name: int(start) for t, start in zip(group.tables, group.offsets, strict=True)}

    # ---- lookups

    def from_tables(self, tables: Mapping[str, jax.Array], batch: Batch) -> dict[str, jax.Array]:
        """One gather a table."""
        return {f: tables[t][batch.ids[:, i]] for i, (f, t) in enumerate(self.features.items())}

    def places(self, batch: Batch) -> jax.Array:
        """Returns int32 [B, F]: rows of the one array."""
        return batch.ids + jnp.asarray([self.offsets[t] for t in self.features.values()], jnp.int32)

    def from_one_array(self, weights_RD: jax.Array, places_BF: jax.Array) -> dict[str, jax.Array]:
        """One gather for all features."""
        vectors_BFD = weights_RD.at[places_BF].get(mode=IN_BOUNDS)
        return {f: vectors_BFD[:, i] for i, f in enumerate(self.features)}


def table_gradients(config: Config, dataset: Dataset) -> TrainingProgram:
    """Tables are parameters as any: their gradients are as large as they, and every row is updated every step."""
    ladder = Ladder(config, dataset)

    def loss(params: dict[str, Any], batch: Batch) -> jax.Array:
        return ladder.loss(params["dense"], ladder.from_tables(params["tables"], batch), batch)

    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(state.params, batch)
        return State(*ladder.adagrad(state.params, state.sums, gradients)), value

    return _with_tables(ladder, step)


def touched_rows(config: Config, dataset: Dataset) -> TrainingProgram:
    """Differentiates with respect to the vectors that were looked up; of each table only touched rows are updated.

    A row's gradients are summed over its duplicates, which a sort brings together.
    """
    ladder = Ladder(config, dataset)

    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        activations = ladder.from_tables(state.params["tables"], batch)
        value, (d_dense, d_activations) = jax.value_and_grad(ladder.loss, argnums=(0, 1))(
            state.params["dense"], activations, batch
        )
        dense, dense_sums = ladder.adagrad(state.params["dense"], state.sums["dense"], d_dense)
        tables, sums = dict(state.params["tables"]), dict(state.sums["tables"])
        for i, (feature, t) in enumerate(ladder.features.items()):
            # The rows that fill up the static size are beyond the table: they are read as 0 and written nowhere.
            rows, gradients = _merged_by_sort(batch.ids[:, i], d_activations[feature], ladder.rows[t])
            change, new = ladder.adagrad_rows(gradients, sums[t].at[rows].get(mode="fill", fill_value=0.0))
            tables[t] = tables[t].at[rows].add(change, mode="drop")
            sums[t] = sums[t].at[rows].set(new, mode="drop")
        return State({"dense": dense, "tables": tables}, {"dense": dense_sums, "tables": sums}), value

    return _with_tables(ladder, step)


def one_array(config: Config, dataset: Dataset) -> TrainingProgram:
    """All tables in one array: one gather, one sort, one update.

    What fills up the static size names the last row, which is no table's and stays 0: every index is in bounds.
    """
    ladder = Ladder(config, dataset)

    def rows_of(places_N: jax.Array, gradients_ND: jax.Array, scratch: jax.Array | None):
        sentinel = sum(ladder.rows.values())
        return *_merged_by_sort(places_N, gradients_ND, sentinel), scratch

    return _with_one_array(ladder, rows_of, scratch=False)


def without_sort(config: Config, dataset: Dataset) -> TrainingProgram:
    """As `one_array`, but duplicates find each other through a scratch cell of their row (jaxrec.embeddings.merge)."""
    ladder = Ladder(config, dataset)

    def rows_of(places_N: jax.Array, gradients_ND: jax.Array, scratch: jax.Array | None):
        assert scratch is not None
        merged = merge(places_N, gradients_ND, scratch)
        sentinel = sum(ladder.rows.values())
        rows_N = jnp.where(merged.first, places_N, sentinel)
        return rows_N, jnp.where(merged.first[:, None], merged.gradient, 0.0), merged.scratch

    return _with_one_array(ladder, rows_of, scratch=True)


def jaxrec_step(config: Config, dataset: Dataset) -> TrainingProgram:
    """What `jaxrec.train` runs: the same arithmetic, checked for values that are not finite before it is written."""
    program, dense = setup.build_program(config, dataset)
    train, predict = shard_train_step(program), shard_predict_step(program)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        state, window, _ = train(state, empty_window(), batch)
        return state, window.loss / window.weight

    def tables(state: TrainState) -> dict[str, jax.Array]:
        logical = {}
        for g in program.plan.groups:
            logical |= g.to_logical(np.asarray(state.tables[g.name].weights))
        return logical

    return TrainingProgram(
        first=lambda: setup.initial_state(program, dense),
        step=step,
        logits=lambda state, batch: predict(state.dense, state.tables, batch)[:, 0],
        tables=tables,
        put=setup.put_batch(program),
    )


def _merged_by_sort(rows_N: jax.Array, gradients_ND: jax.Array, fill: int) -> tuple[jax.Array, jax.Array]:
    """Returns the distinct rows, filled up with `fill` to N, and the sum of each one's gradients."""
    count = rows_N.shape[0]
    distinct, inverse = jnp.unique(rows_N, return_inverse=True, size=count, fill_value=fill)
    return distinct, jax.ops.segment_sum(gradients_ND, inverse, num_segments=count)


def _with_tables(ladder: Ladder, step: Callable[[State, Batch], tuple[State, jax.Array]]) -> TrainingProgram:
    def logits(state: State, batch: Batch) -> jax.Array:
        return ladder.model(state.params["dense"], ladder.from_tables(state.params["tables"], batch), batch)

    first = lambda: ladder.first(one_array=False)  # noqa: E731
    return TrainingProgram(first, step, logits, lambda state: state.params["tables"], ladder.put)


def _with_one_array(ladder: Ladder, rows_of: Callable[..., Any], scratch: bool) -> TrainingProgram:
    def look_up(state: State, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        places_BF = ladder.places(batch)
        return places_BF, ladder.from_one_array(state.params["tables"], places_BF)

    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        places_BF, activations = look_up(state, batch)
        value, (d_dense, d_activations) = jax.value_and_grad(ladder.loss, argnums=(0, 1))(
            state.params["dense"], activations, batch
        )
        dense, dense_sums = ladder.adagrad(state.params["dense"], state.sums["dense"], d_dense)
        gradients_ND = jnp.stack([d_activations[f] for f in ladder.features], axis=1).reshape(places_BF.size, -1)
        rows, gradients, cells = rows_of(places_BF.reshape(-1), gradients_ND, state.scratch)
        sums = state.sums["tables"]
        change, new = ladder.adagrad_rows(gradients, sums.at[rows].get(mode=IN_BOUNDS))
        tables = state.params["tables"].at[rows].add(change, mode=IN_BOUNDS)
        sums = sums.at[rows].set(new, mode=IN_BOUNDS)
        return State({"dense": dense, "tables": tables}, {"dense": dense_sums, "tables": sums}, cells), value

    return TrainingProgram(
        first=lambda: ladder.first(one_array=True, scratch=scratch),
        step=step,
        logits=lambda state, batch: ladder.model(state.params["dense"], look_up(state, batch)[1], batch),
        tables=lambda state: ladder.split(state.params["tables"]),
        put=ladder.put,
    )
