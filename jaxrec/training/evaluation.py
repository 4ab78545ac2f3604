"""Evaluating a whole split."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import jax
import numpy as np

from jaxrec import mesh as mesh_lib
from jaxrec import processes
from jaxrec.data.device import DevicePrefetch
from jaxrec.data.pipeline import Batches, stream
from jaxrec.data.schema import Batch, Dataset, HostBatch
from jaxrec.training.config import Config
from jaxrec.training.metrics import EvaluationMetrics
from jaxrec.training.setup import batch_shapes, put_batch
from jaxrec.training.signals import StopRequest
from jaxrec.training.state import TrainState
from jaxrec.training.step import Program, shard_predict_step


class Evaluator:
    """A compiled prediction step and the splits it runs over."""

    def __init__(self, config: Config, dataset: Dataset, program: Program, state: TrainState):
        """Compiles the prediction step for `state`'s shapes."""
        size = config.training.eval_batch_size or config.training.batch_size
        # An evaluation batch need not be a given size: the next multiple of the devices is as good.
        self._batch_size = -(-size // config.mesh.size) * config.mesh.size
        self._dataset, self._program = dataset, program
        self._row_budget = config.training.auc_row_budget
        shapes = batch_shapes(dataset, self._batch_size, program)
        self.compiled = shard_predict_step(program).lower(state.dense, state.tables, shapes).compile()

    def run(self, state: TrainState, split: str, stop: StopRequest | None = None) -> dict[str, float] | None:
        """Returns the metrics over every row of a split, or None where a stop was asked for meanwhile.

        Several tasks' metrics are named `<label>/<metric>`; one task's `<metric>`. For planted data `best_ne` is the NE
        of the planted probabilities on the same rows, and `excess` is (NE - best) / (1 - best). `unseen_ids` counts
        the split's ids that training has no row for, where the data set tells.
        """
        results = self._metrics(state, split, stop)
        # None: stopped, as all processes have agreed. Others than the first have seen a part of the rows only.
        return None if results is None else processes.on_first(lambda: self._named(results, split))

    def _metrics(self, state: TrainState, split: str, stop: StopRequest | None) -> list[dict[str, float]] | None:
        """Returns the metrics of each task (on other processes than the first, empty), or None where stopped."""
        labels = self._dataset.schema.labels
        with contextlib.ExitStack() as stack:
            metrics = [stack.enter_context(EvaluationMetrics(row_budget=self._row_budget)) for _ in labels]
            predictions = stack.enter_context(contextlib.closing(self.predictions(state, split)))
            for logits, host in predictions:
                if stop is not None and stop.poll():
                    return None
                for task, m in enumerate(metrics if processes.is_first() else ()):
                    m.update(logits[:, task], host.batch.labels[:, task], host.batch.weight, host.group)
            return [m.compute() if processes.is_first() else {} for m in metrics]

    def _named(self, results: list[dict[str, float]], split: str) -> dict[str, float]:
        labels = self._dataset.schema.labels
        if len(labels) > 1:
            return {f"{label}/{k}": v for label, r in zip(labels, results, strict=True) for k, v in r.items()}
        result = results[0]
        if split in self._dataset.unseen:
            result["unseen_ids"] = float(sum(self._dataset.unseen[split].values()))
        best = None if self._dataset.best_ne is None else self._dataset.best_ne(split)
        if best is not None:
            result |= {"best_ne": best, "excess": (result["ne"] - best) / (1 - best)}
        return result

    def predictions(self, state: TrainState, split: str) -> Generator[tuple[np.ndarray, HostBatch], None, None]:
        """Yields logits, float32 [B, T], with the host batch they belong to, over the whole split in stored order.

        The rows that pad the last batch have weight 0. Process 0 reads whole batches, for the metrics; the others their
        devices' rows.
        """
        mesh = self._program.mesh
        ranges, put = mesh_lib.local_ranges(mesh, self._batch_size), put_batch(self._program)
        whole = processes.is_first()
        batches = Batches(self._dataset, split, self._batch_size, shuffle=False, ranges=None if whole else ranges)

        def put_own(batch: Batch) -> Batch:
            return put(Batch(*(np.concatenate([x[a:b] for a, b in ranges]) for x in batch)))

        own = put_own if whole and mesh_lib.is_shared(mesh) else put
        with DevicePrefetch(stream(batches, 0, len(batches)), own) as ahead:
            behind: tuple[jax.Array, HostBatch] | None = None
            for device_batch, host in ahead:
                logits = self.compiled(state.dense, state.tables, device_batch)
                if behind is not None:  # One batch behind, so that the device computes while the caller counts.
                    yield np.asarray(behind[0]), behind[1]
                behind = logits, host
            if behind is not None:
                yield np.asarray(behind[0]), behind[1]

    @property
    def criterion(self) -> str:
        """The metric that the best checkpoint is chosen by: the first task's NE."""
        labels = self._dataset.schema.labels
        return "ne" if len(labels) == 1 else f"{labels[0]}/ne"
