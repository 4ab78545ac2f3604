"""The study's report: a pure function of its record."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from experiments.embedding_update.points import BATCHES, TABLES
from jaxrec.reporting import plots
from jaxrec.reporting.record import find
from jaxrec.reporting.sections import command, environment

QUESTION = "How fast are embedding rows looked up and updated by jaxrec's engines, by FBGEMM, by EmbeddingBag and by dense gradients, and how far is that from what memory allows?"
Record = Mapping[str, Any]

OURS, PEER = "jaxrec compiled", "FBGEMM"
PAIRS = (
    ("jaxrec compiled", "FBGEMM"),
    ("jaxrec XLA", "FBGEMM"),
    ("jaxrec compiled Adagrad", "EmbeddingBag Adagrad"),
)
FLOAT = 4


def _row(record: Record, stack: str, point: str, metric: str = "step") -> dict[str, Any]:
    return find(record, stack=stack, case=point, metric=metric)


def _ratio(record: Record, ours: str, peer: str, point: str) -> tuple[float, float, float]:
    """Returns the peer's time over ours: of the medians, and the least and the largest of the turns."""
    a, b = _row(record, ours, point)["samples"], _row(record, peer, point)["samples"]
    turns = [y / x for x, y in zip(a, b, strict=True)]
    return median(b) / median(a), min(turns), max(turns)


def _pairs(record: Record) -> list[tuple[str, str]]:
    return [p for p in PAIRS if set(p) <= set(record["stacks"])]


def _bytes(record: Record, point: Mapping[str, Any]) -> tuple[float, float]:
    """Returns the bytes that a step must move: of rows, by index, and of pooled vectors, in order."""
    rows = _row(record, "jaxrec", point["name"], "rows")["median"]
    # Each distinct row once in the lookup; in the update it and its accumulator are read and written.
    of_row = 3 * point["dim"] * FLOAT + 2 * FLOAT
    return rows * of_row, 2 * point["batch"] * TABLES * point["dim"] * FLOAT


def bound_ms(record: Record, point: Mapping[str, Any]) -> float:
    """Returns the least time of a step: rows at the rate of random rows, or vectors at the rate of copies."""
    by_index, in_order = _bytes(record, point)
    random, copy = (max(_row(record, "jaxrec", point["name"], m)["samples"]) for m in ("random", "copy"))
    return 1e3 * max(by_index / random, in_order / copy)


def finding(record: Record) -> str:
    """Returns the answer in a sentence."""
    names = [p["name"] for p in record["points"]]
    if (OURS, PEER) not in _pairs(record):
        times = ", ".join(f"{_row(record, s, names[0])['median']:.3g} ms ({s})" for s in record["stacks"])
        return f"At {names[0]} a lookup with its update takes {times}; there is no peer in this record."
    ratios = {n: _ratio(record, OURS, PEER, n)[0] for n in names}
    low, high = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    slower = [n for n in names if ratios[n] < 1]
    said = (
        "FBGEMM is faster at " + "; ".join(slower)
        if slower
        else f"faster at all {len(names)} points"
        if len(names) > 1
        else "faster"
    )
    return (
        f"With row-wise Adagrad, jaxrec's compiled engine is {ratios[low]:.2f} ({low}) to {ratios[high]:.2f} ({high}) "
        f"times as fast as FBGEMM: {said}."
    )


def _shares(record: Record) -> str:
    shares = [
        bound_ms(record, p) / _row(record, OURS, p["name"])["median"] for p in record["points"] if p["law"] == "uniform"
    ]
    if not shares or OURS not in record["stacks"]:
        return ""
    return f" With uniform ids it reaches {min(shares):.0%} to {max(shares):.0%} of the bound of random rows."


def render(record: Record) -> str:
    """Returns report.md."""
    points = record["points"]
    stacks = record["stacks"]
    names = [p["name"] for p in points]

    def cell(stack: str, point: str, metric: str) -> str:
        r = _row(record, stack, point, metric)
        return f"{r['median']:.2f} ({min(r['samples']):.2f} to {max(r['samples']):.2f})"

    def table(metric: str, of: list[str]) -> list[str]:
        return [
            "| point | " + " | ".join(of) + " |",
            "|---|" + "---|" * len(of),
            *(f"| {n} | " + " | ".join(cell(s, n, metric) for s in of) + " |" for n in names),
        ]

    pairs = _pairs(record)
    ratio_rows = []
    for p in points:
        cells = []
        for ours, peer in pairs:
            ratio, low, high = _ratio(record, ours, peer, p["name"])
            cells.append(f"{ratio:.2f} ({low:.2f} to {high:.2f})")
        share = f"{bound_ms(record, p) / _row(record, OURS, p['name'])['median']:.0%}" if OURS in stacks else "-"
        distinct = _row(record, "jaxrec", p["name"], "rows")["median"]
        ratio_rows.append(
            f"| {p['name']} | {distinct:,.0f} | {bound_ms(record, p):.2f} | {share} | " + " | ".join(cells) + " |"
        )
    checked = [s for s in stacks if any(r["stack"] == s and r["metric"] == "checked_step" for r in record["rows"])]
    settings = [
        f"| {n} | {s} | " + ", ".join(f"{k} {v}" for k, v in record["settings"][n][s].items()) + " |"
        for n in names
        for s in stacks
        if "checks" not in record["settings"][n][s]
    ]
    worst = max(d for of_point in record["differences"].values() for d in of_point.values())
    absent = "".join(f" {s} was not measured: {why}." for s, why in record["absent"].items())
    return "\n".join([
        "# Lookup and update of embedding rows",
        "",
        f"**Question.** {QUESTION}",
        "",
        f"**Answer.** {finding(record)}{_shares(record)} Every time here is **measured**; the bounds are computed from measured rates.{absent}",
        "",
        "![Milliseconds of a lookup and update, for each point and implementation](step.svg)",
        "",
        "## How to run",
        "",
        command(record),
        "",
        environment(record) + f" `OMP_WAIT_POLICY={record['omp_wait_policy']}`.",
        "",
        f"A point is dim x bag x batch: {len(names)} points of {TABLES} tables of {points[0]['rows']:,} float32 rows, bags full and summed; Zipf ids have exponent 1.2, "
        "their ranks permuted over the rows. Each implementation is a process of its own that keeps freed memory; they take turns forth and back, "
        f"{record['rounds']} each of about {record['seconds']:g} s, over {BATCHES} batches. Before, each has taken {record['compared_steps']} steps from the same "
        f"rows, and those of one optimizer agree within {worst:.1g} of the largest change (the limit is {record['agree']:g}). The loss is the sum of the squares of the "
        "pooled vectors. FBGEMM checks no ids and no values; jaxrec always checks ids, and values only in the row that says so.",
        "",
        "## The bound, and the ratios",
        "",
        "The bound: each distinct row is read by the lookup, and read and written with its accumulator by the update, at the rate at which this machine "
        "reads random rows of that width; or the pooled vectors and their gradients are read at the rate of copies, whichever takes longer. Repeated rows are counted once: with Zipf ids "
        "a step reads them from caches, at a cost that the bound leaves out. A ratio is the peer's time over jaxrec's: above 1 jaxrec is faster; in brackets the least and "
        "the largest of the turns. No ratio is taken across optimizers.",
        "",
        "| point | distinct rows | bound, ms | share of it reached | " + " | ".join(f"{peer} / {ours}" for ours, peer in pairs) + " |",
        "|---|---|---|---|" + "---|" * len(pairs),
        *ratio_rows,
        "",
        "## Milliseconds of a lookup and update: median (spread)",
        "",
        *table("step", stacks),
        "",
        "## Of the lookup alone",
        "",
        *table("forward", stacks),
        "",
        *(["## With the check of finite values", "", *table("checked_step", checked), ""] if checked else []),
        "## Settings of the peers, the fastest of those tried",
        "",
        *(["| point | implementation | setting |", "|---|---|---|", *settings] if settings else ["No peer was measured."]),
        "",
        "## What was tried",
        "",
        "- Parts of an update by a hash of the row, rows in the order of their first occurrence: parts by ranges, rows ascending, share pages.",
        "- A prefetch in a loop of its own: GCC removes such a loop, and did. What keeps the loop made the update much faster.",
        "- A prefetch that does not ask for ownership of the line (no `-mprfchw`): after a lookup, whose rows the other core holds, the update took longer.",
        "- Lookups vector by vector instead of row by row: no difference that can be measured; it was kept, as it needs no table's pages but one's.",
        "- Shorter and longer distances of the prefetch, larger parts: small differences.",
        "",
        "## What limits the conclusion",
        "",
        "One machine of few shared cores, tables of one size, full bags, float32. Whether caches hold a batch's gradients or rows depends on the machine, and so do "
        "ratios. On CPUs FBGEMM's update uses one thread however many there are. The rate of random rows is that of reading; writing them is counted at the same rate. The processes hold their tables all at once: with the widest rows that fills "
        "this machine's memory, and spreads are wide.",
        "",
        "## Next measurement",
        "",
        "More cores, and narrow tables; tables of many gigabytes.",
        "",
    ])  # fmt: skip


def figures(record: Record) -> dict[str, str]:
    """Returns the report's pictures."""
    names = [p["name"] for p in record["points"]]
    rows = {s: [_row(record, s, n) for n in names] for s in record["stacks"] if "dense" not in s}
    return {
        "step.svg": plots.grouped_bars(
            names,
            {s: [r["median"] for r in of_stack] for s, of_stack in rows.items()},
            unit="milliseconds",
            title="Lookup and update: median, and the spread of the turns",
            spreads={s: [(min(r["samples"]), max(r["samples"])) for r in of_stack] for s, of_stack in rows.items()},
        )
    }
