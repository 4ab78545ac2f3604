"""The gate before every comparison with PyTorch: it passes for each stack, and catches each planted error."""

import dataclasses
import shutil
from collections.abc import Callable

import jax
import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: make baseline")

from experiments.baselines import parity
from experiments.baselines.jax_stack import JaxStack, initial_arrays
from experiments.baselines.stacks import OPTIMIZERS, Builder, builder, paired
from jaxrec.checks import UserError
from jaxrec.configs import catalogue, overrides
from jaxrec.data.pipeline import Batches
from jaxrec.training.config import Config


def _has_fbgemm() -> bool:
    try:
        import fbgemm_gpu  # noqa: F401
    except (ImportError, OSError):  # OSError: a build for another torch
        return False
    return True


pytestmark = pytest.mark.usefixtures("compile_cache")
needs_fbgemm = pytest.mark.skipif(not _has_fbgemm(), reason="FBGEMM is not installed: make baseline")
needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler"
)
over_stacks = pytest.mark.parametrize(
    "stack",
    [
        "pytorch-eager",
        pytest.param("pytorch-compiled", marks=needs_compiler),
        pytest.param("pytorch-fbgemm", marks=[needs_fbgemm, needs_compiler]),
    ],
)
# Two stacks, as compiling takes long: one for each optimizer and kind of tables.
over_tables = pytest.mark.parametrize(
    "stack", ["pytorch-eager", pytest.param("pytorch-fbgemm", marks=[needs_fbgemm, needs_compiler])]
)


def config_of(stack: str, *assignments: str) -> Config:
    """A DLRM-DCNv2 of few tables whose bags vary in length; ids are often repeated."""
    config = overrides.apply(
        catalogue.get("dlrm_balanced"),
        ["data.tables=3", "data.rows=40", "data.bag=3", "data.fixed_bags=false", "data.dense=4", "embedding.dim=8",
         "data.train_rows=20000", "data.validation_rows=4096", "data.test_rows=1", "model.bottom_mlp=16,8",
         "model.cross_rank=4", "model.top_mlp=16,8", "training.batch_size=64", *assignments],
    )  # fmt: skip
    return paired(config, stack)


def with_fault(stack: str, **changes: object) -> Builder:
    """A builder whose embedding optimizer is not what the config says."""

    def build(config, dataset, arrays):
        optimizer = dataclasses.replace(config.embedding.optimizer, **changes)
        embedding = dataclasses.replace(config.embedding, optimizer=optimizer)
        return builder(stack)(dataclasses.replace(config, embedding=embedding), dataset, arrays)

    return build


def failures(config: Config, build: Builder) -> set[str]:
    """What differs after the first step."""
    return {d.what for d in parity.compare_steps(config, build) if d.share > 1 and d.after == 1}


@over_stacks
def test_the_gate_passes(stack):
    verdict = parity.judge(config_of(stack), stack, builder(stack))
    assert verdict.passed, verdict.describe()
    assert {d.after for d in verdict.differences} == {1, parity.STEPS, parity.AUC_STEPS}
    kinds = {"loss", "gradient of dense", "dense/", "optimizer/accumulator/", "tables/table_0/weights"}
    assert all(verdict.worst_of(kind, 1) for kind in kinds)
    assert verdict.worst_of("tables/table_2/accumulator", parity.STEPS)
    assert 0.6 < float(verdict.worst_of("auc", parity.AUC_STEPS).what.split("(")[1].split()[0]) < 1


@pytest.mark.parametrize("stack", ["pytorch-eager", pytest.param("pytorch-compiled", marks=needs_compiler)])
def test_the_gate_passes_for_one_bag_of_all_tables(stack):
    config = config_of(stack, "data.fixed_bags=true")
    verdict = parity.judge(config, stack, builder(stack, layout="joined"))
    assert verdict.passed, verdict.describe()


def test_one_bag_of_all_tables_takes_full_bags_only():
    config = config_of("pytorch-eager")
    dataset = config.data.open("")
    stack = builder("pytorch-eager", layout="joined")(config, dataset, initial_arrays(config, dataset))
    with pytest.raises(UserError, match="has bags that are not full"):
        stack.put(Batches(dataset, "train", 64)[0].batch)


def test_one_bag_of_all_tables_exports_what_it_was_given():
    config = config_of("pytorch-eager", "data.fixed_bags=true")
    dataset = config.data.open("")
    arrays = initial_arrays(config, dataset)
    found = builder("pytorch-eager", layout="joined")(config, dataset, arrays).export()
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize("eps", [1e-10, 2e-3], ids=["of torch", "twice"])
@over_tables
def test_a_wrong_epsilon_is_caught(stack, eps):
    found = failures(config_of(stack), with_fault(stack, eps=eps))
    assert {f"tables/table_{i}/weights" for i in range(3)} == found


def test_a_wrong_epsilon_of_the_dense_optimizer_is_caught():
    def build(config, dataset, arrays):
        optimizer = dataclasses.replace(config.optimizer, eps=1e-10)
        return builder("pytorch-eager")(dataclasses.replace(config, optimizer=optimizer), dataset, arrays)

    found = failures(config_of("pytorch-eager"), build)
    assert found and all(name.startswith("dense/") for name in found)


@over_tables
def test_a_learning_rate_off_by_one_percent_is_caught(stack):
    config = config_of(stack)
    rate = 1.01 * config.embedding.optimizer.learning_rate
    found = failures(config, with_fault(stack, learning_rate=rate))
    assert {f"tables/table_{i}/weights" for i in range(3)} == found


@over_tables
def test_a_swapped_combiner_is_caught(stack):
    def build(config, dataset, arrays):
        features = tuple(dataclasses.replace(f, combiner="mean") for f in dataset.schema.features)
        schema = dataclasses.replace(dataset.schema, features=features)
        return builder(stack)(config, dataclasses.replace(dataset, schema=schema), arrays)

    found = failures(config_of(stack), build)
    assert {"loss", "tables/table_0/weights"} < found


def test_an_unmerged_duplicate_in_pytorch_is_caught(monkeypatch):
    """Adagrad of each occurrence's own square: what a sparse gradient gives that is not coalesced."""
    from experiments.baselines.embedding_bags import EmbeddingBags

    def update(self, pooled, gradients):
        import torch

        torch.autograd.backward(pooled, gradients)
        optimizer = self._optimizer.param_groups[0]
        with torch.no_grad():
            for weights in self._weights.values():
                rows, values = weights.grad._indices()[0], weights.grad._values()
                sums = self._optimizer.state[weights]["sum"]
                sums.index_add_(0, rows, values * values)
                weights.index_add_(0, rows, -optimizer["lr"] * values / (sums[rows].sqrt() + optimizer["eps"]))
        self._optimizer.zero_grad()

    monkeypatch.setattr(EmbeddingBags, "update", update)
    found = failures(config_of("pytorch-eager"), builder("pytorch-eager"))
    assert {f"tables/table_{i}/{what}" for i in range(3) for what in ("weights", "accumulator")} == found


@over_tables
def test_an_unmerged_duplicate_in_jaxrec_is_caught(stack, monkeypatch):
    """Every occurrence counts as a row of its own: of two occurrences' updates, one overwrites the accumulator."""
    from jaxrec.embeddings import tables
    from jaxrec.embeddings.merge import Merged

    def merge(rows, gradients, scratch):
        return Merged(jax.numpy.ones(rows.shape, bool), gradients, scratch)

    monkeypatch.setattr(tables, "merge", merge)
    found = failures(config_of(stack), builder(stack))
    assert {f"tables/table_{i}/{what}" for i in range(3) for what in ("weights", "accumulator")} == found


def test_a_row_that_no_batch_names_must_not_change(monkeypatch):
    from experiments.baselines.embedding_bags import EmbeddingBags

    def load(self, arrays):
        name = "tables/table_1/weights"
        original(self, {**arrays, name: np.nextafter(arrays[name], 1)})

    original = EmbeddingBags.load
    monkeypatch.setattr(EmbeddingBags, "load", load)
    found = failures(config_of("pytorch-eager", "data.rows=2000"), builder("pytorch-eager"))
    assert found == {"tables/table_1/weights of PyTorch, in rows that no batch names,"}


def test_a_difference_ends_the_study_and_names_the_worst_tensor(monkeypatch):
    monkeypatch.setattr(parity, "builder", lambda stack, *_: with_fault(stack, learning_rate=0.02))
    monkeypatch.setattr(parity, "ATTEMPTS", 1)
    with pytest.raises(UserError, match=r"do not agree .*: tables/table_\d/weights after 1 step .* nothing is timed"):
        parity.require_parity(config_of("pytorch-eager"), "pytorch-eager")


@over_stacks
def test_weights_travel_both_ways_bit_by_bit(stack):
    """From jaxrec after some steps, so that no accumulator is 0, to PyTorch and back."""
    config = config_of(stack)
    dataset = config.data.open("")
    ours = JaxStack(config, dataset, initial_arrays(config, dataset))
    batch = Batches(dataset, "train", 64)[0].batch
    for _ in range(3):
        ours.step(ours.put(batch))
    arrays = ours.export()
    exported = builder(stack)(config, dataset, arrays).export()
    back = JaxStack(config, dataset, exported).export()
    for found in (exported, back):
        assert found.keys() == arrays.keys()
        for name, array in arrays.items():
            assert found[name].dtype == array.dtype and found[name].shape == array.shape, name
            np.testing.assert_array_equal(found[name], array, err_msg=name)
    assert arrays["step"] == 3


def test_pytorch_continues_where_jaxrec_stopped_and_the_other_way_round():
    config = config_of("pytorch-eager")
    dataset = config.data.open("")
    batches = [Batches(dataset, "train", 64)[k].batch for k in range(4)]
    build: dict[str, Callable] = {"jax": JaxStack, "torch": builder("pytorch-eager")}
    ends = {}
    for first, second in (("jax", "jax"), ("jax", "torch"), ("torch", "jax")):
        arrays = initial_arrays(config, dataset)
        for stack, half in ((first, batches[:2]), (second, batches[2:])):
            running = build[stack](config, dataset, arrays)
            for batch in half:
                running.step(running.put(batch))
            arrays = running.export()
        ends[first, second] = arrays
    for end in ends.values():
        assert end["step"] == 4
        for name in ("dense/top_mlp/layers/0/kernel", "tables/table_0/accumulator"):
            expected = ends["jax", "jax"][name]
            assert np.median(np.abs(end[name] - expected)) <= 1e-5 * np.abs(expected).max()


@over_tables
def test_int32_ids_give_the_same(stack):
    config = config_of(stack)
    dataset = config.data.open("")
    arrays = initial_arrays(config, dataset)
    batch = Batches(dataset, "train", 64)[0].batch
    exported = []
    for id_type in ("int32", "int64"):
        running = builder(stack, id_type=id_type)(config, dataset, arrays)
        running.step(running.put(batch))
        exported.append(running.export())
    for name, array in exported[0].items():
        np.testing.assert_array_equal(exported[1][name], array, err_msg=name)


def test_no_ratio_across_optimizers():
    config = config_of("pytorch-fbgemm")
    dataset = config.data.open("")
    with pytest.raises(UserError, match="pytorch-eager is compared under adagrad only"):
        builder("pytorch-eager")(config, dataset, {})
    assert {paired(config, s).embedding.optimizer.name for s in OPTIMIZERS} == {"adagrad", "rowwise_adagrad"}


@pytest.mark.parametrize(
    "assignment, message",
    [
        ("model.dropout=0.1", "model.dropout is 0.1"),
        ("model.interaction=dot", "model.interaction is dot"),
        ("optimizer.name=adam", "optimizer.name is adam"),
        ("schedule.warmup_steps=3", "schedule is .*warmup_steps=3"),
        ("training.clip_norm=1.0", "training.clip_norm is 1.0"),
        ("data.dense=0", "has no dense columns"),
    ],
)
def test_what_the_baselines_lack_is_refused(assignment, message):
    config = config_of("pytorch-eager", assignment)
    with pytest.raises(UserError, match=message):
        builder("pytorch-eager")(config, config.data.open(""), {})


def test_not_a_number_never_passes():
    ones, wrong = np.ones(3, np.float32), np.array([1, np.nan, 1], np.float32)
    assert parity.relative_difference(ones, ones) == 0
    assert parity.relative_difference(np.float32([2, 4.5]), np.float32([2, 4])) == 0.125
    for found, expected in ((wrong, ones), (wrong, wrong), (ones[:2], ones), (ones, 0 * ones)):
        assert parity.relative_difference(found, expected) == float("inf")
