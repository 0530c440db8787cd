"""A fork server for tests: it imports everything once, and forks a child for each call that needs its own process.

A fork costs nothing, where a new process takes five seconds of a processor to import the libraries, and it is safe
since no thread has been started here. What a child has measured of a model the next one need not
(`tests.measurement_cache`).

    python -m tests.fork_server FOLDER
"""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


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
    """The process. folder: for what its children say. remembered: for what they find out about models and machines."""

    spent = 0.0
    """Seconds of CPU time of children that have ended: `os.times` knows of them when the process itself ends."""

    def __init__(self, folder: Path, remembered: Path) -> None:
        command = [sys.executable, "-m", __name__, str(remembered)]
        self._folder, self._count = folder, 0
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def start(
        self, work: Callable[..., object], *arguments: Any, environment: Mapping[str, str] | None = None
    ) -> Child:
        """Have a child call `work`, a function that it can import. environment: beside that of this process."""
        self._count += 1
        said = self._folder / f"said-{self._count}.txt"
        asked = work, arguments, {**os.environ, **(environment or {})}, os.getcwd(), str(said)
        return Child(self, self.ask("start", *asked), said)

    def command(self, *arguments: str, environment: Mapping[str, str] | None = None) -> Child:
        """`megatrain ARGUMENTS`."""
        return self.start(command_line, *arguments, environment=environment)

    def ask(self, *asked: object) -> Any:
        pickle.dump(asked, self._process.stdin)  # type: ignore[arg-type]
        self._process.stdin.flush()  # type: ignore[union-attr]
        return pickle.load(self._process.stdout)  # type: ignore[arg-type]

    def close(self) -> None:
        self._process.communicate()


def command_line(*arguments: str) -> None:
    from megatrain.cli import main

    main(arguments)


def fork(
    work: Callable[..., object], arguments: tuple[Any, ...], environment: dict[str, str], folder: str, said: str
) -> int:
    """The child's number. The child itself does not come back: it ends as a process of its own would."""
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


def serve(folder: Path) -> None:
    import peft  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401  # what a run imports when it gets there

    import megatrain.run.training  # noqa: F401
    from megatrain.device import probe
    from megatrain.model import profile
    from megatrain.optim import warm_up
    from megatrain.plan import measured_models
    from megatrain.run import this_machine
    from megatrain.train import parity
    from tests import measurement_cache

    torch.set_num_threads(1)
    probe.LARGEST["cpu"] = 64
    parity.CACHE = measured_models.FOLDER = folder
    this_machine.PROBED = folder / "hardware.json"
    measurement_cache.FOLDER = folder
    measurement_cache.remember(profile)
    warm_up()  # compiled loops are inherited; it runs on this thread alone
    gc.collect()
    gc.freeze()  # or a child's first collection would copy all that it has inherited
    asks, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    while True:
        try:
            what, *asked = pickle.load(asks)
        except EOFError:
            break
        pickle.dump(fork(*asked) if what == "start" else ended(*asked), answers)
        answers.flush()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
    os._exit(0)
