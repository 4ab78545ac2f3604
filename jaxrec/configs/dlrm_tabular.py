"""DLRM-DCNv2 on a table of your own, which `jaxrec.prepare` has prepared: --set data.table=NAME.

    python -m jaxrec.prepare --dataset=tabular --input=clicks.csv --propose
    python -m jaxrec.prepare --dataset=tabular --input=clicks.csv --schema=clicks.toml
    python -m jaxrec.train --config=dlrm_tabular --set data.table=clicks --workdir=run_clicks

A middle-sized model that stops when validation NE no longer falls; what suits the table is for its owner to find, above
all the learning rates (`embedding.optimizer.learning_rate`, `optimizer.learning_rate`) and `embedding.dim`.
"""

from jaxrec.data.datasets.tabular import TabularData
from jaxrec.embeddings.spec import EmbeddingConfig
from jaxrec.models.dlrm import DLRMConfig
from jaxrec.optim.dense import DenseOptimizerConfig
from jaxrec.optim.schedule import ScheduleConfig
from jaxrec.optim.sparse import SparseOptimizerConfig
from jaxrec.training.config import Config, TrainingConfig


def config() -> Config:
    return Config(
        name="dlrm_tabular",
        data=TabularData(),
        model=DLRMConfig(
            bottom_mlp=(64, 16), interaction="cross", cross_layers=2, cross_rank=32, top_mlp=(128, 64), dropout=0.1
        ),
        embedding=EmbeddingConfig(dim=16, init_scale=0.01, optimizer=SparseOptimizerConfig(learning_rate=0.05)),
        optimizer=DenseOptimizerConfig(name="adam", learning_rate=1e-3),
        schedule=ScheduleConfig(name="constant", warmup_steps=100),
        training=TrainingConfig(steps=5000, batch_size=512, eval_every=50, checkpoint_every=1000, patience=6),
    )
