"""Configs: every named one builds, reads back from JSON, and can be changed by path."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from jaxrec.checks import UserError
from jaxrec.configs import catalogue, overrides
from jaxrec.data.datasets.synthetic import SyntheticData
from jaxrec.training.config import Config, TrainingConfig, describe, differences

NAMES = catalogue.names()
BASE = Config("test", SyntheticData())


def shared_spec(name: str) -> dict:
    """A file of ../shared/specs, which lies beside the test data; no part of the repository."""
    beside = [Path(os.environ["JAXREC_TEST_DATA"]).parent] if "JAXREC_TEST_DATA" in os.environ else []
    for folder in [*beside, Path(__file__).parents[2] / "shared"]:
        if (folder / "specs" / name).exists():
            return json.loads((folder / "specs" / name).read_text())
    pytest.skip(f"shared/specs/{name} is not on this machine; JAXREC_TEST_DATA names the folder beside specs/")


def test_the_catalogue():
    assert {"dlrm_movielens", "dlrm_synthetic", "dlrm_embedding_bound", "dlrm_balanced", "dlrm_arithmetic_bound"} <= {
        *NAMES
    }
    lines = catalogue.help_lines()
    assert len(lines) == len(NAMES)
    for name, line in zip(NAMES, lines, strict=True):
        assert line.startswith(name + " ")
        assert line.removeprefix(name).strip(), f"{name} has no docstring to tell of it"
    with pytest.raises(UserError, match=r"--config is 'dlrm', but must be one of: .*dlrm_synthetic"):
        catalogue.get("dlrm")


@pytest.mark.parametrize("name", NAMES)
def test_a_named_config(name):
    config = catalogue.get(name)
    assert config.name == name
    assert catalogue.get(name) == config
    stored = json.loads(json.dumps(config.as_dict()))
    assert overrides.from_dict(config, stored) == config
    changed = overrides.apply(config, ["training.steps=7", "mesh.data=2", "embedding.dim=5"])
    assert changed != config
    assert overrides.from_dict(config, changed.as_dict()) == changed
    assert differences(config.identity(), catalogue.get(name).identity()) == []


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("model.top_mlp=512,256", (512, 256)),
        ("model.top_mlp=512", (512,)),
        ("model.top_mlp= 512 , 256 ,", (512, 256)),
        ("model.top_mlp=", ()),
        ("model.dropout=0.25", 0.25),
        ("optimizer.learning_rate=1e-4", 1e-4),
        ("optimizer.learning_rate=1", 1.0),
        ("training.steps=1_000", 1000),
        ("data.fixed_bags=True", True),
        ("data.fixed_bags=false", False),
        ("data.rows=7", 7),
        ("data.rows=1,2,3,4,5,6,7,8", (1, 2, 3, 4, 5, 6, 7, 8)),
        ("optimizer.name=sgd", "sgd"),
        ("embedding.optimizer.eps=0", 0.0),
        ("precision=bfloat16", "bfloat16"),
    ],
)
def test_an_override(text, value):
    config = overrides.apply(BASE, [text])
    node = config
    for part in text.partition("=")[0].split("."):
        node = getattr(node, part)
    assert (node, type(node)) == (value, type(value))
    # Nothing else has changed, and nothing of the original.
    assert overrides.replace(config, text.partition("=")[0], _get(BASE, text.partition("=")[0])) == BASE
    assert Config("test", SyntheticData()) == BASE


def _get(node, path: str):
    for part in path.split("."):
        node = getattr(node, part)
    return node


def test_the_last_override_counts_and_one_value_may_hold_an_equals_sign():
    assert overrides.apply(BASE, ["training.steps=1", "training.steps=2"]).training.steps == 2
    with pytest.raises(UserError, match="'a=b'"):
        overrides.apply(BASE, ["training.steps=a=b"])


@pytest.mark.parametrize(
    ("change", "value", "message"),
    [
        ("steps", "5", "steps = '5', but it must be of type int"),
        ("steps", True, "steps = True"),
        ("steps", 5.5, "steps = 5.5"),
        ("steps", None, "steps = None"),
    ],
)
def test_from_dict_checks_types(change, value, message):
    stored = BASE.as_dict()
    stored["training"][change] = value
    with pytest.raises(UserError, match=message):
        overrides.from_dict(BASE, stored)


def test_from_dict_takes_a_whole_number_for_a_float():
    stored = BASE.as_dict()
    stored["optimizer"]["learning_rate"] = 1
    assert overrides.from_dict(BASE, stored).optimizer.learning_rate == 1


def test_from_dict_refuses_other_fields():
    for edit in (lambda d: d["model"].pop("dropout"), lambda d: d["model"].update(gate=1)):
        stored = BASE.as_dict()
        edit(stored)
        with pytest.raises(UserError, match="DLRMConfig"):
            overrides.from_dict(BASE, stored)


def test_identity_holds_all_but_what_may_change():
    free = {"training.steps", "training.log_every", "training.eval_every", "training.checkpoint_every",
            "training.keep_last", "training.patience", "training.eval_batch_size", "training.auc_row_budget",
            "mesh.data", "mesh.model", "embedding.sharding", "embedding.kernel", "cpu_products",
            "embedding.capacity_margin", "dense_sharding", "name"}  # fmt: skip
    other = {
        "optimizer.name": "sgd", "embedding.optimizer.name": "sgd", "embedding.optimizer.b1": 0.5,
        "embedding.optimizer.b2": 0.5, "model.interaction": "cross", "name": "another",
        "data.combiner": "sum", "data.ids": "uniform", "data.labels": "bernoulli", "schedule.name": "linear",
        "precision": "bfloat16", "matmul": "tf32", "embedding.dtype": "float16", "embedding.sharding": "row",
        "embedding.kernel": "xla",
        "dense_sharding": "fsdp", "cpu_products": "eigen",
        "data.rows": 17, "model.dropout": 0.5, "data.rate": 0.5,
        "model.feature_dropout": 0.5, "data.interaction": 0.5,
    }  # fmt: skip
    base = overrides.apply(BASE, ["schedule.decay_steps=5"])

    def leaves(node, prefix=""):
        for field in dataclasses.fields(node):
            value = getattr(node, field.name)
            if dataclasses.is_dataclass(value):
                yield from leaves(value, f"{prefix}{field.name}.")
            else:
                yield prefix + field.name, value

    seen = set()
    for path, value in leaves(base):
        if isinstance(value, tuple):
            new = (*value, 3)
        else:
            new = other[path] if path in other else (not value if isinstance(value, bool) else value + 1)
        changed = differences(overrides.replace(base, path, new).identity(), base.identity())
        assert bool(changed) == (path not in free), path
        seen.add(path)
    assert free < seen


def test_differences():
    ours, theirs = {"a": {"b": 1, "c": [1]}, "d": None}, {"a": {"b": 2, "c": [1]}, "e": "x"}
    assert differences(ours, theirs) == ["a.b 2 -> 1", 'e "x" -> null']
    assert describe(["1", "2"]) == "1; 2"
    assert describe(list("123456")) == "1; 2; 3; 4; ..."


def test_training_config_names_flags_that_exist():
    with pytest.raises(UserError, match=r"^--keep_last is 0, but must be at least 1$"):
        TrainingConfig(keep_last=0)
    with pytest.raises(UserError, match=r"^training\.auc_row_budget is 0"):
        TrainingConfig(auc_row_budget=0)


@pytest.mark.parametrize("size", ["embedding_bound", "balanced", "arithmetic_bound"])
def test_sizes_are_the_shared_ones(size):
    spec, config = shared_spec("dlrm_sizes.json")[size], catalogue.get(f"dlrm_{size}")
    data, model = config.data, config.model
    assert (data.tables, data.rows, data.bag, data.dense) == (spec["tables"], spec["rows"], spec["bag"], spec["dense"])
    assert (data.combiner, data.fixed_bags) == (spec["combiner"], True)
    assert (data.ids, data.exponent, data.labels, data.rate) == ("zipf", 1.2, "bernoulli", 0.25)
    assert config.embedding.dim == spec["dim"]
    assert list(model.bottom_mlp) == spec["bottom"]
    assert [*model.top_mlp, 1] == spec["top"]
    assert (model.interaction, model.dropout) == ("cross", 0.0)
    assert {"layers": model.cross_layers, "rank": model.cross_rank} == spec["cross"]
    assert config.training.batch_size == spec["batch"]
    assert config.precision == "float32"
    for optimizer in (config.optimizer, config.embedding.optimizer):
        assert (optimizer.name, optimizer.learning_rate, optimizer.eps) == ("adagrad", 0.01, 1e-8)
        assert optimizer.initial_accumulator == 0
