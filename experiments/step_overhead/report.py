"""The study's report: a pure function of its record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrec.reporting import plots
from jaxrec.reporting.record import find
from jaxrec.reporting.sections import command, environment

QUESTION = "What does the training loop add to the compiled step: input, dispatch, counters, progress, metrics?"
NAMES = ("compiled program alone", "training loop", "outside the compiled program")
AIM_MS = 1.0


def render(record: Mapping[str, Any]) -> str:
    """Returns report.md."""
    cases = list(record["batch_sizes"])

    def cell(name: str, case: str) -> str:
        row = find(record, name=name, case=case)
        return f"{row['median']:.3f} ({min(row['samples']):.3f} to {max(row['samples']):.3f})"

    drawn = [c for c in cases if "drawn" in c]
    others = ", ".join(f"{find(record, name=NAMES[2], case=c)['median']:.3f} ms ({c})" for c in drawn)
    return "\n".join([
        "# Time per step outside the compiled program",
        "",
        f"**Question.** {QUESTION}",
        "",
        f"**Answer.** {finding(record)} Beside it, {others}. Every figure here is **measured**.",
        "",
        "![Milliseconds a step of the compiled program alone and of the training loop, for each case](step.svg)",
        "",
        "| milliseconds a step: median (spread) | " + " | ".join(f"{c}, batch {record['batch_sizes'][c]}" for c in cases) + " |",
        "|---|" + "---|" * len(cases),
        *(f"| {name} | " + " | ".join(cell(name, c) for c in cases) + " |" for name in NAMES),
        "",
        "## How to run",
        "",
        command(record),
        "",
        f"{environment(record)} {record['steps']} steps a sample, the two loops in turn, the first pair dropped.",
        "",
        "## What limits the conclusion",
        "",
        "The rows are drawn beforehand and kept in memory but in the last case, where the data set draws them, and their planted "
        "labels, during the steps: that work is the data set's, not the loop's. On a CPU the input threads share the cores with the compiled program, so that the difference holds their work too. "
        "Evaluation and checkpoints are left out.",
        "",
        "## Next measurement",
        "",
        "The same on a GPU, where the host's work hides behind the device's.",
        "",
    ])  # fmt: skip


def finding(record: Mapping[str, Any]) -> str:
    """Returns the answer in a sentence."""
    # Drawing synthetic rows is no part of the loop: the aim does not hold for it.
    outside = {c: find(record, name=NAMES[2], case=c)["median"] for c in record["batch_sizes"] if "drawn" not in c}
    said = ", ".join(f"{ms:.3f} ms ({case})" for case, ms in outside.items())
    met = "met" if all(ms < AIM_MS for ms in outside.values()) else "not met"
    return f"The loop adds {said} a step, the median of paired differences; the aim of {AIM_MS:g} ms is {met}."


def figures(record: Mapping[str, Any]) -> dict[str, str]:
    """Returns the report's pictures."""
    cases = list(record["batch_sizes"])
    rows = {name: [find(record, name=name, case=c) for c in cases] for name in NAMES}
    step = plots.grouped_bars(
        [f"{c}, batch {record['batch_sizes'][c]}" for c in cases],
        {name: [row["median"] for row in of_name] for name, of_name in rows.items()},
        unit="milliseconds a step",
        title="Time of a step: median, and the spread of all samples",
        spreads={name: [(min(r["samples"]), max(r["samples"])) for r in of_name] for name, of_name in rows.items()},
    )
    return {"step.svg": step}
