"""The stacks that are compared, behind one interface: built from a config and named arrays, they step and export.

Names of arrays are those of jaxrec's checkpoints (`checkpoint.to_arrays`): `dense/...`, `optimizer/accumulator/...`,
`tables/<table>/weights` and `tables/<table>/accumulator`. So weights go from any stack to any other.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from jaxrec.checks import import_package, one_of, require
from jaxrec.data.schema import Batch, Dataset
from jaxrec.models.dlrm import DLRMConfig
from jaxrec.optim.schedule import ScheduleConfig
from jaxrec.training.config import Config

Arrays = Mapping[str, np.ndarray]

# The PyTorch stacks, and the optimizer of embedding rows that each is compared under. PyTorch has no row-wise Adagrad
# and FBGEMM no element-wise one on CPU; a ratio across the two would compare optimizers, so there is none.
OPTIMIZERS = {"pytorch-eager": "adagrad", "pytorch-compiled": "adagrad", "pytorch-fbgemm": "rowwise_adagrad"}
ID_TYPES = ("int32", "int64")
# How the stacks of `EmbeddingBag` hold their tables: one bag a table, or one for all.
LAYOUTS = ("separate", "joined")


class Stack(Protocol):
    """A model in training. Nothing is read back from the device but by `logits`, `dense_gradients` and `export`."""

    def put(self, batch: Batch) -> Any:
        """Brings a host batch to the device, its ids in the layout that the stack's lookup takes.

        The layout is made here because an input pipeline would make it, away from the step.
        """
        ...

    def step(self, inputs: Any) -> Any:
        """Takes one training step; returns the loss before the update, a scalar on the device."""
        ...

    def logits(self, inputs: Any) -> np.ndarray:
        """Returns the logits, float32 [B]."""
        ...

    def dense_gradients(self, inputs: Any) -> dict[str, np.ndarray]:
        """Returns the gradients of the dense parameters by their arrays' names; changes nothing."""
        ...

    def export(self) -> dict[str, np.ndarray]:
        """Returns copies of all weights and optimizer rows, by name."""
        ...

    def wait(self) -> None:
        """Returns when the device has done everything that was asked of it."""
        ...


Builder = Callable[[Config, Dataset, Arrays], Stack]


def paired(config: Config, stack: str) -> Config:
    """Returns `config` with the optimizer of embedding rows under which `stack` is compared.

    Raises:
      UserError: There is no such stack.
    """
    one_of("--stack", stack, tuple(OPTIMIZERS))
    optimizer = dataclasses.replace(config.embedding.optimizer, name=OPTIMIZERS[stack])
    return dataclasses.replace(config, embedding=dataclasses.replace(config.embedding, optimizer=optimizer))


def builder(stack: str, device: str = "cpu", id_type: str = "int64", layout: str = "separate") -> Builder:
    """Returns the function that builds a PyTorch stack.

    Args:
      stack: One of `OPTIMIZERS`.
      device: As torch names it: `cpu`, `cuda`.
      id_type: Of ids and offsets on the device, one of `ID_TYPES`.
      layout: One of `LAYOUTS`; of no matter to `pytorch-fbgemm`, whose operation has all tables in one.

    Raises:
      UserError: PyTorch (or, for `pytorch-fbgemm`, FBGEMM) is not installed, or there is no such stack.
    """
    one_of("--stack", stack, tuple(OPTIMIZERS))
    one_of("the type of ids", id_type, ID_TYPES)
    one_of("the layout of tables", layout, LAYOUTS)
    # OpenMP reads it once, as torch is imported. Threads that spin between parallel regions made the sparse operators
    # of PyTorch 5 to 10 times slower on two shared cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import_package("torch", f"the stack {stack} needs PyTorch", "torch==2.13.0, as `make baseline` does")
    if stack == "pytorch-fbgemm":
        import_package("fbgemm_gpu", f"the stack {stack} needs FBGEMM", "fbgemm-gpu-cpu, as `make baseline` does")

    def build(config: Config, dataset: Dataset, arrays: Arrays) -> Stack:
        require_supported(config, dataset)
        found = config.embedding.optimizer.name
        require(
            found == OPTIMIZERS[stack],
            f"embedding.optimizer.name is {found}, but {stack} is compared under {OPTIMIZERS[stack]} only",
        )
        from experiments.baselines.torch_stack import TorchStack

        if stack == "pytorch-fbgemm":
            from experiments.baselines.fused_tables import FusedTables

            tables = FusedTables(config, dataset.schema, device, id_type)
        elif layout == "joined":
            from experiments.baselines.joined_bag import JoinedBag

            tables = JoinedBag(config, dataset.schema, device, id_type)
        else:
            from experiments.baselines.embedding_bags import EmbeddingBags

            tables = EmbeddingBags(config, dataset.schema, device, id_type)
        return TorchStack(config, dataset.schema, arrays, tables, device, compiled=stack != "pytorch-eager")

    return build


def require_supported(config: Config, dataset: Dataset) -> None:
    """Refuses what the PyTorch model does not have, so that nothing is compared with something else.

    Raises:
      UserError: Names the field.
    """
    model, schema = config.model, dataset.schema
    require(isinstance(model, DLRMConfig), f"the baselines have DLRM only, but the model is {type(model).__name__}")
    assert isinstance(model, DLRMConfig)
    for field, found, has in (
        ("model.interaction", model.interaction, "cross"),
        ("model.dropout", model.dropout, 0.0),
        ("model.feature_dropout", model.feature_dropout, 0.0),
        ("--precision", config.precision, "float32"),
        ("--table_dtype", config.embedding.dtype, "float32"),
        ("optimizer.name", config.optimizer.name, "adagrad"),
        ("optimizer.weight_decay", config.optimizer.weight_decay, 0.0),
        ("embedding.optimizer.weight_decay", config.embedding.optimizer.weight_decay, 0.0),
        ("training.clip_norm", config.training.clip_norm, 0.0),
        ("schedule", config.schedule, ScheduleConfig()),
        ("the number of tasks", len(schema.tasks), 1),
        ("the number of devices", config.mesh.size, 1),
    ):
        require(found == has, f"{field} is {found}, but the baselines have {has} only")
    require(len(schema.dense) >= 1, f"data set {dataset.name} has no dense columns, but the baselines need some")
    for f in schema.features:
        require(f.combiner != "none", f"feature {f.name}: combiner is none, but the baselines have sum and mean only")
