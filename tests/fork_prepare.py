"""Runs `jaxrec.prepare` in forks of a process that has imported all it needs, and stops them at any point.

    python tests/fork_prepare.py

A line of stdin is a list of runs, which run at the same time; the answer is a line of stdout, a list of what became of
them. A run is {"argv": its flags} and may have

  signal, at: the signal that it gets when it is about to make its change number `at` to the file system, from 1: a
    file opened for writing, a folder made, a name given or taken away, a record written;
  limit: bytes that a file may have;
  piece: bytes of text that are parsed at a time.

What became of it: {"status": exit status, or minus the signal; "out"; "err"; "changes": how many it made; "parsed": how
many pieces it has parsed}, the last two only where it was not killed.
"""

import json
import os
import resource
import sys

import array_record.python.array_record_module as array_record
import tensorflow_datasets  # noqa: F401
import tqdm  # noqa: F401

from jaxrec import flags, prepare
from jaxrec.data import block_writer  # noqa: F401
from jaxrec.data.datasets import criteo, tabular  # noqa: F401
from jaxrec.data.tabular import encode, parts, text_rows

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir")


def run(given: dict, answer: int) -> None:
    """Runs the command and ends this process; says what it counted through `answer`."""
    counted = {"changes": 0, "parsed": 0}
    data_dir = next(flag.partition("=")[2] for flag in given["argv"] if flag.startswith("--data_dir="))

    def change() -> None:
        counted["changes"] += 1
        if counted["changes"] == given.get("at"):
            os.kill(os.getpid(), given["signal"])

    def hook(event: str, arguments: tuple) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES
        # A tree is deleted by names within folders that are open.
        within = event in ("os.remove", "os.rmdir") and arguments[1] != -1
        if ((writes or event in CHANGES) and str(arguments[0]).startswith(data_dir)) or within:
            change()

    class Writer(array_record.ArrayRecordWriter):
        def write(self, *record):
            change()
            return super().write(*record)

    convert = parts.convert

    def counting(*arguments):
        counted["parsed"] += 1
        return convert(*arguments)

    parts.convert = counting
    array_record.ArrayRecordWriter = Writer
    text_rows.PIECE_BYTES = given.get("piece", text_rows.PIECE_BYTES)
    encode.COUNTED_IN_MEMORY = 150  # So that some counts are written, too.
    sys.addaudithook(hook)
    if "limit" in given:
        resource.setrlimit(resource.RLIMIT_FSIZE, (given["limit"], resource.RLIM_INFINITY))
    sys.argv = ["jaxrec.prepare", *given["argv"]]
    try:
        flags.run_command(prepare.main, flags.define_prepare)
    except SystemExit as e:
        assert isinstance(e.code, int)
        status = e.code
    except BaseException as e:
        print(f"Traceback: {type(e).__name__}: {e}", file=sys.stderr)
        status = 1
    os.write(answer, json.dumps(counted).encode())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    for line in sys.stdin:
        started = []
        for given in json.loads(line):
            # Pipes, which no limit of a file's size concerns: the command's output and errors, and what it counted.
            pipes = [os.pipe() for _ in range(3)]
            process = os.fork()
            if not process:
                os.dup2(pipes[0][1], 1)
                os.dup2(pipes[1][1], 2)
                run(given, pipes[2][1])
            for _, end in pipes:
                os.close(end)
            started.append((process, [end for end, _ in pipes]))
        answers = []
        for process, ends in started:
            said = []
            for end in ends:
                with open(end) as pipe:
                    said.append(pipe.read())
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            answers.append({"status": status, "out": said[0], "err": said[1], **json.loads(said[2] or "{}")})
        print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
