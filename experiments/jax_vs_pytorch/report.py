"""The study's report: a pure function of its record."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

from jaxrec.profiling.regions import OTHER, REGIONS
from jaxrec.reporting import plots
from jaxrec.reporting.record import find
from jaxrec.reporting.sections import command, environment

QUESTION = (
    "How fast is a training step of the same DLRM-DCNv2 in jaxrec and in PyTorch, each at the fastest of the settings tried on the same hardware, "
    "and in which part of the step do they differ?"
)
Record = Mapping[str, Any]


class Ratio(NamedTuple):
    """How many times as many samples a second jaxrec takes as a peer."""

    case: str
    peer: str
    ratio: float
    low: float
    high: float

    def text(self) -> str:
        return f"{self.ratio:.2f}x ({self.low:.2f} to {self.high:.2f})"


def cases(record: Record) -> list[str]:
    """Returns `size, law, optimizer` of each company."""
    return list(dict.fromkeys(r["case"] for r in record["rows"] if r["name"] == "end to end"))


def stacks(record: Record, case: str) -> list[str]:
    """Returns a case's stacks, jax first."""
    return list(dict.fromkeys(r["stack"] for r in record["rows"] if (r["name"], r["case"]) == ("end to end", case)))


def _samples(record: Record, name: str, case: str, stack: str, metric: str = "step") -> list[float]:
    return find(record, name=name, case=case, stack=stack, metric=metric)["samples"]


def ratio(record: Record, case: str, peer: str, name: str = "end to end") -> Ratio:
    """The ratio of the medians; the spread is that of the turns, in each of which both were timed."""
    ours, theirs = _samples(record, name, case, "jax"), _samples(record, name, case, peer)
    turns = [b / a for a, b in zip(ours, theirs, strict=True)]
    return Ratio(case, peer, median(theirs) / median(ours), min(turns), max(turns))


def best_peers(record: Record) -> list[Ratio]:
    """Returns, for each case, the ratio to the fastest PyTorch stack of the same optimizer."""
    return [
        min((ratio(record, case, peer) for peer in stacks(record, case)[1:]), key=lambda r: r.ratio)
        for case in cases(record)
        if stacks(record, case)[1:]
    ]


def finding(record: Record) -> str:
    """Returns the answer in a sentence."""
    if not best_peers(record):
        return f"No PyTorch stack was measured beside jaxrec's {len(cases(record))} cases."
    by_size: dict[str, list[float]] = {}
    for r in best_peers(record):
        by_size.setdefault(_size(r.case), []).append(r.ratio)
    said = ", ".join(
        f"{size} {min(ratios):.2f}x" + (f" to {max(ratios):.2f}x" if len(ratios) > 1 else "")
        for size, ratios in by_size.items()
    )
    return (
        f"jaxrec takes so many times the samples/s of the fastest PyTorch stack of the same optimizer, end to end, over "
        f"laws of ids and optimizers: {said}."
    )


def _size(case: str) -> str:
    return case.split(", ", maxsplit=1)[0].removeprefix("dlrm_")


def _law(case: str) -> str:
    return case.split(", ")[1]


def _optimizer(case: str) -> str:
    return {"adagrad": "Adagrad", "rowwise_adagrad": "row-wise Adagrad"}[case.split(", ")[2]]


def _spread(samples: list[float], digits: int = 1) -> str:
    return f"{median(samples):,.{digits}f} ({min(samples):,.{digits}f} to {max(samples):,.{digits}f})"


def _title(case: str) -> str:
    return f"{_size(case)}, {_law(case)} ids, {_optimizer(case)}"


def render(record: Record) -> str:
    """Returns report.md."""
    lines = [
        "# jaxrec beside PyTorch: the same model, the same hardware",
        "",
        f"**Question.** {QUESTION}",
        "",
        f"**Answer.** {finding(record)} {_bottleneck(record)} Every figure here is **measured**.",
        "",
        *_headline(record),
        "![Samples a second, end to end, of each stack at each size](rate.svg)",
        "",
        *_losses(record),
        "## How to run",
        "",
        command(record),
        "",
        "`make baseline PYTHON=python3.11` installs the PyTorch side; stacks whose packages are absent are left out, by name.",
        *([f"Left out here: {', '.join(f'{s} ({why})' for s, why in record['absent'].items())}."] if record["absent"] else []),
        "",
        "## Environment",
        "",
        f"{environment(record)} OMP_WAIT_POLICY={record['omp_wait_policy']}.",
        "",
        *_method(record),
        "## The bound",
        "",
        *_bound(record),
        "## The table",
        "",
        "Milliseconds a step, median (spread of the turns); ratios are PyTorch's time over jaxrec's, above 1 where jaxrec is faster.",
        "",
        "| size, ids, optimizer | stack | step, batches on the device | end to end | samples/s | a batch to the device, ms | peak memory, GiB | jaxrec is faster by |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(record, case, stack) for case in cases(record) for stack in stacks(record, case)),
        "",
        "## Where the time went",
        "",
        *_regions(record),
        *_start_up(record),
        *_quality(record),
        *_gates(record),
        "## What limits the conclusion",
        "",
        f"One machine, {_place(record)}; several devices are not compared. jaxrec's step checks that everything is finite before it writes, PyTorch's "
        "does not, and jaxrec's figure holds that. Both get their batches from the same pipeline of jaxrec, in threads of their Python process, and bring them "
        "to the device in one more; for PyTorch that includes casting ids and laying them out (the column says how long a batch takes). A `DataLoader` with worker processes "
        "is not tried, nor are updates of rows written by hand instead of PyTorch's sparse Adagrad, nor allocators other than glibc's. Settings are chosen by steps on the device, not end to end. Ids are "
        "checked outside the step on both sides. Labels are coin flips at the sizes that are timed. The regions are of one traced run each, and tracing slows both; PyTorch's are wall "
        "time of the calling thread, jaxrec's are thread time scaled to the step's wall time. Peak memory is the process's after two steps at the usual setting; a PyTorch process has JAX in it, too, "
        "which makes its first weights, and so has its start.",
        "",
        "## What was tried and did not help",
        "",
        *_settings(record),
        "In jaxrec's own step, against what holds it back: all features cut from one matrix, and the division by the batch's weight moved into the loss, "
        "which stay; its checks behind a condition, for which XLA stores the features' gradients one by one; a barrier before the checks, which XLA removes on CPUs before it fuses. "
        "The lookup is XLA's gather, and the update its scatters: a kernel of our own for both is next.",
        "",
        "## Next measurement",
        "",
        *_next(record),
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def _headline(record: Record) -> list[str]:
    """Returns the ratios to the fastest peers: optimizers and laws down, sizes across."""
    best = {(_size(r.case), _kind(r.case)): r for r in best_peers(record)}
    if not best:
        return []
    sizes, kinds = (list(dict.fromkeys(key[i] for key in best)) for i in (0, 1))

    def cell(size: str, kind: str) -> str:
        r = best.get((size, kind))
        return f"{r.text()}, {r.peer}" if r else ""

    return [
        f"| jaxrec's samples/s over the fastest PyTorch stack's (spread of the turns) | {' | '.join(sizes)} |",
        "|---|" + "---|" * len(sizes),
        *(f"| {kind} | {' | '.join(cell(size, kind) for size in sizes)} |" for kind in kinds),
        "",
    ]


def _kind(case: str) -> str:
    return f"{_optimizer(case)}, {_law(case)} ids"


def _place(record: Record) -> str:
    if record["device"] == "cpu":
        return "on its CPU: it says nothing about GPUs, where launches and memory are other matters"
    return "on its GPU, without CUDA graphs on PyTorch's side; memory is the host's"


def _next(record: Record) -> list[str]:
    if record["device"] == "cpu":
        return ["The same on a GPU: `python -m experiments.jax_vs_pytorch.run --device=cuda`."]
    return ["The same with CUDA graphs on PyTorch's side."]


def _bottleneck(record: Record) -> str:
    said = []
    for key, found in record["regions"].items():
        case, _, stack = key.rpartition(", ")
        if stack != "jax" or not case.endswith(", adagrad"):
            continue
        totals = {name: _total(times) for name, times in found["wall_ms"].items()}
        largest = max(totals, key=totals.__getitem__)
        said.append(f"{_size(case)}'s is {largest} ({totals[largest] / sum(totals.values()):.0%})")
    return f"The largest region of jaxrec's step: {', '.join(said)}." if said else ""


def _losses(record: Record) -> list[str]:
    """Says where PyTorch is faster, and which region that is."""
    lost = [ratio(record, c, p) for c in cases(record) for p in stacks(record, c)[1:]]
    if not lost:
        return []
    lost = [r for r in lost if r.ratio < 1]
    if not lost:
        return ["No PyTorch stack is faster than jaxrec in the median of any case.", ""]
    lines = ["**Where PyTorch is faster:**", ""]
    for r in lost:
        ours, theirs = (record["regions"].get(f"{r.case}, {s}") for s in ("jax", r.peer))
        why = ""
        if ours and theirs:
            behind = {n: _total(t) - _total(theirs["wall_ms"].get(n, {})) for n, t in ours["wall_ms"].items()}
            worst = max(behind, key=behind.__getitem__)
            why = f"; jaxrec is behind by the most in {worst} ({behind[worst]:+.1f} ms)"
        within = ", within the spread of the turns" if r.high >= 1 else ""
        lines.append(f"- {_title(r.case)}: {r.peer}, {r.text()}{within}{why}.")
    return [*lines, ""]


def _method(record: Record) -> list[str]:
    return [
        f"Each stack is a process of its own. It first finds its fastest setting (below); then the stacks take "
        f"{record['rounds']} turns of about {record['seconds']:g} s, forth and back, after one that is dropped, first on "
        f"{record['resident_batches']} batches that are on the device, then with batches made meanwhile by {record['threads']} "
        "threads from rows in memory. Loads during the turns: "
        + ", ".join(f"{r['median']:.1f}" for r in record["rows"] if r["name"] == "load average")
        + ".",
        "",
    ]


def _bound(record: Record) -> list[str]:
    lines = []
    for size, shape in record["sizes"].items():
        found = next(
            (r for k, r in record["regions"].items() if k.startswith(f"{size}, ") and k.endswith(", jax")), None
        )
        if found is None:
            continue
        ceilings, case = found["ceilings"], next(c for c in cases(record) if c.startswith(f"{size}, "))
        floor = found["model_flops"] / ceilings["products"] * 1e3
        mfu = {s: floor / median(_samples(record, "end to end", case, s)) for s in stacks(record, case)}
        lines.append(
            f"- {size.removeprefix('dlrm_')} ({shape['tables']} tables of {shape['rows']:,} x {shape['dim']}, bags of "
            f"{shape['bag']}, batch {shape['batch']:,}): {found['model_flops'] / 1e9:.1f} GFLOPs of products a step, at the "
            f"measured {ceilings['products'] / 1e9:.0f} GFLOP/s at least {floor:.1f} ms. End-to-end MFU ({_law(case)} ids, "
            f"{_optimizer(case)}): {', '.join(f'{s} {share:.0%}' for s, share in mfu.items())}."
        )
    return [
        *lines,
        "",
        "MFU is the FLOPs of the model's matrix products (three times those of the forward pass, no embeddings) over the time, "
        "as a share of the rate of large products measured by JAX on this machine. On one device the scaling ratio is 1, and end-to-end MFU is local MFU.",
        "",
    ]  # fmt: skip


def _row(record: Record, case: str, stack: str) -> str:
    fed, rate = _samples(record, "end to end", case, stack), _samples(record, "end to end", case, stack, "rate")
    memory = find(record, name="peak memory", case=case, stack=stack)["median"]
    put = median(_samples(record, "to the device", case, stack, "batch"))
    cells = [
        _title(case), stack, _spread(_samples(record, "step", case, stack)), _spread(fed), f"{median(rate):,.0f}",
        f"{put:.1f}", f"{memory:.1f}", "" if stack == "jax" else ratio(record, case, stack).text(),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _total(times: Mapping[str, Any]) -> float:
    """Both passes' median, ms a step."""
    forward, backward = times.get("forward", []), times.get("backward", [])
    return median([f + b for f, b in zip(forward, backward, strict=True)]) if forward else 0.0


def _regions(record: Record) -> list[str]:
    if not record["regions"]:
        return []
    lines = [
        "Wall milliseconds of a traced step, forward + backward. jaxrec's bound is the least that its region can take by the "
        "machine's measured ceilings (`jaxrec/profiling/roofline.py`).",
        "",
    ]
    for size in record["sizes"]:
        keys = [k for k in record["regions"] if k.startswith(f"{size}, ")]
        if not keys:
            continue
        lines += [f"### {size.removeprefix('dlrm_')}", ""]
        lines += [f"![Regions of a step at {size}, stack by stack]({_picture(size)})", ""]
        names = [n for n in (*REGIONS, OTHER) if any(n in record["regions"][k]["wall_ms"] for k in keys)]
        heads = [f"{k.rpartition(', ')[2]} ({_optimizer(k)})" for k in keys]
        lines += [
            f"| region | {' | '.join(heads)} | bound of jax ({_optimizer(keys[0])}) |",
            "|---|" + "---|" * (len(heads) + 1),
        ]
        for name in names:
            bound = record["regions"][keys[0]]["bounds"].get(name)
            limit = f"{bound['bound_ms']:.1f} by {bound['limited_by']}" if bound else ""
            lines.append(
                f"| {name} | {' | '.join(_passes(record['regions'][k]['wall_ms'].get(name)) for k in keys)} | {limit} |"
            )
        sums = [sum(_total(t) for t in record["regions"][k]["wall_ms"].values()) for k in keys]
        lines.append(f"| **all** | {' | '.join(f'{s:.1f}' for s in sums)} | |")
        lines += [
            "",
            "Mapped to a region: " + ", ".join(f"{h} {record['regions'][k]['mapped']:.2%}" for h, k in zip(heads, keys, strict=True))
            + "; in fused kernels that span regions: "
            + ", ".join(f"{h} {record['regions'][k]['spanning']:.0%}" for h, k in zip(heads, keys, strict=True)) + ".",
            "",
        ]  # fmt: skip
    if record["trace"]:
        lines += [
            "[trace.json.gz](trace.json.gz) has steps of jaxrec and of the compiled stack at the balanced size on one time axis; "
            "it opens in [Perfetto](https://ui.perfetto.dev).",
            "",
        ]
    return lines


def _passes(times: Mapping[str, Any] | None) -> str:
    if times is None:
        return ""
    forward, backward = median(times["forward"]), median(times["backward"])
    return f"{forward:.1f} + {backward:.1f}" if backward >= 0.05 else f"{forward:.1f}"


def _start_up(record: Record) -> list[str]:
    rows = [r for r in record["rows"] if r["name"].startswith(("start", "compile"))]
    if not rows:
        return []
    lines = [
        "## Start-up",
        "",
        "Seconds, apart from any step time: until the second step is done, from the start of the process (rows drawn and "
        "weights made meanwhile), and of compiling in it (PyTorch compiles at a first call, whose passes are in it); with an empty compile cache and with the one left by the process before.",
        "",
        "| size, optimizer | stack | to the second step, cold | warm | compiling, cold | warm |",
        "|---|---|---|---|---|---|",
    ]
    for case in dict.fromkeys(r["case"] for r in rows):
        for stack in dict.fromkeys(r["stack"] for r in rows if r["case"] == case):
            values = [
                find(record, name=f"{what}, {cache} cache", case=case, stack=stack)["median"]
                for what in ("start", "compile")
                for cache in ("cold", "warm")
            ]
            cells = " | ".join(f"{v:.1f}" for v in values)
            lines.append(f"| {_size(case)}, {_optimizer(case)} | {stack} | {cells} |")
    imports = [r for r in record["rows"] if r["name"] == "import"]
    said = ", ".join(f"{r['stack']} {_spread(r['samples'])} s" for r in imports)
    return [*lines, "", f"A process that imports the framework and ends: {said}.", ""]


def _quality(record: Record) -> list[str]:
    facts = record["quality"]
    rows = {r["stack"]: r["samples"] for r in record["rows"] if (r["name"], r["metric"]) == ("quality", "ne")}
    times = {r["stack"]: r["samples"] for r in record["rows"] if (r["name"], r["metric"]) == ("quality", "seconds")}
    # What all of them reach: the best NE of the stack whose best is the worst.
    target = max(min(samples) for samples in rows.values())
    lines = [
        "## Quality",
        "",
        f"{facts['config']}{', ' + facts['instead'] if facts['instead'] else ''}, without what the baselines lack (dropout, auxiliary "
        "tasks, Adam), under Adagrad, from the same weights on the same batches, each stack at its usual setting and compiled before the clock runs; validation NE every "
        f"{facts['steps'][0]} steps. Seconds are those of training with its input, without evaluation and start-up. The target is "
        f"the best NE that all stacks reach, {target:.4f}.",
        "",
        "![Validation NE over the steps of training](quality.svg)",
        "",
        "| stack | best NE | at step | NE at the last step | seconds to the target |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    for stack, samples in rows.items():
        best = min(range(len(samples)), key=samples.__getitem__)
        reached = next(k for k, ne in enumerate(samples) if ne <= target)
        lines.append(
            f"| {stack} | {samples[best]:.4f} | {facts['steps'][best]} | {samples[-1]:.4f} | {times[stack][reached]:.1f} |"
        )
    if len(rows) == 1:
        return [*lines, ""]
    largest = max(abs(a - b) for s in rows.values() for a, b in zip(rows["jax"], s, strict=True))
    return [*lines, "", f"The largest difference of NE to jaxrec's at the same step is {largest:.1e}.", ""]


def _gates(record: Record) -> list[str]:
    if not record["gates"]:
        return []
    small = next(iter(record["gates"].values()))["small"]
    lines = [
        "## Do they compute the same?",
        "",
        "The gate of [experiments/baselines](../../experiments/baselines/README.md) came before the turns, with the ids and the layout of tables that are timed: from the same weights, loss, dense "
        "gradients, weights and accumulators after 1 and 50 steps, and the AUC of a short run. "
        f"It compares a small version of each size (tables of {small['rows']:,} rows, batches of {small['batch']}, perceptrons {small['narrower']} times as narrow, weights under an eps of "
        f"{small['eps']:g}), because at full size rounding alone makes two equal programs differ (the README says why). Shown is what came nearest to its limit.",
        "",
        "| size | stack | ids, tables | optimizer | worst | difference | limit | comparisons failed before |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, verdict in record["gates"].items():
        worst, (size, stack) = verdict["worst"], name.split(", ")
        layout = f"{verdict['small']['ids']}, {verdict['small']['layout']}"
        lines.append(
            f"| {size.removeprefix('dlrm_')} | {stack} | {layout} | {verdict['optimizer']} | {worst['what']}, after {worst['after']} steps | "
            f"{worst['value']:.1e} | {worst['limit']:g} | {len(verdict['earlier'])} |"
        )
    return [*lines, ""]


def _settings(record: Record) -> list[str]:
    lines = [
        "Before it is timed, each stack tries its settings, and the fastest is used, under the other law of ids, too. All stacks keep freed memory instead of giving it back to the system "
        "(`jaxrec.startup.keep_freed_memory`); where a start was timed, the usual setting was tried without that. Milliseconds a step on batches on the device, medians of short samples.",
        "",
        "| size, ids, optimizer | stack | settings tried | used |",
        "|---|---|---|---|",
    ]  # fmt: skip
    for key, found in record["settings"].items():
        if not found["tried"]:
            continue
        case, _, stack = key.rpartition(", ")
        tried = "; ".join(f"{_setting(t)}: {median(t['ms']):.1f}" for t in found["tried"])
        lines.append(f"| {_title(case)} | {stack} | {tried} | {_setting(found['used'])} |")
    return [*lines, ""]


def _setting(setting: Mapping[str, Any]) -> str:
    return ", ".join(f"{k} {v}" for k, v in setting.items() if k != "ms")


def _picture(size: str) -> str:
    return f"regions_{size.removeprefix('dlrm_')}.svg"


def figures(record: Record) -> dict[str, str]:
    """Returns the report's pictures."""
    every = cases(record)
    names = list(dict.fromkeys(s for c in every for s in stacks(record, c)))

    def rates(stack: str) -> list[list[float] | None]:
        return [_samples(record, "end to end", c, stack, "rate") if stack in stacks(record, c) else None for c in every]

    pictures = {
        "rate.svg": plots.grouped_bars(
            [_title(c) for c in every],
            {s: [median(x) if x else None for x in rates(s)] for s in names},
            unit="samples a second, end to end",
            title="Samples a second with their input: median, and the spread of the turns",
            spreads={s: [(min(x), max(x)) if x else None for x in rates(s)] for s in names},
        )
    }
    for size in record["sizes"]:
        keys = [k for k in record["regions"] if k.startswith(f"{size}, ")]
        present = [n for n in (*REGIONS, OTHER) if any(n in record["regions"][k]["wall_ms"] for k in keys)]
        if keys:
            pictures[_picture(size)] = plots.stacked_bars(
                [f"{k.rpartition(', ')[2]}, {_optimizer(k)}" for k in keys],
                {n: [_total(record["regions"][k]["wall_ms"].get(n, {})) for k in keys] for n in present},
                unit="milliseconds a traced step (wall)",
                title=f"Where a step of {size.removeprefix('dlrm_')} goes",
            )
    rows = {r["stack"]: r["samples"] for r in record["rows"] if (r["name"], r["metric"]) == ("quality", "ne")}
    pictures["quality.svg"] = plots.points(
        record["quality"]["steps"],
        rows,
        x_unit="steps",
        unit="validation NE",
        title="Quality of the same run in each stack",
    )
    return pictures
