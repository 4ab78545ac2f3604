"""Trains a model: `python -m jaxrec.train --config=dlrm_movielens --workdir=run`."""

from __future__ import annotations

import json
import sys
import time

_BEGIN = time.perf_counter()

from absl import flags  # noqa: E402

from jaxrec import flags as jaxrec_flags  # noqa: E402
from jaxrec.checks import one_of, require  # noqa: E402


def main() -> int:
    """Runs the command; returns its exit status."""
    flag_values = flags.FLAGS
    from jaxrec.configs import catalogue

    if flag_values.config == "help":
        print("\n".join(catalogue.help_lines()))
        return 0
    if flag_values.plan is not None:
        return explain_plan(flag_values.plan, flag_values.data_dir)
    require(bool(flag_values.workdir), "--workdir is not given, but must be the folder of the run")
    from jaxrec import processes, tracing
    from jaxrec.startup import PhaseClock, seconds_since_process_start
    from jaxrec.training.loop import Options, StepRefused, train

    config = jaxrec_flags.resolve_config()
    profile_steps = tracing.parse_steps(flag_values.profile_steps)
    jaxrec_flags.prepare_process()
    clock = PhaseClock()
    clock.seconds["imports"] = seconds_since_process_start() or time.perf_counter() - _BEGIN
    if processes.is_first():
        print(json.dumps(config.as_dict(), indent=2), file=sys.stderr)
    options = Options(flag_values.workdir, flag_values.data_dir, flag_values.resume, profile_steps)
    try:
        summary, status = train(config, options, clock)
    except StepRefused as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    if status == 0 and processes.is_first():
        print_summary(summary)
    return status


def explain_plan(what: str, data_dir: str) -> int:
    """Prints the layout of the tables and what it costs, without training; returns the exit status."""
    one_of("--plan", what, ("explain",))
    for name in ("distributed", "coordinator", "num_processes", "process_id"):
        value = flags.FLAGS[name].value
        require(value is None, f"--{name} is {value}, but --plan=explain needs one process only")
    import jax

    from jaxrec.data.pipeline import Batches
    from jaxrec.embeddings.explain import explain
    from jaxrec.mesh import check_batch
    from jaxrec.training.setup import measure_capacities, plan_tables

    config = jaxrec_flags.resolve_config()
    check_batch(config.mesh, config.training.batch_size)
    dataset = config.data.open(data_dir)
    plan = plan_tables(config, dataset.schema, jax.default_backend())
    batches = Batches(dataset, "train", config.training.batch_size, seed=config.training.seed)
    sizes = {"data": config.mesh.data, "model": config.mesh.model}
    capacities = measure_capacities(config, plan, batches)
    print("\n".join(explain(plan, config.training.batch_size, sizes, capacities)))
    return 0


def print_summary(summary: dict) -> None:
    """Prints what a reader wants to know of a finished run."""
    for split, metrics in summary["metrics"].items():
        print(f"{split:<11} " + "  ".join(f"{k} {_number(k, v)}" for k, v in metrics.items()))
    shares = "  ".join(f"{k} {v:.1%}" for k, v in summary["stage_shares"].items())
    print(
        f"steps       {summary['steps']} (best {summary['best_step']}), {summary['samples_per_second']:,.0f} samples/s"
    )
    # A resumed run's times are those of the process that ended it.
    print(f"time        {summary['seconds']:.1f} s for {summary['steps_this_process']} steps: {shares}")
    print("start-up    " + "  ".join(f"{k} {v:.1f} s" for k, v in summary["startup_seconds"].items()))


# Metrics that are counts.
COUNTS = ("rows", "users_with_both_classes", "spilled_rows", "unseen_ids")


def _number(name: str, value: float | None) -> str:
    """Counts without decimals, fractions with four; what is not defined as such."""
    if value is None:
        return "undefined"
    return f"{value:,.0f}" if name.rpartition("/")[2] in COUNTS else f"{value:.4f}"


if __name__ == "__main__":
    jaxrec_flags.run_command(main, jaxrec_flags.define_train)
