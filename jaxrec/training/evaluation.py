"""Evaluating a whole split."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import jax
import numpy as np

from jaxrec.data.device import DevicePrefetch
from jaxrec.data.pipeline import Batches, stream
from jaxrec.data.schema import Dataset, HostBatch
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
        of the planted probabilities on the same rows, and `excess` is (NE - best) / (1 - best).
        """
        labels = self._dataset.schema.labels
        with contextlib.ExitStack() as stack:
            metrics = [stack.enter_context(EvaluationMetrics(row_budget=self._row_budget)) for _ in labels]
            predictions = stack.enter_context(contextlib.closing(self.predictions(state, split)))
            for logits, host in predictions:
                if stop is not None and stop.signal:
                    return None
                for task, m in enumerate(metrics):
                    m.update(logits[:, task], host.batch.labels[:, task], host.batch.weight, host.group)
            results = [m.compute() for m in metrics]
        if len(labels) > 1:
            return {f"{label}/{k}": v for label, r in zip(labels, results, strict=True) for k, v in r.items()}
        result = results[0]
        if self._dataset.best_ne is not None:
            best = self._dataset.best_ne(split)
            result |= {"best_ne": best, "excess": (result["ne"] - best) / (1 - best)}
        return result

    def predictions(self, state: TrainState, split: str) -> Generator[tuple[np.ndarray, HostBatch], None, None]:
        """Yields logits, float32 [B, T], with the host batch they belong to, over the whole split in stored order.

        The rows that pad the last batch have weight 0.
        """
        batches = Batches(self._dataset, split, self._batch_size, shuffle=False)
        with DevicePrefetch(stream(batches, 0, len(batches)), put_batch(self._program)) as ahead:
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
