"""Detects failed peers: if a rank dies, fails or hangs, all other ranks end with an error that names it.

Each rank has a connection to rank 0, which forwards messages. The system closes it when a process ends, however it
ends, so no timeout is needed; a rank also reports over it what it is doing, and why it fails. A rank that has
waited too long in a collective asks rank 0, which asks all: a rank that does not answer hangs (it was stopped, or
its machine is gone without notice), and the others answer how many collectives they have reached. A rank that must
end while busy is ended from a thread; in a user's script only while it waits in a collective.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol, TypeVar
from weakref import WeakMethod

from megatrain.errors import MegaTrainError, RankError, first_line, typed_line
from megatrain.system.environment import tell_torchrun

T = TypeVar("T")

SECONDS = 60.0
"""Seconds for all ranks to connect, once started."""
GRACE_SECONDS = 2.0
"""Seconds for a rank to end by itself once another has ended, and to learn why a collective failed."""
ANSWER_SECONDS = 0.4
"""Seconds in which a live rank answers, whatever it is doing: a thread does it."""
PAUSE_SECONDS = 0.2
"""Seconds between checks of how long this rank has waited."""
PROMPT = frozenset(
    {"micro-batches of a step", "a schedule", "losses", "the norm", "bytes written", "operations", "a step", "a stop"}
)
"""Messages of every step, which take equally long on all ranks, so their timeout is that of a device."""
KEY_NBYTES = 32
"""Length of the key with which a rank connects."""
ENDED = 1
"""Exit code of a rank that a thread ends."""


class Met(Protocol):
    """Ranks that can already exchange messages: a `World`."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def exchange(self, what: str, value: T) -> list[T]: ...


class Watch:
    """This rank's connection to the others. Raises `RankError`.

    address: of rank 0's machine. limits: carrier -> seconds that a collective may take (`host`: while one rank
    works for all); the first check for missing ranks comes after the smallest of them.
    """

    def __init__(self, world: Met, address: str, limits: Mapping[str, float] | None = None) -> None:
        self._rank, self._size = world.rank, world.size
        self._at = ["the beginning"] * world.size
        self._line, self._heard, self._leaves = "", threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self.owns_process = False
        """Whether this rank may be ended at any point, not only in collectives."""
        self.about = ""
        """The subject of the current or last exchange."""
        self.ending: list[Callable[[str], object]] = []
        """Called with the message before a thread ends this rank."""
        self._limits = dict(limits or {})
        self._clock = 0.0  # seconds for which this process has run
        self._come_to: dict[str, int] = {}
        self._waits: dict[str, tuple[float, Callable[[], bool]]] = {}
        self._doing: Callable[[], Callable[[], str] | None] = lambda: None
        self._asked, self._looks = -1.0, threading.Lock()
        self._answers: dict[int, dict[str, Any]] = {}
        self._first_answers = threading.Event()
        self._done: set[int] = set()
        self._closed = threading.Event()
        listener = _listener() if world.rank == 0 else None
        meeting = (listener.getsockname()[1], secrets.token_hex(KEY_NBYTES // 2)) if listener else (0, "")
        port, key = world.exchange("where ranks look after each other", meeting)[0]
        try:
            self._others = self._accepted(listener, key) if listener else {0: self._connected(address, port, key)}
        except OSError as error:
            raise RankError(f"cannot be reached ({first_line(error)})", where=f"rank 0 at {address}") from error
        finally:
            if listener is not None:
                listener.close()
        for rank, other in self._others.items():
            name = f"megatrain-watch-{rank}"
            threading.Thread(target=self._listen, args=(rank, other), name=name, daemon=True).start()
        if self._limits:
            threading.Thread(target=self._look_at_waits, name="megatrain-watch", daemon=True).start()

    def at(self, what: str, doing: Callable[[], str] | None = None) -> None:
        """Record what this rank is doing, as text for error messages. doing: a method that returns more detail."""
        if doing is not None:
            self._doing = WeakMethod(doing)
        if self._at[self._rank] != what:
            self._at[self._rank] = what
            self._tell({"at": what})

    def enters(self, carrier: str) -> None:
        """This rank has reached the next collective of a carrier. Raises `RankError` if another rank has ended."""
        if self._heard.is_set():
            raise RankError(self._line)
        self._come_to[carrier] = self._come_to.get(carrier, 0) + 1
        self._waits[carrier] = self._clock, lambda: False

    def leaves(self, carrier: str, is_over: Callable[[], bool] | None = None) -> None:
        """The call has returned. is_over: whether the collective itself is done, if a device executes it."""
        if is_over is None:
            self._waits.pop(carrier, None)
        else:
            self._waits[carrier] = self._clock, is_over

    def explained(self, error: RankError) -> RankError:
        """An error that says why another rank has ended, if that arrives soon: a closed connection can precede the
        message."""
        if self._heard.wait(GRACE_SECONDS):
            return RankError(self._line)
        if gone := sorted(self._done):
            where = f"rank {gone[0]} of {self._size}, at {self._at[gone[0]]}"
            return RankError("has ended before the others", where=where, fix="call alike on all")
        return error

    def failed(self, error: BaseException) -> BaseException:
        """Report to the others why this rank ends; if it ends because of another, return that one's error."""
        if isinstance(error, RankError) and (told := self.explained(error)) is not error:
            self._leaves.set()
            return told
        self._leaves.set()
        line = str(error) if isinstance(error, MegaTrainError) else typed_line(error)
        self._tell({"failed": line})
        return error

    def close(self) -> None:
        """This rank has ended successfully, or has reported why not."""
        self._leaves.set()
        self._closed.set()
        self._tell({"done": True})
        for other in self._others.values():
            other.close()

    def _accepted(self, listener: socket.socket, key: str) -> dict[int, socket.socket]:
        """The connections of all others; those without the key are rejected."""
        listener.settimeout(SECONDS)
        connections: dict[int, socket.socket] = {}
        while len(connections) < self._size - 1:
            other, _ = listener.accept()
            other.settimeout(SECONDS)
            with suppress(OSError, ValueError):
                hello = b""
                while len(hello) < KEY_NBYTES + 4 and (more := other.recv(KEY_NBYTES + 4 - len(hello))):
                    hello += more
                if secrets.compare_digest(hello[4:], key.encode()):
                    other.settimeout(None)
                    connections[int.from_bytes(hello[:4], "little")] = other
                    continue
            other.close()
        return connections

    def _connected(self, address: str, port: int, key: str) -> socket.socket:
        first = socket.create_connection((address, port), timeout=SECONDS)
        first.settimeout(None)
        first.sendall(self._rank.to_bytes(4, "little") + key.encode())
        return first

    def _tell(self, message: dict[str, object]) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            for other in self._others.values():
                with suppress(OSError):  # its own thread notices
                    other.sendall(line)

    def _listen(self, rank: int, other: socket.socket) -> None:
        """Runs on a thread per connection."""
        line = "was killed, or its machine failed"
        with suppress(OSError), other.makefile("r") as said:
            for text in said:
                if not text.endswith("\n"):  # it ended in the middle of a message
                    break
                message = json.loads(text)
                if "done" in message:
                    self._done.add(rank)
                    return
                if "over" in message:
                    return self._end(*message["over"])
                if "failed" in message:
                    line = message["failed"]
                    break
                self._take(rank, message)
        if not self._leaves.is_set():
            self._end(self._named(rank, line))

    def _take(self, rank: int, message: dict[str, Any]) -> None:
        if "at" in message:
            self._at[rank] = message["at"]
        elif "asks" in message:
            self._tell({"is": self._state()})
        elif "is" in message:
            self._answers[rank] = message["is"]
        elif "listens" in message:
            self._first_answers.set()
        elif "misses" in message:
            self._tell({"listens": True})
            threading.Thread(target=self._look, args=message["misses"], name="look-for-ranks", daemon=True).start()

    def _named(self, rank: int, line: str) -> str:
        return f"rank {rank} of {self._size}, at {self._at[rank]}: {line}"

    def _end(self, line: str, grace_seconds: float = GRACE_SECONDS) -> None:
        """Another rank has ended: tell all, wait for this one to end by itself, then end it."""
        with self._lock:
            if self._line:
                return
            self._line = line
        if self._rank == 0:
            self._tell({"over": (line, grace_seconds)})
        self._heard.set()
        if self._leaves.wait(grace_seconds) or not (self.owns_process or self._waiting()):
            return
        for act in self.ending:
            act(line)
        if not tell_torchrun(line):
            os.write(2, f"error: {line}\n".encode())
        os._exit(ENDED)

    # Ranks that hang -------------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        """This rank's report: the collectives that it has reached, by carrier, and what it is doing."""
        return {"come_to": dict(self._come_to), "doing": self._op() or _innermost_call()}

    def _op(self) -> str:
        """Description of the running op."""
        doing = self._doing()
        return "" if doing is None else doing()

    def _waiting(self) -> dict[str, float]:
        """Carrier -> seconds in a collective that is not over."""
        return {name: self._clock - since for name, (since, is_over) in list(self._waits.items()) if not is_over()}

    def _look_at_waits(self) -> None:
        """On a thread: query the other ranks once this one has waited too long.

        Time in which this process was stopped, perhaps with all others, does not count.
        """
        last, least = time.monotonic(), min(self._limits.values())
        while not self._closed.wait(PAUSE_SECONDS):
            now = time.monotonic()
            self._clock += min(now - last, 5 * PAUSE_SECONDS)
            last = now
            late = {name: seconds for name, seconds in self._waiting().items() if seconds >= least}
            if not late or self._clock < self._asked + least / 2 or self._heard.is_set():
                continue
            self._asked, name = self._clock, max(late, key=lambda name: late[name])
            is_due = late[name] >= (least if self._is_prompt(name) else self._limits.get(name, 0.0))
            waits_at = self._op() or self.about
            missed = name, self._come_to[name], late[name], waits_at, is_due
            if self._rank == 0:
                self._look(*missed)
                continue
            self._first_answers.clear()
            self._tell({"misses": missed})
            if not self._first_answers.wait(ANSWER_SECONDS):
                self._end(self._named(0, _stands_still(late[name], waits_at)), PAUSE_SECONDS)

    def _is_prompt(self, carrier: str) -> bool:
        """Whether this rank waits for a message that all send at the same point, in steps after the first."""
        return carrier == "host" and self.about in PROMPT and self._doing() is not None

    def _look(self, carrier: str, number: int, seconds: float, waits_at: str, is_due: bool) -> None:
        """On rank 0: which rank has not reached a collective in which another has waited for `seconds`?

        is_due: whether that is too long even for a rank that answers.
        """
        with self._looks:
            self._answers = {0: self._state()}
            self._tell({"asks": True})
            time.sleep(ANSWER_SECONDS)
            answers = dict(self._answers)
        silent = [rank for rank in range(self._size) if rank not in answers and rank not in self._done]
        if silent:
            return self._end(self._named(silent[0], _stands_still(seconds, waits_at)), PAUSE_SECONDS)
        behind = [rank for rank, state in answers.items() if state["come_to"].get(carrier, 0) < number]
        if behind and is_due:
            is_at = answers[behind[0]]["doing"]
            line = f"is still in {is_at}; the others have waited for {seconds:.0f} s{_where(waits_at)}"
            self._end(self._named(behind[0], line), PAUSE_SECONDS)


def _stands_still(seconds: float, waits_at: str) -> str:
    return f"hangs and does not answer; the others have waited for {seconds:.0f} s{_where(waits_at)}"


def _innermost_call() -> str:
    """The main thread's innermost call, outside of any op: waiting for data, say."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})" if frame else "nothing"


def _where(waits_at: str) -> str:
    return f" in {waits_at}" if waits_at else ""


def _listener() -> socket.socket:
    """A socket on a free port of this machine, for IPv4 and IPv6."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))
