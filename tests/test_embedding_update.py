"""The study of lookup and update: points, the gate before timing, and a small measurement of jaxrec's own stacks."""

import dataclasses

import numpy as np
import pytest

from experiments.embedding_update import report, run, sides
from experiments.embedding_update.points import GRID, LAWS, Point, parse
from jaxrec.checks import UserError
from jaxrec.kernels.embedding_bag import library

OWN = [s for s in sides.STACKS if s not in sides.TORCH and ("compiled" not in s or not library.load())]
TINY = Point(16, 3, 32, "zipf", 500)


@pytest.mark.parametrize("text", ["64x8", "64x8x2048x1", "64xax8", "0x1x1", "", "-4x1x1", "6x1x1"])
def test_a_point_is_three_numbers(text):
    with pytest.raises(UserError, match="--points has"):
        parse(text, "uniform")


def test_points_are_told_apart_by_their_names():
    points = [parse(p, law) for p in GRID for law in LAWS]
    assert len({p.name for p in points}) == 16 and all(p.shape in GRID for p in points)


@pytest.mark.parametrize("stack", OWN)
def test_implementations_of_an_optimizer_end_with_the_same_rows(stack):
    first = next(s for s in OWN if sides.STACKS[s] == sides.STACKS[stack])
    one, other = sides.side(first, TINY), sides.side(stack, TINY)
    before = {name: array.copy() for name, array in one.end().items()}
    for side in (one, other):
        side.run(3)
    expected, found = one.end(), other.end()
    assert expected.keys() == found.keys() == before.keys()
    for name, array in expected.items():
        change = np.abs(array - before[name]).max()
        assert change > 0 and np.abs(found[name] - array).max() <= run.AGREE * change


@dataclasses.dataclass
class Told:
    """A worker whose rows are `rows` at first, and `rows` + `step` after steps."""

    file: object
    rows: np.ndarray
    step: np.ndarray

    def ask(self, do, **_):
        if do == "rows":
            np.savez(self.file, **{"tables/t/weights": self.rows})
        else:
            self.rows = self.rows + self.step
        return {}


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_nothing_is_timed_where_rows_differ(factor, tmp_path):
    rows, step = np.zeros((5, 4), np.float32), np.full((5, 4), 0.25, np.float32)
    names = ("jaxrec XLA", "FBGEMM")
    files = {n: tmp_path / f"{n}.npz" for n in names}
    workers = {n: Told(files[n], rows, step * f) for n, f in zip(names, (1.0, factor), strict=True)}
    if factor == 1.0:
        assert run._compare(TINY, files, workers) == dict.fromkeys(names, 0.0)
        return
    with pytest.raises(UserError, match=r"rows of FBGEMM differ by 0\.01 of the largest change.*nothing is timed"):
        run._compare(TINY, files, workers)


def test_a_small_measurement(tmp_path, monkeypatch):
    monkeypatch.setattr(run.study, "finished", lambda: run.study.finished_lib.Finished(None, {}))
    record = run.measure([TINY], OWN[:2], 2, 0.01)
    assert record["stacks"] == OWN[:2] and not record["absent"]
    rows = {(r["stack"], r["metric"]): r["samples"] for r in record["rows"]}
    assert all(len(rows[s, m]) == 2 for s in OWN[:2] for m in ("step", "forward", "checked_step"))
    # 8 tables: no more rows than ids.
    assert all(8 <= n <= 8 * 3 * 32 for n in rows["jaxrec", "rows"])
    assert report.bound_ms(record, record["points"][0]) > 0
    text = report.render(record)
    assert TINY.name in text and "there is no peer" in report.finding(record)
    assert set(report.figures(record)) == {"step.svg"}
