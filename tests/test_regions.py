"""The compiled training program names every region, so that a trace's rows match the source."""

import re

import jax
import pytest

from jaxrec.data.schema import Dataset, FeatureSpec, Schema
from jaxrec.embeddings.spec import EmbeddingConfig
from jaxrec.mesh import MeshConfig
from jaxrec.models.dlrm import DLRM, DLRMConfig
from jaxrec.training import setup
from jaxrec.training.config import Config, TrainingConfig
from jaxrec.training.state import empty_window
from jaxrec.training.step import REGIONS, shard_predict_step, shard_train_step

SCHEMA = Schema(
    (FeatureSpec("watched", "categorical", "items"), FeatureSpec("history", "bag", "items", "mean", 3)),
    {"items": 40},
    ("a", "b"),
    ("label",),
)


def regions_of(compiled) -> set[str]:
    """Every component of every operation's name, without the wrappers of transformations: jvp(x) is x."""
    names = re.findall(r'op_name="([^"]*)"', compiled.as_text())
    return {part for name in names for part in re.split(r"[/()]", name)}


@pytest.mark.parametrize(
    "interaction, mesh, sharding",
    [("dot", (1, 1), "replicated"), ("dot", (2, 4), "row"), ("cross", (2, 4), "replicated")],
)
def test_every_region_is_named(interaction, mesh, sharding):
    config = Config(
        name="test",
        data=None,  # pyright: ignore[reportArgumentType]
        model=DLRMConfig(bottom_mlp=(4, 4), interaction=interaction, top_mlp=(4,), dropout=0.1),
        embedding=EmbeddingConfig(dim=4, sharding=sharding),
        training=TrainingConfig(batch_size=16),
        mesh=MeshConfig(*mesh),
    )
    dataset = Dataset("test", SCHEMA, {})
    program, dense = setup.build_program(config, dataset)
    state = jax.eval_shape(lambda: setup.initial_state(program, dense))
    batch = setup.batch_shapes(dataset, 16, program)
    step = shard_train_step(program).lower(state, empty_window(), batch).compile()
    assert len(DLRM.REGIONS) == 3 and len(REGIONS) == 6
    assert {*REGIONS, *DLRM.REGIONS} <= regions_of(step)
    if mesh == (1, 1):
        predict = shard_predict_step(program).lower(state.dense, state.tables, batch).compile()
        assert {"embedding_lookup", *DLRM.REGIONS} <= regions_of(predict)
        assert "embedding_update" not in regions_of(predict)


def test_a_name_must_be_whole():
    class Compiled:
        def as_text(self):
            return 'x, metadata={op_name="jit(step)/transpose(jvp(loss))/bottom_mlp_2/dot"}'

    assert regions_of(Compiled()) >= {"loss", "dot"} and "bottom_mlp" not in regions_of(Compiled())
