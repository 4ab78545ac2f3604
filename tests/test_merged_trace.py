"""Traces of two stacks on one time axis: well-formed, aligned, and without a word about the machine."""

import getpass
import gzip
import json
import socket

import jax
import jax.numpy as jnp
import pytest

from jaxrec.checks import UserError
from jaxrec.profiling import merged_trace, op_events
from jaxrec.profiling.hlo import Module
from jaxrec.profiling.merged_trace import Side
from jaxrec.profiling.regions import REGIONS, join
from jaxrec.tracing import StepTracer

HOST, HOME = "gpu-node-17", "/home/alice"


def torch_trace(steps=3):
    """As torch.profiler writes it, with all that a published trace must not say."""
    events = [
        {
            "ph": "M",
            "name": "process_name",
            "ts": 1.0,
            "pid": 4242,
            "tid": 0,
            "args": {"name": f"python {HOME}/run.py"},
        },
        {"ph": "M", "name": "process_labels", "ts": 1.0, "pid": 4242, "tid": 0, "args": {"labels": HOST}},
        {"ph": "M", "name": "process_sort_index", "ts": 1.0, "pid": "Spans", "tid": 0, "args": {"sort_index": 5}},
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 9e6},
        {"name": "nobody's"},
    ]

    def add(name, ts, dur, category="cpu_op", **args):
        events.append({"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": category, "pid": 4242, "tid": 4243,
                       "args": {"External id": 1, "File": f"{HOME}/model.py", **args}})  # fmt: skip

    for k in range(steps):
        at = 5_000_000.5 + 1000 * k
        add(f"ProfilerStep#{k}", at, 900, "user_annotation")
        add("top_mlp", at + 1, 400, "user_annotation")
        add("aten::addmm", at + 2, 300, region="top_mlp forward")
        add("aten::resolve_conj", at + 3, 0.5, region="top_mlp forward")
        add(f"{HOME}/kernels/my_op", at + 450, 50, region=f"{HOST} forward")
        add(f"{HOME}/model.py(12): forward", at + 2, 300, "python_function")
        add("aten::mm", at + 600, 200, region="top_mlp backward")
        for ph, ts in (("s", at + 2), ("f", at + 600)):
            events.append(
                {"ph": ph, "id": k + 1, "pid": 4242, "tid": 4243, "ts": ts, "cat": "fwdbwd", "name": "fwdbwd"}
            )
    return {"host_name": HOST, "traceName": f"{HOME}/trace.json", "traceEvents": events}


@pytest.fixture(scope="module")
def jax_side(tmp_path_factory):
    """A real trace of a small program of two regions."""

    def train_step(x):
        with jax.named_scope("top_mlp"):
            x = x @ x
        with jax.named_scope("loss"):
            return jnp.tanh(x / 300)

    workdir = tmp_path_factory.mktemp("traced")
    x = jnp.ones((300, 300))
    compiled = jax.jit(train_step).lower(x).compile()
    with StepTracer(str(workdir), (0, 4)) as tracer:
        for k in range(4):
            tracer.before(k)
            with tracer.mark(k):
                x = compiled(x).block_until_ready()
            tracer.after(k, x)
    module = Module(compiled.as_text())
    regions = join(module, op_events.op_times(op_events.read(workdir), module.name))
    assert regions.mapped_share > 0.95
    return Side("jax", workdir / "perfetto_trace.json.gz", regions.op_place)


@pytest.fixture
def torch_side(tmp_path):
    path = tmp_path / "torch.json"
    path.write_text(json.dumps(torch_trace()))
    return Side("pytorch-eager", path)


def of(merged, pid, category=None):
    return [
        e for e in merged["traceEvents"] if e["pid"] == pid and e["ph"] == "X" and category in (None, e["cat"])
    ]  # fmt: skip


def test_every_event_is_well_formed(jax_side, torch_side, tmp_path):
    merged_trace.write(merged_trace.merge([jax_side, torch_side]), tmp_path / "merged.json.gz")
    merged = json.loads(gzip.decompress((tmp_path / "merged.json.gz").read_bytes()))
    assert set(merged) == {"displayTimeUnit", "traceEvents"} and len(merged["traceEvents"]) > 20
    for e in merged["traceEvents"]:
        assert e["ph"] in ("X", "M", "s", "f") and isinstance(e["name"], str) and e["name"]
        assert isinstance(e["pid"], int) and isinstance(e["tid"], int)
        assert isinstance(e["ts"], int | float) and e["ts"] >= 0
        if e["ph"] == "X":
            assert isinstance(e["dur"], int | float) and e["dur"] >= 0
            assert e["cat"] in (*REGIONS, "other", "step", "task")
    names = {e["pid"]: e["args"]["name"] for e in merged["traceEvents"] if e["name"] == "process_name"}
    assert names == {1: "jax", 2: "pytorch-eager"}
    threads = {(e["pid"], e["tid"]) for e in merged["traceEvents"] if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in merged["traceEvents"] if e["ph"] != "M"} <= {*threads}


def test_the_first_steps_begin_together_and_hold_their_operations(jax_side, torch_side):
    merged = merged_trace.merge([jax_side, torch_side], skip=1, steps=2)
    for pid in (1, 2):
        steps = of(merged, pid, "step")
        assert [e["name"] for e in steps] == ["step 1", "step 2"] and steps[0]["ts"] == 0
        end = steps[1]["ts"] + steps[1]["dur"]
        assert all(e["ts"] >= 0 and e["ts"] + e["dur"] <= end + 0.002 for e in of(merged, pid))
    assert [e["ts"] for e in of(merged, 2, "step")] == [0, 1000] and of(merged, 2, "step")[0]["dur"] == 900
    assert [(e["ts"], e["dur"]) for e in of(merged, 2) if e["name"] == "aten::mm"] == [(600, 200), (1600, 200)]


def test_operations_have_their_regions(jax_side, torch_side):
    merged = merged_trace.merge([jax_side, torch_side])
    ours = {e["args"].get("region") for e in of(merged, 1) if e["cat"] in REGIONS}
    assert ours == {"top_mlp forward", "loss forward"}
    for place in ours:
        # In each of the three steps.
        assert sum(e["args"].get("region") == place for e in of(merged, 1)) >= 3
    theirs = {(e["name"], e["cat"], e["args"].get("region")) for e in of(merged, 2) if e["cat"] != "step"}
    assert theirs == {
        ("top_mlp", "top_mlp", "top_mlp"),
        ("aten::addmm", "top_mlp", "top_mlp forward"),
        ("aten::resolve_conj", "top_mlp", "top_mlp forward"),
        ("aten::mm", "top_mlp", "top_mlp backward"),
        ("my_op", "other", None),
    }


def test_no_word_about_the_machine(jax_side, torch_side, tmp_path):
    text = json.dumps(merged_trace.merge([jax_side, torch_side]))
    for word in (HOST, "alice", "/home", str(tmp_path), "thunk_executor", "XLAEigen", "/"):
        assert word not in text, word
    # The machine may be called like a part of a word.
    assert not {f'"{w}"' for w in (socket.gethostname(), getpass.getuser()) if f'"{w}"' in text}


def test_the_longest_operations_are_kept_and_flows_between_them(torch_side):
    def flows(merged):
        return [(e["ph"], e["id"], e["ts"]) for e in merged["traceEvents"] if e["ph"] in "sf"]

    whole = merged_trace.merge([torch_side], skip=0)
    assert flows(whole)[:2] == [("s", "pytorch-eager:1", 2), ("f", "pytorch-eager:1", 600)] and len(flows(whole)) == 6
    few = merged_trace.merge([torch_side], skip=0, operations=6)
    assert {e["name"] for e in of(few, 1) if e["cat"] != "step"} == {"top_mlp", "aten::addmm"}
    assert len(of(few, 1, "step")) == 3 and flows(few) == []


def test_two_sides_share_no_flow(torch_side):
    twice = merged_trace.merge([torch_side, Side("pytorch-compiled", torch_side.path)])
    ids = {pid: {e["id"] for e in twice["traceEvents"] if e["ph"] == "s" and e["pid"] == pid} for pid in (1, 2)}
    assert ids[1] and ids[2] and not ids[1] & ids[2]


def test_what_was_handed_to_another_thread_is_a_task(tmp_path):
    def event(name, ts, dur, tid, **args):
        return {"ph": "X", "pid": 7, "tid": tid, "name": name, "ts": ts, "dur": dur, "args": args}

    begin, end = "ThreadpoolListener::StartRegion", "ThreadpoolListener::StopRegion"
    events = [
        event("train", 100, 1000, 1, step_num="0"),
        event("dot.1", 110, 50, 2, hlo_op="dot.1", _src="external/xla/thunk_executor.cc"),
        event(begin, 120, 1e-6, 3), event(end, 420, 1e-6, 3),
        # It waits for the whole program.
        event(begin, 101, 1e-6, 4), event(end, 1099, 1e-6, 4),
        {},
    ]  # fmt: skip
    path = tmp_path / "jax.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"displayTimeUnit": "ns", "traceEvents": events}).encode()))
    merged = merged_trace.merge([Side("jax", path, {"dot.1": "top_mlp backward inferred"})], skip=0)
    assert [(e["name"], e["ts"], e["dur"]) for e in of(merged, 1)] == [
        ("step 0", 0, 1000), ("dot.1", 10, 50), ("task", 20, 300),
    ]  # fmt: skip
    assert of(merged, 1, "top_mlp")[0]["args"] == {"region": "top_mlp backward inferred"}
    names = [e["args"]["name"] for e in merged["traceEvents"] if e["name"] == "thread_name"]
    assert names == ["steps", "thread 1", "thread 2"]


def test_same_trace_same_bytes(torch_side, tmp_path):
    for name in ("a", "b"):
        merged_trace.write(merged_trace.merge([torch_side]), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("content", [b"", b"not json", b"\x1f\x8bbroken", b'{"x": 1}', b"[1]"])
def test_what_is_no_trace_is_refused(content, tmp_path):
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"trace\.json is no trace"):
        merged_trace.merge([Side("jax", path)])


def test_too_few_steps_are_refused(torch_side):
    with pytest.raises(UserError, match="has no steps after the first 3"):
        merged_trace.merge([torch_side], skip=3)
    with pytest.raises(UserError, match="is no trace"):
        merged_trace.merge([Side("jax", torch_side.path.with_name("absent.json"))])
