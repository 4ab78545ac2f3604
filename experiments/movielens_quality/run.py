"""Is the default MovieLens model better than logistic regression on the same rows and features?

python -m experiments.movielens_quality.run --mode=all
"""

from __future__ import annotations

import shutil
import tempfile
import time
from typing import Any

import numpy as np
from absl import flags

from experiments import study
from experiments.movielens_quality.report import render
from jaxrec import flags as jaxrec_flags
from jaxrec.configs import catalogue, overrides
from jaxrec.reporting import record as record_lib
from jaxrec.training.config import Config

STUDY = "movielens_quality"
SEEDS = (0, 1, 2)
CS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
ORDINAL_CS = (0.03, 0.1, 0.3, 1.0)
BOOTSTRAP = 2000

# The model, and what the auxiliary tasks give it. Both are trained and chosen alike.
MODELS = {"dlrm": {}, "dlrm without auxiliary tasks": {"training.auxiliary_weight": 0.0}}


def define_flags() -> None:
    study.define_flags(STUDY)
    flags.DEFINE_string("data_dir", jaxrec_flags.cache_dir("data"), "Where prepared data sets are.")


def main() -> int:
    """Runs the study; returns the exit status."""
    data_dir = flags.FLAGS.data_dir
    return study.run(
        measure=lambda: measure(data_dir, SEEDS, CS, ORDINAL_CS, BOOTSTRAP, {}),
        smoke=lambda: measure(data_dir, (0,), (0.1,), (0.03,), 50, {"training.steps": 50}),
        render=render,
    )


def measure(
    data_dir: str,
    seeds: tuple[int, ...],
    cs: tuple[float, ...],
    ordinal_cs: tuple[float, ...],
    resamples: int,
    changes: dict[str, Any],
) -> dict[str, Any]:
    """Trains and evaluates all; returns the record."""
    config = overrides.replace_all(catalogue.get("dlrm_movielens"), changes)
    records, test_logits = [], {}
    for name, own in MODELS.items():
        rows, test_logits[name] = _model(name, overrides.replace_all(config, own), data_dir, seeds)
        records += rows
    baseline, lr_logits, test = _baseline("logistic_regression", config, data_dir, cs, ordinal=False)
    records += baseline
    records += _baseline("ordinal logistic_regression", config, data_dir, ordinal_cs, ordinal=True)[0]
    records += _bootstrap(test.y[:, 0], test.group, test_logits["dlrm"], lr_logits, resamples)
    counts = {split: blocks.rows for split, blocks in config.data.open(data_dir).splits.items()}
    return record_lib.make(
        STUDY,
        records,
        config=config.as_dict(),
        seeds=list(seeds),
        rows_per_split=counts,
        cs=list(cs),
        ordinal_cs=list(ordinal_cs),
    )


def _model(
    name: str, config: Config, data_dir: str, seeds: tuple[int, ...]
) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
    """Trains a config with each seed; returns its rows, and each seed's logits on the test split."""
    from jaxrec.training.loop import Options, train

    rows, test_logits = [], []
    for seed in seeds:
        seeded = overrides.replace(config, "training.seed", seed)
        workdir = tempfile.mkdtemp(prefix="jaxrec_quality_")
        try:
            begin = time.perf_counter()
            summary, status = train(seeded, Options(workdir, data_dir))
            seconds = time.perf_counter() - begin
            if status:
                raise SystemExit(status)
            test_logits.append(_best_test_logits(seeded, workdir, data_dir))
        finally:
            shutil.rmtree(workdir)
        print(f"{name}, seed {seed}: {summary['metrics']['test']}")
        for split in ("validation", "test"):
            for metric in ("auc", "ne", "log_loss", "calibration", "user_auc"):
                rows.append((name, "jax", split, metric, "1", summary["metrics"][split][metric]))
        rows.append((name, "jax", "train", "seconds", "s", seconds))
    grouped = {}
    for *key, value in rows:
        grouped.setdefault(tuple(key), []).append(value)
    return [record_lib.row(*key, samples=samples) for key, samples in grouped.items()], test_logits


def _best_test_logits(config: Config, workdir: str, data_dir: str) -> np.ndarray:
    """Returns the best checkpoint's logits on the test split, in stored order."""
    from jaxrec.training import setup
    from jaxrec.training.checkpoint import Checkpoints
    from jaxrec.training.evaluation import Evaluator

    dataset = config.data.open(data_dir)
    program, dense = setup.build_program(config, dataset)
    checkpoints = Checkpoints(workdir, config.training.keep_last, for_training=False)
    best = checkpoints.progress(checkpoints.steps[-1], setup.identity(config, dataset)).best_step
    state = checkpoints.restore(program, setup.initial_state(program, dense), best)
    parts = list(Evaluator(config, dataset, program, state).predictions(state, "test"))
    checkpoints.close()
    return np.concatenate([logits[host.batch.weight > 0, 0] for logits, host in parts])


def _baseline(
    name: str, config: Config, data_dir: str, cs: tuple[float, ...], *, ordinal: bool
) -> tuple[list[dict[str, Any]], np.ndarray, Any]:
    """Fits logistic regression for each C; returns its rows, the best one's test logits, and the test split."""
    from experiments.movielens_quality import logistic_regression as lr

    dataset = config.data.open(data_dir)
    train, validation, test = (lr.table(dataset, split) for split in ("train", "validation", "test"))
    fits, records = {}, []
    for c in cs:
        begin = time.perf_counter()
        on_validation, on_test = lr.fit(train, [validation, test], len(dataset.schema.dense), c, ordinal=ordinal)
        seconds = time.perf_counter() - begin
        scores = _scores(validation.y[:, 0], on_validation)
        print(f"{name} C={c}: validation AUC {scores['auc']:.4f} NE {scores['ne']:.4f}, {seconds:.0f} s")
        fits[c] = (scores, on_test)
        for metric, value in scores.items():
            records.append(record_lib.row(name, "scikit-learn", f"validation C={c}", metric, "1", [value]))
        records.append(record_lib.row(name, "scikit-learn", f"C={c}", "seconds", "s", [seconds]))
    best = min(fits, key=lambda c: fits[c][0]["ne"])
    best_by_auc = max(fits, key=lambda c: fits[c][0]["auc"])
    records.append(record_lib.row(name, "scikit-learn", "best by validation NE", "c", "1", [best]))
    for case, c in (("test", best), ("test, C by validation AUC", best_by_auc)):
        for metric, value in _scores(test.y[:, 0], fits[c][1]).items():
            records.append(record_lib.row(name, "scikit-learn", case, metric, "1", [value]))
    return records, fits[best][1], test


def _scores(y: np.ndarray, logits: np.ndarray) -> dict[str, float]:
    from jaxrec.training.metrics import EvaluationMetrics

    with EvaluationMetrics() as m:
        m.update(logits.astype(np.float32), y, np.ones_like(y), np.zeros(len(y), np.int32))
        values = m.compute()
    return {k: values[k] for k in ("auc", "ne", "log_loss", "calibration")}


def _bootstrap(
    y: np.ndarray, user: np.ndarray, model: list[np.ndarray], baseline: np.ndarray, resamples: int
) -> list[dict[str, Any]]:
    """Resamples users with replacement; returns the paired differences (model's mean over seeds minus baseline)."""
    from jaxrec.training.metrics import EvaluationMetrics

    users, index = np.unique(user, return_inverse=True)
    rng = np.random.default_rng(0)

    def scores(logits: np.ndarray, weight: np.ndarray) -> np.ndarray:
        with EvaluationMetrics() as m:
            m.update(logits.astype(np.float32), y, weight, np.zeros(len(y), np.int32))
            values = m.compute()
        return np.array([values["auc"], values["ne"]])

    samples = []
    for _ in range(resamples):
        times = np.bincount(rng.integers(0, len(users), len(users)), minlength=len(users))
        weight = times[index].astype(np.float32)
        samples.append(np.mean([scores(m, weight) for m in model], axis=0) - scores(baseline, weight))
    low, high = np.percentile(samples, [2.5, 97.5], axis=0)
    point = np.mean([scores(m, np.ones(len(y), np.float32)) for m in model], axis=0) - scores(
        baseline, np.ones(len(y), np.float32)
    )
    rows = []
    for i, metric in enumerate(("auc", "ne")):
        for case, value in (("difference", point[i]), ("2.5 %", low[i]), ("97.5 %", high[i])):
            rows.append(record_lib.row("dlrm - logistic_regression", "both", case, metric, "1", [value]))
    rows.append(record_lib.row("dlrm - logistic_regression", "both", "resamples", "count", "1", [resamples]))
    return rows


if __name__ == "__main__":
    jaxrec_flags.run_command(main, define_flags)
