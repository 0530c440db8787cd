"""What lives between steps: the parts of each unit's state, where they are, and what they pass through from the disk.

A unit has weights, low bits and moments, and a gradient where that waits for the norm. Each part is in the tier that
its home names (`spec.Home`). On the disk it has a region there, and buffers in host memory that stand for it while it
is in use (`disk_staging`). `StateBuffers` names all of it for a schedule; `state_nbytes` adds up the same bytes without
a name for each, since a search for a plan asks for them some thousand times. Left out: where a gradient is summed
(`gradient_slots`), and where one lands that is used at once (`build`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Literal, NamedTuple

from megatrain.schedule.contents import USED, Gradient, LowBits, Moments, State, Weights
from megatrain.schedule.ops import Buffer
from megatrain.schedule.passes.disk_staging import Staged
from megatrain.spec import Home, ModelSpec, Numerics, Policy, Precision, Tier
from megatrain.spec.layout import Layout, layout_of

MOMENTS_NBYTES = 8
"""Per trained parameter: float32 m and v."""

Pending = Literal["none", "all"]
"""Whether every unit has an update of the last step waiting, or none has."""


class Part(NamedTuple):
    """Of a unit's state: its name, what its contents are, its bytes and its tier; and whether the device has a copy of
    it besides."""

    name: str
    content: type[State]
    nbytes: int
    tier: Tier
    copied: bool = False


def parts_of(layout: Layout, numerics: Numerics, policy: Policy, home: Home) -> Iterator[Part]:
    """What a unit has between steps, less what is empty."""
    size, trained = layout.size, layout.trained.size
    if size:
        copied = home.weights == "device" and not home.on_device
        yield Part("hi", Weights, size * numerics.weight_nbytes, "host" if copied else home.weights, copied)
        if low := low_nbytes(layout, numerics):
            yield Part("low", LowBits, low, home.low_bits)
    if trained:
        yield Part("moments", Moments, MOMENTS_NBYTES * trained, home.moments)
        if policy.update != "during_backward":
            tier: Tier = "disk" if home.gradients == "disk" else "device" if home.on_device else "host"
            yield Part("grad", Gradient, trained * numerics.grad_nbytes, tier)


def low_nbytes(layout: Layout, numerics: Numerics) -> int:
    """Bytes of a unit's low bits, which complete bf16 weights to their masters."""
    return layout.size * (0 if numerics.precision == "fp32" else 2)


def stages_of(model: ModelSpec, policy: Policy, unit: int, part: str) -> list[str]:
    """Names of the buffers that a part of a unit may pass through on its way from the disk; as for slots, the ends
    share one."""
    kind, count = model.units[unit].kind, policy.stage_slots
    if kind != "layer":
        return [f"host/stage/{part}/{kind if model.tied else 'ends'}"]
    if part == "hi" and policy.update == "during_backward" and not policy.shares_memory:
        count = max(count, policy.layers_fetched)  # from a layer's fetch to its update others are fetched
    return [f"host/stage/{part}/layer{k}" for k in range(min(count, len(model.layers)))]


def state_nbytes(model: ModelSpec, numerics: Numerics, policy: Policy) -> dict[str, int]:
    """Tier -> bytes of all units' state between steps, with the buffers that it passes through."""
    totals: dict[str, int] = {"device": 0, "host": 8 * len(model.units), "disk": 0}
    stages: dict[str, int] = {}
    alike: Counter[tuple[int, bool, Home]] = Counter()
    first: dict[tuple[int, bool, Home], int] = {}
    homes = policy.homes_of(model)
    for unit, spec in enumerate(model.units):
        key = id(spec.params), spec.kind == "layer", homes[unit]
        alike[key] += 1
        first.setdefault(key, unit)
    for key, count in alike.items():
        for part in parts_of(layout_of(model.units[first[key]]), numerics, policy, key[2]):
            totals[part.tier] += count * part.nbytes
            totals["device"] += count * part.nbytes * part.copied
            for name in stages_of(model, policy, first[key], part.name) if part.tier == "disk" else ():
                stages[name] = max(stages.get(name, 0), part.nbytes)
    totals["host"] += sum(stages.values())
    return totals


def spare_nbytes(layout: Layout, precision: Precision, away: Collection[str]) -> int:
    """Host memory in which a unit's state is put together in float32, for a save beside steps.

    away: its parts that do not lie in host memory. Float32 masters take room, unless they lie there as such; behind
    them what is fetched: both halves of the masters, and in their place, once they have been joined, the moments.
    """
    masters = 0 if precision == "fp32" and "hi" not in away else 4 * layout.size
    halves = 0 if precision == "fp32" else 2 * layout.size * len({"hi", "low"} & {*away})
    moments = MOMENTS_NBYTES * layout.trained.size if "moments" in away else 0
    return masters + max(halves, moments)


def save_nbytes(model: ModelSpec, numerics: Numerics, policy: Policy) -> int:
    """Host memory that checkpoints written beside steps take: that of the unit which needs most (`spare_nbytes`)."""
    kinds = {(id(spec.params), policy.home(unit)): unit for unit, spec in enumerate(model.units)}
    found = []
    for (_, home), unit in kinds.items():
        layout = layout_of(model.units[unit])
        away = [part.name for part in parts_of(layout, numerics, policy, home) if part.tier != "host"]
        found.append(spare_nbytes(layout, numerics.precision, away))
    return max(found)


class StateBuffers:
    """Names the state of a model for one schedule: enters its buffers into `buffers`, and the names of host memory that
    stand for state on the disk into `staged`."""

    def __init__(
        self,
        model: ModelSpec,
        numerics: Numerics,
        policy: Policy,
        pending: Pending,
        buffers: dict[str, Buffer],
        staged: dict[str, Staged],
    ) -> None:
        self._model, self._numerics, self._policy = model, numerics, policy
        self._buffers, self._staged = buffers, staged
        old = "old" if pending == "all" else ""
        self._parts: dict[tuple[int, Home], Sequence[Part]] = {}
        for unit, spec in enumerate(model.units):
            trains = layout_of(spec).trained.size > 0
            for part in self.of(unit):
                content = part.content(unit, old if trains else "")
                waits = part.name != "grad" or pending == "all"
                self._declare(unit, part, content if waits else None)
        self._enter("host", "host/norms", 8 * len(model.units), "norms", None)

    def of(self, unit: int) -> Sequence[Part]:
        """The parts of a unit. Units that are alike share their sizes."""
        layout, home = layout_of(self._model.units[unit]), self._policy.home(unit)
        key = id(layout), home
        if key not in self._parts:
            self._parts[key] = tuple(parts_of(layout, self._numerics, self._policy, home))
        return self._parts[key]

    def _declare(self, unit: int, part: Part, content: State | None) -> None:
        """The memory of a part, in its tier."""
        name = part.name
        if part.copied:
            self._enter("device", f"device/hi/{unit}", part.nbytes, "resident weights", None)
        owner = "weights" if name == "hi" else "gradients" if name == "grad" else "optimizer state"
        self._enter(part.tier, f"{part.tier}/{name}/{unit}", part.nbytes, owner, content)
        if part.tier == "disk":
            slots = tuple(stages_of(self._model, self._policy, unit, name))
            for slot in slots:
                known = self._buffers.get(slot)
                self._enter("host", slot, max(part.nbytes, known.nbytes if known else 0), "staging", None)
            region = f"disk/{name}/{unit}"
            self._staged[f"host/{name}/{unit}"] = Staged(unit, region, part.nbytes, content or USED, slots)

    def _enter(self, tier: Tier, name: str, nbytes: int, owner: str, initial: State | None) -> None:
        self._buffers[name] = Buffer(name, tier, nbytes, owner, initial)
