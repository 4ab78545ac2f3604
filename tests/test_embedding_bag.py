"""The compiled operations against their references, by Hypothesis, on 1, 2 and 8 devices at once.

Gradients are multiples of 1/16, so that a row's sum is exact in any order; what is computed from it may differ in the
last bits, as XLA contracts products and sums.
"""

import dataclasses
import hashlib
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cover import FULL
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from jaxrec import counters
from jaxrec.kernels.embedding_bag import cpu, library, reference
from jaxrec.kernels.embedding_bag.bags import OPTIMIZERS, Arrays, Bags, Gradients, Rule, Scalars
from jaxrec.profiling.hlo import Module

pytestmark = pytest.mark.skipif(bool(library.load()), reason=f"the compiled kernel: {library.load()}")
EPS = float(np.finfo(np.float32).eps)
WIDE = ("momentum", "adagrad", "adam")


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes and settings; the numbers follow from `seed`.

    `ids`: `any`, `few` (many duplicates), `one` (one row in the whole batch), `ends` (the first and the last row).
    """

    devices: int
    batch: int
    runs: tuple[int, ...]
    rows: int
    dim: int
    dtype: str
    optimizer: str
    weighted: bool
    ids: str
    empty: float
    clip: float
    decay: float
    column_split: bool
    sentinel_in_table: bool
    seed: int

    def bags(self) -> Bags:
        return Bags(self.runs, self.rows - 1 if self.sentinel_in_table else self.rows)

    def rule(self) -> Rule:
        return Rule(self.optimizer, self.dtype, 2.0**-6, 0.75, 0.875)

    def scalars(self) -> Scalars:
        return Scalars(self.clip, 0.5, 0.5 * self.decay, 0.75, 0.4375, 3)

    def numbers(self):
        """Returns arrays and gradients of every device, stacked."""
        rng = np.random.default_rng(self.seed)
        bags, n = self.bags(), (self.devices, self.batch, sum(self.runs))
        first = {"any": rng.integers(0, self.rows, n), "few": rng.integers(0, min(3, self.rows), n)}
        first |= {"one": np.full(n, self.rows // 2), "ends": rng.choice([0, self.rows - 1], n)}
        ids = first[self.ids]
        ids = np.where(rng.random(n) < self.empty, bags.sentinel, ids).astype(np.int32)
        weights = rng.choice([0.25, 0.5, 1, 2], n).astype(np.float32) if self.weighted else None
        table = rng.normal(size=(self.devices, self.rows, self.dim)).astype(np.float32)
        slots = []
        if self.optimizer in WIDE:
            slots = [rng.random(table.shape).astype(np.float32) for _ in range(1 + (self.optimizer == "adam"))]
        elif self.optimizer == "rowwise_adagrad":
            slots = [rng.random(table.shape[:2]).astype(np.float32)]
        narrow = self.dtype != "float32"
        if narrow:
            table = np.asarray(jnp.asarray(table).astype(self.dtype)).view(np.uint16)
        largest = np.tile(np.float32([8.0] + [1.0] * len(slots)), (self.devices, 1))
        gradient = rng.integers(-64, 65, (*n[:2], bags.vectors * self.dim)).astype(np.float32) / 16
        per_occurrence = (self.devices, n[1] * n[2])
        draws = rng.integers(0, 2**32, per_occurrence, np.uint32) if narrow else None
        squares = None
        if self.column_split and self.optimizer == "rowwise_adagrad":
            squares = rng.random(per_occurrence).astype(np.float32)
        return Arrays(table, slots, largest), Gradients(gradient, ids, weights, squares, draws)


@st.composite
def cases(draw) -> Case:
    runs = draw(st.sampled_from([(1,), (3,), (1, 1), (2, 0, 5), (1, 4, 1, 1), (2, 2, 2)]))
    rows = draw(st.sampled_from([1, 2, 7, 64, 5000, 70_000]))
    return Case(
        draw(st.sampled_from([1, 2, 8])) if rows < 70_000 else 1,
        draw(st.sampled_from([1, 6, 300])),
        runs,
        rows,
        draw(st.sampled_from([1, 3, 16, 40, 128])),
        draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        draw(st.sampled_from(OPTIMIZERS)),
        draw(st.booleans()),
        draw(st.sampled_from(["any", "few", "one", "ends"])),
        draw(st.sampled_from([0.0, 0.3, 1.0])),
        draw(st.sampled_from([1.0, 0.125])),
        draw(st.sampled_from([0.0, 0.25])),
        draw(st.booleans()),
        rows > 1 and draw(st.booleans()),
        draw(st.integers(0, 2**20)),
    )


def on_devices(case: Case, function, *args):
    """Returns `function` of each device's part of the arguments, stacked; all run at once."""
    mesh = Mesh(np.array(jax.devices()[: case.devices]), "d")

    def body(*parts):
        out = function(*jax.tree.map(lambda x: x[0], parts))
        return jax.tree.map(lambda x: x[None], out)

    split = jax.P("d")
    program = jax.shard_map(body, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    return jax.device_get(jax.jit(program)(*args))


def one_by_one(case: Case, function, *args):
    """Returns the same of `function`, device by device."""
    parts = [jax.device_get(function(*jax.tree.map(lambda x, d=d: x[d], args))) for d in range(case.devices)]
    return jax.tree.map(lambda *x: np.stack(x), *parts)


def equal_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


many = settings(max_examples=2000 if FULL else 15, deadline=None)


@many
@given(cases())
def test_lookup_and_its_transpose_are_the_references(case):
    arrays, g = case.numbers()
    bags = case.bags()

    def look_up(of):
        return lambda table, rows, weights: of.lookup(bags, table, case.dtype, rows, weights)

    args = (arrays.weights, g.rows, g.weights)
    found, expected = on_devices(case, look_up(cpu), *args), one_by_one(case, look_up(reference), *args)
    equal_bits(found, on_devices(case, look_up(cpu), *args))
    np.testing.assert_allclose(found, expected, rtol=0, atol=max(case.runs) * 8 * 2 * EPS * max(case.runs))

    def add_up(of):
        return lambda v, rows, weights: of.add_up(bags, v, case.rows, rows, weights)

    args = (g.vectors, g.rows, g.weights)
    np.testing.assert_array_equal(on_devices(case, add_up(cpu), *args), one_by_one(case, add_up(reference), *args))

    def squares(of):
        return lambda v, rows, weights: of.row_squares(bags, v, case.rows, rows, weights)

    np.testing.assert_allclose(
        on_devices(case, squares(cpu), *args), one_by_one(case, squares(reference), *args), rtol=case.dim * EPS
    )


@many
@given(cases())
def test_update_is_the_reference(case):
    arrays, g = case.numbers()
    bags, rule, scalars = case.bags(), case.rule(), case.scalars()

    def update(of, ok=True):
        return lambda arrays, g: of.update(bags, rule, arrays, g, scalars, jnp.asarray(ok))

    found, expected = on_devices(case, update(cpu), arrays, g), one_by_one(case, update(reference), arrays, g)
    equal_bits(found, on_devices(case, update(cpu), arrays, g))
    equal_bits(arrays, on_devices(case, update(cpu, ok=False), arrays, g))
    touched = np.stack([np.isin(np.arange(case.rows), np.setdiff1d(rows, bags.sentinel)) for rows in g.rows])
    assert (found.weights[~touched] == arrays.weights[~touched]).all()
    for a, b in zip(found.slots, expected.slots, strict=True):
        np.testing.assert_allclose(a, b, rtol=4 * case.dim * EPS, atol=8 * EPS * max(1, np.abs(b).max()))
    np.testing.assert_allclose(found.largest, expected.largest, rtol=2.0**-6)
    assert (found.largest >= arrays.largest).all()
    a, b = (x.weights.view(case.dtype).astype(np.float64) for x in (found, expected))
    size = np.abs(b) + np.abs(arrays.weights.view(case.dtype).astype(np.float64)).max()
    bound = (16 + 2 * case.dim) * EPS * size
    if case.dtype == "float32":
        assert (np.abs(a - b) <= bound).all()
        return
    # A last bit that differs may cross the draw: then the neighbour is stored; seldom.
    step = np.maximum(float(jnp.finfo(case.dtype).eps) * np.abs(b), 2.0**-24)
    assert (np.abs(a - b) <= bound + step).all()
    assert (a == b).mean() > 0.97 or (a != b).sum() <= 2


@many
@given(cases(), st.sampled_from(["nothing", "nan", "inf", "large", "accumulator"]), st.booleans())
def test_check_is_the_reference(case, fault, is_bounded):
    arrays, g = case.numbers()
    bags, rule = case.bags(), case.rule()
    g.vectors[0].flat[case.seed % g.vectors[0].size] = {"nan": np.nan, "inf": -np.inf, "large": 3e30}.get(fault, 1.0)
    if fault == "accumulator" and arrays.slots:
        arrays.slots[0].flat[case.seed % arrays.slots[0].size] = np.inf
        arrays.largest[:, 1] = np.inf  # As `largest` is defined.
    if not is_bounded:  # No bound is known: every row is looked at.
        arrays.largest[:] = np.inf

    def check(of):
        return lambda arrays, g: of.check(bags, rule, arrays, g, case.scalars())

    # No value is near what its type can hold, where one might round to infinity and the other not.
    found, expected = on_devices(case, check(cpu), arrays, g), one_by_one(case, check(reference), arrays, g)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


@settings(max_examples=12, deadline=None)
@given(cases(), st.integers(-(2**31), 2**31 - 1))
def test_rows_that_are_not_there_are_refused(case, row):
    assume(not 0 <= row < case.rows and row != case.bags().sentinel)
    case = dataclasses.replace(case, devices=1)
    arrays, g = case.numbers()
    g.rows.flat[case.seed % g.rows.size] = row
    calls = (
        lambda: on_devices(case, lambda t, r: cpu.lookup(case.bags(), t, case.dtype, r), arrays.weights, g.rows),
        lambda: on_devices(
            case,
            lambda arrays, g: cpu.update(case.bags(), case.rule(), arrays, g, case.scalars(), jnp.asarray(True)),
            arrays, g,
        ),
    )  # fmt: skip
    message = rf"row {row} is out of range: the table has {case.rows} rows"
    for call in calls:
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            call()


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([1, 5, 300]), st.sampled_from([1, 16, 40, 128]), st.booleans(), st.integers(0, 99))
def test_lookup_of_int8_rows_is_the_reference(batch, dim, weighted, seed):
    rng = np.random.default_rng(seed)
    bags = Bags((1, 3, 0, 2), 50)
    table, scales = rng.integers(-127, 128, (50, dim)).astype(np.int8), rng.random(50).astype(np.float32)
    rows = rng.integers(0, 51, (batch, 6)).astype(np.int32)
    weights = rng.random((batch, 6)).astype(np.float32) if weighted else None
    found = jax.jit(lambda *args: cpu.lookup(bags, args[0], "int8", *args[1:]))(table, rows, weights, scales)
    expected = reference.lookup(bags, jnp.asarray(table), "int8", jnp.asarray(rows), weights, jnp.asarray(scales))
    np.testing.assert_allclose(found, expected, rtol=0, atol=127 * 16 * EPS)


def test_a_profile_counts_named_rows_not_whole_tables():
    bags, rows, dim, batch = Bags((2, 2), 1000), 1001, 16, 8

    def step(arrays, ids):
        out = cpu.lookup(bags, arrays.weights, "float32", ids)
        return cpu.update(
            bags, Rule("rowwise_adagrad"), arrays, Gradients(out, ids), Scalars(rate=0.1), jnp.asarray(True)
        )

    float32 = jnp.float32
    arrays = Arrays(*(jax.ShapeDtypeStruct(s, float32) for s in ((rows, dim), (rows,), (2,))))
    arrays = Arrays(arrays[0], [arrays[1]], arrays[2])
    ids = jax.ShapeDtypeStruct((batch, 4), jnp.int32)
    module = Module(jax.jit(step, donate_argnums=0).lower(arrays, ids).compile().as_text())
    kernels = {i.kernel: module.work(i.name) for i in module.instructions.values() if i.kernel}
    named, pooled = 4 * batch, 4 * 2 * batch * dim
    assert set(kernels) == {"Lookup", "Update"}
    assert kernels["Lookup"].random_bytes == named * dim * 4
    assert kernels["Lookup"].stream_bytes == pooled + 4 * named
    assert kernels["Update"].random_bytes == 2 * named * (dim * 4 + 4)
    assert kernels["Update"].stream_bytes == pooled + 4 * named + 4 * 7  # And the scalars.


DIGEST = """
import sys
import numpy as np
from test_embedding_bag import digest
print(digest())
"""


def digest() -> str:
    """Returns a digest of what the operations compute for a batch of 12,000 occurrences."""
    sizes = Case(1, 2000, (2, 3, 1), 3000, 64, "bfloat16", "adagrad", True, "any", 0.1, 0.5, 0.1, False, False, 7)
    found = hashlib.sha256()
    for optimizer, dtype in (("adagrad", "bfloat16"), ("rowwise_adagrad", "float32")):
        case = dataclasses.replace(sizes, optimizer=optimizer, dtype=dtype)
        arrays, g = case.numbers()
        bags, rule, scalars = case.bags(), case.rule(), case.scalars()
        # Not multiples of anything: the order of a sum shows.
        g = g._replace(vectors=np.float32(counters.uniform(1, np.arange(g.vectors.size))).reshape(g.vectors.shape))
        out = on_devices(case, lambda a, g, b=bags, d=dtype: cpu.lookup(b, a.weights, d, g.rows, g.weights), arrays, g)
        new = on_devices(
            case, lambda a, g, b=bags, r=rule, s=scalars: cpu.update(b, r, a, g, s, jnp.asarray(True)), arrays, g
        )
        for array in (out, *jax.tree.leaves(new)):
            found.update(array.tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("threads", [1, 7])
def test_the_number_of_threads_changes_no_bit(threads):
    here = os.path.dirname(__file__)
    env = os.environ | {"NPROC": str(threads), "PYTHONPATH": os.pathsep.join([here, os.path.dirname(here)])}
    done = subprocess.run([sys.executable, "-c", DIGEST], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == digest()
