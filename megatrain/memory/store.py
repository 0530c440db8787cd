"""The store: the whole truth about each unit, in host memory.

In `bf16` a unit holds hi (the upper half of each float32 master, which is the bfloat16 weight that streams), lo (the
other 16 bits), and float32 m and v: 12 bytes per parameter. In `fp32` hi is the float32 weight itself and there is no
lo: 12 bytes again. hi has a buffer of its own because it is what the device fetches; the rest, `host/state/U`, is m,
v, lo in this order, so that each array stays aligned. Frozen parameters
have no m and v.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatrain.layout import Field, Layout, layout_of
from megatrain.memory.pool import Pool
from megatrain.optim.split import join, split_into
from megatrain.spec import ModelSpec, Policy


@dataclass(frozen=True, slots=True)
class UnitState:
    """Views of one unit's arrays: `hi` and `lo` of `layout.size` elements, `m` and `v` of what trains, a prefix.

    `lo` is absent in fp32.
    """

    hi: np.ndarray
    """uint16 bfloat16 bits, or float32 weights."""
    lo: np.ndarray | None
    m: np.ndarray
    v: np.ndarray


class Store:
    """The state of all units, inside buffers of the pool."""

    def __init__(self, model: ModelSpec, policy: Policy, pool: Pool) -> None:
        self.model, self.pool = model, pool
        self.split = policy.precision == "bf16"
        self.layouts: list[Layout] = [layout_of(unit) for unit in model.units]
        self._owner = {field.name: (unit, field) for unit, layout in enumerate(self.layouts) for field in layout.fields}

    def unit(self, unit: int) -> UnitState:
        """The arrays of one unit; writing to them changes the state."""
        size = self.layouts[unit].trained.size
        hi = self.pool.memory(f"host/hi/{unit}").numpy()
        name = f"host/state/{unit}"
        state = self.pool.memory(name).numpy() if self.split or size else np.empty(0, np.uint8)
        m, v = state[: 4 * size].view(np.float32), state[4 * size : 8 * size].view(np.float32)
        if not self.split:
            return UnitState(hi.view(np.float32), None, m, v)
        return UnitState(hi.view(np.uint16), state[8 * size :].view(np.uint16), m, v)

    def names(self) -> Iterator[str]:
        """Parameter names, unit by unit."""
        return iter(self._owner)

    def write_master(self, name: str, value: Tensor) -> None:
        """Set the float32 master of one parameter, exactly. `value` has the parameter's shape, on the host."""
        unit, field = self._owner[name]
        flat = value.detach().to(device="cpu", dtype=torch.float32).reshape(-1).contiguous().numpy()
        state = self.unit(unit)
        if state.lo is None:
            state.hi[field.start : field.stop] = flat
        else:
            split_into(flat, state.hi[field.start : field.stop], state.lo[field.start : field.stop])

    def master(self, name: str) -> Tensor:
        """A copy of the float32 master of one parameter, in its shape."""
        unit, field = self._owner[name]
        state = self.unit(unit)
        if state.lo is None:
            return _tensor(state.hi[field.start : field.stop].copy(), field)
        return _tensor(join(state.hi[field.start : field.stop], state.lo[field.start : field.stop]), field)

    def load(self, parameters: Mapping[str, Tensor]) -> None:
        """Set all masters from a name -> tensor mapping that holds every parameter."""
        for name in self._owner:
            self.write_master(name, parameters[name])

    def field(self, name: str) -> tuple[int, Field]:
        """The unit and place of a parameter."""
        return self._owner[name]


def _tensor(flat: np.ndarray, field: Field) -> Tensor:
    return torch.from_numpy(flat).view(field.shape)
