"""Which number type each part of a training step uses."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxrec.checks import one_of, require

PRECISIONS = ("float32", "bfloat16", "float16")
MATMULS = ("float32", "tf32")
# Which library XLA sends matrix products on CPUs to: `default` is what it chooses itself, today YNNPACK. Neither is
# the faster one everywhere: with batches of thousands of rows and float32, Eigen often is.
CPU_PRODUCTS = ("default", "eigen")


@dataclasses.dataclass(frozen=True)
class Policy:
    """The types of one run.

    Attributes:
      compute: Operands of the dense part's matrix products and activations.
      table: Weights of the embedding tables. Their rows are float32 from the lookup on, and so are their gradients.
      matmul: How products of float32 operands are computed: `float32`, or `tf32` (10 bits of mantissa; GPUs only).
      accumulate: What matrix products accumulate in and return.
      param: Dense parameters, and the optimizer's state of all parameters.
      output: Logits, losses and metrics.
    """

    compute: jnp.dtype
    table: jnp.dtype
    matmul: str = "float32"
    accumulate: jnp.dtype = jnp.dtype("float32")
    param: jnp.dtype = jnp.dtype("float32")
    output: jnp.dtype = jnp.dtype("float32")

    @property
    def loss_scaled(self) -> bool:
        """Whether gradients need a larger loss lest they vanish: float16 has 5 bits of exponent."""
        return self.compute == jnp.float16

    @property
    def product(self) -> jax.lax.Precision:
        """What is passed to matrix products. XLA's own default would be TF32 on a GPU, and bfloat16 on a TPU."""
        return jax.lax.Precision.HIGH if self.matmul == "tf32" else jax.lax.Precision.HIGHEST

    def describe(self, platform: str) -> str:
        """Returns the types in words, for the log of a run on devices of `platform`."""
        scaled = ", dynamic loss scaling" if self.loss_scaled else ""
        rounded = "" if self.table == jnp.float32 else " (stochastic rounding)"
        products = f", products by {self.matmul}" if platform == "gpu" and self.compute == jnp.float32 else ""
        return (
            f"compute {self.compute.name}{products}{scaled}; accumulate {self.accumulate.name}; parameters "
            f"{self.param.name}; tables {self.table.name}{rounded}; outputs {self.output.name}"
        )

    def check(self, platform: str) -> None:
        """Raises UserError where devices of `platform` lack a mode."""
        require(
            self.matmul != "tf32" or platform == "gpu",
            f"--matmul is 'tf32', which only GPUs have, but the devices are {platform}; float32 is what they have",
        )


def compiler_options(cpu_products: str) -> dict[str, str]:
    """Returns what XLA is told of `--cpu_products`; it changes nothing for other devices than CPUs.

    Raises:
      UserError: It is not one of `CPU_PRODUCTS`.
    """
    one_of("--cpu_products", cpu_products, CPU_PRODUCTS)
    # No kind of operation is left to YNNPACK; what it does not take goes to Eigen.
    return {"xla_cpu_experimental_ynn_fusion_type": ""} if cpu_products == "eigen" else {}


def policy(name: str, table: str = "float32", matmul: str = "float32") -> Policy:
    """Returns the policy of `--precision=name --table_dtype=table --matmul=matmul`.

    Raises:
      UserError: One of them is not known, or tf32 is asked for products of another type.
    """
    one_of("--precision", name, PRECISIONS)
    one_of("--table_dtype", table, PRECISIONS)
    one_of("--matmul", matmul, MATMULS)
    require(
        matmul == "float32" or name == "float32",
        f"--matmul is {matmul!r}, which is a way to multiply float32 numbers, but --precision is {name!r}",
    )
    return Policy(jnp.dtype(name), jnp.dtype(table), matmul)
