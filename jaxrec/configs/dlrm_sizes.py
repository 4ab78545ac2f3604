"""The DLRM-DCNv2 sizes that all benchmarks share: one function that makes a config of a size.

Ids follow k^-1.2 over each table's rows, permuted by the seed; labels are Bernoulli(0.25), so these are for timing.
"""

from jaxrec.data.datasets.synthetic import SyntheticData
from jaxrec.embeddings.spec import EmbeddingConfig
from jaxrec.models.dlrm import DLRMConfig
from jaxrec.optim.dense import DenseOptimizerConfig
from jaxrec.optim.sparse import SparseOptimizerConfig
from jaxrec.training.config import Config, TrainingConfig


def size(
    name: str,
    *,
    tables: int,
    rows: int,
    dim: int,
    bag: int,
    batch: int,
    bottom: tuple[int, ...],
    cross_layers: int,
    cross_rank: int,
    top: tuple[int, ...],
    steps: int = 100,
) -> Config:
    """Returns the config of one size; `top` holds the hidden widths, without the output."""
    return Config(
        name=name,
        data=SyntheticData(
            train_rows=1_000_000, validation_rows=batch, test_rows=batch, tables=tables, rows=rows, bag=bag,
            fixed_bags=True, combiner="sum", dense=13, labels="bernoulli", rate=0.25,
        ),
        model=DLRMConfig(
            bottom_mlp=bottom, interaction="cross", cross_layers=cross_layers, cross_rank=cross_rank, top_mlp=top
        ),
        embedding=EmbeddingConfig(
            dim=dim, optimizer=SparseOptimizerConfig(name="adagrad", learning_rate=0.01, eps=1e-8)
        ),
        optimizer=DenseOptimizerConfig(name="adagrad", learning_rate=0.01, eps=1e-8),
        cpu_products="eigen",
        training=TrainingConfig(steps=steps, batch_size=batch, eval_every=0, checkpoint_every=0),
    )  # fmt: skip
