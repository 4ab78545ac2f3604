"""The regions of a step of PyTorch: nearly all of each stack's time has one, and what is made slow gets the time."""

import gzip
import json
import shutil
from statistics import mean

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: make baseline")

import torch

from experiments.baselines import torch_regions
from experiments.baselines.dense_part import CrossNetwork
from experiments.baselines.jax_stack import initial_arrays
from experiments.baselines.ranges import region
from experiments.baselines.stacks import builder, paired
from jaxrec.configs import catalogue, overrides
from jaxrec.data.pipeline import Batches
from jaxrec.profiling.regions import OTHER
from jaxrec.profiling.roofline import wall_of_thread_time


def _has_fbgemm() -> bool:
    try:
        import fbgemm_gpu  # noqa: F401
    except (ImportError, OSError):  # OSError: a build for another torch
        return False
    return True


pytestmark = pytest.mark.usefixtures("compile_cache")
needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler"
)
needs_fbgemm = pytest.mark.skipif(not _has_fbgemm(), reason="FBGEMM is not installed: make baseline")
SMALL = ("data.tables=4", "data.rows=500", "data.train_rows=4000", "data.validation_rows=1", "data.test_rows=1",
         "embedding.dim=16", "model.bottom_mlp=64,16", "model.cross_rank=8", "model.top_mlp=128,64",
         "training.batch_size=1024")  # fmt: skip
STEPS = 3


def stack_of(name):
    config = paired(overrides.apply(catalogue.get("dlrm_balanced"), SMALL), name)
    dataset = config.data.open("")
    stack = builder(name)(config, dataset, initial_arrays(config, dataset))
    batches = Batches(dataset, "train", config.training.batch_size)
    return stack, [stack.put(batches[k].batch) for k in range(2)]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """Returns `profiled(name)`: a stack that took a step and was profiled, once for all tests, and what was found."""
    known = {}

    def get(name):
        if name not in known:
            stack, inputs = stack_of(name)
            stack.step(inputs[0])
            known[name] = stack, inputs, *torch_regions.profile(stack, inputs, STEPS, tmp_path_factory.mktemp(name))
        return known[name]

    return get


@pytest.fixture
def one_thread():
    """Threads that wait for each other take any time where others use the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "name",
    [
        "pytorch-eager",
        pytest.param("pytorch-compiled", marks=needs_compiler),
        pytest.param("pytorch-fbgemm", marks=[needs_fbgemm, needs_compiler]),
    ],
)
def test_nearly_all_time_has_a_region(name, profiled):
    _, _, regions, path = profiled(name)
    assert regions.mapped_share >= 0.95, regions.other_ms
    times = regions.mean()
    assert [r for r in times if r != OTHER] == [
        "embedding_lookup", "bottom_mlp", "interaction", "top_mlp", "loss", "dense_update", "embedding_update",
    ]  # fmt: skip
    for of, time in times.items():
        assert len(time.samples) == STEPS
        assert mean(time.forward) > 0 or of == OTHER, of
        assert (mean(time.backward) > 0) == (of in ("bottom_mlp", "interaction", "top_mlp", "loss")), of
    # Only what the profiler, the engine and Python take is missing of a step's wall time.
    total = sum(mean(time.samples) for time in times.values())
    assert total == pytest.approx(regions.total_ms)
    assert 0.2 * mean(regions.wall_ms) < total + regions.runtime_ms <= 1.01 * mean(regions.wall_ms)
    # Thread time and wall time are the same here, as jaxrec's factor between them has it.
    assert wall_of_thread_time(regions) == pytest.approx(1, abs=0.02)
    trace = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert sum(e["name"].startswith("ProfilerStep#") for e in trace) == STEPS + 1
    assert {e["args"]["region"] for e in trace if "region" in e.get("args", {})} == set(regions.op_place.values())


def test_a_region_that_is_made_slow_gets_the_time(tmp_path, monkeypatch, one_thread):
    def forward(self, x0):
        for _ in range(500):
            x0 = x0 + 0.0
        return fast(self, x0)

    stack, inputs = stack_of("pytorch-eager")
    before, _ = torch_regions.profile(stack, inputs, STEPS, tmp_path)
    fast = CrossNetwork.forward
    monkeypatch.setattr(CrossNetwork, "forward", forward)
    after, _ = torch_regions.profile(stack, inputs, STEPS, tmp_path)
    least = [{name: min(time.samples) for name, time in r.mean().items()} for r in (before, after)]
    assert least[1]["interaction"] > 2 * least[0]["interaction"]
    assert max(least[1], key=least[1].__getitem__) == "interaction"


@needs_compiler
def test_the_stack_is_as_before_a_profile(profiled):
    stack, inputs, _, _ = profiled("pytorch-compiled")
    with torch._dynamo.config.patch(error_on_recompile=True):
        stack.step(inputs[1])
        # Nor does the compiler see whether a profiler is on.
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            stack.step(inputs[0])
    names = {e.name for e in profiler.events()}
    assert "CompiledFunction" in names and not [n for n in names if "cpp_fused" in n]


def test_without_a_profiler_a_range_is_nothing():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler, region("top_mlp"):
        torch.ones(1)
    assert "top_mlp" in {e.name for e in profiler.events()}
    assert type(region("top_mlp")).__name__ == "nullcontext"
