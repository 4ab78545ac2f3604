"""The study's report: a pure function of its record."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from jaxrec.reporting.record import find
from jaxrec.reporting.sections import environment

QUESTION = (
    "What does a training step need on a TPU slice, on 8 and 32 H100, on 256 devices: memory per device, collectives and "
    "their bytes?"
)
OPS = ("all-to-all", "all-gather", "reduce-scatter", "all-reduce", "collective-permute")


def render(record: Mapping[str, Any]) -> str:
    """Returns report.md."""
    targets, layouts = record["targets"], list(record["layouts"])
    value, total = functools.partial(_value, record), functools.partial(_total, record)

    def mib(target: str, layout: str, metric: str) -> str:
        return f"{value(target, layout, metric) / 2**20:,.1f}"

    lines = [
        "# The training step on devices that are not here",
        "",
        f"**Question.** {QUESTION}",
        "",
        f"**Answer.** {_answer(record)} Every figure here is **compiled, not run**: it says nothing about speed.",
        "",
        f"The step is that of `{record['config']}` with row-wise Adagrad, products in bfloat16, and "
        f"{record['rows_of_device']:,} rows of the batch a device (Zipf ids, exchange capacities "
        "measured on batches of the same law).",
        "",
        "Layouts:",
        "",
        *(
            f"- {name}: tables {sharding} in {dtype}, dense parameters {'split over model (fsdp)' if dense == 'fsdp' else 'whole'}"
            for name, (sharding, dtype, dense) in record["layouts"].items()
        ),
        "",
        "## Memory of a device, MiB",
        "",
        "| target | layout | state and batch | temporaries | not aliased | total | of the device's memory | tables copied a step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for target, facts in targets.items():
        for layout in layouts:
            share = total(target, layout) / (facts["memory_gib"] * 2**30) if facts["memory_gib"] else None
            cells = [mib(target, layout, m) for m in ("arguments", "temporaries", "not aliased outputs")]
            lines.append(
                f"| {target} | {layout} | {' | '.join(cells)} | {total(target, layout) / 2**20:,.1f} | "
                f"{'-' if share is None else f'{share:.1%}'} | {mib(target, layout, 'copies of tables')} |"
            )
    copying = [t for t in targets if any(value(t, layout, "copies of tables") for layout in layouts)]
    if copying:
        lines += [
            "",
            f"On {', '.join(copying)} the compiler copies whole tables in every step, to another layout and back: the state is "
            "donated, but the layout that it gives to the step's parameters is not the one that its scatter wants. That is to "
            "be mended before training there, by fixing the layout of the tables.",
        ]
    used = [op for op in OPS if any(r["metric"] == f"number of {op}" for r in record["rows"])]
    lines += [
        "",
        "## What a device receives in a step, MiB (number of operations)",
        "",
        "| target | layout | " + " | ".join(used) + " | in all | embedding exchange by formula | its worst case |",
        "|---|---|" + "---|" * (len(used) + 3),
    ]
    for target in targets:
        for layout in layouts:
            cells = [
                f"{mib(target, layout, f'received by {op}')} ({value(target, layout, f'number of {op}'):.0f})"
                for op in used
            ]
            ends = ("received", "embedding exchange by formula", "embedding exchange, worst case")
            lines.append(f"| {target} | {layout} | {' | '.join([*cells, *(mib(target, layout, m) for m in ends)])} |")
    lines += [
        "",
        "## Targets",
        "",
        "| target | device | topology | mesh | compiler |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {f['device']} | {f['topology'] or '-'} | data:{f['mesh']['data']},model:{f['mesh']['model']} | "
            f"{f['compiler']} {f['compiler_version']} |"
            for name, f in targets.items()
        ),
        "",
        "## How to run",
        "",
        "    make compile_only PYTHON=python3.12 VENV=.venv312   # installs the compilers, compiles, writes this report",
        "",
        environment(record),
        "",
        "## What limits the conclusion",
        "",
        "Temporaries are each compiler's own choice, and differ between targets and layouts in ways that the layout alone does not "
        "explain; the simulated devices' are XLA:CPU's. `not aliased` is what a step returns in new memory: 0 says that the whole "
        "state is updated in place, as far as the interface of the program tells. "
        "Nothing was run: no time, no overlap of communication and computation, no fragmentation of memory. Bytes received are "
        "exact for all but `all-reduce`, for which a ring is assumed. Operations inside a loop count once; the step has none "
        "around a collective. `received` covers all links alike, within a host and between hosts. A compiler may turn "
        "one kind of operation into another (on the TPUs the `all-gather` of row numbers became an `all-reduce`, and fsdp's `reduce-scatter` too), and hold "
        "buffers that `memory_analysis` does not list. The worst case is what would cross the wire if every id of a device's "
        "batch were another row of one shard; the exchange holds the most that was measured, times a margin.",
        "",
        "## Next measurement",
        "",
        "The same programs, run on these devices.",
        "",
    ]
    return "\n".join(lines)


def finding(record: Mapping[str, Any]) -> str:
    """Returns the answer in a sentence."""
    needs = [[_total(record, t, layout) / 2**20 for layout in _extremes(record, t)] for t in record["targets"]]
    (low, high), (least, most) = ((min(mib), max(mib)) for mib in zip(*needs, strict=True))
    return (
        f"The leanest layout needs {low:,.0f} to {high:,.0f} MiB of a device, the largest {least:,.0f} to {most:,.0f} MiB, "
        f"over {', '.join(record['targets'])}: compiled, not run."
    )


def _answer(record: Mapping[str, Any]) -> str:
    parts = []
    for target in record["targets"]:
        said = [
            f"{layout} needs {_total(record, target, layout) / 2**20:,.0f} MiB and receives "
            f"{_value(record, target, layout, 'received') / 2**20:,.0f} MiB a step"
            for layout in _extremes(record, target)
        ]
        parts.append(f"{target}: on a device {', '.join(said)}")
    return "; ".join(parts) + "."


def _extremes(record: Mapping[str, Any], target: str) -> tuple[str, str]:
    """Returns the layouts that need the least and the most memory."""
    by_layout = {layout: _total(record, target, layout) for layout in record["layouts"]}
    return min(by_layout, key=by_layout.__getitem__), max(by_layout, key=by_layout.__getitem__)


def _total(record: Mapping[str, Any], target: str, layout: str) -> float:
    return sum(_value(record, target, layout, m) for m in ("arguments", "temporaries", "not aliased outputs"))


def _value(record: Mapping[str, Any], target: str, layout: str, metric: str) -> float:
    """Returns a row's value; 0 for an operation that a program does not have."""
    where = {"case": target, "name": layout, "metric": metric}
    if not any(all(r[k] == v for k, v in where.items()) for r in record["rows"]):
        return 0.0
    return find(record, **where)["median"]
