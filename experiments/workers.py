"""Measuring in processes of their own, which take turns: a process is asked by lines of JSON, and answers by lines.

What acts on a whole process (threads, memory, flags of a compiler) is then set apart for each, and whatever else the
machine does meets all of them, as they take turns.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxrec.checks import UserError


class Worker:
    """A process that answers.

    Attributes:
      name: For messages.
      started: Its first answer, which it gives unasked, once it is ready.
    """

    def __init__(self, name: str, process: subprocess.Popen[str]):
        self.name, self._process = name, process
        self.started = self._answer()

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Returns the answer to a question.

        Raises:
          UserError: The process has ended, or could not do it.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # It has ended, which the missing answer says.
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise UserError(f"the process of {self.name} has ended (status {self._process.wait()}); was memory short?")
        answer = json.loads(line)
        if "error" in answer:
            raise UserError(f"{self.name}: {answer['error']}")
        return answer


@contextlib.contextmanager
def worker(name: str, module: str, argument: Any, environment: Mapping[str, str] | None = None) -> Iterator[Worker]:
    """Starts a module as a process, and ends it on leaving.

    Args:
      name: For messages.
      module: It calls `serve`.
      argument: JSON value, its only argument.
      environment: Variables beside this process's own.
    """
    command = [sys.executable, "-m", module, json.dumps(argument)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})}
    ) as process:
        try:
            yield Worker(name, process)
        except BaseException:
            process.kill()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # A question that was never read must not hide the reason.
                process.stdin.close()
            raise


def serve(start: Callable[[Any], tuple[dict[str, Any], Mapping[str, Callable[..., dict[str, Any]]]]]) -> None:
    """The process's side: starts, and does what it is asked until there is nobody to ask.

    Args:
      start: Takes the argument; returns the first answer, and what can be asked for: name -> function of the
        arguments. A `UserError` is an answer, too.
    """
    # Ctrl-C reaches all processes of a terminal; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Whatever a library prints goes to stderr: stdout is for the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answered(do: Callable[[], dict[str, Any]]) -> bool:
        try:
            answer = do()
        except UserError as e:
            answer = {"error": str(e)}
        print(json.dumps(answer), file=answers, flush=True)
        return "error" not in answer

    commands: dict[str, Callable[..., dict[str, Any]]] = {}

    def begin() -> dict[str, Any]:
        first, can = start(json.loads(sys.argv[1]))
        commands.update(can)
        return first

    if answered(begin):
        for line in sys.stdin:
            asked = json.loads(line)
            answered(lambda asked=asked: commands[asked.pop("do")](**asked))


def forth_and_back(items: Sequence[Any], turn: int) -> Sequence[Any]:
    """Returns the items in the order of a turn: every other turn backwards, lest one always follow the same."""
    return items if turn % 2 == 0 else list(reversed(items))
