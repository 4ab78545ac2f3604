"""One sparse `EmbeddingBag` a table, with PyTorch's element-wise Adagrad.

Shape suffixes: B rows, L max_length, D dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

import numpy as np
import torch
from torch import nn

from experiments.baselines.slots import slots_of_features
from experiments.baselines.stacks import Arrays
from jaxrec.data.schema import Batch, Schema
from jaxrec.training.config import Config


class BagIds(NamedTuple):
    """A feature's ids: [B, L] where every bag is full; else flat, with `offsets` [B] where the bags begin."""

    ids: torch.Tensor
    offsets: torch.Tensor | None


@final
class EmbeddingBags:
    """See `torch_stack.Tables`."""

    def __init__(self, config: Config, schema: Schema, device: str, id_type: str):
        optimizer = config.embedding.optimizer
        self._schema, self._device, self._id_type = schema, torch.device(device), np.dtype(id_type)
        self._weights = {
            table: nn.Parameter(torch.empty(rows, config.embedding.dim, device=self._device))
            for table, rows in schema.vocabulary.items()
        }
        # Sparse gradients: duplicates are merged (coalesced), then only touched rows are read and written.
        self._optimizer = torch.optim.Adagrad(
            self._weights.values(), lr=optimizer.learning_rate, eps=optimizer.eps, foreach=False
        )

    def put(self, batch: Batch) -> Sequence[BagIds]:
        return [self._bags(ids, lengths) for ids, lengths in slots_of_features(self._schema, batch)]

    def _bags(self, ids_BL: np.ndarray, lengths: np.ndarray | None) -> BagIds:
        ids, offsets = ids_BL, None
        if lengths is not None:
            ids = ids_BL[np.arange(ids_BL.shape[1]) < lengths[:, None]]
            offsets = torch.from_numpy((np.cumsum(lengths) - lengths).astype(self._id_type)).to(self._device)
        return BagIds(torch.from_numpy(np.array(ids, self._id_type, order="C")).to(self._device), offsets)

    def pool(self, ids: Sequence[BagIds]) -> list[torch.Tensor]:
        return [
            nn.functional.embedding_bag(bags.ids, self._weights[f.table], bags.offsets, mode=f.combiner, sparse=True)
            for f, bags in zip(self._schema.features, ids, strict=True)
        ]

    def update(self, pooled: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        torch.autograd.backward(pooled, gradients)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def load(self, arrays: Arrays) -> None:
        with torch.no_grad():
            for table, weights in self._weights.items():
                weights.copy_(torch.from_numpy(arrays[f"tables/{table}/weights"]))
                sums = self._optimizer.state[weights]["sum"]
                sums.copy_(torch.from_numpy(arrays[f"tables/{table}/accumulator"]))

    def export(self) -> dict[str, np.ndarray]:
        arrays = {}
        for table, weights in self._weights.items():
            arrays[f"tables/{table}/weights"] = np.array(weights.detach().cpu().numpy())
            arrays[f"tables/{table}/accumulator"] = np.array(self._optimizer.state[weights]["sum"].cpu().numpy())
        return arrays
