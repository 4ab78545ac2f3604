"""DLRM-DCNv2 on Criteo's click logs, prepared by `jaxrec.prepare --dataset=criteo`.

    python -m jaxrec.prepare --dataset=criteo --input=train.txt
    python -m jaxrec.train --config=dlrm_criteo --workdir=run_criteo

One pass over the Kaggle file's first six days (39 million rows) is 9,600 steps of 4,096 rows; a second pass
overfits. Not run on the whole file by this release: no number is promised.
"""

from jaxrec.data.datasets.criteo import NAME
from jaxrec.data.datasets.tabular import TabularData
from jaxrec.embeddings.spec import EmbeddingConfig
from jaxrec.models.dlrm import DLRMConfig
from jaxrec.optim.dense import DenseOptimizerConfig
from jaxrec.optim.schedule import ScheduleConfig
from jaxrec.optim.sparse import SparseOptimizerConfig
from jaxrec.training.config import Config, TrainingConfig


def config() -> Config:
    return Config(
        name="dlrm_criteo",
        data=TabularData(NAME),
        model=DLRMConfig(
            bottom_mlp=(512, 256, 16), interaction="cross", cross_layers=3, cross_rank=64, top_mlp=(512, 256)
        ),
        embedding=EmbeddingConfig(dim=16, init_scale=0.01, optimizer=SparseOptimizerConfig(learning_rate=0.02)),
        optimizer=DenseOptimizerConfig(name="adam", learning_rate=1e-3),
        schedule=ScheduleConfig(name="linear", warmup_steps=500, decay_steps=9600, end_factor=0.05),
        training=TrainingConfig(
            steps=9600, batch_size=4096, eval_every=2400, checkpoint_every=1200, log_every=50, eval_batch_size=16384
        ),
    )
