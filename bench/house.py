"""How much there is to carry: size of the package, and how far a step goes before a layer runs.

    python -m bench.house

Counts of the source: files, lines, classes and functions above the house's limits (tests/arch/house.py), names that say
nothing. Counts of a step of a tiny Llama: functions of the package on the stack between `Engine.step` and a layer's
forward or backward, on a CPU and on the stand-in CUDA device (where a C++ compiler is), and the calls that a layer
costs (`bench.launches`). Last, those stacks: the walk of a step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import megatrain
from bench.launches import LAYERS, MORE_LAYERS, step_calls
from megatrain import AdamW, Engine
from tests import standin_cuda
from tests.arch.house import MAX_METHODS, MAX_PARAMETERS, House, filler_names_live_briefly, methods_of, parameters_of
from tests.tiny import tiny_model, unequal_batches

PACKAGE = Path(megatrain.__file__).parent


@dataclass(frozen=True)
class Walk:
    """Functions of the package between `Engine.step` and a layer's forward or backward, outermost first."""

    forward: list[str]
    backward: list[str]


def package_calls() -> list[str]:
    """Names of the package's functions on the call stack, outermost first."""
    frame: FrameType | None = sys._getframe(1)
    names = []
    while frame is not None:
        if Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            names.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return names[::-1]


@contextmanager
def noted(owner: Any, name: str, stacks: list[list[str]]) -> Iterator[None]:
    """In the block, what is on the stack between `Engine.step` and each call of a function."""
    stock = getattr(owner, name)

    def noting(*args: Any, **kwargs: Any) -> Any:
        names = package_calls()
        if "differentiate" not in names:  # the loss has a backward, too
            stacks.append(names[names.index("Engine.step") + 1 :])
        return stock(*args, **kwargs)

    setattr(owner, name, noting)
    try:
        yield
    finally:
        setattr(owner, name, stock)


def walk_on(device: str) -> Walk:
    """The longest stacks of a step, of a layer's forward and backward."""
    forward: list[list[str]] = []
    backward: list[list[str]] = []
    with Engine.from_model(tiny_model(), device, "bf16", AdamW(), verify=False) as engine:
        engine.step(unequal_batches())
        with noted(LlamaDecoderLayer, "forward", forward), noted(torch.autograd, "backward", backward):
            engine.step(unequal_batches())
    return Walk(max(forward, key=len), max(backward, key=len))


def counts() -> dict[str, float]:
    """What -> how much of it the package has."""
    house = House(PACKAGE.parent)
    methods, parameters = methods_of(house), parameters_of(house)
    return {
        "files": len(house.modules),
        "lines": sum(module.text.count("\n") for module in house.modules.values()),
        f"classes above {MAX_METHODS} methods": sum(count > MAX_METHODS for count in methods.values()),
        "methods of the largest class": max(methods.values()),
        f"functions above {MAX_PARAMETERS} parameters": sum(count > MAX_PARAMETERS for count in parameters.values()),
        "parameters of the widest function": max(parameters.values()),
        "names that say nothing and live long": sum(1 for _ in filler_names_live_briefly(house)),
    }


def calls_of_a_layer(activations: str) -> float:
    """Calls of Python and C functions that a step on a CPU makes more with one layer more.

    Each number is the least of three steps, since threads of the optimizer that wait for one another make calls, too.
    """

    def count(layers: int) -> int:
        return min(step_calls(layers, activations=activations) for _ in range(3))

    return (count(MORE_LAYERS) - count(LAYERS)) / (MORE_LAYERS - LAYERS)


def main() -> int:
    devices = ["cpu"]
    if reason := standin_cuda.unavailable():
        print(f"no stand-in CUDA device: {reason}", file=sys.stderr)
    else:
        standin_cuda.install()  # before autograd runs for the first time
        devices.append("cuda:0")
    told = counts()
    told["calls of a layer, graphs kept"] = calls_of_a_layer("keep")
    told["calls of a layer, recompute"] = calls_of_a_layer("recompute")
    walks = {device: walk_on(device) for device in devices}
    for device, walk in walks.items():
        told[f"frames to a layer's forward, {device}"] = len(walk.forward)
        told[f"frames to a layer's backward, {device}"] = len(walk.backward)
    for what, count in told.items():
        print(f"{count:>8,.0f}  {what}")
    for device, walk in walks.items():
        print(f"\n{device}, forward:  " + " > ".join(walk.forward))
        print(f"{device}, backward: " + " > ".join(walk.backward))
    return 0


if __name__ == "__main__":
    sys.exit(main())
