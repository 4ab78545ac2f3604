"""Several processes: equal to one, ended together, continued."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from cover import FULL
from train_layouts import LAYOUTS, NARROW

ROOT = Path(__file__).parent.parent
# Over which one and two processes are compared; all 200 take a minute and a half more.
STEPS = 200 if FULL else 60
TOGETHER = ("--mesh=data:2,model:2", "--embedding_sharding=row", "--dense_sharding=fsdp")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as s:
        return s.getsockname()[1]


def lines(workdir: Path, kind: str) -> list[dict]:
    path = workdir / "metrics.jsonl"
    if not path.exists():
        return []
    parsed = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return [line for line in parsed if line["kind"] == kind]


@pytest.fixture(scope="module")
def trained(environment, tmp_path_factory) -> dict[int, Path]:
    """By number of processes: the folder of the runs of all layouts, on 4 devices in all."""
    folders = {}
    for count in (2, 1):
        folder, port = tmp_path_factory.mktemp(f"by{count}"), free_port()
        program = ROOT / "tests" / "train_layouts.py"
        runs = [
            subprocess.Popen(
                [sys.executable, program, folder, *map(str, (STEPS, count, i, port))],
                cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for i in range(count)
        ]  # fmt: skip
        for run in runs:
            out, _ = run.communicate(timeout=600)
            assert run.returncode == 0, out
        folders[count] = folder
    return folders


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_two_processes_equal_one(trained, layout):
    two, one = (lines(trained[count] / layout, "train") for count in (2, 1))
    assert [line["step"] for line in two] == [line["step"] for line in one] == list(range(1, STEPS + 1))
    losses = np.array([[line["loss"] for line in run] for run in (two, one)])
    # Where weights are rounded to few bits, an ulp of float32 may in time decide how; the losses then part, by less
    # than a step of bfloat16.
    np.testing.assert_allclose(losses[0], losses[1], rtol=2.0**-8 if layout in NARROW else 1e-6, atol=0)
    np.testing.assert_allclose(losses[0][:10], losses[1][:10], rtol=1e-6, atol=0)
    assert len(set(losses[0])) > 0.95 * STEPS
    ours, theirs = (json.loads((trained[count] / layout / "summary.json").read_text()) for count in (2, 1))
    assert (ours["processes"], theirs["processes"]) == (2, 1)
    for split in ("validation", "test"):
        for name, value in theirs["metrics"][split].items():
            assert ours["metrics"][split][name] == pytest.approx(value, rel=1e-2 if layout in NARROW else 1e-5), name
    assert ours["truncated_ids"] == theirs["truncated_ids"]
    assert len(list((trained[2] / layout).glob("events.*"))) == 1


@pytest.fixture
def pair(command, train_flags):
    """Returns a function that starts both processes of a run: (workdir, *flags) -> processes."""
    started = []

    def start(workdir: Path, *flags: str, slow=None, module: str = "jaxrec.train") -> list[subprocess.Popen]:
        port = free_port()
        of_run = train_flags(workdir, *TOGETHER) if module == "jaxrec.train" else [f"--workdir={workdir}"]
        runs = [
            command(
                module, *of_run, "--simulate_cpu_devices=2", f"--coordinator=127.0.0.1:{port}", "--num_processes=2",
                f"--process_id={i}", *flags, slow=slow,
            )
            for i in range(2)
        ]  # fmt: skip
        started.extend(runs)
        return runs

    yield start
    for run in started:
        run.kill()
        run.communicate()


def wait_for(condition, *runs: subprocess.Popen, timeout: float = 120) -> None:
    begin = time.monotonic()
    while not condition():
        assert all(run.poll() is None for run in runs), [run.communicate() for run in runs]
        assert time.monotonic() - begin < timeout, "it did not come about"
        time.sleep(0.1)


def saved(workdir: Path) -> list[int]:
    folder = workdir / "checkpoints"
    return sorted(int(p) for p in os.listdir(folder) if p.isdecimal()) if folder.exists() else []


@pytest.fixture(scope="module")
def uninterrupted(command, train_flags, tmp_path_factory) -> Path:
    """The same run on one process of four devices."""
    workdir = tmp_path_factory.mktemp("uninterrupted") / "run"
    run = command("jaxrec.train", *train_flags(workdir, *TOGETHER, "--simulate_cpu_devices=4"))
    _, err = run.communicate(timeout=120)
    assert run.returncode == 0, err
    return workdir


def assert_continues(pair, workdir: Path, uninterrupted: Path, step: int) -> None:
    runs = pair(workdir)
    outs = [run.communicate(timeout=120) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outs
    assert f"resumed     from step {step}" in outs[0][1] and "resumed" not in outs[1][1]
    assert "steps       40" in outs[0][0] and "steps       40" not in outs[1][0]
    for kind in ("train", "validation"):
        ours, theirs = lines(workdir, kind), lines(uninterrupted, kind)
        assert [line["step"] for line in ours] == [line["step"] for line in theirs]
        for a, b in zip(ours, theirs, strict=True):
            name = "loss" if kind == "train" else "ne"
            assert a[name] == pytest.approx(b[name], rel=1e-6)


@pytest.mark.parametrize("victim", [1, 0])
def test_a_lost_process_ends_the_other_and_the_same_command_continues(pair, uninterrupted, tmp_path, victim):
    runs = pair(tmp_path, slow=(60, 28))
    wait_for(lambda: lines(tmp_path, "train")[-1:] and lines(tmp_path, "train")[-1]["step"] == 24, *runs)
    wait_for(lambda: 20 in saved(tmp_path), *runs)
    begin = time.monotonic()
    runs[victim].send_signal(signal.SIGKILL)
    _, err = runs[1 - victim].communicate(timeout=60)
    assert time.monotonic() - begin < 60
    assert runs[1 - victim].returncode == 1, err
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (
        len(said) == 1 and f"error: process {victim} was lost" in said[0] and "the same command continues" in said[0]
    ), err
    assert_continues(pair, tmp_path, uninterrupted, 20)


def test_a_signal_to_one_stops_all_after_the_same_step(pair, uninterrupted, tmp_path):
    runs = pair(tmp_path, slow=(0.3, 8))
    wait_for(lambda: lines(tmp_path, "train"), *runs)
    runs[1].send_signal(signal.SIGTERM)
    outs = [run.communicate(timeout=60) for run in runs]
    assert [run.returncode for run in runs] == [143, 143], outs
    (step,) = {int(err.split("after step ")[1].split(";")[0]) for _, err in outs if "after step " in err}
    assert saved(tmp_path)[-1] == step < 40
    assert_continues(pair, tmp_path, uninterrupted, step)
    # Two processes evaluate it, too.
    runs = pair(tmp_path, "--split=test", module="jaxrec.evaluate")
    outs = [run.communicate(timeout=120) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outs
    ours = json.loads(outs[0][0].splitlines()[-1])
    theirs = json.loads((uninterrupted / "summary.json").read_text())["metrics"]["test"]
    assert ours["rows"] == 1500 and ours["ne"] == pytest.approx(theirs["ne"], rel=1e-6)
    assert "{" not in outs[1][0]


def test_an_error_of_one_ends_all_with_its_sentence(pair, tmp_path):
    """A file where the workdir should be: only process 0 looks."""
    (tmp_path / "file").write_text("")
    runs = pair(tmp_path / "file")
    outs = [run.communicate(timeout=60) for run in runs]
    assert [run.returncode for run in runs] == [2, 2], outs
    for _, err in outs:
        said = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(said) == 1 and "which is a file, but must be a folder" in said[0], err
        assert "Traceback" not in err


def test_processes_must_be_started_alike(command, train_flags, tmp_path):
    port = free_port()
    runs = [
        command("jaxrec.train", *train_flags(tmp_path, *TOGETHER), "--simulate_cpu_devices=2", "--num_processes=2",
                f"--coordinator=127.0.0.1:{port}", f"--process_id={i}", f"--steps={40 + i}")
        for i in range(2)
    ]  # fmt: skip
    outs = [run.communicate(timeout=60) for run in runs]
    assert [run.returncode for run in runs] == [2, 2], outs
    for _, err in outs:
        said = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(said) == 1 and "Traceback" not in err
        assert "process 1 was started otherwise than process 0 (config.training.steps 40 -> 41)" in said[0]


def test_the_mesh_must_use_all_processes(pair, tmp_path):
    runs = pair(tmp_path, "--mesh=data:2")
    outs = [run.communicate(timeout=60) for run in runs]
    assert [run.returncode for run in runs] == [2, 2], outs
    assert all("2 processes have 4 together" in err and "--mesh=data:4 does" in err for _, err in outs), outs


CLUSTERS = {
    "SLURM": lambda i, port: {
        # JAX derives the port from the job's number.
        "SLURM_JOB_ID": str(port), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2", "SLURM_PROCID": str(i),
        "SLURM_LOCALID": str(i),
    },
    "Open MPI": lambda i, port: {
        "OMPI_MCA_orte_hnp_uri": f"{port << 16}.0;tcp://127.0.0.1:1", "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": str(i), "OMPI_COMM_WORLD_LOCAL_RANK": str(i),
    },
    "variables": lambda i, port: {
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(i),
    },
}  # fmt: skip


@pytest.mark.parametrize("cluster", list(CLUSTERS))
def test_processes_find_each_other(environment, tmp_path, cluster):
    program = (
        "from absl import flags; from jaxrec import flags as f, processes; f.define_common(); import sys; "
        "flags.FLAGS(sys.argv); f.prepare_process(); "
        "print(processes.count(), processes.exchange(processes.index() + 10)); processes.leave()"
    )
    asked = [] if cluster == "variables" else ["--distributed=auto"]
    port = free_port()
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", program, *asked, "--simulate_cpu_devices=1"], cwd=ROOT, text=True,
            env=environment | CLUSTERS[cluster](i, port), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for i in range(2)
    ]  # fmt: skip
    outs = [run.communicate(timeout=60) for run in runs]
    assert [out.splitlines()[-1] for out, _ in outs] == ["2 [10, 11]"] * 2, outs
    assert [run.returncode for run in runs] == [0, 0]


def test_without_a_cluster_auto_says_what_to_name(command, train_flags, tmp_path):
    for given in (["--distributed=auto"], ["--coordinator=localhost:1234", "--num_processes=2"]):
        run = command("jaxrec.train", *train_flags(tmp_path, *given))
        _, err = run.communicate(timeout=60)
        assert run.returncode == 2
        said = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(said) == 1 and "Traceback" not in err
        assert "JAX detects no cluster here" in said[0] and "name all three" in said[0]


def test_a_folder_that_cannot_hold_a_checkpoint_ends_all(pair, command, train_flags, tmp_path):
    """`checkpoints` becomes a file while the run goes on; with one process and with two."""
    for count in (1, 2):
        workdir = tmp_path / str(count)
        slow = (0.15, 21)
        runs = pair(workdir, slow=slow) if count == 2 else [command("jaxrec.train", *train_flags(workdir), slow=slow)]
        wait_for(lambda w=workdir: 20 in saved(w), *runs)
        (workdir / "checkpoints").rename(workdir / "old")
        (workdir / "checkpoints").write_text("")
        outs = [run.communicate(timeout=60) for run in runs]
        assert [run.returncode for run in runs] == [2] * count, outs
        for _, err in outs:
            said = [line for line in err.splitlines() if line.startswith("error: ")]
            assert len(said) == 1 and "it is no longer a folder that can be written" in said[0], err
            assert "Traceback" not in err


@pytest.mark.parametrize("wrong", ["--resume=must", "--step=7"])
def test_what_all_processes_meet_ends_them_alike(pair, uninterrupted, tmp_path, wrong):
    runs = pair(tmp_path, wrong) if wrong == "--resume=must" else pair(uninterrupted, wrong, module="jaxrec.evaluate")
    outs = [run.communicate(timeout=60) for run in runs]
    assert [run.returncode for run in runs] == [2, 2], outs
    for _, err in outs:
        said = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(said) == 1 and wrong.split("=")[0] in said[0] and "Traceback" not in err


def test_a_process_lost_at_the_end_is_named_or_not_missed(pair, tmp_path):
    """Process 0 is stopped and killed when it has printed its summary: the other ends, without a trace."""
    runs = pair(tmp_path)
    wait_for((tmp_path / "summary.json").exists)
    runs[0].kill()
    _, err = runs[1].communicate(timeout=60)
    assert runs[1].returncode in (0, 1) and "Traceback" not in err and "stack trace" not in err, err


def test_strangers_at_the_port_hold_up_nobody(environment):
    """Connections to the watch's port that say nothing, or nonsense, from when it opens."""
    program = (
        "import socket, sys, threading, time; from jaxrec import processes; import jax; "
        "jax.config.update('jax_num_cpu_devices', 1); real = processes._server; held = []\n"
        "def opened(port):\n"
        "    server = real(port)\n"
        "    for words in (b'', b'hello\\n') if port == 0 else ():\n"
        "        stranger = socket.create_connection(('127.0.0.1', server.getsockname()[1]))\n"
        "        stranger.sendall(words); held.append(stranger)\n"
        "    return server\n"
        "processes._server = opened\n"
        "processes.start(f'127.0.0.1:{sys.argv[1]}', 2, int(sys.argv[2])); begin = time.monotonic()\n"
        "print(processes.exchange(processes.index()), flush=True); processes.leave()"
    )
    port = free_port()
    runs = [
        subprocess.Popen([sys.executable, "-c", program, str(port), str(i)], cwd=ROOT, env=environment, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for i in range(2)
    ]  # fmt: skip
    outs = [run.communicate(timeout=60) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outs
    assert [out.splitlines()[-1] for out, _ in outs] == ["[0, 1]"] * 2


def test_devices_must_be_equally_many(command, train_flags, tmp_path):
    port = free_port()
    runs = [
        command("jaxrec.train", *train_flags(tmp_path, *TOGETHER), f"--simulate_cpu_devices={1 + 2 * i}",
                f"--coordinator=127.0.0.1:{port}", "--num_processes=2", f"--process_id={i}")
        for i in range(2)
    ]  # fmt: skip
    outs = [run.communicate(timeout=60) for run in runs]
    assert [run.returncode for run in runs] == [2, 2], outs
    assert all("but have: process 0 1, process 1 3" in err and "Traceback" not in err for _, err in outs), outs
