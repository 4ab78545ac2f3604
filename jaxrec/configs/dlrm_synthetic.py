"""DLRM-DCNv2 on planted synthetic rows, whose best possible NE is known.

python -m jaxrec.train --config=dlrm_synthetic --workdir=run_synthetic
"""

from jaxrec.data.datasets.synthetic import SyntheticData
from jaxrec.embeddings.spec import EmbeddingConfig
from jaxrec.models.dlrm import DLRMConfig
from jaxrec.optim.dense import DenseOptimizerConfig
from jaxrec.optim.schedule import ScheduleConfig
from jaxrec.optim.sparse import SparseOptimizerConfig
from jaxrec.training.config import Config, TrainingConfig


def config() -> Config:
    return Config(
        name="dlrm_synthetic",
        data=SyntheticData(),
        model=DLRMConfig(bottom_mlp=(32, 16), interaction="dot", top_mlp=(64, 32)),
        embedding=EmbeddingConfig(dim=16, init_scale=0.05, optimizer=SparseOptimizerConfig(learning_rate=0.05)),
        optimizer=DenseOptimizerConfig(name="adam", learning_rate=2e-3),
        schedule=ScheduleConfig(name="linear", warmup_steps=100, decay_steps=4000, end_factor=0.02),
        training=TrainingConfig(steps=4000, batch_size=2048, eval_every=1000, checkpoint_every=1000),
    )
