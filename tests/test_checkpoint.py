"""Checkpoints written under each sharding restore under each other, through files."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from test_step import BASE, batch, build, start

from jaxrec.checks import UserError
from jaxrec.mesh import MeshConfig
from jaxrec.optim.sparse import SparseOptimizerConfig
from jaxrec.training.checkpoint import Checkpoints, Progress, to_arrays
from jaxrec.training.step import shard_predict_step

# Embedding sharding, dense sharding, mesh.
LAYOUTS = {
    "one device": ("replicated", "replicated", (1, 1)),
    "replicated": ("replicated", "replicated", (8, 1)),
    "row": ("row", "fsdp", (2, 4)),
    "row_cyclic": ("row_cyclic", "replicated", (1, 8)),
    "table": ("table", "fsdp", (1, 2)),
    "column": ("column", "fsdp", (4, 2)),
    "auto": ("auto", "replicated", (2, 4)),
}
over_layouts = pytest.mark.parametrize("layout", list(LAYOUTS))


def config_of(layout: str, table_dtype: str = "bfloat16"):
    """Adam's two moments a column, narrow tables, loss scaling: all that a checkpoint may hold."""
    sharding, dense_sharding, mesh = LAYOUTS[layout]
    sparse = SparseOptimizerConfig("adam", 0.05)
    return dataclasses.replace(
        BASE,
        embedding=dataclasses.replace(BASE.embedding, sharding=sharding, optimizer=sparse, dtype=table_dtype),
        mesh=MeshConfig(*mesh),
        dense_sharding=dense_sharding,
        precision="float16",
    )


@functools.cache
def predict(layout: str):
    return shard_predict_step(build(config_of(layout))[0])


@functools.cache
def written(layout: str, folder):
    """Trains two steps and saves; returns (arrays, logits of the next batch)."""
    config = config_of(layout)
    program, state, window, step = start(config)
    for k in range(2):
        state, window, _ = step(state, window, batch(k))
    state = state._replace(loss_scale=state.loss_scale._replace(skipped=state.loss_scale.skipped + 3))
    checkpoints = Checkpoints(str(folder / layout), 2)
    checkpoints.save(program, state, Progress(2), config.identity())
    checkpoints.close()
    return to_arrays(program, state), np.asarray(predict(layout)(state.dense, state.tables, batch(2)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@over_layouts
@pytest.mark.parametrize("into", list(LAYOUTS))
def test_restores_under_every_other_layout(folder, layout, into):
    arrays, logits = written(layout, folder)
    config = config_of(into)
    program, state, window, step = start(config)
    checkpoints = Checkpoints(str(folder / layout), 2, for_training=False)
    assert checkpoints.progress(2, config.identity()) == Progress(2)
    restored = checkpoints.restore(program, state, 2)
    again = to_arrays(program, restored)
    assert again.keys() == arrays.keys()
    for name, array in arrays.items():
        assert array.dtype == again[name].dtype and array.tobytes() == again[name].tobytes(), name
    assert arrays["tables/items/weights"].dtype.name == "bfloat16" and arrays["loss_scale/skipped"] == 3
    assert {"tables/items/first", "tables/items/second", "tables/tags/second", "loss_scale/scale"} < arrays.keys()
    there = np.asarray(predict(into)(restored.dense, restored.tables, batch(2)))
    np.testing.assert_allclose(there, logits, rtol=1e-6, atol=1e-6)
    restored, *_ = step(restored, window, batch(2))  # Its buffers may be donated.
    assert int(restored.step) == 3 and int(restored.failed_step) == -1


def test_another_table_type_is_another_run(folder):
    written("row", folder)
    config = config_of("row", "float32")
    checkpoints = Checkpoints(str(folder / "row"), 2, for_training=False)
    with pytest.raises(UserError, match=r'embedding.dtype "bfloat16" -> "float32"'):
        checkpoints.progress(2, config.identity())


def test_a_resumed_run_on_another_layout_follows_the_losses(folder):
    """Three more steps after two, on every layout, from the checkpoint of one: the losses are those of one device."""
    written("row", folder)
    losses = {}
    for layout in LAYOUTS:
        program, state, window, step = start(config_of(layout))
        checkpoints = Checkpoints(str(folder / "row"), 2, for_training=False)
        state = checkpoints.restore(program, state, 2)
        of_layout = []
        for k in range(2, 5):
            window = jax.tree.map(lambda x: jax.device_put(np.zeros((), np.float32), x.sharding), window)
            state, window, _ = step(state, window, batch(k))
            of_layout.append(float(window.loss))
        losses[layout] = of_layout
    for layout, of_layout in losses.items():
        np.testing.assert_allclose(of_layout, losses["one device"], rtol=1e-4, err_msg=layout)
