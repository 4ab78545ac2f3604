"""All tables as one, and all features of a batch in one sparse `embedding_bag`, with PyTorch's element-wise Adagrad.

Fewer and larger operations than a bag a table: one lookup, one sort of the ids for the sparse gradient, one update.
It needs features of one combiner whose bags are full and equally long, as the sizes that are timed have them.

Shape suffixes: B rows, F features, L max_length, D dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import nn

from experiments.baselines.slots import slots_of_features
from experiments.baselines.stacks import Arrays
from jaxrec.checks import require
from jaxrec.data.schema import Batch, Schema
from jaxrec.training.config import Config


@final
class JoinedBag:
    """See `torch_stack.Tables`."""

    def __init__(self, config: Config, schema: Schema, device: str, id_type: str):
        """Allocates the tables.

        Raises:
          UserError: The features differ in combiner or length.
        """
        optimizer = config.embedding.optimizer
        kinds = sorted({(f.combiner, f.max_length) for f in schema.features})
        require(len(kinds) == 1, f"features have (combiner, length) {kinds}, but one bag for all has one for all")
        self._combiner = kinds[0][0]
        self._schema, self._device, self._id_type = schema, torch.device(device), np.dtype(id_type)
        ends = np.cumsum(list(schema.vocabulary.values()))
        self._rows = {t: slice(end - n, end) for (t, n), end in zip(schema.vocabulary.items(), ends, strict=True)}
        self._weights = nn.Parameter(torch.empty(int(ends[-1]), config.embedding.dim, device=self._device))
        self._optimizer = torch.optim.Adagrad(
            [self._weights], lr=optimizer.learning_rate, eps=optimizer.eps, foreach=False
        )

    def put(self, batch: Batch) -> torch.Tensor:
        parts = []
        for f, (ids_BL, lengths) in zip(self._schema.features, slots_of_features(self._schema, batch), strict=True):
            require(
                lengths is None, f"feature {f.name} has bags that are not full, but one bag for all takes full ones"
            )
            parts.append(ids_BL + self._rows[f.table].start)
        ids = np.stack(parts, axis=1).astype(self._id_type)  # [B, F, L]
        return torch.from_numpy(ids.reshape(-1, ids.shape[-1])).to(self._device)

    def pool(self, ids: torch.Tensor) -> list[torch.Tensor]:
        pooled = nn.functional.embedding_bag(ids, self._weights, mode=self._combiner, sparse=True)
        return [pooled.view(-1, len(self._schema.features) * pooled.shape[1])]

    def update(self, pooled: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        torch.autograd.backward(pooled, gradients)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def load(self, arrays: Arrays) -> None:
        with torch.no_grad():
            for table, rows in self._rows.items():
                self._weights[rows].copy_(torch.from_numpy(arrays[f"tables/{table}/weights"]))
                sums = self._optimizer.state[self._weights]["sum"]
                sums[rows].copy_(torch.from_numpy(arrays[f"tables/{table}/accumulator"]))

    def export(self) -> dict[str, np.ndarray]:
        arrays = {}
        for table, rows in self._rows.items():
            arrays[f"tables/{table}/weights"] = np.array(self._weights[rows].detach().cpu().numpy())
            sums = self._optimizer.state[self._weights]["sum"]
            arrays[f"tables/{table}/accumulator"] = np.array(sums[rows].cpu().numpy())
        return arrays
