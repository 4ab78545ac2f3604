"""The device mesh: `model` is the shard group, `data` the replica group; the batch is split over both."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrec import processes
from jaxrec.checks import UserError, require

AXES = ("data", "model")
BATCH = PartitionSpec(AXES)  # The leading (batch) dimension over all devices.
REPLICATED = PartitionSpec()
MODEL = PartitionSpec("model")  # The leading dimension over the shard group, the same in each replica of it.


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; their product is the number of devices used."""

    data: int = 1
    model: int = 1

    def __post_init__(self):
        for axis in AXES:
            size = getattr(self, axis)
            require(size >= 1, f"--mesh: axis {axis} is {size}, but must be at least 1")

    @property
    def size(self) -> int:
        return self.data * self.model

    def __str__(self) -> str:
        return f"data:{self.data},model:{self.model}"


def parse(text: str) -> MeshConfig:
    """Parses `--mesh`: `data:2,model:4`, an axis left out being 1, or `1`."""
    sizes: dict[str, int] = {}
    for part in [] if text.strip() in ("", "1") else text.split(","):
        axis, _, size = part.strip().partition(":")
        if axis not in AXES or not size.isdecimal() or int(size) < 1 or axis in sizes:
            raise UserError(f"--mesh is {text!r}, but must be like data:2,model:4 with sizes of at least 1")
        sizes[axis] = int(size)
    return MeshConfig(**sizes)


def create(config: MeshConfig) -> Mesh:
    """Returns a mesh over the first `config.size` devices.

    Raises:
      UserError: There are fewer devices.
    """
    devices = jax.devices()
    if processes.count() > 1 and config.size != len(devices):
        raise UserError(
            f"--mesh={config} has {config.size} devices, but the {processes.count()} processes have {len(devices)} "
            f"together, and the mesh must use all of them; --mesh=data:{len(devices)} does"
        )
    held = {i: sum(d.process_index == i for d in devices) for i in range(processes.count())}
    if len(set(held.values())) > 1:
        each = ", ".join(f"process {i} {n}" for i, n in held.items())
        raise UserError(f"the processes must have equally many devices, but have: {each}")
    if config.size > len(devices):
        remedy = (
            f"; to simulate devices on a CPU, pass --simulate_cpu_devices={config.size}"
            if devices[0].platform == "cpu"
            else ""
        )
        raise UserError(f"--mesh={config} needs {config.size} devices, but this machine has {len(devices)}{remedy}")
    return jax.make_mesh(
        (config.data, config.model), AXES, axis_types=(AxisType.Auto,) * 2, devices=devices[: config.size]
    )


def check_batch(config: MeshConfig, batch_size: int) -> None:
    """Raises UserError unless the batch divides evenly over the devices."""
    require(batch_size >= 1, f"--batch_size is {batch_size}, but must be at least 1")
    near = math.ceil(batch_size / config.size) * config.size
    require(
        batch_size % config.size == 0,
        f"--batch_size is {batch_size}, which does not divide over the {config.size} devices of --mesh={config}; "
        f"{near} does",
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, BATCH)


def local_ranges(mesh: Mesh, batch_size: int) -> list[tuple[int, int]]:
    """Returns which rows of a global batch this process's devices take, as ascending half-open ranges."""
    rows = batch_size // mesh.size
    mine = [k for k, d in enumerate(mesh.devices.flat) if d.process_index == jax.process_index()]
    ranges: list[tuple[int, int]] = []
    for k in mine:
        if ranges and ranges[-1][1] == k * rows:
            ranges[-1] = ranges[-1][0], (k + 1) * rows
        else:
            ranges.append((k * rows, (k + 1) * rows))
    return ranges


def is_shared(mesh: Mesh) -> bool:
    """Whether the mesh has devices of other processes."""
    return any(d.process_index != jax.process_index() for d in mesh.devices.flat)


def put(array: Any, sharding: NamedSharding) -> jax.Array:
    """Places an array that every process has whole."""
    if not is_shared(sharding.mesh):  # pyright: ignore[reportArgumentType]
        return jax.device_put(array, sharding)
    whole = np.asarray(array)
    return jax.make_array_from_callback(whole.shape, sharding, lambda part: whole[part])


# Bytes of a piece in which an array travels to the host.
PIECE_BYTES = 64 << 20


def to_host(array: jax.Array) -> np.ndarray | None:
    """Returns a copy of an array, split over `model` or replicated, on process 0; None on the others.

    All processes must call it. What is spread over processes comes in pieces, so that no device must hold it whole.
    """
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.array(array) if processes.is_first() else None
    mesh, spec = array.sharding.mesh, array.sharding.spec  # pyright: ignore[reportAttributeAccessIssue]
    model = mesh.shape["model"]
    wide = _is_wide(spec)
    rows = array.shape[0] if wide else array.shape[0] // model
    row_bytes = array.dtype.itemsize * math.prod(array.shape[1:]) * (1 if wide else model)
    piece = max(1, min(rows, PIECE_BYTES // max(row_bytes, 1)))

    program = _gather_pieces(mesh, spec, piece)
    first = processes.is_first()
    whole = np.empty(array.shape if wide else (model, rows, *array.shape[1:]), array.dtype) if first else None
    for start in range(0, rows, piece):
        start = min(start, rows - piece)  # noqa: PLW2901 - the last piece overlaps the one before
        received = np.asarray(program(array, put(np.int32(start), NamedSharding(mesh, REPLICATED))))
        if whole is not None:
            whole[(slice(start, start + piece),) if wide else (slice(None), slice(start, start + piece))] = received
    return None if whole is None else whole.reshape(array.shape)


def _is_wide(spec: PartitionSpec) -> bool:
    """Whether columns are split, not rows."""
    return tuple(spec) == (None, "model")


@functools.cache
def _gather_pieces(mesh: Mesh, spec: PartitionSpec, piece: int) -> jax.stages.Wrapped:
    """Returns the jitted function (array, first row) -> `piece` rows of every shard; made once, so compiled once."""
    wide = _is_wide(spec)

    def gather(part: jax.Array, start: jax.Array) -> jax.Array:
        rows = jax.lax.dynamic_slice_in_dim(part, start, piece)
        return jax.lax.all_gather(rows, "model", axis=1 if wide else 0, tiled=wide)

    return jax.jit(jax.shard_map(gather, mesh=mesh, in_specs=(spec, REPLICATED), out_specs=REPLICATED, check_vma=False))


def device_index() -> jax.Array:
    """Returns this device's place in the batch's split; inside shard_map only."""
    return jax.lax.axis_index(AXES)
