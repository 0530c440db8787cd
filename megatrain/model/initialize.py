"""Initialises fresh weights by the library's own code, into the store, with one parameter in memory at a time.

The model is constructed twice. The first construction gives the structure (`skeleton`), and with it the name of the
k-th parameter that a module registers. The second runs the stock code from the seed on ordinary CPU tensors whose
memory is swapped in and out: a `TorchDispatchMode` sees every operation, brings back from the store what the
operation will read, and writes a parameter to the store and frees it when an operation turns to another. So every
initialiser runs as usual, draws the same random numbers in the same order and leaves the same bits, while only the
parameters of one operation are in memory.

It takes as long as the stock initialisation. Parameters that reach their module unregistered (through `.data =` or
`copy.deepcopy`) come out right but stay in memory until the end, as does a head's own weight that is later tied. A
parameter that the library never initialises (garbage in the stock model) is zero here. A model that draws
*buffers* at random is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig, PreTrainedModel

from megatrain.errors import ModelError
from megatrain.model.architecture import read_config
from megatrain.model.mapped_tensors import give_back, map_private, whole_pages
from megatrain.model.skeleton import build, outline, storage_of, where_of, written_by
from megatrain.model.weight_sources import Masters, Progress, Report, require_all


class FreshSource:
    """A model initialised by its own code from `seed`, bit-equal to the stock initialisation."""

    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | PreTrainedConfig,
        seed: int,
        *,
        attention: str = "auto",
        trust_remote_code: bool = False,
    ) -> None:
        """Build the structure from a folder, a `config.json`, a hub name, a config's fields, or a config.

        Raises `ModelError` for anything but a causal language model that can be built here (see `skeleton`).
        """
        where = f"model {config}" if isinstance(config, str | Path) else "model.config"
        self.config = read_config(config, where=where, trust_remote_code=trust_remote_code)
        self.seed = seed
        self._attention, self._trust_remote_code = attention, trust_remote_code
        self.model: PreTrainedModel
        self.model, self._registered = outline(self.config, attention=attention, trust_remote_code=trust_remote_code)

    def fill(self, masters: Masters, units: Sequence[Sequence[str]], progress: Progress | None = None) -> None:
        """Write every parameter of every unit (see `Source`), in the library's order of initialisation.

        That order fixes the random numbers; `units` only say what must have been written in the end.
        """
        where = where_of(self.config)
        names: dict[int, str] = {}
        for name, parameter in self.model.named_parameters():
            names.setdefault(storage_of(parameter), name)
        keys = [(names.get(storage_of(parameter)), parameter.nbytes) for parameter in self._registered]
        order = [(name, nbytes) if name else None for name, nbytes in keys]
        report = Report(progress, 2 * sum(parameter.numel() for parameter in self.model.parameters()))
        replay = _Replay(order, masters, report, where)
        with replay:
            model = build(
                self.config,
                replay.register,
                seed=self.seed,
                attention=self._attention,
                trust_remote_code=self._trust_remote_code,
            )
        written = replay.finish(model)
        for name, buffer in model.named_buffers():
            if not torch.equal(buffer, self.model.get_buffer(name)):
                raise ModelError(f"its buffer {name} is drawn at random", where=where)
        require_all(written, units, where=where)
        report.end()


@dataclass
class _Slot:
    """A parameter whose values are in memory while it is held, and in the masters otherwise."""

    name: str
    whole: Tensor
    """The parameter without its gradient bookkeeping."""
    start: int
    """Byte offset in the mapping; a multiple of the page size."""
    held: bool
    changed: bool
    """Whether memory is newer than the masters."""
    writes: int = 0


class _Replay(TorchDispatchMode):
    """Watches every operation of a construction, so that parameters take memory only while an operation uses them.

    They share one private mapping, whose pages exist from their first use until they are given back.
    """

    def __init__(self, order: Sequence[tuple[str, int] | None], masters: Masters, report: Report, where: str) -> None:
        """order: name and bytes of each parameter that the first construction has registered; `None` for one without
        a name."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._order = iter(order)
        self._masters, self._report, self._where = masters, report, where
        self._mapping = map_private(sum(whole_pages(due[1]) for due in order if due))
        self._used_nbytes = 0
        self._slots: dict[int, _Slot] = {}  # by storage
        self._held: list[_Slot] = []
        self._moved_from = _Storages()
        self._blank = _Storages()
        """Tensors from `torch.empty` that have not been written to."""

    def register(self, parameter: nn.Parameter) -> nn.Parameter:
        """Called when a module registers a parameter: moves it into the mapping, unless it will have no name."""
        key = storage_of(parameter)
        if key in self._slots or hasattr(parameter, "_left_alone"):
            return parameter
        due = next(self._order, ("", -1))
        if due and due[1] != parameter.nbytes:
            raise ModelError("is not built the same way twice", where=self._where)
        is_dense = torch.empty_like(parameter.data, device="meta").stride() == parameter.stride()
        if due is None or not parameter.numel() or not is_dense:
            parameter.__dict__["_left_alone"] = True
            return parameter
        self._keep_only([])
        is_blank = key in self._blank
        flat = torch.frombuffer(self._mapping, dtype=parameter.dtype, count=parameter.numel(), offset=self._used_nbytes)
        whole = flat.as_strided(parameter.shape, parameter.stride())
        if not is_blank:
            whole.copy_(parameter.data)
        self._moved_from.add(parameter)
        parameter.data = whole
        slot = _Slot(due[0], whole, self._used_nbytes, held=not is_blank, changed=not is_blank)
        self._slots[storage_of(whole)] = slot
        self._held = [slot] if slot.held else []
        self._used_nbytes += whole_pages(due[1])
        return parameter

    def finish(self, model: PreTrainedModel) -> set[str]:
        """Write what has not been written yet; returns the names of all written parameters."""
        self._keep_only([])
        for slot in self._slots.values():
            if not slot.writes:
                self._bring_back(slot)
                self._write(slot)
                self._let_go(slot)
        written = {slot.name for slot in self._slots.values()}
        for name, parameter in model.named_parameters():
            moved = self._slots.get(storage_of(parameter))
            if parameter.is_meta or (moved is not None and moved.name != name):
                whose = f"shares memory with {moved.name}" if moved else "has no value"
                raise ModelError(f"its parameter {name} {whose}", where=self._where)
            if moved is None:
                self._masters.write_master(name, parameter.data)
                written.add(name)
        return written

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        used = {key: self._slots[key] for key in map(storage_of, tensors) if key in self._slots}
        if not used or _is_view(func):
            result = func(*args, **kwargs)
            if func in _EMPTIES:
                self._blank.add(result)
        else:
            self._keep_only(used.values())
            for key, slot in used.items():
                if not slot.held and not _overwrites(func, tensors, key):
                    self._bring_back(slot)
                slot.held = True
            self._held = list(used.values())
            result = func(*args, **kwargs)
        for tensor in written_by(func, args, kwargs):
            key = storage_of(tensor)
            if key in self._slots:
                self._slots[key].changed = True
            elif key in self._moved_from:
                raise ModelError("writes to a parameter's original tensor after registering it", where=self._where)
            else:
                self._blank.discard(tensor)
        return result

    def _keep_only(self, slots: Collection[_Slot]) -> None:
        """Free every other parameter, after writing it to the masters if it has changed."""
        keep = {id(slot) for slot in slots}
        for slot in self._held:
            if id(slot) not in keep:
                if slot.changed:
                    self._write(slot)
                self._let_go(slot)
        self._held = [slot for slot in self._held if slot.held]

    def _bring_back(self, slot: _Slot) -> None:
        if slot.writes:
            slot.whole.copy_(self._masters.master(slot.name))
        else:
            slot.whole.zero_()

    def _let_go(self, slot: _Slot) -> None:
        give_back(self._mapping, slot.start, slot.whole.nbytes)
        slot.held = False

    def _write(self, slot: _Slot) -> None:
        with _disable_current_modes():
            self._masters.write_master(slot.name, slot.whole)
        slot.changed = False
        slot.writes += 1
        if slot.writes <= 2:  # most are written once by their module and once by the model's initialiser
            self._report.add(slot.whole.numel())


class _Storages:
    """A set of storages that keeps none of them alive and recognises a reused address."""

    def __init__(self) -> None:
        self._refs: dict[int, StorageWeakRef] = {}

    def add(self, tensor: Tensor) -> None:
        self._refs = {key: ref for key, ref in self._refs.items() if not ref.expired()}
        self._refs[storage_of(tensor)] = StorageWeakRef(tensor.untyped_storage())

    def discard(self, tensor: Tensor) -> None:
        self._refs.pop(storage_of(tensor), None)

    def __contains__(self, key: int) -> bool:
        return key in self._refs and not self._refs[key].expired()


_aten = torch.ops.aten
_EMPTIES = {_aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default, _aten.new_empty.default}
_OVERWRITES = {_aten.normal_.default, _aten.uniform_.default, _aten.zero_.default, _aten.fill_.Scalar}
"""Operations that overwrite everything in the view that they are given."""


def _overwrites(func: Any, tensors: Sequence[Tensor], key: int) -> bool:
    """Whether an operation overwrites the storage completely."""
    target = tensors[0]
    covers = target.nbytes == target.untyped_storage().nbytes()
    return func in _OVERWRITES and storage_of(target) == key and covers


@cache
def _is_view(func: Any) -> bool:
    """Whether an operation returns a view of its input and reads no values."""
    schema = func._schema
    return not schema.is_mutable and any(returned.alias_info is not None for returned in schema.returns)
