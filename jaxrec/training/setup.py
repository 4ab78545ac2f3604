"""From a config to what a step needs: mesh, layout, model, state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from jaxrec import mesh as mesh_lib
from jaxrec.data.schema import Batch, Dataset
from jaxrec.embeddings import tables as tables_lib
from jaxrec.embeddings.plan import make_plan
from jaxrec.optim import dense as dense_optim
from jaxrec.precision import policy
from jaxrec.training.config import Config
from jaxrec.training.state import TrainState, Window, empty_window
from jaxrec.training.step import Program


def build_program(config: Config, dataset: Dataset, *, for_training: bool = True) -> tuple[Program, Any]:
    """Returns the step's static parts, and the dense parameters at their first values (on the default device).

    Raises:
      UserError: The mesh does not fit the machine, or (`for_training`) the batch does not divide over it.
    """
    if for_training:
        mesh_lib.check_batch(config.mesh, config.training.batch_size)
    mesh = mesh_lib.create(config.mesh)
    schema = dataset.schema
    tables = [config.embedding.table(name, rows) for name, rows in schema.vocabulary.items()]
    plan = make_plan(tables, schema, config.mesh.model)
    rngs = nnx.Rngs(params=config.training.seed)
    model = config.model.create(schema, config.embedding.dim, policy(config.precision), rngs)
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
    )
    return program, dense


def initial_state(program: Program, dense: Any) -> TrainState:
    """Returns the state before the first step, placed on the mesh."""
    optimizer = dense_optim.direction(program.optimizer).init(dense)
    none = jnp.full((), -1, jnp.int32)
    step, dense, optimizer, failed_step, failed_tensor = replicate(
        program, (jnp.zeros((), jnp.int32), dense, optimizer, none, none)
    )
    tables = tables_lib.initialise(program.plan, program.mesh, program.seed)
    return TrainState(step, dense, optimizer, tables, failed_step, failed_tensor)


def replicate(program: Program, tree: Any) -> Any:
    """Places a tree on every device of the mesh, in buffers of its own (they will be donated)."""
    sharding = NamedSharding(program.mesh, mesh_lib.REPLICATED)
    return jax.tree.map(lambda x: jax.device_put(jnp.array(x, copy=True), sharding), tree)


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


def put_batch(program: Program) -> Any:
    """Returns the function that takes a host batch to the devices."""
    sharding = mesh_lib.batch_sharding(program.mesh)
    return lambda batch: jax.device_put(batch, sharding)
