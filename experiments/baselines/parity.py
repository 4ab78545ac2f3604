"""Do PyTorch and jaxrec compute the same? No timing of the two is written unless they do.

    python -m experiments.baselines.parity --config=dlrm_balanced --stack=pytorch-eager

From the same weights both take the same batches. Compared, each by the largest difference over the tensor's largest
value: losses, dense gradients, all weights and all accumulators, after the first step and after the last. Rows that no
batch names must not have changed by a bit. Then both train for a short while on rows with planted labels, and their
AUCs on held-out rows are compared.

What is compared must be a function of its inputs that rounding does not turn into another one; two things would.

* From accumulators of 0, Adagrad's first step is lr * g / (|g| + eps): with an eps of 1e-8 the sign of g, so that a
  gradient of rounding noise moves its weight by the whole learning rate. jaxrec against itself, its dense weights
  changed by a rounding error, then differs by 6e-4 after one step and by 0.8 after 50. The gate takes an eps of the
  gradients' size, at which each stack's eps still shows; the AUC is compared at the config's own.
* A ReLU whose input is within rounding of 0 passes a gradient on in one stack and not in the other. The more units,
  rows and steps, the likelier: hence narrow perceptrons and small batches here, and other rows and weights where they
  differ all the same. An error of the code differs on all of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from absl import flags

from experiments.baselines.jax_stack import JaxStack, initial_arrays
from experiments.baselines.slots import slots_of_features
from experiments.baselines.stacks import OPTIMIZERS, Arrays, Builder, Stack, builder, paired
from jaxrec import flags as jaxrec_flags
from jaxrec.checks import UserError, require
from jaxrec.configs import catalogue
from jaxrec.data.datasets.synthetic import SyntheticData
from jaxrec.data.pipeline import Batches
from jaxrec.data.schema import Batch, Schema
from jaxrec.models.dlrm import DLRMConfig
from jaxrec.training.config import Config
from jaxrec.training.metrics import EvaluationMetrics

STEPS = 50
FIRST_LIMIT, LAST_LIMIT = 1e-5, 1e-3
AUC_STEPS, AUC_LIMIT = 200, 1e-3
# The gate's version of a config: rows of a table and of a batch, and what widths of perceptrons are divided by.
SMALL_ROWS, SMALL_BATCH, NARROWER, NARROWEST = 500, 64, 8, 8
EPS = 1e-3
ATTEMPTS = 3


@dataclasses.dataclass(frozen=True)
class Difference:
    """What two stacks differ by.

    Attributes:
      after: Steps taken.
      what: A tensor's name, `loss`, `auc` or such.
      value: The largest absolute difference over the largest absolute value; of `auc`, the absolute difference.
      limit: The largest value that passes.
    """

    after: int
    what: str
    value: float
    limit: float

    @property
    def share(self) -> float:
        """The value over the limit: at most 1 where it passes."""
        if self.limit:
            return self.value / self.limit
        return math.inf if self.value else 0.0

    def describe(self) -> str:
        steps = "1 step" if self.after == 1 else f"{self.after} steps"
        return f"{self.what} after {steps} differs by {self.value:.2e} (limit {self.limit:g})"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The outcome of the comparison of a stack with jaxrec.

    Attributes:
      stack: Its name.
      optimizer: Of embedding rows.
      earlier: The worst difference of each comparison before the last.
      differences: Of everything that the last one compared.
    """

    stack: str
    optimizer: str
    earlier: tuple[Difference, ...]
    differences: tuple[Difference, ...]

    @property
    def passed(self) -> bool:
        return self.worst.share <= 1

    @property
    def worst(self) -> Difference:
        return max(self.differences, key=lambda d: d.share)

    def worst_of(self, part: str, after: int) -> Difference:
        """Returns the worst of those after so many steps whose name begins with `part`."""
        return max((d for d in self.differences if d.after == after and d.what.startswith(part)), key=lambda d: d.share)

    def describe(self) -> str:
        """Returns a sentence with the worst tensor."""
        return (
            f"{self.stack} and jaxrec under {self.optimizer} {'agree' if self.passed else 'do not agree'} "
            f"(comparison {len(self.earlier) + 1} of at most {ATTEMPTS}): {self.worst.describe()}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns JSON values for a study's record."""
        return {
            "stack": self.stack, "optimizer": self.optimizer, "passed": self.passed,
            "earlier": [dataclasses.asdict(d) for d in self.earlier],
            "compared": len(self.differences), "worst": dataclasses.asdict(self.worst),
        }  # fmt: skip


def small(config: Config) -> Config:
    """Returns the config with smaller tables, batches and perceptrons; tables, dims, bags and cross layers stay.

    Raises:
      UserError: It is not a DLRM on synthetic rows.
    """
    data, model = config.data, config.model
    if not isinstance(data, SyntheticData) or not isinstance(model, DLRMConfig):
        raise UserError(f"config {config.name} is no DLRM on synthetic rows, which the parity gate needs")

    def narrow(widths: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(max(width // NARROWER, min(width, NARROWEST)) for width in widths)

    return dataclasses.replace(
        config,
        data=dataclasses.replace(
            data, rows=SMALL_ROWS, train_rows=AUC_STEPS * SMALL_BATCH, validation_rows=8192, test_rows=1
        ),
        model=dataclasses.replace(model, bottom_mlp=narrow(model.bottom_mlp), top_mlp=narrow(model.top_mlp)),
        training=dataclasses.replace(config.training, batch_size=SMALL_BATCH),
    )


def require_parity(
    config: Config, stack: str, device: str = "cpu", id_type: str = "int64", layout: str = "separate"
) -> Verdict:
    """Compares a stack with jaxrec on the small version of `config`; returns the verdict, for the record.

    Raises:
      UserError: They differ; names the worst tensor.
    """
    verdict = judge(small(paired(config, stack)), stack, builder(stack, device, id_type, layout))
    require(verdict.passed, f"{verdict.describe()}; nothing is timed")
    return verdict


def judge(config: Config, stack: str, build: Builder) -> Verdict:
    """Returns the verdict of the first of ATTEMPTS comparisons that passes, or of the last."""
    earlier: list[Difference] = []
    while True:
        seed = len(earlier)
        data = dataclasses.replace(config.data, seed=seed)  # pyright: ignore[reportArgumentType]
        training = dataclasses.replace(config.training, seed=config.training.seed + seed)
        drawn = dataclasses.replace(config, data=data, training=training)
        differences = (*compare_steps(drawn, build), compare_auc(drawn, build))
        verdict = Verdict(stack, config.embedding.optimizer.name, tuple(earlier), differences)
        if verdict.passed or len(earlier) + 1 == ATTEMPTS:
            return verdict
        earlier.append(verdict.worst)


def compare_steps(config: Config, build: Builder) -> Iterator[Difference]:
    """Compares loss, gradients, weights and accumulators of what `build` makes of `config` with jaxrec's.

    Args:
      config: On synthetic rows; its eps is replaced.
      build: Of the other stack.
    """
    config = _with_eps(config, EPS)
    dataset = config.data.open("")
    arrays = initial_arrays(config, dataset)
    stream = Batches(dataset, "train", config.training.batch_size, seed=config.training.seed)
    batches = [stream[k].batch for k in range(STEPS)]
    ours, theirs = JaxStack(config, dataset, arrays), build(config, dataset, arrays)
    expected, found = (stack.dense_gradients(stack.put(batches[0])) for stack in (ours, theirs))
    for name, gradient in expected.items():
        yield Difference(1, f"gradient of {name}", relative_difference(found[name], gradient), FIRST_LIMIT)
    for k, batch in enumerate(batches):
        losses = [np.asarray(stack.step(stack.put(batch))) for stack in (theirs, ours)]
        if k in (0, STEPS - 1):
            limit = LAST_LIMIT if k else FIRST_LIMIT
            yield Difference(k + 1, "loss", relative_difference(*losses), limit)
            touched = touched_rows(dataset.schema, batches[: k + 1])
            yield from _compare_arrays(k + 1, limit, theirs.export(), ours.export(), arrays, touched)


def _with_eps(config: Config, eps: float) -> Config:
    optimizer = dataclasses.replace(config.embedding.optimizer, eps=eps)
    return dataclasses.replace(
        config,
        optimizer=dataclasses.replace(config.optimizer, eps=eps),
        embedding=dataclasses.replace(config.embedding, optimizer=optimizer),
    )


def _compare_arrays(
    after: int, limit: float, theirs: Arrays, ours: Arrays, before: Arrays, touched: dict[str, np.ndarray]
) -> Iterator[Difference]:
    for name in sorted(ours):
        if not name.startswith("tables/"):
            yield Difference(after, name, relative_difference(theirs[name], ours[name]), limit)
            continue
        rows = touched[name.split("/")[1]]
        yield Difference(after, name, relative_difference(theirs[name][rows], ours[name][rows]), limit)
        for who, arrays in (("jaxrec", ours), ("PyTorch", theirs)):
            change = relative_difference(arrays[name][~rows], before[name][~rows])
            yield Difference(after, f"{name} of {who}, in rows that no batch names,", change, 0.0)


def relative_difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Returns max |found - expected| / max |expected|; infinite where shapes differ or a value is not finite."""
    if found.shape != expected.shape or not (np.isfinite(found).all() and np.isfinite(expected).all()):
        return math.inf
    difference = float(np.max(np.abs(found.astype(np.float64) - expected), initial=0.0))
    largest = float(np.max(np.abs(expected), initial=0.0))
    return difference / largest if largest else (math.inf if difference else 0.0)


def touched_rows(schema: Schema, batches: Sequence[Batch]) -> dict[str, np.ndarray]:
    """Returns table -> bool [rows]: the rows that the batches name."""
    touched = {table: np.zeros(rows, bool) for table, rows in schema.vocabulary.items()}
    for batch in batches:
        for f, (ids, lengths) in zip(schema.features, slots_of_features(schema, batch), strict=True):
            full = np.full(len(ids), f.max_length) if lengths is None else lengths
            touched[f.table][ids[np.arange(f.max_length) < full[:, None]]] = True
    return touched


def compare_auc(config: Config, build: Builder) -> Difference:
    """Trains both on rows whose labels are planted; compares their AUC on the validation split."""
    planted = dataclasses.replace(config.data, labels="planted")  # pyright: ignore[reportArgumentType]
    config = dataclasses.replace(config, data=planted)
    dataset = planted.open("")
    arrays = initial_arrays(config, dataset)
    size = config.training.batch_size
    train = Batches(dataset, "train", size, seed=config.training.seed)
    aucs = []
    for stack in (JaxStack(config, dataset, arrays), build(config, dataset, arrays)):
        for k in range(AUC_STEPS):
            stack.step(stack.put(train[k].batch))
        aucs.append(_auc(stack, Batches(dataset, "validation", size, shuffle=False)))
    value = abs(aucs[0] - aucs[1])
    return Difference(AUC_STEPS, f"auc ({aucs[0]:.5f} of jaxrec)", math.inf if math.isnan(value) else value, AUC_LIMIT)


def _auc(stack: Stack, batches: Batches) -> float:
    with EvaluationMetrics() as metrics:
        for k in range(len(batches)):
            host = batches[k]
            logits = stack.logits(stack.put(host.batch))
            metrics.update(logits, host.batch.labels[:, 0], host.batch.weight, host.group)
        return metrics.compute()["auc"]


def define_flags() -> None:
    flags.DEFINE_string("config", "dlrm_balanced", "Named config on synthetic rows; its small version is compared.")
    flags.DEFINE_string("stack", "pytorch-eager", f"One of {', '.join(OPTIMIZERS)}.")
    flags.DEFINE_string("device", "cpu", "As torch names it: cpu, cuda.")
    flags.DEFINE_string("ids", "int64", "Type of ids in PyTorch: int32 or int64.")
    flags.DEFINE_string("layout", "separate", "Of the tables of the stacks of EmbeddingBag: separate or joined.")


def main() -> int:
    """Prints the worst difference of each kind; returns the exit status."""
    values = flags.FLAGS
    config = catalogue.get(values.config)
    build = builder(values.stack, values.device, values.ids, values.layout)
    verdict = judge(small(paired(config, values.stack)), values.stack, build)
    for difference in verdict.earlier:
        print(f"a comparison failed: {difference.describe()}")
    for after in sorted({d.after for d in verdict.differences}):
        for part in ("loss", "gradient", "dense/", "optimizer/", "tables/", "auc"):
            if any(d.after == after and d.what.startswith(part) for d in verdict.differences):
                print(verdict.worst_of(part, after).describe())
    require(verdict.passed, f"{verdict.describe()}; nothing is timed")
    print(verdict.describe())
    return 0


if __name__ == "__main__":
    jaxrec_flags.run_command(main, define_flags)
