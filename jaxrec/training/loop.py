"""The training loop, read from top to bottom.

The contract of its order, at every step s: evaluate what s updates have made, then save it, and only then take batch s.
So a checkpoint knows every evaluation up to its step, and a resumed run repeats none and skips none.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from jaxrec import environment, processes
from jaxrec.checks import require
from jaxrec.data.device import DevicePrefetch
from jaxrec.data.pipeline import Batches, stream
from jaxrec.data.schema import Dataset
from jaxrec.startup import CompileCounter, PhaseClock
from jaxrec.tracing import StepTracer
from jaxrec.training import setup, workdir
from jaxrec.training.checkpoint import Checkpoints, Progress
from jaxrec.training.config import Config, require_same
from jaxrec.training.evaluation import Evaluator
from jaxrec.training.metrics import window_metrics
from jaxrec.training.signals import StopRequest
from jaxrec.training.state import TrainState, Window
from jaxrec.training.step import Program, checks, shard_train_step
from jaxrec.training.writers import MetricWriter

# Steps that the host may be ahead of the device: enough to hide its own work, few enough that a wait for input shows.
IN_FLIGHT = 2


class StepRefused(Exception):
    """A step failed a check (a value was not finite, an exchange overflowed); the message names step and check."""


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
      StepRefused: A step's loss, gradient or update was not finite, or more rows were to be exchanged than fit. The
        state before it has been saved.
    """
    clock = clock or PhaseClock()
    compiles = CompileCounter()
    say = (lambda *_: None) if options.quiet or not processes.is_first() else _say
    if processes.count() > 1:
        started = {"workdir": options.workdir, "resume": options.resume, "versions": environment.versions()}
        require_same({"config": config.as_dict(), **started})
    used = processes.on_first(lambda: workdir.claim(options.workdir, config, options.resume))
    with contextlib.ExitStack() as stack:
        stack.callback(compiles.close)
        lock = stack.enter_context(contextlib.closing(workdir.Lock(options.workdir)))
        processes.on_first(lock.acquire)
        with clock.phase("data"):
            dataset = processes.first_alone(lambda: config.data.open(options.data_dir))
            batches = processes.together(lambda: setup.training_batches(config, dataset))
        with clock.phase("init"):
            program, dense = setup.build_program(config, dataset, batches)
            state = setup.initial_state(program, dense)
            window = setup.new_window(program)
        rows = ", ".join(f"{name} {split.rows:,}" for name, split in dataset.splits.items())
        say(f"data        {dataset.name}: {rows} rows")
        for split, unseen in dataset.unseen.items():
            most = ", ".join(f"{name} {n:,}" for name, n in sorted(unseen.items(), key=lambda x: -x[1])[:4] if n)
            say(
                f"unseen      {split}: {sum(unseen.values()):,} ids that training has no row for{most and f' ({most})'}"
            )
        steps, first = config.training.steps, config.training.eval_every or config.training.steps
        if min(first, steps) > 2 * len(batches):
            say(
                f"epochs      {steps / len(batches):.1f} in {steps:,} steps, {first / len(batches):.1f} of them before "
                "the first evaluation, when a model may have overfitted; lower --eval_every"
            )
        for line in _description(config, program):
            say(line)
        with clock.phase("restore"):
            checkpoints = Checkpoints(options.workdir, config.training.keep_last)
            stack.callback(checkpoints.close)
            progress = Progress()
            require(
                bool(checkpoints.steps) or options.resume != "must",
                f"--resume=must, but --workdir={options.workdir} holds no checkpoint; --resume=auto starts from step 0",
            )
            if checkpoints.steps:
                restored = checkpoints.steps[-1]
                progress = checkpoints.progress(restored, setup.identity(config, dataset))
                state = checkpoints.restore(program, state, restored)
                checkpoints.delete_old(progress.best_step)
                over = restored >= config.training.steps or progress.out_of_patience(config.training.patience)
                summary = processes.on_first(lambda: workdir.finished(options.workdir, restored)) if over else None
                if summary is not None:
                    say(f"finished    at step {restored}: nothing is left to do")
                    if options.profile_steps is not None:
                        say("trace       none: no step was run; --profile_steps needs a run that is not finished")
                    return summary, 0
                say(f"resumed     from step {restored}")
                if progress.best_step not in (-1, *checkpoints.steps):
                    say(f"checkpoint  {progress.best_step}, the best, is gone; the best is chosen among later ones")
                    evaluated = min(progress.evaluated_step, restored - 1)
                    progress = Progress(restored, evaluated, window=progress.window)
                if progress.window:
                    window = setup.replicate(program, Window(*map(jnp.float32, progress.window)))
        with clock.phase("compile"):
            shapes = setup.batch_shapes(dataset, config.training.batch_size, program)
            step_program = shard_train_step(program).lower(state, window, shapes).compile()
            evaluator = Evaluator(config, dataset, program, state)
        processes.on_first(lambda: workdir.record(options.workdir, config))
        stop = stack.enter_context(StopRequest())
        start = int(state.step)
        writer = None
        if processes.is_first():
            writer = MetricWriter(options.workdir, start if used else -1, progress.evaluated_step)
            stack.callback(writer.close)
        identity = setup.identity(config, dataset)
        run = _Run(
            config, identity, options, program, step_program, evaluator, checkpoints, writer, batches, stop, clock, say
        )
        state, progress, statistics = run.loop(state, window, progress, start, compiles)
        summary = None if stop.signal else _summary(run, dataset, state, progress, statistics)
        if summary is None:
            say(
                f"stopped     by signal {stop.signal} after step {progress.batches}; "
                "the same command continues from there"
            )
            return statistics, stop.exit_status
        processes.on_first(lambda: workdir.write_json(Path(options.workdir) / workdir.SUMMARY_FILE, summary))
        return summary, 0


@dataclasses.dataclass
class _Run:
    """What the loop needs and does not change."""

    config: Config
    identity: dict[str, Any]
    options: Options
    program: Program
    step_program: Any
    evaluator: Evaluator
    checkpoints: Checkpoints
    writer: MetricWriter | None
    batches: Batches
    stop: StopRequest
    clock: PhaseClock
    say: Any

    def loop(
        self, state: TrainState, window: Any, progress: Progress, start: int, compiles: CompileCounter
    ) -> tuple[TrainState, Progress, dict[str, Any]]:
        """Runs steps `start` to the last; returns the last state, its progress and what was measured."""
        config, stop = self.config.training, self.stop
        shares = Shares()
        in_flight: collections.deque[jax.Array] = collections.deque()
        truncated, compiled_before, logged = 0, 0, (start, time.perf_counter(), 0.0)
        saved = start if start else -1
        begin = time.perf_counter()
        source = stream(self.batches, start, max(config.steps, start))
        with (
            StepTracer(self.options.workdir, self.options.profile_steps if processes.is_first() else None) as tracer,
            DevicePrefetch(source, setup.put_batch(self.program)) as ahead,
            tqdm(
                total=config.steps,
                initial=start,
                disable=self.options.quiet or not processes.is_first(),
                unit="step",
                dynamic_ncols=True,
                file=sys.stderr,
            ) as bar,
        ):
            step = start
            while True:
                last = step >= config.steps
                stop.poll()
                evaluated, best = progress.evaluated_step, progress.best_step
                if not stop.signal and step > evaluated and (last or _due(step, config.eval_every)):
                    with shares.doing("evaluation"):
                        self._raise_if_refused(state, window, progress)
                        self._evaluate(state, progress, step)
                over = last or progress.out_of_patience(config.patience)
                finished = over or bool(stop.signal)
                if step == saved:
                    # Saved by a process that was stopped before it evaluated. The last checkpoint must know the best.
                    save = over and progress.evaluated_step != evaluated
                else:
                    save = finished or progress.best_step != best or _due(step, config.checkpoint_every)
                if save:
                    with shares.doing("checkpoint"):
                        self._raise_if_refused(state, window, progress)
                        saved = self._save(state, window, progress)
                if finished:
                    break
                with shares.doing("trace"):
                    tracer.before(step)
                asked = time.perf_counter()
                device_batch, host = next(ahead)
                # A wait counts where the device had run dry by its end: never less than what the input really cost.
                if not in_flight or _ready(in_flight[-1]):
                    shares.seconds["input"] += time.perf_counter() - asked
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
                    self._raise_if_refused(state, window, progress)
                    values, window = window_metrics(jax.device_get(window)), setup.new_window(self.program)
                    now, waited = time.perf_counter(), shares.seconds["input"]
                    rate = (step - logged[0]) * config.batch_size / (now - logged[1])
                    values |= {"samples_per_second": rate, "input_share": (waited - logged[2]) / (now - logged[1])}
                    if self.program.loss_scaled:
                        scale = jax.device_get(state.loss_scale)
                        values |= {"loss_scale": float(scale.scale), "skipped_steps": float(scale.skipped)}
                    self._write(step, "train", values)
                    bar.set_postfix_str(
                        f"loss {values['loss']:.4f} NE {values['ne']:.4f} {rate:,.0f} samples/s "
                        f"input {values['input_share']:.0%}"
                    )
                    logged = (step, now, waited)
            with shares.doing("trace"):
                if traced := tracer.stop(state):
                    self.say(f"trace       {traced}")
            if step < config.steps and not stop.signal:
                best = f"step {progress.best_step}'s"
                self.say(f"stopped     early: {progress.worse} evaluations without a better NE than {best}")
            if tracer.missed:
                first, end = tracer.missed
                self.say(
                    f"trace       none: steps {start} to {step - 1} were run, and --profile_steps is {first}:{end}"
                )
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
            "truncated_ids": sum(processes.exchange(truncated)),
            "skipped_steps": int(state.loss_scale.skipped),
            "rows_dropped_per_epoch": self.batches.rows_dropped_per_epoch,
        }  # fmt: skip

    def _write(self, step: int, kind: str, values: dict[str, float]) -> None:
        if self.writer is not None:
            self.writer.write(step, kind, values)

    def _evaluate(self, state: TrainState, progress: Progress, step: int) -> None:
        """Evaluates on validation and updates `progress`, unless a stop is asked for meanwhile."""
        values = self.evaluator.run(state, "validation", self.stop)
        if values is None:
            return
        self._write(step, "validation", values)
        ne = values[self.evaluator.criterion]
        ne = math.inf if math.isnan(ne) else ne  # Undefined where the split has one class.
        progress.evaluated_step = step
        if ne < progress.best_ne or progress.best_step < 0:
            progress.best_step, progress.best_ne, progress.worse = step, ne, 0
        else:
            progress.worse += 1

    def _save(self, state: TrainState, window: Window, progress: Progress) -> int:
        progress.batches = int(state.step)
        progress.window = tuple(float(x) for x in jax.device_get(window))
        return self.checkpoints.save(self.program, state, progress, self.identity)

    def _raise_if_refused(self, state: TrainState, window: Window, progress: Progress) -> None:
        """Waits for the device; raises StepRefused, once the state is saved, where a step has failed."""
        failed_step, failed_check, overflow = jax.device_get((state.failed_step, state.failed_check, state.overflow))
        if failed_step >= 0:
            self.checkpoints.wait()
            if int(state.step) not in self.checkpoints.steps:
                self._save(state, window, progress)
                self.checkpoints.wait()
            fault = checks(self.program, state)[int(failed_check)]
            remedy = "look at that batch, lower the learning rates, or start anew in another --workdir"
            if overflow:
                margin = self.config.embedding.capacity_margin
                fault = f"{fault} ({int(overflow):,} rows too many over all devices)"
                remedy = f"continue with --capacity_margin above {margin:g}, or 0 for the worst case"
            processes.all_end()
            raise StepRefused(
                f"step {int(failed_step)}: {fault}; the state before that step is saved, and no later step changed it; "
                f"{remedy}"
            )


def _description(config: Config, program: Program) -> list[str]:
    """Returns what a run says of itself before it begins."""
    lines = []
    if processes.count() > 1:
        lines.append(f"processes   {processes.count()}, of {jax.local_device_count()} devices here; process 0 writes")
    platform = program.mesh.devices.flat[0].platform
    lines.append(f"precision   {config.policy.describe(platform)}")
    if config.cpu_products != "default":
        ignored = "" if platform == "cpu" else f", which is for CPUs, and does nothing on {platform}"
        lines.append(f"products    by {config.cpu_products}{ignored}")
    lines += [f"embeddings  {line}" for line in (*program.plan.describe(), program.plan.path)]
    if config.dense_sharding == "fsdp":
        over = f"split over {config.mesh.model} devices of model" if config.mesh.model > 1 else "whole: model is 1"
        lines.append(f"dense       fsdp, {over}")
    lines += [f"embeddings  auto: {table} {reason}" for table, reason in program.plan.reasons.items()]
    return lines + [
        f"exchange    {group}: {capacity:,} distinct rows from a device to another"
        for group, capacity in program.capacities.items()
    ]


def _ready(result: Any) -> bool:
    return result.is_ready()


def _due(step: int, every: int) -> bool:
    return step > 0 and every > 0 and step % every == 0


def _summary(
    run: _Run, dataset: Dataset, state: TrainState, progress: Progress, statistics: dict[str, Any]
) -> dict[str, Any] | None:
    """Evaluates the best checkpoint and returns what `summary.json` holds; None where a stop is asked for."""
    config = run.config
    if progress.best_step != statistics["steps"]:
        state = run.checkpoints.restore(run.program, state, progress.best_step)
    splits = [s for s in ("validation", "test") if s in dataset.splits]
    metrics = {s: run.evaluator.run(state, s, run.stop) for s in splits}
    if None in metrics.values():
        return None
    memory = run.step_program.memory_analysis()
    summary = {
        "config": config.name,
        "best_step": progress.best_step,
        "stopped_early": statistics["steps"] < config.training.steps,
        "metrics": metrics,
        **statistics,
        "startup_seconds": run.clock.seconds,
        "peak_memory_bytes": environment.peak_memory_bytes(),
        "step_memory_bytes": {
            k: int(getattr(memory, f"{k}_size_in_bytes")) for k in ("argument", "output", "alias", "temp")
        },
        "mesh": str(config.mesh),
        "processes": processes.count(),
        "environment": environment.describe(),
    }
    return _finite(summary)


def _finite(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON lacks, by None."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _say(text: str) -> None:
    with tqdm.external_write_mode(file=sys.stderr):
        print(text, file=sys.stderr)
