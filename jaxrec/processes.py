"""Several processes that train together: starting them, agreeing, and noticing that one is lost.

JAX's coordination service connects the processes and holds small values (`exchange`). It notices a lost process, too,
but ends the others with a stack trace. So a watch of our own comes first: every process holds a connection to process
0, over which both send signs of life; whoever is lost is named to all, and every process ends with one sentence.

With one process, which is the default, everything here returns at once.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from jaxrec.checks import UserError, require

# Seconds between signs of life, and without one until a process counts as lost.
BEAT, LOST_AFTER = 2.0, 20.0
# JAX's own detection, where the watch does not see it: within a minute.
JAX_LOST_AFTER = 50
# How long processes wait for the others to come, and then for the watch's connections.
START_WITHIN, CONNECT_WITHIN = 120, 30
# How long a stranger at the watch's port may take to say who it is.
GREET_WITHIN = 5
# Values are exchanged only by processes that the watch knows to be alive: they may take their time.
_PATIENCE_MS = 24 * 3600 * 1000

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

T = TypeVar("T")


def start(coordinator: str | None, count: int | None, index: int | None) -> None:
    """Joins the other processes. To be called before JAX has devices.

    What is None is taken from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, and else from the cluster
    that JAX detects (SLURM, Open MPI, Kubernetes, Cloud TPU).

    Args:
      coordinator: host:port of process 0.
      count: Number of processes.
      index: Of this one, from 0.

    Raises:
      UserError: A value is missing or wrong, or the others do not come.
    """
    count = _environment("JAX_NUM_PROCESSES") if count is None else count
    index = _environment("JAX_PROCESS_ID") if index is None else index
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    require(count is None or count >= 1, f"--num_processes is {count}, but must be at least 1")
    if index is not None:
        last = "" if count is None else f" and below --num_processes={count}"
        require(0 <= index < (count or index + 1), f"--process_id is {index}, but must be at least 0{last}")
    if coordinator is not None:
        host, _, port = coordinator.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        require(
            bool(host) and port.isdecimal() and 0 < int(port) < 2**16 and (bracketed or ":" not in host),
            f"--coordinator is {coordinator!r}, but must be host:port, or [address]:port for IPv6",
        )
    # Its handler of SIGTERM would replace ours, by which all processes stop after the same step.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    given = f"--coordinator={coordinator} --num_processes={count} --process_id={index}"
    if coordinator is not None and index == 0:
        _require_free(int(coordinator.rpartition(":")[2]), given)
    # JAX would abort with a stack trace, and while it waits Python's handlers of signals do not run.
    handlers = {n: signal.signal(n, signal.SIG_DFL) for n in _SIGNALS} if _in_main_thread() else {}
    late = threading.Timer(START_WITHIN, _late, (given,))
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            coordinator,
            count,
            index,
            # Where all is named there is nothing to detect.
            cluster_detection_method=None if None in (coordinator, count, index) else "deactivate",
            initialization_timeout=2 * START_WITHIN,
            heartbeat_timeout_seconds=JAX_LOST_AFTER,
        )
    except (ValueError, RuntimeError) as e:
        missing = [x for x in (coordinator, count, index) if x is None]
        hint = (
            "JAX detects no cluster here that says the rest; name all three"
            if missing
            else f"all {count} processes must be started, with one coordinator that each can reach"
        )
        first = (str(e).strip().splitlines() or [type(e).__name__])[0][:200]
        raise UserError(f"the processes could not be connected ({given}; {first}); {hint}") from e
    finally:
        late.cancel()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if jax.process_count() > 1:
        try:
            _Watch.current = _Watch()
        except (OSError, ValueError) as e:
            raise UserError(f"the processes could not be connected ({given}; {e}); start all of them again") from e


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _server(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                raise
    return socket.create_server(("", port))


def _require_free(port: int, given: str) -> None:
    try:
        _server(port).close()
    except OSError as e:
        raise UserError(
            f"port {port} of --coordinator cannot be opened here ({e.strerror}; {given}); does another process 0 run? "
            "Name another port, or --process_id"
        ) from e


def _late(given: str) -> None:
    print(
        f"error: not all processes came within {START_WITHIN} s ({given}); start all of them, with one coordinator "
        "that each can reach",
        file=sys.stderr,
    )
    _exit(2)


def _environment(name: str) -> int | None:
    text = os.environ.get(name)
    require(text is None or text.isdecimal(), f"the environment variable {name} is {text!r}, but must be a number")
    return None if text is None else int(text)


def count() -> int:
    """Returns the number of processes."""
    return 1 if _Watch.current is None else jax.process_count()


def index() -> int:
    """Returns the number of this process, from 0."""
    return 0 if _Watch.current is None else jax.process_index()


def is_first() -> bool:
    """Whether this is the process that writes and prints."""
    return index() == 0


def exchange(value: T) -> list[T]:
    """Returns every process's value (of JSON types), by process; all must call it, in the same order."""
    watch = _Watch.current
    if watch is None:
        return [value]
    watch.exchanges += 1
    client, n, me = _client(), watch.exchanges, jax.process_index()
    client.key_value_set(f"jaxrec/exchange/{n}/{me}", json.dumps(value))
    values = [
        json.loads(client.blocking_key_value_get(f"jaxrec/exchange/{n}/{i}", _PATIENCE_MS))
        for i in range(jax.process_count())
    ]
    # Whoever is here has read all of exchange n - 1, for which everybody had written n's value.
    client.key_value_delete(f"jaxrec/exchange/{n - 1}/{me}")
    return values


def together(call: Callable[[], T]) -> T:
    """Returns what `call` does here; where it raises UserError on any process, all raise it."""
    if _Watch.current is None:
        return call()
    result, complaint = None, None
    try:
        result = call()
    except UserError as e:
        complaint = str(e)
    complaints = {c: i for i, c in reversed(list(enumerate(exchange(complaint)))) if c is not None}
    if complaints:
        all_end()
        said = [f"{c} (process {i})" if len(complaints) > 1 else c for c, i in complaints.items()]
        raise UserError("; ".join(said))
    return result  # pyright: ignore[reportReturnType]


def on_first(call: Callable[[], T]) -> T:
    """Returns, on every process, what `call` returns on process 0 (JSON types); UserError likewise."""
    if _Watch.current is None:
        return call()
    first = is_first()
    together_value = together(lambda: call() if first else None)
    return exchange(together_value)[0]  # pyright: ignore[reportReturnType]


def first_alone(call: Callable[[], T]) -> T:
    """Returns what `call` does here, on process 0 before the others begin: they may find what it has written."""
    if _Watch.current is None:
        return call()
    first = is_first()
    result = together(lambda: call() if first else None)
    return together(lambda: result if first else call())  # pyright: ignore[reportReturnType]


def all_end() -> None:
    """To be called before an error that every process raises: nobody is to be told of it, or missed."""
    if _Watch.current is not None:
        _Watch.current.closing = True


def claim_last_word() -> None:
    """To be called before this process says why it fails. Where the watch is saying it already, it does not return."""
    if _Watch.current is not None:
        with _Watch.current.last_word:
            _Watch.current.has_last_word = False


def leave(status: int = 0, why: str = "") -> None:
    """To be called when the process is about to end.

    With other processes this call does not return: JAX's own farewell would abort whoever is left by a lost one.

    Args:
      status: The exit status.
      why: Why this process fails, for the others, which end with it. Empty, and after `all_end`: all end as agreed, and
        wait for each other.
    """
    watch, _Watch.current = _Watch.current, None
    if watch is None:
        return
    sys.stdout.flush()
    if why and not watch.closing:
        watch.closing = True
        watch.tell({"ended": jax.process_index(), "status": status, "why": why})
    else:
        watch.say_goodbye()
    watch.last_to_leave()
    _exit(status)


def fail(error: Exception) -> None:
    """To be called on an error that nobody expected: with other processes it tells them, and does not return.

    The error may be the sign that another process is lost: the watch, which knows which, then has the word first.
    """
    if _Watch.current is None:
        return
    if isinstance(error, jax.errors.JaxRuntimeError):
        time.sleep(LOST_AFTER + 5)
    traceback.print_exception(error)
    leave(1, f"{type(error).__name__}: {error}")


def _exit(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _client() -> Any:
    # There is no public name for it; Orbax reaches for the same.
    from jax._src import distributed

    return distributed.global_state.client


def _coordinator_host() -> str:
    from jax._src import distributed

    return str(distributed.global_state.coordinator_address).rpartition(":")[0].strip("[]")


class _Watch:
    """Connections between process 0 and each other, of JSON lines: signs of life, and what has happened.

    Attributes:
      exchanges: How many `exchange`s there were.
      closing: The processes are ending as agreed; whoever vanishes is not missed.
      last_word: Held by who says why this process ends: its own thread, or the watch if `has_last_word`.
    """

    current: _Watch | None = None

    def __init__(self):
        self.exchanges = 0
        self.closing = False
        self.last_word, self.has_last_word = threading.Lock(), True
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._connections: dict[int, socket.socket] = {}
        self._done: set[int] = set()
        self._me, self._count = jax.process_index(), jax.process_count()
        if self._me == 0:
            self._await_others()
        else:
            port, token = json.loads(_client().blocking_key_value_get("jaxrec/watch", CONNECT_WITHIN * 1000))
            connection = socket.create_connection((_coordinator_host(), port), timeout=CONNECT_WITHIN)
            connection.sendall(_line({"token": token, "process": self._me, "count": self._count}))
            self._connect(0, connection)
        atexit.register(self._at_exit)

    def _await_others(self) -> None:
        server, token, strangers = _server(0), secrets.token_hex(16), 0
        _client().key_value_set("jaxrec/watch", json.dumps([server.getsockname()[1], token]))
        end = time.monotonic() + CONNECT_WITHIN
        with server:
            while len(self._connections) < self._count - 1:
                server.settimeout(max(end - time.monotonic(), 0.01))
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    came = len(self._connections) + 1
                    raise TimeoutError(f"{came} of {self._count} processes came within {CONNECT_WITHIN} s") from None
                strangers += 1
                # Others may knock at an open port, and say nothing: none holds up the next.
                threading.Thread(target=self._greet, args=(connection, token), daemon=True).start()
                with self._changed:
                    self._changed.wait_for(lambda n=strangers: len(self._connections) >= n, timeout=1)

    def _greet(self, connection: socket.socket, token: str) -> None:
        """Takes a connection into the watch, or closes it."""
        end, line, said = time.monotonic() + GREET_WITHIN, b"", None
        try:
            while not line.endswith(b"\n") and len(line) < 200:
                connection.settimeout(max(end - time.monotonic(), 0.01))
                piece = connection.recv(1)
                if not piece:
                    break
                line += piece
            said = json.loads(line)
        except (OSError, ValueError):
            said = None
        if not isinstance(said, dict) or said.get("token") != token:
            connection.close()
            return
        self._connect(int(said["process"]), connection)
        if said["count"] != self._count:
            counts = f"--num_processes={said['count']}, but process 0 with {self._count}"
            self._end({"ended": 0, "status": 2, "why": f"process {said['process']} was started with {counts}"})

    def _connect(self, process: int, connection: socket.socket) -> None:
        connection.settimeout(LOST_AFTER)
        with self._changed:
            self._connections[process] = connection
            self._changed.notify_all()
        for target in (self._listen, self._beat):
            threading.Thread(target=target, args=(process, connection), name="jaxrec-watch", daemon=True).start()

    def tell(self, said: dict[str, Any], *, but: int = -1) -> None:
        """Sends a line to everybody that this process is connected to, but to process `but`."""
        for process, connection in list(self._connections.items()):
            if process != but:
                try:
                    with self._lock:
                        connection.sendall(_line(said))
                except OSError:
                    continue  # Its listener sees it.

    def say_goodbye(self) -> None:
        """Waits until all processes have done so: process 0 until all others have, they until it answers."""
        if self._me:
            self.tell({"done": True})
        with self._changed:
            self._changed.wait_for(lambda: self._done >= set(self._connections))
        self.closing = True
        if not self._me:
            self.tell({"done": True})

    def last_to_leave(self) -> None:
        """Lets the others go first: with process 0 goes JAX's service, whose loss aborts whoever is left."""
        if not self._me:
            time.sleep(1)

    def _beat(self, process: int, connection: socket.socket) -> None:
        while True:
            time.sleep(BEAT)
            try:
                with self._lock:
                    connection.sendall(b"{}\n")
            except OSError:
                return  # The listener sees it, too, and says so.

    def _listen(self, process: int, connection: socket.socket) -> None:
        rest = b""
        while True:
            try:
                piece = connection.recv(4096)
                silent = False
            except TimeoutError:
                piece, silent = b"", True
            except OSError:
                piece, silent = b"", False
            if not piece:
                if self.closing:
                    with self._changed:
                        self._done.add(process)
                        self._changed.notify_all()
                elif process not in self._done:
                    seconds = f"gave no sign of life for {LOST_AFTER:.0f} s"
                    how = seconds if silent else "was lost (killed, or its machine failed)"
                    self._end({"lost": process, "how": how})
                return
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                said = json.loads(line)
                if said.get("done"):
                    with self._changed:
                        self._done.add(process)
                        self._changed.notify_all()
                elif "lost" in said or "ended" in said:
                    self._end(said, but=process)

    def _end(self, said: dict[str, Any], but: int = -1) -> None:
        """Ends this process, and tells the others why."""
        self.last_word.acquire()
        if self.closing or not self.has_last_word:
            self.last_word.release()
            return
        self.closing = True
        self.tell(said, but=but)
        again = "start all again: the same command continues from the last checkpoint, where there is one"
        if "ended" in said:
            line, status = f"process {said['ended']} ended: {said['why']}", int(said["status"])
            line += "" if status == 2 else f"; {again}"
        elif said["lost"] == self._me:
            line, status = f"the others have given up this process, {self._me}: it {said['how']}; {again}", 1
        else:
            line, status = f"process {said['lost']} {said['how']}; process {self._me} ends, too; {again}", 1
        # On a line of its own: a progress bar may be in the middle of one.
        print(f"\nerror: {line}", file=sys.stderr)
        self.last_to_leave()
        _exit(status)

    def _at_exit(self) -> None:
        """For programs that are no command of jaxrec: whether they end by an exception, Python remembers."""
        if _Watch.current is self:
            error = getattr(sys, "last_value", None)
            leave(int(error is not None), "" if error is None else f"{type(error).__name__}: {error}")


def _line(said: dict[str, Any]) -> bytes:
    return json.dumps(said).encode() + b"\n"
