"""The floating-point operations that a model needs by its definition, whatever the compiler makes of it."""

from __future__ import annotations

from typing import Any

from jaxrec.models.dlrm import DLRM

# A product's backward pass is two products of its size: by the weights, and by the inputs.
STEP_FACTOR = 3


def forward_flops(model: DLRM, dim: int, rows: int) -> dict[str, float]:
    """Returns region -> FLOPs of the matrix products of one forward pass; embeddings and element-wise work excluded.

    Args:
      model: The model.
      dim: Columns of an embedding.
      rows: Of a device's batch.
    """
    bottom = model.bottom_mlp.layers if model.bottom_mlp is not None else []
    if model.interaction == "cross":
        interaction = _linear(model.cross.down, rows) + _linear(model.cross.up, rows)
    else:
        # Every feature with every other, and with itself: what the product computes, of which half is used.
        count = len(model.features) + (model.bottom_mlp is not None)
        interaction = 2.0 * rows * count * count * dim
    return {
        "bottom_mlp": _linear(bottom, rows), "interaction": interaction, "top_mlp": _linear(model.top_mlp.layers, rows),
    }  # fmt: skip


def step_flops(model: DLRM, dim: int, rows: int) -> float:
    """Returns the FLOPs of a training step: `STEP_FACTOR` times those of the forward pass.

    The convention of MFU. It counts a gradient by the dense features, which no step computes.
    """
    return STEP_FACTOR * sum(forward_flops(model, dim, rows).values())


def _linear(layers: Any, rows: int) -> float:
    return float(sum(2 * rows * layer.shapes[0][0] * layer.shapes[0][1] for layer in layers))
