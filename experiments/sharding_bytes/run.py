"""What does each sharding exchange and hold, and does it compute the same? On simulated devices: no speed.

    python -m experiments.sharding_bytes.run --mode=all

Compiles the training step for each layout of the tables and of the dense parameters on 8 simulated CPU devices, reads
collectives and memory from the compiled program, takes some steps, and compares the weights with one device's.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from experiments import study
from experiments.finished import Finished
from experiments.sharding_bytes.report import figures, render
from jaxrec import flags as jaxrec_flags
from jaxrec.reporting import record as record_lib

STUDY = "sharding_bytes"
CONFIG = "dlrm_balanced"
DEVICES = 8
SHARDINGS = ("replicated", "row", "row_cyclic", "table", "column", "auto")
MESHES = ((1, 8), (2, 4), (8, 1))
# The rows of Criteo's 26 Kaggle columns, as facebookresearch/dlrm prepares them without a cap on their size.
KAGGLE = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
# A fiftieth of them: the same proportions, and a state of 90 MB that fits 8 times.
ROWS = tuple(max(rows // 50, 3) for rows in KAGGLE)
# From accumulators of 0 Adagrad's first steps are as long as the learning rate for any gradient, be it rounding alone:
# two correct sums of the same numbers in another order would then seem far apart. From 1 they are in proportion.
CHANGES = (
    "embedding.dim=32", "embedding.optimizer.name=rowwise_adagrad", "data.labels=planted", "data.train_rows=200000",
    "model.bottom_mlp=64,32", "model.top_mlp=128,64", "optimizer.initial_accumulator=1",
    "embedding.optimizer.initial_accumulator=1",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Layout:
    """One program.

    Attributes:
      embedding: Sharding of the tables.
      dense: Sharding of the dense parameters.
      mesh: Sizes of `data` and `model`.
      ids: Their law, `zipf` or `uniform`.
      run: Whether steps are taken; else it is only compiled.
    """

    embedding: str
    dense: str
    mesh: tuple[int, int]
    ids: str
    run: bool

    @property
    def name(self) -> str:
        return self.embedding + (", fsdp" if self.dense == "fsdp" else "")

    @property
    def case(self) -> str:
        return f"data:{self.mesh[0]},model:{self.mesh[1]}, {self.ids} ids"


# Uniform ids change how many rows cross the wire and where to, not what is computed. Dense parameters travel apart from
# tables: one sharding of these shows both. On a `model` axis of 1 nothing is split, and all shardings exchange alike.
LAYOUTS = (
    *(Layout(s, "replicated", mesh, "zipf", True) for mesh in MESHES for s in SHARDINGS),
    *(Layout("row_cyclic", "fsdp", mesh, "zipf", True) for mesh in MESHES),
    *(Layout(s, "replicated", mesh, "uniform", False) for mesh in MESHES if mesh[1] > 1 for s in SHARDINGS),
)


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
      layouts: Which programs.
      rows: Of each table.
      batch_size: Rows of the global batch.
      steps: Taken, and batches on which the balance is measured.
    """

    layouts: tuple[Layout, ...] = LAYOUTS
    rows: tuple[int, ...] = ROWS
    batch_size: int = 4096
    steps: int = 20


SMOKE = Size(
    (Layout("table", "replicated", (1, 8), "zipf", True), Layout("row_cyclic", "fsdp", (2, 4), "uniform", False)),
    rows=tuple(max(rows // 1000, 3) for rows in ROWS[:4]),
    batch_size=256,
    steps=3,
)


class Steps(NamedTuple):
    """A state after some steps.

    Attributes:
      arrays: Logical arrays by name, as a checkpoint has them, whatever the layout.
      taken: Steps that were not refused.
      overflow: Rows that did not fit their exchange, in the step that was refused.
    """

    arrays: dict[str, np.ndarray]
    taken: int
    overflow: int


def define_flags() -> None:
    study.define_flags(STUDY)


def main() -> int:
    """Runs the study; returns the exit status."""
    return study.run(
        measure=lambda: measure(Size(), study.finished()),
        smoke=lambda: measure(SMOKE, study.finished()),
        render=render,
        figures=figures,
    )


def measure(size: Size, finished: Finished) -> dict[str, Any]:
    """Compiles all layouts and takes steps of those that are to run; returns the record."""
    simulate()
    rows, capacities, digests, arrays = [], {}, {}, 0
    for layout in size.layouts:
        begin = time.perf_counter()
        found = finished.get(f"{layout.case}, {layout.name}", lambda layout=layout: _layout(layout, size))
        print(f"{layout.case}, {layout.name}: {time.perf_counter() - begin:.0f} s", flush=True)
        claim = "measured" if layout.run else "compiled, not run"
        for metric, samples in found["samples"].items():
            unit = "bytes" if metric in found["bytes"] else "1"
            rows.append(record_lib.row(layout.name, "jax", layout.case, metric, unit, samples, claim))
        capacities.setdefault(layout.case, {})[layout.name] = found["room"]
        if layout.run:
            digests.setdefault(layout.case, {})[layout.name] = found["digest"]
            arrays = found["arrays"]
    config = _config(Layout("replicated", "replicated", (1, 1), "zipf", True), size)
    return record_lib.make(
        STUDY,
        rows,
        config=config.as_dict(),
        devices=DEVICES,
        steps=size.steps,
        capacities=capacities,
        digests=digests,
        arrays=arrays,
        table_rows=list(size.rows),
    )


def simulate() -> None:
    """Makes JAX see 8 CPU devices; before it makes its first array."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    if jax.config.jax_num_cpu_devices != DEVICES:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_num_cpu_devices", DEVICES)


def _config(layout: Layout, size: Size) -> Any:
    from jaxrec.configs import catalogue, overrides
    from jaxrec.mesh import MeshConfig

    config = overrides.apply(catalogue.get(CONFIG), [
        *CHANGES, f"embedding.sharding={layout.embedding}", f"dense_sharding={layout.dense}",
        f"data.ids={layout.ids}", f"training.batch_size={size.batch_size}",
    ])  # fmt: skip
    data: Any = config.data
    data = dataclasses.replace(data, tables=len(size.rows), rows=size.rows)
    return dataclasses.replace(config, data=data, mesh=MeshConfig(*layout.mesh))


@functools.cache
def _batches(ids: str, size: Size) -> tuple[Any, list[Any]]:
    """Returns the data set and the first global batches, the same for every layout."""
    from jaxrec.training import setup

    config = _config(Layout("replicated", "replicated", (1, 1), ids, True), size)
    dataset = config.data.open("")
    found = setup.training_batches(config, dataset)
    return dataset, [found[k].batch for k in range(size.steps)]


@functools.cache
def _reference(ids: str, size: Size) -> tuple[dict[str, np.ndarray], Steps]:
    """Returns one device's arrays before the first step, and after the last."""
    layout = Layout("replicated", "replicated", (1, 1), ids, True)
    program, dense = _program(layout, size)
    from jaxrec.training import setup
    from jaxrec.training.checkpoint import to_arrays

    first = to_arrays(program, setup.initial_state(program, dense))
    return first, _take(program, dense, _compile(program, layout, size), layout, size)[0]


def _program(layout: Layout, size: Size) -> tuple[Any, Any]:
    from jaxrec.training import setup

    config = _config(layout, size)
    dataset, _ = _batches(layout.ids, size)
    return setup.build_program(config, dataset, setup.training_batches(config, dataset))


def _compile(program: Any, layout: Layout, size: Size) -> Any:
    from jaxrec.training import setup
    from jaxrec.training.step import shard_train_step

    shapes = setup.batch_shapes(_batches(layout.ids, size)[0], size.batch_size, program)
    return shard_train_step(program).lower(setup.state_shapes(program), setup.window_shapes(program), shapes).compile()


def _take(program: Any, dense: Any, compiled: Any, layout: Layout, size: Size) -> tuple[Steps, dict[str, int]]:
    """Takes the steps; returns the state after them, and the bytes of its parts on one device."""
    from jaxrec.training import setup
    from jaxrec.training.checkpoint import to_arrays

    state, window, put = setup.initial_state(program, dense), setup.new_window(program), setup.put_batch(program)
    for batch in _batches(layout.ids, size)[1]:
        state, window, _ = compiled(state, window, put(batch))
    tables = list(state.tables.values())
    held = {
        "table weights": _bytes_of_a_device([t.weights for t in tables]),
        "table optimizer rows": _bytes_of_a_device([t.slots for t in tables]),
        "scratch for merging": _bytes_of_a_device([t.work for t in tables]),
        "dense parameters": _bytes_of_a_device(state.dense),
        "dense optimizer": _bytes_of_a_device(state.optimizer),
    }
    return Steps(to_arrays(program, state), int(state.step), int(state.overflow)), held


def _bytes_of_a_device(tree: Any) -> int:
    """Returns the bytes of a tree on the first device; every device holds as many, padding included."""
    import jax

    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def _layout(layout: Layout, size: Size) -> dict[str, Any]:
    """Compiles a layout, and takes steps where it is to run.

    Returns:
      `samples` by metric, the metrics that are in `bytes` (the others are numbers), each group's `room`, the
      `digest` of the final state, and of how many `arrays` it is; all JSON.
    """
    program, dense = _program(layout, size)
    compiled = _compile(program, layout, size)
    room = _room(program, size)
    in_bytes = _exchanged(program, compiled, room)
    numbers = _balance(program, layout, size, room)
    digest, arrays = "", 0
    if layout.run:
        end, held = _take(program, dense, compiled, layout, size)
        memory: Any = compiled.memory_analysis()
        in_bytes |= held
        in_bytes["temporaries"] = memory.temp_size_in_bytes
        in_bytes["not aliased outputs"] = memory.output_size_in_bytes - memory.alias_size_in_bytes
        first, one = _reference(layout.ids, size)
        equal = sum(end.arrays[name].tobytes() == array.tobytes() for name, array in one.arrays.items())
        numbers["largest difference to one device"] = [largest_difference(end.arrays, one.arrays, first)]
        numbers["arrays equal to one device's bit for bit"] = [equal]
        numbers["steps refused"] = [size.steps - end.taken]
        numbers["rows that did not fit"] = [end.overflow]
        digest, arrays = digest_of(end.arrays), len(one.arrays)
    numbers |= {f"number of {op}": [count] for op, count in _counts(compiled).items()}
    samples = {**{metric: [value] for metric, value in in_bytes.items()}, **numbers}
    return {"samples": samples, "bytes": list(in_bytes), "room": room, "digest": digest, "arrays": arrays}


def _room(program: Any, size: Size) -> dict[str, dict[str, Any]]:
    """Returns, by group, the rows that a device has room for, for each destination, and what they belong to."""
    from jaxrec.embeddings.sharded import capacity_of

    room = {}
    for g in program.plan.groups:
        occurrences = size.batch_size // DEVICES * len(g.columns)
        room[g.name] = {
            "capacity": capacity_of(g, occurrences, program.capacities[g.name]),
            "worst case": capacity_of(g, occurrences, 0),
            "tables": len(g.tables),
            "sharding": g.sharding,
        }
    return room


def _exchanged(program: Any, compiled: Any, room: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Returns the bytes that a device receives in a step: in all, by collective, for the tables, and by formula."""
    from jaxrec.embeddings.sharded import exchanged_bytes
    from jaxrec.profiling.collectives import collectives

    def formula(kind: str) -> int:
        return sum(exchanged_bytes(g, room[g.name][kind], program.axis_sizes) for g in program.plan.groups)

    found = collectives(compiled)
    return {
        "received": sum(c.received_bytes for c in found),
        "embedding exchange": exchange_in(compiled.as_text()),
        "embedding exchange by formula": formula("capacity"),
        "embedding exchange, worst case": formula("worst case"),
        **{f"received by {op}": sum(c.received_bytes for c in found if c.op == op) for op in _counts(compiled)},
    }


def _counts(compiled: Any) -> dict[str, int]:
    """Returns how many operations there are of each collective."""
    from jaxrec.profiling.collectives import collectives

    return dict(collections.Counter(c.op for c in collectives(compiled)))


def _balance(program: Any, layout: Layout, size: Size, room: Mapping[str, Mapping[str, Any]]) -> dict[str, list[float]]:
    """Returns how evenly rows are held and asked for, and how full the exchange's room is, for each batch."""
    from experiments.sharding_bytes import balance

    plan, capacities = program.plan, {name: r["capacity"] for name, r in room.items()}
    batches = _batches(layout.ids, size)[1]
    asked = [balance.asked(plan, batch, program.axis_sizes, capacities) for batch in batches]
    return {
        "rows held, heaviest / mean": [balance.heaviest_over_mean(balance.rows_held(plan))],
        "ids asked, heaviest / mean": [a.ids for a in asked],
        "rows asked, heaviest / mean": [a.rows for a in asked],
        "room filled": [a.filled for a in asked],
        "fullest destination / room": [a.fullest for a in asked],
    }


class _Text(NamedTuple):
    """Lines of a compiled program, for `collectives`."""

    text: str

    def as_text(self) -> str:
        return self.text


def exchange_in(text: str) -> float:
    """Returns the bytes that a device receives in the tables' own exchange.

    That is all that the step does in the scopes of lookup and update but `all-reduce`: `column` adds up mean squares
    there, and the compiler may put them into one operation with the dense gradients.
    """
    from jaxrec.profiling.collectives import collectives

    own = "\n".join(line for line in text.splitlines() if "/embedding_lookup/" in line or "/embedding_update/" in line)
    return sum(c.received_bytes for c in collectives(_Text(own)) if c.op != "all-reduce")


def largest_difference(
    arrays: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], first: Mapping[str, np.ndarray]
) -> float:
    """Returns the largest difference of any element, over the largest change that training made to its array.

    Relative to the change, not to the weights: an update that is lost or counted twice is then of order 1, however
    small the learning rate.

    Args:
      arrays: Of the layout, after training.
      expected: One device's, likewise.
      first: Before training.
    """
    worst = 0.0
    for name, one in expected.items():
        apart = np.abs(arrays[name].astype(np.float64) - one).max(initial=0.0)
        change = np.abs(one.astype(np.float64) - first[name]).max(initial=0.0)
        if apart:
            worst = max(worst, float(apart / max(change, np.finfo(np.float32).tiny)))
    return worst


def digest_of(arrays: Mapping[str, np.ndarray]) -> str:
    """Returns what two states share only if all their arrays are equal, bit for bit."""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(arrays):
        digest.update(name.encode() + arrays[name].tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    jaxrec_flags.run_command(main, define_flags)
