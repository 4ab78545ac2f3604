"""Regions of PyTorch's traces, from planted events: each microsecond comes out where it belongs."""

import pytest

from experiments.baselines.operator_events import Kernel, attribute
from jaxrec.profiling.regions import Place

ENGINE = "autograd::engine::evaluate_function: "


def event(name, ts, dur, *, cat="cpu_op", tid=1, **args):
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "pid": 1, "tid": tid,
            "args": {k.replace("_", " "): v for k, v in args.items()}}  # fmt: skip


def named(name, ts, dur):
    return event(name, ts, dur, cat="user_annotation")


def eager():
    """A step of 1,000 us: a lookup, a layer, the loss, the backward pass, two updates."""
    return [
        named("ProfilerStep#0", 0, 1000),
        named("embedding_lookup", 10, 100),
        event("aten::embedding_bag", 20, 80, Sequence_number=5),
        event("aten::empty", 30, 20),
        # It makes no node and is of another region, but has the number of the node that comes next.
        event("aten::detach", 105, 4, Sequence_number=6),
        named("top_mlp", 120, 100),
        event("aten::linear", 121, 98, Sequence_number=6),
        event("aten::addmm", 130, 80, Sequence_number=6),
        named("loss", 230, 20),
        event("aten::sum", 231, 10, Sequence_number=7),
        event(ENGINE + "SumBackward0", 260, 20, Sequence_number=7),
        event("SumBackward0", 261, 16, Sequence_number=7),
        event("aten::expand", 262, 12),
        event(ENGINE + "AddmmBackward0", 300, 200, Sequence_number=6),
        event("AddmmBackward0", 310, 180, Sequence_number=6),
        event("aten::mm", 320, 150),
        event(ENGINE + "torch::autograd::AccumulateGrad", 510, 30),
        event("torch::autograd::AccumulateGrad", 515, 20),
        event("aten::copy_", 520, 10),
        named("embedding_update", 600, 200),
        event(ENGINE + "EmbeddingBagBackward0", 601, 100, Sequence_number=5),
        event("aten::_embedding_bag_sparse_backward", 610, 80),
        event("aten::coalesce", 720, 50),
        named("dense_update", 820, 100),
        event("aten::_fused_adagrad_", 830, 80),
        event("aten::zeros", 950, 5),
    ]


def test_every_operator_has_its_own_time_in_its_region():
    trace = eager()
    found = attribute(trace, {})
    times = {name: (t.forward[0], t.backward[0]) for name, t in found.devices[0].items()}
    assert times == {
        "embedding_lookup": pytest.approx((0.084, 0)),
        "top_mlp": pytest.approx((0.098, 0.180 + 0.020)),
        "loss": pytest.approx((0.010, 0.016)),
        "dense_update": pytest.approx((0.080, 0)),
        # The lookup's backward pass is an update, as in jaxrec.
        "embedding_update": pytest.approx((0.080 + 0.050, 0)),
        "other": pytest.approx((0.005, 0)),
    }
    assert found.total_ms == pytest.approx(0.623) and found.mapped_share == pytest.approx(1 - 5 / 623)
    assert found.other_ms == {"aten::zeros": pytest.approx(0.005)}
    assert found.inferred_share == pytest.approx(20 / 623)
    assert found.runtime_ms == pytest.approx((4 + 20 + 10 + 20) / 1e3)
    assert found.wall_ms == (1.0,) and found.busy_share == pytest.approx(0.623)
    assert found.op_place["aten::mm in top_mlp backward"] == "top_mlp backward"
    assert {e["name"]: e["args"].get("region") for e in trace}["aten::mm"] == "top_mlp backward"


def test_steps_are_told_apart_and_the_first_is_left_out():
    trace = [named(f"ProfilerStep#{k}", 100 * k, 90) for k in range(3)]
    for k in range(3):
        trace += [named("top_mlp", 100 * k + 1, 80), event("aten::mm", 100 * k + 2, 10 * (k + 1))]
    trace.append(event("aten::mm", 95, 3))  # Between two steps.
    found = attribute(trace, {}, skip=1)
    assert found.devices[0]["top_mlp"].forward == pytest.approx((0.02, 0.03))
    assert found.total_ms == pytest.approx(0.025) and found.op_ms == {
        "aten::mm in top_mlp forward": pytest.approx(0.025)
    }
    with pytest.raises(ValueError, match="has no range"):
        attribute(trace, {}, skip=3)


def compiled(*backward_calls):
    calls = [event(name, 120 + 100 * k, 50 + k) for k, name in enumerate(backward_calls)]
    return [
        named("ProfilerStep#0", 0, 1000),
        event("CompiledFunction", 1, 90, Sequence_number=3),
        event("## Call CompiledFxGraph None ##", 2, 80),
        event("aten::addmm", 5, 20),
        event("aten::copy_", 6, 5),
        event("graph_0_cpp_fused_cat_relu_1", 30, 40),
        event(ENGINE + "CompiledFunctionBackward", 100, 800, Sequence_number=3),
        event("CompiledFunctionBackward", 101, 790, Sequence_number=3),
        event("## Call CompiledFxGraph None ##", 110, 780),
        *calls,
    ]  # fmt: skip


GRAPHS = {
    False: [
        Kernel("extern_kernels.addmm", Place("bottom_mlp", False)),
        Kernel("cpp_fused_cat_relu_1", Place("interaction", False, spans=("bottom_mlp", "interaction"), foreign=0.25)),
    ],
    True: [
        Kernel("extern_kernels.mm", Place("top_mlp", True)),
        Kernel("extern_kernels.mm", Place("interaction", True, inferred=True)),
    ],
}


def test_compiled_kernels_are_placed_in_the_order_of_calls():
    found = attribute(compiled("aten::mm", "aten::mm"), GRAPHS)
    times = {name: (t.forward[0], t.backward[0]) for name, t in found.devices[0].items()}
    assert times == {
        "bottom_mlp": pytest.approx((0.020, 0)),
        "interaction": pytest.approx((0.040, 0.051)),
        "top_mlp": pytest.approx((0, 0.050)),
        "other": (0, 0),
    }
    assert found.mapped_share == 1 and found.inferred_share == pytest.approx(51 / 161)
    assert found.spanning_share == pytest.approx(40 / 161) and found.foreign_share == pytest.approx(10 / 161)


@pytest.mark.parametrize("calls", [("aten::mm",), ("aten::mm", "graph_0_cpp_fused_mul_2"), ("aten::mm",) * 3])
def test_other_calls_than_the_announced_have_no_region(calls):
    found = attribute(compiled(*calls), GRAPHS)
    assert sum(found.devices[0]["other"].samples) == pytest.approx(sum(0.05 + k / 1e3 for k in range(len(calls))))
    assert set(found.other_ms) == set(calls) and found.mapped_share < 0.6
    assert found.devices[0]["bottom_mlp"].forward == pytest.approx((0.020,))


def test_work_of_a_gpu_is_of_the_operator_that_started_it():
    trace = [
        named("ProfilerStep#0", 0, 100),
        named("top_mlp", 1, 50),
        event("aten::mm", 2, 10, External_id=7),
        event("sgemm", 30, 60, cat="kernel", tid=70, External_id=7),
    ]
    found = attribute(trace, {})
    assert found.devices[0]["top_mlp"].forward == pytest.approx((0.060,)) and found.total_ms == pytest.approx(0.060)
    assert found.busy_share == pytest.approx(0.6)


def test_a_gradient_of_a_compiled_part_is_of_the_region_that_has_its_shape():
    trace = [
        *compiled("aten::mm", "aten::mm"),
        event(ENGINE + "torch::autograd::AccumulateGrad", 900, 30),
        event("torch::autograd::AccumulateGrad", 901, 20),
        event("aten::copy_", 905, 10, Input_Dims=[[8, 4], [8, 4]]),
        event(ENGINE + "torch::autograd::AccumulateGrad", 930, 30, Input_Dims=[[64, 4]]),
        event("aten::clone", 931, 20),
        event(ENGINE + "torch::autograd::AccumulateGrad", 970, 30),
        event("aten::detach", 971, 20, Input_Dims=[[4]]),
    ]
    found = attribute(trace, GRAPHS, {(8, 4): "top_mlp", (64, 4): "embedding_lookup"})
    assert found.devices[0]["top_mlp"].backward == pytest.approx((0.050 + 0.020,))
    assert found.devices[0]["embedding_update"].forward == pytest.approx((0.020,))
    assert found.other_ms == {"aten::detach": pytest.approx(0.020)}
