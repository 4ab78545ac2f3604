"""The study's report: a pure function of its record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrec.reporting import plots
from jaxrec.reporting.record import find
from jaxrec.reporting.sections import command, environment

QUESTION = "What does each sharding of tables and dense parameters exchange and hold, and does it compute the same?"
OPS = ("all-to-all", "all-gather", "reduce-scatter", "all-reduce", "collective-permute")
TABLE_PARTS = ("table weights", "table optimizer rows", "scratch for merging")
DENSE_PARTS = ("dense parameters", "dense optimizer")
PARTS = (*TABLE_PARTS, *DENSE_PARTS, "temporaries")
# Beyond this a layout is said to compute something else. A lost or doubled update is of order 1.
AGREES = 1e-3
Record = Mapping[str, Any]


def _layouts(record: Record, claim: str = "measured") -> list[tuple[str, str]]:
    """Returns (case, layout) of what was run (or only compiled), in the record's order."""
    return list(dict.fromkeys((r["case"], r["name"]) for r in record["rows"] if r["claim"] == claim))


def _value(record: Record, case: str, name: str, metric: str) -> float:
    """Returns a median; 0 for a collective that the program has not."""
    rows = [r for r in record["rows"] if (r["case"], r["name"], r["metric"]) == (case, name, metric)]
    return find(record, case=case, name=name, metric=metric)["median"] if rows else 0.0


def _sum(record: Record, case: str, name: str, metrics: tuple[str, ...]) -> float:
    return sum(_value(record, case, name, m) for m in metrics)


def _kib(size: float) -> str:
    return f"{size / 2**10:,.1f}"


def _mib(size: float) -> str:
    return f"{size / 2**20:,.2f}"


def _mesh(case: str) -> str:
    return case.split(", ", maxsplit=1)[0]


def _is_split(case: str) -> bool:
    return not _mesh(case).endswith("model:1")


def _main(record: Record) -> tuple[str, list[str]]:
    """Returns the first case that was run, and its layouts with whole dense parameters."""
    case = _layouts(record)[0][0]
    return case, [name for c, name in _layouts(record) if c == case and "fsdp" not in name]


def _difference(record: Record) -> float:
    return max(_value(record, c, n, "largest difference to one device") for c, n in _layouts(record))


def finding(record: Record) -> str:
    """Returns the answer in a sentence."""
    case, names = _main(record)
    exchange = {n: _value(record, case, n, "embedding exchange") for n in names}
    held = {n: _sum(record, case, n, TABLE_PARTS) for n in names}

    def ends(sizes: dict[str, float], show: Any, unit: str) -> str:
        low, high = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
        return f"from {show(sizes[low])} {unit} ({low}) to {show(sizes[high])} {unit} ({high})"

    worst = _difference(record)
    same = (
        f"every layout ends within {worst:.1g} of one device's weights"
        if worst <= AGREES
        else f"not every layout ends with one device's weights: the largest difference is {worst:.2g}"
    )
    return (
        f"On {record['devices']} simulated devices ({case}) a device receives {ends(exchange, _kib, 'KiB')} a step for the "
        f"tables, and holds {ends(held, _mib, 'MiB')} of them; {same}, relative to what {record['steps']} steps changed."
    )


def render(record: Record) -> str:
    """Returns report.md."""
    data = record["config"]
    lines = [
        "# What each sharding exchanges and holds",
        "",
        f"**Question.** {QUESTION}",
        "",
        f"**Answer.** {finding(record)} {_formula(record)} {_bottleneck(record)} Weights, bytes and memory are **measured** on "
        "simulated devices; what uniform ids exchange is **compiled, not run**. Nothing here is about speed.",
        "",
        "![Bytes that a device receives in a step, by collective, for each layout](received.svg)",
        "",
        "## How to run",
        "",
        command(record),
        "",
        "## Environment",
        "",
        environment(record),
        "",
        f"{data['name']} with {len(record['table_rows'])} tables of {min(record['table_rows']):,} to "
        f"{max(record['table_rows']):,} rows ({sum(record['table_rows']):,} in all, in the proportions of Criteo's Kaggle "
        f"columns), {data['embedding']['dim']} columns, {data['embedding']['optimizer']['name']}; a global batch of "
        f"{data['training']['batch_size']:,} rows, {record['steps']} steps, exchange capacities measured with a margin of "
        f"{data['embedding']['capacity_margin']:g}. fsdp is shown with row_cyclic tables: dense parameters travel apart from tables.",
        "",
        "## Which one to choose",
        "",
        *_choice(record),
        "",
        "## What a device receives in a step, KiB (number of operations)",
        "",
        *_received_table(record),
        "",
        "The tables' exchange is what the program's lookup and update receive but for all-reduce; the formula is "
        "`exchanged_bytes` at the measured capacities. The worst case has room for every id being another row of one shard. "
        f"{_same_exchange(record)}",
        "",
        "## What a device holds, MiB",
        "",
        "![Bytes that a device holds, by what they are, for each layout](memory.svg)",
        "",
        *_memory_table(record),
        "",
        "Every device holds as much as every other, padding included: a layout whose shards are uneven pays for the fullest on "
        "all devices. The batch is left out, and so are outputs that are not written in place, which are at most "
        f"{max(_value(record, c, n, 'not aliased outputs') for c, n in _layouts(record)):,.0f} bytes.",
        "",
        "## Balance, and room",
        "",
        *_balance_table(record),
        "",
        "Heaviest over mean: 1 is even. Rows held are those of tables that are split by rows, without padding; asked is what the "
        "holders of such tables are asked for in a step, every id counted, or each distinct row once a device; medians over the "
        f"{record['steps']} batches. Room filled is the share of the buffers' rows that are asked for: the rest travels as padding.",
        "",
        "## The same weights",
        "",
        *_same_table(record),
        "",
        "The largest difference of any element of any logical array (weights and optimizer state), over the largest change that "
        "training made to its array: an update that is lost or counted twice would be of order 1. Adagrad's accumulators start "
        "from 1: from 0 its first steps are as long for a rounding error as for a gradient. Sums over devices are taken in "
        "another order than on one device, so the last bits differ; layouts with the same digest agree in every bit.",
        "",
        "## What limits the conclusion",
        "",
        "Simulated devices share a memory: there is no link, no latency, no bandwidth, no overlap of communication and "
        "computation, and nothing here says which layout is fastest. Bytes received are exact for these programs but for "
        "all-reduce, for which a ring is assumed; temporaries are XLA:CPU's choice, and another compiler may turn one collective "
        "into another ([compile_only](../compile_only/report.md)). All links count alike. Ids are drawn independently by "
        "feature and row: real rows repeat together. One model, one batch size, one margin: with more rows a device, more ids "
        "repeat and fewer distinct rows are sent for each.",
        "",
        "## Next measurement",
        "",
        "The same layouts on several GPUs of a host: the time of each collective, and how much of it hides behind computation.",
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def _formula(record: Record) -> str:
    every = [*_layouts(record), *_layouts(record, "compiled, not run")]
    apart = [
        f"{n} ({c})"
        for c, n in every
        if _value(record, c, n, "embedding exchange") != _value(record, c, n, "embedding exchange by formula")
    ]
    if not apart:
        return f"In all {len(every)} compiled programs the tables' exchange is the formula's, to the byte."
    return f"Formula and program differ for {', '.join(apart)}."


def _bottleneck(record: Record) -> str:
    case, names = _main(record)
    shares = {n: _value(record, case, n, "embedding exchange") / _value(record, case, n, "received") for n in names}
    low, high = min(shares.values()), max(shares.values())
    most = (
        "the tables' exchange" if low > 0.5 else "the sum of the dense gradients" if high < 0.5 else "one or the other"
    )
    return (
        f"Of all that a device receives there, the tables' exchange is {low:.0%} to {high:.0%}, and the rest is the sum of the "
        f"dense gradients: what moves most is {most}, at this batch size."
    )


def _same_exchange(record: Record) -> str:
    whole = [(c, n) for c, n in _layouts(record) if not _is_split(c)]
    if not whole:
        return ""
    alike = len({_value(record, c, n, "embedding exchange") for c, n in whole}) == 1
    said = "all layouts exchange the same" if alike else "layouts do not exchange the same"
    return f"On {_mesh(whole[0][0])} nothing is split, and {said}."


def _received_table(record: Record) -> list[str]:
    used = [op for op in OPS if any(r["metric"] == f"number of {op}" for r in record["rows"])]
    lines = [
        f"| mesh, ids | layout | {' | '.join(used)} | in all | tables' exchange | by formula | its worst case | claim |",
        "|---|---|" + "---|" * (len(used) + 5),
    ]
    ends = ("received", "embedding exchange", "embedding exchange by formula", "embedding exchange, worst case")
    for claim in ("measured", "compiled, not run"):
        for case, name in _layouts(record, claim):
            cells = [
                f"{_kib(_value(record, case, name, f'received by {op}'))} ({_value(record, case, name, f'number of {op}'):.0f})"
                for op in used
            ]
            cells += [_kib(_value(record, case, name, m)) for m in ends]
            lines.append(f"| {case} | {name} | {' | '.join(cells)} | {claim} |")
    return lines


def _memory_table(record: Record) -> list[str]:
    lines = [f"| mesh | layout | {' | '.join(PARTS)} | in all |", "|---|---|" + "---|" * (len(PARTS) + 1)]
    for case, name in _layouts(record):
        cells = [_mib(_value(record, case, name, p)) for p in PARTS]
        lines.append(f"| {_mesh(case)} | {name} | {' | '.join(cells)} | {_mib(_sum(record, case, name, PARTS))} |")
    return lines


def _balance_table(record: Record) -> list[str]:
    lines = [
        "| mesh, ids | layout | rows held | ids asked | rows asked | rows of room a device and destination (of the worst case) | room filled | fullest over room | rows that did not fit | steps refused |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for claim in ("measured", "compiled, not run"):
        for case, name in _layouts(record, claim):
            if not _is_split(case):
                continue
            cells = [
                f"{_value(record, case, name, f'{m}, heaviest / mean'):.2f}"
                for m in ("rows held", "ids asked", "rows asked")
            ]
            room = record["capacities"][case][name].values()
            cells.append("; ".join(f"{g['sharding']} {g['capacity']:,} ({g['worst case']:,})" for g in room))
            cells.append(f"{_value(record, case, name, 'room filled'):.0%}")
            fullest = find(record, case=case, name=name, metric="fullest destination / room")["samples"]
            cells.append(f"{max(fullest):.2f}")
            run = claim == "measured"
            cells += [
                f"{_value(record, case, name, m):,.0f}" if run else "not run"
                for m in ("rows that did not fit", "steps refused")
            ]
            lines.append(f"| {case} | {name} | {' | '.join(cells)} |")
    return lines


def _same_table(record: Record) -> list[str]:
    lines = [
        f"| mesh | layout | largest difference | arrays equal bit for bit, of {record['arrays']} | digest |",
        "|---|---|---|---|---|",
    ]
    for case, name in _layouts(record):
        difference = _value(record, case, name, "largest difference to one device")
        equal = _value(record, case, name, "arrays equal to one device's bit for bit")
        digest = record["digests"][case][name]
        lines.append(f"| {_mesh(case)} | {name} | {difference:.1e} | {equal:.0f} | `{digest}` |")
    return lines


def _choice(record: Record) -> list[str]:
    case, names = _main(record)
    lines = [f"By the figures of {case}; exchange is what a device receives for the tables in a step."]

    def exchange(name: str) -> str:
        return f"{_kib(_value(record, case, name, 'embedding exchange'))} KiB"

    def held(name: str) -> str:
        return f"{_mib(_sum(record, case, name, TABLE_PARTS))} MiB"

    def uneven(name: str, what: str) -> str:
        return f"{_value(record, case, name, f'{what}, heaviest / mean'):.2f}"

    said = {
        "replicated": lambda: (
            f"while tables are small beside a device's memory: a lookup needs no exchange, but every device "
            f"receives every row gradient ({exchange('replicated')}) and holds everything ({held('replicated')})."
        ),
        "row": lambda: (
            f"{exchange('row')}, {held('row')}; contiguous ranges of rows: whichever range has the frequent tables is "
            f"asked for {uneven('row', 'ids asked')} times the mean in ids and {uneven('row', 'rows asked')} times in distinct rows."
        ),
        "row_cyclic": lambda: (
            f"{exchange('row_cyclic')}, {held('row_cyclic')}; rows dealt out: {uneven('row_cyclic', 'ids asked')} "
            f"times the mean in ids and {uneven('row_cyclic', 'rows asked')} in distinct rows. The choice for tables that are large "
            "and skewed."
        ),
        "table": lambda: (
            f"{exchange('table')}, {held('table')}; whole tables: the fullest device has {uneven('table', 'rows held')} "
            "times the mean of rows, and all are padded to it. For many tables of like size, none above a device's share."
        ),
        "column": lambda: (
            f"{exchange('column')}, {held('column')}; always even, and ids are known to all: every device must look up "
            "every row of its group, and the dimension must divide. For few, wide tables."
        ),
        "auto": lambda: f"{exchange('auto')}, {held('auto')}; by size: {_chosen(record, case)}.",
    }
    lines += [f"- **{name}**: {said[name]()}" for name in names]
    for other, name in _layouts(record):
        whole = name.removesuffix(", fsdp")
        if name != whole and _is_split(other) and (other, whole) in _layouts(record):
            dense = [_mib(_sum(record, other, n, DENSE_PARTS)) for n in (whole, name)]
            received = [_kib(_value(record, other, n, "received")) for n in (whole, name)]
            lines.append(
                f"- **fsdp** ({_mesh(other)}): dense parameters and their optimizer take {dense[1]} MiB of a device instead of "
                f"{dense[0]}, and a device receives {received[1]} KiB a step in all instead of {received[0]}: for dense parts that "
                "do not fit, not for small ones."
            )
    return [lines[0], "", *lines[1:]]


def _chosen(record: Record, case: str) -> str:
    return ", ".join(f"{g['tables']} tables {g['sharding']}" for g in record["capacities"][case]["auto"].values())


def figures(record: Record) -> dict[str, str]:
    """Returns the report's pictures."""
    # Where nothing is split the layouts are alike, and one stands for all.
    whole = [(c, n) for c, n in _layouts(record) if not _is_split(c)][:1]
    shown = [(c, n) for c, n in _layouts(record) if _is_split(c)] + whole
    bars = [f"{n}, {_mesh(c)}" for c, n in shown]
    received = plots.stacked_bars(
        bars,
        {
            op: sizes
            for op in OPS
            if any(sizes := [_value(record, c, n, f"received by {op}") / 2**10 for c, n in shown])
        },
        unit="KiB a device and step",
        title="What a device receives in a step, by collective",
    )
    memory = plots.stacked_bars(
        bars,
        {part: [_value(record, c, n, part) / 2**20 for c, n in shown] for part in PARTS},
        unit="MiB a device",
        title="What a device holds",
    )
    return {"received.svg": received, "memory.svg": memory}
