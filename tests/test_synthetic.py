"""Synthetic rows: the law of the ids, the bags, the planted labels."""

import weakref

import numpy as np
import pytest

from jaxrec.checks import UserError
from jaxrec.data import block_writer
from jaxrec.data.datasets import synthetic
from jaxrec.data.datasets.synthetic import PowerLaw, SyntheticData
from jaxrec.data.datasets.tabular import TabularData
from jaxrec.data.pipeline import Batches

SMALL = SyntheticData(train_rows=20_000, validation_rows=9_000, test_rows=100, rows=50)


def chi_square_z(counts, probability):
    """How many standard deviations the statistic lies above its mean (pools bins that expect fewer than 10)."""
    order = np.argsort(-probability)
    expected, counts = probability[order] * counts.sum(), counts[order]
    rare = expected < 10
    if rare.any():
        expected = np.append(expected[~rare], expected[rare].sum())
        counts = np.append(counts[~rare], counts[rare].sum())
    freedom = len(expected) - 1
    return (np.sum((counts - expected) ** 2 / expected) - freedom) / np.sqrt(2 * freedom)


def law(rows, exponent=1.2):
    p = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    return p / p.sum()


@pytest.mark.parametrize(("rows", "exponent"), [(1, 1.2), (2, 1.2), (3, 0.01), (1000, 1.2), (1000, 3.0), (40_000, 1.2)])
def test_the_alias_table_is_the_law(rows, exponent):
    table = PowerLaw(rows, exponent)
    held = np.bincount(table._alias, weights=1 - table._keep.astype(np.float64), minlength=rows) + table._keep
    np.testing.assert_allclose(held / rows, law(rows, exponent), rtol=1e-5, atol=2e-8 / rows)


@pytest.mark.parametrize("rows", [7, 1000, 400_000])
def test_draws_follow_the_law(rows):
    drawn = PowerLaw(rows, 1.2).draw(np.random.default_rng(0), 2_000_000)
    assert drawn.dtype == np.int32
    assert abs(chi_square_z(np.bincount(drawn, minlength=rows), law(rows))) < 4


def test_ids_follow_the_law_under_a_permutation_of_each_table():
    blocks = SyntheticData(train_rows=200_000, tables=2, rows=(300, 300), bag=1).open().splits["train"]
    counts = [np.bincount(np.concatenate([blocks[i][c] for i in range(len(blocks))]), minlength=300) for c in COLUMNS]
    for count in counts:
        # The most frequent id is not id 0; the sorted counts are those of the law.
        assert abs(np.sort(count)[::-1][:20] / 200_000 - law(300)[:20]).max() < 0.005
    assert len({int(np.argmax(count)) for count in counts} | {0}) == 3
    planted = SyntheticData(train_rows=200_000, tables=2, rows=(300, 300), bag=1).open().splits["train"]._planted
    for i, count in enumerate(counts):
        probability = np.empty(300)
        probability[planted.ids[i]] = law(300)
        assert abs(chi_square_z(count, probability)) < 4


COLUMNS = ("cat_0", "cat_1")


def test_uniform_ids():
    blocks = SyntheticData(train_rows=100_000, tables=2, rows=20, ids="uniform").open().splits["train"]
    count = np.bincount(np.concatenate([blocks[i]["cat_1"] for i in range(len(blocks))]), minlength=20)
    assert abs(chi_square_z(count, np.full(20, 1 / 20))) < 4


def test_tables_of_different_sizes_and_the_schema():
    data = SyntheticData(train_rows=5000, tables=3, rows=(5, 10, 2000), bag=4, combiner="sum", dense=2).open()
    assert data.schema.vocabulary == {"table_0": 5, "table_1": 10, "table_2": 2000}
    assert [(f.name, f.kind, f.table, f.combiner, f.max_length) for f in data.schema.features] == [
        (f"cat_{i}", "bag", f"table_{i}", "sum", 4) for i in range(3)
    ]
    assert data.schema.dense == ("dense_0", "dense_1") and data.schema.labels == ("click",)
    batch = Batches(data, "train", 5000)[0]
    np.testing.assert_array_less(batch.batch.ids.reshape(5000, 3, 4).max((0, 2)), [5, 10, 2000])
    assert batch.truncated == 0 and batch.group.min() == 0 and batch.group.max() == 499


def test_bag_lengths():
    lengths = SMALL.open().splits["train"][0]["cat_3/lengths"]
    np.testing.assert_allclose(np.bincount(lengths, minlength=4) / len(lengths), [0, 1 / 3, 1 / 3, 1 / 3], atol=0.03)
    fixed = SyntheticData(train_rows=100, bag=8, fixed_bags=True).open().splits["train"][0]
    assert (fixed["cat_0/lengths"] == 8).all() and len(fixed["cat_0"]) == 800
    one = SyntheticData(train_rows=100, bag=1).open()
    assert one.schema.features[0].kind == "categorical" and "cat_0/lengths" not in one.splits["train"][0]


def test_blocks_are_pure_and_differ():
    a, b = SMALL.open(), SMALL.open()
    blocks = a.splits["train"]
    assert (blocks.rows, len(blocks), len(blocks[2]["labels"])) == (20_000, 3, 20_000 - 2 * 8192)
    blocks[1]
    for name, column in blocks[2].items():
        np.testing.assert_array_equal(column, b.splits["train"][2][name])
    others = [a.splits["train"][1], a.splits["validation"][0], SyntheticData(rows=50, seed=1).open().splits["train"][0]]
    for other in others:
        assert not np.array_equal(blocks[0]["dense"], other["dense"])
    for index in (3, -1):
        with pytest.raises(IndexError):
            blocks[index]


@pytest.mark.parametrize("split", ["validation", "test"])
def test_best_ne_is_the_planted_probabilities_ne(split):
    data = SMALL.open()
    blocks = [data.splits[split][i] for i in range(len(data.splits[split]))]
    p = 1 / (1 + np.exp(-np.concatenate([b["planted_logit"] for b in blocks]).astype(np.float64)))
    y = np.concatenate([b["labels"][:, 0] for b in blocks])
    loss, mean = -np.mean(np.where(y == 1, np.log(p), np.log(1 - p))), y.astype(np.float64).mean()
    assert data.best_ne(split) == pytest.approx(loss / -(mean * np.log(mean) + (1 - mean) * np.log(1 - mean)), rel=1e-9)


def test_the_defaults_can_be_predicted():
    assert 0.6 < SyntheticData().open().best_ne("validation") < 0.7


def test_the_logit_is_the_planted_model():
    data = SyntheticData(train_rows=50, tables=3, rows=20, bag=3, combiner="mean", dense=2, signal=1.5, interaction=0.3)
    blocks = data.open().splits["train"]
    planted, block = blocks._planted, blocks[0]

    def pooled(effects, i, row):
        lengths = block[f"cat_{i}/lengths"]
        start = lengths[:row].sum()
        return effects[block[f"cat_{i}"][start : start + lengths[row]]].mean() / np.sqrt((1 + 1 / 2 + 1 / 3) / 3)

    for row in range(50):
        linear = block["dense"][row] @ planted._dense
        linear += sum(pooled(planted.effects[i].linear, i, row) for i in range(3))
        product = np.prod([pooled(planted.effects[i].product, i, row) for i in range(2)])
        want = planted._bias + 1.5 * (np.sqrt(0.7) * linear / 2 + np.sqrt(0.3) * product)
        assert block["planted_logit"][row] == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_the_logit_has_the_stated_moments(combiner):
    data = SyntheticData(train_rows=100_000, tables=4, combiner=combiner, rate=0.3, signal=1.5)
    blocks = data.open().splits["train"]
    columns = [blocks[i] for i in range(len(blocks))]
    logit = np.concatenate([b["planted_logit"] for b in columns])
    label = np.concatenate([b["labels"][:, 0] for b in columns])
    assert logit.std() == pytest.approx(1.5, rel=0.05)
    assert label.mean() == pytest.approx(0.3, abs=0.02)  # the logit is only about normal
    # Calibration: in each tenth of the rows by logit, the mean label is the mean probability.
    p = 1 / (1 + np.exp(-logit))
    for part in np.array_split(np.argsort(logit), 10):
        error = np.sqrt(np.sum(p[part] * (1 - p[part]))) / len(part)
        assert abs(label[part].mean() - p[part].mean()) < 4.5 * error


def test_bernoulli_labels():
    data = SyntheticData(train_rows=50_000, labels="bernoulli", tables=1).open()
    blocks = data.splits["train"]
    label = np.concatenate([blocks[i]["labels"] for i in range(len(blocks))])
    assert label.mean() == pytest.approx(0.25, abs=0.01)
    assert data.best_ne is None and "planted_logit" not in blocks[0]


def test_it_is_served_from_memory():
    assert Batches(SMALL.open(), "train", 100).in_memory


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tables": 0}, "tables is 0, but must be at least 1"),
        ({"rows": (5, 5)}, "one for each of the 8 tables"),
        ({"rows": 0}, "a table has at least 1 row"),
        ({"combiner": "none"}, "combiner is 'none', but must be one of: sum, mean"),
        ({"ids": "zipf1.2"}, "ids is 'zipf1.2'"),
        ({"labels": "x"}, "labels is 'x'"),
        ({"rate": 1.0}, "rate is 1.0"),
        ({"exponent": 0.0}, "exponent is 0.0"),
        ({"interaction": 1.5}, "interaction is 1.5"),
        ({"tables": 1}, "interaction is 0.1, but must be 0 with one table"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_refusals(fields, sentence):
    with pytest.raises(UserError) as error:
        SyntheticData(**fields)
    assert sentence in str(error.value)


def test_prepared_rows_are_the_computed_ones(tmp_path):
    """On disk, through TFDS, as they are computed; and the best NE is known there too."""
    tfds = pytest.importorskip("tensorflow_datasets")
    data = SyntheticData(train_rows=20_000, validation_rows=3_000, test_rows=9_000, tables=3, rows=50, bag=2, users=9)
    folder, rows = synthetic.write(data, "planted", str(tmp_path))
    assert rows == 32_000
    computed, prepared = data.open(), TabularData("planted").open(str(tmp_path))
    assert prepared.schema == computed.schema
    for split, blocks in computed.splits.items():
        assert prepared.splits[split].rows == blocks.rows and len(prepared.splits[split]) == len(blocks)
        for i in range(len(blocks)):
            for name, column in blocks[i].items():
                np.testing.assert_array_equal(prepared.splits[split][i][name], column)
    assert computed.best_ne is not None and prepared.best_ne is not None
    assert prepared.best_ne("test") == computed.best_ne("test")
    assert prepared.best_ne("train") is None  # A pass over any number of rows, which nobody asked for.
    source = tfds.builder_from_directory(folder / "rows" / "1.0.0").as_data_source(split="test")
    np.testing.assert_array_equal(source[1]["cat_0/lengths"], computed.splits["test"][1]["cat_0/lengths"])
    with pytest.raises(UserError, match="exists already; delete it, or give another --name"):
        synthetic.write(data, "planted", str(tmp_path))


def test_preparing_holds_a_file_of_blocks_at_a_time(tmp_path, monkeypatch):
    """Blocks are computed as they are written: whenever one is, those of earlier files are gone."""
    monkeypatch.setattr(block_writer, "BLOCKS_PER_FILE", 2)
    alive = weakref.WeakSet()
    most = 0
    true = synthetic._SyntheticBlocks.__getitem__

    class Counted(dict):
        __hash__ = object.__hash__

    def counted(self, index):
        nonlocal most
        block = Counted(true(self, index))
        alive.add(block)
        most = max(most, len(alive))
        return block

    monkeypatch.setattr(synthetic._SyntheticBlocks, "__getitem__", counted)
    data = SyntheticData(train_rows=20 * 8192, validation_rows=100, test_rows=100, tables=2, labels="bernoulli")
    synthetic.write(data, "planted", str(tmp_path))
    assert 2 <= most <= 5
