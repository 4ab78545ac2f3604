"""Metrics on the host: of an evaluation's rows, exactly, and of a training window's sums.

Shape suffix: B batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, Self, SupportsFloat, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxrec.training.rank_sums import RankSums, group_score_key, mean_auc, score_key

_FIELDS = ("loss", "prediction", "label", "weight")  # of Sums
_MAX_GROUP = 2**31 - 1


class Sums(Protocol):
    """Sums over rows, mergeable by adding; a NamedTuple with these fields, and perhaps others, is one.

    Attributes:
      loss: Sum of weight x log loss, in nats.
      prediction: Sum of weight x predicted probability.
      label: Sum of weight x label.
      weight: Sum of weights.
    """

    @property
    def loss(self) -> SupportsFloat: ...
    @property
    def prediction(self) -> SupportsFloat: ...
    @property
    def label(self) -> SupportsFloat: ...
    @property
    def weight(self) -> SupportsFloat: ...


def window_metrics(sums: Sums | Mapping[str, SupportsFloat]) -> dict[str, float]:
    """Metrics of one binary task over a window of training rows, or any other rows, from their sums.

        loss = sum(w loss) / sum(w)                       label_mean = p = sum(w label) / sum(w)
        ne = loss / -(p ln p + (1 - p) ln(1 - p))         calibration = sum(w prediction) / sum(w label)

    NE, normalised entropy, is 1 for the constant prediction p and lower is better (He et al. 2014, "Practical Lessons
    from Predicting Clicks on Ads at Facebook", section 2; calibration is there too). p is that of these same rows.

    Args:
      sums: Fields or keys `loss` (nats), `prediction`, `label` and `weight`: scalars. Others are ignored.

    Returns:
      `loss` (nats), `ne`, `calibration`, `label_mean`. NaN where undefined: all without any weight, `ne` where only one
      class occurs, `calibration` where no positive does.
    """
    field = sums if isinstance(sums, Mapping) else {name: getattr(sums, name) for name in _FIELDS}
    loss, prediction, label, weight = (float(field[name]) for name in _FIELDS)
    mean_loss, mean_label = _ratio(loss, weight), _ratio(label, weight)
    entropy = math.nan
    if 0 < mean_label < 1:
        entropy = -(mean_label * math.log(mean_label) + (1 - mean_label) * math.log1p(-mean_label))
    return {
        "loss": mean_loss,
        "ne": _ratio(mean_loss, entropy),
        "calibration": _ratio(prediction, label),
        "label_mean": mean_label,
    }


def _ratio(numerator: float, denominator: float) -> float:
    """Their quotient, or NaN unless the denominator is positive."""
    return numerator / denominator if denominator > 0 else math.nan


@final
class EvaluationMetrics:
    """Exact metrics of one binary task over the rows of an evaluation, in bounded memory.

    Every metric but the last three is weighted by the rows' weights; a row of weight 0 counts for nothing, whatever it
    holds. Neither the order of the rows nor their split into batches matters. All sums are float64.

        with EvaluationMetrics() as metrics:  # leaving it, also by an error, removes what was spilled to disk
            for logits, labels, weight, group in batches:
                metrics.update(logits, labels, weight, group)
            values = metrics.compute()
    """

    def __init__(self, row_budget: int = 4_000_000, spill_dir: str | None = None):
        """Starts with no rows.

        Args:
          row_budget: Rows held in memory, about 120 bytes each at the peak (48 between two sorts); beyond them rows
            are sorted and go to disk, 48 bytes each, and the metrics stay the same.
          spill_dir: The folder for those, None for the system's temporary one; see `RankSums`.

        Raises:
          ValueError: If the budget is below 1, or `spill_dir` is not a folder.
        """
        self._all = RankSums(row_budget, spill_dir)
        self._by_group = RankSums(row_budget, spill_dir)
        self._rows = 0
        self._loss = self._prediction = self._positive = self._negative = 0.0

    def update(self, logits: ArrayLike, labels: ArrayLike, weight: ArrayLike, group: ArrayLike) -> None:
        """Adds a batch.

        The log loss of a row is softplus(-logit) where its label is 1 and softplus(logit) where it is 0; the prediction
        is the logistic function of the logit.

        Args:
          logits: float32 [B]; infinite ones are allowed.
          labels: float32 [B]; 0 or 1.
          weight: float32 [B]; finite and not negative. Rows of weight 0 are dropped before the rest is looked at.
          group: int32 [B]; 0 to 2^31 - 1, the row's user.

        Raises:
          ValueError: If the shapes differ, a logit is NaN, or a value is out of its range. Nothing is added then.
        """
        logits_B, labels_B, weight_B = (np.asarray(x, np.float32) for x in (logits, labels, weight))
        group_B: NDArray[Any] = np.asarray(group)
        shapes = [x.shape for x in (logits_B, labels_B, weight_B, group_B)]
        if logits_B.ndim != 1 or len(set(shapes)) != 1:
            raise ValueError(f"logits, labels, weight and group must all be [B], but are {shapes}")
        _check(np.isfinite(weight_B) & (weight_B >= 0), weight_B, "weight", "finite and not negative")
        keep_B = weight_B > 0
        logits_B, labels_B, weight_B = logits_B[keep_B], labels_B[keep_B], weight_B[keep_B]
        group_B = group_B[keep_B]
        _check((labels_B == 0) | (labels_B == 1), labels_B, "labels", "0 or 1")
        if not np.issubdtype(group_B.dtype, np.integer):
            raise ValueError(f"group must hold integers, but its dtype is {group_B.dtype}")
        _check((group_B >= 0) & (group_B <= _MAX_GROUP), group_B, "group", f"from 0 to {_MAX_GROUP}")
        score_B = score_key(logits_B)

        logit_B, weight_B, is_positive_B = logits_B.astype(np.float64), weight_B.astype(np.float64), labels_B == 1
        positive_B, negative_B = np.where(is_positive_B, weight_B, 0.0), np.where(is_positive_B, 0.0, weight_B)
        self._rows += len(logit_B)
        self._loss += float(weight_B @ np.logaddexp(0, np.where(is_positive_B, -logit_B, logit_B)))
        self._prediction += float(weight_B @ np.exp(-np.logaddexp(0, -logit_B)))
        self._positive += float(positive_B.sum())
        self._negative += float(negative_B.sum())
        self._all.add(score_B.astype(np.uint64), positive_B, negative_B)
        self._by_group.add(group_score_key(group_B, score_B), positive_B, negative_B)

    def compute(self) -> dict[str, float]:
        """The metrics of the rows so far; more may be added after.

        Returns:
          rows: Rows of positive weight.
          auc: Area under the ROC curve, ties counted half; NaN unless both classes occur (`mean_auc` has the formula).
          ne: Log loss over the entropy of these rows' mean label; NaN unless both classes occur (`window_metrics`).
          log_loss: Mean of the rows' log loss, in nats; NaN without rows, infinite where an infinite logit is wrong.
          calibration: Mean prediction over mean label; NaN without a positive.
          label_mean: Mean label; NaN without rows.
          user_auc: Unweighted mean, over the groups that have both classes, of the AUC of each; NaN without any.
          users_with_both_classes: How many groups those are.
          spilled_rows: Rows that went to disk, for want of budget.

        Raises:
          ValueError: If rows were spilled and the metrics have been closed.
        """
        auc, _ = mean_auc(self._all.chunks())
        user_auc, users = mean_auc(self._by_group.chunks())
        # The weight is the sum of the classes', so that the mean label is exactly 0 or 1 where one class is absent.
        means = window_metrics(
            {
                "loss": self._loss,
                "prediction": self._prediction,
                "label": self._positive,
                "weight": self._positive + self._negative,
            }
        )
        return {
            "rows": float(self._rows),
            "auc": auc,
            "ne": means["ne"],
            "log_loss": means["loss"],
            "calibration": means["calibration"],
            "label_mean": means["label_mean"],
            "user_auc": user_auc,
            "users_with_both_classes": float(users),
            "spilled_rows": float(self._all.spilled_rows),
        }

    def close(self) -> None:
        """Removes what was spilled to disk."""
        try:
            self._all.close()
        finally:
            self._by_group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check(valid_B: NDArray[np.bool_], value_B: NDArray[Any], what: str, accepted: str) -> None:
    """Raises `ValueError`, with the first offending value, unless all are valid."""
    if not valid_B.all():
        raise ValueError(f"{what} must be {accepted}, but holds {value_B[valid_B.argmin()]}")
