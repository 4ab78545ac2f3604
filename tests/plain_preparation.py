"""A table prepared row by row in plain Python: what `encode` must write, however its parts are cut and counted."""

from __future__ import annotations

import collections
import hashlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxrec.data.tabular.schema import TableColumn, TableSchema

SPLITS = ("train", "validation", "test")
_ALL = 2**64 - 1


class Prepared(NamedTuple):
    """A prepared table.

    Attributes:
      splits: By name, its rows: labels, dense, weight, timestamp, group, position and, as `<column>/ids`, an id or ids.
      tables: Rows of each embedding table.
      unseen: By held-out split and column.
      events: By group, (time, ids by column with a history) of its training rows, in the order of time.
      bad: Of each malformed row, which row it is.
    """

    splits: dict[str, list[dict[str, Any]]]
    tables: dict[str, int]
    unseen: dict[str, dict[str, int]]
    events: dict[int, list[tuple[int, dict[str, int]]]]
    bad: list[int]


def key_of(text: str) -> int:
    """The key of a value."""
    data = text.encode()
    if len(data) > 256:
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    key = len(data) * 0x9E3779B97F4A7C15 & _ALL
    for at in range(0, max(len(data), 1), 8):
        key = mixed(key ^ int.from_bytes(data[at : at + 8].rjust(8, b"\0") if data else b"\0", "little"))
    return key


def mixed(key: int) -> int:
    """The mix of 64 bits."""
    for _ in range(2):
        key = (key ^ key >> 32) * 0xD6E8FEB86659FD93 & _ALL
    return key ^ key >> 32


def number(text: str) -> float | None:
    """What a field says that must be a number: NaN if it is empty, None if it is none."""
    text = text.strip()
    if not text:
        return math.nan
    if set(text) - set("0123456789+-.eE"):
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def whole(text: str) -> int | None:
    """What a field says that must be a whole number of 64 bits."""
    if set(text.strip()) - set("0123456789-"):
        return None
    try:
        value = int(text.strip())
    except ValueError:
        return None
    return value if -(2**63) <= value < 2**63 else None


def prepare(rows: Sequence[dict[str, str]], files: Sequence[int], schema: TableSchema) -> Prepared:
    """Prepares rows of text, of which `files` says the file that each is of."""
    good, bad = [], []
    for i, (row, file) in enumerate(zip(rows, files, strict=True)):
        values = values_of(row, schema)
        if values is None:
            bad.append(i)
        else:
            good.append({**values, "file": file})
    names = _split(good, schema)
    train = [row for row, name in zip(good, names, strict=True) if name == "train"]
    ids = {table: _ids([v for row in train for c in columns for v in row["of"][c.name]], columns[0])
           for table, columns in schema.tables.items()}  # fmt: skip
    users = collections.Counter(row["user"] for row in good if row["user"] is not None)
    groups = {u: i for i, u in enumerate(sorted(users, key=lambda u: (-users[u], key_of(u))))}
    moments = {c.name: _moments([row["dense"][i] for row in train])
               for i, c in enumerate(schema.of("dense")) if c.transform == "standard"}  # fmt: skip
    events = collections.defaultdict(list)
    histories = [c for c in schema.columns if c.history]
    for row in sorted(train, key=lambda row: row["time"] or 0):
        if histories and row["user"]:
            of_row = {c.name: _id(row["of"][c.name][0], c, ids) for c in histories}
            events[groups[row["user"]]].append((row["time"], of_row))
    splits = {name: [] for name in SPLITS}
    seen = {c.name: {_id(v, c, ids) for row in train for t in schema.tables[c.table] for v in row["of"][t.name]}
            for c in schema.of("categorical", "bag")}  # fmt: skip
    unseen = {name: {c.name: 0 for c in schema.of("categorical", "bag")} for name in SPLITS[1:]}
    for row, name in zip(good, names, strict=True):
        out: dict[str, Any] = {"labels": row["labels"], "weight": row["weight"], "timestamp": row["time"]}
        out["dense"] = []
        for c, value in zip(schema.of("dense"), row["dense"], strict=True):
            mean, deviation = moments.get(c.name, (0.0, 1.0))
            out["dense"].append(0.0 if math.isnan(value) else (value - mean) / deviation)
        out["group"] = groups[row["user"]] if row["user"] is not None else None
        earlier = [t for t, _ in events[out["group"]] if t < row["time"]] if histories else []
        out["position"] = len(earlier)
        for c in schema.of("categorical", "bag"):
            found = [_id(v, c, ids) for v in row["of"][c.name]]
            out[f"{c.name}/ids"] = found if "bag" in c.use else found[0]
            if name != "train":
                new = [i == 0 if c.ids.vocabulary == "frequency" else i not in seen[c.name] for i in found]
                unseen[name][c.name] += sum(new)
        splits[name].append(out)
    tables = {t: len(ids[t]) + 1 if c[0].ids.vocabulary == "frequency" else c[0].ids.max_rows
              for t, c in schema.tables.items()}  # fmt: skip
    return Prepared(splits, tables, unseen, dict(events), bad)


def values_of(row: dict[str, str], schema: TableSchema) -> dict[str, Any] | None:
    """What a row says; None: it is malformed."""
    labels, dense, weight, time = [], [], None, None
    for c in (*schema.of("label"), *schema.of("auxiliary")):
        value = number(row[c.name])
        if c.positive is not None:
            labels.append(float(row[c.name] == c.positive))
        elif value is None or math.isnan(value) or (c.at_least is None and value not in (0, 1)):
            return None
        else:
            labels.append(value if c.at_least is None else float(value >= c.at_least))
    for c in schema.of("dense"):
        value = number(row[c.name])
        if value is None:
            return None
        if c.transform == "log":
            value = math.copysign(math.log1p(abs(value)), value)
        if abs(value) > 3.4028235677973366e38:  # Half way to what would follow float32's greatest.
            return None
        dense.append(value)
    for c in schema.of("weight"):
        weight = number(row[c.name])
        if weight is None or not 0 <= weight < 3.4028235677973366e38:
            return None
    for c in schema.of("time"):
        time = whole(row[c.name])
        if time is None:
            return None
    of = {}
    for c in schema.of("categorical", "bag"):
        of[c.name] = [v for v in row[c.name].split(c.separator) if v] if "bag" in c.use else [row[c.name]]
    split = [row[c.name] for c in schema.of("split")] if schema.split.by == "column" else []
    if split and split[0] not in SPLITS:
        return None
    user = [row[c.name] for c in schema.of("user")]
    return {"labels": labels, "dense": dense, "weight": weight, "time": time, "of": of,
            "user": user[0] if user else None, "split": split[0] if split else None}  # fmt: skip


def _split(rows: list[dict[str, Any]], schema: TableSchema) -> list[str]:
    rule = schema.split
    n, held = len(rows), rule.validation + rule.test
    by_share = lambda place, first, second: SPLITS[(place >= first) + (place >= second)]  # noqa: E731
    if rule.by == "files":
        return [SPLITS[row["file"]] for row in rows]
    if rule.by == "column":
        return [row["split"] for row in rows]
    if rule.by == "order":
        return [by_share(i, n - round(held * n), n - round(rule.test * n)) for i in range(n)]
    if rule.by == "last_file":
        first = sum(row["file"] < rows[-1]["file"] for row in rows)
        return [by_share(i, first, first + (n - first) // 2) for i in range(n)]
    if rule.by == "time":
        times = sorted(row["time"] for row in rows)
        bounds = [times[n - max(1, round(share * n))] for share in (held, rule.test)]
        return [by_share(row["time"], *bounds) for row in rows]
    keys = [key_of(row["user"]) for row in rows] if rule.by == "user" else range(n)
    return [by_share((mixed(k ^ mixed(rule.seed + 1)) >> 11) / 2**53, 1 - held, 1 - rule.test) for k in keys]


def _ids(values: list[str], column: TableColumn) -> dict[str, int]:
    """The vocabulary of a table: value -> id from 1; empty with hashes."""
    if column.ids.vocabulary == "hash":
        return {}
    counts = collections.Counter(values)
    often = sorted((v for v in counts if counts[v] >= column.ids.min_count), key=lambda v: (-counts[v], key_of(v)))
    return {v: i + 1 for i, v in enumerate(often[: column.ids.max_rows - 1])}


def _id(value: str, column: TableColumn, ids: dict[str, dict[str, int]]) -> int:
    if column.ids.vocabulary == "hash":
        return key_of(value) % column.ids.max_rows
    return ids[column.table].get(value, 0)


def _moments(values: list[float]) -> tuple[float, float]:
    there = [v for v in values if not math.isnan(v)]
    if not there:
        return 0.0, 1.0
    mean = math.fsum(there) / len(there)
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in there) / len(there))
    return mean, deviation if deviation > 1e-12 * max(abs(mean), 1) else 1.0
