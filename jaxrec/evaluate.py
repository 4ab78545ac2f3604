"""Evaluates a run's best checkpoint: `python -m jaxrec.evaluate --workdir=run`."""

from __future__ import annotations

import json
from pathlib import Path

from absl import flags

from jaxrec import flags as jaxrec_flags
from jaxrec.checks import one_of, require


def main() -> int:
    """Runs the command; returns its exit status."""
    flag_values = flags.FLAGS
    require(bool(flag_values.workdir), "--workdir is not given, but must be the folder of a run")
    from jaxrec import mesh
    from jaxrec.configs import catalogue, overrides
    from jaxrec.training import setup
    from jaxrec.training.checkpoint import Checkpoints
    from jaxrec.training.evaluation import Evaluator
    from jaxrec.training.workdir import CONFIG_FILE, read_json

    jaxrec_flags.prepare_process()
    stored = read_json(Path(flag_values.workdir) / CONFIG_FILE)
    require("config" in stored, f"{flag_values.workdir}/{CONFIG_FILE} holds no config: no run of jaxrec wrote it")
    config = overrides.from_dict(catalogue.get(stored["config"]["name"]), stored["config"])
    if flag_values.mesh is not None:
        config = overrides.replace(config, "mesh", mesh.parse(flag_values.mesh))
    if flag_values.embedding_sharding is not None:
        config = overrides.replace(config, "embedding.sharding", flag_values.embedding_sharding)
    dataset = config.data.open(flag_values.data_dir)
    one_of("--split", flag_values.split, tuple(dataset.splits))
    program, dense = setup.build_program(config, dataset, for_training=False)
    checkpoints = Checkpoints(flag_values.workdir, config.training.keep_last)
    steps = checkpoints.steps
    require(bool(steps), f"--workdir={flag_values.workdir} holds no checkpoint yet")
    best = checkpoints.progress(steps[-1]).best_step
    step = flag_values.step if flag_values.step is not None else best if best in steps else steps[-1]
    require(step in steps, f"--step is {step}, but must be one of the checkpoints: {', '.join(map(str, steps))}")
    state = checkpoints.restore(program, setup.initial_state(program, dense), step)
    metrics = Evaluator(config, dataset, program, state).run(state, flag_values.split)
    print(json.dumps({"step": step, "split": flag_values.split, **(metrics or {})}))
    return 0


if __name__ == "__main__":
    jaxrec_flags.run_command(main, jaxrec_flags.define_evaluate)
