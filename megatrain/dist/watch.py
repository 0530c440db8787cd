"""Detect failed peers: when a rank dies, fails or stands still, all other ranks end with an error that names it.

Each has a connection to the first, which passes on what it hears. The system closes it when a process ends, whatever
ends it, so nobody waits for a time to pass; and over it a rank says what it is at, and why it fails. One that has
waited in a collective for too long asks the first, which asks all: who does not answer stands still (it was stopped, or
its machine is gone without a word), and who answers tells how many collectives it has come to. A rank that is to end in
the middle of something else is ended from a thread; in a script of the user's only where it waits in a collective.
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

T = TypeVar("T")

SECONDS = 60.0
"""For all to connect, once they are there."""
GRACE_SECONDS = 2.0
"""In which a rank that hears of another's end leaves by itself; and in which one that misses another hears of it."""
ANSWER_SECONDS = 0.4
"""In which a rank that lives answers, whatever it is at: a thread does it."""
PAUSE_SECONDS = 0.2
"""Between looks at how long this rank has waited."""
PROMPT = frozenset(
    {"micro-batches of a step", "a schedule", "losses", "the norm", "bytes written", "operations", "a stop"}
)
"""What ranks tell each other in every step. It takes as long on all: who waits for it waits as long as on a device."""
KEY_NBYTES = 32
"""Of what a rank says to be let in."""
ENDED = 1
"""Exit code of a rank that is ended from its thread."""


class Met(Protocol):
    """Ranks that can tell each other something already: a `World`."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def exchange(self, what: str, value: T) -> list[T]: ...


class Watch:
    """This rank's connection to the others. address: of the machine of the first. limits: by carrier, the seconds that
    a collective may take, on `host` where one rank works for all; the first look for who is missing comes after the
    least of them. Raises `RankError`."""

    def __init__(self, world: Met, address: str, limits: Mapping[str, float] | None = None) -> None:
        self._rank, self._size = world.rank, world.size
        self._at = ["the beginning"] * world.size
        self._line, self._heard, self._leaves = "", threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self.owns_process = False
        """Whether this rank is ended wherever it is, and not in collectives alone."""
        self.about = ""
        """What the ranks tell each other now, or have told last."""
        self.ending: list[Callable[[str], object]] = []
        """Called with the line before this rank is ended from its thread."""
        self._limits = dict(limits or {})
        self._clock = 0.0  # seconds that this process has been awake
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
        """What this rank is at from now on, in words for a line about its end. doing: a method that tells more."""
        if doing is not None:
            self._doing = WeakMethod(doing)
        if self._at[self._rank] != what:
            self._at[self._rank] = what
            self._tell({"at": what})

    def enters(self, carrier: str) -> None:
        """This rank comes to the next collective of a carrier. Raises `RankError` where another has ended."""
        if self._heard.is_set():
            raise RankError(self._line)
        self._come_to[carrier] = self._come_to.get(carrier, 0) + 1
        self._waits[carrier] = self._clock, lambda: False

    def leaves(self, carrier: str, is_over: Callable[[], bool] | None = None) -> None:
        """The call is back. is_over: whether the collective is done too, where a device does it."""
        if is_over is None:
            self._waits.pop(carrier, None)
        else:
            self._waits[carrier] = self._clock, is_over

    def explained(self, error: RankError) -> RankError:
        """What has become of another rank, where it is heard of soon: an end is seen here before it is told."""
        if self._heard.wait(GRACE_SECONDS):
            return RankError(self._line)
        if gone := sorted(self._done):
            where = f"rank {gone[0]} of {self._size}, at {self._at[gone[0]]}"
            return RankError("has ended, and the others have not", where=where, fix="call alike on all")
        return error

    def failed(self, error: BaseException) -> BaseException:
        """Tell the others why this rank ends; or, where it ends for another, what has become of that one."""
        if isinstance(error, RankError) and (told := self.explained(error)) is not error:
            self._leaves.set()
            return told
        self._leaves.set()
        line = str(error) if isinstance(error, MegaTrainError) else typed_line(error)
        self._tell({"failed": line})
        return error

    def close(self) -> None:
        """This rank has ended well, or has said why not."""
        self._leaves.set()
        self._closed.set()
        self._tell({"done": True})
        for other in self._others.values():
            other.close()

    def _accepted(self, listener: socket.socket, key: str) -> dict[int, socket.socket]:
        """The connections of all others; who does not know the key is none of them."""
        listener.settimeout(SECONDS)
        found: dict[int, socket.socket] = {}
        while len(found) < self._size - 1:
            other, _ = listener.accept()
            other.settimeout(SECONDS)
            with suppress(OSError, ValueError):
                hello = b""
                while len(hello) < KEY_NBYTES + 4 and (more := other.recv(KEY_NBYTES + 4 - len(hello))):
                    hello += more
                if secrets.compare_digest(hello[4:], key.encode()):
                    other.settimeout(None)
                    found[int.from_bytes(hello[:4], "little")] = other
                    continue
            other.close()
        return found

    def _connected(self, address: str, port: int, key: str) -> socket.socket:
        first = socket.create_connection((address, port), timeout=SECONDS)
        first.settimeout(None)
        first.sendall(self._rank.to_bytes(4, "little") + key.encode())
        return first

    def _tell(self, message: dict[str, object]) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            for other in self._others.values():
                with suppress(OSError):  # its own thread hears of that
                    other.sendall(line)

    def _listen(self, rank: int, other: socket.socket) -> None:
        """On a thread for each connection."""
        line = "was killed, or its machine is gone"
        with suppress(OSError), other.makefile("r") as said:
            for each in said:
                if not each.endswith("\n"):  # it ended in the middle of a word
                    break
                message = json.loads(each)
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
        """Another rank has ended: tell all, let this one leave by itself, and else end it from here."""
        with self._lock:
            if self._line:
                return
            self._line = line
        if self._rank == 0:
            self._tell({"over": (line, grace_seconds)})
        self._heard.set()
        if self._leaves.wait(grace_seconds) or not (self.owns_process or self._waiting()):
            return
        for each in self.ending:
            each(line)
        os.write(2, f"error: {line}\n".encode())
        os._exit(ENDED)

    # One that stands still ------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        """Of this rank, as it tells it: the collectives that it has come to, by carrier, and what it is doing."""
        return {"come_to": dict(self._come_to), "doing": self._op() or _innermost_call()}

    def _op(self) -> str:
        """The op that is under way, in words."""
        doing = self._doing()
        return "" if doing is None else doing()

    def _waiting(self) -> dict[str, float]:
        """Seconds, by carrier, in collectives that are not over."""
        return {name: self._clock - since for name, (since, is_over) in list(self._waits.items()) if not is_over()}

    def _look_at_waits(self) -> None:
        """On a thread: ask about the others once this rank has waited for too long. A process that was stopped, with
        all others maybe, has not waited meanwhile."""
        last, least = time.monotonic(), min(self._limits.values())
        while not self._closed.wait(PAUSE_SECONDS):
            now = time.monotonic()
            self._clock += min(now - last, 5 * PAUSE_SECONDS)
            last = now
            late = {name: seconds for name, seconds in self._waiting().items() if seconds >= least}
            if not late or self._clock < self._asked + least / 2 or self._heard.is_set():
                continue
            self._asked, name = self._clock, max(late, key=lambda each: late[each])
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
        """Whether this rank waits for what all do alike, in steps behind the first."""
        return carrier == "host" and self.about in PROMPT and self._doing() is not None

    def _look(self, carrier: str, number: int, seconds: float, waits_at: str, is_due: bool) -> None:
        """On the first rank: who has not come to a collective that another has waited in for `seconds`? is_due: whether
        that is too long for a rank that answers."""
        with self._looks:
            self._answers = {0: self._state()}
            self._tell({"asks": True})
            time.sleep(ANSWER_SECONDS)
            answers = dict(self._answers)
        silent = [rank for rank in range(self._size) if rank not in answers and rank not in self._done]
        if silent:
            return self._end(self._named(silent[0], _stands_still(seconds, waits_at)), PAUSE_SECONDS)
        behind = [rank for rank, found in answers.items() if found["come_to"].get(carrier, 0) < number]
        if behind and is_due:
            is_at = answers[behind[0]]["doing"]
            line = f"is still in {is_at}, and the others have waited for {seconds:.0f} s{_where(waits_at)}"
            self._end(self._named(behind[0], line), PAUSE_SECONDS)


def _stands_still(seconds: float, waits_at: str) -> str:
    return f"stands still and does not answer; the others have waited for {seconds:.0f} s{_where(waits_at)}"


def _innermost_call() -> str:
    """What the main thread is in, outside of any op: waiting for data, say."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})" if frame else "nothing"


def _where(waits_at: str) -> str:
    return f" in {waits_at}" if waits_at else ""


def _listener() -> socket.socket:
    """On a free port of this machine, by either version of IP."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))
