"""The training loop, read from top to bottom.

The contract of its order, at every step s: evaluate what s updates have made, then save it, and only then take batch s.
So a checkpoint knows every evaluation up to its step, and a resumed run repeats none and skips none.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from jaxrec import environment
from jaxrec.data.device import DevicePrefetch
from jaxrec.data.pipeline import Batches, stream
from jaxrec.startup import CompileCounter, PhaseClock
from jaxrec.tracing import StepTracer
from jaxrec.training import setup, workdir
from jaxrec.training.checkpoint import Checkpoints, Progress
from jaxrec.training.config import Config
from jaxrec.training.evaluation import Evaluator
from jaxrec.training.metrics import window_metrics
from jaxrec.training.signals import StopRequest
from jaxrec.training.state import TrainState
from jaxrec.training.step import Program, checked_tensors, shard_train_step
from jaxrec.training.writers import MetricWriter

# Steps that the host may be ahead of the device: enough to hide its own work, few enough that a wait for input shows.
IN_FLIGHT = 2


class StepNotFinite(Exception):
    """A checked value of a step was not finite; the message names step and tensor."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What a run may change without being another run.

    Attributes:
      workdir: The run's folder.
      data_dir: Where prepared data sets are.
      resume: See `workdir.claim`.
      profile_steps: Half-open range of steps to trace.
      quiet: No progress bar and no messages.
    """

    workdir: str
    data_dir: str
    resume: str = "auto"
    profile_steps: tuple[int, int] | None = None
    quiet: bool = False


class Shares:
    """Wall seconds of the loop by what it was doing; `step` is what the others leave."""

    def __init__(self):
        self.seconds = {"input": 0.0, "evaluation": 0.0, "checkpoint": 0.0, "trace": 0.0}

    @contextlib.contextmanager
    def doing(self, what: str):
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] += time.perf_counter() - begin

    def of(self, total: float) -> dict[str, float]:
        """Returns each stage's share of `total` seconds; they add up to 1."""
        stages = {"step": total - sum(self.seconds.values()), **self.seconds}
        return {k: v / total if total > 0 else 0.0 for k, v in stages.items()}


def train(config: Config, options: Options, clock: PhaseClock | None = None) -> tuple[dict[str, Any], int]:
    """Trains as `config` says, or continues, and evaluates the best checkpoint on validation and test.

    Returns:
      The summary (also written to `summary.json`), and the exit status: 0, or 128 + the signal that ended the run.

    Raises:
      UserError: Something the user can mend.
      StepNotFinite: A step's loss, gradient or update was not finite. The state before it has been saved.
    """
    clock = clock or PhaseClock()
    compiles = CompileCounter()
    say = (lambda *_: None) if options.quiet else _say
    used = workdir.claim(options.workdir, config, options.resume)
    with contextlib.ExitStack() as stack:
        stack.callback(compiles.close)
        stop = stack.enter_context(StopRequest())
        with clock.phase("data"):
            dataset = config.data.open(options.data_dir)
            batches = Batches(dataset, "train", config.training.batch_size, seed=config.training.seed)
        with clock.phase("init"):
            program, dense = setup.build_program(config, dataset)
            state = setup.initial_state(program, dense)
            window = setup.new_window(program)
        for line in program.plan.describe():
            say(f"embeddings  {line}")
        with clock.phase("restore"):
            checkpoints = Checkpoints(options.workdir, config.training.keep_last)
            stack.callback(checkpoints.close)
            progress = Progress()
            if used and checkpoints.steps:
                restored = checkpoints.steps[-1]
                progress = checkpoints.progress(restored)
                state = checkpoints.restore(program, state, restored)
                say(f"resumed     from step {restored}")
        with clock.phase("compile"):
            shapes = setup.batch_shapes(dataset, config.training.batch_size, program)
            step_program = shard_train_step(program).lower(state, window, shapes).compile()
            evaluator = Evaluator(config, dataset, program, state)
        start = int(state.step)
        writer = MetricWriter(options.workdir, start if used else -1)
        stack.callback(writer.close)
        run = _Run(config, options, program, step_program, evaluator, checkpoints, writer, batches, stop, clock, say)
        state, progress, statistics = run.loop(state, window, progress, start, compiles)
        if stop.signal:
            say(f"stopped     by signal {stop.signal} after step {progress.batches}; the same command continues from there")
            return statistics, stop.exit_status
        summary = _summary(config, dataset, progress, run, state, statistics, clock)
        workdir.write_json(Path(options.workdir) / workdir.SUMMARY_FILE, summary)
        return summary, 0


@dataclasses.dataclass
class _Run:
    """What the loop needs and does not change."""

    config: Config
    options: Options
    program: Program
    step_program: Any
    evaluator: Evaluator
    checkpoints: Checkpoints
    writer: MetricWriter
    batches: Batches
    stop: StopRequest
    clock: PhaseClock
    say: Any

    def loop(
        self, state: TrainState, window: Any, progress: Progress, start: int, compiles: CompileCounter
    ) -> tuple[TrainState, Progress, dict[str, Any]]:
        """Runs steps `start` to the last; returns the last state, its progress and what was measured."""
        config, stop = self.config.training, self.stop
        shares, tracer = Shares(), StepTracer(self.options.workdir, self.options.profile_steps)
        in_flight: collections.deque[jax.Array] = collections.deque()
        truncated, compiled_before, logged = 0, 0, (start, time.perf_counter(), 0.0)
        saved = start if start else -1
        begin = time.perf_counter()
        source = stream(self.batches, start, max(config.steps, start))
        with (
            DevicePrefetch(source, setup.put_batch(self.program)) as ahead,
            tqdm(total=config.steps, initial=start, disable=self.options.quiet, unit="step", dynamic_ncols=True, file=sys.stderr) as bar,
        ):
            step = start
            while True:
                last = step >= config.steps
                improved = False
                if not stop.signal and step > progress.evaluated_step and (last or _due(step, config.eval_every)):
                    with shares.doing("evaluation"):
                        improved = self._evaluate(state, progress, step)
                finished = last or progress.stopped_early or bool(stop.signal)
                if step != saved and (finished or improved or _due(step, config.checkpoint_every)):
                    with shares.doing("checkpoint"):
                        progress.batches = step
                        saved = self.checkpoints.save(self.program, state, progress, self.config.identity())
                if finished:
                    break
                with shares.doing("trace"):
                    tracer.before(step)
                with shares.doing("input") if not in_flight or in_flight[-1].is_ready() else contextlib.nullcontext():
                    device_batch, host = next(ahead)
                truncated += host.truncated
                with tracer.mark(step), self.clock.phase("first_step") if step == start else contextlib.nullcontext():
                    state, window, done = self.step_program(state, window, device_batch)
                    if step == start:
                        jax.block_until_ready(done)
                        compiled_before = compiles.count
                in_flight.append(done)
                if len(in_flight) > IN_FLIGHT:
                    in_flight.popleft().block_until_ready()
                with shares.doing("trace"):
                    if traced := tracer.after(step, done):
                        self.say(f"trace       {traced}")
                step += 1
                bar.update()
                if step % config.log_every == 0 or step == config.steps:
                    values, window = self._poll(state, window, progress)
                    now, waited = time.perf_counter(), shares.seconds["input"]
                    rate = (step - logged[0]) * config.batch_size / (now - logged[1])
                    values |= {"samples_per_second": rate, "input_share": (waited - logged[2]) / (now - logged[1])}
                    self.writer.write(step, "train", values)
                    bar.set_postfix_str(
                        f"loss {values['loss']:.4f} NE {values['ne']:.4f} {rate:,.0f} samples/s input {values['input_share']:.0%}"
                    )
                    logged = (step, now, waited)
            tracer.stop(state)
        self._poll(state, window, progress)
        with shares.doing("checkpoint"):
            self.checkpoints.wait()
        seconds = time.perf_counter() - begin
        steps = step - start
        progress.batches = step
        return state, progress, {
            "steps": step,
            "steps_this_process": steps,
            "seconds": seconds,
            "samples_per_second": steps * config.batch_size / seconds if seconds else 0.0,
            "stage_shares": shares.of(seconds),
            "recompiles": compiles.count - compiled_before if steps else 0,
            "compile_cache_hits": compiles.cache_hits,
            "truncated_ids": truncated,
            "rows_dropped_per_epoch": self.batches.rows_dropped_per_epoch,
        }  # fmt: skip

    def _evaluate(self, state: TrainState, progress: Progress, step: int) -> bool:
        """Evaluates on validation and updates `progress`; returns whether the state is the best so far."""
        values = self.evaluator.run(state, "validation", self.stop)
        if values is None:
            return False
        self.writer.write(step, "validation", values)
        ne = values[self.evaluator.criterion]
        progress.evaluated_step = step
        improved = ne < progress.best_ne or progress.best_step < 0
        if improved:
            progress.best_step, progress.best_ne, progress.worse = step, ne, 0
        else:
            progress.worse += 1
            patience = self.config.training.patience
            progress.stopped_early = bool(patience) and progress.worse >= patience
        return improved

    def _poll(self, state: TrainState, window: Any, progress: Progress) -> tuple[dict[str, float], Any]:
        """Reads the window's sums; the only place, with evaluation and saving, where the host waits for the device."""
        sums, failed_step, failed_tensor = jax.device_get((window, state.failed_step, state.failed_tensor))
        if failed_step >= 0:
            progress.batches = int(state.step)
            self.checkpoints.save(self.program, state, progress, self.config.identity())
            self.checkpoints.wait()
            tensor = checked_tensors(self.program, state)[int(failed_tensor)]
            raise StepNotFinite(
                f"step {int(failed_step)}: {tensor} is not finite; the state before that step is saved, and no later "
                "step changed it; look at that batch, lower the learning rates, or start anew in another --workdir"
            )
        return window_metrics(sums), setup.new_window(self.program)


def _due(step: int, every: int) -> bool:
    return step > 0 and every > 0 and step % every == 0


def _summary(config: Config, dataset: Any, progress: Progress, run: _Run, state: TrainState, statistics: dict[str, Any], clock: PhaseClock) -> dict[str, Any]:
    """Evaluates the best checkpoint and returns everything that `summary.json` holds."""
    if progress.best_step != statistics["steps"]:
        state = run.checkpoints.restore(run.program, state, progress.best_step)
    splits = [s for s in ("validation", "test") if s in dataset.splits]
    metrics = {s: run.evaluator.run(state, s) for s in splits}
    memory = run.step_program.memory_analysis()
    summary = {
        "config": config.name,
        "best_step": progress.best_step,
        "stopped_early": progress.stopped_early,
        "metrics": metrics,
        **statistics,
        "startup_seconds": clock.seconds,
        "peak_memory_bytes": environment.peak_memory_bytes(),
        "step_memory_bytes": {
            k: int(getattr(memory, f"{k}_size_in_bytes")) for k in ("argument", "output", "alias", "temp")
        },
        "mesh": str(config.mesh),
        "environment": environment.describe(),
    }
    return _finite(summary)


def _finite(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON lacks, by None."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return None
    return value


def _say(text: str) -> None:
    with tqdm.external_write_mode(file=sys.stderr):
        print(text, file=sys.stderr)
