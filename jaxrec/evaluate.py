"""Evaluates a run's best checkpoint: `python -m jaxrec.evaluate --workdir=run`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from absl import flags

from jaxrec import flags as jaxrec_flags
from jaxrec.checks import one_of, require


def main() -> int:
    """Runs the command; returns its exit status."""
    flag_values = flags.FLAGS
    require(bool(flag_values.workdir), "--workdir is not given, but must be the folder of a run")
    from jaxrec import mesh, processes
    from jaxrec.configs import catalogue, overrides
    from jaxrec.training import setup
    from jaxrec.training.checkpoint import Checkpoints
    from jaxrec.training.config import require_same
    from jaxrec.training.evaluation import Evaluator
    from jaxrec.training.workdir import CONFIG_FILE, read_json

    jaxrec_flags.prepare_process()
    stored = read_json(Path(flag_values.workdir) / CONFIG_FILE)
    values: Any = stored.get("config")
    require(
        isinstance(values, dict) and isinstance(values.get("name"), str),
        f"{flag_values.workdir}/{CONFIG_FILE} holds no config, so no run of jaxrec wrote it; name another --workdir",
    )
    config = overrides.from_dict(catalogue.get(values["name"]), values)
    if flag_values.mesh is not None:
        config = overrides.replace(config, "mesh", mesh.parse(flag_values.mesh))
    if flag_values.embedding_sharding is not None:
        config = overrides.replace(config, "embedding.sharding", flag_values.embedding_sharding)
    # Where the run's machine had a compiled kernel, this one may have none: no result depends on it.
    config = overrides.replace(config, "embedding.kernel", flag_values.embedding_kernel or "auto")
    require_same({"config": config.as_dict(), **{k: flag_values[k].value for k in ("workdir", "split", "step")}})
    dataset = processes.first_alone(lambda: config.data.open(flag_values.data_dir))
    one_of("--split", flag_values.split, tuple(dataset.splits))
    program, dense = setup.build_program(config, dataset)
    checkpoints = Checkpoints(flag_values.workdir, config.training.keep_last, for_training=False)
    steps = checkpoints.steps
    require(bool(steps), f"--workdir={flag_values.workdir} holds no checkpoint yet")
    step, identity = flag_values.step, setup.identity(config, dataset)
    if step is None:
        best = checkpoints.progress(steps[-1], identity).best_step
        step = best if best in steps else steps[-1]  # Before the first evaluation there is no best.
    require(step in steps, f"--step is {step}, but must be one of the checkpoints: {', '.join(map(str, steps))}")
    checkpoints.progress(step, identity)
    state = checkpoints.restore(program, setup.initial_state(program, dense), step)
    metrics = Evaluator(config, dataset, program, state).run(state, flag_values.split) or {}
    finite = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
    if processes.is_first():
        print(json.dumps({"step": step, "split": flag_values.split, **finite}))
    return 0


if __name__ == "__main__":
    jaxrec_flags.run_command(main, jaxrec_flags.define_evaluate)
