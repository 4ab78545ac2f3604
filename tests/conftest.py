"""Every test sees 8 simulated CPU devices, and no compile cache of the user's."""

import os

os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest
from absl import flags as absl_flags

from jaxrec import flags

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "standard")

ROOT = Path(__file__).parent.parent

# A model and data so small that a run takes its start-up time. Tables of 101 rows divide over no mesh.
TINY = (
    "data.train_rows=20000", "data.validation_rows=2000", "data.test_rows=1500", "data.tables=3", "data.rows=101",
    "data.dense=4", "data.users=40", "model.bottom_mlp=8,4", "model.top_mlp=8", "model.dropout=0.2", "embedding.dim=4",
    "training.batch_size=128", "training.log_every=8", "training.eval_every=10", "training.checkpoint_every=20",
    "training.steps=40", "training.seed=3", "schedule.warmup_steps=5",
)  # fmt: skip

# Three saves, of which the second and the third delete the one before.
SHORT = (
    "training.steps=12", "training.eval_every=4", "training.checkpoint_every=4", "training.log_every=4",
    "training.keep_last=1", "data.train_rows=4000", "data.validation_rows=256", "data.test_rows=256", "data.rows=2000",
)  # fmt: skip

# Runs a command, with the batches of its training split slowed down.
SLOW = """
import runpy, sys, time
from jaxrec.data.pipeline import Batches
fast, (module, seconds, first) = Batches.__getitem__, sys.argv[1:4]
def slow(self, k):
    time.sleep(float(seconds) * (self._shuffle and k >= int(first)))
    return fast(self, k)
Batches.__getitem__ = slow
del sys.argv[1:4]
runpy.run_module(module, run_name="__main__")
"""


@pytest.fixture(scope="session")
def tiny() -> Callable:
    """Returns `tiny(*assignments)`: the tiny config, changed."""
    from jaxrec.configs import catalogue, overrides

    return lambda *assignments: overrides.apply(catalogue.get("dlrm_synthetic"), [*TINY, *assignments])


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a command in another process: one device, a cache folder of the tests' own."""
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")}
    cache = str(tmp_path_factory.mktemp("cache"))
    return {**kept, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": cache, "JAX_PLATFORMS": "cpu"}


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def compile_cache(cache_folder: Path) -> Iterator[None]:
    """Compiles each program of this process's tests once: for modules that train the same model many times."""
    from jax.experimental.compilation_cache import compilation_cache

    from jaxrec.startup import enable_compile_cache

    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    enable_compile_cache(str(cache_folder))
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def short(tiny: Callable, tmp_path_factory: pytest.TempPathFactory, compile_cache: None) -> tuple[Any, Path]:
    """A config of few steps, and the folder of its run, which nothing befell; not to be changed."""
    from jaxrec.training.loop import Options, train

    workdir = tmp_path_factory.mktemp("short") / "run"
    train(tiny(*SHORT), Options(str(workdir), "", quiet=True))
    return tiny(*SHORT), workdir


@pytest.fixture(scope="session")
def command(environment: dict[str, str]) -> Callable[..., subprocess.Popen]:
    """Returns a function that starts a command in a process of its own.

    `command(module, *flags, slow=(seconds, first))`: training batches from `first` on take as many seconds each.
    """

    def start(module: str, *flags: str, slow: tuple[float, int] | None = None) -> subprocess.Popen:
        head: Sequence[str] = ("-m", module) if slow is None else ("-c", SLOW, module, *map(str, slow))
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, *head, *flags], cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True
        )

    return start


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., tuple[int, str, str]]:
    """Returns a function that runs a command in this process: (module, *flags) -> (status, out, err)."""

    def run(module: ModuleType, *argv: object) -> tuple[int, str, str]:
        define = getattr(flags, f"define_{module.__name__.rpartition('.')[2]}")
        known, before = set(absl_flags.FLAGS), signal.getsignal(signal.SIGTERM)
        monkeypatch.setattr(sys, "argv", ["jaxrec", *map(str, argv)])
        # A cache that is on for the whole process is not the command's to change.
        monkeypatch.setattr("jaxrec.startup.enable_compile_cache", lambda _: None)
        try:
            with pytest.raises(SystemExit) as end:
                flags.run_command(module.main, define)
        finally:
            signal.signal(signal.SIGTERM, before)
            logging.disable(logging.NOTSET)
            for name in set(absl_flags.FLAGS) - known:
                delattr(absl_flags.FLAGS, name)
        out, err = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return end.value.code, out, err

    return run


@pytest.fixture(scope="session")
def train_flags() -> Callable[..., list[str]]:
    """Returns `train_flags(workdir, *flags)`: those of a training command on the tiny config."""
    return lambda workdir, *flags: [
        "--config=dlrm_synthetic", f"--workdir={workdir}", *(f"--set={a}" for a in TINY), *flags
    ]  # fmt: skip


@pytest.fixture(scope="session")
def straight(command: Callable, train_flags: Callable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workdir of the tiny run, never interrupted, in a process of its own."""
    workdir = tmp_path_factory.mktemp("straight") / "run"
    process = command("jaxrec.train", *train_flags(workdir))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return workdir


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> Iterator[Callable[..., str]]:
    """Returns `refused(config, workdir)`: trains as the command does; it must end with 2 and one sentence, returned."""
    from jaxrec import flags
    from jaxrec.training.loop import Options, train

    def run(config: Any, workdir: Path) -> str:
        capsys.readouterr()
        monkeypatch.setattr("sys.argv", ["train"])
        with pytest.raises(SystemExit) as end:
            flags.run_command(lambda: train(config, Options(str(workdir), "", quiet=True))[1], lambda: None)
        err = capsys.readouterr().err
        assert end.value.code == 2, err
        assert err.startswith("error: ") and err.count("\n") == 1, err
        assert not [r for r in caplog.records if r.levelno >= logging.ERROR], "libraries have logged errors, too"
        return err

    before = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, before)
    logging.disable(logging.NOTSET)
