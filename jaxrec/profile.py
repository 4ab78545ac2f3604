"""Where the time goes: `python -m jaxrec.profile --config=dlrm_movielens --workdir=prof --stages=all`.

`--stages=step` writes its trace, and all that it prints, as JSON, into the workdir.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from absl import flags

from jaxrec import flags as jaxrec_flags
from jaxrec.checks import UserError, one_of, require

if TYPE_CHECKING:
    from jaxrec.data.schema import Dataset
    from jaxrec.profiling.step_profile import StepProfile
    from jaxrec.training.config import Config

STAGES = ("input", "step", "all")
FILE = "step_profile.json"


def main() -> int:
    """Runs the command; returns its exit status."""
    values = flags.FLAGS
    one_of("--stages", values.stages, STAGES)
    for name in ("samples", "threads", "traced_steps"):
        require((values[name].value or 0) >= 1, f"--{name} is {values[name].value}, but must be at least 1")
    require(0 < values.seconds < 3600, f"--seconds is {values.seconds}, but must be greater than 0 and below 3600")
    for name in ("plan", "profile_steps", "resume"):
        require(values[name].using_default_value, f"--{name} is given, but jaxrec.profile has no use for it")
    if values.stages != "input":
        require(
            bool(values.workdir), f"--workdir is not given, but --stages={values.stages} writes its trace into a folder"
        )
    jaxrec_flags.prepare_process()
    from jaxrec import mesh as mesh_lib
    from jaxrec import processes

    config = jaxrec_flags.resolve_config()
    require(processes.count() == 1, f"there are {processes.count()} processes, but jaxrec.profile takes one")
    mesh_lib.create(config.mesh)
    mesh_lib.check_batch(config.mesh, config.training.batch_size)
    if values.stages != "input":
        _make_folder(values.workdir)
    dataset = config.data.open(values.data_dir)
    schema = dataset.schema
    kinds = ", ".join(f"{sum(f.kind == k for f in schema.features)} {k}" for k in ("categorical", "bag", "history"))
    print(
        f"data        {dataset.name}: {dataset.splits['train'].rows:,} training rows of {len(schema.dense)} dense "
        f"columns and {kinds} features ({schema.slots} ids); batches of {config.training.batch_size:,}"
    )
    if values.stages != "step":
        _input(config, dataset)
    if values.stages != "input":
        _step(config, dataset)
    return 0


def _make_folder(path: str) -> None:
    require(
        Path(path).is_dir() or not Path(path).exists(), f"--workdir is {path!r}, which is a file, but must be a folder"
    )
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"--workdir is {path!r}, which cannot be made ({e.strerror}), but must be a folder") from e


def _input(config: Config, dataset: Dataset) -> None:
    from jaxrec import mesh as mesh_lib
    from jaxrec.profiling import input_stages

    values, sharding = flags.FLAGS, mesh_lib.batch_sharding(mesh_lib.create(config.mesh))
    stages = input_stages.measure(
        dataset,
        config.training.batch_size,
        lambda batch: mesh_lib.put(batch, sharding),
        threads=values.threads,
        samples=values.samples,
        seconds=values.seconds,
    )
    print(f"{'stage':<10}  {'rows/s':>12}  {'spread':>25}  {'ns/row':>7}  what")
    for stage in stages:
        spread = f"{min(stage.rows_per_second):,.0f} to {max(stage.rows_per_second):,.0f}"
        print(f"{stage.name:<10}  {stage.median:>12,.0f}  {spread:>25}  {1e9 / stage.median:>7.0f}  {stage.what}")
    slowest = min(stages[:-1], key=lambda s: s.median)
    alone = sum(1 / s.median for s in stages[:-1])
    print(
        f"slowest     {slowest.name}, {1 / slowest.median / alone:.0%} of the time of the stages one after the other "
        f"({1 / alone:,.0f} rows/s)"
    )
    print(json.dumps({stage.name: [round(r) for r in stage.rows_per_second] for stage in stages}))


def _step(config: Config, dataset: Dataset) -> None:
    from jaxrec import environment
    from jaxrec.profiling import step_profile
    from jaxrec.training import workdir

    values = flags.FLAGS
    profile = step_profile.measure(
        config,
        dataset,
        values.workdir,
        samples=values.samples,
        seconds=values.seconds,
        traced=values.traced_steps,
        threads=values.threads,
    )
    for line in _report(profile):
        print(line)
    found = {
        "config": config.as_dict(), "environment": environment.describe(), "load_average": os.getloadavg(),
        **profile.as_dict(),
    }  # fmt: skip
    workdir.write_json(Path(values.workdir) / FILE, found)
    print(f"written     {FILE} and {profile.trace} in the workdir")


def _report(profile: StepProfile) -> list[str]:
    """Returns what is printed of a step, line by line."""
    regions, facts, ceilings = profile.regions, profile.program, profile.ceilings
    lines = [
        f"{'region':<17} {'forward ms':>10} {'backward ms':>11} {'share':>6}  {'spread':>19}  {'wall ms':>8} "
        f"{'bound ms':>8} {'attained':>8}  limited by"
    ]
    for name, of_region in regions.mean().items():
        samples, bound = of_region.samples, profile.bounds[name]
        share = sum(samples) / len(samples) / regions.total_ms if regions.total_ms else 0.0
        lines.append(
            f"{name:<17} {median(of_region.forward):>10.3f} {median(of_region.backward):>11.3f} {share:>6.1%}  "
            f"{f'{min(samples):.3f} to {max(samples):.3f}':>19}  {bound.wall_ms:>8.3f} {bound.bound_ms:>8.3f} "
            f"{bound.attained:>8.0%}  {bound.limited_by}"
        )
    parts = len(regions.devices)
    lines += [
        f"op time     {regions.total_ms:.3f} ms of threads a step"
        + (f" and device, the mean of {parts} devices" if parts > 1 else "")
        + f"; wall time {median(regions.wall_ms):.3f} ms traced, {median(profile.resident_ms):.3f} ms untraced "
        + f"({min(profile.resident_ms):.3f} to {max(profile.resident_ms):.3f})",
        f"mapped      {regions.mapped_share:.2%} of op time, {regions.inferred_share:.2%} by neighbours; "
        f"{regions.spanning_share:.2%} in fusions that span regions, counted by their roots "
        f"(by elements, {regions.foreign_share:.2%} is another region's)"
        + _listed("; without a region: ", regions.other_ms),
        f"program     {facts.operations} operations, {facts.fusions} fusions; FLOPs a step and device: "
        f"{_giga(facts.compiler_flops)} G by the compiler, {_giga(facts.work.product_flops)} G in matrix products, "
        f"{_giga(facts.model_flops)} G by the model's definition",
    ]
    longest = sorted(regions.op_ms, key=lambda op: -regions.op_ms[op])[:3]
    lines.append(
        "longest     "
        + ", ".join(f"{op} {regions.op_ms[op]:.3f} ms ({regions.op_place.get(op, 'unknown')})" for op in longest)
    )
    if facts.difference:
        lines.append(f"differs     {facts.difference}")
    memory = ", ".join(f"{kind} {size / 2**20:.1f}" for kind, size in facts.memory.items())
    lines.append(f"memory      MiB: {memory}")
    for op, devices in sorted({(c.op, c.devices) for c in facts.collectives}):
        alike = [c for c in facts.collectives if (c.op, c.devices) == (op, devices)]
        lines.append(
            f"collective  {len(alike)} {op} over {devices} devices: {sum(c.result_bytes for c in alike):,} bytes of "
            f"results, {sum(c.received_bytes for c in alike):,.0f} received"
        )
    if facts.not_aliased:
        copied = {name: size / 2**20 for name, size in facts.not_aliased.items()}
        lines.append(f"not aliased {len(copied)} donated arrays (MiB){_listed(': ', copied)}")
    lines.append(
        f"ceilings    {ceilings.device}: copy {ceilings.copy / 1e9:.1f} GB/s, rows of {ceilings.row_bytes} bytes at "
        f"random {ceilings.random / 1e9:.2f} GB/s, {ceilings.precision} products {ceilings.products / 1e9:.0f} "
        f"GFLOP/s, element-wise {ceilings.elementwise / 1e9:.0f} GFLOP/s"
    )
    fed = profile.fed_ms
    lines.append(f"with input  {median(fed):.3f} ms a step ({min(fed):.3f} to {max(fed):.3f})")
    lines.append(f"verdict     {profile.verdict.sentence()}")
    return lines


def _giga(flops: float | None) -> str:
    return "unknown" if flops is None else f"{flops / 1e9:.4g}"


def _listed(head: str, items: dict[str, float] | Any, most: int = 5) -> str:
    """Returns the first few of named numbers for a line."""
    shown = [f"{name} {value:.4g}" for name, value in list(items.items())[:most]]
    return head + ", ".join([*shown, *(["..."] if len(items) > most else [])]) if items else ""


if __name__ == "__main__":
    jaxrec_flags.run_command(main, jaxrec_flags.define_profile)
