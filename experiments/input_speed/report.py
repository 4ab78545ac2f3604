"""The study's report: a pure function of its record."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from jaxrec.reporting import plots
from jaxrec.reporting.record import find
from jaxrec.reporting.sections import command, environment

QUESTION = "How fast are tables prepared, and how fast are batches made of them, compared with what a step needs?"
STAGES = ("read", "decode", "shuffle", "batch", "transfer", "together")
# What was asked of each figure.
ASKED = {
    "13 floats, 26 ids": 1_500_000, "a history of 50": 300_000, "one core, frequency": 150_000, "one core, hash": 150_000,
}  # fmt: skip
MEMORY_GIB, WAIT = 2.0, 5.0


def render(record: Mapping[str, Any]) -> str:
    """Returns report.md."""
    sizes, cases = record["sizes"], _cases(record)

    def rate(name: str, case: str, metric: str = "rate") -> str:
        row = find(record, name=name, case=case, metric=metric)
        low, high = min(row["samples"]), max(row["samples"])
        return (
            f"{row['median']:,.0f} ({low:,.0f} to {high:,.0f})" if len(row["samples"]) > 1 else f"{row['median']:,.0f}"
        )

    median = functools.partial(_median, record)

    def met(value: float, least: float) -> str:
        return "met" if value >= least else "**not met**"

    together = [
        f"| device-ready batches: {c} | {rate('together', c)} rows/s | "
        + (f"{ASKED[c]:,}: {met(median('together', c), ASKED[c])} |" if c in ASKED else "|")
        for c in cases
    ]
    prepared = [
        f"| Criteo text prepared, {c} | {rate('Criteo text prepared', c)} rows/s | "
        f"{ASKED[c]:,}: {met(median('Criteo text prepared', c), ASKED[c])} |"
        for c in ("one core, frequency", "one core, hash")
    ]
    peak = median("Criteo text prepared", "all cores, long", "peak memory")
    waits = [
        f"| {c} run waits for input | {share['median']:.2f} % ({min(share['samples']):.2f} to {max(share['samples']):.2f}) of "
        f"the time | under {WAIT:g} %: {'met' if share['median'] < WAIT else '**not met**'} |"
        for c in ("default MovieLens", "Criteo")
        for share in (find(record, name="training waits for input", case=c),)
    ]
    return "\n".join([
        "# How fast the input is",
        "",
        f"**Question.** {QUESTION}",
        "",
        f"**Answer.** {finding(record)} Every figure here is **measured**.",
        "",
        "| what | median (spread) | asked |",
        "|---|---|---|",
        *together,
        *prepared,
        f"| {sizes['long']:,} rows of text ({record['bytes_of_long'] / 1e9:.1f} GB) on all cores | "
        f"{rate('Criteo text prepared', 'all cores, long')} rows/s | |",
        f"| its peak memory | {peak:.2f} GiB | {MEMORY_GIB:g}: {'met' if peak <= MEMORY_GIB else '**not met**'} |",
        *waits,
        "",
        "Stage by stage, each alone on one core, in rows per second:",
        "",
        "![Rows per second of each stage of the input, for each shape of rows](stages.svg)",
        "",
        "| stage | " + " | ".join(cases) + " |",
        "|---|" + "---|" * len(cases),
        *(f"| {s} | " + " | ".join(rate(s, c) for c in cases) + " |" for s in STAGES),
        "",
        "`read` unpacks a block's record, `decode` makes columns of it, `shuffle` checks and packs them, `batch` gathers rows and cuts "
        "histories, `transfer` takes a batch to the device, and `together` is all of it ahead of a step that does nothing.",
        "",
        "## How to run",
        "",
        command(record),
        "",
        f"{environment(record)} {sizes['short']:,} rows of text in the form of "
        "Criteo's train.txt, with its cardinalities, drawn from a power law; batches of 4,096 rows.",
        "",
        "## What limits the conclusion",
        "",
        "The text is generated: real categories repeat otherwise, which changes how well blocks compress. Files lie in the page cache, "
        "as they do after the first epoch of data that fits in memory; a disk that reads less than "
        f"{median('together', cases[0]) * record['bytes_per_row'] / 1e6:,.0f} MB/s would be the limit. The training runs are on the same CPU, so that their steps "
        f"are slow: a GPU's step needs more rows. The one on Criteo's rows takes {sizes['steps']} steps, so that its start, where the first "
        "window is read, weighs more than in a whole run.",
        "",
        "## Next measurement",
        "",
        "The same with several reading threads beside a GPU, whose step leaves the cores to the input.",
        "",
    ])  # fmt: skip


def finding(record: Mapping[str, Any]) -> str:
    """Returns the answer in a sentence."""
    median = functools.partial(_median, record)
    return (
        f"One core makes {median('together', _cases(record)[0]):,.0f} device-ready rows a second of Criteo's shape, and "
        f"{median('together', 'a history of 50'):,.0f} with a history of 50 cut from timelines; it prepares "
        f"{median('Criteo text prepared', 'one core, frequency'):,.0f} rows a second of Criteo's text."
    )


def figures(record: Mapping[str, Any]) -> dict[str, str]:
    """Returns the report's pictures."""
    cases = _cases(record)
    rows = {c: [find(record, name=s, case=c, metric="rate") for s in STAGES] for c in cases}
    stages = plots.grouped_bars(
        STAGES,
        {c: [row["median"] for row in rows[c]] for c in cases},
        unit="rows per second, on one core",
        title="How fast each stage of the input is, alone and together: median and spread",
        spreads={c: [(min(row["samples"]), max(row["samples"])) for row in rows[c]] for c in cases},
    )
    return {"stages.svg": stages}


def _cases(record: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(r["case"] for r in record["rows"] if r["name"] == "together"))


def _median(record: Mapping[str, Any], name: str, case: str, metric: str = "rate") -> float:
    return find(record, name=name, case=case, metric=metric)["median"]
