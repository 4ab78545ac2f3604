"""The profile of a step: what the compiler made of it, its distance from the ceilings, the verdict, the command."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxrec.profile
from jaxrec.data.schema import FeatureSpec, Schema
from jaxrec.models.dlrm import DLRMConfig
from jaxrec.precision import policy
from jaxrec.profiling import hardware, program, roofline
from jaxrec.profiling.hardware import Ceilings
from jaxrec.profiling.hlo import Module, Work
from jaxrec.profiling.model_flops import forward_flops, step_flops
from jaxrec.profiling.op_events import OpTimes, Run
from jaxrec.profiling.regions import join
from jaxrec.profiling.verdict import decide

# 1 GFLOP/s of products and of element-wise work, 1 GB/s of copies, 0.1 GB/s of random rows.
CEILINGS = Ceilings("a test", 1e9, 1e8, 64, 1e9, "float32", 1e9, {})

PROGRAM = """\
HloModule jit_step

ENTRY %main (x: f32[1000,1000], table: f32[9000,1000], ids: s32[1000,1]) -> f32[1000,1000] {
  %x = f32[1000,1000]{1,0} parameter(0)
  %table = f32[9000,1000]{1,0} parameter(1)
  %ids = s32[1000,1]{1,0} parameter(2)
  %rows = f32[1000,1000]{1,0} gather(%table, %ids), metadata={op_name="jit(step)/embedding_lookup/gather"}
  %product = f32[1000,1000]{1,0} dot(%x, %rows), lhs_contracting_dims={1}, metadata={op_name="jit(step)/jvp(top_mlp)/dot"}
  %tiny = s32[] add(%ids, %ids), metadata={op_name="jit(step)/clip/add"}
  %sum = f32[1000,1000]{1,0} all-reduce(%product), replica_groups={{0,1}}, metadata={op_name="jit(step)/gradient_sum/psum"}
  ROOT %copy = f32[1000,1000]{1,0} copy(%sum), metadata={op_name="jit(step)/dense_update/copy"}
}
"""  # noqa: E501


def planted():
    """One run: 5,000 ms of threads in 2,600 ms, of which 100 ms without any operation."""
    times = {"rows": 200.0, "product": 4000.0, "tiny": 10.0, "sum": 300.0, "copy": 490.0}
    run = Run(1, 1, 0)
    of_run = {name: 1e6 * ms for name, ms in times.items()}
    return OpTimes({run: of_run}, {run: 2500e6}, {run: 0.0}, {run: 2600e6}, 0.0)


def test_distances_from_the_bounds():
    module = Module(PROGRAM.replace("s32[] add(%ids, %ids)", "s32[] add()"))
    regions = join(module, planted())
    bounds = roofline.bounds(module, regions, CEILINGS)
    # 2 GFLOPs at 1 GFLOP/s; 4,000 ms of threads are half of that in wall time.
    top = bounds["top_mlp"]
    assert (top.limited_by, top.bound_ms, top.wall_ms) == ("products", 2000, pytest.approx(2000))
    assert top.attained == pytest.approx(1) and top.needs_ms["copy"] == 12
    lookup = bounds["embedding_lookup"]
    # 4 MB of rows at 0.1 GB/s.
    assert (lookup.limited_by, lookup.bound_ms, lookup.attained) == ("random", 40, pytest.approx(0.4))
    assert bounds["dense_update"].bound_ms == 8 and bounds["dense_update"].limited_by == "copy"


def test_the_parts_of_a_step_add_up():
    module = Module(PROGRAM.replace("s32[] add(%ids, %ids)", "s32[] add()"))
    regions = join(module, planted())
    assert regions.collective_share == pytest.approx(0.06)
    split = roofline.split(module, regions, CEILINGS)
    # Starting an operation takes the 10 ms of the one that does nothing; the wall time is half of the threads'.
    assert split.start_ms == 10
    assert split.communication == pytest.approx(150)
    assert split.arithmetic == pytest.approx((4000 - 10) / 2)
    assert split.memory == pytest.approx((200 - 10 + 490 - 10) / 2)
    assert split.overhead == pytest.approx(4 * 10 / 2 + 100)
    parts = (split.communication, split.arithmetic, split.memory, split.overhead)
    assert sum(parts) == pytest.approx(2600)


@pytest.mark.parametrize(
    ("parts", "fed", "words"),
    [
        ((1, 1, 8, 1), 11.0, "arithmetic-bound"),
        ((1, 1, 1, 8), 11.0, "memory-bound"),
        ((8, 1, 1, 1), 11.0, "communication-bound"),
        ((1, 8, 1, 1), 11.0, "overhead-bound"),
        ((1, 1, 8, 1), 30.0, "waits for input"),
        ((1, 1, 8, 7), 17.0, "arithmetic-bound, closely followed by memory"),
        ((1, 1, 8, 1), 9.0, "arithmetic-bound"),
    ],
)
def test_verdicts(parts, fed, words):
    split = roofline.Split(*map(float, parts), start_ms=0.0)
    verdict = decide([fed, fed - 1, fed + 1], [float(sum(parts))], split)
    assert verdict.words == words and verdict.sentence().startswith(f"{words}: of ")
    assert sum(verdict.parts_ms.values()) == pytest.approx(verdict.step_ms)
    assert verdict.step_ms == max(fed, sum(parts))


def test_a_donated_array_that_no_result_takes_over_is_named():
    def step(state, x):
        return {"kept": state["kept"] + x.sum(), "wide": state["wide"][:2].astype(jnp.int32)}

    state = {"kept": jnp.ones(8), "unread": jnp.ones(5), "wide": jnp.ones(100)}
    compiled = jax.jit(step, donate_argnums=0).lower(state, jnp.ones(100)).compile()
    facts = program.describe(compiled, Module(compiled.as_text()))
    assert facts.not_aliased == {"state['wide']": 400}
    assert facts.memory["alias"] == 32 and facts.memory["argument"] == 832
    assert facts.collectives == [] and facts.operations >= facts.fusions >= 1
    json.dumps(facts.as_dict())


def test_different_flops_are_flagged():
    compiled = jax.jit(lambda x: x @ x).lower(jnp.ones((64, 64))).compile()
    module = Module(compiled.as_text())
    facts = program.describe(compiled, module, 2.0 * 64**3)
    assert facts.work.product_flops == 2 * 64**3 and facts.difference == ""
    more = dataclasses.replace(facts, model_flops=64**3)
    assert "100% more than the model's definition" in more.difference
    assert "50% fewer" in dataclasses.replace(facts, model_flops=4 * 64**3).difference
    assert dataclasses.replace(facts, model_flops=0.0).difference == ""


@pytest.mark.parametrize("interaction", ["dot", "cross"])
def test_flops_of_a_model(interaction):
    features = tuple(FeatureSpec(n, "categorical", n) for n in "ab")
    schema = Schema(features, {"a": 9, "b": 9}, ("x", "y", "z"), ("click",))
    config = DLRMConfig(bottom_mlp=(8, 4), interaction=interaction, cross_layers=2, cross_rank=5, top_mlp=(6,))
    model = config.create(schema, 4, policy("float32"), nnx.Rngs(0))
    flops = forward_flops(model, 4, 10)
    width = 4 + 3 if interaction == "dot" else 12
    assert flops["bottom_mlp"] == 2 * 10 * (3 * 8 + 8 * 4)
    assert flops["interaction"] == 2 * 10 * (3 * 3 * 4 if interaction == "dot" else 2 * 2 * 12 * 5)
    assert flops["top_mlp"] == 2 * 10 * (width * 6 + 6)
    assert step_flops(model, 4, 10) == 3 * sum(flops.values())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_ceilings(precision):
    ceilings = hardware.measure(policy(precision), 64, 1 << 20, samples=2, size=8 << 20)
    assert ceilings.row_bytes == 64 and ceilings.precision == precision
    for name in ("copy", "random", "products", "elementwise"):
        samples = ceilings.samples[name]
        assert len(samples) == 2 and getattr(ceilings, name) == max(samples)
        assert 1e6 < min(samples) < 1e14


def test_what_a_slice_leaves_out_is_no_work():
    def step(x):
        return jnp.sin(x * 2.0)[:16] + 1.0

    compiled = jax.jit(step).lower(jnp.ones((1 << 16, 8))).compile()
    module = Module(compiled.as_text())
    work = Work()
    for name in module.instructions:
        work = work.plus(module.work(name))
    # Of a large array that is scaled and sliced in one fusion, only the slice is read and computed.
    assert work.bytes == 2 * 16 * 8 * 4 and work.other_flops == 3 * 16 * 8


def test_the_command(call, tmp_path):
    workdir = tmp_path / "prof"
    status, out, err = call(
        jaxrec.profile, "--config=dlrm_synthetic", f"--workdir={workdir}", "--stages=step", "--samples=2",
        "--seconds=0.01", "--traced_steps=3", "--set=data.train_rows=8000", "--set=data.rows=500", "--batch_size=256",
    )  # fmt: skip
    assert status == 0, err
    lines = out.splitlines()
    heads = {line.split()[0] for line in lines}
    assert {"embedding_lookup", "top_mlp", "embedding_update", "other", "mapped", "ceilings", "verdict"} <= heads
    (verdict,) = (line for line in lines if line.startswith("verdict"))
    found = json.loads((workdir / "step_profile.json").read_text())
    assert verdict.split(maxsplit=1)[1] == found["verdict"]["sentence"]
    assert found["regions"]["mapped_share"] >= 0.95 and found["traced"] == 3
    assert len(found["regions"]["devices"]["0"]["top_mlp"]["backward"]) == 3
    assert len(found["fed_ms"]) == len(found["resident_ms"]) == 2
    assert found["program"]["not_aliased"] == {}
    assert found["program"]["model_flops"] > 0 and found["program"]["compiler_flops"] > 0
    assert list((workdir / found["trace"]).glob("*.xplane.pb"))
    assert (workdir / "perfetto_trace.json.gz").exists()
    assert str(tmp_path) not in json.dumps({k: v for k, v in found.items() if k != "config"})


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--stages=step"], "--workdir is not given, but --stages=step writes its trace"),
        (["--stages=all"], "--workdir is not given, but --stages=all writes its trace"),
        (["--stages=step", "--workdir={}", "--traced_steps=0"], "--traced_steps is 0, but must be at least 1"),
        (["--stages=step", "--workdir={}/file"], "--workdir is '{}/file', which is a file, but must be a folder"),
        (["--stages=step", "--workdir={}/file/below"], "--workdir is '{}/file/below', which cannot be made"),
        (["--stages=step", "--workdir={}", "--mesh=data:64"], "--mesh"),
        (["--stages=step", "--workdir={}", "--batch_size=0"], "--batch_size is 0, but must be at least 1"),
    ],
)
def test_wrong_flags(call, tmp_path, flags, says):
    (tmp_path / "file").write_text("")
    given = [flag.format(tmp_path) for flag in flags]
    status, _, err = call(jaxrec.profile, "--config=dlrm_synthetic", *given)
    assert status == 2 and err.startswith("error: ") and err.count("\n") == 1
    assert says.format(tmp_path) in err
