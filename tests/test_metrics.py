"""Evaluation metrics against scikit-learn and plain loops; spilled against in memory; window metrics by hand."""

import math
import time
import tracemalloc
from typing import NamedTuple, SupportsFloat

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from jaxrec.training.metrics import EvaluationMetrics, window_metrics

NAMES = {
    "rows",
    "auc",
    "ne",
    "log_loss",
    "calibration",
    "label_mean",
    "user_auc",
    "users_with_both_classes",
    "spilled_rows",
}


def make_rows(rows, groups, distinct_logits=None, seed=0):
    """(logits, labels, weight, group), some of weight 0; few distinct logits make many ties."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(-1, 1.5, rows)
    if distinct_logits is not None:
        logits = rng.choice(rng.normal(-1, 1.5, distinct_logits), rows)
    labels = rng.random(rows) < 1 / (1 + np.exp(-logits))
    weight = rng.exponential(1, rows) * (rng.random(rows) > 0.1)
    group = rng.choice(np.linspace(0, 2**31 - 1, groups).astype(np.int64), rows)
    return logits.astype(np.float32), labels.astype(np.float32), weight.astype(np.float32), group.astype(np.int32)


def evaluate(rows, batch_size=64, **options):
    with EvaluationMetrics(**options) as metrics:
        for i in range(0, len(rows[0]), batch_size):
            metrics.update(*(x[i : i + batch_size] for x in rows))
        return metrics.compute()


def oracle(logits, labels, weight, group):
    """The same metrics by scikit-learn and a loop over the groups."""
    keep = weight > 0
    logits, labels, group = logits[keep].astype(np.float64), labels[keep], group[keep]
    weight = weight[keep].astype(np.float64)
    prediction = 1 / (1 + np.exp(-logits))
    mean = np.average(labels, weights=weight)
    of_groups = [
        roc_auc_score(labels[group == g], logits[group == g], sample_weight=weight[group == g])
        for g in np.unique(group)
        if len(np.unique(labels[group == g])) == 2
    ]
    loss = log_loss(labels, prediction, sample_weight=weight)
    return {
        "rows": int(keep.sum()),
        "auc": roc_auc_score(labels, logits, sample_weight=weight),
        "log_loss": loss,
        "ne": loss / -(mean * np.log(mean) + (1 - mean) * np.log(1 - mean)),
        "calibration": np.average(prediction, weights=weight) / mean,
        "label_mean": mean,
        "user_auc": np.mean(of_groups),
        "users_with_both_classes": len(of_groups),
    }


@pytest.mark.parametrize("budget", [1, 10, 100, 4_000_000])
@pytest.mark.parametrize("distinct_logits", [None, 20, 1])
def test_against_scikit_learn(distinct_logits, budget):
    rows = make_rows(700, groups=60, distinct_logits=distinct_logits)
    got, expected = evaluate(rows, row_budget=budget), oracle(*rows)
    assert set(got) == NAMES
    assert all(type(v) is float for v in got.values())
    spilled = got.pop("spilled_rows")
    assert got == pytest.approx(expected, rel=1e-10)
    assert spilled == (expected["rows"] - 1) // budget * budget


@pytest.mark.parametrize("groups", [1, 3, 3000])
@pytest.mark.parametrize("distinct_logits", [None, 50, 1])
@pytest.mark.parametrize("budget", [97, 1000, 20_000])
def test_spilling_changes_nothing(groups, distinct_logits, budget):
    rows = make_rows(30_000, groups, distinct_logits)
    in_memory, spilled = evaluate(rows, 512), evaluate(rows, 512, row_budget=budget)
    assert in_memory.pop("spilled_rows") == 0
    assert spilled.pop("spilled_rows") > 0
    assert spilled == pytest.approx(in_memory, rel=1e-12, abs=0)


def test_all_ties_have_an_auc_of_one_half():
    got = evaluate(make_rows(1000, groups=5, distinct_logits=1), row_budget=13)
    assert got["auc"] == pytest.approx(0.5, abs=1e-14)
    assert got["user_auc"] == pytest.approx(0.5, abs=1e-14)


def test_positive_and_negative_zero_are_a_tie():
    rows = np.array([0.0, -0.0]), np.array([0, 1]), np.ones(2), np.zeros(2, np.int32)
    assert evaluate(rows)["auc"] == 0.5


ROW = st.tuples(
    st.sampled_from([-np.inf, -200.0, -1.5, -0.0, 0.0, 1e-40, 1.5, 200.0]) | st.floats(-30, 30, width=32),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([0.0, 1.0]) | st.floats(2.0**-20, 2.0**20, width=32),
    st.sampled_from([0, 1, 7, 2**31 - 1]),
)


@given(rows=st.lists(ROW, max_size=60), budget=st.integers(1, 100), batch_size=st.integers(1, 70), data=st.data())
@settings(deadline=None)
def test_neither_order_nor_batches_matter(rows, budget, batch_size, data):
    def columns(rows):
        logits, labels, weight, group = zip(*rows, strict=True) if rows else ([], [], [], [])
        return *(np.array(x, np.float32) for x in (logits, labels, weight)), np.array(group, np.int32)

    shuffled = data.draw(st.permutations(rows))
    expected, got = evaluate(columns(rows)), evaluate(columns(shuffled), batch_size, row_budget=budget)
    del expected["spilled_rows"], got["spilled_rows"]
    assert got == pytest.approx(expected, rel=1e-12, abs=1e-12, nan_ok=True)


def test_rows_of_weight_zero_are_ignored_whatever_they_hold():
    rows = make_rows(200, groups=9)
    padding = [np.nan, np.nan], [7, np.nan], [0, 0], [-1, 3]
    padded = [np.append(x, bad).astype(x.dtype) for x, bad in zip(rows, padding, strict=True)]
    assert evaluate(padded, 50) == pytest.approx(evaluate(rows, 50), rel=1e-12)


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_only(label):
    logits, _, weight, group = make_rows(300, groups=4)
    got = evaluate((logits, np.full(300, label, np.float32), weight, group))
    assert all(math.isnan(got[name]) for name in ("auc", "ne", "user_auc"))
    assert math.isnan(got["calibration"]) == (label == 0)
    assert got["users_with_both_classes"] == 0
    assert got["label_mean"] == label
    assert math.isfinite(got["log_loss"])


@pytest.mark.parametrize("rows", [0, 3])
def test_no_rows(rows):
    got = evaluate((np.ones(rows), np.ones(rows), np.zeros(rows), np.ones(rows, np.int32)))
    counts = {"rows", "users_with_both_classes", "spilled_rows"}
    assert all(got[name] == 0 for name in counts)
    assert all(math.isnan(got[name]) for name in NAMES - counts)


def test_groups_of_one_class_do_not_enter_the_user_auc():
    group = np.array([5, 5, 2**31 - 1, 2**31 - 1, 0, 0], np.int32)
    labels, logits = np.array([0, 1, 1, 1, 1, 0]), np.array([1, 2, 0, 3, 1, 2])
    got = evaluate((logits, labels, np.ones(6), group))
    assert (got["user_auc"], got["users_with_both_classes"]) == (0.5, 2)


def test_the_log_loss_of_extreme_logits_is_finite_in_float64():
    got = evaluate((np.array([200, -200, 1e-3]), np.array([0, 1, 1]), np.ones(3), np.zeros(3, np.int32)))
    assert got["log_loss"] == pytest.approx((400 + math.log1p(math.exp(-np.float32(1e-3)))) / 3, rel=1e-12)
    right = evaluate((np.array([np.inf, -np.inf]), np.array([1, 0]), np.ones(2), np.zeros(2, np.int32)))
    assert (right["log_loss"], right["auc"], right["calibration"]) == (0, 1, 1)
    wrong = evaluate((np.array([np.inf, -np.inf]), np.array([0, 1]), np.ones(2), np.zeros(2, np.int32)))
    assert (wrong["log_loss"], wrong["auc"]) == (math.inf, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": [0, np.nan]}, "logits must not be NaN.* 1 of 2"),
        ({"labels": [0, 0.5]}, "labels must be 0 or 1, but holds 0.5"),
        ({"labels": [np.nan, 1]}, "labels must be 0 or 1, but holds nan"),
        ({"weight": [1, -2]}, "weight must be finite and not negative, but holds -2"),
        ({"weight": [1, np.nan]}, "weight must be finite and not negative, but holds nan"),
        ({"weight": [np.inf, 1]}, "weight must be finite and not negative, but holds inf"),
        ({"group": [3, -1]}, "group must be from 0 to 2147483647, but holds -1"),
        ({"group": [3, 2**31]}, "group must be from 0 to 2147483647, but holds 2147483648"),
        ({"group": [3.0, 1.0]}, "group must hold integers, but its dtype is float64"),
        ({"weight": [1]}, r"must all be \[B\], but are \[\(2,\), \(2,\), \(1,\), \(2,\)\]"),
        ({"logits": [[0], [1]]}, r"must all be \[B\], but are \[\(2, 1\)"),
    ],
)
def test_a_wrong_value_is_named_and_nothing_of_its_batch_is_added(change, message):
    batch = {"logits": [0, 1], "labels": [0, 1], "weight": [1, 1], "group": [0, 2]}
    with EvaluationMetrics() as metrics:
        metrics.update(**batch)
        before = metrics.compute()
        with pytest.raises(ValueError, match=message):
            metrics.update(**(batch | change))
        assert metrics.compute() == pytest.approx(before, nan_ok=True)


def test_nothing_is_left_in_the_spill_dir_also_on_error(tmp_path):
    rows = make_rows(1000, groups=30)
    assert evaluate(rows, row_budget=50, spill_dir=str(tmp_path))["spilled_rows"] > 0
    assert list(tmp_path.iterdir()) == []
    broken = [np.append(x, bad).astype(x.dtype) for x, bad in zip(rows, (np.nan, 1, 1, 1), strict=True)]
    with pytest.raises(ValueError, match="NaN"):
        evaluate(broken, row_budget=50, spill_dir=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def stream(metrics, rows, batch_size=16_384):
    rng = np.random.default_rng(1)
    for _ in range(rows // batch_size):
        logits = rng.normal(size=batch_size).astype(np.float32)
        labels = (rng.random(batch_size) < 0.3).astype(np.float32)
        metrics.update(logits, labels, np.ones(batch_size, np.float32), rng.integers(0, 20_000, batch_size, np.int32))
    return metrics.compute()


def test_two_million_rows_take_bounded_memory_and_seconds():
    budget = 100_000
    tracemalloc.start()
    try:
        with EvaluationMetrics(budget) as metrics:
            spilled = stream(metrics, 2_000_000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert spilled["spilled_rows"] >= 1_800_000
    assert peak < 150 * budget + 2**22  # the docstring's 120 bytes a row of budget, and the batch; all rows: 96 MB
    start = time.perf_counter()
    with EvaluationMetrics() as metrics:
        in_memory = stream(metrics, 2_000_000)
    assert time.perf_counter() - start < 20  # about 1 s on an idle machine
    for name in NAMES - {"spilled_rows"}:
        assert spilled[name] == pytest.approx(in_memory[name], rel=1e-12, abs=0)


class Window(NamedTuple):
    loss: SupportsFloat
    prediction: SupportsFloat
    label: SupportsFloat
    weight: SupportsFloat
    overflow: SupportsFloat = 0


def test_window_metrics_are_those_of_the_evaluation():
    logits, labels, weight, group = make_rows(500, groups=5)
    prediction = 1 / (1 + np.exp(-logits.astype(np.float64)))
    loss = -np.log(np.where(labels == 1, prediction, 1 - prediction))
    sums = {
        "loss": np.sum(weight * loss),
        "prediction": np.sum(weight * prediction),
        "label": np.sum(weight * labels, dtype=np.float64),
        "weight": np.sum(weight, dtype=np.float64),
    }
    got, expected = window_metrics(sums), evaluate((logits, labels, weight, group))
    assert got == pytest.approx(
        {
            "loss": expected["log_loss"],
            "ne": expected["ne"],
            "calibration": expected["calibration"],
            "label_mean": expected["label_mean"],
        }
    )


def test_window_metrics_of_a_named_tuple_of_numpy_scalars():
    got = window_metrics(Window(*np.array([2 * math.log(2), 1.5, 1, 2], np.float32)))
    assert got == pytest.approx({"loss": math.log(2), "ne": 1, "calibration": 1.5, "label_mean": 0.5}, rel=1e-6)
    assert all(type(v) is float for v in got.values())


@pytest.mark.parametrize(
    ("sums", "undefined"),
    [
        (Window(0, 0, 0, 0), {"loss", "ne", "calibration", "label_mean"}),
        (Window(1, 0.2, 0, 2), {"ne", "calibration"}),
        (Window(1, 1.5, 2, 2), {"ne"}),
        (Window(np.nan, 1, 1, 2), {"loss", "ne"}),
        (Window(np.nan, np.nan, np.nan, np.nan), {"loss", "ne", "calibration", "label_mean"}),
    ],
)
def test_window_metrics_are_nan_where_undefined(sums, undefined):
    assert {name for name, value in window_metrics(sums).items() if math.isnan(value)} == undefined
