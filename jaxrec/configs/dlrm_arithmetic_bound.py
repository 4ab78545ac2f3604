"""DLRM-DCNv2 for timing, 26 tables: the size at which matrix products dominate.

python -m jaxrec.train --config=dlrm_arithmetic_bound --workdir=run_arithmetic_bound --profile_steps=10:15
"""

from jaxrec.configs.dlrm_sizes import size
from jaxrec.training.config import Config


def config() -> Config:
    return size(
        "dlrm_arithmetic_bound",
        tables=26,
        rows=100_000,
        dim=32,
        bag=1,
        batch=4096,
        bottom=(512, 256, 32),
        cross_layers=3,
        cross_rank=128,
        top=(1024, 1024, 512, 256),
    )
