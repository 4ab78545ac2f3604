"""The study of a run's time: everything is measured once, small, and reported."""

import importlib.util

import pytest
from absl import flags

from experiments import study
from experiments.where_time_goes import run
from experiments.where_time_goes.report import STAGES, figures, finding, render
from jaxrec.profiling.verdict import VERDICTS
from jaxrec.reporting.record import find


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """Of the smoke run, in this process but for the two whole runs."""
    known = set(flags.FLAGS)
    run.define_flags()
    try:
        flags.FLAGS(["run", "--mode=smoke"])
        kept = {}
        monkey = pytest.MonkeyPatch()
        monkey.setattr(study, "run", lambda measure, smoke, render, figures: kept.update(smoke()) or 0)
        # The threshold of this process's heap is not the test's to change.
        monkey.setattr(run, "keep_freed_memory", lambda: True)
        try:
            assert run.main() == 0
        finally:
            monkey.undo()
    finally:
        for name in set(flags.FLAGS) - known:
            delattr(flags.FLAGS, name)
    return kept


def test_every_stage_is_there(record):
    names = {r["name"] for r in record["rows"]}
    assert {f"input: {s}" for s in ("read", "shuffle", "batch", "transfer", "together")} <= names
    assert {"evaluation", "checkpoint: save", "checkpoint: restore", "step with its input"} <= names
    for cache in ("cold", "warm"):
        shares = [find(record, name=f"loop: {s}, {cache} cache")["median"] for s in STAGES]
        assert sum(shares) == pytest.approx(1)
        assert 0 < find(record, name=f"run, {cache} cache", metric="effective_training_time")["median"] < 1
    compiled = [find(record, name=f"start-up: compile, {c} cache")["median"] for c in ("cold", "warm")]
    assert 0 < compiled[1] < compiled[0]


def test_the_report_says_the_verdict(record):
    (facts,) = record["subjects"].values()
    assert facts["regions"]["mapped_share"] > 0.95
    assert any(words in facts["verdict"]["sentence"] for words in VERDICTS.values())
    report = render(record)
    assert facts["verdict"]["sentence"] in report and facts["verdict"]["sentence"] in finding(record)
    pictures = figures(record)
    assert set(pictures) == {"verdict.svg", "regions_dlrm_synthetic.svg"}
    assert all(svg.lstrip().startswith("<?xml") or "<svg" in svg for svg in pictures.values())


def test_absent_packages_are_named(monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda p: None if p == "grain" else find_spec(p))
    chosen, instead = run.subjects()
    assert [s.config for s in chosen] == ["dlrm_synthetic", "dlrm_balanced"]
    assert "grain not installed" in instead and instead in capsys.readouterr().out
