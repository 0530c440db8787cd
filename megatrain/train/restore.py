"""Restores an engine's state from a checkpoint by parameter names, whatever policy, tiers or precision wrote it.

Masters and moments are float32 in every precision, so state goes from `bf16` to `fp32` and back without losing a
bit; later results differ as the two precisions do. Randomness in layers follows from the seed and the number of
steps, which are part of the state; no generator has any. `megatrain.run.resume` decides whether resuming is right
if something has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from megatrain.checkpoint.load import Checkpoint
from megatrain.checkpoint.peer_checkpoints import PeerCheckpoint
from megatrain.errors import CheckpointError, ConfigError, ModelError, PlanError, typed_line
from megatrain.memory import Store
from megatrain.memory.unit_state import read_ahead
from megatrain.model import Fills, FreshSource, PortedModel, PretrainedSource, Progress, Source, pretrained_source
from megatrain.model.carried import carried_by
from megatrain.model.weight_sources import Masters, Report, listed
from megatrain.optim import Optimizer, optimizer_from
from megatrain.optim.optimizer import OLDEST
from megatrain.spec import ModelSpec, Numerics, ParamSpec, Part
from megatrain.spec.validate_fields import checked
from megatrain.train.optimizer import StreamedOptimizer
from megatrain.version import __version__

ENGINE, CALLER = "engine", "run"
"""The two parts of `training.json`: the engine's and its caller's."""
BASE, FROZEN = "base", "frozen"
"""The engine's checksum of weights that do not train: of those below an adapter, and of those in the checkpoint."""
LIBRARIES = ("torch", "transformers", "numpy")
"""What numbers depend on besides Python and MegaTrain."""

NewMoments = Literal["refuse", "zero"]
"""Treatment of parameters that train now but did not in the checkpoint."""
ZEROS = (
    "accept that the state starts as zeros (Engine.from_checkpoint with new='zero', or accept_changes=true in a run)"
)
"""What to do if a checkpoint lacks what the optimizer keeps."""


def as_saved(
    streamed: StreamedOptimizer,
    numerics: Numerics,
    steps: int,
    seed: int,
    training: Mapping[str, Any],
    frozen: Mapping[str, str],
) -> dict[str, Any]:
    """The engine's state other than tensors, its versions and settings, and a copy of the caller's `training`.

    frozen: the checksum of the weights that do not train, if there are any, as `base` if the checkpoint has only an
    adapter and as `frozen` if they are in it.
    """
    facts = {
        "steps": steps,
        "updates": streamed.updates,
        "missed": {name: count for version in streamed.versions for name, count in version.missed.items()},
        "seed": seed,
        "max_grad_norm": streamed.max_grad_norm,
        "optimizer": streamed.algorithm.as_json(),
        "numerics": asdict(numerics),
        "versions": {"python": python_version(), "megatrain": __version__}
        | {name: _version_of(name) for name in LIBRARIES},
        **frozen,
    }
    return {ENGINE: facts, CALLER: _as_now(dict(training))}


def _version_of(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:  # of a library that was built in place: no reason to fail a save
        return "unknown"


def facts_in(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The engine's part of `training.json`. Raises `CheckpointError` if no engine wrote the checkpoint, or one of a
    version before the first release."""
    facts = checkpoint.training.get(ENGINE)
    needed = {"steps", "updates", "missed"}
    if not isinstance(checkpoint, PeerCheckpoint):
        needed |= {"numerics", "max_grad_norm"}
    if not isinstance(facts, dict) or not needed <= facts.keys():
        raise CheckpointError("holds no engine state", where=str(checkpoint.folder), fix="resume from another one")
    return facts


def optimizer_in(checkpoint: Checkpoint) -> Optimizer:
    """The optimizer of a checkpoint. Raises `CheckpointError` for one that this version lacks."""
    try:
        return optimizer_from(facts_in(checkpoint)["optimizer"])
    except ConfigError as error:
        what, fix = f"its optimizer cannot go on ({error.what})", "give another optimizer, and new='zero'"
        raise CheckpointError(what, where=str(checkpoint.folder), fix=fix) from error
    except (KeyError, TypeError) as error:
        what = f"its optimizer is of another version ({typed_line(error)})"
        raise CheckpointError(what, where=str(checkpoint.folder), fix="give an optimizer") from error


def options_in(checkpoint: Checkpoint, given: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's numerics and clipping, without what the caller of an engine has `given`; nothing of another
    trainer's. A precision that is given replaces the numerics' own and, if it is another, that of gradients. Raises
    `CheckpointError` for numerics that this version lacks."""
    if isinstance(checkpoint, PeerCheckpoint):
        return {}
    facts, held = facts_in(checkpoint), dict[str, Any]()
    if given.get("numerics") is None:
        saved = dict(facts["numerics"])
        if (precision := given.get("precision")) not in (None, saved.get("precision")):
            saved |= {"precision": precision, "grad_precision": None}
        try:
            held["numerics"] = Numerics(**saved)
        except (PlanError, TypeError) as error:  # a newer version's
            what = f"its numerics are of another version ({error.what if isinstance(error, PlanError) else error})"
            raise CheckpointError(what, where=str(checkpoint.folder), fix="give numerics") from error
    if "max_grad_norm" not in given:
        held["max_grad_norm"] = facts["max_grad_norm"]
    return held


def frozen_in(checkpoint: Checkpoint, names: Iterable[str]) -> list[str]:
    return [name for name in names if name not in checkpoint.moment_shapes]


def refuse_other_state(checkpoint: Checkpoint, model: ModelSpec, optimizer: Optimizer, new: NewMoments) -> None:
    """Raise `CheckpointError` for moments of another shape, and for a parameter without moments of this optimizer,
    unless `new` says that they start as zeros."""
    then, where, shapes = _name_in(checkpoint), str(checkpoint.folder), checkpoint.moment_shapes
    if then != optimizer.NAME and new == "refuse":
        what = f"was trained by {then}, and {optimizer.NAME} cannot go on with its state"
        raise CheckpointError(what, where=where, fix=f"use {then}, or {ZEROS}")
    for param in _trained(model):
        if param.name in shapes and shapes[param.name] != param.shape:
            what = f"has moments of shape {list(shapes[param.name])} for {param.name}, which is {list(param.shape)}"
            raise CheckpointError(what, where=where, fix="use the model that it was made from")
        if not checkpoint.keeps(param.name, param.state) and new == "refuse":
            what, fix = f"has no {' and '.join(param.state)} of {param.name}", "train what it trained, in the same way"
            raise CheckpointError(what, where=where, fix=f"{fix}, or {ZEROS}")


def _name_in(checkpoint: Checkpoint) -> str:
    facts = checkpoint.training.get(ENGINE) or {}
    return str(facts.get("optimizer", {}).get("name", OLDEST))


def _trained(model: ModelSpec) -> Iterator[ParamSpec]:
    return (param for unit in model.units for param in unit.params if param.trainable)


def _goes_on(checkpoint: Checkpoint, optimizer: Optimizer, param: ParamSpec) -> bool:
    """Whether the optimizer goes on with what the checkpoint has of a parameter; otherwise it begins."""
    return _name_in(checkpoint) == optimizer.NAME and checkpoint.keeps(param.name, param.state)


def read_moments(checkpoint: Checkpoint, store: Store, optimizer: Optimizer, new: NewMoments = "refuse") -> None:
    """Load this rank's share of the moments of all trained parameters. Raises as `refuse_other_state` does, before
    anything is set."""
    refuse_other_state(checkpoint, store.model, optimizer, new)
    for write, values in read_ahead(_moments(checkpoint, store, optimizer)):
        write(values)


def _moments(
    checkpoint: Checkpoint, store: Store, optimizer: Optimizer
) -> Iterator[tuple[Callable[[np.ndarray], None], Callable[[], np.ndarray]]]:
    """(write, read) of each range of moments: `write(read())` copies it from the checkpoint to this rank's share."""
    of = {param.name: param for param in _trained(store.model)}
    for unit in store.units:
        for field in unit.layout.trained.fields:
            arrays = of[field.name].state if _goes_on(checkpoint, optimizer, of[field.name]) else ()
            saved = [tensor.numpy().reshape(-1) for tensor in checkpoint.moments(field.name, arrays)]
            for number in range(len(of[field.name].state)):
                for start, begin, end in unit.ranges_of(field, store.owned, Part.MOMENTS, number):
                    read = partial(np.zeros, end - begin, np.float32)
                    if saved:
                        verify = partial(checkpoint.verify_moments, field.name, arrays[number], begin, end)
                        read = partial(_verified, verify, saved[number][begin:end])
                    yield partial(unit.write, Part.MOMENTS, start, number=number), read


def _verified(verify: Callable[[], None], saved: np.ndarray) -> np.ndarray:
    """A copy of values in a mapped file, which `verify` compares with their checksums."""
    verify()
    return saved.copy()


def missed_in(checkpoint: Checkpoint, spec: ModelSpec, optimizer: Optimizer) -> dict[str, int]:
    """Trained parameter -> of the checkpoint's updates, those that it has not had, if any (`UnitVersion.missed`).

    One that did not train then, or by another optimizer, and whose moments start as zeros, has had none.
    """
    facts = facts_in(checkpoint)
    missed: Mapping[str, int] = facts["missed"]
    counts = {
        param.name: missed.get(param.name, 0) if _goes_on(checkpoint, optimizer, param) else facts["updates"]
        for param in _trained(spec)
    }
    return {name: count for name, count in counts.items() if count}


def _as_now(value: Any) -> Any:
    """Copy nested lists and dicts: they are written later, while the caller may change them."""
    if isinstance(value, dict):
        return {key: _as_now(item) for key, item in value.items()}
    return [_as_now(item) for item in value] if type(value) is list else value


def refuse_other_base(checkpoint: Checkpoint, base: Callable[[], str]) -> None:
    """Raise `CheckpointError` if an adapter's checkpoint belongs to a base with another checksum."""
    then = facts_in(checkpoint).get(BASE)
    if then is not None and then != (now := base()):
        what = f"is of an adapter over another base: the checksum of its weights is {now}, but was {then}"
        fix = "use the base that it was trained on, in the same precision"
        raise CheckpointError(what, where=str(checkpoint.folder), fix=fix)


class PeerSource:
    """A model with the masters of another trainer's checkpoint, which holds them by parameter name."""

    def __init__(self, checkpoint: PeerCheckpoint, model: Any) -> None:
        """model: the structure; its buffers are set to the checkpoint's. Raises `CheckpointError` for another model."""
        self.model, self._checkpoint = model, checkpoint
        held, names = {*self._checkpoint.weight_names}, dict[int, list[str]]()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        buffers = dict(model.named_buffers())
        self._names = {aliases[0]: [name for name in aliases if name in held] for aliases in names.values()}
        lacks = [name for name, aliases in self._names.items() if not aliases]
        odd = held - {name for aliases in names.values() for name in aliases} - buffers.keys()
        if lacks or odd:
            what = f"it lacks {listed(lacks)}" if lacks else f"only it has {listed(sorted(odd))}"
            raise self._checkpoint.error(f"is of another model: {what}", "give its own model (model.path)")
        for name in held & buffers.keys():
            if (value := self._checkpoint.weight(name)) is not None and not buffers[name].is_meta:
                buffers[name].copy_(value)

    def fill(self, masters: Masters, units: Sequence[Sequence[str]], progress: Progress | None = None) -> None:
        """Write every parameter of every unit (see `Source`)."""
        parameters = dict(self.model.named_parameters())
        report = Report(progress, sum(parameters[name].numel() for unit in units for name in unit))
        for name in (name for unit in units for name in unit):
            value = self._checkpoint.weight(self._names[name][0])
            if value is None or value.shape != parameters[name].shape:
                what = f"its {name} is not of the shape {list(parameters[name].shape)}"
                raise self._checkpoint.error(what, "give its own model (model.path)")
            masters.write_master(name, value.to(torch.float32, copy=True))
            report.add(value.numel())
        report.end()


def source_in(checkpoint: Checkpoint, given: Source | None, *, attention: str, trust_remote_code: bool) -> Source:
    """The model and the masters in a checkpoint.

    given: the checkpoint as a source, or a source of another trainer's model, if there is one; otherwise the model is
    that of the checkpoint's folder. Raises `CheckpointError` if that does not tell its structure.
    """
    options: dict[str, Any] = {"attention": attention, "trust_remote_code": trust_remote_code}
    if not isinstance(checkpoint, PeerCheckpoint):
        return given or pretrained_source(checkpoint.folder, **options)
    source, config = given, checkpoint.folder / "config.json"
    if checkpoint.holds_masters and not isinstance(source, PeerSource):
        if source is None and not config.is_file():
            fix = "give source=PretrainedSource(MODEL), or `resume` and `model.path` to megatrain train"
            raise CheckpointError("holds no config.json", where=str(checkpoint.folder), fix=fix)
        source = PeerSource(checkpoint, (source or FreshSource(config, 0, **options)).model)
    source = source or pretrained_source(checkpoint.folder, **options)
    if not checkpoint.knows_names:
        checkpoint.name_parameters(source.model)
    return source


def refuse_unknown(name: str, spec: ModelSpec, where: str) -> None:
    """Raise `ModelError` unless a parameter is called that."""
    names = [param.name for unit in spec.units for param in unit.params]
    if name not in names:
        near = get_close_matches(str(name), names, n=1, cutoff=0.0)
        raise ModelError(f"no parameter is called {name!r}", where=where, fix=f"did you mean {near[0]!r}?")


def refuse_other_shapes(weights: Mapping[str, Tensor], spec: ModelSpec) -> None:
    """Raise `ModelError` for weights that are not parameters of the model, in its shapes."""
    checked(weights, Mapping, ModelError, "weights.update")
    shapes, where = {param.name: param.shape for unit in spec.units for param in unit.params}, f"model {spec.name}"
    for name, value in weights.items():
        if not isinstance(value, Tensor) or value.is_meta:
            what = "has no values (meta device)" if isinstance(value, Tensor) else f"is a {type(value).__name__}"
            raise ModelError(f"the new {name} {what}", where=where, fix="give a tensor")
        if tuple(value.shape) != shapes.get(name):
            near = get_close_matches(str(name), shapes, n=1, cutoff=0.0)
            fix = f"it has {list(shapes[name])}" if name in shapes else f"did you mean {near[0]!r}?"
            raise ModelError(f"has no parameter {name} of shape {list(value.shape)}", where=where, fix=fix)


def weights_in(checkpoint: Checkpoint, ported: PortedModel) -> Fills:
    """The masters in a checkpoint of this model: all of them, or only the adapter's if it has one.

    Raises `CheckpointError` for a checkpoint of another model, and `ModelError` for another adapter's.
    """
    if isinstance(checkpoint, PeerCheckpoint):
        whole, units = ported.whole(), ported.structure.units
        trained = {param.name for unit in units for param in unit.params if param.trainable}
        checkpoint.name_parameters(whole, trained)
        if checkpoint.holds_masters:
            return PeerSource(checkpoint, whole)
    if ported.adapter is not None:
        return ported.adapter.file_in(checkpoint.folder, ported.whole())
    fix = "make an engine with Engine.from_checkpoint"
    try:  # no config need name the model's class, nor its changes
        source = PretrainedSource(checkpoint.folder, structure=ported.whole().float())
    except ModelError as error:
        raise CheckpointError(f"is of another model: {error.what}", where=str(checkpoint.folder), fix=fix) from error
    ours = {param.name for unit in ported.structure.units for param in unit.params}
    unread = sorted({*source.unexpected} - {tensor.name for tensor in carried_by(ported.skeleton).tensors})
    if odd := unread or sorted({name for name, _ in source.model.named_parameters()} - ours):  # untied
        what = f"is of another model: only it has {listed(odd)}"
        raise CheckpointError(what, where=str(checkpoint.folder), fix=fix)
    return source
