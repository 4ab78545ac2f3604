"""From a config to what a step needs: mesh, layout, model, state."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrec import mesh as mesh_lib
from jaxrec import processes
from jaxrec.data.pipeline import Batches, require_rows
from jaxrec.data.schema import Batch, Dataset, Schema
from jaxrec.embeddings import engines
from jaxrec.embeddings import tables as tables_lib
from jaxrec.embeddings.lookup import places_of_slots
from jaxrec.embeddings.plan import Plan, choose_shardings, make_plan
from jaxrec.fsdp import pack, stored_shape
from jaxrec.optim import dense as dense_optim
from jaxrec.optim.sparse import row_rule
from jaxrec.precision import compiler_options
from jaxrec.training.config import Config
from jaxrec.training.state import LossScale, TrainState, Window, empty_window
from jaxrec.training.step import FIRST_SCALE, Program

# Exchange capacities are measured on so many of the first batches.
MEASURED_BATCHES = 8


def build_program(
    config: Config, dataset: Dataset, batches: Batches | None = None, mesh: Mesh | None = None
) -> tuple[Program, Any]:
    """Returns the step's static parts, and the dense parameters at their first values (on the default device).

    Args:
      config: The run's.
      dataset: Its data.
      batches: What is trained on, for measuring the exchange capacities; None: there is no training.
      mesh: Of `config.mesh`'s shape, for compiling for other devices than this machine's; None: of those.

    Raises:
      UserError: The mesh does not fit the machine.
    """
    mesh = mesh_lib.create(config.mesh) if mesh is None else mesh
    platform = mesh.devices.flat[0].platform
    config.policy.check(platform)
    schema = dataset.schema
    plan = plan_tables(config, schema, platform)
    rngs = nnx.Rngs(params=config.training.seed)
    model = config.model.create(schema, config.embedding.dim, config.policy, rngs)
    graphdef, dense = nnx.split(model, nnx.Param)
    program = Program(
        graphdef=graphdef,
        plan=plan,
        mesh=mesh,
        optimizer=config.optimizer,
        schedule=config.schedule,
        seed=config.training.seed,
        tasks=len(schema.labels),
        auxiliary_weight=config.training.auxiliary_weight,
        clip_norm=config.training.clip_norm,
        loss_scaled=config.policy.loss_scaled,
        dense_shards=config.mesh.model if config.dense_sharding == "fsdp" else 1,
        dense_shapes=jax.eval_shape(lambda: dense),
        capacities={} if batches is None else measure_capacities(config, plan, batches),
        # Other compilers than the CPU's need not know the option.
        compiler_options=compiler_options(config.cpu_products) if platform == "cpu" else {},
    )
    return program, dense


def identity(config: Config, dataset: Dataset) -> dict[str, Any]:
    """Returns what a checkpoint must share with the run that restores it: the config's identity and the stored rows."""
    return {**config.identity(), **({"rows": dataset.digest} if dataset.digest else {})}


def training_batches(config: Config, dataset: Dataset) -> Batches:
    """Returns the batches to train on: of each, the rows that this process's devices take.

    Raises:
      UserError: As `Batches` and `require_rows`; the mesh does not fit the machine, or the batch does not divide
        over it.
    """
    require_rows(dataset)
    size = config.training.batch_size
    mesh_lib.check_batch(config.mesh, size)
    ranges = mesh_lib.local_ranges(mesh_lib.create(config.mesh), size) if processes.count() > 1 else None
    return Batches(dataset, "train", size, seed=config.training.seed, ranges=ranges)


def plan_tables(config: Config, schema: Schema, platform: str) -> Plan:
    """Returns the embedding layout for devices of `platform`."""
    chosen, reasons = dict.fromkeys(schema.vocabulary, config.embedding.sharding), {}
    if config.embedding.sharding == "auto":
        slots = row_rule(config.embedding.optimizer).slots.values()
        dim, size = config.embedding.dim, jnp.dtype(config.embedding.dtype).itemsize
        row_bytes = dim * size + 4 * sum(dim if wide else 1 for wide in slots)
        pairs = choose_shardings(schema.vocabulary, row_bytes, config.mesh.model)
        chosen = {name: sharding for name, (sharding, _) in pairs.items()}
        reasons = {name: f"{sharding}: {why}" for name, (sharding, why) in pairs.items()}
    tables = [config.embedding.table(name, rows, chosen[name]) for name, rows in schema.vocabulary.items()]
    engine, path = engines.choose(config.embedding.kernel, platform)
    plan = make_plan(tables, schema, config.mesh.model, engine)
    return dataclasses.replace(plan, reasons=reasons, path=path)


def measure_capacities(config: Config, plan: Plan, batches: Batches) -> dict[str, int]:
    """Returns, for each group, the distinct rows that a device may send to another in a step.

    That is the most that any device of the first batches had for any shard, times `embedding.capacity_margin`, rounded
    up to a multiple of 8. Empty (the worst case) on one device and for a margin of 0. Each process measures the rows
    that it reads, and all take the most of any.
    """
    if config.mesh.size == 1:
        return {}
    return capacities_of(plan, batches, batches.batch_size // config.mesh.size, config.embedding.capacity_margin)


def capacities_of(plan: Plan, batches: Batches, rows_of_device: int, margin: float) -> dict[str, int]:
    """As `measure_capacities`, for devices that take `rows_of_device` rows of a batch each."""
    if margin == 0:
        return {}
    most = dict.fromkeys((g.name for g in plan.groups), 0)
    for k in range(min(MEASURED_BATCHES, len(batches))):
        batch = batches[k].batch
        ids, lengths = jnp.asarray(batch.ids), jnp.asarray(batch.lengths)
        for g in plan.groups:
            places = np.asarray(places_of_slots(g, ids, lengths))
            for of_device in np.split(places, len(places) // rows_of_device):
                rows = np.unique(of_device[of_device != g.sentinel])
                counts = np.bincount(rows // g.shard_rows, minlength=1)
                most[g.name] = max(most[g.name], int(counts.max()))
    measured = processes.exchange(most)
    most = {name: max(m[name] for m in measured) for name in most}
    return {name: -(-math.ceil(margin * max(count, 1)) // 8) * 8 for name, count in most.items()}


def initial_state(program: Program, dense: Any) -> TrainState:
    """Returns the state before the first step, placed on the mesh."""
    optimizer = dense_optim.direction(program.optimizer).init(dense)
    zero, none = jnp.zeros((), jnp.int32), jnp.full((), -1, jnp.int32)
    scale = LossScale(jnp.full((), FIRST_SCALE if program.loss_scaled else 1.0, jnp.float32), zero, zero)
    step, loss_scale, failed_step, failed_check, overflow = replicate(program, (zero, scale, none, none, zero))
    dense, optimizer = place_dense(program, dense, optimizer)
    tables = tables_lib.initialise(program.plan, program.mesh, program.seed)
    return TrainState(step, dense, optimizer, tables, loss_scale, failed_step, failed_check, overflow)


def state_shapes(program: Program) -> TrainState:
    """Returns the abstract state, for compiling ahead of time: nothing is allocated."""

    def abstract(shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(program.mesh, spec))

    specs = program.state_partitions()
    dense, optimizer = jax.tree.map(
        lambda x, spec: abstract(stored_shape(x.shape, program.dense_shards), x.dtype, spec),
        program.whole_shapes(),
        (specs.dense, specs.optimizer),
    )
    tables = {g.name: tables_lib.shapes(g, program.mesh) for g in program.plan.groups}
    real, integer = (abstract((), t, mesh_lib.REPLICATED) for t in (jnp.float32, jnp.int32))
    scale = LossScale(real, integer, integer)  # pyright: ignore[reportArgumentType]
    return TrainState(integer, dense, optimizer, tables, scale, integer, integer, integer)  # pyright: ignore[reportArgumentType]


def window_shapes(program: Program) -> Window:
    """Returns the abstract window."""
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(program.mesh, mesh_lib.REPLICATED))
    return Window(*(scalar for _ in Window._fields))  # pyright: ignore[reportArgumentType]


def replicate(program: Program, tree: Any) -> Any:
    """Places a tree on every device of the mesh, in buffers of its own (they will be donated)."""
    sharding = NamedSharding(program.mesh, mesh_lib.REPLICATED)
    return jax.tree.map(lambda x: mesh_lib.put(jnp.array(x, copy=True), sharding), tree)


def place_dense(program: Program, dense: Any, optimizer: Any) -> tuple[Any, Any]:
    """Places whole dense parameters and their optimizer's state as the program has them, in buffers of their own."""
    specs = program.state_partitions()

    def place(x: Any, spec: PartitionSpec) -> jax.Array:
        packed = pack(jnp.array(x, copy=True), program.dense_shards)
        return mesh_lib.put(packed, NamedSharding(program.mesh, spec))

    return jax.tree.map(place, (dense, optimizer), (specs.dense, specs.optimizer))


def new_window(program: Program) -> Window:
    """Returns an empty window on the mesh."""
    return replicate(program, empty_window())


def batch_shapes(dataset: Dataset, batch_size: int, program: Program) -> Batch:
    """Returns the abstract batch, for compiling ahead of time."""
    schema = dataset.schema
    shapes = Batch(
        ids=(batch_size, schema.slots),  # pyright: ignore[reportArgumentType]
        lengths=(batch_size, len(schema.bags)),  # pyright: ignore[reportArgumentType]
        dense=(batch_size, len(schema.dense)),  # pyright: ignore[reportArgumentType]
        labels=(batch_size, len(schema.tasks)),  # pyright: ignore[reportArgumentType]
        weight=(batch_size,),  # pyright: ignore[reportArgumentType]
    )
    sharding = mesh_lib.batch_sharding(program.mesh)
    integer = {"ids", "lengths"}
    return Batch(
        **{
            name: jax.ShapeDtypeStruct(shape, jnp.int32 if name in integer else jnp.float32, sharding=sharding)
            for name, shape in shapes._asdict().items()
        }  # pyright: ignore[reportArgumentType]
    )


def put_batch(program: Program) -> Callable[[Batch], Batch]:
    """Returns the function that takes a host batch (with several processes, this one's rows of it) to the devices."""
    sharding = mesh_lib.batch_sharding(program.mesh)
    if not mesh_lib.is_shared(program.mesh):
        return lambda batch: jax.device_put(batch, sharding)
    return lambda batch: Batch(*(jax.make_array_from_process_local_data(sharding, x) for x in batch))
