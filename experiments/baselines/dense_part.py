"""DLRM-DCNv2's dense part in PyTorch: as `jaxrec.models.dlrm`, with modules named alike.

Shape suffixes: B rows, N dense columns, X width of the interaction's input.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from experiments.baselines.ranges import region
from jaxrec.models.dlrm import DLRMConfig

# Module of the dense part -> its region; what it computes outside of them, where it joins the features, is of the
# interaction.
REGION_OF_MODULE = {"bottom_mlp": "bottom_mlp", "cross": "interaction", "top_mlp": "top_mlp"}


class MLP(nn.Module):
    """Linear layers with ReLU between them, and after the last where `activate_last`."""

    def __init__(self, inputs: int, widths: Sequence[int], *, activate_last: bool):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise([inputs, *widths]))
        self.activate_last = activate_last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i + 1 < len(self.layers) or self.activate_last:
                x = torch.relu(x)
        return x


class CrossNetwork(nn.Module):
    """DCNv2's low-rank cross layers: x_{l+1} = x_0 * ((x_l U) V + b) + x_l."""

    def __init__(self, width: int, layers: int, rank: int):
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(rank, width) for _ in range(layers))

    def forward(self, x0: torch.Tensor) -> torch.Tensor:
        x = x0
        for down, up in zip(self.down, self.up, strict=True):
            x = torch.addcmul(x, x0, up(down(x)))
        return x


class DensePart(nn.Module):
    """Bottom MLP, cross layers, top MLP."""

    def __init__(self, config: DLRMConfig, dense_columns: int, pooled_width: int):
        super().__init__()
        width = config.bottom_mlp[-1] + pooled_width
        self.bottom_mlp = MLP(dense_columns, config.bottom_mlp, activate_last=True)
        self.cross = CrossNetwork(width, config.cross_layers, config.cross_rank)
        self.top_mlp = MLP(width, (*config.top_mlp, 1), activate_last=False)

    def forward(self, dense: torch.Tensor, pooled: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns logits, float32 [B].

        Args:
          dense: float32 [B, N].
          pooled: The features' pooled vectors in the schema's order, side by side in one tensor or in several.
        """
        with region("bottom_mlp"):
            bottom = self.bottom_mlp(dense)
        with region("interaction"):
            x = self.cross(torch.cat([bottom, *pooled], dim=1))
        with region("top_mlp"):
            return self.top_mlp(x).squeeze(1)


def mean_loss(
    model: DensePart,
    dense: torch.Tensor,
    pooled: Sequence[torch.Tensor],
    labels: torch.Tensor,
    weight: torch.Tensor,
) -> torch.Tensor:
    """Returns the weighted mean of the binary cross entropy of `labels` [B] under `weight` [B]."""
    logits = model(dense, pooled)
    with region("loss"):
        losses = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        return (weight * losses).sum() / weight.sum()


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters by jaxrec's names, such as `top_mlp/layers/0/kernel`."""
    return {
        name.replace(".", "/").replace("weight", "kernel"): parameter for name, parameter in model.named_parameters()
    }


def to_torch(array: np.ndarray) -> torch.Tensor:
    """Returns what PyTorch holds for an array of jaxrec: kernels are [inputs, outputs] there, transposed here."""
    return torch.from_numpy(np.array(array.T, order="C"))


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The inverse of `to_torch`; a copy."""
    return np.array(tensor.detach().cpu().numpy().T, order="C")
