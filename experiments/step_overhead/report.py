"""The study's report: a pure function of its record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrec.reporting.record import find

NAMES = ("compiled program alone", "training loop", "outside the compiled program")
AIM_MS = 1.0


def render(record: Mapping[str, Any]) -> str:
    """Returns report.md."""
    env, cases = record["environment"], list(record["batch_sizes"])

    def cell(name: str, case: str) -> str:
        row = find(record, name=name, case=case)
        return f"{row['median']:.3f} ({min(row['samples']):.3f} to {max(row['samples']):.3f})"

    # Drawing synthetic rows is no part of the loop: the aim does not hold for it.
    outside = {c: find(record, name=NAMES[2], case=c)["median"] for c in cases if "drawn" not in c}
    answer = ", ".join(f"{ms:.3f} ms ({case})" for case, ms in outside.items())
    drawn = [c for c in cases if "drawn" in c]
    others = ", ".join(f"{find(record, name=NAMES[2], case=c)['median']:.3f} ms ({c})" for c in drawn)
    met = all(ms < AIM_MS for ms in outside.values())
    return "\n".join([
        "# Time per step outside the compiled program",
        "",
        "**Question.** What does the training loop add to the compiled step: input, dispatch, counters, progress, metrics?",
        "",
        f"**Answer.** {answer} a step, the median of paired differences; the aim of {AIM_MS:g} ms is "
        f"{'met' if met else 'not met'}. Beside it, {others}. Every figure here is **measured**.",
        "",
        "| milliseconds a step: median (spread) | " + " | ".join(f"{c}, batch {record['batch_sizes'][c]}" for c in cases) + " |",
        "|---|" + "---|" * len(cases),
        *(f"| {name} | " + " | ".join(cell(name, c) for c in cases) + " |" for name in NAMES),
        "",
        "## How to run",
        "",
        "    python -m experiments.step_overhead.run --mode=all",
        "",
        f"{env['cpu']}, {env['cores']} cores, {env['memory_gib']} GiB; Python {env['versions']['python']}, jax "
        f"{env['versions']['jax']}; load average before writing {record['load_average'][0]}. {record['steps']} steps a "
        "sample, the two loops in turn, the first pair dropped.",
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
