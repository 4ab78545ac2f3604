"""The training and prediction steps, as one manual shard_map program each.

Shape suffixes: B rows of this device's shard of the batch, K id slots, N dense columns, T tasks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from jaxrec.data.schema import Batch
from jaxrec.embeddings import tables as tables_lib
from jaxrec.embeddings.plan import Plan
from jaxrec.fsdp import is_split
from jaxrec.mesh import AXES, BATCH, MODEL, REPLICATED, device_index, is_shared
from jaxrec.models.layers import DropoutSource
from jaxrec.models.losses import binary_cross_entropy
from jaxrec.optim import dense as dense_optim
from jaxrec.optim.dense import DenseOptimizerConfig
from jaxrec.optim.schedule import ScheduleConfig, factor
from jaxrec.training.state import LossScale, TrainState, Window

# The step's own regions; a model adds its REGIONS. A test looks for each in the compiled program's metadata.
REGIONS = ("embedding_lookup", "loss", "gradient_sum", "finite_check", "dense_update", "embedding_update")


# The loss scale starts at FIRST_SCALE and stays between the others; all are powers of two, so that scaling is exact.
# What is scaled is the sum over the device's rows, not their mean: 2^10 is as much as 2^20 for a mean of 1,024 rows.
FIRST_SCALE, LEAST_SCALE, MOST_SCALE, GROWTH_INTERVAL = 2.0**10, 1.0, 2.0**24, 2000


@dataclasses.dataclass(frozen=True)
class Program:
    """What a step is made of; everything in it is static.

    Attributes:
      graphdef: The model's structure, from `nnx.split`.
      plan: The embedding layout.
      mesh: Devices.
      optimizer: Of the dense parameters.
      schedule: Multiplies every learning rate.
      seed: For dropout and stochastic rounding.
      tasks: How many of the labels' columns, the first, are tasks of their own; the rest are auxiliary.
      auxiliary_weight: See `TrainingConfig`.
      clip_norm: See `TrainingConfig`.
      loss_scaled: Whether the loss is scaled, dynamically.
      dense_shards: Over how many devices of `model` dense parameters and their optimizer's state are split; 1: none.
      dense_shapes: Of the whole dense parameters.
      capacities: Group -> rows that a device may send to another in a training step; see `sharded`.
      compiler_options: For XLA; see `precision.compiler_options`.
    """

    graphdef: Any
    plan: Plan
    mesh: Mesh
    optimizer: DenseOptimizerConfig
    schedule: ScheduleConfig
    seed: int
    tasks: int
    auxiliary_weight: float
    dense_shapes: Any
    clip_norm: float = 0.0
    loss_scaled: bool = False
    dense_shards: int = 1
    capacities: Mapping[str, int] = dataclasses.field(default_factory=dict)
    compiler_options: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def axis_sizes(self) -> dict[str, int]:
        return {axis: self.mesh.shape[axis] for axis in AXES}

    def whole_shapes(self) -> tuple[Any, Any]:
        """Returns the shapes of the whole dense parameters, and of their optimizer's state."""
        return self.dense_shapes, jax.eval_shape(dense_optim.direction(self.optimizer).init, self.dense_shapes)

    def state_partitions(self) -> TrainState:
        """A PartitionSpec for every array (a prefix of the state's tree)."""
        dense, optimizer = jax.tree.map(
            lambda x: MODEL if is_split(x.shape, self.dense_shards) else REPLICATED, self.whole_shapes()
        )
        return TrainState(
            step=REPLICATED,  # pyright: ignore[reportArgumentType]
            dense=dense,
            optimizer=optimizer,
            tables=tables_lib.partitions(self.plan),
            loss_scale=REPLICATED,  # pyright: ignore[reportArgumentType]
            failed_step=REPLICATED,  # pyright: ignore[reportArgumentType]
            failed_check=REPLICATED,  # pyright: ignore[reportArgumentType]
            overflow=REPLICATED,  # pyright: ignore[reportArgumentType]
        )


def psum(tree: Any, mesh: Mesh) -> Any:
    """Sums over all devices; the identity on one."""
    return jax.lax.psum(tree, AXES) if mesh.size > 1 else tree


def train_step(
    program: Program, state: TrainState, window: Window, batch: Batch
) -> tuple[TrainState, Window, jax.Array]:
    """One update, seen from one device.

    The loss is the weighted mean over the global batch of the tasks' sum, to which the auxiliary tasks add
    `auxiliary_weight` times their mean; it is divided by the global weight before it is differentiated, so that no
    gradient needs a pass for that (a scaled loss is not, lest its gradients vanish). The window's sums and weight run
    over rows and tasks without the auxiliary ones, so that its loss is a mean over both. Inside, nothing is summed over
    devices but by the psums written here (check_vma is off, so gradients stay local).

    Returns:
      The new state, equal to the old one but for its failed_* fields where a checked value is not finite, and the
      window with this step's sums added. Third, the step's number: an output that no later step donates, by which the
      host can see that the step is done.
    """
    mesh, plan, tasks = program.mesh, program.plan, program.tasks
    ids, lengths, dense_features, labels, weight = batch
    with jax.named_scope("embedding_lookup"):
        activations, routes = tables_lib.look_up(
            plan, state.tables, ids, lengths, program.axis_sizes, program.capacities
        )
    with jax.named_scope("gradient_sum"):
        total_weight = psum(jnp.sum(weight), mesh)
        mean = 1.0 / jnp.maximum(total_weight, jnp.finfo(jnp.float32).tiny)

    def scaled_loss(dense: Any, activations: dict[str, jax.Array]):
        model = nnx.merge(program.graphdef, dense)
        logits = model(dense_features, activations, _dropout_source(program, state.step, ids.shape[0]))
        with jax.named_scope("loss"):
            losses_BT = binary_cross_entropy(logits, labels)
            loss = jnp.sum(weight * losses_BT[:, :tasks].sum(axis=1))
            objective = loss
            if labels.shape[1] > tasks:
                objective += program.auxiliary_weight * jnp.sum(weight * losses_BT[:, tasks:].mean(axis=1))
            return objective * (state.loss_scale.scale if program.loss_scaled else mean), (
                objective,
                loss,
                logits[:, :tasks],
            )

    (_, (objective, loss, logits)), (d_dense, d_activations) = jax.value_and_grad(
        scaled_loss, argnums=(0, 1), has_aux=True
    )(state.dense, activations)
    with jax.named_scope("gradient_sum"):
        weight_BT = jnp.broadcast_to(weight[:, None], logits.shape)
        sums = Window(
            loss,
            jnp.sum(weight_BT * jax.nn.sigmoid(logits)),
            jnp.sum(weight_BT * labels[:, :tasks]),
            jnp.zeros(()),
        )
        sums, objective = psum((sums, objective), mesh)
        sums = sums._replace(weight=tasks * total_weight)
        d_dense = _sum_dense(program, d_dense)
        if program.loss_scaled:
            scale = mean / state.loss_scale.scale
            d_dense, d_activations = jax.tree.map(lambda g: g * scale, (d_dense, d_activations))
    rate = factor(program.schedule, state.step)
    with jax.named_scope("embedding_update"):
        row_gradients = tables_lib.merge_gradients(
            plan, state.tables, routes, d_activations, lengths, program.axis_sizes
        )
    norm, clip = jnp.zeros(()), None
    if program.clip_norm:
        with jax.named_scope("clip"):
            squares = _squares(program, d_dense)
            norm = jnp.sqrt(squares + tables_lib.squared_norm(plan, row_gradients))
            clip = jnp.minimum(1.0, program.clip_norm / norm)
            d_dense = jax.tree.map(lambda g: g * clip, d_dense)
    with jax.named_scope("dense_update"):
        direction, optimizer = dense_optim.direction(program.optimizer).update(d_dense, state.optimizer, state.dense)
        dense = optax.apply_updates(
            state.dense, jax.tree.map(lambda d: -program.optimizer.learning_rate * rate * d, direction)
        )
    with jax.named_scope("embedding_update"):
        proposals = tables_lib.propose(plan, state.tables, row_gradients, rate, state.step, program.seed, clip)
    with jax.named_scope("finite_check"):
        overflows = {name: route.overflow for name, route in routes.items()}
        of_tables = tables_lib.check(plan, state.tables, proposals, d_activations)
        faults = _faults(program, overflows, objective, norm, d_dense, dense, optimizer, of_tables)
        bad = jnp.stack(list(faults.values()))
        overflow = psum(sum(overflows.values()), mesh)
        bad = jax.lax.pmax(bad, AXES) if mesh.size > 1 else bad
        failed_before = state.failed_step >= 0
        ok = ~failed_before & ~jnp.any(bad)
        loss_scale, skip = state.loss_scale, jnp.zeros((), bool)
        if program.loss_scaled:
            # The exchange and the loss come first among the checks, and no smaller scale mends them.
            mendable = jnp.any(bad) & ~jnp.any(bad[: len(overflows) + 1]) & (loss_scale.scale > LEAST_SCALE)
            skip = ~failed_before & mendable
            loss_scale = _next_scale(loss_scale, ok, skip)
        failed_step = jnp.where(failed_before | ok | skip, state.failed_step, state.step)
        failed_check = jnp.where(failed_before | ok | skip, state.failed_check, jnp.argmax(bad).astype(jnp.int32))
        overflow = jnp.where(failed_before, state.overflow, overflow)
    with jax.named_scope("dense_update"):
        dense, optimizer = jax.tree.map(
            functools.partial(jnp.where, ok), (dense, optimizer), (state.dense, state.optimizer)
        )
    with jax.named_scope("embedding_update"):
        tables = tables_lib.commit(plan, state.tables, proposals, ok)
    step = state.step + (ok | skip).astype(jnp.int32)
    new_window = jax.tree.map(lambda total, new: total + jnp.where(ok, new, 0.0), window, sums)
    return (
        TrainState(step, dense, optimizer, tables, loss_scale, failed_step, failed_check, overflow),
        new_window,
        state.step + 1,
    )


def _next_scale(scale: LossScale, ok: jax.Array, skip: jax.Array) -> LossScale:
    """Halves the scale after a step that was skipped, and doubles it after GROWTH_INTERVAL good ones.

    Source: Micikevicius et al. 2018, "Mixed Precision Training"; factors and interval are torch.amp.GradScaler's.
    """
    good = jnp.where(ok, scale.good_steps + 1, jnp.where(skip, 0, scale.good_steps))
    grow = good >= GROWTH_INTERVAL
    value = jnp.where(skip, scale.scale / 2, jnp.where(grow, jnp.minimum(2 * scale.scale, MOST_SCALE), scale.scale))
    return LossScale(value, jnp.where(grow, 0, good), scale.skipped + skip.astype(jnp.int32))


def _split(program: Program) -> Any:
    """Returns, for each dense parameter, whether this device holds a part of it."""
    return jax.tree.map(lambda x: is_split(x.shape, program.dense_shards), program.dense_shapes)


def _sum_dense(program: Program, gradients: Any) -> Any:
    """Sums the dense gradients over the devices. Those of split parameters are summed over `model` already."""
    if program.mesh.size == 1:
        return gradients
    return jax.tree.map(lambda g, split: jax.lax.psum(g, "data" if split else AXES), gradients, _split(program))


def _squares(program: Program, gradients: Any) -> jax.Array:
    """Returns the sum of the squares of the whole dense gradients."""
    total = jnp.zeros((), jnp.float32)
    for g, split in zip(jax.tree.leaves(gradients), jax.tree.leaves(_split(program)), strict=True):
        local = jnp.sum(jnp.square(g))
        total += jax.lax.psum(local, "model") if split else local
    return total


def predict_step(program: Program, dense: Any, tables: tables_lib.Tables, batch: Batch) -> jax.Array:
    """Returns logits, float32 [B, T], seen from one device; of the whole batch where processes share the mesh."""
    with jax.named_scope("embedding_lookup"):
        activations, _ = tables_lib.look_up(program.plan, tables, batch.ids, batch.lengths, program.axis_sizes)
    logits = nnx.merge(program.graphdef, dense)(batch.dense, activations, None)
    return jax.lax.all_gather(logits, AXES, tiled=True) if is_shared(program.mesh) else logits


def _dropout_source(program: Program, step: jax.Array, rows: int) -> DropoutSource:
    first = device_index() * rows if program.mesh.size > 1 else 0
    return DropoutSource(program.seed, step, first + jnp.arange(rows, dtype=jnp.int32))


def _faults(
    program: Program,
    overflows: Any,
    loss: Any,
    norm: Any,
    d_dense: Any,
    dense: Any,
    optimizer: Any,
    of_tables: tables_lib.Faults,
) -> dict[str, jax.Array]:
    """Returns, for each check, what is wrong and whether it is, in the order in which a fault would appear."""
    # In the plan's order: a dict that has passed through a JAX transformation has its keys sorted.
    named = {
        f"embedding {name} has more distinct rows for a device than the {program.capacities.get(name, 0)} that its "
        "exchange holds": overflows[name] > 0
        for name in [g.name for g in program.plan.groups]
    }
    tensors = _not_finite(program.plan, loss, d_dense, dense, optimizer, of_tables)
    # Finite gradients may have squares that are not: clipping would then make every update 0, and hide it.
    tensors["global norm of the gradients"] = ~jnp.isfinite(norm).all()
    return named | {f"{name} is not finite": is_bad for name, is_bad in tensors.items()}


def _not_finite(
    plan: Plan, loss: Any, d_dense: Any, dense: Any, optimizer: Any, of_tables: tables_lib.Faults
) -> dict[str, jax.Array]:
    """Returns a bool per checked tensor."""

    def bad(x: jax.Array) -> jax.Array:
        return ~jnp.all(jnp.isfinite(x))

    named = {"loss": bad(loss)}
    named |= {f"gradient of embedding feature {k}": of_tables.features[k] for k in plan.features}
    named |= {f"gradient of {_path(p)}": bad(g) for p, g in jax.tree_util.tree_leaves_with_path(d_dense)}
    named |= {f"updated {_path(p)}": bad(w) for p, w in jax.tree_util.tree_leaves_with_path(dense)}
    # The square of a finite gradient may overflow, and g / (sqrt(inf) + eps) = 0 would hide it.
    named |= {f"optimizer state {_path(p)}": bad(s) for p, s in jax.tree_util.tree_leaves_with_path(optimizer)}
    return named | {f"update of embedding {g.name}": of_tables.groups[g.name] for g in plan.groups}


def _path(path: Any) -> str:
    return ".".join(
        str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k))))
        for k in path
        if getattr(k, "name", "") != "value"
    )


def checks(program: Program, state: TrainState) -> list[str]:
    """Returns what `TrainState.failed_check` indexes: for each check, what is wrong where it fails."""
    scalar = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    plan = program.plan
    of_tables = tables_lib.Faults(dict.fromkeys(plan.features, scalar), {g.name: scalar for g in plan.groups})  # pyright: ignore[reportArgumentType]
    names: list[str] = []
    # Collected inside: a dict that leaves eval_shape has its keys sorted.
    jax.eval_shape(
        lambda *args: names.extend(_faults(program, *args)),
        {g.name: scalar for g in plan.groups},
        scalar,
        scalar,
        state.dense,
        state.dense,
        state.optimizer,
        of_tables,
    )
    return names


def shard_train_step(program: Program) -> jax.stages.Wrapped:
    """Returns the jitted `train_step` over global arrays; state and window are donated."""
    specs = program.state_partitions()
    body = jax.shard_map(
        functools.partial(train_step, program),
        mesh=program.mesh,
        in_specs=(specs, REPLICATED, BATCH),
        out_specs=(specs, REPLICATED, REPLICATED),
        check_vma=False,
    )
    return jax.jit(body, donate_argnums=(0, 1), compiler_options=dict(program.compiler_options))


def shard_predict_step(program: Program) -> jax.stages.Wrapped:
    """Returns the jitted `predict_step` over global arrays."""
    specs = program.state_partitions()
    body = jax.shard_map(
        functools.partial(predict_step, program),
        mesh=program.mesh,
        in_specs=(specs.dense, specs.tables, BATCH),
        out_specs=REPLICATED if is_shared(program.mesh) else BATCH,
        check_vma=False,
    )
    return jax.jit(body, compiler_options=dict(program.compiler_options))
