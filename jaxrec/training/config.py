"""The whole configuration of a run: the sub-configs, each declared beside the code that it configures."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Protocol

from flax import nnx

from jaxrec import processes
from jaxrec.checks import UserError, one_of, require
from jaxrec.data.schema import DataConfig, Schema
from jaxrec.embeddings.spec import EmbeddingConfig
from jaxrec.fsdp import DENSE_SHARDINGS
from jaxrec.mesh import MeshConfig
from jaxrec.models.dlrm import DLRMConfig
from jaxrec.optim.dense import DenseOptimizerConfig
from jaxrec.optim.schedule import ScheduleConfig
from jaxrec.precision import Policy, compiler_options, policy


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """How long and how often.

    Attributes:
      steps: Updates in all.
      batch_size: Rows of a global batch.
      seed: Of initial weights, batch order and dropout.
      log_every: Steps between metric lines; the host reads the device only then.
      eval_every: Steps between evaluations on the validation split; 0: at the end only.
      checkpoint_every: Steps between checkpoints; 0: at the end and at every best evaluation only.
      keep_last: Checkpoints kept besides the best.
      patience: Evaluations without a better validation NE after which training stops; 0: never.
      eval_batch_size: Rows of an evaluation batch; 0: batch_size.
      auxiliary_weight: Of the mean of the auxiliary tasks' losses, which is added to the tasks' own.
      clip_norm: Gradients, dense and of embedding rows together, are scaled down to this global norm; 0: never.
      auc_row_budget: Rows of an evaluation kept in memory for the exact AUC; more spill to disk.
    """

    steps: int = 1000
    batch_size: int = 1024
    seed: int = 0
    log_every: int = 20
    eval_every: int = 500
    checkpoint_every: int = 500
    keep_last: int = 2
    patience: int = 0
    eval_batch_size: int = 0
    auxiliary_weight: float = 1.0
    clip_norm: float = 0.0
    auc_row_budget: int = 4_000_000

    def __post_init__(self):
        for field, least in (
            ("steps", 1), ("batch_size", 1), ("seed", 0), ("log_every", 1), ("eval_every", 0), ("checkpoint_every", 0),
            ("keep_last", 1), ("patience", 0), ("eval_batch_size", 0), ("auc_row_budget", 1),
            ("auxiliary_weight", 0), ("clip_norm", 0),
        ):  # fmt: skip
            value = getattr(self, field)
            what = (
                f"training.{field}"
                if field in ("eval_batch_size", "auc_row_budget", "auxiliary_weight", "clip_norm")
                else f"--{field}"
            )
            require(value >= least, f"{what} is {value}, but must be at least {least}")
        require(self.seed < 2**31, f"--seed is {self.seed}, but must be below 2^31")


class ModelConfig(Protocol):
    """What a config's `model` field is: a frozen dataclass that makes its model."""

    def create(self, schema: Schema, dim: int, policy: Policy, rngs: nnx.Rngs) -> Any:
        """Returns the NNX module for a data set's schema and embeddings of `dim` columns."""
        ...


@dataclasses.dataclass(frozen=True)
class Config:
    """A run. `name` is the named config that it started from."""

    name: str
    data: DataConfig
    model: ModelConfig = DLRMConfig()
    embedding: EmbeddingConfig = EmbeddingConfig()
    optimizer: DenseOptimizerConfig = DenseOptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    training: TrainingConfig = TrainingConfig()
    mesh: MeshConfig = MeshConfig()
    precision: str = "float32"
    matmul: str = "float32"
    cpu_products: str = "default"
    dense_sharding: str = "replicated"

    def __post_init__(self):
        _ = self.policy
        _ = compiler_options(self.cpu_products)
        one_of("--dense_sharding", self.dense_sharding, DENSE_SHARDINGS)

    @property
    def policy(self) -> Policy:
        """The number types."""
        return policy(self.precision, self.embedding.dtype, self.matmul)

    def as_dict(self) -> dict[str, Any]:
        """Returns the config as JSON values."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def identity(self) -> dict[str, Any]:
        """Returns what a resumed run must share with the run it continues.

        The mesh, shardings, the engine of the embeddings, the library of products, the number of steps and the cadences
        may change.
        """
        d = self.as_dict()
        embedding = {k: v for k, v in d["embedding"].items() if k not in ("sharding", "capacity_margin", "kernel")}
        return {
            "data": d["data"], "model": d["model"], "embedding": embedding, "optimizer": d["optimizer"],
            "schedule": d["schedule"], "precision": d["precision"], "matmul": d["matmul"],
            **{k: d["training"][k] for k in ("seed", "batch_size", "auxiliary_weight", "clip_norm")},
        }  # fmt: skip


def differences(ours: dict[str, Any], theirs: dict[str, Any], prefix: str = "") -> list[str]:
    """Returns `path: theirs -> ours` for every leaf of two JSON objects that differs."""
    out = []
    for key in sorted({*ours, *theirs}):
        a, b = ours.get(key), theirs.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            out += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            out.append(f"{prefix}{key} {json.dumps(b)} -> {json.dumps(a)}")
    return out


def describe(changed: list[str]) -> str:
    """Returns the first few of `differences` for a message."""
    return "; ".join([*changed[:4], "..."] if len(changed) > 4 else changed)


def require_same(values: dict[str, Any]) -> None:
    """Raises UserError, on all processes, where they were not started alike.

    Args:
      values: What must be equal: the config, flags, versions. JSON values, by name.
    """
    first, *others = processes.exchange(values)
    for i, theirs in enumerate(others, 1):
        changed = differences(theirs, first)
        if changed:
            processes.all_end()
            raise UserError(
                f"process {i} was started otherwise than process 0 ({describe(changed)}); start all by one command"
            )
