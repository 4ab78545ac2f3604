"""Which rows of a table are for training, validation and test."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxrec.checks import require
from jaxrec.data.tabular.convert import Part
from jaxrec.data.tabular.parts import Made
from jaxrec.data.tabular.schema import SPLITS, Split
from jaxrec.data.tabular.vocabulary import mixed

TRAIN, VALIDATION, TEST = range(3)
# Of a part, by its index among the parts: uint8 [n], an index of SPLITS.
Assignment = Callable[[int, Part], np.ndarray]


def assign(
    split: Split, parts: Sequence[Made], files: Sequence[str], user: str, times: np.ndarray | None
) -> Assignment:
    """Returns the function that assigns the rows of a part.

    Args:
      split: The rule.
      parts: All parts, in the order of the rows.
      files: Of each file, the split that it is (with `by = "files"`).
      user: The column of the user (with `by = "user"`).
      times: int64 [all rows], any order (with `by = "time"`).
    """
    starts = np.concatenate([[0], np.cumsum([p.rows for p in parts])])
    total = int(starts[-1])
    held = split.validation + split.test
    if split.by == "files":
        of_file = [SPLITS.index(name) for name in files]
        return lambda i, part: np.full(part.rows, of_file[parts[i].file], np.uint8)
    if split.by == "column":

        def of_column(_: int, part: Part) -> np.ndarray:
            assert part.split is not None
            return part.split

        return of_column
    if split.by in ("order", "last_file"):
        if split.by == "order":
            first, second = total - round(held * total), total - round(split.test * total)
        else:
            last = max((p.file for p in parts), default=0)
            first = int(sum(p.rows for p in parts if p.file < last))
            second = first + (total - first) // 2
        return lambda i, part: _of(starts[i] + np.arange(part.rows), first, second)
    if split.by == "time":
        assert times is not None
        # Whoever has the first time of a split belongs to it, so equal times stay together.
        ordered = np.sort(times)
        first, second = (int(ordered[total - max(1, round(s * total))]) if total else 0 for s in (held, split.test))

        def of_time(_: int, part: Part) -> np.ndarray:
            assert part.time is not None
            return _of(part.time, first, second)

        return of_time

    salt = mixed(np.array([split.seed + 1], np.uint64))

    def drawn(i: int, part: Part) -> np.ndarray:
        if split.by == "user":
            values = part.values[user]
            keys = values.keys[values.codes]
        else:
            keys = (starts[i] + np.arange(part.rows)).astype(np.uint64)
        draws = (mixed(keys ^ salt) >> np.uint64(11)) * 2.0**-53
        return _of(draws, 1 - held, 1 - split.test)

    return drawn


def _of(values: np.ndarray, first: float, second: float) -> np.ndarray:
    return ((values >= first).astype(np.uint8) + (values >= second)).astype(np.uint8)


def check(counts: Sequence[int], split: Split, where: str) -> None:
    """Raises `UserError` where a split has no rows."""
    for name, count in zip(SPLITS, counts, strict=True):
        of = ", ".join(f"{n} {c:,}" for n, c in zip(SPLITS, counts, strict=True))
        require(
            count > 0,
            f"{where}: split {name} has no rows with split.by = {split.by!r} ({of}); choose another rule or shares",
        )
