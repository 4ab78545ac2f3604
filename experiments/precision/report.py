"""The study's report: a pure function of its record."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from jaxrec.reporting import plots
from jaxrec.reporting.record import find
from jaxrec.reporting.sections import command, environment

QUESTION = "What does each number type cost in quality (test AUC and NE), and what does it save in memory and time?"
BASELINE, BALANCED, MOVIELENS, SYNTHETIC = "float32", "dlrm_balanced", "dlrm_movielens", "dlrm_synthetic"
Record = Mapping[str, Any]


def products_of(precision: str, matmul: str) -> str:
    """Returns the name of what products are computed in: the compute type, or `tf32`."""
    return precision if matmul == "float32" else matmul


def _samples(record: Record, name: str, case: str, metric: str) -> list[float]:
    return find(record, name=name, case=case, metric=metric)["samples"]


def _median(record: Record, name: str, case: str, metric: str) -> float:
    return find(record, name=name, case=case, metric=metric)["median"]


def _trained(record: Record) -> str:
    return record["config"]["name"]


def _others(record: Record) -> list[str]:
    return [name for name in record["precisions"] if name != BASELINE]


def _difference(record: Record, name: str, metric: str) -> tuple[float, float, float]:
    """Returns the mean difference to float32's metric over seeds, and its 95 % interval."""
    samples, low, high = (
        _samples(record, name, _trained(record), f"{metric} - float32's{what}") for what in ("", " low", " high")
    )
    return fmean(samples), low[0], high[0]


def _is_zero_outside(low: float, high: float) -> bool:
    return low > 0 or high < 0


def _rate(record: Record, name: str) -> float:
    """Returns the best measured FLOP/s of the products of a precision."""
    kind = record["precisions"][name]
    return max(_samples(record, products_of(kind["compute"], kind["matmul"]), "", "matrix products"))


def _bound(record: Record, case: str) -> tuple[float, float]:
    """Returns what a step's matrix products take at least in float32, at the measured rate, and the step, in ms."""
    work = _median(record, "matrix products", case, "work of a step")
    return 1e3 * work / _rate(record, BASELINE), _median(record, BASELINE, case, "step")


def _spread(samples: list[float], digits: int) -> str:
    return f"{min(samples):.{digits}f} to {max(samples):.{digits}f}"


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none"


def finding(record: Record) -> str:
    """Returns the answer in a sentence."""
    others = _others(record)
    moved = {name: _difference(record, name, "test_ne") for name in others}
    least, most = min(moved, key=lambda n: moved[n][0]), max(moved, key=lambda n: moved[n][0])
    outside = [name for name in others if _is_zero_outside(*moved[name][1:])]
    ratios = {name: _median(record, name, BALANCED, "step / float32's") for name in others}
    fast, slow = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    between = (
        f"between {moved[least][0]:+.4f} ({least}) and {moved[most][0]:+.4f} ({most})"
        if least != most
        else f"{moved[most][0]:+.4f} ({most})"
    )
    return (
        f"Over {record['seeds']} seeds of {_trained(record)} the mean test NE moves by {between} against float32, and the "
        f"95 % interval excludes 0 for: {_listed(outside)}; on this {record['environment']['platform'].upper()} a step of "
        f"{BALANCED} takes {ratios[fast]:.2f} ({fast}) to {ratios[slow]:.2f} ({slow}) times float32's."
    )


def render(record: Record) -> str:
    """Returns report.md."""
    trained, cases = _trained(record), list(record["timed"])
    lines = [
        "# Number types: quality, memory and time",
        "",
        f"**Question.** {QUESTION}",
        "",
        f"**Answer.** {finding(record)} {_smallest_seen(record)} {_memory_sentence(record)} {_bottleneck(record)} Every "
        "figure here is **measured**.",
        "",
        *_missing(record),
        f"![Difference of test NE to float32 of the same seed, mean and 95 % interval, for each number type; {trained}](ne.svg)",
        "",
        "## How to run",
        "",
        command(record),
        "",
        "## Environment",
        "",
        environment(record),
        "",
        f"{trained}: {record['config']['training']['steps']} steps at most, batch "
        f"{record['config']['training']['batch_size']}; every precision is trained with the same {record['seeds']} seeds, in "
        "turn, with the hyperparameters of float32; the metrics are the test split's at the step of the best validation NE. "
        "Steps are timed on batches that are on the device, each precision in turn with float32, in changing order, the first "
        f"round dropped: {record['repeats']} pairs of "
        + ", of ".join(f"{t['steps']} steps ({name}, batch {t['batch_size']})" for name, t in record["timed"].items())
        + f". {_instructions(record)}",
        "",
        "## The bound",
        "",
        *_bounds(record, cases),
        "",
        "## Quality",
        "",
        *_quality_table(record),
        "",
        "Intervals are Student's t over the seeds' differences, each to float32 of the same seed. A precision whose interval "
        "excludes 0 is called worse or better; for the others no difference was seen, which is not to say that there is none.",
        "",
        "## Time of a step",
        "",
        f"![Time of a step over float32's, for each number type; {' and '.join(cases)}](step.svg)",
        "",
        *_time_table(record, cases),
        "",
        "## Memory",
        "",
        *_memory_table(record, cases),
        "",
        "Narrow tables have float32 optimizer rows and gradients: only the weights shrink. Arguments and temporaries are the "
        f"compiled step's. A checkpoint is the best step's folder of {trained} on disk, compressed, optimizers included: the mean over seeds.",
        "",
        "## What limits the conclusion",
        "",
        *(f"- {line}" for line in _limits(record)),
        "",
        "## Next measurement",
        "",
        _next(record),
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def _missing(record: Record) -> list[str]:
    best = [r for r in record["rows"] if r["metric"] == "best possible test_ne"]
    known = f" The best possible test NE of these rows is {best[0]['median']:.4f}." if best else ""
    if record["missing_packages"]:
        return [
            f"**MovieLens was not trained on**: the packages {', '.join(record['missing_packages'])} are not installed. Planted "
            f"synthetic rows (`{SYNTHETIC}`) took its place.{known}",
            "",
        ]
    return [f"The rows are planted synthetic ones.{known}", ""] if best else []


def _smallest_seen(record: Record) -> str:
    """Says how large a difference would have been seen, and how far seeds alone are apart."""
    halves = [(high - low) / 2 for _, low, high in (_difference(record, n, "test_ne") for n in _others(record))]
    seeds = _samples(record, BASELINE, _trained(record), "test_ne")
    return (
        f"Differences of NE below {min(halves):.4f} to {max(halves):.4f} (half an interval) could not be seen; float32's own "
        f"seeds are {max(seeds) - min(seeds):.4f} apart."
    )


def _memory_sentence(record: Record) -> str:
    narrow = [n for n, kind in record["precisions"].items() if kind["tables"] != "float32"]
    if not narrow:
        return ""
    shares = []
    for case in record["timed"]:
        whole, part = (_median(record, n, case, "compiled arguments") for n in (BASELINE, narrow[0]))
        shares.append(f"{1 - part / whole:.0%} of the step's arguments ({case})")
    weights = [_median(record, n, BALANCED, "table weights") for n in (narrow[0], BASELINE)]
    return f"16-bit tables take {weights[0] / weights[1]:.2f} of float32's bytes of weights, which saves {' and '.join(shares)}."


def _bottleneck(record: Record) -> str:
    products, step = _bound(record, BALANCED)
    share = products / step
    if share >= 0.5:
        return f"The bottleneck of {BALANCED} is its matrix products: at the measured rate they take {share:.0%} of a float32 step."
    return (
        f"The bottleneck of {BALANCED} is not its matrix products: at the measured rate they take {share:.0%} of a float32 step, "
        "and the type of products can save no more."
    )


def _instructions(record: Record) -> str:
    found = record["cpu_instructions"]
    if found is None:
        return "The system does not list the CPU's instructions."
    return f"Of instructions for 16-bit floats the CPU lists: {_listed([f'`{i}`' for i in found])}."


def _bounds(record: Record, cases: list[str]) -> list[str]:
    kinds = {}
    for name, kind in record["precisions"].items():
        kinds.setdefault(products_of(kind["compute"], kind["matmul"]), _rate(record, name))
    rates = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s in {kind}" for kind, rate in kinds.items())
    lines = [f"Square matrix products reach {rates} (the best sample of each)."]
    for case in cases:
        work = _median(record, "matrix products", case, "work of a step")
        products, step = _bound(record, case)
        lines.append(
            f"A step of {case} needs {work / 1e9:.3g} GFLOP of them, at that rate {products:.3g} ms of float32's "
            f"{step:.3g} ms: without any products a step would still take {step - products:.3g} ms. The model's own products "
            "are smaller and slower than square ones, so their true share is larger."
        )
    return [" ".join(lines)]


def _verdict(low: float, high: float) -> str:
    if not _is_zero_outside(low, high):
        return "no difference seen"
    return "worse" if low > 0 else "better"


def _quality_table(record: Record) -> list[str]:
    case = _trained(record)
    lines = [
        "| precision | test AUC: mean (spread) | test NE: mean (spread) | AUC - float32's (95 % interval) | NE - float32's (95 % interval) | by NE | best steps | steps skipped |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in record["precisions"]:
        cells = []
        for metric in ("test_auc", "test_ne"):
            samples = _samples(record, name, case, metric)
            cells.append(f"{fmean(samples):.4f} ({_spread(samples, 4)})")
        if name == BASELINE:
            cells += ["", "", ""]
        else:
            for metric in ("test_auc", "test_ne"):
                mean, low, high = _difference(record, name, metric)
                cells.append(f"{mean:+.4f} ({low:+.4f} to {high:+.4f})")
            cells.append(_verdict(*_difference(record, name, "test_ne")[1:]))
        cells.append(_spread(_samples(record, name, case, "best step"), 0))
        cells.append(f"{sum(_samples(record, name, case, 'skipped steps')):.0f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _time_table(record: Record, cases: list[str]) -> list[str]:
    head = "".join(f" | {case}: ms, median (spread) | over float32's" for case in cases)
    lines = [f"| precision{head} | products, GFLOP/s |", "|---|" + "---|---|" * len(cases) + "---|"]
    for name in record["precisions"]:
        cells = []
        for case in cases:
            samples = _samples(record, name, case, "step")
            cells.append(f"{_median(record, name, case, 'step'):.2f} ({_spread(samples, 2)})")
            if name == BASELINE:
                cells.append("1")
                continue
            ratios = find(record, name=name, case=case, metric="step / float32's")
            cells.append(f"{ratios['median']:.2f} ({_spread(ratios['samples'], 2)})")
        lines.append(f"| {name} | {' | '.join(cells)} | {_rate(record, name) / 1e9:,.0f} |")
    return lines


def _memory_table(record: Record, cases: list[str]) -> list[str]:
    lines = [
        "| config | precision | table weights, MiB | table optimizer rows, MiB | arguments, MiB | temporaries, MiB | checkpoint, MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    metrics = ("table weights", "table optimizer rows", "compiled arguments", "compiled temporaries")
    for case in cases:
        for name in record["precisions"]:
            cells = [f"{_median(record, name, case, m) / 2**20:,.2f}" for m in metrics]
            saved = (
                f"{fmean(_samples(record, name, case, 'checkpoint')) / 2**20:,.2f}" if case == _trained(record) else "-"
            )
            lines.append(f"| {case} | {name} | {' | '.join(cells)} | {saved} |")
    return lines


def _limits(record: Record) -> list[str]:
    count = 2 * len(_others(record))
    lines = [
        f"The interval covers {record['seeds']} seeds (initial weights, order of batches, dropout) on one data set and one "
        "split of it, not other data; it takes the differences for normal.",
        f"There are {count} intervals: if no precision differed, one in twenty would still exclude 0.",
        "Nothing was tuned for a precision: another learning rate might suit it better.",
        "Operands are rounded to 16 bits as on any hardware, and products add up in float32; between products a compiler may "
        "keep intermediate values wider, so that another device need not give the same last digits.",
    ]
    if record["environment"]["platform"] == "cpu":
        native = record["cpu_instructions"]
        why = (
            f"it lists {_listed([f'`{i}`' for i in native])}, whose use is the compiler's choice, and none is a GPU's or TPU's matrix unit"
            if native
            else "it has no instructions that are listed for 16-bit products, which are then emulated"
        )
        lines.insert(
            0,
            f"**The times are this CPU's alone**: {why}. They say nothing about what 16-bit products save on a GPU or a TPU. AUC "
            "and NE depend on rounding, not on speed, and do carry over, within the limits below.",
        )
    if _trained(record) == SYNTHETIC:
        lines.append("Planted rows are a law that the model can express; real clicks may be more, or less, sensitive.")
    return lines


def _next(record: Record) -> str:
    if record["environment"]["platform"] == "cpu":
        return "The same command on a GPU, whose matrix units multiply 16-bit numbers natively: there the times mean something."
    return "8-bit products with a scale per block, under the same gate of quality."


def figures(record: Record) -> dict[str, str]:
    """Returns the report's pictures."""
    others, cases = _others(record), list(record["timed"])
    moved = [_difference(record, name, "test_ne") for name in others]
    ne = plots.grouped_bars(
        others,
        {"test NE - float32's": [mean for mean, _, _ in moved]},
        unit="NE, mean over seeds; above 0 is worse",
        title=f"Test NE against float32 of the same seed, {_trained(record)}: mean and 95 % interval",
        spreads={"test NE - float32's": [(low, high) for _, low, high in moved]},
    )
    ratios = {c: [find(record, name=name, case=c, metric="step / float32's") for name in others] for c in cases}
    step = plots.grouped_bars(
        others,
        {c: [row["median"] for row in rows] for c, rows in ratios.items()},
        unit="times float32's",
        title=f"Time of a step over float32's, on this {record['environment']['platform'].upper()}: median and spread",
        spreads={c: [(min(r["samples"]), max(r["samples"])) for r in rows] for c, rows in ratios.items()},
    )
    return {"ne.svg": ne, "step.svg": step}
