"""Processes that answer: in order, with errors in a sentence, and gone when they are left."""

import sys

import pytest

from experiments.workers import forth_and_back, worker
from jaxrec.checks import UserError

# A module that can be started by `-m`; its argument says how it behaves.
MODULE = """
import os
from experiments.workers import serve
from jaxrec.checks import UserError

def start(argument):
    if argument == "refuse":
        raise UserError("it does not want to")
    print("noise of a library")
    def fail():
        raise UserError("it cannot")
    return {"ready": argument}, {
        "add": lambda a, b: {"sum": a + b}, "fail": fail, "end": lambda: os._exit(3),
        "variable": lambda: {"is": os.environ.get("SAID")},
    }

if __name__ == "__main__":
    serve(start)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "answering.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(p for p in sys.path if p)}")
    return "answering"


def test_questions_are_answered_in_order(module):
    with worker("adder", module, {"x": 1}, {"SAID": "yes"}) as one:
        assert one.started == {"ready": {"x": 1}}
        assert [one.ask("add", a=k, b=1)["sum"] for k in range(3)] == [1, 2, 3]
        assert one.ask("variable") == {"is": "yes"}


def test_a_user_error_is_passed_on_and_ends_nothing(module):
    with worker("adder", module, None) as one:
        with pytest.raises(UserError, match="adder: it cannot"):
            one.ask("fail")
        assert one.ask("add", a=1, b=1) == {"sum": 2}


def test_a_refused_start_is_passed_on(module):
    with pytest.raises(UserError, match="adder: it does not want to"), worker("adder", module, "refuse"):
        pass


def test_a_process_that_ends_is_named_with_its_status(module):
    with worker("adder", module, None) as one, pytest.raises(UserError, match=r"adder has ended \(status 3\)"):
        one.ask("end")


def test_a_process_that_ended_while_nobody_asked_is_named(module):
    """The question that it never reads must not hide the reason."""
    with pytest.raises(UserError, match="adder has ended"), worker("adder", module, None) as one:
        one._process.kill()
        one._process.wait()
        one.ask("add", a=1, b=1)


def test_nobody_always_follows_the_same():
    assert [forth_and_back("ab", turn) for turn in range(3)] == ["ab", ["b", "a"], "ab"]
