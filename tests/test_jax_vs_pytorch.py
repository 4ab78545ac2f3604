"""The study of both frameworks: jaxrec's side runs without PyTorch, and the report says what its record says."""

import copy

import pytest

from experiments.jax_vs_pytorch import report, run
from experiments.jax_vs_pytorch.sides import Case, side
from jaxrec.checks import UserError
from jaxrec.reporting.record import row

CASE = "dlrm_balanced, zipf, adagrad"


@pytest.fixture(scope="module")
def jax_side():
    return side(Case("jax", "dlrm_balanced", "adagrad", {**run.TINY, "data.train_rows": 1024}), given=False)


def test_jaxs_side_answers(jax_side, tmp_path):
    assert jax_side.compile() > 0
    assert [s["products"] for s in jax_side.settings()] == ["eigen", "default"]
    assert jax_side.resident(2) > 0 and jax_side.fed(2) > 0 and jax_side.put(3) > 0
    before = jax_side.evaluate()
    assert jax_side.train(0, 8) > 0
    assert jax_side.evaluate() != before
    found = jax_side.profile(str(tmp_path), 2)
    assert found["mapped"] > 0.95 and (tmp_path / found["trace"]).exists()
    assert all(len(t["forward"]) == len(t["backward"]) == 2 for t in found["wall_ms"].values())


def test_a_setting_is_another_program(jax_side):
    program = jax_side._stepper
    jax_side.use(jax_side.settings()[0])
    assert jax_side._stepper is program
    jax_side.use(jax_side.settings()[1])
    assert not jax_side._stepper.program.compiler_options
    jax_side.use(jax_side.settings()[0])
    assert jax_side._stepper.program.compiler_options


def test_a_device_that_jax_does_not_have_is_refused():
    with pytest.raises(UserError, match="--device is cuda, for which JAX must have a gpu, but it has a cpu"):
        side(Case("jax", "dlrm_balanced", "adagrad", run.TINY, "cuda"), given=False)


def test_the_config_is_that_of_the_peer():
    config = Case("jax", "dlrm_balanced", "rowwise_adagrad", run.TINY).settled()
    dataset = config.data.open("")
    assert config.embedding.optimizer.name == "rowwise_adagrad" and config.model.top_mlp == (16,)
    assert len(dataset.schema.tasks) == 1 and dataset.splits["train"][0]["labels"].shape[1] == 1


def test_stacks_that_cannot_be_imported_are_named(monkeypatch, capsys):
    ended = {"import torch": (0, ""), "import torch; import fbgemm_gpu": (1, "Traceback\nImportError: in /a/b/c.so")}

    def done(command, **_):
        status, error = ended[command[-1]]
        return run.subprocess.CompletedProcess(command, status, "", error)

    monkeypatch.setattr(run.subprocess, "run", done)
    left, absent = run._installed(["pytorch-eager", "pytorch-fbgemm"], "cpu")
    assert left == ["pytorch-eager"] and absent == {"pytorch-fbgemm": "ImportError: in PATH"}
    assert "pytorch-fbgemm: left out (ImportError: in PATH)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"rounds": 0}, "--rounds is 0"),
        ({"seconds": 0.0}, "--seconds is 0"),
        ({"stacks": ("tensorflow",)}, "--stacks has 'tensorflow'"),
        ({"stacks": ()}, "--stacks is empty"),
        ({"device": "tpu"}, "--device is 'tpu'"),
    ],
)
def test_wrong_options_are_refused(changes, said):
    right = {"rounds": 1, "seconds": 1.0, "device": "cpu", "stacks": ("pytorch-eager",)}
    run.Options(**right)
    with pytest.raises(UserError, match=said):
        run.Options(**{**right, **changes})


def record(jax_ms, eager_ms, compiled_ms):
    """A record whose numbers are known."""
    rows = []
    for stack, ms in (("jax", jax_ms), ("pytorch-eager", eager_ms), ("pytorch-compiled", compiled_ms)):
        rows += [
            row("step", stack, CASE, "step", "ms", ms),
            row("end to end", stack, CASE, "step", "ms", ms),
            row("end to end", stack, CASE, "rate", "samples/s", [1e3 * 4096 / x for x in ms]),
            row("to the device", stack, CASE, "batch", "ms", [0.5]),
            row("peak memory", stack, CASE, "resident_size", "GiB", [2.0]),
            row("quality", stack, "dlrm_movielens", "seconds", "s", [1.0, 2.0]),
            row("quality", stack, "dlrm_movielens", "ne", "1", [0.9, 0.8 if stack == "jax" else 0.85]),
        ]

    def times(**of):
        return {
            "wall_ms": {n: {"forward": [f], "backward": [b]} for n, (f, b) in of.items()},
            "mapped": 1,
            "spanning": 0,
        }

    bound = {"bound_ms": 10.0, "limited_by": "products"}
    jax = times(embedding_lookup=(9, 0), top_mlp=(20, 40))
    jax |= {"bounds": {n: bound for n in jax["wall_ms"]}, "ceilings": {"products": 2e11}, "model_flops": 1e10}
    return {
        "study": "jax_vs_pytorch", "argv": ["run.py"], "load_average": [1.0], "rows": rows, "gates": {}, "absent": {},
        "environment": {"cpu": "a CPU", "cores": 2, "memory_gib": 24, "platform": "cpu", "versions": {"jax": "0.10"}},
        "regions": {
            f"{CASE}, jax": jax, f"{CASE}, pytorch-compiled": times(embedding_lookup=(2, 0), top_mlp=(21, 42)),
        },
        "settings": {}, "sizes": {"dlrm_balanced": {"batch": 4096, "tables": 26, "rows": 4, "bag": 1, "dim": 16}},
        "quality": {"config": "dlrm_movielens", "steps": [40, 80], "instead": ""}, "rounds": 2, "seconds": 1.0,
        "threads": 2, "resident_batches": 8, "omp_wait_policy": "passive", "trace": False, "stacks": [],
        "device": "cpu",
    }  # fmt: skip


def test_the_ratio_is_of_medians_to_the_fastest_peer():
    found = record([100, 110, 90], [150, 165, 135], [120, 120, 120])
    (best,) = report.best_peers(found)
    assert (best.peer, best.ratio) == ("pytorch-compiled", 1.2)
    assert (best.low, best.high) == (120 / 110, 120 / 90)
    assert "optimizers: balanced 1.20x." in report.finding(found)
    text = report.render(found)
    assert "| Adagrad, zipf ids | 1.20x (1.09 to 1.33), pytorch-compiled |" in text
    assert "No PyTorch stack is faster" in text and "1.50x (1.50 to 1.50)" in text
    # 10 GFLOPs at 200 GFLOP/s take 50 ms.
    assert "at least 50.0 ms" in text and "jax 50%" in text


def test_a_loss_is_said_with_its_region():
    found = record([100, 110, 90], [150, 165, 135], [80, 95, 70])
    text = report.render(found)
    assert "balanced, zipf ids, Adagrad: pytorch-compiled, 0.80x (0.78 to 0.86)" in text
    assert "behind by the most in embedding_lookup (+7.0 ms)" in text and "within the spread" not in text
    close = copy.deepcopy(found)
    theirs = [r for r in close["rows"] if r["stack"] == "pytorch-compiled" and r["metric"] == "step"]
    theirs[-1]["samples"][0] = 101.0
    assert "within the spread of the turns" in report.render(close)


def test_jaxrec_alone_claims_nothing():
    found = record([1.0], [1.0], [1.0])
    found["rows"] = [r for r in found["rows"] if r["stack"] == "jax"]
    text = report.render(found)
    assert "No PyTorch stack was measured" in text and "is faster than" not in text and "largest difference" not in text


def test_time_to_the_target_is_of_what_all_reach():
    text = report.render(record([1], [1], [1]))
    assert "all stacks reach, 0.8500" in text
    assert "| jax | 0.8000 | 80 | 0.8000 | 2.0 |" in text


def test_every_picture_is_drawn():
    assert set(report.figures(record([1.0], [2.0], [3.0]))) == {"rate.svg", "regions_balanced.svg", "quality.svg"}
