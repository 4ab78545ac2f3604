"""Prepares a data set: `python -m jaxrec.prepare --dataset=tabular --input=clicks.csv --schema=clicks.toml`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from absl import flags

from jaxrec import flags as jaxrec_flags
from jaxrec.checks import one_of, require
from jaxrec.data.block_writer import COMPRESSIONS
from jaxrec.data.tabular.schema import check_name

DATASETS = ("movielens", "criteo", "tabular", "synthetic")
# The flags that belong to some data sets only.
_ONLY = {
    "schema": ("criteo", "tabular"), "propose": ("criteo", "tabular"), "vocabulary": ("criteo", "tabular"),
    "min_count": ("criteo", "tabular"), "max_table_rows": ("criteo", "tabular"),
    "name": ("criteo", "tabular", "synthetic"), "threads": ("criteo", "tabular"), "set": ("synthetic",),
    "input": ("movielens", "criteo", "tabular"),
}  # fmt: skip


def main() -> int:
    """Runs the command; returns its exit status."""
    values = flags.FLAGS
    one_of("--dataset", values.dataset or "", DATASETS)
    for name, users in _ONLY.items():
        require(
            not values[name].value or values.dataset in users,
            f"--{name} is given, but --dataset={values.dataset} has no use for it, only: {', '.join(users)}",
        )
    require(bool(values.input) or values.dataset == "synthetic", "--input is not given, but must be a file or a folder")
    require(values.max_bad_rows >= 0, f"--max_bad_rows is {values.max_bad_rows}, but must not be negative")
    for name, least in (("min_count", 1), ("max_table_rows", 2), ("threads", 1)):
        value = values[name].value
        require(value is None or value >= least, f"--{name} is {value}, but must be at least {least}")
    for flag in ("data_dir", "schema", "input"):
        value = values[flag].value or ""
        require(
            value.isprintable() and all(len(part) < 256 for part in value.split("/")),
            f"--{flag} is {value[:40]!r}, but must be a path of printable characters, each name of fewer than 256",
        )
    check_name("--name", values.name or "")
    one_of("--compression", values.compression, tuple(COMPRESSIONS))
    if values.propose:
        return _propose()
    begin = time.perf_counter()
    prepare = {
        "movielens": _movielens, "criteo": _table, "tabular": _table, "synthetic": _synthetic,
    }[values.dataset]  # fmt: skip
    folder, rows_in, rows_out, bad_rows = prepare()
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    require(
        rows_in - bad_rows == rows_out,
        f"{folder} has {rows_out} rows, but {rows_in} were read and {bad_rows} left out; delete it",
    )
    facts = {
        "dataset": folder.name, "rows_in": rows_in, "rows_out": rows_out, "bad_rows": bad_rows,
        "seconds": round(time.perf_counter() - begin, 2), "bytes": size,
    }  # fmt: skip
    print(json.dumps(facts))
    return 0


def _movielens() -> tuple[Path, int, int, int]:
    from jaxrec.data.datasets import movielens, movielens_files
    from jaxrec.data.tabular.text_tables import BadRows

    values = flags.FLAGS
    bad_rows = BadRows(values.max_bad_rows)
    with movielens_files.find(Path(values.input)) as source:
        folder = movielens.folder_of(values.data_dir, source.variant)
        require(
            not folder.exists(),
            f"{folder} exists already; train on it with --set=data.variant={source.variant}, or delete it",
        )
        ratings, rows_in = movielens_files.read(source, bad_rows)
        rows = movielens.write(folder, ratings, f"MovieLens {source.variant}, {source.layout.ratings}")
    _say_left_out(bad_rows)
    # Malformed rows of the catalogue count for --max_bad_rows, but are no ratings.
    return folder, rows_in, rows, rows_in - len(ratings.user)


def _table() -> tuple[Path, int, int, int]:
    from jaxrec.data.datasets import tabular
    from jaxrec.data.tabular.text_tables import BadRows

    values = flags.FLAGS
    files, schema = _files_and_schema()
    bad_rows = BadRows(values.max_bad_rows)
    source = f"{values.dataset}: {', '.join(f.path.name for f in files[:3])}{', ...' if len(files) > 3 else ''}"
    source = source.encode("utf-8", "replace").decode()  # A file's name may be any bytes.
    threads = values.threads or os.cpu_count() or 1
    folder, rows_in, rows_out = tabular.write(
        files, schema, values.data_dir, source, bad_rows, threads=threads, compression=values.compression
    )
    _say_left_out(bad_rows)
    return folder, rows_in, rows_out, bad_rows.count


def _files_and_schema():
    """Returns the files of the table and its schema, with a name."""
    import dataclasses

    from jaxrec.data.datasets import criteo
    from jaxrec.data.tabular import files as files_lib
    from jaxrec.data.tabular import schema as schema_lib

    values = flags.FLAGS
    path = table = Path(values.input)
    ids = {"vocabulary": values.vocabulary, "min_count": values.min_count, "max_rows": values.max_table_rows}
    if ids["vocabulary"] is not None:
        one_of("--vocabulary", ids["vocabulary"], schema_lib.VOCABULARIES)
    if values.dataset == "criteo":
        table = criteo.find(path)
    if values.schema:
        schema = schema_lib.load(Path(values.schema), **ids)
    else:
        require(
            values.dataset == "criteo",
            "--schema is not given, but must be a file that says what the columns are for; --propose writes one",
        )
        schema = criteo.schema(table, **ids)
    stem = path.name.split(".")[0]
    fallback = "".join(c if c.isalnum() or c in "_-" else "_" for c in stem) or "table"
    found = files_lib.find(path if schema.split.by == "files" else table, schema)
    return found, dataclasses.replace(schema, name=values.name or schema.name or fallback)


def _synthetic() -> tuple[Path, int, int, int]:
    from jaxrec.configs import overrides
    from jaxrec.data.datasets import synthetic

    values = flags.FLAGS
    data = overrides.apply(synthetic.SyntheticData(), values.set)
    folder, rows = synthetic.write(data, values.name or synthetic.NAME, values.data_dir, values.compression)
    return folder, rows, rows, 0


def _propose() -> int:
    from jaxrec.data.datasets import criteo
    from jaxrec.data.tabular import propose

    values = flags.FLAGS
    path = Path(values.schema or f"{(values.name or Path(values.input).name.split('.')[0]) or 'table'}.toml")
    require(not path.exists(), f"--schema is {str(path)!r}, which exists; name a file to be written")
    require(
        path.parent.is_dir(), f"--schema is {str(path)!r}, which cannot be written: there is no folder {path.parent}"
    )
    table: Path | list[Path] = Path(values.input)
    known = None
    if values.dataset == "criteo":
        table = criteo.find(table)
        known = criteo.schema(table)
    propose.propose(table, path, threads=values.threads or os.cpu_count() or 1, known=known)
    return 0


def _say_left_out(bad_rows) -> None:
    for said in bad_rows.first:
        print(f"left out    {said}")
    if bad_rows.padded:
        print(f"padded      {bad_rows.padded:,} rows lack their last fields, which are taken for missing values")


if __name__ == "__main__":
    jaxrec_flags.run_command(main, jaxrec_flags.define_prepare)
