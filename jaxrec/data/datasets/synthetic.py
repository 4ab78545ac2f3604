"""Synthetic rows: any number of them, of any shape, from a known model.

Ids follow the power law that studies share (`P(k)` proportional to `k^-exponent` for `k = 1..rows`, the rows then
permuted by the seed); labels are drawn from planted weights, so that the best possible NE is known, or are coin flips.
Rows are computed when they are read, each block a pure function of (seed, split, block): nothing is stored, unless
`write` puts them into a TFDS data set, one block after the other.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxrec.checks import UserError, one_of, require
from jaxrec.data.schema import SPLITS, Block, Blocks, Dataset, FeatureSpec, Schema

NAME = "synthetic"
BLOCK_ROWS = 8192

# What a random stream is for, after the seed in its key: a table, the dense weights, or the blocks of a split.
_TABLE, _DENSE, _BLOCK = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class SyntheticData:
    """The shape of the rows and the law behind them.

    With planted labels, a click has probability sigmoid(logit),

        logit = bias + signal * (sqrt(1 - interaction) * (sum of z_i + z_dense) / sqrt(number of terms)
                                 + sqrt(interaction) * u_0 * u_1)

    where z_i pools (with the combiner) planted effects of feature i's ids, z_dense weighs the dense columns, u_0 and
    u_1 pool other planted effects of the first two features' ids, and each of them has mean 0 and variance 1 under the
    law of the ids. `signal` is thus the standard deviation of the logit, and `bias` is such that the mean label is
    `rate`. A dot interaction or a cross layer can learn the product; a linear model cannot.

    Attributes:
      train_rows: Rows of the training split.
      validation_rows: Rows of the validation split.
      test_rows: Rows of the test split.
      tables: Embedding tables; each is read by one feature.
      rows: Rows of each table, or one number for all of them.
      bag: Ids per feature and row at most; 1 makes the features categorical.
      fixed_bags: Whether every bag is full; else its length is uniform on 1..bag.
      combiner: `sum` or `mean`.
      dense: Standard normal columns.
      ids: `zipf` or `uniform`.
      exponent: Of the power law.
      labels: `planted`, or `bernoulli`: a click with probability `rate`, whatever the row.
      rate: The mean label.
      signal: Standard deviation of the planted logit; what decides the best NE.
      interaction: Share of that variance that is due to the product.
      users: Users (groups) to whom rows are given, uniformly.
      seed: Of everything.
    """

    train_rows: int = 1024 * BLOCK_ROWS
    validation_rows: int = 100_000
    test_rows: int = 100_000
    tables: int = 8
    rows: int | tuple[int, ...] = 1000
    bag: int = 3
    fixed_bags: bool = False
    combiner: str = "mean"
    dense: int = 8
    ids: str = "zipf"
    exponent: float = 1.2
    labels: str = "planted"
    rate: float = 0.25
    signal: float = 2.0
    interaction: float = 0.1
    users: int = 500
    seed: int = 0

    def __post_init__(self):
        for name in ("train_rows", "validation_rows", "test_rows", "tables", "bag", "users"):
            value = getattr(self, name)
            require(value >= 1, f"synthetic data: {name} is {value}, but must be at least 1")
        for name in ("dense", "seed", "signal"):
            value = getattr(self, name)
            require(value >= 0, f"synthetic data: {name} is {value}, but must be at least 0")
        require(
            isinstance(self.rows, int) or len(self.rows) == self.tables,
            f"synthetic data: rows is {self.rows}, but must be one number or one for each of the {self.tables} tables",
        )
        require(min(self.table_rows) >= 1, f"synthetic data: rows is {self.rows}, but a table has at least 1 row")
        one_of("synthetic data: combiner", self.combiner, ("sum", "mean"))
        one_of("synthetic data: ids", self.ids, ("zipf", "uniform"))
        one_of("synthetic data: labels", self.labels, ("planted", "bernoulli"))
        require(0 < self.rate < 1, f"synthetic data: rate is {self.rate}, but must lie between 0 and 1")
        require(self.exponent > 0, f"synthetic data: exponent is {self.exponent}, but must be greater than 0")
        require(0 <= self.interaction <= 1, f"synthetic data: interaction is {self.interaction}, but must be in [0, 1]")
        require(
            self.interaction == 0 or self.tables > 1 or self.labels == "bernoulli",
            f"synthetic data: interaction is {self.interaction}, but must be 0 with one table",
        )

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Rows of each table."""
        return (self.rows,) * self.tables if isinstance(self.rows, int) else tuple(self.rows)

    def open(self, data_dir: str = "") -> Dataset:
        """Draws the planted model; `data_dir` is not used."""
        del data_dir
        kind = "categorical" if self.bag == 1 else "bag"
        schema = Schema(
            features=tuple(
                FeatureSpec(f"cat_{i}", kind, f"table_{i}", self.combiner, self.bag) for i in range(self.tables)
            ),
            vocabulary={f"table_{i}": rows for i, rows in enumerate(self.table_rows)},
            dense=tuple(f"dense_{i}" for i in range(self.dense)),
            labels=("click",),
        )
        planted = _Planted(self)
        counts = (self.train_rows, self.validation_rows, self.test_rows)
        splits = {split: _SyntheticBlocks(planted, s, counts[s]) for s, split in enumerate(SPLITS)}

        @functools.cache
        def best_ne(split: str) -> float:
            one_of("the split of synthetic data", split, SPLITS)
            return _best_ne(splits[split])

        return Dataset("synthetic", schema, splits, best_ne=best_ne if self.labels == "planted" else None)


def write(data: SyntheticData, name: str, data_dir: str, compression: str = "zstd") -> tuple[Path, int]:
    """Prepares synthetic rows as a TFDS data set of any size: blocks are computed as they are written.

    Args:
      data: Their shape and law.
      name: Of the data set.
      data_dir: Where prepared data sets are.
      compression: As `block_writer.prepare` takes it.

    Returns:
      Its folder, and its rows.

    Raises:
      UserError: The folder exists, or cannot be written.
    """
    # Imported late: rows that are computed need none of it.
    from jaxrec.data import block_writer, blocks
    from jaxrec.data.datasets.tabular import VERSION, folder_of

    folder = folder_of(data_dir, name)
    require(not folder.exists(), f"{folder} exists already; delete it, or give another --name")
    dataset = data.open()
    held_out = {split: dataset.splits[split] for split in SPLITS[1:]}
    facts = blocks.Facts(
        name=name,
        version=VERSION,
        source=f"synthetic rows, {data}",
        vocabulary=dataset.schema.vocabulary,
        dense=dataset.schema.dense,
        labels=dataset.schema.labels,
        longest={f.name: data.bag for f in dataset.schema.bags},
        features=dataset.schema.features,
        best_ne={s: _best_ne(blocks) for s, blocks in held_out.items()} if data.labels == "planted" else {},
    )
    splits = {split: block_writer.counted(of_split) for split, of_split in dataset.splits.items()}
    block_writer.prepare(folder, facts, blocks.columns_of(dataset.splits["train"][0]), splits, None, compression)
    return folder, sum(of_split.rows for of_split in dataset.splits.values())


class PowerLaw:
    """Draws k - 1 where `P(k)` is proportional to `k^-exponent`, `k = 1..rows`.

    By Walker's alias method (Vose 1991), whose cost per draw does not depend on `rows`: row i of a table of equally
    likely entries is kept with probability `keep[i]`, and otherwise stands for `alias[i]`.
    """

    def __init__(self, rows: int, exponent: float):
        self.rows = rows
        self.probability = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
        self.probability /= self.probability.sum()
        self._keep, self._alias = _alias_table(self.probability)

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Returns int32 [count]."""
        u = rng.random(count)
        u *= self.rows
        entry = u.astype(np.int32)
        u -= entry  # what is left of a uniform number is uniform, and decides between the entry and its alias
        return np.where(u < self._keep.take(entry), entry, self._alias.take(entry))


def _alias_table(probability: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Builds the alias table of a law.

    The usual loop gives the entries below the mean (light), in turn, what they lack from the first entry above it
    (heavy) that still has a surplus; a heavy entry whose surplus is used up is filled up by the next one. Who fills
    whom follows from the running sums of lacks and surpluses, so two searches replace the loop.

    Returns:
      keep, float32 [rows], and alias, int32 [rows].
    """
    share = probability * len(probability)
    keep = np.ones(len(share), np.float32)
    alias = np.arange(len(share), dtype=np.int32)
    light, heavy = np.flatnonzero(share <= 1), np.flatnonzero(share > 1)
    if heavy.size:
        lacks, surpluses = np.cumsum(1 - share[light]), np.cumsum(share[heavy] - 1)
        filler = np.searchsorted(surpluses, lacks - (1 - share[light]), side="right")
        keep[light] = share[light]
        alias[light] = heavy[np.minimum(filler, heavy.size - 1)]
        emptied_by = np.minimum(np.searchsorted(lacks, surpluses[:-1]), light.size - 1)
        keep[heavy[:-1]] = 1 + surpluses[:-1] - lacks[emptied_by]
        alias[heavy[:-1]] = heavy[1:]
    return np.clip(keep, 0, 1), alias


class _Effects(NamedTuple):
    """Planted effects of a table's ids: float32 [rows] each, by id."""

    linear: np.ndarray
    product: np.ndarray | None


class _Planted:
    """The law of the ids and the planted weights, drawn from the seed."""

    def __init__(self, data: SyntheticData):
        self.data = data
        laws = {rows: PowerLaw(rows, data.exponent) for rows in set(data.table_rows)} if data.ids == "zipf" else {}
        self.laws = [laws.get(rows) for rows in data.table_rows]
        self.ids: list[np.ndarray | None] = []  # of each table, the id that the law's k-th entry stands for
        self.effects: list[_Effects] = []
        planted = data.labels == "planted"
        lengths = np.array([data.bag]) if data.fixed_bags else np.arange(1, data.bag + 1)
        self._pooled_std = math.sqrt(float(np.mean(lengths if data.combiner == "sum" else 1 / lengths)))
        for i, rows in enumerate(data.table_rows):
            rng = _random(data.seed, _TABLE, i)
            law = self.laws[i]
            self.ids.append(rng.permutation(rows).astype(np.int32) if law else None)
            if planted:
                probability = np.full(rows, 1 / rows)
                if law:
                    probability[self.ids[i]] = law.probability
                product = _standard(rng, probability) if i < 2 and data.interaction else None
                self.effects.append(_Effects(_standard(rng, probability), product))
        weights = _random(data.seed, _DENSE).standard_normal(data.dense)
        self._dense = (weights / max(np.linalg.norm(weights), 1e-12)).astype(np.float32)
        self._bias = _bias(data.rate, data.signal)

    def draw_ids(self, rng: np.random.Generator, table: int, count: int) -> np.ndarray:
        law, ids = self.laws[table], self.ids[table]
        if law is None or ids is None:
            return rng.integers(0, self.data.table_rows[table], count, dtype=np.int32)
        return ids.take(law.draw(rng, count))

    def logit(self, ids: list[np.ndarray], lengths: list[np.ndarray], dense: np.ndarray) -> np.ndarray:
        """Returns the planted logit, float32 [n], of flat ids and lengths [n] by feature and of dense [n, N]."""
        data = self.data
        linear = dense @ self._dense
        product = None
        for i, effects in enumerate(self.effects):
            linear += self._pool(effects.linear, ids[i], lengths[i])
            if effects.product is not None:
                pooled = self._pool(effects.product, ids[i], lengths[i])
                product = pooled if product is None else product * pooled
        linear *= data.signal * math.sqrt((1 - data.interaction) / (data.tables + (data.dense > 0)))
        if product is not None:
            linear += np.float32(data.signal * math.sqrt(data.interaction)) * product
        return linear + np.float32(self._bias)

    def _pool(self, effects: np.ndarray, ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        values = effects.take(ids)
        if len(ids) != len(lengths):  # no bag is empty, which `reduceat` could not express
            values = np.add.reduceat(values, np.cumsum(lengths) - lengths)
        if self.data.combiner == "mean":
            values /= lengths
        values /= np.float32(self._pooled_std)
        return values


class _SyntheticBlocks:
    """A split, computed block by block."""

    in_memory = True
    block_rows = BLOCK_ROWS

    def __init__(self, planted: _Planted, split: int, rows: int):
        self._planted, self._split, self.rows = planted, split, rows

    def __len__(self) -> int:
        return (self.rows + self.block_rows - 1) // self.block_rows

    def __getitem__(self, index: int) -> Block:
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        data = self._planted.data
        n = min(self.block_rows, self.rows - index * self.block_rows)
        rng = _random(data.seed, _BLOCK, self._split, index)
        block: dict[str, np.ndarray] = {
            "group": rng.integers(0, data.users, n, dtype=np.int32),
            "dense": rng.standard_normal((n, data.dense), dtype=np.float32),
        }
        ids, lengths = [], []
        for i in range(data.tables):
            full = data.fixed_bags or data.bag == 1
            length = np.full(n, data.bag, np.int32) if full else rng.integers(1, data.bag + 1, n, dtype=np.int32)
            lengths.append(length)
            ids.append(self._planted.draw_ids(rng, i, int(length.sum())))
            block[f"cat_{i}"] = ids[i]
            if data.bag > 1:
                block[f"cat_{i}/lengths"] = length
        probability: np.ndarray | float = data.rate
        if data.labels == "planted":
            block["planted_logit"] = self._planted.logit(ids, lengths, block["dense"])
            probability = 1 / (1 + np.exp(-block["planted_logit"].astype(np.float64)))
        block["labels"] = (rng.random(n) < probability).astype(np.float32)[:, None]
        return block


def _random(*key: int) -> np.random.Generator:
    # SFC64 draws twice as fast as Philox; the key, not the position in a stream, keeps blocks apart.
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence(key)))


def _standard(rng: np.random.Generator, probability: np.ndarray) -> np.ndarray:
    """Draws a normal effect per id, then makes mean 0 and variance 1 hold under the ids' law."""
    effects = rng.standard_normal(len(probability))
    effects -= probability @ effects
    return (effects / max(math.sqrt(probability @ effects**2), 1e-12)).astype(np.float32)


def _bias(rate: float, signal: float) -> float:
    """The b at which sigmoid(b + signal * z) has mean `rate` over a standard normal z."""
    z, weight = np.polynomial.hermite_e.hermegauss(64)
    weight /= weight.sum()
    low, high = -50.0 - 10 * signal, 50.0 + 10 * signal
    for _ in range(100):
        middle = (low + high) / 2
        if weight @ (0.5 + 0.5 * np.tanh((middle + signal * z) / 2)) < rate:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _best_ne(blocks: Blocks) -> float:
    """NE of the planted probabilities: their log loss over the entropy of the mean label, on the same rows."""
    loss = clicks = 0.0
    for i in range(len(blocks)):
        block = blocks[i]
        logit, label = block["planted_logit"].astype(np.float64), block["labels"][:, 0].astype(np.float64)
        loss += float(np.sum(np.logaddexp(0, logit) - label * logit))
        clicks += float(label.sum())
    mean = clicks / blocks.rows
    if not 0 < mean < 1:
        raise UserError(f"synthetic data: the best NE is not defined where all {blocks.rows} labels are equal")
    return loss / blocks.rows / -(mean * math.log(mean) + (1 - mean) * math.log(1 - mean))
