"""The rungs of the ladder compute what jaxrec computes, however they are driven."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from experiments.one_change_ladder import programs, report, run
from experiments.one_change_ladder.rungs import CHANGES, NAIVE, beside, ladder, skipped
from experiments.one_change_ladder.worker import Trainer
from jaxrec.checks import UserError
from jaxrec.configs import overrides
from jaxrec.data.pipeline import Batches
from jaxrec.reporting import record as record_lib

pytestmark = pytest.mark.usefixtures("compile_cache")
STEPS = 4


@pytest.fixture(scope="module")
def config():
    """Few rows, so that ids are often repeated."""
    config = run.size()
    changes = {**run.TINY, "data.train_rows": 2048, "data.validation_rows": 256, "data.rows": 40}
    for path, value in changes.items():
        config = overrides.replace(config, path, value)
    return config


@pytest.fixture(scope="module")
def dataset(config):
    return config.data.open("")


def trained(program, batches):
    state, losses = program.first(), []
    before = {t: np.asarray(w) for t, w in program.tables(state).items()}
    step = jax.jit(program.step)
    for batch in batches:
        state, loss = step(state, program.put(batch))
        losses.append(float(loss))
    logits = np.asarray(program.logits(state, program.put(batches[0])))
    return losses, before, {t: np.asarray(w) for t, w in program.tables(state).items()}, logits


@pytest.fixture(scope="module")
def batches(config, dataset):
    train = Batches(dataset, "train", config.training.batch_size)
    return [train[k].batch for k in range(STEPS)]


@pytest.fixture(scope="module")
def expected(config, dataset, batches):
    return trained(programs.jaxrec_step(config, dataset), batches)


@pytest.mark.parametrize("name", ["table_gradients", "touched_rows", "one_array", "without_sort"])
def test_every_program_computes_what_jaxrec_does(name, config, dataset, batches, expected):
    found = trained(getattr(programs, name)(config, dataset), batches)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(found[3], expected[3], rtol=1e-4, atol=1e-5)
    for table, weights in expected[2].items():
        np.testing.assert_array_equal(found[1][table], expected[1][table])
        change = np.abs(weights - expected[1][table]).max()
        np.testing.assert_allclose(found[2][table], weights, rtol=0, atol=1e-4 * change)
        assert change > 1e-4


def test_every_rung_is_one_change():
    rungs = ladder("cpu")
    assert rungs[0] == NAIVE and len(rungs) == len(CHANGES) + 1
    for before, after in itertools.pairwise(rungs):
        differ = [f.name for f in dataclasses.fields(after) if getattr(before, f.name) != getattr(after, f.name)]
        assert len(set(differ) - {"name", "change"}) == 1, differ
    names = [r.name for r in (*rungs, *beside(rungs[-1], "cpu"))]
    assert len(set(names)) == len(names)


def test_a_gpu_is_spared_what_only_cpus_have():
    assert set(skipped("gpu")) == {"memory kept", "Eigen"} and skipped("cpu") == ["TF32"]
    rungs = ladder("gpu")
    assert rungs[-1].name == "jaxrec"
    assert all(r.products == "default" and not r.keeps_memory for r in (*rungs, *beside(rungs[-1], "gpu")))


def test_companies_share_a_rung_with_the_next():
    together = run.companies("cpu", 4)
    assert all(len(rungs) <= 4 for rungs in together)
    best = ladder("cpu")[-1]
    for before, after in itertools.pairwise(together):
        assert after[0] in (before[-1], best)
    assert {r.name for rungs in together for r in rungs} == {r.name for r in (*ladder("cpu"), *beside(best, "cpu"))}


def test_the_loops_take_the_same_batches(config, dataset):
    losses = []
    for changes in ({}, {"donated": True, "ahead": True, "threads": 2}):
        trainer = Trainer(dataclasses.replace(NAIVE, **changes), config, dataset)
        trainer.train(3)
        trainer.train(2)
        losses.append([*trainer.losses, trainer.normalised_entropy()])
    assert losses[0] == losses[1] and len(losses[0]) == 6 and len(set(losses[0])) == 6


def test_another_optimizer_is_refused(config, dataset):
    other = overrides.replace(config, "optimizer.name", "adam")
    with pytest.raises(UserError, match="dense optimizer is adam"):
        programs.table_gradients(other, dataset)


TIMES = {"naive": 600.0, "donated": 600.0, "touched rows": 150.0, "jaxrec": 150.0, "bfloat16": 300.0}


def record_of(entropies):
    """A record of three changes, of which one makes a step 4 times as fast and the others nothing; 8 samples each."""
    changed = {"bfloat16": {"same_arithmetic": False}, "rounding 1": {"rounded": 1}}
    names = [["naive", "donated", "touched rows", "jaxrec"], ["jaxrec", "bfloat16", "rounding 1"]]
    rows = [record_lib.row("copy", "jax", "", "rate", "GB/s", [10.0])]
    for case, company in enumerate(names):
        for k, name in enumerate(company):
            # Drift, which meets all of a company alike, and noise, which goes up in one round and down in the next.
            ms = [TIMES.get(name, 150.0) * (1 + r / 5) * (1 + 0.01 * (-1) ** (r + k)) for r in range(8)]
            samples = {"step": ms, "user": ms, "system": [1.0], "loss": [0.7], "ne": [entropies.get(name, 0.9)]}
            samples |= {"run": [1.0], "compile": [1.0], "memory": [1.0]}
            rows += [record_lib.row(name, "jax", str(case), m, "", s) for m, s in samples.items()]
    companies = [
        [dataclasses.asdict(dataclasses.replace(NAIVE, name=n, **changed.get(n, {}))) for n in c] for c in names
    ]
    return record_lib.make(
        run.STUDY, rows, rounds=9, steps_a_round=2, batch_size=600, tables={"count": 2, "rows": 5, "dim": 4},
        distinct_rows=5, held_out_rows=100, best_ne=0.5, eps=1e-3, rungs=4, companies=companies, skipped=[],
    )  # fmt: skip


def test_the_report_tells_the_changes_that_count_from_those_that_do_not():
    found = report.finding(record_of({}))
    assert "`touched rows` alone makes a step 4.0" in found and "`donated` and `jaxrec` left the total" in found
    text = report.render(record_of({"rounding 1": 0.90001}))
    assert "no change altered what is computed" in text
    row = next(line for line in text.splitlines() if line.startswith("| `bfloat16`"))
    assert "slower" in row and "2,000" not in row


def test_the_report_names_the_change_that_moves_the_ne():
    text = report.render(record_of({"rounding 1": 0.90001, "touched rows": 0.901, "bfloat16": 0.95}))
    assert "`touched rows` moved it by more than" in text
