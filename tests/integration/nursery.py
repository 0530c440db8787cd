"""A process that has imported everything and computed nothing, and forks a child for each run that is to be killed.

It reads one JSON object a line: the fields of a configuration, and where the child is to die, if anywhere: at the nth
call of an op's action or of a function of the file system, or after some seconds. It answers with the child's exit
status, negative for a signal. A fork is safe since no thread has been started here, and costs nothing, where a new
process takes seconds to import the libraries.

    python -m tests.integration.nursery
"""

from __future__ import annotations

import io
import json
import os
import pathlib
import signal
import sys
import threading
import time
from typing import Any


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def arrange(place: str, count: float) -> None:
    """Have this process killed at the `count`th time that something is about to happen, or after so many seconds."""
    from megatrain.checkpoint import direct_io
    from megatrain.engine import ops

    left = [int(count)]

    def counted(honest: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                kill()
            return honest(*arguments, **named)

        return call

    if place == "seconds":
        threading.Thread(target=lambda: (time.sleep(count), kill()), daemon=True).start()
    elif place in ops.ACTIONS:
        ops.ACTIONS[place] = counted(ops.ACTIONS[place])
    elif place == "write":
        direct_io.DirectFile.write = counted(direct_io.DirectFile.write)  # type: ignore[method-assign]
    elif place == "rename":
        pathlib.Path.rename = counted(pathlib.Path.rename)  # type: ignore[method-assign]
    else:
        setattr(os, place, counted(getattr(os, place)))


def run(tree: dict[str, Any], place: str | None, count: float, said: str) -> int:
    from rich.console import Console

    from megatrain.config import Config
    from megatrain.device import probe
    from megatrain.errors import MegaTrainError
    from megatrain.run.training import run_training

    probe.SIZES["cpu"] = 64
    if place is not None:
        arrange(place, count)
    console = Console(file=io.StringIO(), width=120)
    try:
        run_training(Config.model_validate(tree), console)
    except MegaTrainError as error:
        console.print(str(error), soft_wrap=True)
        return 2
    finally:
        assert isinstance(console.file, io.StringIO)
        pathlib.Path(said).write_text(console.file.getvalue())
    return 0


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import peft  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401  # what a run imports when it gets there

    import megatrain.run.training  # noqa: F401
    from megatrain.model import profile
    from megatrain.optim import warm_up
    from megatrain.run import this_machine
    from megatrain.train import parity
    from tests import measurement_cache

    cache = pathlib.Path(sys.argv[1])
    torch.set_num_threads(1)
    measurement_cache.FOLDER = cache  # what a run's model takes is measured by the first
    measurement_cache.remember(profile)
    parity.CACHE, this_machine.PROBED = cache, cache / "hardware.json"
    warm_up()  # compiled loops are inherited; it runs on this thread alone
    assert threading.active_count() == 1
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        asked = json.loads(line)
        assert threading.active_count() == 1, "a fork would leave the others behind"
        child = os.fork()
        if child == 0:
            status = 70
            try:
                status = run(asked["config"], asked["place"], asked["count"], asked["said"])
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(json.dumps(os.waitstatus_to_exitcode(status)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
