"""The study's report and pictures: pure functions of its record."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrec.reporting import plots, sections
from jaxrec.reporting.record import find

QUESTION = "From the first JAX program that one writes to jaxrec's: what does each change bring to the whole run?"
# Rounds that point the same way by chance are that unlikely where a change is said to be faster or slower.
CHANCE = 0.05
# Steps whose losses are compared: rounding errors have not grown yet.
FIRST = 3
# NEs that are further apart than this many times what a rounding makes of them are not the same arithmetic's.
ROUNDINGS = 3


def finding(record: Mapping[str, Any]) -> str:
    """Returns the answer in a sentence or two."""
    names, steps = _ladder(record), record["rounds"] * record["steps_a_round"]
    first, last = ({m: _value(record, name, m) for m in ("step", "run")} for name in (names[0], names[-1]))
    verdicts = {name: _verdict(_ratios(record, before, name)) for before, name in _steps(record)}
    said = {v: [name for name, verdict in verdicts.items() if verdict == v] for v in ("faster", "slower", "flat")}
    gains = {name: _gain(record, before, name) for before, name in _steps(record)}
    text = (
        f"A step takes {first['step']:.1f} ms at first and {last['step']:.1f} ms in the end, {first['step'] / last['step']:.1f} "
        f"times less, and {steps} steps {first['run']:.1f} and {last['run']:.1f} s."
    )
    if said["faster"]:
        most = max(said["faster"], key=lambda name: gains[name])
        text += f" `{most}` alone makes a step {gains[most]:.2f} times as fast, the most of all changes."
    if said["slower"]:
        text += f" Slower became {_listed(said['slower'])}."
    return f"{text} {_listed(said['flat']) or 'No change'} left the total where it was."


def render(record: Mapping[str, Any]) -> str:
    """Returns report.md."""
    names, best = _ladder(record), _ladder(record)[-1]
    tables, steps = record["tables"], record["rounds"] * record["steps_a_round"]
    array = tables["count"] * tables["rows"] * tables["dim"] * 4 / 1e6
    rows = tables["count"] * tables["rows"]
    share, moved, copy = record["distinct_rows"] / rows, 6 * array / 1e3, max(find(record, name="copy")["samples"])
    others = [r["name"] for r in _beside(record)]
    lines = [
        "# From the first JAX program to jaxrec's, one change at a time",
        "",
        f"**Question.** {QUESTION}",
        "",
        f"**Answer.** {finding(record)} {_correctness(record)} Every figure here is **measured**.",
        "",
        f"**What is waited for.** `{names[0]}` waits for the movement of data: it writes a gradient for all {rows:,} rows, "
        f"and reads and writes all of them and their accumulators, where a batch names {record['distinct_rows']:,}. "
        f"{_left(record)}",
        "",
        "![Milliseconds of a step, rung by rung](rungs.svg)",
        "",
        "## How to run",
        "",
        sections.command(record),
        "",
        f"DLRM-DCNv2 of the size `dlrm_balanced`: {tables['count']} tables of {tables['rows']:,} x {tables['dim']}, batch "
        f"{record['batch_size']:,}, element-wise Adagrad, labels planted. Each rung is a process of its own, which takes "
        f"{steps} steps from the same weights on the same batches in {record['rounds']} rounds of "
        f"{record['steps_a_round']}, the making of the batches included; the first round is no sample. Rungs that are "
        "compared are alive together and take turns, forth and back. Compilation is apart.",
        "",
        "## Environment",
        "",
        sections.environment(record),
        "",
        "## The bound",
        "",
        f"All weights are {array:,.0f} MB, and so are their accumulators and a gradient of all of them. To read three and "
        f"write three such arrays (the gradient, then the update) moves {moved:.1f} GB a step, which takes at least "
        f"{moved / copy * 1e3:,.0f} ms at the {copy:.1f} GB/s that a copy reaches here. The rows that a batch names are "
        f"{share:.2%} of them: {moved / copy * 1e3 * share:.1f} ms.",
        "",
        "## The ladder",
        "",
        "Each row is the one above and one change. *Times as fast* is the median (smallest to largest) of a round's time "
        f"before the change over that after it; it is faster or slower where so many rounds agree that chance would do it "
        f"in less than {CHANCE:.0%} of cases, else **flat**. A rung that ends one company and begins the next was run "
        "twice; the table has the first.",
        "",
        *_table(record, [("", names[0]), *_steps(record)]),
        "",
        "![User and system time of the processors, rung by rung](processors.svg)",
        "",
        "## Where the time went",
        "",
        "Milliseconds of all processors a step, in the program (user) and in the system, which hands out memory:",
        "",
        "| rung | wall | user | system | processors at work | memory of a step, GB | compiled in, s |",
        "|---|---|---|---|---|---|---|",
        *(_processors(record, name) for name in names),
        "",
        *_system_time(record),
        "## What limits the conclusion",
        "",
        "- What a change brings depends on what is there before it: the order is one of many. The section below takes "
        "some of them away from the end.",
        f"- Adagrad's eps is {record['eps']:g}, not the size's own 1e-8, from which training multiplies rounding errors until "
        "rows of the same arithmetic can no longer be told by their NE from others. The arithmetic's cost is the same.",
        f"- One size, one machine, one seed of weights and rows. After {steps} steps the model is not trained out: its NE "
        f"compares rows, and is no result (the labels allow {record['best_ne']:.4f}).",
        f"- A turn is {record['steps_a_round']} steps long and its input begins with it: what threads bring is "
        "underestimated by a part of a batch's making a turn.",
        "- Several processes are alive: their memory is in use while another one runs, but they wait.",
        *(
            [f"- Not on {record['environment']['platform']}, so not measured: {_listed(record['skipped'])}."]
            if record["skipped"]
            else []
        ),
        "",
        *(_tried(record, best, others) if others else []),
        "## Next measurement",
        "",
        "The same on a GPU, where steps are short, and the loop and the input cannot hide behind them as they do here; and "
        "with tables that do not fit the memory of one device.",
        "",
    ]
    return "\n".join(lines)


def figures(record: Mapping[str, Any]) -> dict[str, str]:
    """Returns the report's pictures."""
    names = _ladder(record)
    steps = [find(record, name=name, case=_company(record, name), metric="step") for name in names]
    return {
        "rungs.svg": plots.grouped_bars(
            names,
            {"step": [row["median"] for row in steps]},
            unit="ms a step",
            title="A step with its input, one change after the other",
            spreads={"step": [(min(row["samples"]), max(row["samples"])) for row in steps]},
        ),
        "processors.svg": plots.stacked_bars(
            names,
            {part: [_value(record, name, part) for name in names] for part in ("user", "system")},
            unit="ms of all processors a step",
            title="What the processors did meanwhile",
        ),
    }


def _ladder(record: Mapping[str, Any]) -> list[str]:
    """Returns the names of the rungs, in order."""
    return [name for k, name in enumerate(_all(record)) if k < record["rungs"]]


def _beside(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns what is compared with the last rung."""
    found = {r["name"]: r for company in record["companies"] for r in company}
    return [found[name] for name in _all(record)[record["rungs"] :]]


def _all(record: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(r["name"] for company in record["companies"] for r in company))


def _steps(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns (before, after) of each change of the ladder."""
    names = _ladder(record)
    return list(itertools.pairwise(names))


def _company(record: Mapping[str, Any], *names: str) -> str:
    """Returns the case of the first company that has all of `names`."""
    for case, company in enumerate(record["companies"]):
        if {r["name"] for r in company} >= set(names):
            return str(case)
    raise ValueError(f"no company has {names}")


def _value(record: Mapping[str, Any], name: str, metric: str) -> float:
    return find(record, name=name, case=_company(record, name), metric=metric)["median"]


def _ratios(record: Mapping[str, Any], before: str, after: str) -> list[float]:
    """Returns, round by round, how many times as fast the second is."""
    case = _company(record, before, after)
    a, b = (find(record, name=name, case=case, metric="step")["samples"] for name in (before, after))
    return [x / y for x, y in zip(a, b, strict=True)]


def _gain(record: Mapping[str, Any], before: str, after: str) -> float:
    ratios = sorted(_ratios(record, before, after))
    middle = len(ratios) // 2
    return ratios[middle] if len(ratios) % 2 else (ratios[middle - 1] + ratios[middle]) / 2


def _verdict(ratios: Sequence[float]) -> str:
    """Returns faster, slower or flat, by a two-sided sign test."""
    n, up = len(ratios), sum(r > 1 for r in ratios)
    chance = 2 * sum(math.comb(n, k) for k in range(min(up, n - up) + 1)) / 2**n
    return "flat" if chance >= CHANCE else "faster" if up > n - up else "slower"


def _table(record: Mapping[str, Any], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Returns a table of rungs, each with the one that it is compared with, if any."""
    changes = {r["name"]: r["change"] for company in record["companies"] for r in company}
    steps = record["rounds"] * record["steps_a_round"]

    def row(before: str, name: str) -> str:
        samples = find(record, name=name, case=_company(record, *filter(None, (before, name))), metric="step")
        ms, spread = samples["median"], (min(samples["samples"]), max(samples["samples"]))
        gain = ""
        if before:
            ratios = _ratios(record, before, name)
            verdict = _verdict(ratios)
            gain = f"{_gain(record, before, name):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), "
            gain += "**flat**" if verdict == "flat" else verdict
        return (
            f"| `{name}` | {changes[name]} | {ms:.1f} ({spread[0]:.1f} to {spread[1]:.1f}) | {gain} | "
            f"{record['batch_size'] / ms * 1e3:,.0f} | {_value(record, name, 'run'):.1f} | {_value(record, name, 'ne'):.5f} |"
        )

    return [
        f"| rung | change | ms a step | times as fast | samples/s | {steps} steps, s | NE |",
        "|---|---|---|---|---|---|---|",
        *(row(before, name) for before, name in pairs),
    ]


def _processors(record: Mapping[str, Any], name: str) -> str:
    wall, user, system = (_value(record, name, m) for m in ("step", "user", "system"))
    return (
        f"| `{name}` | {wall:.0f} | {user:.0f} | {system:.0f} | {(user + system) / wall:.2f} of "
        f"{record['environment']['cores']} | {_value(record, name, 'memory'):.2f} | {_value(record, name, 'compile'):.1f} |"
    )


def _system_time(record: Mapping[str, Any]) -> list[str]:
    """Returns the sentence about the change that took most of the system's time away, where there is one."""
    saved = {
        after: _value(record, before, "system") - _value(record, after, "system") for before, after in _steps(record)
    }
    name = max(saved, key=lambda n: saved[n])
    if saved[name] < 1:
        return []
    before = next(b for b, a in _steps(record) if a == name)
    return [
        f"`{name}` took most of the system's time away: {_value(record, before, 'system'):.0f} ms a step before it, "
        f"{_value(record, name, 'system'):.0f} after.",
        "",
    ]


def _left(record: Mapping[str, Any]) -> str:
    """Returns what the last rung waits for."""
    best = _ladder(record)[-1]
    wall, busy = _value(record, best, "step"), _value(record, best, "user") + _value(record, best, "system")
    return (
        f"At the end, in `{best}`, the step's own program is what is left: {busy / wall:.2f} of "
        f"{record['environment']['cores']} processors are at work, {_value(record, best, 'system') / busy:.0%} of that in the "
        "system."
    )


def _same(record: Mapping[str, Any]) -> list[str]:
    """Returns the names of the rungs whose arithmetic is the ladder's, without those that a rounding has changed."""
    found = {r["name"]: r for company in record["companies"] for r in company}
    return [name for name, r in found.items() if r["same_arithmetic"] and not r["rounded"]]


def _rounding(record: Mapping[str, Any]) -> float | None:
    """Returns how far a rounding of the first weights moves the NE of the last rung; None: not measured."""
    best = _value(record, _ladder(record)[-1], "ne")
    return max((abs(_value(record, r["name"], "ne") - best) for r in _beside(record) if r["rounded"]), default=None)


def _correctness(record: Mapping[str, Any]) -> str:
    names = _same(record)
    entropies = {name: _value(record, name, "ne") for name in names}
    first = entropies[names[0]]
    far, limit = max(entropies.values()) - min(entropies.values()), _rounding(record)
    losses = [find(record, name=n, case=_company(record, n), metric="loss")["samples"] for n in names]
    begin = max(abs(x / y - 1) for loss in losses for x, y in zip(loss[:FIRST], losses[0], strict=False))
    text = (
        f"NE on {record['held_out_rows']:,} held-out rows, after the same steps, is {first:.5f} at first and "
        f"{entropies[_ladder(record)[-1]]:.5f} in the end; among all {len(names)} rows of the same arithmetic it differs by at "
        f"most {far:.1e}, and the losses of the first {FIRST} steps by {begin:.0e} of their values."
    )
    if limit is None:
        return text
    moved = [name for name, ne in entropies.items() if abs(ne - first) > ROUNDINGS * limit]
    verdict = (
        f"{_listed(moved)} moved it by more than {ROUNDINGS} times that, and so changed the arithmetic."
        if moved
        else "no change altered what is computed."
    )
    return f"{text} A rounding error in the first weights moves it by up to {limit:.1e}: {verdict}"


def _tried(record: Mapping[str, Any], best: str, others: Sequence[str]) -> list[str]:
    controls = [_gain(record, best, r["name"]) for r in _beside(record) if r["rounded"]]
    changed = [r["name"] for r in _beside(record) if not r["same_arithmetic"]]
    return [
        "## What was tried and did not help, and what the last rung owes to each",
        "",
        f"Each row is `{best}` with one change, run beside it; *times as fast* is against it. {_listed(changed)} compute "
        "something else, and their NE says what.",
        "",
        *_table(record, [(best, name) for name in others]),
        "",
        *(
            [
                f"The last {len(controls)} are the same program: their {min(controls):.2f} to {max(controls):.2f} is what "
                "measuring twice makes of no change.",
                "",
            ]
            if controls
            else []
        ),
    ]


def _listed(names: Sequence[str]) -> str:
    """Returns names of rungs as they stand in a sentence."""
    quoted = [f"`{name}`" for name in names]
    return " and ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)
