"""The baseline: scikit-learn's logistic regression on the rows and features that the model sees.

Fitted on the task alone, or on the auxiliary tasks too. Every id is a one-hot column (a bag's columns share weight 1),
beside the standardised dense columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
from sklearn.linear_model import LogisticRegression

from jaxrec.data.pipeline import Batches
from jaxrec.data.schema import Dataset

# The value of a task's column: large, so that the L2 penalty hardly acts on the tasks' intercepts.
INTERCEPT = 3.0


class Table(NamedTuple):
    """A split as a matrix.

    Attributes:
      x: [rows, columns], sparse (CSR).
      y: float [rows, tasks], the auxiliary ones included.
      group: int [rows], the user.
    """

    x: Any
    y: np.ndarray
    group: np.ndarray


def table(dataset: Dataset, split: str, batch_size: int = 4096) -> Table:
    """Returns a split's rows, in stored order, from the very batches that the model is fed."""
    schema = dataset.schema
    parts = list(Batches(dataset, split, batch_size, shuffle=False))
    keep = np.concatenate([p.batch.weight for p in parts]) > 0
    ids, lengths, dense, labels = (
        np.concatenate([getattr(p.batch, name) for p in parts])[keep] for name in ("ids", "lengths", "dense", "labels")
    )
    blocks: list[Any] = [dense]
    slot, bag = 0, 0
    for f in schema.features:
        part = ids[:, slot : slot + f.max_length]
        slot += f.max_length
        length = np.ones(len(part), np.int64)
        if f.kind != "categorical":
            length = lengths[:, bag].astype(np.int64)
            bag += 1
        valid = np.arange(f.max_length) < length[:, None]
        value = np.broadcast_to(1.0 / np.maximum(length, 1)[:, None], part.shape)
        row = np.broadcast_to(np.arange(len(part))[:, None], part.shape)
        shape = (len(part), schema.vocabulary[f.table])
        blocks.append(scipy.sparse.csr_matrix((value[valid], (row[valid], part[valid])), shape=shape))
    x = scipy.sparse.hstack([scipy.sparse.csr_matrix(b) for b in blocks], format="csr")
    return Table(x, labels, np.concatenate([p.group for p in parts])[keep])


def fit(train: Table, others: list[Table], dense_columns: int, c: float, *, ordinal: bool = False) -> list[np.ndarray]:
    """Fits on `train` and returns the first task's logits of each other table.

    With `ordinal` the training rows stand once for each task, all with the same coefficients and an intercept of
    their own (proportional odds): what a linear model can learn of the auxiliary tasks, which are thresholds on one
    rating.

    Args:
      train: The training split.
      others: Splits to predict.
      dense_columns: How many leading columns are dense; they are standardised with the training split's moments.
      c: scikit-learn's inverse strength of the L2 penalty; intercepts are hardly penalised.
      ordinal: Fit all tasks.
    """
    dense = train.x[:, :dense_columns].toarray()
    mean, scale = dense.mean(0), dense.std(0)

    def standardised(t: Table) -> Any:
        block = (t.x[:, :dense_columns].toarray() - mean) / np.where(scale > 0, scale, 1)
        return scipy.sparse.hstack([scipy.sparse.csr_matrix(block), t.x[:, dense_columns:]], format="csr")

    tasks = train.y.shape[1] if ordinal else 1

    def of_task(x: Any, task: int) -> Any:
        marks = np.zeros((x.shape[0], tasks))
        marks[:, task] = INTERCEPT
        return scipy.sparse.hstack([x, scipy.sparse.csr_matrix(marks)], format="csr") if ordinal else x

    x = standardised(train)
    stacked = scipy.sparse.vstack([of_task(x, task) for task in range(tasks)], format="csr")
    model = LogisticRegression(C=c, max_iter=2000, tol=1e-5).fit(stacked, train.y[:, :tasks].T.ravel())
    return [model.decision_function(of_task(standardised(t), 0)) for t in others]
