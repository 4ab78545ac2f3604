"""Prepares a data set from files: `python -m jaxrec.prepare --dataset=movielens --input=ml-25m.zip`."""

from __future__ import annotations

import json
import time
from pathlib import Path

from absl import flags

from jaxrec import flags as jaxrec_flags
from jaxrec.checks import one_of, require

DATASETS = ("movielens",)


def main() -> int:
    """Runs the command; returns its exit status."""
    values = flags.FLAGS
    one_of("--dataset", values.dataset or "", DATASETS)
    require(bool(values.input), "--input is not given, but must be an archive or a folder")
    require(values.max_bad_rows >= 0, f"--max_bad_rows is {values.max_bad_rows}, but must not be negative")
    begin = time.perf_counter()
    facts = prepare_movielens(Path(values.input), values.data_dir, values.max_bad_rows)
    print(json.dumps({**facts, "seconds": round(time.perf_counter() - begin, 2)}))
    return 0


def prepare_movielens(path: Path, data_dir: str, max_bad_rows: int) -> dict:
    """Prepares what `path` holds; returns counts for the command's last line.

    Raises:
      UserError: It is no MovieLens, has too many malformed rows, or is prepared already.
    """
    from jaxrec.data.datasets import movielens, movielens_files
    from jaxrec.data.text_tables import BadRows

    bad_rows = BadRows(max_bad_rows)
    with movielens_files.find(path) as source:
        folder = movielens.folder_of(data_dir, source.variant)
        require(
            not folder.exists(),
            f"{folder} exists already; train on it with --set=data.variant={source.variant}, or delete it",
        )
        ratings, rows_in = movielens_files.read(source, bad_rows)
        rows = movielens.write(folder, ratings, f"MovieLens {source.variant}, {source.layout.ratings}")
    for said in bad_rows.first:
        print(f"left out    {said}")
    read = len(ratings.user)
    require(rows == read, f"{folder} has {rows} rows, but {read} were read; delete it")
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    return {
        "dataset": folder.name, "rows_in": rows_in, "rows_out": rows, "bad_rows": bad_rows.count, "bytes": size,
    }  # fmt: skip


if __name__ == "__main__":
    jaxrec_flags.run_command(main, jaxrec_flags.define_prepare)
