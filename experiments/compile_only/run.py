"""What does a training step need on devices that are not here? Memory per device, collectives and their bytes.

    python -m experiments.compile_only.run --mode=all

Compiles the training step for a few targets without having them: TPU slices by `libtpu`, H100s by JAX's CUDA plug-in
(`make compile_only` installs both), and 256 simulated CPU devices. Nothing is run.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import math
import os
import time
from typing import Any

from absl import flags

from experiments import study
from experiments.compile_only.report import render
from jaxrec import flags as jaxrec_flags
from jaxrec.checks import UserError, require

STUDY = "compile_only"
CONFIG = "dlrm_embedding_bound"
ROWS_OF_DEVICE = 2048
# Batches on which exchange capacities are measured hold the rows of so many devices.
MEASURED_DEVICES = 4


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices to compile for.

    Attributes:
      name: In the record.
      platform: `tpu`, `cuda` or `cpu`.
      topology: As JAX names it; for CUDA partitions x hosts x devices of a host.
      memory_gib: Of a device, by its maker; 0 where that means nothing.
      mesh: Sizes of `data` and `model`. `model` stays within a host or its fastest links.
    """

    name: str
    platform: str
    topology: str
    memory_gib: float
    mesh: tuple[int, int]


# Memory: cloud.google.com/tpu/docs (v5e, v5p) and NVIDIA's data sheet of the H100 SXM.
TARGETS = {
    t.name: t
    for t in (
        Target("16 TPU v5e", "tpu", "v5e:4x4", 16, (2, 8)),
        Target("16 TPU v5p", "tpu", "v5p:2x2x4", 95, (2, 8)),
        Target("8 H100", "cuda", "1x1x8", 80, (1, 8)),
        Target("32 H100", "cuda", "1x4x8", 80, (4, 8)),
        Target("256 simulated devices", "cpu", "", 0, (32, 8)),
    )
}
# What varies: embedding sharding, type of tables, dense sharding.
LAYOUTS = {
    "replicated": ("replicated", "float32", "replicated"),
    "row_cyclic": ("row_cyclic", "float32", "fsdp"),
    "row_cyclic, bfloat16 tables": ("row_cyclic", "bfloat16", "fsdp"),
    "column": ("column", "float32", "fsdp"),
}
# What XLA must know of an H100 SXM5 80 GB to compile for it, by NVIDIA's data sheet and CUDA's programming guide.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 3350000000000  l2_cache_size: 52428800  device_memory_size: 85899345920
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 minor: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
PACKAGES = {"tpu": "libtpu", "cuda": "jax-cuda13-plugin", "cpu": "jaxlib"}


def define_flags() -> None:
    study.define_flags(STUDY)
    flags.DEFINE_list("targets", list(TARGETS), "Which targets to compile for, by name.")


def main() -> int:
    """Runs the study; returns the exit status."""
    return study.run(
        measure=lambda: measure(_targets(), list(LAYOUTS)),
        smoke=lambda: measure([dataclasses.replace(TARGETS["256 simulated devices"], mesh=(2, 2))], ["row_cyclic"]),
        render=render,
    )


def _targets() -> list[Target]:
    chosen = flags.FLAGS.targets
    require(0 < len(chosen) == len(set(chosen)), f"--targets is {','.join(chosen)!r}, but must name some, each once")
    for name in chosen:
        require(name in TARGETS, f"--targets has {name!r}, but must name some of: {'; '.join(TARGETS)}")
    return [TARGETS[name] for name in flags.FLAGS.targets]


def measure(targets: list[Target], layouts: list[str]) -> dict[str, Any]:
    """Compiles each layout for each target; returns the record."""
    for target in targets:
        _require_compiler(target)
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # There is no TPU to be asked about.
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max([8, *(t.mesh[0] * t.mesh[1] for t in targets if t.platform == "cpu")]))
    jax.config.update("jax_enable_compilation_cache", False)
    from jaxrec.reporting import record as record_lib

    rows, facts = [], {}
    for target in targets:
        for layout in layouts:
            begin = time.perf_counter()
            values, facts[target.name] = compile_step(target, layout)
            print(f"{target.name}, {layout}: compiled in {time.perf_counter() - begin:.0f} s", flush=True)
            for (metric, unit), value in values.items():
                rows.append(record_lib.row(layout, "jax", target.name, metric, unit, [value], "compiled, not run"))
    return record_lib.make(
        STUDY,
        rows,
        targets=facts,
        layouts={k: LAYOUTS[k] for k in layouts},
        config=CONFIG,
        rows_of_device=ROWS_OF_DEVICE,
    )


def _require_compiler(target: Target) -> None:
    package = PACKAGES[target.platform]
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as e:
        others = [t.name for t in TARGETS.values() if t.platform == "cpu"]
        raise UserError(
            f"{target.name} needs the package {package}, which is not installed; `make compile_only` installs it, or "
            f"leave the target out: --targets={','.join(others)}"
        ) from e


def compile_step(target: Target, layout: str) -> tuple[dict[tuple[str, str], float], dict[str, Any]]:
    """Compiles one step; returns its figures, by (metric, unit), and what the target is."""
    from jax.sharding import NamedSharding

    from jaxrec.configs import catalogue, overrides
    from jaxrec.data.pipeline import Batches
    from jaxrec.embeddings.sharded import capacity_of, exchanged_bytes
    from jaxrec.mesh import MeshConfig
    from jaxrec.profiling.collectives import collectives
    from jaxrec.profiling.copies import copied_bytes
    from jaxrec.training import setup
    from jaxrec.training.step import shard_train_step

    sharding, dtype, dense_sharding = LAYOUTS[layout]
    devices = target.mesh[0] * target.mesh[1]
    config = overrides.apply(catalogue.get(CONFIG), [
        f"embedding.sharding={sharding}", f"embedding.dtype={dtype}", f"dense_sharding={dense_sharding}",
        "embedding.optimizer.name=rowwise_adagrad", "precision=bfloat16",
        f"training.batch_size={ROWS_OF_DEVICE * devices}",
    ])  # fmt: skip
    config = dataclasses.replace(config, mesh=MeshConfig(*target.mesh))
    dataset, mesh, kind = _dataset(config.data), *_mesh(target)
    program, _ = setup.build_program(config, dataset, mesh=mesh)
    measured = Batches(dataset, "train", ROWS_OF_DEVICE * MEASURED_DEVICES)
    margin = config.embedding.capacity_margin
    capacities = setup.capacities_of(program.plan, measured, ROWS_OF_DEVICE, margin)
    program = dataclasses.replace(program, capacities=capacities)
    lowered = shard_train_step(program).lower(
        setup.state_shapes(program),
        setup.window_shapes(program),
        setup.batch_shapes(dataset, config.training.batch_size, program),
    )
    compiled = lowered.compile()
    memory: Any = compiled.memory_analysis()
    found = collectives(compiled)
    sizes = program.axis_sizes
    formula = worst = 0
    table_bytes = []
    for g in program.plan.groups:
        shape = NamedSharding(mesh, g.partition(True)).shard_shape((g.array_rows, g.dim))
        table_bytes.append(g.stored.itemsize * math.prod(shape))
        occurrences = ROWS_OF_DEVICE * len(g.columns)
        formula += exchanged_bytes(g, capacity_of(g, occurrences, capacities[g.name]), sizes)
        worst += exchanged_bytes(g, capacity_of(g, occurrences, 0), sizes)
    values = {
        ("arguments", "bytes"): memory.argument_size_in_bytes,
        ("temporaries", "bytes"): memory.temp_size_in_bytes,
        ("copies of tables", "bytes"): copied_bytes(compiled, min(table_bytes)),
        ("not aliased outputs", "bytes"): memory.output_size_in_bytes - memory.alias_size_in_bytes,
        ("received", "bytes"): sum(c.received_bytes for c in found),
        ("embedding exchange by formula", "bytes"): formula,
        ("embedding exchange, worst case", "bytes"): worst,
    }
    for op in sorted({c.op for c in found}):
        of_op = [c for c in found if c.op == op]
        values[f"received by {op}", "bytes"] = sum(c.received_bytes for c in of_op)
        values[f"number of {op}", "1"] = len(of_op)
    facts = {
        "device": kind, "topology": target.topology, "mesh": {"data": target.mesh[0], "model": target.mesh[1]},
        "memory_gib": target.memory_gib, "compiler": PACKAGES[target.platform],
        "compiler_version": importlib.metadata.version(PACKAGES[target.platform]),
    }  # fmt: skip
    return {k: float(v) for k, v in values.items()}, facts


@functools.cache
def _dataset(data: Any) -> Any:
    return data.open("")


def _mesh(target: Target) -> tuple[Any, str]:
    """Returns the mesh of a target's devices, and what they are."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh

    from jaxrec.mesh import AXES

    count = target.mesh[0] * target.mesh[1]
    if target.platform == "cpu":
        devices = jax.devices()[:count]
    elif target.platform == "tpu":
        devices = topologies.get_topology_desc(target.topology, "tpu").devices
    else:
        devices = topologies.get_topology_desc("", "cuda", target_config=H100, topology=target.topology).devices
    require(len(devices) == count, f"{target.name} has {len(devices)} devices, but its mesh needs {count}")
    return Mesh(np.array(devices).reshape(target.mesh), AXES), devices[0].device_kind


if __name__ == "__main__":
    jaxrec_flags.run_command(main, define_flags)
