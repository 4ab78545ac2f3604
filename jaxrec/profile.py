"""Where the time goes: `python -m jaxrec.profile --config=dlrm_movielens --stages=input`."""

from __future__ import annotations

import json

from absl import flags

from jaxrec import flags as jaxrec_flags
from jaxrec.checks import require

STAGES = ("input",)


def main() -> int:
    """Runs the command; returns its exit status."""
    values = flags.FLAGS
    require(
        values.stages in STAGES,
        f"--stages is {values.stages!r}, but must be input: the other stages are not built yet",
    )
    for name in ("samples", "threads"):
        require((values[name].value or 0) >= 1, f"--{name} is {values[name].value}, but must be at least 1")
    require(values.seconds > 0, f"--seconds is {values.seconds}, but must be greater than 0")
    from jaxrec import mesh as mesh_lib
    from jaxrec.profiling import input_stages

    jaxrec_flags.prepare_process()
    config = jaxrec_flags.resolve_config()
    mesh = mesh_lib.create(config.mesh)
    mesh_lib.check_batch(config.mesh, config.training.batch_size)
    sharding = mesh_lib.batch_sharding(mesh)
    dataset = config.data.open(values.data_dir)
    schema = dataset.schema
    kinds = ", ".join(f"{sum(f.kind == k for f in schema.features)} {k}" for k in ("categorical", "bag", "history"))
    print(
        f"data        {dataset.name}: {dataset.splits['train'].rows:,} training rows of {len(schema.dense)} dense "
        f"columns and {kinds} features ({schema.slots} ids); batches of {config.training.batch_size:,}"
    )
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
    return 0


if __name__ == "__main__":
    jaxrec_flags.run_command(main, jaxrec_flags.define_profile)
