"""A fork server for tests: it forks a child with everything imported for each call that needs its own process.

A fork costs nothing, where a new process takes five seconds of a processor to import the libraries. The server is
itself forked, once all tests are collected and before the first one runs: it has what they have imported, and is safe
to fork since no test has started a thread or changed anything yet. What a child has measured of a model the next one
need not (`tests.measurement_cache`).
"""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, NoReturn


class Child:
    """A child of the preloaded process: `subprocess.Popen`, as far as tests want it. said: what it has written to its
    standard output and error, once it has ended."""

    def __init__(self, preloaded: Preloaded, pid: int, said: Path) -> None:
        self._preloaded, self._said, self.pid = preloaded, said, pid
        self.returncode: int | None = None

    @property
    def said(self) -> str:
        return self._said.read_text()

    def poll(self) -> int | None:
        """Its exit status, negative for a signal, if it has ended."""
        if self.returncode is None and (found := self._preloaded.ask("ended", self.pid)) is not None:
            self.returncode, seconds = found
            Preloaded.spent += seconds
        return self.returncode

    def wait(self, seconds: float = 240.0) -> int:
        ends = time.monotonic() + seconds
        while self.poll() is None:
            assert time.monotonic() < ends, f"still there after {seconds} seconds: {self.said}"
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """It is there until somebody has asked for its status, so the number is no other's."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Preloaded:
    """The server, from the moment that this is made on."""

    spent = 0.0
    """Seconds of CPU time of children that have ended: `os.times` knows of them when the server itself ends."""

    def __init__(self) -> None:
        (asks, to_server), (from_server, answers) = os.pipe(), os.pipe()
        theirs, ours = (asks, answers), (to_server, from_server)
        self._pid = os.fork()
        for end in theirs if self._pid else ours:
            os.close(end)
        if not self._pid:
            serve(os.fdopen(asks, "rb"), os.fdopen(answers, "wb"))
        self._to, self._from = os.fdopen(to_server, "wb"), os.fdopen(from_server, "rb")
        self._count = 0

    def prepare(self, folder: Path, remembered: Path) -> None:
        """folder: for what its children say. remembered: for what they find out about models and machines."""
        self._folder = folder
        self.ask("prepare", remembered)

    def start(
        self, work: Callable[..., object], *arguments: Any, environment: Mapping[str, str] | None = None
    ) -> Child:
        """Have a child call `work`, a function that it can import. environment: beside that of this process."""
        self._count += 1
        said = self._folder / f"said-{self._count}.txt"
        said.touch()  # whoever looks before the child does finds nothing said
        roughly = hasattr(sys.modules["megatrain.model.profile"].profile_layer, "__wrapped__")
        asked = work, arguments, {**os.environ, **(environment or {})}, os.getcwd(), str(said), roughly
        return Child(self, self.ask("start", *asked), said)

    def command(self, *arguments: str, environment: Mapping[str, str] | None = None) -> Child:
        """`megatrain ARGUMENTS`."""
        return self.start(command_line, *arguments, environment=environment)

    def ask(self, *asked: object) -> Any:
        pickle.dump(asked, self._to)
        self._to.flush()
        return pickle.load(self._from)

    def close(self) -> None:
        self._to.close()
        self._from.close()
        os.waitpid(self._pid, 0)


def command_line(*arguments: str) -> None:
    from megatrain.cli import main

    main(arguments)


def fork(
    work: Callable[..., object],
    arguments: tuple[Any, ...],
    environment: dict[str, str],
    folder: str,
    said: str,
    roughly: bool,
) -> int:
    """The child's number. The child itself does not come back: it ends as a process of its own would.

    roughly: whether it measures layers by fewer runs, as the test that asks for it does.
    """
    assert threading.active_count() == 1, "a fork would leave the others behind"
    if child := os.fork():
        return child
    sys.stdin = Path(os.devnull).open()  # noqa: SIM115  # until it ends
    sys.stdout = sys.stderr = Path(said).open("w", 1)  # noqa: SIM115
    for number, opened in enumerate((sys.stdin, sys.stdout, sys.stderr)):
        os.dup2(opened.fileno(), number)  # libraries that are not Python write there too
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    measurement_cache = sys.modules["tests.measurement_cache"]
    measurement_cache.measure_roughly(sys.modules["megatrain.model.profile"], roughly)
    status: object = 1
    try:
        work(*arguments)
        status = 0
    except SystemExit as left:
        status = left.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        # As Python ends, but for the taking apart of all that it has imported, which would copy it.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(status if isinstance(status, int) else 1)


def ended(pid: int) -> tuple[int, float] | None:
    """Exit status and seconds of CPU time of a child that has ended."""
    gone, status, used = os.wait4(pid, os.WNOHANG)
    return (os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime) if gone else None


def remember_in(folder: Path) -> None:
    """Have a process keep what it finds out in `folder`, and nothing in the user's home; and measure and write little.

    A run's measure of the machine is a small product: a large one in bfloat16 takes a second on a cpu without units for
    it, and no test asks how quick the machine is.
    """
    from megatrain.device import probe
    from megatrain.plan import measured_models
    from megatrain.run import this_machine
    from megatrain.train import parity

    probe.LARGEST = {**probe.LARGEST, "cpu": 64}
    this_machine.PROBED = folder / "hardware.json"
    measured_models.FOLDER = parity.CACHE = folder


def serve(asks: IO[bytes], answers: IO[bytes]) -> NoReturn:
    """Do what is asked until nobody can ask any more."""
    answer: dict[str, Callable[..., object]] = {"prepare": prepare, "start": fork, "ended": ended}
    try:
        while True:
            what, *asked = pickle.load(asks)
            pickle.dump(answer[what](*asked), answers)
            answers.flush()
    except EOFError:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def prepare(folder: Path) -> None:
    import peft  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401  # what a run imports when it gets there

    import megatrain.run.training  # noqa: F401
    from megatrain.model import profile
    from megatrain.optim import AdamW
    from tests import measurement_cache

    torch.set_num_threads(1)
    remember_in(folder)
    measurement_cache.FOLDER = folder
    measurement_cache.remember(profile)
    AdamW().warm_up()  # compiled loops are inherited; it runs on this thread alone
    gc.collect()
    gc.freeze()  # or a child's first collection would copy all that it has inherited
