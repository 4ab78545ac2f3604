"""All tables in FBGEMM's fused table operation, whose backward pass updates the touched rows: row-wise Adagrad.

Shape suffixes: B rows, F features, D dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from experiments.baselines.slots import slots_of_features
from experiments.baselines.stacks import Arrays
from jaxrec.checks import require
from jaxrec.data.schema import Batch, Schema
from jaxrec.training.config import Config


class FusedIds(NamedTuple):
    """All features' ids, flat: first those of feature 0 for every row, and so on; `offsets` [F * B + 1] of the bags."""

    ids: torch.Tensor
    offsets: torch.Tensor


@final
class FusedTables:
    """See `torch_stack.Tables`."""

    def __init__(self, config: Config, schema: Schema, device: str, id_type: str):
        """Allocates the tables.

        Raises:
          UserError: The features have several combiners, or rows are not a multiple of 16 bytes.
        """
        optimizer, dim = config.embedding.optimizer, config.embedding.dim
        combiners = sorted({f.combiner for f in schema.features})
        require(len(combiners) == 1, f"features have the combiners {combiners}, but FBGEMM's operation has one for all")
        require(dim % 4 == 0, f"embedding.dim is {dim}, but FBGEMM needs a multiple of 4")
        self._schema, self._device, self._id_type = schema, torch.device(device), np.dtype(id_type)
        on_gpu = self._device.type == "cuda"
        place = EmbeddingLocation.DEVICE if on_gpu else EmbeddingLocation.HOST
        tables = list(schema.vocabulary)
        self._tables = SplitTableBatchedEmbeddingBagsCodegen(
            [(schema.vocabulary[t], dim, place, ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU) for t in tables],
            feature_table_map=[tables.index(f.table) for f in schema.features],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=optimizer.learning_rate,
            eps=optimizer.eps,
            stochastic_rounding=False,
            pooling_mode=PoolingMode.MEAN if combiners == ["mean"] else PoolingMode.SUM,
            device=self._device,
            # jaxrec checks ids on the host, outside the step.
            bounds_check_mode=BoundsCheckMode.NONE,
            table_names=tables,
        )

    def put(self, batch: Batch) -> FusedIds:
        flat, counts = [], []
        for ids, lengths in slots_of_features(self._schema, batch):
            full = np.full(len(ids), ids.shape[1]) if lengths is None else lengths
            flat.append(ids[np.arange(ids.shape[1]) < full[:, None]])
            counts.append(full)
        ids, offsets = np.concatenate(flat), np.concatenate([[0], np.cumsum(np.concatenate(counts))])
        return FusedIds(*(torch.from_numpy(x.astype(self._id_type)).to(self._device) for x in (ids, offsets)))

    def pool(self, ids: FusedIds) -> list[torch.Tensor]:
        return [self._tables(ids.ids, ids.offsets)]

    def update(self, pooled: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        torch.autograd.backward(pooled, gradients)

    def load(self, arrays: Arrays) -> None:
        for name, tensor in self._views().items():
            tensor.copy_(torch.from_numpy(arrays[name]))

    def export(self) -> dict[str, np.ndarray]:
        return {name: np.array(tensor.cpu().numpy()) for name, tensor in self._views().items()}

    def _views(self) -> dict[str, torch.Tensor]:
        """Returns weights [rows, D] and accumulators [rows], which share the operation's memory."""
        weights, states = self._tables.split_embedding_weights(), self._tables.split_optimizer_states()
        tables = list(self._schema.vocabulary)
        views = {f"tables/{t}/weights": w for t, w in zip(tables, weights, strict=True)}
        return views | {f"tables/{t}/accumulator": s[0].flatten() for t, s in zip(tables, states, strict=True)}
