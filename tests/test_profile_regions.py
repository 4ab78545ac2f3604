"""Regions of a trace: planted times come out exactly, and a region that is made slow gets the time."""

import jax
import jax.numpy as jnp
import pytest

from jaxrec.data.pipeline import Batches
from jaxrec.models.dlrm import DLRM
from jaxrec.profiling import op_events
from jaxrec.profiling.hlo import Module, Work
from jaxrec.profiling.op_events import Event, Line, Run
from jaxrec.profiling.regions import OTHER, REGIONS, Places, join, region_of
from jaxrec.training import setup, step

# Two products of a layer, forward and backward, fusions with and without names of their own, a lookup, an update.
PROGRAM = """\
HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias), {1, 2}: (3, {}, must-alias) }

%fused_a (param_0: f32[8,4]) -> f32[8,4] {
  %param_0 = f32[8,4]{1,0} parameter(0)
  %mul.1 = f32[8,4]{1,0} multiply(%param_0, %param_0), metadata={op_name="jit(step)/transpose(jvp(loss))/mul"}
  ROOT %add.1 = f32[8,4]{1,0} add(%mul.1, %param_0), metadata={op_name="jit(step)/gradient_sum/add"}
}

%fused_b (param_0.1: f32[8,4]) -> f32[8,4] {
  %param_0.1 = f32[8,4]{1,0} parameter(0)
  ROOT %max.1 = f32[8,4]{1,0} maximum(%param_0.1, %param_0.1), metadata={op_name="jit(step)/jvp(top_mlp)/jit(relu)/max"}
}

%fused_gather (param_0.2: f32[100,4], param_1.2: s32[8,1]) -> f32[8,4] {
  %param_0.2 = f32[100,4]{1,0} parameter(0)
  %param_1.2 = s32[8,1]{1,0} parameter(1)
  ROOT %gather.1 = f32[8,4]{1,0} gather(%param_0.2, %param_1.2), offset_dims={1}
}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%fused_scatter (param_0.3: f32[100,4], param_1.3: s32[8,1], param_2.3: f32[8,4]) -> f32[100,4] {
  %param_0.3 = f32[100,4]{1,0} parameter(0)
  %param_1.3 = s32[8,1]{1,0} parameter(1)
  %param_2.3 = f32[8,4]{1,0} parameter(2)
  ROOT %scatter.1 = f32[100,4]{1,0} scatter(%param_0.3, %param_1.3, %param_2.3), to_apply=%add
}

ENTRY %main (table.1: f32[100,4], kernel.1: f32[4,4], ids.1: s32[8,1]) -> (f32[100,4], f32[4,4]) {
  %table.1 = f32[100,4]{1,0} parameter(0), metadata={op_name="state.tables"}
  %kernel.1 = f32[4,4]{1,0} parameter(1), metadata={op_name="state.dense[\\'top_mlp\\']/top_mlp"}
  %ids.1 = s32[8,1]{1,0} parameter(2)
  %lookup = f32[8,4]{1,0} fusion(%table.1, %ids.1), kind=kLoop, calls=%fused_gather, metadata={op_name="jit(step)/embedding_lookup/gather"}
  %dot.1 = f32[8,4]{1,0} dot(%lookup, %kernel.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/jvp(top_mlp)/dot_general"}
  %relu = f32[8,4]{1,0} fusion(%dot.1), kind=kLoop, calls=%fused_b
  %unnamed = f32[8,4]{1,0} copy(%relu)
  %spanning = f32[8,4]{1,0} fusion(%unnamed), kind=kLoop, calls=%fused_a, metadata={op_name="jit(step)/gradient_sum/add"}
  %dot.2 = f32[4,4]{1,0} dot(%lookup, %spanning), lhs_contracting_dims={0}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/transpose(jvp(top_mlp))/dot_general"}
  %lonely = s32[8,1]{1,0} add(%ids.1, %ids.1), metadata={op_name="jit(step)/add"}
  %updated = f32[100,4]{1,0} fusion(%table.1, %ids.1, %spanning), kind=kLoop, calls=%fused_scatter, metadata={op_name="jit(step)/embedding_update/scatter"}
  ROOT %tuple.1 = (f32[100,4]{1,0}, f32[4,4]{1,0}) tuple(%updated, %dot.2)
}
"""  # noqa: E501


def op(name: str, start: float, duration: float, run: int = 1, device: int = 0, module: str = "jit_step") -> Event:
    stats = {"hlo_op": name, "hlo_module": module, "program_id": 7, "run_id": run, "device_ordinal": device}
    return Event(name, start, duration, stats)


def hands_over(task: int, at: float) -> Event:
    return Event("ThreadpoolListener::Record", at, 0, {"_p": task})


def task(number: int, start: float, end: float) -> list[Event]:
    return [
        Event("ThreadpoolListener::StartRegion", start, 0, {"_c": number}),
        Event("ThreadpoolListener::StopRegion", end, 0, {}),
    ]


def executor(start: float, duration: float) -> Event:
    return Event("ThunkExecutor::Execute", start, duration, {})


# Thread 1 runs the program (task 1); dot.1 works on thread 2 as well (task 2, which hands task 3 back to thread 1).
# Thread 2 ends dot.1 inside task 2 and starts `relu` from there, which is not dot.1's time.
THREAD_1 = Line("/host:CPU", [
    *task(1, 0, 100), executor(0, 60), op("lookup", 10, 20), op("dot.1", 30, 10), hands_over(2, 35),
    *task(3, 110, 115),
])  # fmt: skip
THREAD_2 = Line("/host:CPU", [
    *task(2, 40, 90), hands_over(3, 45), executor(70, 20), op("relu", 72, 8), op("other", 82, 3, module="jit_other"),
])  # fmt: skip


def test_tasks_on_other_threads_are_the_time_of_the_operation_that_handed_them_over():
    times = op_events.op_times([THREAD_1, THREAD_2], "jit_step")
    run = Run(7, 1, 0)
    # Of task 2's 50, 20 are the executor's; `other` is another program's.
    assert times.time == {run: {"lookup": 20, "dot.1": 10 + (50 - 20) + 5, "relu": 8}}
    assert times.total == 20 + 45 + 8
    # The executor: 60 and 20 without what is nested.
    assert times.runtime == (60 - 30) + (20 - 8)
    assert times.wall[run] == 105 and times.begin[run] == 10
    # 10-40 on thread 1, 40-70 and 72-80 on thread 2, 110-115.
    assert times.busy[run] == 30 + 30 + 8 + 5


def test_operations_inside_operations_count_once():
    line = Line("/host:CPU", [op("loop", 0, 100), op("body", 20, 30), op("body", 60, 30), op("inner", 62, 5)])
    times = op_events.op_times([line])
    assert times.time[Run(7, 1, 0)] == {"loop": 40, "body": 55, "inner": 5}
    assert times.busy[Run(7, 1, 0)] == times.total == 100


def test_streams_of_a_device():
    def kernel(name: str, start: float, duration: float) -> Event:
        return Event("kernel", start, duration, {"hlo_op": name, "hlo_module": "jit_step"})

    lines = [
        Line("/device:GPU:1", [kernel("dot.1", 0, 5), kernel("relu", 5, 2), kernel("dot.1", 20, 7)], "Stream #13"),
        Line("/device:GPU:1", [kernel("dot.1", 0, 5), kernel("relu", 5, 2), kernel("dot.1", 20, 7)], "XLA Ops"),
        Line("/host:CPU", [op("dot.1", 0, 1000)]),
    ]
    times = op_events.op_times(lines, "jit_step")
    assert times.time == {Run(-1, 0, 1): {"dot.1": 5, "relu": 2}, Run(-1, 1, 1): {"dot.1": 7}}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("jit(step)/jvp(loss)/mul", ("loss", False)),
        ("jit(step)/transpose(jvp(loss))/mul", ("loss", True)),
        ("jit(step)/embedding_update/jit(_where)/select_n", ("embedding_update", False)),
        ("jit(step)/transpose(jvp(checkpoint))/rematted_computation/top_mlp/dot", ("top_mlp", True)),
        ("jit(step)/add", None),
        ("jit(step)/bottom_mlp_2/dot", None),
        ("jit(step)/add;jit(step)/clip/mul", ("clip", False)),
        ("", None),
    ],
)
def test_region_of_a_path(name, expected):
    assert region_of(name) == expected


def test_the_list_holds_every_region_of_step_and_model():
    assert set(REGIONS) == {*step.REGIONS, *DLRM.REGIONS, "clip"}


def test_places():
    places = Places(Module(PROGRAM))
    found = {name: places[name] for name in places._module.instructions}
    assert (found["relu"].region, found["relu"].backward, found["relu"].inferred) == ("top_mlp", False, False)
    assert (found["unnamed"].region, found["unnamed"].inferred) == ("top_mlp", True)
    assert (found["dot.2"].region, found["dot.2"].backward) == ("top_mlp", True)
    # The root's region, though half of it is the loss's backward pass.
    assert (found["spanning"].region, found["spanning"].backward) == ("gradient_sum", False)
    assert found["spanning"].spans == ("loss", "gradient_sum") and found["relu"].spans == ("top_mlp",)
    assert found["spanning"].foreign == 0.5 and found["relu"].foreign == 0
    # A parameter that is called like a region gives it to nobody.
    assert found["lonely"].region == OTHER
    assert places.present() == ("embedding_lookup", "top_mlp", "gradient_sum", "embedding_update")


def test_what_a_broadcast_makes_a_fusion_compute_again():
    program = """HloModule jit_step

%fused (param_0: f32[8,4], param_1: f32[]) -> f32[100,8,4] {
  %param_0 = f32[8,4]{1,0} parameter(0)
  %param_1 = f32[] parameter(1)
  %scale = f32[] multiply(%param_1, %param_1), metadata={op_name="jit(step)/gradient_sum/mul"}
  %scales = f32[8,4]{1,0} broadcast(%scale), dimensions={}
  %mul = f32[8,4]{1,0} multiply(%param_0, %scales), metadata={op_name="jit(step)/transpose(jvp(interaction))/mul"}
  ROOT %spread = f32[100,8,4]{2,1,0} broadcast(%mul), dimensions={1,2}, metadata={op_name="jit(s)/embedding_update/x"}
}

ENTRY %main (x: f32[8,4], y: f32[]) -> f32[100,8,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %y = f32[] parameter(1)
  ROOT %fusion.1 = f32[100,8,4]{2,1,0} fusion(%x, %y), kind=kLoop, calls=%fused
}
"""
    module = Module(program)
    counts = {part.name: n for part, n in module.evaluations(module.instructions["fusion.1"]).items()}
    assert (counts["spread"], counts["mul"], counts["scale"]) == (3200, 3200, 1)
    assert module.work("fusion.1") == Work(0, 3201, 32 * 4 + 4 + 3200 * 4, 0)
    place = Places(module)["fusion.1"]
    assert place.region == "embedding_update" and place.spans == ("interaction", "gradient_sum", "embedding_update")
    assert place.foreign == pytest.approx(3201 / 6401)


def test_planted_times_come_out():
    planted = {
        "lookup": 30, "dot.1": 50, "relu": 7, "unnamed": 3, "spanning": 20, "dot.2": 60, "lonely": 4, "updated": 25,
        "renamed": 1,
    }  # fmt: skip
    lines, at = [], 0.0
    for run in (1, 2, 3):
        for device in (0, 1):
            for name, time in planted.items():
                # Run 1 is the warm-up; device 1 takes twice the time.
                lines.append(
                    Line(
                        "/host:CPU", [op(name, at, 1e6 * time * (1 + device) * (100 if run == 1 else run), run, device)]
                    )
                )
                at += 1e9
    regions = join(Module(PROGRAM), op_events.op_times(lines, "jit_step"), skip=1)
    total = sum(planted.values())
    assert list(regions.devices) == [0, 1]
    first, second = regions.devices[0], regions.devices[1]
    assert list(first) == ["embedding_lookup", "top_mlp", "gradient_sum", "embedding_update", OTHER]
    assert first["top_mlp"].forward == (2 * 60, 3 * 60) and first["top_mlp"].backward == (2 * 60, 3 * 60)
    assert first["embedding_lookup"].samples == (60, 90) and first["embedding_update"].samples == (50, 75)
    assert second["gradient_sum"].samples == (80, 120)
    assert regions.mean()["gradient_sum"].samples == (60, 90)
    assert regions.op_place["dot.2"] == "top_mlp backward"
    assert regions.op_place["unnamed"] == "top_mlp forward inferred" and "renamed" not in regions.op_place
    # Everything adds up to the events' sum.
    assert regions.total_ms == pytest.approx(total * 2.5 * 1.5)
    assert sum(sum(r.samples) for d in regions.devices.values() for r in d.values()) == pytest.approx(total * 5 * 3)
    assert regions.mapped_share == pytest.approx(1 - 5 / total)
    assert list(regions.other_ms) == ["lonely", "renamed"] and list(regions.unknown_ms) == ["renamed"]
    assert regions.spanning_share == pytest.approx(20 / total)
    assert regions.foreign_share == pytest.approx(10 / total)
    assert regions.inferred_share == pytest.approx(3 / total)


def test_a_trace_of_another_program_is_an_error():
    with pytest.raises(ValueError, match="no operations of jit_step"):
        join(Module(PROGRAM), op_events.op_times([THREAD_1], "jit_another"))
    with pytest.raises(ValueError, match="begins with HloModule"):
        Module("something else")


def test_work_of_instructions():
    module = Module(PROGRAM)
    assert module.aliased == {0, 3}
    rows = 8 * 4 * 4
    # 8 rows of a table of 100 are read by their ids; the table is not.
    assert module.work("lookup") == Work(0, 0, 8 * 4 + rows, rows)
    assert module.work("dot.1") == Work(2 * 8 * 4 * 4, 0, rows + 64 + rows, 0)
    assert module.work("dot.2").product_flops == 2 * 4 * 4 * 8
    assert module.work("spanning") == Work(0, 2 * 32, 2 * rows, 0)
    # In place: ids and updates are read in order, rows are read and written.
    assert module.work("updated") == Work(0, 32, 8 * 4 + rows, 2 * rows)
    assert module.work("table.1") == Work()


def traced(function, arguments, folder, steps: int = 3):
    compiled = jax.jit(function).lower(*arguments).compile()
    jax.block_until_ready(compiled(*arguments))
    with jax.profiler.trace(str(folder)):
        for _ in range(steps):
            jax.block_until_ready(compiled(*arguments))
    module = Module(compiled.as_text())
    return join(module, op_events.op_times(op_events.read(folder), module.name))


@pytest.mark.parametrize("slow", ["bottom_mlp", "top_mlp"])
def test_a_slow_region_gets_the_time(slow, tmp_path):
    def loss(w, x):
        for region in ("bottom_mlp", "top_mlp"):
            with jax.named_scope(region):
                width = 1024 if region == slow else 16
                part = w[:width, :width]
                x = x.at[:, :width].set(jnp.tanh(jnp.dot(x[:, :width], part, precision="highest")))
        with jax.named_scope("loss"):
            return jnp.sum(x)

    def step(w, x):
        gradient = jax.grad(loss)(w, x)
        with jax.named_scope("dense_update"):
            return w - 0.1 * gradient

    regions = traced(step, (jnp.ones((1024, 1024)), jnp.ones((1024, 1024))), tmp_path)
    mean = regions.mean()
    times = {name: sum(time.samples) for name, time in mean.items()}
    assert max(times, key=times.__getitem__) == slow
    assert times[slow] > 0.5 * sum(times.values())
    assert min(mean[slow].forward) > 0 and min(mean[slow].backward) > 0
    assert regions.mapped_share >= 0.95


def test_the_step_is_mapped(tiny, tmp_path):
    """A whole training step on 1 device: nearly all of its time has a region, and updates have no backward pass."""
    config = tiny("training.batch_size=512")
    dataset = config.data.open("")
    program, dense = setup.build_program(config, dataset)
    state, window = setup.initial_state(program, dense), setup.new_window(program)
    shapes = setup.batch_shapes(dataset, 512, program)
    compiled = step.shard_train_step(program).lower(state, window, shapes).compile()
    batch = setup.put_batch(program)(Batches(dataset, "train", 512)[0].batch)
    state, window, done = compiled(state, window, batch)
    done.block_until_ready()
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(4):
            state, window, done = compiled(state, window, batch)
            done.block_until_ready()
    module = Module(compiled.as_text())
    times = op_events.op_times(op_events.read(tmp_path), module.name)
    regions = join(module, times, skip=1)
    assert regions.mapped_share >= 0.95 and not regions.unknown_ms
    (device,) = regions.devices.values()
    assert all(len(time.samples) == 3 for time in device.values())
    assert {"embedding_lookup", "bottom_mlp", "interaction", "top_mlp", "embedding_update"} <= set(device)
    for name, time in device.items():
        assert (sum(time.backward) > 0) == (name in ("bottom_mlp", "interaction", "top_mlp", "loss"))
    assert sum(sum(time.samples) for time in device.values()) == pytest.approx(3 * regions.total_ms)
    assert sum(regions.op_ms.values()) == pytest.approx(regions.total_ms)
    # The compiler counts whole tables that are gathered from, and nothing twice that a fusion computes again.
    work = Work()
    for name in module.instructions:
        work = work.plus(module.work(name), module.times(name))
    cost = compiled.cost_analysis()
    assert 0.5 * cost["flops"] < work.flops < 5 * cost["flops"]
    assert 0.5 * cost["bytes accessed"] < work.bytes < 1.2 * cost["bytes accessed"]


def test_no_trace_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no trace"):
        op_events.read(tmp_path)
