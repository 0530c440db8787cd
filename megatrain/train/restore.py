"""An engine's state out of a checkpoint: by the names of parameters, whatever policy, tiers or precision wrote it.

Masters are float32 in every precision and moments too, so a state goes from `bf16` to `fp32` and back without losing a
bit; what is computed from there on differs, as it does between the two from the first step. What is random in layers
follows from the seed and the number of steps, both of which are part of the state; no generator has any. It leaves out
whether it is right to go on with what has changed since (`megatrain.run.resume`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch import Tensor

from megatrain.checkpoint import Checkpoint
from megatrain.errors import CheckpointError, ModelError
from megatrain.memory import Store
from megatrain.model import Fills, PortedModel, PretrainedSource, Progress
from megatrain.model.mapped_tensors import lazy_zeros
from megatrain.model.weight_sources import in_files_of
from megatrain.optim import AdamW
from megatrain.spec import ModelSpec, Numerics, Policy
from megatrain.spec.model import FileBytes
from megatrain.train.async_save import as_json, versions
from megatrain.train.optimizer_sink import OptimizerSink

ENGINE, CALLER = "engine", "run"
"""The two parts of `training.json`: what the engine needs, and what its caller gave."""

NewMoments = Literal["refuse", "zero"]
"""What becomes of a parameter that trains now and did not when the checkpoint was written."""


def as_saved(
    sink: OptimizerSink,
    numerics: Numerics,
    policy: Policy,
    steps: int,
    seed: int,
    names: list[str],
    training: Mapping[str, Any],
    base: str | None = None,
) -> dict[str, Any]:
    """What of a state is no tensor, and how it came about; beside it a copy of what the caller gave (`training`).

    base: checksum of the frozen base where the checkpoint holds an adapter alone.
    """
    optimizer = sink.optimizer
    facts = {
        "steps": steps,
        "updates": sink.updates,
        "applied": dict(zip(names, sink.applied, strict=True)),
        "seed": seed,
        "precision": numerics.precision,
        "max_grad_norm": sink.max_grad_norm,
        "optimizer": {
            "lr": optimizer.lr,
            "betas": list(optimizer.betas),
            "eps": optimizer.eps,
            "weight_decay": optimizer.weight_decay,
            "no_decay": list(optimizer.no_decay),
            "learning_rates": [list(pair) for pair in optimizer.learning_rates],
        },
        "numerics": as_json(numerics),
        "policy": as_json(policy),
        "versions": versions(),
    }
    return {ENGINE: facts | ({"base": base} if base else {}), CALLER: _as_now(dict(training))}


def facts_in(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """What `as_saved` keeps of the engine. Raises `CheckpointError` for a checkpoint that no engine has written."""
    found = checkpoint.training.get(ENGINE)
    if not isinstance(found, dict) or not {"steps", "updates", "seed"} <= found.keys():
        raise CheckpointError("holds no state of an engine", where=str(checkpoint.folder), fix="go on from another one")
    return found


def optimizer_in(checkpoint: Checkpoint) -> AdamW:
    """The optimizer that wrote it."""
    fields: dict[str, Any] = dict(facts_in(checkpoint)["optimizer"])
    pairs = tuple(map(tuple, fields.get("learning_rates", ())))  # which earlier versions do not have
    more = {"betas": tuple(fields["betas"]), "no_decay": tuple(fields["no_decay"]), "learning_rates": pairs}
    return AdamW(**{**fields, **more})


def fill(source: Fills, store: Store, units: Sequence[Sequence[str]], progress: Progress | None) -> None:
    """Set the masters of these parameters, unit by unit, from a source of all.

    The library reads whole tensors where it puts several together, experts say. Of several ranks each reads those
    itself, what it owns of them, where they lie one behind the other in the files as they are held here.
    """
    ranges: dict[str, tuple[FileBytes, ...]] = {}
    if store.model.ranks > 1:
        names = [name for unit in units for name in unit]
        ranges = {name: of for name, of in in_files_of(source, names, torch.float32).files.items() if len(of) > 1}
    for name, of in ranges.items():
        store.write_master(name, _own_values(store, name, of))
    source.fill(store, [[name for name in unit if name not in ranges] for unit in units], progress)
    store.settle()


def _own_values(store: Store, name: str, of: Sequence[FileBytes]) -> Tensor:
    """The float32 values of a parameter in its shape, of what this rank owns, in memory that the others do not take."""
    unit, field = store.field(name)
    values = lazy_zeros(field.shape, torch.float32)
    memory, at = values.view(-1).view(torch.uint8).numpy(), 0
    own = list(store.owned.within(store.layouts[unit], field.start, field.stop))
    for there in of:
        with open(there.file, "rb", buffering=0) as file:
            for piece in own:
                start = max(4 * (piece.start - field.start), at)
                stop = min(4 * (piece.stop - field.start), at + there.nbytes)
                file.seek(there.place + start - at)
                while start < stop:
                    if not (count := file.readinto(memory[start:stop].data)):
                        raise ModelError("its files end before their tensors do", where=f"parameter {name}")
                    start += count
        at += there.nbytes
    return values


def frozen_in(checkpoint: Checkpoint, names: Iterable[str]) -> list[str]:
    """Of these parameters, those that have no moments."""
    return [name for name in names if name not in checkpoint.moment_shapes]


def read_moments(checkpoint: Checkpoint, store: Store, new: NewMoments = "refuse") -> None:
    """Set what this rank owns of the moments of everything that trains.

    Raises `CheckpointError`, before anything is set, for a parameter whose moments the checkpoint lacks, unless `new`
    says that they begin as zeros, and for moments of another shape.
    """
    spec, there = store.model, checkpoint.moment_shapes
    for param in (param for unit in spec.units for param in unit.params if param.trainable):
        if param.name in there and there[param.name] != param.shape:
            what = f"has moments of shape {list(there[param.name])} for {param.name}, which is {list(param.shape)}"
            raise CheckpointError(what, where=str(checkpoint.folder), fix="go on with the model that it was made from")
        if param.name not in there and new == "refuse":
            fix = "freeze what was frozen, or let their moments begin as zeros"
            raise CheckpointError(f"has no moments of {param.name}", where=str(checkpoint.folder), fix=fix)
    for number, unit in enumerate(spec.units):
        if not any(param.trainable for param in unit.params):
            continue
        state, layout = store.change(number), store.layouts[number]
        for field in layout.trained.fields:
            names = [field.name] if field.name in there else []
            saved = [each.numpy().reshape(-1) for _, *both in checkpoint.moments(names) for each in both]
            for piece in store.owned.within(layout, field.start, field.stop):
                part = slice(piece.start - field.start, piece.stop - field.start)
                for moment, values in zip_longest((state.m, state.v), saved):
                    moment[piece.own] = 0.0 if values is None else values[part]
    store.settle()


def _as_now(value: Any) -> Any:
    """A copy of nested lists and dicts: they are written later, beside a caller who may go on changing them."""
    if isinstance(value, dict):
        return {key: _as_now(each) for key, each in value.items()}
    return [_as_now(each) for each in value] if type(value) is list else value


def refuse_other_base(checkpoint: Checkpoint, base: Callable[[], str]) -> None:
    """Raise `CheckpointError` where a checkpoint of an adapter was written over another base than this checksum's."""
    then = facts_in(checkpoint).get("base")
    if then is not None and then != (now := base()):
        what = f"is of an adapter over another base: its weights sum to {now}, and then it was {then}"
        fix = "go on with the very base that it was trained on, in the precision that it was held in"
        raise CheckpointError(what, where=str(checkpoint.folder), fix=fix)


def refuse_other_model(checkpoint: Checkpoint, spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `CheckpointError` for a checkpoint of a model with these parameters, if they are not those of `spec`."""
    ours = {param.name: param.shape for unit in spec.units for param in unit.params}
    if odd := sorted({*ours.items()} ^ {*shapes.items()}):
        what = f"is of another model: {odd[0][0]} of shape {list(odd[0][1])} is in one of the two alone"
        raise CheckpointError(what, where=str(checkpoint.folder), fix="make an engine with Engine.from_checkpoint")


def weights_in(checkpoint: Checkpoint, ported: PortedModel, trust_remote_code: bool) -> Fills:
    """The masters in a checkpoint of this model: all of them, or where it has an adapter those of that alone.

    Raises `CheckpointError` for a checkpoint of another model, and `ModelError` for that of another adapter.
    """
    if ported.adapter is not None:
        return ported.adapter.file_in(checkpoint.folder, ported.whole())
    source = PretrainedSource(checkpoint.folder, trust_remote_code=trust_remote_code)
    shapes = {name: tuple(parameter.shape) for name, parameter in source.model.named_parameters()}
    refuse_other_model(checkpoint, ported.structure, shapes)
    return source
