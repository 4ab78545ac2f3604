"""A DLRM-DCNv2 in training by PyTorch: tables of some kind, and the dense part, eager or compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, final

import numpy as np
import torch

from experiments.baselines.dense_part import DensePart, mean_loss, named_parameters, to_numpy, to_torch
from experiments.baselines.ranges import region
from experiments.baselines.stacks import Arrays
from jaxrec.data.schema import Batch, Schema
from jaxrec.models.dlrm import DLRMConfig
from jaxrec.training.config import Config


class Tables(Protocol):
    """Embedding tables with their optimizer.

    Shape suffixes: B rows, F features, D dim.
    """

    def put(self, batch: Batch) -> Any:
        """Brings the batch's ids to the device, as `pool` takes them."""
        ...

    def pool(self, ids: Any) -> Sequence[torch.Tensor]:
        """Returns the features' pooled vectors, side by side: F tensors [B, D], or one [B, F * D]."""
        ...

    def update(self, pooled: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Updates the rows that `pooled`, from `pool`, was made of."""
        ...

    def load(self, arrays: Arrays) -> None:
        """Takes over weights and optimizer rows."""
        ...

    def export(self) -> dict[str, np.ndarray]:
        """Returns copies of them."""
        ...


class Inputs(NamedTuple):
    """A batch on the device.

    Attributes:
      ids: As the tables take them.
      dense: float32 [B, N].
      labels: float32 [B].
      weight: float32 [B].
    """

    ids: Any
    dense: torch.Tensor
    labels: torch.Tensor
    weight: torch.Tensor


@final
class TorchStack:
    """See `stacks.Stack`.

    The graph is cut at the pooled vectors: first the dense part's backward pass, then the tables'. The work is the same
    as in one pass, and the dense part is one function for the compiler, whatever the tables are.

    Attributes:
      parameters: Of the dense part, by jaxrec's names.
      compiled: Whether the dense part is compiled.
    """

    def __init__(self, config: Config, schema: Schema, arrays: Arrays, tables: Tables, device: str, *, compiled: bool):
        # For the whole process: PyTorch has no narrower switch. jaxrec says it per product.
        torch.set_float32_matmul_precision("high" if config.matmul == "tf32" else "highest")
        assert isinstance(config.model, DLRMConfig)
        self._device, self._tables = torch.device(device), tables
        tables.load(arrays)
        width = len(schema.features) * config.embedding.dim
        self._model = DensePart(config.model, len(schema.dense), width).to(self._device)
        self.parameters = named_parameters(self._model)
        self._optimizer = torch.optim.Adagrad(
            self.parameters.values(), lr=config.optimizer.learning_rate, eps=config.optimizer.eps, fused=True
        )
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(to_torch(arrays[f"dense/{name}"]))
                self._sum_of(parameter).copy_(to_torch(arrays[f"optimizer/accumulator/{name}"]))
        # The step counter, and the loss scale, which float32 does not change.
        self._counters = {name: array for name, array in arrays.items() if "/" not in name or "loss_scale" in name}
        self._steps = 0
        self.compiled, self._loss = compiled, mean_loss
        if compiled:
            self.compile_dense_part()

    def compile_dense_part(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Has the dense part compiled, at its next call; `backend` as `torch.compile` takes it."""
        # Tables stay outside: the compiler does not take sparse gradients (pytorch#150656).
        self._loss = torch.compile(mean_loss, fullgraph=True, dynamic=False, backend=backend)

    def _sum_of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        return self._optimizer.state[parameter]["sum"]

    def put(self, batch: Batch) -> Inputs:
        dense, labels, weight = (
            torch.from_numpy(np.ascontiguousarray(x)).to(self._device)
            for x in (batch.dense, batch.labels[:, 0], batch.weight)
        )
        return Inputs(self._tables.put(batch), dense, labels, weight)

    def step(self, inputs: Inputs) -> torch.Tensor:
        with region("embedding_lookup"):
            pooled = self._tables.pool(inputs.ids)
        loss, gradients = self._differentiate(inputs, pooled)
        # As in jaxrec, all from the pooled vectors' gradients to the written rows: the tables' backward pass, too.
        with region("embedding_update"):
            self._tables.update(pooled, gradients)
        with region("dense_update"):
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        self._steps += 1
        return loss

    def _differentiate(
        self, inputs: Inputs, pooled: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Leaves the parameters' gradients in them; returns the loss and the gradients of `pooled`."""
        with region("embedding_lookup"):
            leaves = [p.detach().requires_grad_() for p in pooled]
        loss = self._loss(self._model, inputs.dense, leaves, inputs.labels, inputs.weight)
        # The loss's is the gradient that the pass begins with; the rest has the regions of the forward operations.
        with region("loss"):
            loss.backward()
        return loss.detach(), [leaf.grad for leaf in leaves if leaf.grad is not None]

    def pooled_shapes(self, inputs: Inputs) -> list[tuple[int, ...]]:
        """Returns the shapes of the tensors in which pooled vectors enter the dense part."""
        with torch.no_grad():
            return [tuple(p.shape) for p in self._tables.pool(inputs.ids)]

    def logits(self, inputs: Inputs) -> np.ndarray:
        with torch.no_grad():
            return self._model(inputs.dense, self._tables.pool(inputs.ids)).cpu().numpy()

    def dense_gradients(self, inputs: Inputs) -> dict[str, np.ndarray]:
        self._differentiate(inputs, self._tables.pool(inputs.ids))
        gradients = {f"dense/{name}": to_numpy(p.grad) for name, p in self.parameters.items() if p.grad is not None}
        self._optimizer.zero_grad(set_to_none=True)
        return gradients

    def export(self) -> dict[str, np.ndarray]:
        dense = {f"dense/{name}": to_numpy(p) for name, p in self.parameters.items()}
        sums = {f"optimizer/accumulator/{name}": to_numpy(self._sum_of(p)) for name, p in self.parameters.items()}
        step = np.asarray(self._counters["step"] + self._steps, np.int32)
        return {**self._counters, "step": step, **dense, **sums, **self._tables.export()}

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
