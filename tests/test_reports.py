"""Every committed report is what its record renders to, and the README shows what the record says."""

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags

from experiments import finished as finished_lib
from experiments import index
from experiments import study as study_lib
from experiments.finished import Finished
from jaxrec import flags as jaxrec_flags
from jaxrec.checks import UserError
from jaxrec.reporting import record as record_lib
from jaxrec.reporting import sections

ROOT = Path(__file__).parents[1]
STUDIES = sorted(p.parent.name for p in ROOT.glob("reports/*/record.json"))


def parts_of(study):
    """A study's render and figures."""
    report = importlib.import_module(f"experiments.{study}.report")
    return report.render, getattr(report, "figures", None)


@pytest.fixture
def copied(tmp_path):
    """A copy of a folder of reports/."""
    return Path(shutil.copytree(ROOT / "reports" / "step_overhead", tmp_path / "step_overhead"))


@pytest.fixture
def modes():
    """Returns `modes(mode, out)`: sets the flags of a study; out None leaves it to its default."""
    known = set(flags.FLAGS)
    study_lib.define_flags("study")

    def choose(mode, out):
        flags.FLAGS(["run.py", f"--mode={mode}", *([] if out is None else [f"--out={out}"])])

    yield choose
    for name in set(flags.FLAGS) - known:
        delattr(flags.FLAGS, name)


@pytest.mark.parametrize("study", STUDIES)
def test_rerendering_changes_nothing(study):
    texts = study_lib.outputs(ROOT / "reports" / study, *parts_of(study))
    assert {"report.md", "report.html"} <= set(texts)
    study_lib.check(texts, ROOT / "reports" / study)


def test_rerendering_the_index_changes_nothing():
    texts = index.outputs(ROOT / "reports")
    study_lib.check(texts, ROOT / "reports")
    for study in STUDIES:
        report = importlib.import_module(f"experiments.{study}.report")
        finding = report.finding(record_lib.read(ROOT / "reports" / study))
        assert any(c.isdigit() for c in finding) and "\n" not in finding and "|" not in finding
        of_page = re.sub("`([^`]*)`", r"<code>\1</code>", finding)
        for text, shown, name in (
            (texts["README.md"], finding, "report.md"),
            (texts["index.html"], of_page, "report.html"),
        ):
            assert shown in text and report.QUESTION in text and f"{study}/{name}" in text


@pytest.mark.parametrize("study", STUDIES)
def test_a_report_asks_answers_and_says_what_limits_it(study):
    text = (ROOT / "reports" / study / "report.md").read_text()
    assert text.startswith("# ") and text.index("**Question.**") < text.index("**Answer.**") < text.index("\n## ")
    for heading in ("## How to run", "## What limits the conclusion", "## Next measurement"):
        assert f"\n{heading}\n" in text


@pytest.mark.parametrize("name", ["report.md", "step.svg", "report.html"])
@pytest.mark.parametrize("change", ["a byte", "absent", "empty"])
def test_check_finds_what_is_not_rendered_from_the_record(copied, name, change):
    texts, path = study_lib.outputs(copied, *parts_of("step_overhead")), copied / name
    study_lib.check(texts, copied)
    if change == "absent":
        path.unlink()
    else:
        text = path.read_bytes()
        path.write_bytes(b"" if change == "empty" else text[:99] + bytes([text[99] ^ 1]) + text[100:])
    with pytest.raises(UserError, match=f"{path.name} is not what its record renders to"):
        study_lib.check(texts, copied)
    study_lib.write(texts, copied)
    study_lib.check(texts, copied)


def test_check_finds_pictures_of_no_report_and_render_removes_them(copied):
    texts = study_lib.outputs(copied, *parts_of("step_overhead"))
    (copied / "old.svg").write_text("<svg/>")
    (copied / "notes.txt").write_text("kept")
    with pytest.raises(UserError, match=r"old\.svg is of no report"):
        study_lib.check(texts, copied)
    study_lib.write(texts, copied)
    study_lib.check(texts, copied)
    assert not (copied / "old.svg").exists() and (copied / "notes.txt").exists()


def test_the_command_checks_and_renders(copied):
    def command(mode):
        argv = [sys.executable, "-m", "experiments.step_overhead.run", f"--mode={mode}", f"--out={copied}"]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
        return done.returncode, done.stderr

    path = copied / "step.svg"
    path.write_text(path.read_text().replace("currentColor", "red"))
    sentence = f"error: {path} is not what its record renders to; --mode=render writes it anew\n"
    assert command("check") == (2, sentence)
    assert command("render") == (0, "")
    assert command("check") == (0, "")


def test_a_report_shows_its_figures_and_no_others(tmp_path):
    record_lib.write(record_lib.make("study", []), tmp_path)
    figure = {"a.svg": "<svg/>"}
    assert "a.svg" in study_lib.outputs(tmp_path, lambda _: "# T\n\n![x](a.svg)\n", lambda _: figure)
    for report, figures in (("# T\n", figure), ("# T\n\n![x](a.svg)\n", {}), ("# T\n\n![x](b.svg)\n", figure)):
        with pytest.raises(ValueError, match="but its figures are"):
            study_lib.outputs(tmp_path, lambda _, r=report: r, lambda _, f=figures: f)


def test_measuring_writes_all_and_drops_the_finished_pieces(tmp_path, modes):
    asked = []

    def measure():
        value = study_lib.finished().get("piece", lambda: asked.append(1) or 3.5)
        return record_lib.make("study", [record_lib.row("a", "jax", "", "step", "ms", [value])])

    def render(record):
        return f"# T\n\n{record['rows'][0]['median']}\n"

    modes("measure", tmp_path)
    Finished(tmp_path, finished_lib.key()).get("piece", lambda: 2.5)  # As an interrupted run leaves it.
    study_lib.run(measure, measure, render)
    assert not asked and {p.name for p in tmp_path.iterdir()} == {"record.json"}
    modes("all", tmp_path)
    study_lib.run(measure, measure, render)
    assert len(asked) == 1 and {p.name for p in tmp_path.iterdir()} == {"record.json", "report.md", "report.html"}
    assert "3.5" in (tmp_path / "report.html").read_text()


def test_smoke_writes_only_where_it_is_told_to(tmp_path, modes, monkeypatch):
    def smoke():
        study_lib.finished().get("piece", lambda: 1)
        return record_lib.make("study", [])

    def measure():
        raise AssertionError("measured in full")

    monkeypatch.chdir(tmp_path)
    modes("smoke", None)
    study_lib.run(measure, smoke, lambda _: "# T\n")
    assert not list(tmp_path.iterdir())
    modes("smoke", tmp_path / "out")
    study_lib.run(measure, smoke, lambda _: "# T\n")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"record.json", "report.md", "report.html"}
    with pytest.raises(ValueError, match="but its figures are"):  # Smoke renders.
        study_lib.run(measure, smoke, lambda _: "# T\n\n![x](a.svg)\n")


PLAIN = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(sorted({"matplotlib", "markdown_it", "torch"} & {m.partition(".")[0] for m in sys.modules}))
"""


def test_measuring_imports_neither_plotting_nor_pages():
    runs = [f"experiments.{p.parent.name}.run" for p in ROOT.glob("experiments/*/run.py")]
    assert len(runs) >= 4
    command = [sys.executable, "-c", PLAIN, *runs, "jaxrec.reporting.plots", "jaxrec.reporting.page"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


DEVICELESS = """
import socket, sys
import jax

def refuse(*_, **__):
    raise AssertionError("rendering asks for devices, or for the network")

jax.devices = jax.local_devices = jax.device_count = jax.default_backend = socket.socket.connect = refuse
from pathlib import Path
from experiments import index, study
from experiments.step_overhead.report import figures, render
study.check(study.outputs(Path("reports/step_overhead"), render, figures), Path("reports/step_overhead"))
study.check(index.outputs(Path("reports")), Path("reports"))
"""


def test_rendering_needs_no_devices_and_no_network():
    done = subprocess.run([sys.executable, "-c", DEVICELESS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_index_of_nothing_is_refused(tmp_path):
    with pytest.raises(UserError, match="must be a folder in whose folders studies left record"):
        index.outputs(tmp_path)


def test_environment_and_command():
    record = record_lib.read(ROOT / "reports" / "step_overhead")
    said = sections.environment(record)
    assert said.startswith("AMD EPYC, 2 cores, 23.5 GiB; Python 3.11.7, jax 0.10.2") and said.endswith("1.86.")
    assert "PyTorch" not in said and "absent" not in said and "flags" not in said
    gpu = {**record["environment"], "platform": "gpu", "device": "NVIDIA H200", "devices": 2}
    peers = {"torch": "2.13.0", "fbgemm-gpu": "1.8.0", "torchrec": "absent"}
    said = sections.environment({
        **record, "environment": gpu, "peer_versions": peers, "flags": {"XLA_FLAGS": "--xla_x=1"},
    })  # fmt: skip
    assert "; 2 x NVIDIA H200; " in said and "PyTorch 2.13.0, fbgemm-gpu 1.8.0;" in said
    assert "flags `XLA_FLAGS=--xla_x=1`" in said and "torchrec" not in said
    own = {**record["environment"], "versions": {**record["environment"]["versions"], "torch": "2.14"}}
    assert "PyTorch 2.14" in sections.environment({**record, "environment": own})
    assert sections.command(record) == "    python -m experiments.step_overhead.run --repeats=4 --steps=1000"
    quoted = sections.command({**record, "argv": ["run.py", "--targets=8 H100", "--x=$HOME a"]})
    assert quoted.endswith(""" "--targets=8 H100" '--x=$HOME a'""")


def test_a_message_holds_no_absolute_path():
    said = record_lib.without_paths("ImportError: in '/a/b.so' (/c/d): 3 rows/s of ~/e, x.y/z")
    assert said == "ImportError: in 'PATH' (PATH): 3 rows/s of PATH, x.y/z"


def test_a_record_holds_no_absolute_path_of_its_command(monkeypatch):
    argv = ["/home/me/run.py", "--out=/home/me/x", "--data=~/d", "--set", "a=b,/c", "--rate=rows/s", "--mode=all"]
    monkeypatch.setattr(sys, "argv", argv)
    made = record_lib.make("study", [])["argv"]
    assert made == ["run.py", "--out=PATH", "--data=PATH", "--set", "a=b,PATH", "--rate=rows/s", "--mode=all"]


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
