"""What a measurement had finished before it was interrupted is not measured again."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import finished as finished_lib
from experiments.finished import FILE, Finished

ROOT = Path(__file__).parents[1]
KEY = {"argv": ["--mode=all"], "commit": "c0ffee"}


def never():
    raise AssertionError("measured again")


def test_a_finished_piece_is_not_measured_again(tmp_path, capsys):
    first = Finished(tmp_path / "out", KEY)
    assert first.get("a", lambda: {"samples": (1.5, 2)}) == {"samples": [1.5, 2]}
    assert first.get("b", lambda: [0.1 + 0.2]) == [0.1 + 0.2]
    assert capsys.readouterr().out == ""
    second = Finished(tmp_path / "out", KEY)
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and "2 pieces" in out and "a; b" in out
    assert second.get("a", never) == {"samples": [1.5, 2]}
    assert second.get("b", never) == [0.1 + 0.2]
    assert second.get("c", lambda: None) is None
    assert Finished(tmp_path / "out", KEY).get("c", never) is None


@pytest.mark.parametrize("change", [{"argv": ["--mode=all", "--steps=3"]}, {"commit": "decaf"}, {"torch": "2.14"}])
def test_pieces_of_another_command_or_code_are_measured_again(tmp_path, capsys, change):
    Finished(tmp_path, KEY).get("a", lambda: 1)
    assert Finished(tmp_path, {**KEY, **change}).get("a", lambda: 2) == 2
    assert capsys.readouterr().out == f"discarding  1 pieces of another run: {next(iter(change))} changed since\n"
    # And the old ones do not come back.
    assert Finished(tmp_path, KEY).get("a", lambda: 3) == 3


def test_a_kill_in_the_middle_of_a_line_loses_that_piece_alone(tmp_path):
    whole = Finished(tmp_path, KEY)
    whole.get("a", lambda: [1, 2, 3])
    whole.get("b", lambda: [4, 5, 6])
    written = (tmp_path / FILE).read_bytes()
    lines = written.splitlines(keepends=True)
    for cut in range(len(written)):
        (tmp_path / FILE).write_bytes(written[:cut])
        again = Finished(tmp_path, KEY)
        assert again.get("a", lambda: "new") == ([1, 2, 3] if cut >= len(lines[0] + lines[1]) else "new")
        assert again.get("b", lambda: "new") == "new"
        # What is written after the cut is whole.
        third = Finished(tmp_path, KEY)
        assert third.get("b", never) == "new" and third.get("a", never)


def test_bytes_that_are_no_text_are_thrown_away(tmp_path):
    Finished(tmp_path, KEY).get("a", lambda: 1)
    with (tmp_path / FILE).open("ab") as file:
        file.write(b"\0\0\xff\n" + json.dumps({"name": "b", "value": 2}).encode() + b"\n")
    again = Finished(tmp_path, KEY)
    assert again.get("a", never) == 1 and again.get("b", lambda: 3) == 3


CHILD = """
import sys, time
from pathlib import Path
from experiments.finished import Finished
finished = Finished(Path(sys.argv[1]), {"argv": [], "commit": "x"})
for k in range(4):
    def measure():
        if k == 2 and "hang" in sys.argv:
            print("hangs", flush=True)
            time.sleep(60)
        return k
    print(finished.get(f"piece {k}", measure), flush=True)
"""


def test_a_killed_measurement_goes_on(tmp_path):
    """SIGKILL, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    process = subprocess.Popen([*command, "hang"], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while "hangs" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "2 pieces" in done.stdout and done.stdout.split()[-4:] == ["0", "1", "2", "3"]


def test_an_exception_keeps_what_was_finished(tmp_path):
    finished = Finished(tmp_path, KEY)
    finished.get("a", lambda: 1)
    with pytest.raises(AssertionError):
        finished.get("b", never)
    assert Finished(tmp_path, KEY).get("a", never) == 1


def test_two_pieces_of_one_name_are_refused(tmp_path):
    finished = Finished(tmp_path, KEY)
    finished.get("a", lambda: 1)
    with pytest.raises(ValueError, match="two pieces of one measurement are called 'a'"):
        finished.get("a", lambda: 2)


def test_what_json_cannot_hold_is_refused(tmp_path):
    finished = Finished(tmp_path, KEY)
    with pytest.raises(ValueError):
        finished.get("a", lambda: float("nan"))
    with pytest.raises(TypeError):
        finished.get("b", object)
    assert Finished(tmp_path, KEY).get("a", lambda: 1) == 1


def test_without_a_folder_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Finished(None, KEY).get("a", lambda: 1) == 1
    assert not list(tmp_path.iterdir())


def test_the_key_tells_commands_and_code_apart(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["run.py", "--steps=2"])
    before = finished_lib.key()
    assert before == finished_lib.key()
    monkeypatch.setattr(sys, "argv", ["run.py", "--steps=3"])
    assert finished_lib.key() != before
    monkeypatch.setattr(sys, "argv", ["run.py", "--steps=2"])
    for folder in ("jaxrec", "experiments"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(finished_lib, "_ROOT", tmp_path)
    (tmp_path / "experiments" / "run.py").write_text("a = 1")
    one = finished_lib.key()
    (tmp_path / "experiments" / "run.py").write_text("a = 2")
    assert one != finished_lib.key()


def test_git_ignores_the_file():
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert FILE in ignored and Path(FILE).with_suffix(".new").name in ignored
