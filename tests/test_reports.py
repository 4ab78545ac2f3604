"""Every committed report is what its record renders to, and the README shows what the record says."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags

from jaxrec import flags as jaxrec_flags
from jaxrec.checks import UserError
from jaxrec.reporting import record as record_lib

ROOT = Path(__file__).parents[1]
STUDIES = sorted(p.parent.name for p in ROOT.glob("reports/*/record.json"))


@pytest.mark.parametrize("study", STUDIES)
def test_rerendering_changes_nothing(study):
    render = importlib.import_module(f"experiments.{study}.report").render
    record = record_lib.read(ROOT / "reports" / study)
    assert (ROOT / "reports" / study / "report.md").read_text() == render(record)
    assert study in (ROOT / "reports" / "README.md").read_text()


@pytest.mark.parametrize("study", STUDIES)
def test_records_name_no_machine_and_no_path(study):
    text = (ROOT / "reports" / study / "record.json").read_text()
    record = record_lib.read(ROOT / "reports" / study)
    assert '"/' not in text
    assert all(row["claim"] in record_lib.CLAIMS and row["samples"] for row in record["rows"])


def test_readme_shows_the_quality_record():
    from experiments.movielens_quality.report import headline

    record = record_lib.read(ROOT / "reports" / "movielens_quality")
    assert headline(record) in (ROOT / "README.md").read_text()


def test_studies_are_there():
    assert {"compile_only", "movielens_quality", "step_overhead"} <= set(STUDIES)


def test_row_refuses_an_unknown_claim():
    with pytest.raises(UserError, match="claim is 'guessed'"):
        record_lib.row("a", "jax", "", "auc", "1", [0.5], "guessed")


def test_record_round_trip(tmp_path):
    row = record_lib.row("a", "jax", "", "time", "ms", [3.0, 1.0, 2.0])
    record_lib.write(record_lib.make("study", [row], seeds=[0]), tmp_path)
    record = record_lib.read(tmp_path)
    assert record_lib.find(record, name="a")["median"] == 2.0
    assert record["seeds"] == [0]


def test_an_absent_or_foreign_record_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        record_lib.read(tmp_path)
    (tmp_path / "record.json").write_text('{"schema_version": 99}')
    with pytest.raises(UserError, match="schema_version 99"):
        record_lib.read(tmp_path)


@pytest.mark.parametrize("report", [None, "something else"])
def test_check_mode_refuses_an_absent_or_other_report(tmp_path, report):
    (tmp_path / "record.json").write_bytes((ROOT / "reports" / "step_overhead" / "record.json").read_bytes())
    if report is not None:
        (tmp_path / "report.md").write_text(report)
    command = [sys.executable, "-m", "experiments.step_overhead.run", "--mode=check", f"--out={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "report.md is not what" in done.stderr and "Traceback" not in done.stderr


def test_the_readme_lists_every_flag():
    known = set(flags.FLAGS)
    jaxrec_flags.define_train()
    try:
        rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| `--")]
        listed = {row.split("`")[1].removeprefix("--"): row for row in rows}
        assert set(listed) == set(flags.FLAGS) - known
        for name, row in listed.items():
            assert flags.FLAGS[name].help.split("\n")[0].rstrip(";") in row
    finally:
        for name in set(flags.FLAGS) - known:
            delattr(flags.FLAGS, name)
