"""Checkpoints: one logical array per table, whatever mesh and sharding wrote them.

A checkpoint is a flat tree of host arrays: `dense/<path>` and `optimizer/<path>` for the dense part, and for each table
`tables/<name>/weights` and `tables/<name>/<slot>`, rows in order. Its metadata hold the run's identity, `Progress` and
checksums of the arrays and of the metadata: where a stored bit has changed, Orbax and TensorStore mostly read other
numbers without complaint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from jaxrec import processes
from jaxrec.checks import UserError, require
from jaxrec.embeddings import tables as tables_lib
from jaxrec.fsdp import unpack
from jaxrec.mesh import to_host
from jaxrec.training.checksums import checksum, sealed, unsealed
from jaxrec.training.config import describe, differences
from jaxrec.training.setup import place_dense, replicate
from jaxrec.training.state import LossScale, TrainState
from jaxrec.training.step import Program
from jaxrec.training.workdir import FOLDER, read_json, write_json

# Beside the arrays of a checkpoint: progress that was made after they were saved.
PROGRESS_FILE = "progress.json"
# Bytes that a checkpoint takes beside its arrays, at most: of some 2 kB an array.
_BESIDE = 2**20


@dataclasses.dataclass
class Progress:
    """What a resumed run must know beyond the arrays.

    Attributes:
      batches: Training batches consumed: the next one is this of the endless sequence of batches.
      evaluated_step: The step of the last finished evaluation, or -1.
      best_step: The step of the best validation NE, or -1.
      best_ne: That NE.
      worse: Evaluations since then.
      window: The sums of the steps since the last metric line: `state.Window`.
    """

    batches: int = 0
    evaluated_step: int = -1
    best_step: int = -1
    best_ne: float = math.inf
    worse: int = 0
    window: tuple[float, ...] = ()

    def out_of_patience(self, patience: int) -> bool:
        """Whether the run stops early where `--patience` is `patience`."""
        return 0 < patience <= self.worse


@dataclasses.dataclass
class _KeepLastAndBest:
    """Orbax's preservation policy: the last `last` checkpoints and the best."""

    last: int
    best_step: int = -1

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        del context
        recent = {c.step for c in sorted(checkpoints, key=lambda c: c.step)[-self.last :]}
        return [c.step in recent or c.step == self.best_step for c in checkpoints]


class Checkpoints:
    """The checkpoints of a workdir. Saving copies to the host, then writes in the background, atomically.

    With several processes every one must make the same calls, as Orbax wants it; process 0 writes, and all read. What
    is saved passes through the memory of process 0.
    """

    def __init__(self, workdir: str, keep_last: int, *, for_training: bool = True):
        """Opens the folder; `for_training` removes what an interrupted save has left, which may be a running one's.

        Raises:
          UserError: It cannot be opened.
        """
        self._folder = Path(workdir).absolute() / FOLDER
        self._policy = _KeepLastAndBest(keep_last)
        require(self._folder.is_dir() or not self._folder.exists(), f"{self._folder} is a file, but must be a folder")

        def opened() -> Any:
            try:
                with _one_error():
                    return ocp.training.Checkpointer(
                        str(self._folder), preservation_policy=self._policy, cleanup_tmp_directories=for_training
                    )
            except OSError as e:
                raise UserError(
                    f"{self._folder} cannot be used ({e.strerror or e}), but must be a folder that can be written"
                ) from e
            except ValueError as e:  # Orbax reads the metadata of all checkpoints, and does not say of which.
                raise UserError(
                    f"{self._folder} holds a checkpoint that cannot be read ({_reason(e)}): {self._first_unreadable()}"
                ) from e

        self._orbax = processes.together(opened)
        self._saving: Any = None

    @property
    def steps(self) -> list[int]:
        return sorted(c.step for c in self._orbax.checkpoints)

    def save(self, program: Program, state: TrainState, progress: Progress, identity: dict[str, Any]) -> int:
        """Starts saving; returns the step. Of a step that is saved already only the progress is written anew."""
        self.wait()
        step = int(state.step)
        self._policy.best_step = progress.best_step
        stored = dataclasses.asdict(progress)
        stored["best_ne"] = None if math.isinf(progress.best_ne) else progress.best_ne  # JSON has no infinity.
        if step in self.steps:
            processes.on_first(lambda: write_json(self._folder / str(step) / PROGRESS_FILE, sealed(progress=stored)))
            self.delete_old(progress.best_step)
            return step
        arrays = to_arrays(program, state)
        processes.on_first(lambda: self._require_room(sum(a.nbytes for a in arrays.values())))
        checksums = {name: checksum(a) for name, a in arrays.items()} if processes.is_first() else {}
        metadata: Any = sealed(identity=identity, progress=stored, checksums=checksums)
        with self._written():
            self._saving = self._orbax.save_async(step, arrays, custom_metadata=metadata, force=True)
        return step

    def _require_room(self, size: int) -> None:
        """Raises UserError where `size` bytes cannot be written: then Orbax's processes would wait for each other."""
        usable = self._folder.is_dir() and os.access(self._folder, os.W_OK | os.X_OK)
        require(usable, self._not_written("it is no longer a folder that can be written"))
        size += _BESIDE
        free = shutil.disk_usage(self._folder).free
        require(free > size, self._not_written(f"it takes up to {size:,} bytes, and {free:,} are free"))

    def wait(self) -> None:
        """Returns once what was begun is written.

        Raises:
          UserError: It could not be written.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            with self._written():
                saving.result()

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        """Raises UserError where what is done within fails; what Orbax raises depends on which of its parts met it."""
        try:
            yield
        except (OSError, ValueError, RuntimeError) as e:
            raise UserError(self._not_written(_reason(e))) from e

    def _not_written(self, why: str) -> str:
        # Not `steps`: during a save that lacks what is to be deleted after it.
        saved = [int(p.name) for p in self._folder.glob("[0-9]*") if p.name.isdecimal()]
        kept = f"checkpoint {max(saved)} is whole" if saved else "none was saved before"
        return (
            f"the checkpoint could not be written to {self._folder}: {why}; {kept}: make room or mend that folder, and "
            "the same command continues"
        )

    def progress(self, step: int, identity: dict[str, Any]) -> Progress:
        """Returns the progress stored with a checkpoint.

        Raises:
          UserError: It cannot be read, or a run of another identity wrote it.
        """
        metadata, path = self._metadata(step), self._folder / str(step) / PROGRESS_FILE
        try:
            stored = dict((unsealed(read_json(path)) if path.exists() else metadata)["progress"])
            stored["best_ne"] = math.inf if stored["best_ne"] is None else stored["best_ne"]
            progress = Progress(**{**stored, "window": tuple(stored["window"])})
        except Exception as e:
            raise self._unreadable(step, e) from e
        require(
            identity.get("rows") == metadata["identity"].get("rows"),
            f"checkpoint {self._folder}/{step} was trained on other rows: its data set has been prepared anew since; "
            "name another --workdir, or the --data_dir that has those rows",
        )
        changed = differences(identity, metadata["identity"])
        require(
            not changed,
            f"checkpoint {self._folder}/{step} is of another run ({describe(changed)}); delete it, or use that config",
        )
        return progress

    def restore(self, program: Program, state: TrainState, step: int) -> TrainState:
        """Returns the state of a checkpoint, laid out for `program`.

        Args:
          program: The run's.
          state: Any state of the program, for its structure.
          step: Which checkpoint.

        Raises:
          UserError: It cannot be read, is not what was saved, or is of another model.
        """

        def load() -> dict[str, np.ndarray]:
            saved = self._metadata(step)["checksums"]
            try:
                with _one_error():
                    arrays = self._orbax.load(step)
                for name in sorted({*saved, *arrays}):
                    if name not in arrays or checksum(arrays[name]) != saved.get(name):
                        raise ValueError(f"{name} is not what was saved")
            except Exception as e:
                raise self._unreadable(step, e) from e
            return arrays

        arrays = processes.together(load)
        return from_arrays(program, state, arrays, f"checkpoint {self._folder}/{step}")

    def delete_old(self, best_step: int) -> None:
        """Deletes all but the last and the best, as every save does in the end.

        Where that was interrupted half a checkpoint is left, which looks like a whole one.
        """
        self._policy.best_step = best_step
        checkpoints = self._orbax.checkpoints
        keep = self._policy.should_preserve(checkpoints, context=None)
        old = [str(c.step) for c, kept in zip(checkpoints, keep, strict=True) if not kept]

        def delete() -> None:
            for name in old:
                shutil.rmtree(self._folder / name, ignore_errors=True)

        if old:
            processes.on_first(delete)
            self._orbax.reload()

    def close(self) -> None:
        self.wait()
        # They would be of a write that has failed, which `wait` has said.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            self._orbax.close()

    def _metadata(self, step: int) -> dict[str, Any]:
        try:
            with _one_error():
                metadata: Any = self._orbax.metadata(step).custom_metadata
            return unsealed(metadata)
        except Exception as e:
            raise self._unreadable(step, e) from e

    def _unreadable(self, step: int, error: Exception) -> UserError:
        others = [s for s in self.steps if s != step]
        then = f"{others[-1]} is then the newest" if others else "there is no other, so training begins at step 0"
        return UserError(
            f"checkpoint {self._folder}/{step} cannot be read ({_reason(error)}); delete that folder ({then})"
        )

    def _first_unreadable(self) -> str:
        """Names a checkpoint whose metadata are damaged, and says what to do."""
        for path in sorted(self._folder.glob("[0-9]*")):
            try:
                ocp.metadata(str(path))
            except Exception:
                return f"delete the folder {path}"
        return "delete the last of them"


def _reason(error: BaseException) -> str:
    """Returns in one line what an error came from; the last that Orbax raises says little."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    lines = (getattr(error, "strerror", None) or str(error)).strip().splitlines()
    reason = (lines or [type(error).__name__])[0]
    # TensorStore says first what it was doing, then what went wrong, and last with which options.
    reason = re.sub(r" \[(tensorstore_spec|os_error_code)=.*", "", reason)
    return reason if len(reason) <= 200 else f"... {reason[-200:]}"


@contextlib.contextmanager
def _one_error() -> Iterator[None]:
    """Of a damaged checkpoint Orbax raises one error; this silences what it logs of others."""
    _ignore_late_errors()
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(level)


@functools.cache
def _ignore_late_errors() -> None:
    """Silences, from now on, what Orbax's tasks and TensorStore's threads print beside the error that Orbax raises.

    That is what asyncio logs of a task whose error nobody took, errors of threads that find an event loop closed, the
    stack traces of a failed write, which each of Orbax's threads logs, and a warning of what it never awaited.
    """
    warnings.filterwarnings("ignore", "coroutine 'CompatibleTypeHandler", RuntimeWarning)
    hook = sys.unraisablehook
    sys.unraisablehook = lambda args: None if "loop is closed" in str(args.exc_value) else hook(args)
    logging.getLogger("asyncio").addFilter(lambda record: "exception was never retrieved" not in record.getMessage())
    logging.getLogger("absl").addFilter(lambda r: r.levelno < logging.ERROR or "orbax" not in Path(r.pathname).parts)


def to_arrays(program: Program, state: TrainState) -> dict[str, np.ndarray]:
    """Returns the logical arrays of a state, on the host of process 0; on the others zeros that take no memory.

    They are copies: the devices' buffers are donated to the next step while these are being written. All processes must
    call it.
    """
    arrays = {"step": np.array(state.step)}
    arrays |= {f"loss_scale/{name}": np.array(x) for name, x in state.loss_scale._asdict().items()}
    for part, tree, shapes in _dense_parts(program, state):
        for (path, leaf), shape in zip(_leaves(tree), jax.tree.leaves(shapes), strict=True):
            whole = to_host(leaf)
            arrays[f"{part}/{_key(path)}"] = (
                _zeros(shape.shape, leaf.dtype) if whole is None else unpack(whole, shape.shape, program.dense_shards)
            )
    for g in program.plan.groups:
        table = state.tables[g.name]
        for what, array in {"weights": table.weights, **table.slots}.items():
            dtype = g.dtype if what == "weights" else np.dtype(np.float32)
            whole = to_host(array)
            if whole is None:
                tail = (g.dim,) if array.ndim > 1 else ()
                logical = {t.name: _zeros((t.rows, *tail), dtype) for t in g.tables}
            else:
                logical = g.to_logical(whole.view(dtype))
            arrays |= {f"tables/{name}/{what}": rows for name, rows in logical.items()}
    return arrays


def _zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return np.broadcast_to(np.zeros((), dtype), shape)


def from_arrays(program: Program, state: TrainState, arrays: dict[str, np.ndarray], where: str) -> TrainState:
    """The inverse of `to_arrays`, on the program's mesh.

    Raises:
      UserError: An array is missing, superfluous or of another shape; `where` names the checkpoint.
    """
    wanted: dict[str, tuple[int, ...]] = {"step": (), **{f"loss_scale/{name}": () for name in LossScale._fields}}
    for part, _, shapes in _dense_parts(program, state):
        wanted |= {f"{part}/{_key(path)}": leaf.shape for path, leaf in _leaves(shapes)}
    for g in program.plan.groups:
        per_column = {"weights": True, **g.rule.slots}
        wanted |= {
            f"tables/{t.name}/{what}": (t.rows, t.dim) if wide else (t.rows,)
            for t in g.tables
            for what, wide in per_column.items()
        }
    for name in sorted({*wanted, *arrays}):
        has = arrays[name].shape if name in arrays else "absent"
        needs = wanted.get(name, "absent")
        require(has == needs, f"{where} is of another model: {name} is {has} there and {needs} in this config")

    def tree_of(part: str, tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: arrays[f"{part}/{_key(path)}"], tree)

    tables = {}
    for g in program.plan.groups:
        parts = ("weights", *g.rule.slots)
        stored = {what: {t.name: arrays[f"tables/{t.name}/{what}"] for t in g.tables} for what in parts}
        tables[g.name] = tables_lib.from_logical(g, program.mesh, stored)
    none = np.full((), -1, np.int32)
    scale = LossScale(*(jnp.asarray(arrays[f"loss_scale/{name}"]) for name in LossScale._fields))
    step, loss_scale, failed_step, failed_check, overflow = replicate(
        program, (arrays["step"], scale, none, none, np.zeros((), np.int32))
    )
    dense, optimizer = place_dense(program, tree_of("dense", state.dense), tree_of("optimizer", state.optimizer))
    return TrainState(step, dense, optimizer, tables, loss_scale, failed_step, failed_check, overflow)


def _dense_parts(program: Program, state: TrainState) -> tuple[tuple[str, Any, Any], ...]:
    """Returns (name, arrays as they are stored, shapes of the whole arrays) of the dense parameters and optimizer."""
    dense, optimizer = program.whole_shapes()
    return ("dense", state.dense, dense), ("optimizer", state.optimizer, optimizer)


def _leaves(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(tree)


def _key(path: Any) -> str:
    parts = (str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path)
    return "/".join(p for p in parts if p != "value")
