"""Writes a file in the form of Criteo's train.txt, of any size, with the cardinalities of the Kaggle file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import compute, csv

from jaxrec.data.datasets.criteo import CATEGORIES, COUNTS
from jaxrec.data.datasets.synthetic import PowerLaw

# Distinct values of C1 to C26 in the Kaggle file, as in facebookresearch/dlrm's README (`day_count` of the benchmark).
CARDINALITIES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
PIECE = 100_000
_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)


def write(path: Path, rows: int, seed: int = 0) -> None:
    """Writes `rows` rows; the same for the same seed."""
    rng = np.random.default_rng(seed)
    laws = {n: PowerLaw(n, 1.1) for n in set(CARDINALITIES)}
    with path.open("wb") as file:
        for start in range(0, rows, PIECE):
            n = min(PIECE, rows - start)
            columns: dict[str, pa.Array] = {"label": pa.array((rng.random(n) < 0.25).astype(np.int8))}
            for i, name in enumerate(COUNTS):
                values = np.floor(rng.exponential(1, n) ** 3 * 20 * (1 + i % 4)).astype(np.int64)
                if i == 1:
                    values -= 3
                columns[name] = pa.array(values, mask=rng.random(n) < (0.45 if i in (0, 9) else 0.05))
            for i, (name, rows_of) in enumerate(zip(CATEGORIES, CARDINALITIES, strict=True)):
                ids = laws[rows_of].draw(rng, n).astype(np.uint32)
                values = (ids + np.uint32(1)) * np.uint32(2654435761) + np.uint32(i)
                texts = _HEX[(values[:, None] >> np.arange(28, -1, -4, dtype=np.uint32)) & np.uint32(15)]
                texts = np.ascontiguousarray(texts).view("S8").ravel()
                column = pa.Array.from_buffers(
                    pa.string(),
                    n,
                    [None, pa.py_buffer(np.arange(0, 8 * n + 1, 8, dtype=np.int32)), pa.py_buffer(texts)],
                )
                missing = rng.random(n) < (0.4 if i in (18, 19, 24, 25) else 0.03)
                columns[name] = compute.if_else(pa.array(missing), "", column)  # pyright: ignore[reportAttributeAccessIssue]
            options = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
            csv.write_csv(pa.table(columns), file, options)
