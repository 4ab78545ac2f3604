"""Training runs that kill themselves at a change of their folder.

python killed_run.py CACHE: forks each run from this process, which has imported all. A line of JSON on stdin is a run:
`workdir`, `assignments` of its config, `at`, which is [kind, n] where it is killed before its n-th change of that kind
(null: never), and `log`, a file to which it adds a line a change, and a line a checkpoint that it knows to be saved.
Its exit status goes to stdout.
"""

import json
import os
import re
import signal
import sys
from pathlib import Path

import conftest  # As many devices as the tests: their compiled programs are the same.

from jaxrec.configs import catalogue, overrides
from jaxrec.startup import enable_compile_cache
from jaxrec.training.checkpoint import Checkpoints
from jaxrec.training.loop import Options, train

# Python's audit events of what changes a folder, with where the path and the file descriptor it is relative to stand.
CHANGES = {"os.mkdir": (0, 2), "os.remove": (0, 1), "os.rmdir": (0, 1), "os.rename": (1, 3), "os.truncate": (0, None)}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def kind(change: str) -> str:
    """Which kind of change a line of the log is, whatever the step and the names that are drawn."""
    for pattern, name in (
        (r"(/checkpoints/\d+\.orbax-checkpoint-tmp/).*", r"\1*"),
        (r"(/checkpoints/\d+/).*", r"\1*"),
        (r"events\.out.*", "events"),
    ):
        change = re.sub(pattern, name, change)
    return re.sub(r"\d+", "N", change)


class Killer:
    """An audit hook that counts changes, and kills this process before the one asked for."""

    def __init__(self, workdir: str, at: tuple[str, int] | None, log: int):
        self._workdir, self._log, self._busy = workdir, log, False
        self._kind, self._left = at or ("", 0)

    def __call__(self, event: str, arguments: tuple) -> None:
        if self._busy:
            return
        path = self._changed(event, arguments)
        if path is None or not path.startswith(self._workdir):
            return
        if event == "os.remove" and not os.path.lexists(path):
            return
        change = f"{event} {path[len(self._workdir) :]}"
        os.write(self._log, f"{change}\n".encode())
        if kind(change) != self._kind:
            return
        if self._left == 0:
            self._busy = True
            if event == "open":  # A file is killed when it is made and nothing is in it.
                os.close(os.open(path, arguments[2] & ~os.O_EXCL))
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1

    def _changed(self, event: str, arguments: tuple) -> str | None:
        if event == "open":
            path, _, flags = arguments
            at, folder = (path if flags & WRITING else None), None
        elif event in CHANGES:
            where, relative_to = CHANGES[event]
            at, folder = arguments[where], None if relative_to is None else arguments[relative_to]
        else:
            return None
        if at is None or isinstance(at, int):
            return None
        base = os.readlink(f"/proc/self/fd/{folder}") if isinstance(folder, int) and folder >= 0 else ""
        return os.path.abspath(os.path.join(base, os.fsdecode(at)))


def run(workdir: str, assignments: list[str], at: tuple[str, int] | None, log: str) -> int:
    opened = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    wait = Checkpoints.wait

    def reporting(self: Checkpoints) -> None:
        wait(self)
        os.write(opened, "".join(f"saved {step}\n" for step in self.steps).encode())

    Checkpoints.wait = reporting
    sys.addaudithook(Killer(str(Path(workdir).absolute()), at, opened))
    config = overrides.apply(catalogue.get("dlrm_synthetic"), [*conftest.TINY, *assignments])
    return train(config, Options(workdir, "", quiet=True))[1]


if __name__ == "__main__":
    for line in sys.stdin:
        child = os.fork()
        if not child:
            enable_compile_cache(sys.argv[1])
            os._exit(run(**json.loads(line)))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
