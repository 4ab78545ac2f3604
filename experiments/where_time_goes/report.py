"""The study's report: a pure function of its record."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean, median
from typing import Any

from jaxrec.reporting import plots
from jaxrec.reporting.record import find
from jaxrec.reporting.sections import command, environment

QUESTION = "Where does the time of a training run go: start-up, input, step, evaluation, checkpoint? What does the step wait for?"
STAGES = ("step", "input", "evaluation", "checkpoint", "trace")
Record = Mapping[str, Any]


def _samples(record: Record, name: str, config: str, metric: str) -> list[float]:
    return find(record, name=name, case=config, metric=metric)["samples"]


def _value(record: Record, name: str, config: str, metric: str) -> float:
    return median(_samples(record, name, config, metric))


def _spread(samples: list[float], digits: int) -> str:
    return f"{median(samples):,.{digits}f} ({min(samples):,.{digits}f} to {max(samples):,.{digits}f})"


def finding(record: Record) -> str:
    """Returns the answer in a sentence."""
    return " ".join(f"{config}: {facts['verdict']['sentence']}." for config, facts in record["subjects"].items())


def render(record: Record) -> str:
    """Returns report.md."""
    lines = [
        "# Where the time of a run goes",
        "",
        f"**Question.** {QUESTION}",
        "",
        f"**Answer.** {finding(record)} {_of_run(record)} Every figure here is **measured**.",
        "",
        *([f"Measured with {record['instead']}.", ""] if record["instead"] else []),
        "![Milliseconds of a step, by what they were spent on](verdict.svg)",
        "",
        "## How to run",
        "",
        command(record),
        "",
        "One config alone: `python -m jaxrec.profile --config=dlrm_movielens --workdir=prof --stages=all`.",
        "",
        "## Environment",
        "",
        environment(record),
        "",
    ]
    for config in record["subjects"]:
        lines += _subject(record, config)
    lines += [
        "## What limits the conclusion",
        "",
        "On a CPU the input's threads and the step share the cores: what a step takes longer with its input is waits and lost cores alike. "
        "Regions are those of traced steps; tracing slows a step, and only its proportions are used. A region's bound counts bytes as if no cache held them, "
        "so that a region can pass 100 %. The whole runs are one of each kind.",
        "",
        "## Next measurement",
        "",
        *_next(record),
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def _of_run(record: Record) -> str:
    config = next(iter(record["subjects"]))
    cold, warm = (
        _value(record, f"run, {cache} cache", config, "effective_training_time") for cache in ("cold", "warm")
    )
    seconds = {c: _value(record, f"run, {c} cache", config, "time") for c in ("cold", "warm")}
    return (
        f"Of a whole run of {config} ({seconds['cold']:.1f} s with an empty compile cache, {seconds['warm']:.1f} s with a warm one), "
        f"{cold:.0%} and {warm:.0%} were spent in training steps."
    )


def _subject(record: Record, config: str) -> list[str]:
    facts = record["subjects"][config]
    batch = facts["batch"]
    resident = _samples(record, "step, batches on the device", config, "step")
    fed = _samples(record, "step with its input", config, "step")
    lines = [
        f"## {config}",
        "",
        f"Batches of {batch:,}; {facts['rows']:,} training rows. **Verdict: {facts['verdict']['sentence']}.**",
        "",
        "| stage | alone | what a batch costs |",
        "|---|---|---|",
    ]
    for r in record["rows"]:
        if r["case"] == config and r["name"].startswith("input: "):
            ms = 1e3 * batch / r["median"]
            lines.append(f"| {r['name']} | {_spread(r['samples'], 0)} rows/s | {ms:.3f} ms |")
    save, restore = (_samples(record, f"checkpoint: {what}", config, "time") for what in ("save", "restore"))
    size = _value(record, "checkpoint", config, "size")
    lines += [
        f"| step, batches on the device | {_spread(resident, 3)} ms | {median(resident):.3f} ms |",
        f"| step with its input | {_spread(fed, 3)} ms | {median(fed):.3f} ms |",
        f"| evaluation | {_spread(_samples(record, 'evaluation', config, 'rate'), 0)} rows/s | |",
        f"| checkpoint of {size:,.0f} MiB: save | {_spread(save, 2)} s | |",
        f"| checkpoint: restore | {_spread(restore, 2)} s | |",
        "",
        "### The step, region by region",
        "",
        f"![Regions of a step of {config}](regions_{config}.svg)",
        "",
        "| region | forward, thread ms | backward, thread ms | share | wall ms | bound ms | attained | limited by |",
        "|---|---|---|---|---|---|---|---|",
    ]
    total = facts["regions"]["total_ms"]
    for name, (forward, backward) in _regions(facts).items():
        bound = facts["bounds"][name]
        lines.append(
            f"| {name} | {forward:.3f} | {backward:.3f} | {(forward + backward) / total:.1%} | {bound['wall_ms']:.3f} | "
            f"{bound['bound_ms']:.3f} | {bound['attained']:.0%} | {bound['limited_by']} |"
        )
    program, ceilings = facts["program"], facts["ceilings"]
    lines += [
        "",
        f"{facts['regions']['mapped_share']:.2%} of the operations' time is mapped to a region; {facts['regions']['spanning_share']:.1%} is in fusions that span "
        f"regions. {program['operations']} operations; {program['work']['product_flops'] / 1e9:.3g} GFLOPs in matrix products, "
        f"{program['model_flops'] / 1e9:.3g} by the model's definition. Ceilings: products {ceilings['products'] / 1e9:.0f} GFLOP/s, copying "
        f"{ceilings['copy'] / 1e9:.1f} GB/s, random rows of {ceilings['row_bytes']} bytes {ceilings['random'] / 1e9:.2f} GB/s. End-to-end MFU "
        f"{program['model_flops'] / ceilings['products'] / median(fed) * 1e3:.0%}, local {program['model_flops'] / ceilings['products'] / median(resident) * 1e3:.0%}.",
        "",
        "### Whole runs",
        "",
        "| | empty compile cache | warm |",
        "|---|---|---|",
    ]  # fmt: skip
    for r in record["rows"]:
        if r["case"] == config and r["name"].endswith(", cold cache"):
            name = r["name"].removesuffix(", cold cache")
            values = [r["median"], _value(record, f"{name}, warm cache", config, r["metric"])]
            label = name if r["metric"] in ("time", "share") else f"{name}: {r['metric'].replace('_', ' ')}"
            lines.append(f"| {label} | {' | '.join(_in_unit(v, r) for v in values)} |")
    return [*lines, ""]


def _in_unit(value: float, row: Mapping[str, Any]) -> str:
    if row["metric"] in ("share", "effective_training_time"):
        return f"{value:.1%}"
    if row["unit"] == "s":
        return f"{value:.2f} s"
    return f"{value:,.0f} {row['unit']}" if value >= 1000 else f"{value:.4g} {row['unit'].removeprefix('1')}".strip()


def _regions(facts: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Region -> ms forward and backward, medians of the steps and the mean of the devices."""
    devices = list(facts["regions"]["devices"].values())
    return {
        name: (mean(median(d[name]["forward"]) for d in devices), mean(median(d[name]["backward"]) for d in devices))
        for name in devices[0]
    }


def _next(record: Record) -> list[str]:
    """Names, for each config, the region that is the furthest from its bound."""
    lines = []
    for config, facts in record["subjects"].items():
        away = {name: b["wall_ms"] - b["bound_ms"] for name, b in facts["bounds"].items()}
        worst = max(away, key=away.__getitem__)
        bound = facts["bounds"][worst]
        lines.append(
            f"- {config}: `{worst}` takes {bound['wall_ms']:.2f} ms, of which {bound['bound_ms']:.2f} are its bound by {bound['limited_by']}: no "
            "region has more to gain. Time its operations one by one."
        )
    return [*lines, "- Both on a GPU."]


def figures(record: Record) -> dict[str, str]:
    """Returns the report's pictures."""
    configs = list(record["subjects"])
    parts = list(dict.fromkeys(p for f in record["subjects"].values() for p in f["verdict"]["parts_ms"]))
    pictures = {
        "verdict.svg": plots.stacked_bars(
            configs,
            {p: [record["subjects"][c]["verdict"]["parts_ms"][p] for c in configs] for p in parts},
            unit="milliseconds a step",
            title="What a step's time is spent on",
        )
    }
    for config, facts in record["subjects"].items():
        regions = _regions(facts)
        pictures[f"regions_{config}.svg"] = plots.stacked_bars(
            ["forward", "backward"],
            {name: [forward, backward] for name, (forward, backward) in regions.items()},
            unit="thread milliseconds a step",
            title=f"Regions of a step of {config}",
        )
    return pictures
