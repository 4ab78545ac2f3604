"""The kernel's C++ core under sanitizers, by a driver without XLA; and its installation with and without a compiler."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from cover import FULL

from jaxrec.checks import UserError
from jaxrec.embeddings import engines
from jaxrec.kernels.embedding_bag import library

ROOT = Path(__file__).parent.parent
CORE = ROOT / "jaxrec/kernels/embedding_bag/cpu"
COMPILER = shutil.which(os.environ.get("CXX", "c++"))

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")


@needs_compiler
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_core_under_sanitizers(sanitizers, tmp_path):
    program = tmp_path / "driver"
    build = [
        str(COMPILER), "-std=c++17", "-O1", "-g", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
        f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", f"-I{CORE}",
        str(ROOT / "tests/embedding_bag_driver.cc"), str(CORE / "core.cc"), "-lpthread", "-o", str(program),
    ]  # fmt: skip
    made = subprocess.run(build, capture_output=True, text=True)
    if made.returncode and "cannot find" in made.stderr:
        pytest.skip(f"the compiler has no runtime for -fsanitize={sanitizers}")
    assert made.returncode == 0, made.stderr[-2000:]
    cases = 1000 if FULL else 25
    ran = subprocess.run([str(program), str(cases)], capture_output=True, text=True)
    if "unexpected memory mapping" in ran.stderr:  # ThreadSanitizer and a kernel's layout of addresses.
        pytest.skip(f"-fsanitize={sanitizers} does not run on this kernel")
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout == f"{cases} cases\n"


@pytest.mark.parametrize("compiler", [pytest.param("", marks=needs_compiler), "no-such-compiler"])
def test_wheel_holds_the_libraries_where_there_is_a_compiler(compiler, tmp_path):
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "jaxrec", source / "jaxrec", ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    env = os.environ | ({"CC": compiler, "CXX": compiler} if compiler else {}) | {"JAXREC_KERNEL_LEVELS": "baseline"}
    wheel = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w", str(tmp_path)]
    subprocess.run([*wheel, str(source)], env=env, check=True, capture_output=True)
    (path,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(path).namelist()
    assert "jaxrec/train.py" in names
    libraries = [n for n in names if Path(n).name.startswith("_cpu_")]
    assert len(libraries) == (0 if compiler else 1)


def test_without_the_library_a_run_says_so(monkeypatch):
    monkeypatch.setattr(library, "path_of", lambda level: None)
    library.load.cache_clear()
    try:
        engine, path = engines.choose("auto", "cpu")
        assert engine == "xla" and "instead of the compiled kernel: none is installed" in path
        with pytest.raises(
            UserError, match=r"--embedding_kernel is 'compiled', but none is installed .* 'xla' or 'auto'"
        ):
            engines.choose("compiled", "cpu")
    finally:
        library.load.cache_clear()


def test_a_library_that_cannot_be_loaded_is_not_used(monkeypatch, tmp_path):
    broken = tmp_path / "_cpu_baseline.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(library, "path_of", lambda level: broken)
    library.load.cache_clear()
    try:
        assert "it cannot be loaded (OSError" in engines.choose("auto", "cpu")[1]
    finally:
        library.load.cache_clear()


@pytest.mark.skipif(bool(library.load()), reason=f"the compiled kernel: {library.load()}")
@pytest.mark.parametrize("share", [0.0001, 0.1, 0.5, 0.999])
def test_a_library_that_was_half_written_is_not_loaded(monkeypatch, tmp_path, share):
    whole = library.path_of(library.installed_level())
    assert whole is not None and library._is_whole(whole)
    part = tmp_path / "part.so"
    data = whole.read_bytes()
    part.write_bytes(data[: int(len(data) * share)])
    monkeypatch.setattr(library, "path_of", lambda level: part)
    library.load.cache_clear()
    try:
        assert "it cannot be loaded (the file is shorter than it says" in engines.choose("auto", "cpu")[1]
    finally:
        library.load.cache_clear()


def test_other_devices_take_xla():
    assert engines.choose("auto", "gpu")[0] == "xla" == engines.choose("xla", "cpu")[0]
    with pytest.raises(UserError, match="it is for CPUs, and the devices are gpu"):
        engines.choose("compiled", "gpu")
    with pytest.raises(UserError, match="--embedding_kernel is 'fast'"):
        engines.choose("fast", "cpu")
