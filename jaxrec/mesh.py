"""The device mesh: `model` is the shard group, `data` the replica group; the batch is split over both."""

from __future__ import annotations

import dataclasses
import math

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

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


def device_index() -> jax.Array:
    """Returns this device's place in the batch's split; inside shard_map only."""
    return jax.lax.axis_index(AXES)
