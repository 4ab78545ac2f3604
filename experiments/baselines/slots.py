"""The id slots of a batch, feature by feature."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxrec.data.schema import Batch, Schema


def slots_of_features(schema: Schema, batch: Batch) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Yields, in the schema's order, each feature's ids, int32 [B, max_length], and its lengths, int32 [B].

    The lengths are None where every bag is full: the stacks then need no offsets.
    """
    start = bag = 0
    for f in schema.features:
        ids, lengths = batch.ids[:, start : start + f.max_length], None
        if f.kind != "categorical":
            lengths = batch.lengths[:, bag]
            bag += 1
            if (lengths == f.max_length).all():
                lengths = None
        yield ids, lengths
        start += f.max_length
