"""DLRM-DCNv2 for timing, 26 tables: the size at which embedding lookups and updates dominate.

python -m jaxrec.train --config=dlrm_embedding_bound --workdir=run_embedding_bound --profile_steps=10:15
"""

from jaxrec.configs.dlrm_sizes import size
from jaxrec.training.config import Config


def config() -> Config:
    return size(
        "dlrm_embedding_bound",
        tables=26,
        rows=400_000,
        dim=64,
        bag=8,
        batch=2048,
        bottom=(64, 64),
        cross_layers=2,
        cross_rank=32,
        top=(256,),
    )
