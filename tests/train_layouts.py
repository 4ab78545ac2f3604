"""Trains the tiny model under each layout, alone or as one of several processes. Run by `test_processes`.

python train_layouts.py FOLDER STEPS COUNT INDEX PORT: with 4 devices in all.
"""

import sys

import jax
from conftest import TINY

from jaxrec import processes
from jaxrec.configs import catalogue, overrides
from jaxrec.training.loop import Options, train

# By name: the sharding, and what is set besides.
LAYOUTS = {
    "replicated": ("replicated", "mesh.data=2", "mesh.model=2", "embedding.optimizer.name=adagrad"),
    "row": ("row", "mesh.data=2", "mesh.model=2", "dense_sharding=fsdp", "training.clip_norm=0.5"),
    "row_cyclic": ("row_cyclic", "mesh.model=4", "dense_sharding=fsdp"),
    "table": ("table", "mesh.data=2", "mesh.model=2", "embedding.optimizer.name=momentum"),
    "column": ("column", "mesh.model=4", "embedding.optimizer.name=adam", "embedding.optimizer.eps=0.01"),
    "narrow": ("auto", "mesh.data=2", "mesh.model=2", "dense_sharding=fsdp", "precision=float16",
               "embedding.dtype=bfloat16"),
}  # fmt: skip
NARROW = {"narrow"}


def main(folder: str, steps: str, count: str, index: str, port: str) -> None:
    jax.config.update("jax_num_cpu_devices", 4 // int(count))
    if int(count) > 1:
        processes.start(f"127.0.0.1:{port}", int(count), int(index))
    cadence = (f"training.steps={steps}", "training.log_every=1", "training.eval_every=100")
    for name, (sharding, *changes) in LAYOUTS.items():
        values = [*TINY, *cadence, f"embedding.sharding={sharding}", *changes]
        config = overrides.apply(catalogue.get("dlrm_synthetic"), values)
        train(config, Options(f"{folder}/{name}", "", quiet=True))
    processes.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
