"""DLRM-DCNv2 for timing, 26 tables: the size at which embeddings and arithmetic weigh alike.

python -m jaxrec.train --config=dlrm_balanced --workdir=run_balanced --profile_steps=10:15
"""

from jaxrec.configs.dlrm_sizes import size
from jaxrec.training.config import Config


def config() -> Config:
    return size(
        "dlrm_balanced",
        tables=26,
        rows=400_000,
        dim=16,
        bag=1,
        batch=4096,
        bottom=(64, 16),
        cross_layers=3,
        cross_rank=32,
        top=(400, 400, 400),
    )
