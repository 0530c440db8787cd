"""Checkpoints of tiny models with states of arbitrary bits: not-a-numbers, infinities, zeros of both signs."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatrain.checkpoint import save as save_module
from megatrain.checkpoint import tensor_pieces
from megatrain.checkpoint.export import export_pieces
from megatrain.checkpoint.load import Checkpoint
from megatrain.checkpoint.save import CheckpointFacts, PlannedCheckpoint, StateReader, write_checkpoint
from megatrain.model import PortedModel, PretrainedSource, port_model
from megatrain.schedule.passes import state_buffers
from megatrain.spec.layout import layout_of
from tests.tiny import tiny_model


@dataclass(frozen=True)
class ParamState:
    """The float32 state of one parameter in its shape. A frozen parameter has no moments."""

    master: Tensor
    m: Tensor | None = None
    v: Tensor | None = None


State = dict[str, ParamState]
"""Parameter name -> its state, of one unit or of a whole model."""


def refuse(*_: object, **__: object) -> Any:
    """Stands for a call that finds the disk full."""
    raise OSError(errno.ENOSPC, "No space left on device")


def refuse_as_tokenizers_do(_: Path) -> None:
    raise Exception("No space left on device (os error 28)")


def config_as_stock_saves_it(folder: Path) -> str:
    """The text of a config.json without the fields that only transformers 4 reads."""
    fields = json.loads((folder / "config.json").read_text())
    for name in ("rope_theta", "rope_scaling", "torch_dtype", "num_experts"):
        fields.pop(name, None)
    return json.dumps(fields, indent=2, sort_keys=True) + "\n"


class MasterDict(dict[str, Tensor]):
    """Masters by name, copied; what a source fills."""

    def master(self, name: str) -> Tensor:
        return self[name].clone()

    def write_master(self, name: str, value: Tensor) -> None:
        self[name] = value.detach().clone()


def export_model(ported: PortedModel, masters: Callable[[str], Tensor], folder: Path, **options: Any) -> Path:
    """Export a model whose masters are asked for by name."""
    return export_pieces(
        ported, lambda name, start, stop: masters(name).reshape(-1)[start:stop].numpy(), folder, **options
    )


def reader_of(planned: PlannedCheckpoint, units: Iterable[State]) -> StateReader:
    """The states of the units, in one buffer that holds nonsense as soon as the next is read."""
    layouts, states = [layout_of(unit) for unit in planned.spec.units], [*units]
    memory = np.empty(max(layout.size for layout in layouts), np.float32)

    def read(unit: int, array: int, start: int, stop: int) -> np.ndarray:
        memory.fill(np.nan)
        for field in layouts[unit].fields:
            state = states[unit][field.name]
            first, last = max(start, field.start), min(stop, field.stop)
            if first < last:
                values = (state.master, state.m, state.v)[array]
                assert values is not None
                memory[first - start : last - start] = values.reshape(-1)[first - field.start : last - field.start]
        return memory[: stop - start]

    return StateReader(read, layouts)


def set_saved_at_once(monkeypatch: pytest.MonkeyPatch, numel: int) -> None:
    """Let saves read so many elements at a time at most."""
    for module in (save_module, tensor_pieces, state_buffers):
        monkeypatch.setattr(module, "SAVED_AT_ONCE", numel)


def contents(folder: Path) -> dict[str, bytes]:
    """Name of each file in the folder -> its bytes."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def ported(family: str = "llama", **changes: Any) -> PortedModel:
    return port_model(tiny_model(family, **changes), torch.bfloat16)


def any_bits(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """float32 of which every pattern of bits is as likely."""
    bits = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64)
    return bits.to(torch.int32).view(torch.float32)


def units_of(planned: PlannedCheckpoint, seed: int) -> Iterator[State]:
    """The state of unit after unit."""
    generator = torch.Generator().manual_seed(seed)
    for unit in planned.spec.units:
        yield {
            param.name: ParamState(*(any_bits(param.shape, generator) for _ in range(3 if param.trainable else 1)))
            for param in unit.params
        }


def save(folder: Path, step: int = 1, seed: int | None = None, **options: Any) -> Path:
    """A checkpoint of a tiny Llama whose state follows from the seed, which is the step if none is given."""
    planned = options.pop("planned", None) or PlannedCheckpoint(ported())
    training = options.pop("training", {"step": step})
    state = options.pop("state", None) or reader_of(planned, units_of(planned, step if seed is None else seed))
    facts = CheckpointFacts(step, training, options.pop("score", None), options.pop("write_more", None))
    return write_checkpoint(folder, planned, state, facts, **options)


def loaded(checkpoint: Checkpoint, planned: PlannedCheckpoint) -> State:
    """All that is in a checkpoint, its masters by way of the library."""
    masters = MasterDict()
    names = [[param.name for param in unit.params] for unit in planned.spec.units]
    source = PretrainedSource(checkpoint.folder)
    assert source.unexpected == []
    source.fill(masters, names)
    names = checkpoint.moment_shapes
    moments = {name: [saved.clone() for saved in checkpoint.moments(name, ("m", "v"))] for name in names}
    return {name: ParamState(master, *moments.get(name, (None, None))) for name, master in masters.items()}


def expected(planned: PlannedCheckpoint, seed: int) -> dict[str, list[bytes]]:
    """The bits of the state that follows from the seed."""
    return bits({name: each for unit in units_of(planned, seed) for name, each in unit.items()})


def bits(state: Mapping[str, ParamState]) -> dict[str, list[bytes]]:
    """What can be compared: master, m and v of each parameter."""
    return {
        name: [tensor.numpy().tobytes() for tensor in (each.master, each.m, each.v) if tensor is not None]
        for name, each in state.items()
    }
