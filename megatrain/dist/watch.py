"""Detect failed peers: when a rank dies or fails, all other ranks exit at once with an error that names it.

Each has a connection to the first, which passes on what it hears. The system closes it when a process ends, whatever
ends it, so nobody waits for a time to pass; and over it a rank says what it is at, and why it fails. A rank that hears
of another in the middle of something else is ended from a thread. Left out: one that stands still, or a machine that
is gone without a word, for which the process groups have their time.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from contextlib import suppress

from megatrain.dist.world import World
from megatrain.errors import MegaTrainError, RankError, first_line, typed_line

SECONDS = 60.0
"""For all to connect, once they are there."""
GRACE_SECONDS = 2.0
"""In which a rank that hears of another's end leaves by itself; and in which one that misses another hears of it."""
KEY_NBYTES = 32
"""Of what a rank says to be let in."""
ENDED = 1
"""Exit code of a rank that is ended from its thread."""


class Watch:
    """This rank's connection to the others. address: of the machine of the first. Raises `RankError`."""

    def __init__(self, world: World, address: str) -> None:
        self._rank, self._size = world.rank, world.size
        self._at = ["the beginning"] * world.size
        self._line, self._heard, self._leaves = "", threading.Event(), threading.Event()
        self._lock = threading.Lock()
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

    def at(self, what: str) -> None:
        """What this rank is at from now on, in words for a line about its end."""
        self._at[self._rank] = what
        self._tell({"at": what})

    def failed(self, error: BaseException) -> BaseException:
        """Tell the others why this rank ends; or, where it ends for another, what has become of that one."""
        if isinstance(error, RankError) and self._heard.wait(GRACE_SECONDS):
            self._leaves.set()
            return RankError(self._line)
        self._leaves.set()
        line = str(error) if isinstance(error, MegaTrainError) else typed_line(error)
        self._tell({"failed": line})
        return error

    def close(self) -> None:
        """This rank has ended well, or has said why not."""
        self._leaves.set()
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
                    return
                if "over" in message:
                    return self._end(message["over"])
                if "failed" in message:
                    line = message["failed"]
                    break
                self._at[rank] = message["at"]
        if not self._leaves.is_set():
            self._end(f"rank {rank} of {self._size}, at {self._at[rank]}: {line}")

    def _end(self, line: str) -> None:
        """Another rank has ended: tell all, let this one leave by itself, and else end it from here."""
        with self._lock:
            if self._line:
                return
            self._line = line
        if self._rank == 0:
            self._tell({"over": line})
        self._heard.set()
        if not self._leaves.wait(GRACE_SECONDS):
            os.write(2, f"error: {line}\n".encode())
            os._exit(ENDED)


def _listener() -> socket.socket:
    """On a free port of this machine, by either version of IP."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))
