"""The rungs of the ladder compute what jaxrec computes, however they are driven."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from experiments.one_change_ladder import programs, run
from experiments.one_change_ladder.rungs import CHANGES, NAIVE, beside, ladder, skipped
from experiments.one_change_ladder.worker import Trainer
from jaxrec.checks import UserError
from jaxrec.configs import overrides
from jaxrec.data.pipeline import Batches

pytestmark = pytest.mark.usefixtures("compile_cache")
STEPS = 4


@pytest.fixture(scope="module")
def config():
    """Few rows, so that ids are often repeated; of the eps, see `experiments.baselines.parity`."""
    config = run.size()
    changes = {"data.train_rows": 2048, "data.validation_rows": 256, "data.rows": 40, "optimizer.eps": 1e-3}
    for path, value in {**run.TINY, **changes, "embedding.optimizer.eps": 1e-3}.items():
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
